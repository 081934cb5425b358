// Floats as unsigned integers of the same order.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// NaN counts as -inf, and -0 as 0.
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = isnan(x) ? 0xff800000u : __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Larger value first, then lower index; 0 is below every key.
__device__ __forceinline__ uint64_t ranked_key(float x, uint32_t index) {
  return static_cast<uint64_t>(ordered_key(x)) << 32 | ~index;
}

}  // namespace nibblelm::cuda
