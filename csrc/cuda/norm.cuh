// One kernel for both norms: a row is read once, kept in shared memory as fp32, and written once.
#pragma once

#include <algorithm>
#include <string>

#include "norm.h"
#include "vector.cuh"

namespace nibblelm::cuda {

constexpr int kMaxNormColumns{49152};  // fp32 row within the 227 KB of one block
constexpr int kNormRowsPerBlock{8};    // for rows so short that one warp takes a row
constexpr int kNormShortVectors{64};   // 16-byte accesses of such a row at most

// The sum over the threads of one row: a warp (scratch unused) or the block.
__device__ __forceinline__ float row_sum(float x, float* scratch) {
  return blockDim.x == kWarp ? warp_sum(x) : block_sum(x, scratch);
}

// blockDim.x threads take a row, blockDim.y rows a block (more than one only with one warp each).
// kCentre subtracts the mean (LayerNorm). Dynamic shared memory: blockDim.y * columns floats.
template <class T, int V, bool kCentre>
__global__ void norm_kernel(NormArgs a) {
  extern __shared__ __align__(16) float rows[];
  __shared__ float scratch[kWarp];
  dependency_wait();
  dependency_release();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.rows) return;
  float* const cache = rows + static_cast<int64_t>(threadIdx.y) * a.columns;
  const int64_t head = row % a.heads * a.columns, m = row / a.heads;
  const T* const x = static_cast<const T*>(a.x) + m * a.x_stride + head;
  const T* const residual = static_cast<const T*>(a.residual) + m * a.residual_stride + head;
  T* const y = static_cast<T*>(a.y) + row * a.columns;
  T* const h = static_cast<T*>(a.h) + row * a.columns;

  float sum = 0.0f;
  for (int c = threadIdx.x * V; c < a.columns; c += blockDim.x * V) {
    float v[V];
    load(x + c, v);
    if (a.residual != nullptr) {
      float r[V];
      load(residual + c, r);
#pragma unroll
      // The sum is normed as it is stored: rounded to the activations' type.
      for (int i = 0; i < V; ++i) v[i] = to_float(from_float<T>(v[i] + r[i]));
      store(h + c, v);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      cache[c + i] = v[i];
      sum += kCentre ? v[i] : v[i] * v[i];
    }
  }
  sum = row_sum(sum, scratch);
  float mean = 0.0f;
  if constexpr (kCentre) {
    if (blockDim.x > kWarp) __syncthreads();  // scratch is free again
    mean = sum / static_cast<float>(a.columns);
    sum = 0.0f;
    for (int c = threadIdx.x * V; c < a.columns; c += blockDim.x * V) {
#pragma unroll
      for (int i = 0; i < V; ++i) sum += (cache[c + i] - mean) * (cache[c + i] - mean);
    }
    sum = row_sum(sum, scratch);
  }
  const float factor = rsqrtf(sum / static_cast<float>(a.columns) + a.eps);
  for (int c = threadIdx.x * V; c < a.columns; c += blockDim.x * V) {
    float w[V], v[V], b[V] = {};
    load(a.weight + c, w);
    if (a.bias != nullptr) load(a.bias + c, b);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float gain = a.plus_one ? 1.0f + w[i] : w[i];
      v[i] = (cache[c + i] - mean) * factor * gain + b[i];
    }
    store(y + c, v);
  }
}

// The block depends on the columns alone, so a row's sum has one order whatever the number of rows.
template <class T, bool kCentre>
void launch_norm(const NormArgs& a, DType dtype, const char* op, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] {
    return std::string(op) + " rows=" + std::to_string(a.rows) + " columns=" + std::to_string(a.columns) + " " +
           name(dtype);
  };
  if (a.columns > kMaxNormColumns) throw std::invalid_argument(what() + ": at most 49152 columns");
  constexpr int kV{kWide<T>};
  const int64_t row_bytes = a.columns * sizeof(T);
  const bool wide = aligned16(a.x, a.x_stride * sizeof(T)) && aligned16(a.residual, a.residual_stride * sizeof(T)) &&
                    aligned16(a.y, row_bytes) && aligned16(a.h, row_bytes) && aligned16(a.weight, 0) &&
                    aligned16(a.bias, 0);
  const bool one_warp = ceil_div(a.columns, kV) <= kNormShortVectors;
  const int threads = std::min(1024, ceil_div(a.columns, (wide ? kV : 1) * kWarp) * kWarp);
  const dim3 block = one_warp ? dim3(kWarp, kNormRowsPerBlock) : dim3(threads);
  const size_t shared = sizeof(float) * block.y * a.columns;
  launch_kernel(launch, what, wide ? norm_kernel<T, kV, kCentre> : norm_kernel<T, 1, kCentre>,
                dim3(ceil_div(a.rows, block.y)), block, shared, a);
}

}  // namespace nibblelm::cuda
