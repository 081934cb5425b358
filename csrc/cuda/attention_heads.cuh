// Of the decode attention with rotation: the query heads of a block and the new key and value, from the projection.
#pragma once

#include "attention_tiles.cuh"
#include "rope.cuh"

namespace nibblelm::cuda {

struct HeadArgs {
  const float* cos;
  const float* sin;
  const float* q_norm;
  const float* k_norm;
  float eps;
  bool plus_one;
};

// A block's query heads after norm and rotation, and the new position's key and value. A row of padding keeps the reads
// of eight heads off each other's banks.
template <int D>
struct Prepared {
  bf16 q[kHeads][D + 8];
  bf16 key_value[2][D];
};
template <>
struct Prepared<0> {};

// What a warp reads of the projection, d = lane + 32 i: its query heads (`warp`, `warp` + kWarps ...), the new key and
// value, and the angles. All of it is under way at once, and keys are turned by every warp rather than after the heads.
template <int D, int kWarps>
struct RawHeads {
  static constexpr int kValues{D / kWarp};
  static constexpr int kRounds{kHeads / kWarps};
  bf16 q[kRounds][kValues], key[kValues], value[kValues];
  float cos[kValues / 2], sin[kValues / 2];

  __device__ __forceinline__ void read(const AttentionArgs& a, int64_t row, int first_head, int heads, int kv_head) {
    const int warp = threadIdx.x / kWarp;
    const bf16* const qkv = static_cast<const bf16*>(a.q) + row * a.q_stride + threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      key[i] = qkv[(a.heads + kv_head) * D + kWarp * i];
      value[i] = qkv[(a.heads + a.cache.kv_heads + kv_head) * D + kWarp * i];
#pragma unroll
      for (int n = 0; n < kRounds; ++n)
        if (warp + n * kWarps < heads) q[n][i] = qkv[(first_head + warp + n * kWarps) * D + kWarp * i];
    }
  }
  __device__ __forceinline__ void read_angles(const HeadArgs& a, int position) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int64_t entry = static_cast<int64_t>(position) * (D / 2) + threadIdx.x % kWarp + kWarp * i;
      cos[i] = a.cos[entry];
      sin[i] = a.sin[entry];
    }
  }

  __device__ __forceinline__ void turn(bf16 (&x)[kValues], const float* gain, const HeadArgs& a) const {
    float v[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = to_float(x[i]);
    if (gain != nullptr) {
      float squares{0.0f};
#pragma unroll
      for (int i = 0; i < kValues; ++i) squares = __fmaf_rn(v[i], v[i], squares);
      const float factor = head_norm_factor(squares, D, a.eps);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        v[i] = head_normed<bf16>(v[i], factor, gain[threadIdx.x % kWarp + kWarp * i], a.plus_one);
    }
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float2 rotated = rotate(v[i], v[i + kValues / 2], cos[i], sin[i]);
      x[i] = from_float<bf16>(rotated.x);
      x[i + kValues / 2] = from_float<bf16>(rotated.y);
    }
  }

  // `new_key`, `new_value`: places in the cache, null where they are not this block's.
  __device__ __forceinline__ void prepare(Prepared<D>& to, const HeadArgs& a, int heads, bf16* new_key,
                                          bf16* new_value) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    turn(q[0], a.q_norm, a);
    turn(key, a.k_norm, a);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int d = lane + kWarp * i;
      to.q[warp][d] = q[0][i];
      if (warp == 0) to.key_value[0][d] = key[i];
      if (warp == 1) to.key_value[1][d] = value[i];
      if (warp == 2 && new_key != nullptr) new_key[d] = key[i];
      if (warp == 3 && new_value != nullptr) new_value[d] = value[i];
    }
#pragma unroll
    for (int n = 1; n < kRounds; ++n) {
      if (warp + n * kWarps >= heads) break;
      turn(q[n], a.q_norm, a);
#pragma unroll
      for (int i = 0; i < kValues; ++i) to.q[warp + n * kWarps][lane + kWarp * i] = q[n][i];
    }
  }
};

}  // namespace nibblelm::cuda
