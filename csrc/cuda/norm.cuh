// One kernel for both norms: a row is read once into registers and written once. Rows too long for that are read again.
#pragma once

#include <algorithm>
#include <string>

#include "norm.h"
#include "norm_sum.cuh"
#include "vector.cuh"

namespace nibblelm::cuda {

constexpr int kNormMaxThreads{1024};
constexpr int kNormRowsPerBlock{8};   // for rows so short that one warp takes a row
constexpr int kNormShortVectors{64};  // 16-byte accesses of such a row at most
constexpr int kNormMaxSteps{256};     // of a row, or of the short rows of a block

// The sum over a row whose threads (a warp, or the block) hold kHeld groups each: group i * blockDim.x + threadIdx.x is
// the i-th. `scratch` is the row's own.
template <int kHeld>
__device__ __forceinline__ float row_sum(float (&groups)[kHeld], float* scratch) {
  const int steps = static_cast<int>(blockDim.x) / kNormLanes;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const float sum = norm_step_sum(groups[i]);
    if (threadIdx.x % kNormLanes == 0) scratch[i * steps + threadIdx.x / kNormLanes] = sum;
  }
  if (blockDim.x == kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  return norm_row_sum(scratch, kHeld * steps);
}

// What a row is normed with: (x - mean) * factor.
struct RowStatistics {
  float mean;
  float factor;
};

// Of a row of `columns` values, of which a thread holds groups i * blockDim.x + threadIdx.x as row_sum() has them,
// filled up with zeros. Two scratches of the row's own.
template <bool kCentre, int V, int kHeld>
__device__ __forceinline__ RowStatistics statistics(const float (&v)[kHeld][V], int columns, float eps, float* scratch,
                                                    float* second) {
  const float count = static_cast<float>(columns);
  float mean = 0.0f, sums[kHeld]{};
  if constexpr (kCentre) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int j = 0; j < V; ++j) sums[i] += v[i][j];
    mean = row_sum(sums, scratch) / count;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    sums[i] = 0.0f;
    if ((i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * V >= columns) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) sums[i] = fmaf(v[i][j] - mean, v[i][j] - mean, sums[i]);
  }
  return {mean, rsqrtf(fmaf(row_sum(sums, second), 1.0f / count, eps))};
}

// V values normed. fmaf, or each compilation chooses where to round.
template <int V>
__device__ __forceinline__ void norm_values(const float (&v)[V], RowStatistics s, const float* weight,
                                            const float* bias, bool plus_one, float (&out)[V]) {
  float w[V], b[V] = {};
  load_constant(weight, w);
  if (bias != nullptr) load_constant(bias, b);
#pragma unroll
  for (int i = 0; i < V; ++i) out[i] = fmaf((v[i] - s.mean) * s.factor, plus_one ? 1.0f + w[i] : w[i], b[i]);
}

// One row of one thread's pointers.
template <class T>
struct NormRow {
  const T* x;
  const T* residual;
  const float* weight;
  T* y;
  T* h;

  __device__ NormRow(const NormArgs& a, int64_t row) {
    const int64_t head = row % a.heads * a.columns, m = row / a.heads;
    x = static_cast<const T*>(a.x) + m * a.x_stride + head;
    residual = a.residual == nullptr ? nullptr : static_cast<const T*>(a.residual) + m * a.residual_stride + head;
    weight = a.weight + (a.per_head ? head : 0);
    y = static_cast<T*>(a.y) + row * a.columns;
    h = static_cast<T*>(a.h) + row * a.columns;
  }

  // The sum is normed as it is stored in h: rounded to the activations' type.
  __device__ __forceinline__ static float sum_of(float x, float r) { return to_float(from_float<T>(x + r)); }

  template <int V>
  __device__ __forceinline__ void finish(const NormArgs& a, const float (&v)[V], int c, RowStatistics s) const {
    float out[V];
    norm_values(v, s, weight + c, a.bias == nullptr ? nullptr : a.bias + c, a.plus_one, out);
    store(y + c, out);
  }
};

// blockDim.x threads take a row, blockDim.y rows a block (more than one only with one warp each); a thread holds kHeld
// groups of V values. kCentre subtracts the mean (LayerNorm).
template <class T, int V, bool kCentre, int kHeld>
__global__ void __launch_bounds__(kNormMaxThreads) norm_kernel(NormArgs a) {
  __shared__ float scratch[2][kNormMaxSteps];
  dependency_wait();
  dependency_release();
  const int row_scratch = threadIdx.y * (kNormMaxSteps / kNormRowsPerBlock);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= a.rows) return;
  const NormRow<T> row(a, index);
  const auto column = [](int i) { return (i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * V; };
  float v[kHeld][V];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[i][j] = 0.0f;
    if (column(i) < a.columns) load(row.x + column(i), v[i]);
  }
  if (row.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      float r[V];
      if (column(i) >= a.columns) continue;
      load(row.residual + column(i), r);
#pragma unroll
      for (int j = 0; j < V; ++j) v[i][j] = row.sum_of(v[i][j], r[j]);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (column(i) < a.columns) store(row.h + column(i), v[i]);
  }

  const RowStatistics s = statistics<kCentre>(v, a.columns, a.eps, scratch[0] + row_scratch, scratch[1] + row_scratch);
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (column(i) < a.columns) row.finish(a, v[i], column(i), s);
}

// The same for rows that do not fit in registers: every pass reads x (or h) again.
template <class T, int V, bool kCentre>
__global__ void __launch_bounds__(kNormMaxThreads) norm_long_kernel(NormArgs a) {
  __shared__ float scratch[2][kWarp];
  dependency_wait();
  dependency_release();
  const NormRow<T> row(a, blockIdx.x);
  const int first = static_cast<int>(threadIdx.x) * V, step = kNormMaxThreads * V;
  const float count = static_cast<float>(a.columns);
  const T* const normed = row.residual == nullptr ? row.x : row.h;  // a thread reads back only what it wrote
  float mean = 0.0f, sum = 0.0f;
  for (int c = first; c < a.columns; c += step) {
    float v[V], r[V];
    load(row.x + c, v);
    if (row.residual != nullptr) {
      load(row.residual + c, r);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = row.sum_of(v[i], r[i]);
      store(row.h + c, v);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) sum += kCentre ? v[i] : v[i] * v[i];
  }
  sum = block_sum(sum, scratch[0]);
  if constexpr (kCentre) {
    mean = sum / count;
    sum = 0.0f;
    for (int c = first; c < a.columns; c += step) {
      float v[V];
      load(normed + c, v);
#pragma unroll
      for (int i = 0; i < V; ++i) sum += (v[i] - mean) * (v[i] - mean);
    }
    sum = block_sum(sum, scratch[1]);
  }
  const float factor = rsqrtf(sum / count + a.eps);
  for (int c = first; c < a.columns; c += step) {
    float v[V];
    load(normed + c, v);
    row.finish(a, v, c, {mean, factor});
  }
}

template <class T, int V, bool kCentre, class What>
void launch_norm(const NormArgs& a, const Launch& launch, What what) {
  constexpr int kHeld[]{2, 4};
  const int vectors = ceil_div(a.columns, V);
  if (vectors > kNormMaxThreads * kHeld[1]) {
    launch_kernel(launch, what, norm_long_kernel<T, V, kCentre>, dim3(static_cast<unsigned>(a.rows)),
                  dim3(kNormMaxThreads), 0, a);
    return;
  }
  const bool many = vectors >= 512, one_warp = vectors <= kNormShortVectors;
  const dim3 block = one_warp ? dim3(kWarp, kNormRowsPerBlock) : dim3(ceil_div(vectors, kHeld[many] * kWarp) * kWarp);
  launch_kernel(launch, what, many ? norm_kernel<T, V, kCentre, kHeld[1]> : norm_kernel<T, V, kCentre, kHeld[0]>,
                dim3(ceil_div(a.rows, block.y)), block, 0, a);
}

template <bool kCentre>
void launch_norm(const NormArgs& a, DType dtype, const char* op, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] {
    return std::string(op) + " rows=" + std::to_string(a.rows) + " columns=" + std::to_string(a.columns) + " " +
           name(dtype);
  };
  with_activation(dtype, op, [&]<class T>() {
    const int64_t row_bytes = a.columns * sizeof(T);
    const bool wide = aligned16(a.x, a.x_stride * sizeof(T)) && aligned16(a.residual, a.residual_stride * sizeof(T)) &&
                      aligned16(a.y, row_bytes) && aligned16(a.h, row_bytes) &&
                      aligned16(a.weight, a.per_head ? a.columns * sizeof(float) : 0) && aligned16(a.bias, 0);
    return wide ? launch_norm<T, kWide<T>, kCentre>(a, launch, what) : launch_norm<T, 1, kCentre>(a, launch, what);
  });
}

}  // namespace nibblelm::cuda
