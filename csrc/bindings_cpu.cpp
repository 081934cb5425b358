// The only CPU file that sees Python. Tensors arrive as addresses, sizes and strides (in elements), already checked
// by runtime/ops/cpu.py; the GIL is released while kernels run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "cpu/panels.h"
#include "cpu/poll.h"
#include "cpu/program.h"
#include "cpu/quantize.h"
#include "cpu/team.h"
#include "page.h"

namespace py = pybind11;
namespace {

using nibblelm::Kernels;
using nibblelm::Program;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Torch dtype name without "torch.". Anything else than the three is refused by the caller.
nibblelm::FloatType float_type(const std::string& name) {
  if (name == "float32") return nibblelm::FloatType::fp32;
  if (name == "bfloat16") return nibblelm::FloatType::bf16;
  if (name == "float16") return nibblelm::FloatType::fp16;
  throw py::value_error("weights must be float32, bfloat16 or float16, got " + name);
}

nibblelm::DType dtype(const std::string& name) {
  switch (float_type(name)) {
    case nibblelm::FloatType::fp32:
      return nibblelm::DType::fp32;
    case nibblelm::FloatType::bf16:
      return nibblelm::DType::bf16;
    default:
      return nibblelm::DType::fp16;
  }
}

void bind_quantize(py::module_& m) {
  m.def("quantize_rows",
        [](uintptr_t weights, const std::string& weight_dtype, const std::string& scale_dtype, int64_t rows,
           int64_t cols, int bits, int64_t group, bool symmetric, bool search, uintptr_t codes, uintptr_t scales,
           uintptr_t zeros, uintptr_t squared_error, uintptr_t squared_norm, int threads) {
          const nibblelm::QuantizeScheme scheme{
              bits, group, symmetric, search, float_type(weight_dtype), float_type(scale_dtype)};
          const nibblelm::QuantizedRows out{pointer<uint32_t>(codes), pointer(scales), pointer<uint8_t>(zeros),
                                            pointer<double>(squared_error), pointer<double>(squared_norm)};
          const py::gil_scoped_release unlocked;
          return nibblelm::quantize_rows(pointer(weights), rows, cols, scheme, out, threads);
        });
}

void bind_team(py::module_& m) {
  m.def("keep_freed_memory", nibblelm::keep_freed_memory);
  m.def("set_threads", nibblelm::set_threads, Unlocked());
  m.def("threads", nibblelm::threads, Unlocked());
  m.def("usable_cores", nibblelm::usable_cores);
  m.def("readable_within", nibblelm::readable_within, Unlocked());
  m.def("isa", nibblelm::isa);
  m.def("available_isas", nibblelm::available_isas);
  m.def("set_isa", nibblelm::set_isa);
  py::class_<Program>(m, "Program")
      .def(py::init<>())
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("__len__", &Program::size)
      .def("replay", &Program::replay, Unlocked());
}

// (codes, scale, zero or 0, minimum or 0, n)
using QuantizedPart = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t>;

nibblelm::QuantizedRowMajor row_major(const QuantizedPart& part, int64_t k, int64_t group, int bits,
                                      const std::string& scale_type) {
  const auto& [codes, scale, zero, minimum, n] = part;
  return {pointer<uint32_t>(codes), pointer(scale), pointer<uint32_t>(zero), pointer(minimum), n, k,
          group == -1 ? k : group,  bits,           dtype(scale_type)};
}

void bind_panels(py::module_& m) {
  using nibblelm::FullPanels;
  using nibblelm::QuantizedPanels;
  py::class_<QuantizedPanels>(m, "QuantizedPanels").def_property_readonly("nbytes", &QuantizedPanels::bytes);
  py::class_<FullPanels>(m, "FullPanels").def_property_readonly("nbytes", &FullPanels::bytes);

  m.def("pack_quantized",
        [](const std::vector<QuantizedPart>& parts, int64_t k, int64_t group, int bits, const std::string& scale_type) {
          std::vector<nibblelm::QuantizedRowMajor> sources;
          for (const auto& part : parts) sources.push_back(row_major(part, k, group, bits, scale_type));
          const py::gil_scoped_release unlocked;
          return nibblelm::pack_quantized(sources);
        });
  m.def("pack_full", [](const std::vector<std::pair<uintptr_t, int64_t>>& parts, int64_t k, const std::string& type) {
    std::vector<nibblelm::FullRowMajor> sources;
    for (const auto& [values, n] : parts) sources.push_back({pointer(values), n});
    const nibblelm::DType as = dtype(type);
    const py::gil_scoped_release unlocked;
    return nibblelm::pack_full(sources, k, as);
  });
}

void bind_linear(py::module_& m) {
  m.def(
      "quantized_linear",
      [](const nibblelm::QuantizedPanels& weight, uintptr_t x, uintptr_t bias, uintptr_t out, int64_t rows,
         int64_t x_stride, int64_t out_stride, int digits, int form, bool gated) {
        Program::run(&Kernels::quantized_linear,
                     {&weight,
                      pointer<float>(x),
                      pointer<float>(bias),
                      pointer<float>(out),
                      rows,
                      x_stride,
                      out_stride,
                      digits,
                      {static_cast<nibblelm::Activation>(form < 0 ? 0 : form), form >= 0, gated}});
      },
      Unlocked());
  m.def(
      "full_linear",
      [](const nibblelm::FullPanels& weight, uintptr_t x, uintptr_t bias, uintptr_t out, int64_t rows, int64_t x_stride,
         int64_t out_stride) {
        Program::run(&Kernels::full_linear, {&weight, pointer<float>(x), pointer<float>(bias), pointer<float>(out),
                                             rows, x_stride, out_stride});
      },
      Unlocked());
}

void bind_layer_ops(py::module_& m) {
  m.def(
      "rms_norm",
      [](uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, uintptr_t sum, int64_t rows, int64_t heads,
         int64_t width, int64_t x_stride, int64_t residual_stride, int64_t out_stride, float eps, bool plus_one) {
        Program::run(&Kernels::rms_norm,
                     {pointer<float>(x), pointer<float>(residual), pointer<float>(weight), pointer<float>(out),
                      pointer<float>(sum), rows, heads, width, x_stride, residual_stride, out_stride, eps, plus_one});
      },
      Unlocked());
  m.def(
      "rope",
      [](uintptr_t x, uintptr_t positions, uintptr_t cos, uintptr_t sin, int64_t rows, int64_t heads, int64_t width,
         int64_t x_stride, int64_t half, int64_t capacity, bool interleaved) {
        Program::run(&Kernels::rope, {pointer<float>(x), pointer<int32_t>(positions), pointer<float>(cos),
                                      pointer<float>(sin), rows, heads, width, x_stride, half, capacity, interleaved});
      },
      Unlocked());
  m.def(
      "layer_norm",
      [](uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t out, uintptr_t sum, int64_t rows,
         int64_t heads, int64_t width, int64_t x_stride, int64_t residual_stride, float eps, bool per_head) {
        Program::run(&Kernels::layer_norm, {pointer<float>(x), pointer<float>(residual), pointer<float>(weight),
                                            pointer<float>(bias), pointer<float>(out), pointer<float>(sum), rows, heads,
                                            width, x_stride, residual_stride, eps, per_head});
      },
      Unlocked());
  m.def(
      "add",
      [](uintptr_t x, uintptr_t y, uintptr_t out, int64_t rows, int64_t width, int64_t x_stride, int64_t y_stride) {
        Program::run(&Kernels::add,
                     {pointer<float>(x), pointer<float>(y), pointer<float>(out), rows, width, x_stride, y_stride});
      },
      Unlocked());
  m.def(
      "activate",
      [](uintptr_t x, uintptr_t out, int64_t rows, int64_t width, int64_t stride, int form, bool gated, float cap) {
        Program::run(&Kernels::activate, {pointer<float>(x), pointer<float>(out), rows, width, stride,
                                          static_cast<nibblelm::Activation>(form), gated, cap});
      },
      Unlocked());
}

void bind_attention(py::module_& m) {
  using nibblelm::KvCache;
  py::class_<KvCache>(m, "KvCache")
      .def(py::init([](uintptr_t k, uintptr_t v, uintptr_t k_scales, uintptr_t v_scales, uintptr_t tables,
                       int64_t pages, int64_t slots, int64_t table_width, int64_t heads, int64_t width, int64_t bytes) {
             return KvCache{pointer(k),
                            pointer(v),
                            pointer<float>(k_scales),
                            pointer<float>(v_scales),
                            pointer<int32_t>(tables),
                            pages,
                            slots,
                            table_width,
                            heads,
                            width,
                            bytes};
           }),
           py::kw_only(), py::arg("k"), py::arg("v"), py::arg("k_scales"), py::arg("v_scales"), py::arg("tables"),
           py::arg("pages"), py::arg("slots"), py::arg("table_width"), py::arg("heads"), py::arg("width"),
           py::arg("bytes"));
  m.def(
      "kv_append",
      [](uintptr_t k, uintptr_t v, const KvCache& cache, uintptr_t slots, uintptr_t positions, int64_t rows,
         int64_t k_stride, int64_t v_stride) {
        Program::run(&Kernels::kv_append, {pointer<float>(k), pointer<float>(v), cache, pointer<int32_t>(slots),
                                           pointer<int32_t>(positions), rows, k_stride, v_stride});
      },
      Unlocked());
  m.def(
      "attention",
      [](uintptr_t q, const KvCache& cache, uintptr_t slots, uintptr_t positions, uintptr_t out, int64_t rows,
         int64_t heads, int64_t q_stride, int64_t window, float scale, float softcap, uintptr_t slopes,
         uintptr_t prefix, uintptr_t starts, uintptr_t mask, int64_t mask_stride, int64_t mask_columns) {
        Program::run(&Kernels::attention, {pointer<float>(q), cache, pointer<int32_t>(slots),
                                           pointer<int32_t>(positions), pointer<float>(out), rows, heads, q_stride,
                                           window, scale, softcap, pointer<float>(slopes), pointer<int32_t>(prefix),
                                           pointer<int32_t>(starts), pointer<float>(mask), mask_stride, mask_columns});
      },
      Unlocked());
}

void bind_row_ops(py::module_& m) {
  m.def("embedding_full", [](uintptr_t ids, uintptr_t out, int64_t count, float multiplier, uintptr_t table,
                             int64_t rows, int64_t width, const std::string& type) {
    const nibblelm::DType as = dtype(type);
    const py::gil_scoped_release unlocked;
    Program::run(&Kernels::embedding,
                 {pointer<int32_t>(ids), pointer<float>(out), count, rows, width, multiplier, pointer(table), as, {}});
  });
  m.def("embedding_quantized",
        [](uintptr_t ids, uintptr_t out, int64_t count, float multiplier, const QuantizedPart& table, int64_t k,
           int64_t group, int bits, const std::string& scale_type) {
          const auto quantized = row_major(table, k, group, bits, scale_type);
          const py::gil_scoped_release unlocked;
          Program::run(&Kernels::embedding, {pointer<int32_t>(ids), pointer<float>(out), count, quantized.n, k,
                                             multiplier, nullptr, nibblelm::DType::fp32, quantized});
        });
  const auto bind_rows = [&m](const char* name, void (*Kernels::*kernel)(const nibblelm::RowsArgs&)) {
    m.def(
        name,
        [kernel](uintptr_t x, uintptr_t out, int64_t rows, int64_t columns, int64_t stride) {
          Program::run(kernel, nibblelm::RowsArgs{pointer<float>(x), pointer<float>(out), rows, columns, stride});
        },
        Unlocked());
  };
  bind_rows("softmax", &Kernels::softmax);
  bind_rows("log_softmax", &Kernels::log_softmax);
  m.def(
      "argmax",
      [](uintptr_t x, uintptr_t out, int64_t rows, int64_t columns, int64_t stride) {
        Program::run(&Kernels::argmax, {pointer<float>(x), pointer<int32_t>(out), rows, columns, stride});
      },
      Unlocked());
  m.def(
      "mask_logits",
      [](uintptr_t x, uintptr_t mask, uintptr_t out, int64_t rows, int64_t columns, int64_t stride) {
        Program::run(&Kernels::mask_logits, {pointer<float>(x), pointer<uint32_t>(mask), pointer<float>(out), rows,
                                             columns, stride, (columns + 31) / 32});
      },
      Unlocked());
}

// For benchmarks: what the machine can do at best.
void bind_limits(py::module_& m) {
  m.def(
      "read_memory",
      [](uintptr_t memory, int64_t bytes) { Program::run(&Kernels::read_memory, {pointer(memory), bytes}); },
      Unlocked());
  m.def(
      "multiply_bytes",
      [](int64_t items, int64_t steps) {
        double products = 0;
        const auto lock = nibblelm::lock_team();  // not recorded: a replay would write to this frame
        nibblelm::kernels().multiply_bytes({items, steps, &products});
        return products;
      },
      Unlocked());
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of NibbleLM";
  m.attr("PAGE") = nibblelm::kPage;
  bind_quantize(m);
  bind_team(m);
  bind_panels(m);
  bind_linear(m);
  bind_layer_ops(m);
  bind_attention(m);
  bind_row_ops(m);
  bind_limits(m);
}
