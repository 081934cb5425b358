#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "cpu/quantize.h"

namespace py = pybind11;
namespace {

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// Torch dtype name without "torch.". Anything else than the three is refused by the caller.
nibblelm::FloatType float_type(const std::string& name) {
  if (name == "float32") return nibblelm::FloatType::fp32;
  if (name == "bfloat16") return nibblelm::FloatType::bf16;
  if (name == "float16") return nibblelm::FloatType::fp16;
  throw py::value_error("weights must be float32, bfloat16 or float16, got " + name);
}

void bind_quantize(py::module_& m) {
  m.def("quantize_rows", [](uintptr_t weights, const std::string& dtype, int64_t rows, int64_t cols, int bits,
                            int64_t group, bool symmetric, bool search, uintptr_t codes, uintptr_t scales,
                            uintptr_t zeros, uintptr_t squared_error, uintptr_t squared_norm, int threads) {
    const nibblelm::QuantizeScheme scheme{bits, group, symmetric, search, float_type(dtype)};
    const nibblelm::QuantizedRows out{static_cast<uint32_t*>(pointer(codes)), pointer(scales),
                                      static_cast<uint8_t*>(pointer(zeros)),
                                      static_cast<double*>(pointer(squared_error)),
                                      static_cast<double*>(pointer(squared_norm))};
    const py::gil_scoped_release unlocked;
    return nibblelm::quantize_rows(pointer(weights), rows, cols, scheme, out, threads);
  });
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of NibbleLM";
  bind_quantize(m);
}
