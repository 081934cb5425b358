// rms_norm and layer_norm with fused residual add: launchers.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// Rows are (M, heads, columns): row r starts at (r / heads) * stride + (r % heads) * columns.
struct NormArgs {
  const void* x;
  const void* residual;  // or null; then h is not written
  const float* weight;   // (columns,), or per_head (heads, columns)
  const float* bias;     // (columns,) or null
  void* y;               // (rows, columns), contiguous
  void* h;               // x + residual, (rows, columns), contiguous
  int64_t x_stride;
  int64_t residual_stride;
  int64_t rows;
  int heads;
  int columns;
  float eps;
  bool plus_one;  // multiply by 1 + weight
  bool per_head;
};

void rms_norm(const NormArgs& args, DType dtype, const Launch& launch);
void layer_norm(const NormArgs& args, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
