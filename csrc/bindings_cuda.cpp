// Python sees pointers and strides as integers (`tensor.data_ptr()`); a stream is
// `torch.cuda.current_stream().cuda_stream`. Each op registers itself in its own block: keep them in alphabetical order
// of their files.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/graph.h"
#include "cuda/launch.h"
#include "cuda/linear.h"

namespace py = pybind11;
using namespace nibblelm::cuda;

void bind_ops(py::module_& m);  // bindings_cuda_ops.cpp

namespace {

template <typename T = void>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of NibbleLM: raw pointers, sizes and a stream";
  m.attr("DTYPES") = py::make_tuple("float32", "float16", "bfloat16", "int8");

  bind_ops(m);

  // ---- graph ----
  m.def("graph_nodes", [](std::uintptr_t graph) { return graph_nodes(pointer(graph)); });

  // ---- linear ----
  py::class_<LinearWeight>(m, "LinearWeight")
      .def(py::init([](std::uintptr_t data, std::uintptr_t records, int format, int n, int k, std::int64_t pitch,
                       int group_size, int scale_dtype, bool has_zero, bool has_minimum) {
             return LinearWeight{
                 pointer(data), pointer(records), static_cast<WeightFormat>(format), n,        k,
                 pitch,         group_size,       static_cast<DType>(scale_dtype),   has_zero, has_minimum};
           }),
           py::arg("data"), py::arg("records"), py::arg("format"), py::arg("n"), py::arg("k"), py::arg("pitch"),
           py::arg("group_size"), py::arg("scale_dtype"), py::arg("has_zero"), py::arg("has_minimum"))
      .def_property_readonly("groups", &LinearWeight::groups)
      .def_property_readonly("strips", &LinearWeight::strips)
      .def_property_readonly("steps", &LinearWeight::steps);
  m.attr("WEIGHT_FORMATS") = py::make_tuple("int4", "int8", "float16", "bfloat16", "float32");
  m.attr("MAX_DECODE_ROWS") = kMaxDecodeRows;
  m.attr("MAX_NORM_COLUMNS") = kMaxNormColumns;
  m.def("linear_workspace", [](const LinearWeight& weight, std::uintptr_t x, std::int64_t x_stride, int x_dtype,
                               int rows, bool eight_bits) {
    return linear_workspace(weight, pointer(x), x_stride, static_cast<DType>(x_dtype), rows, eight_bits);
  });
  py::class_<LinearStep>(m, "LinearStep")
      .def(
          py::init([](const LinearWeight& weight, std::uintptr_t x, std::int64_t x_stride, int x_dtype,
                      std::uintptr_t y, std::int64_t y_stride, int y_dtype, std::uintptr_t bias, int rows,
                      bool eight_bits, bool mma_sync, std::uintptr_t workspace, std::uintptr_t arrivals,
                      std::uintptr_t gain, std::uintptr_t gain_bias, std::uintptr_t post_gain, std::uintptr_t residual,
                      std::uintptr_t addend, std::uintptr_t h, std::int64_t residual_stride, std::int64_t addend_stride,
                      float eps, float post_eps, bool plus_one, bool centres, int gate, int after) {
            LinearStep step{weight, {}};
            LinearArgs& a = step.args;
            a.x = pointer(x), a.x_stride = x_stride, a.x_dtype = static_cast<DType>(x_dtype);
            a.y = pointer(y), a.y_stride = y_stride, a.y_dtype = static_cast<DType>(y_dtype);
            a.bias = pointer<float>(bias), a.m = rows, a.eight_bits = eight_bits, a.mma_sync = mma_sync;
            a.workspace = pointer(workspace), a.arrivals = pointer<int>(arrivals);
            a.gain = pointer<float>(gain), a.gain_bias = pointer<float>(gain_bias);
            a.post_gain = pointer<float>(post_gain), a.residual = pointer(residual), a.addend = pointer(addend);
            a.h = pointer(h), a.residual_stride = residual_stride, a.addend_stride = addend_stride;
            a.eps = eps, a.post_eps = post_eps, a.plus_one = plus_one, a.centres = centres;
            a.gate = static_cast<Gate>(gate), a.after = static_cast<After>(after);
            return step;
          }),
          py::kw_only(), py::arg("weight"), py::arg("x"), py::arg("x_stride"), py::arg("x_dtype"), py::arg("y"),
          py::arg("y_stride"), py::arg("y_dtype"), py::arg("bias"), py::arg("rows"), py::arg("eight_bits"),
          py::arg("mma_sync"), py::arg("workspace"), py::arg("arrivals"), py::arg("gain") = 0, py::arg("gain_bias") = 0,
          py::arg("post_gain") = 0, py::arg("residual") = 0, py::arg("addend") = 0, py::arg("h") = 0,
          py::arg("residual_stride") = 0, py::arg("addend_stride") = 0, py::arg("eps") = 0.0f,
          py::arg("post_eps") = 0.0f, py::arg("plus_one") = false, py::arg("centres") = false, py::arg("gate") = 0,
          py::arg("after") = 0);
  m.def("linear", [](const std::vector<LinearStep>& steps, std::uintptr_t stream, bool programmatic) {
    linear(steps, {pointer(stream), programmatic});
  });
  m.def("linear_pack", [](const LinearWeight& weight, std::uintptr_t codes, std::int64_t words, std::uintptr_t data,
                          std::uintptr_t stream) {
    linear_pack(weight, pointer(codes), words, pointer(data), {pointer(stream), false});
  });
}
