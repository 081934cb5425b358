#include <pybind11/pybind11.h>

PYBIND11_MODULE(_cpu, m) { m.doc() = "CPU kernels of NibbleLM"; }
