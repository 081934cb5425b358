// Which two elements of a head rotate together, and where a row goes in the cache.
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

// What is done to the heads of q and k before attention: RMSNorm (gain null: none), then rotation.
struct HeadArgs {
  RopeTable table;
  const float* q_norm;
  const float* k_norm;
  float eps;
  bool plus_one;
};

// By one warp: the head at x, normed and rotated, in `values` (head_dim floats of shared memory). Values are rounded to
// T between norm and rotation and at the end, as the separate ops do.
template <class T>
__device__ __forceinline__ void rotate_head(float* values, const T* x, const HeadArgs& a, const float* gain, int row,
                                            int rows, int head_dim) {
  const int lane = threadIdx.x % kWarp;
  float squares = 0.0f;
  for (int d = lane; d < head_dim; d += kWarp) {
    values[d] = to_float(x[d]);
    squares += values[d] * values[d];
  }
  if (gain != nullptr) {
    const float factor = rsqrtf(warp_sum(squares) / static_cast<float>(head_dim) + a.eps);
    for (int d = lane; d < head_dim; d += kWarp)
      values[d] = to_float(from_float<T>(values[d] * factor * (a.plus_one ? 1.0f + gain[d] : gain[d])));
  }
  __syncwarp();
  for (int i = lane; i < a.table.half * a.table.streams; i += kWarp) {
    const RopePair pair = rope_pair(a.table, i, row, rows, head_dim);
    const float first = values[pair.first], second = values[pair.second];
    values[pair.first] = to_float(from_float<T>(first * pair.cos - second * pair.sin));
    values[pair.second] = to_float(from_float<T>(second * pair.cos + first * pair.sin));
  }
  __syncwarp();
}

// Offset of (slot, kv head, position) in the cache, or -1 for a row that is not written.
__device__ __forceinline__ int64_t cache_offset(const CacheTarget& c, int row, int kv_head) {
  const int64_t slot = c.slots[row], position = c.positions[row];
  if (slot < 0 || slot >= c.slot_count || position < 0 || position >= c.capacity) return -1;
  return ((slot * c.kv_heads + kv_head) * c.capacity + position) * c.head_dim;
}

}  // namespace nibblelm::cuda
