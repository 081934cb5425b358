// rms_norm and layer_norm with fused residual add: launchers.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// Rows are (M, heads, columns): row r starts at (r / heads) * stride + (r % heads) * columns.
struct NormArgs {
  const void* x;
  const void* residual;  // or null; then h is not written
  const float* weight;   // (columns,)
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
};

constexpr int kNormHeld{4};  // 16-byte groups of a row that a thread holds at most

// Threads that share a row of so many 16-byte groups: thread t takes groups t, t + threads, ... A function of the
// columns alone, so a row's sum has one order whatever the number of rows. 0: the row is too long to be held.
inline int norm_threads(int vectors) {
  if (vectors > 1024 * kNormHeld) return 0;
  const int held = vectors >= 512 ? kNormHeld : 2;
  return vectors <= 64 ? 32 : (vectors + held * 32 - 1) / (held * 32) * 32;
}

void rms_norm(const NormArgs& args, DType dtype, const Launch& launch);
void layer_norm(const NormArgs& args, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
