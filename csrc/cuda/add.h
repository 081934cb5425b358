// Sum of two (rows, columns) tensors: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// Rows of x and y start their strides apart; out is contiguous. Rounded once.
void add(const void* x, const void* y, void* out, int64_t rows, int64_t columns, int64_t x_stride, int64_t y_stride,
         DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
