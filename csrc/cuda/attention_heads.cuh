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
template <int D, class T>
struct Prepared {
  bf16 q[kHeads][D + 8];
  alignas(16) T key_value[2][D];
  float scales[2];  // of int8
};
template <class T>
struct Prepared<0, T> {};

// Where a new key or value goes: in shared memory, or in the cache. Null: it is not this block's.
template <class T>
struct NewRow {
  T* x;
  float* scale;
};

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

  // By a warp, as rope_append would.
  __device__ __forceinline__ static void put(const NewRow<int8_t>& to, const bf16 (&x)[kValues]) {
    if (to.x == nullptr) return;
    const int lane = threadIdx.x % kWarp;
    unsigned top{0};
#pragma unroll
    for (int i = 0; i < kValues; ++i) top = max(top, magnitude_bits(to_float(x[i])));
    const Int8Scale scale(__reduce_max_sync(kAllLanes, top));
#pragma unroll
    for (int i = 0; i < kValues; ++i) to.x[lane + kWarp * i] = scale.code(to_float(x[i]));
    if (lane == 0) *to.scale = scale.scale;
  }
  __device__ __forceinline__ static void put(const NewRow<bf16>& to, const bf16 (&x)[kValues]) {
    if (to.x == nullptr) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) to.x[threadIdx.x % kWarp + kWarp * i] = x[i];
  }

  // `new_key`, `new_value`: places in the cache.
  template <class T>
  __device__ __forceinline__ void prepare(Prepared<D, T>& to, const HeadArgs& a, int heads, NewRow<T> new_key,
                                          NewRow<T> new_value) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    turn(q[0], a.q_norm, a);
    turn(key, a.k_norm, a);
#pragma unroll
    for (int i = 0; i < kValues; ++i) to.q[warp][lane + kWarp * i] = q[0][i];
    if (warp == 0) put({to.key_value[0], to.scales}, key);
    if (warp == 1) put({to.key_value[1], to.scales + 1}, value);
    if (warp == kWarps - 2) put(new_key, key);
    if (warp == kWarps - 1) put(new_value, value);
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
