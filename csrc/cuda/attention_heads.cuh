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

// A block's query heads after norm and rotation, and the new position's key and value, filled up with zeros to D. A row
// of padding keeps the reads of eight heads off each other's banks.
template <int D, class T>
struct Prepared {
  alignas(16) T key_value[2][D];
  float scales[2];  // of int8
  alignas(16) bf16 q[kHeads][D + 8];
};
template <class T>
struct Prepared<0, T> {};

// Where a new key or value goes: in shared memory, or in the cache. Null: it is not this block's.
template <class T>
struct NewRow {
  T* x;
  float* scale;
};

// Where a lane's values stand in a head: value i at first + step * i. Where a kernel has several sizes, a head takes a
// fourth of its size in lanes, so that pairs are values i and i + 2 of one lane as they are in a head of D; the other
// lanes have the zeros behind it.
template <class F>
struct Places {
  static_assert(F::kExact || F::D == 4 * kWarp);
  unsigned first;
  int step;
  bool in_head;

  __device__ __forceinline__ explicit Places(const PagedCache& cache) {
    const int lane = threadIdx.x % kWarp, lanes = F::width(cache) / 4;
    in_head = F::kExact || lane < lanes;
    first = in_head ? lane : 3 * lanes + lane;
    step = F::kExact ? kWarp : in_head ? lanes : kWarp - lanes;
  }
  // Of exact sizes a sum of the thread's number and a constant, which costs no register.
  __device__ __forceinline__ unsigned operator[](int i) const {
    return F::kExact ? threadIdx.x % kWarp + kWarp * i : first + step * i;
  }
};

// What a warp reads of the projection, at Places (d = lane + 32 i): its query heads (`warp`, `warp` + kWarps ...), the
// new key and value, and the angles. All of it is under way at once, and keys are turned by every warp rather than
// after the heads. Norms are of exact sizes only: a lane's share of the others is not the one that rope_append sums.
template <class F>
struct RawHeads {
  static constexpr int D{F::D}, kWarps{F::kWarps};
  static constexpr int kValues{D / kWarp};
  static constexpr int kRounds{kHeads > kWarps ? kHeads / kWarps : 1};
  // More of a warp's heads are read one by one, but where there are no others to wait for.
  static constexpr int kHeld{kRounds > 2 && kWarps > 1 ? 1 : kRounds};
  bf16 q[kHeld][kValues], key[kValues], value[kValues];
  float cos[kValues / 2], sin[kValues / 2];

  // Value i of a head of the projection, for this lane.
  __device__ __forceinline__ static bf16 element(const AttentionArgs& a, int64_t row, const Places<F>& at, int head,
                                                 int i) {
    const bf16* const qkv = static_cast<const bf16*>(a.q) + row * a.q_stride + at.first;
    return at.in_head ? qkv[head * F::width(a.cache) + at.step * i] : from_float<bf16>(0.0f);
  }

  __device__ __forceinline__ void read(const AttentionArgs& a, int64_t row, int first_head, int heads, int kv_head) {
    const int warp = threadIdx.x / kWarp;
    const Places<F> at(a.cache);
    const auto element = [&](int head, int i) { return RawHeads::element(a, row, at, head, i); };
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      key[i] = element(a.heads + kv_head, i);
      value[i] = element(a.heads + a.cache.kv_heads + kv_head, i);
#pragma unroll
      for (int n = 0; n < kHeld; ++n)
        if (warp + n * kWarps < heads) q[n][i] = element(first_head + warp + n * kWarps, i);
    }
  }
  __device__ __forceinline__ void read_angles(const AttentionArgs& a, const HeadArgs& head_args, int position) {
    const Places<F> at(a.cache);
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int64_t entry = static_cast<int64_t>(position) * (F::width(a.cache) / 2) + at.first + at.step * i;
      cos[i] = at.in_head ? head_args.cos[entry] : 0.0f;
      sin[i] = at.in_head ? head_args.sin[entry] : 0.0f;
    }
  }

  __device__ __forceinline__ void turn(bf16 (&x)[kValues], const float* gain, const HeadArgs& a) const {
    float v[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = to_float(x[i]);
    if (F::kExact && gain != nullptr) {
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

  // By a warp, as rope_append would; kFilled: a row of D, with the zeros behind the head.
  template <bool kFilled>
  __device__ __forceinline__ static void put(const Places<F>& at, const NewRow<int8_t>& to, const bf16 (&x)[kValues]) {
    if (to.x == nullptr) return;
    unsigned top{0};
#pragma unroll
    for (int i = 0; i < kValues; ++i) top = max(top, magnitude_bits(to_float(x[i])));
    const Int8Scale scale(__reduce_max_sync(kAllLanes, top));
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (const int d = at[i]; kFilled || at.in_head) to.x[d] = scale.code(to_float(x[i]));
    if (threadIdx.x % kWarp == 0) *to.scale = scale.scale;
  }
  template <bool kFilled>
  __device__ __forceinline__ static void put(const Places<F>& at, const NewRow<bf16>& to, const bf16 (&x)[kValues]) {
    if (to.x == nullptr) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (kFilled || at.in_head) to.x[at[i]] = x[i];
  }

  // `new_key`, `new_value`: places in the cache.
  template <class T>
  __device__ __forceinline__ void prepare(Prepared<D, T>& to, const AttentionArgs& args, int64_t row, int first_head,
                                          const HeadArgs& a, int heads, NewRow<T> new_key, NewRow<T> new_value) {
    const int warp = threadIdx.x / kWarp;
    const Places<F> at(args.cache);
    turn(key, a.k_norm, a);
    if constexpr (kRounds > kHeld) {
#pragma unroll 1
      for (int h = warp; h < heads; h += kWarps) {
        bf16 next[kValues]{};
#pragma unroll
        for (int i = 0; i < kValues; ++i)
          if (h + kWarps < heads) next[i] = element(args, row, at, first_head + h + kWarps, i);
        turn(q[0], a.q_norm, a);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          to.q[h][at[i]] = q[0][i];
          q[0][i] = next[i];
        }
      }
    } else {
      turn(q[0], a.q_norm, a);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        if (kWarps <= kHeads || warp < kHeads) to.q[warp][at[i]] = q[0][i];
    }
    const auto has = [&](int role) { return kWarps == 1 || warp == role; };
    if (has(0)) put<true>(at, {to.key_value[0], to.scales}, key);
    if (has(1)) put<true>(at, {to.key_value[1], to.scales + 1}, value);
    if (has(kWarps - 2)) put<false>(at, new_key, key);
    if (has(kWarps - 1)) put<false>(at, new_value, value);
#pragma unroll
    for (int n = 1; n < kHeld; ++n) {
      if (warp + n * kWarps >= heads) break;
      turn(q[n], a.q_norm, a);
#pragma unroll
      for (int i = 0; i < kValues; ++i) to.q[warp + n * kWarps][at[i]] = q[n][i];
    }
  }
};

}  // namespace nibblelm::cuda
