// Python sees pointers and strides as integers (`tensor.data_ptr()`); a stream is
// `torch.cuda.current_stream().cuda_stream`. Each op registers itself in its own block: keep them in alphabetical order
// of their files.
#include <pybind11/pybind11.h>

#include "cuda/launch.h"
#include "cuda/linear.h"

namespace py = pybind11;
using namespace nibblelm::cuda;

namespace {

template <typename T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of NibbleLM: raw pointers, sizes and a stream";
  m.attr("DTYPES") = py::make_tuple("float32", "float16", "bfloat16");

  // ---- linear ----
}
