// The sum of squares of a row in one order, wherever it is added up: by steps of 16 groups of values (one group a
// lane), and the steps by one warp. Padding with zeros changes nothing.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

constexpr int kNormLanes{16};  // of a step

// Every lane of a half-warp gets the sum over the half.
__device__ __forceinline__ float norm_step_sum(float sum) {
#pragma unroll
  for (int offset = 1; offset < kNormLanes; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// By a whole warp.
__device__ __forceinline__ float norm_row_sum(const float* step_sums, int steps) {
  float sum{0.0f};
#pragma unroll 1
  for (int step = threadIdx.x % kWarp; step < steps; step += kWarp) sum += step_sums[step];
  return warp_sum(sum);
}

}  // namespace nibblelm::cuda
