// Logits with minus infinity where a token is not allowed.
#include <algorithm>

#include "mask_logits.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};

// A warp reads one word of the mask for its 32 columns.
__global__ void mask_logits_kernel(const float* x, const uint32_t* mask, float* y, int64_t columns, int64_t x_stride) {
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.y, column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= columns) return;
  const uint32_t word = mask[row * ((columns + 31) / 32) + column / 32];
  y[row * columns + column] = word >> (column % 32) & 1 ? x[row * x_stride + column] : -INFINITY;
}

}  // namespace

void mask_logits(const float* x, const uint32_t* mask, float* y, int64_t rows, int64_t columns, int64_t x_stride,
                 const Launch& launch) {
  constexpr int64_t kGridRows{65535};
  const auto what = [&] { return "mask_logits rows=" + std::to_string(rows) + " columns=" + std::to_string(columns); };
  const int64_t words = (columns + 31) / 32;
  for (int64_t first = 0; first < rows; first += kGridRows) {
    const int count = static_cast<int>(std::min(kGridRows, rows - first));
    launch_kernel(launch, what, mask_logits_kernel, dim3(ceil_div(columns, kThreads), count), dim3(kThreads), 0,
                  x + first * x_stride, mask + first * words, y + first * columns, columns, x_stride);
  }
}

}  // namespace nibblelm::cuda
