// Which two elements of a head rotate together and how, and QK-norm.
#pragma once

#include "rope.h"
#include "vector.cuh"

namespace nibblelm::cuda {

struct RopePair {
  int first;
  int second;
  float cos;
  float sin;
};

// Pair `i` of a head, counted over the streams: stream i / half rotates the elements from i / half * head_dim / 2 on.
__device__ __forceinline__ RopePair rope_pair(const RopeTable& t, int i, int row, int rows, int head_dim) {
  const int stream = i / t.half, p = i % t.half, base = stream * (head_dim / 2);
  const int64_t entry = static_cast<int64_t>(t.positions[stream * rows + row]) * t.half + p;
  const int first = base + (t.interleaved ? 2 * p : p);
  return {first, first + (t.interleaved ? 1 : t.half), t.cos[entry], t.sin[entry]};
}

// Arithmetic that several kernels do to the same bits: nothing of it is left to the compiler's contraction.

// (first, second) of a pair after the rotation.
__device__ __forceinline__ float2 rotate(float first, float second, float cos, float sin) {
  return {__fmaf_rn(first, cos, -__fmul_rn(second, sin)), __fmaf_rn(second, cos, __fmul_rn(first, sin))};
}

// QK-norm of a head by a warp: `squares` is the lane's share, summed over d = lane, lane + 32 and so on.
__device__ __forceinline__ float head_norm_factor(float squares, int head_dim, float eps) {
  return rsqrtf(__fmaf_rn(warp_sum(squares), 1.0f / static_cast<float>(head_dim), eps));
}

// Rounded to T, as the separate op would store it.
template <class T>
__device__ __forceinline__ float head_normed(float value, float factor, float gain, bool plus_one) {
  return to_float(from_float<T>(__fmul_rn(__fmul_rn(value, factor), plus_one ? __fadd_rn(1.0f, gain) : gain)));
}

}  // namespace nibblelm::cuda
