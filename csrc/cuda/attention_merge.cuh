// Of the decode attention on tensor cores: triples (maximum, sum, output) of warps, blocks and clusters become one.
#pragma once

#include "attention_tiles.cuh"
#include "cluster.cuh"

namespace nibblelm::cuda {

// Four values of one head's output with the statistics of the positions they stand for.
struct Triple {
  float m;
  float l;
  float4 o;
};

// In order; at most kMost of them, whose reads overlap.
template <int kMost, class Statistics, class Output>
__device__ __forceinline__ Triple merge(int count, Statistics statistics, Output output) {
  Triple t{-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
  float2 s[kMost];
  float4 o[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    s[i] = {-INFINITY, 0.0f};
    if (i < count) s[i] = statistics(i), o[i] = output(i);
    t.m = fmaxf(t.m, s[i].x);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float w = weight_of(s[i].x, t.m);
    if (i >= count) continue;
    t.l = __fmaf_rn(w, s[i].y, t.l);
    t.o = {__fmaf_rn(w, o[i].x, t.o.x), __fmaf_rn(w, o[i].y, t.o.y), __fmaf_rn(w, o[i].z, t.o.z),
           __fmaf_rn(w, o[i].w, t.o.w)};
  }
  return t;
}

// Where the ring was: behind each other in every warp's share, its output, then the parts of some of the cluster's
// blocks (of the first block only). A share is done with by its own warp alone, so no barrier comes before.
template <class F>
struct MergeSpace {
  static constexpr int D{F::D};
  static constexpr int kPitch{D + 4};  // keeps the lanes' stores off each other's banks
  static constexpr int kWarpBytes{Ring<F>::kWarpBytes};
  static constexpr int kOutputBytes{kHeads * (kPitch * 4 + 8)};
  static constexpr int kPartBytes{kHeads * (D * 4 + 8)};
  static_assert(F::kDealt || (kOutputBytes + (F::kCluster == 1 ? 0 : kGroup / F::kWarps * kPartBytes) <= kWarpBytes &&
                              kGroup % F::kWarps == 0));
  unsigned char* storage;

  __device__ __forceinline__ float* output(int warp, int h) const {
    return reinterpret_cast<float*>(storage + warp * kWarpBytes) + h * kPitch;
  }
  __device__ __forceinline__ float2* statistics(int warp) const {
    return reinterpret_cast<float2*>(storage + warp * kWarpBytes + kHeads * kPitch * 4);
  }
  // Sums over lanes and stores.
  __device__ __forceinline__ void store(Accumulator<F>& sum, int warp, int g, int j, int heads) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        sum.l[h] = __fadd_rn(sum.l[h], __shfl_xor_sync(kAllLanes, sum.l[h], offset));
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (2 * j + h >= heads) continue;
      if (g == 0) statistics(warp)[2 * j + h] = {sum.m[h], sum.l[h]};
      sum.store(output(warp, 2 * j + h), h, g);
    }
  }
  __device__ __forceinline__ float* part(int rank, int h) const {
    const int at = rank % F::kWarps * kWarpBytes + kOutputBytes + rank / F::kWarps * kPartBytes;
    return reinterpret_cast<float*>(storage + at) + h * D;
  }
  __device__ __forceinline__ float2* part_statistics(int rank) const {
    return reinterpret_cast<float2*>(part(rank, kHeads));
  }
  // Quad d .. d + 3 of head h over all warps.
  __device__ __forceinline__ Triple merged(int h, int d) const {
    return merge<F::kWarps>(
        F::kWarps, [&](int w) { return statistics(w)[h]; },
        [&](int w) { return *reinterpret_cast<const float4*>(output(w, h) + d); });
  }
};

// Behind the ring of a block that takes several parts: the warps' outputs of the part before and of this one, or of all
// that were dealt to it, then what the parts came to, of dealt ones all of the row's in the cluster's first block. A
// row of a head's output is followed by its statistics, which keeps lanes off each other's banks.
template <class F>
struct PartSpace {
  static constexpr int D{F::D};
  static constexpr int kPitch{D + 4};
  static constexpr int kStages{F::kTeams > 1 ? kGroup : F::kDealt ? F::kParts : 2};
  float* storage;
  int heads;

  static constexpr int bytes(int heads) { return (kStages * F::kChains + kGroup) * heads * kPitch * 4; }
  __device__ __forceinline__ float* output(int stage, int warp, int h) const {
    return storage + ((stage * F::kChains + warp) * heads + h) * kPitch;
  }
  __device__ __forceinline__ float* part(int n, int h) const {
    return storage + ((kStages * F::kChains + n) * heads + h) * kPitch;
  }
  __device__ __forceinline__ static float2 statistics(const float* output) {
    return *reinterpret_cast<const float2*>(output + D);
  }
  // Sums over lanes and stores; the sum starts anew.
  __device__ __forceinline__ void store(Accumulator<F>& sum, int stage, int warp, int g, int j) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        sum.l[h] = __fadd_rn(sum.l[h], __shfl_xor_sync(kAllLanes, sum.l[h], offset));
      if (2 * j + h >= heads) continue;
      float* const to = output(stage, warp, 2 * j + h);
      if (g == 0) *reinterpret_cast<float2*>(to + D) = {sum.m[h], sum.l[h]};
      sum.store(to, h, g);
    }
    sum = {};
  }
  // Quad d .. d + 3 of head h over all warps.
  __device__ __forceinline__ Triple merged(int stage, int h, int d) const {
    return merge<F::kChains>(
        F::kChains, [&](int w) { return statistics(output(stage, w, h)); },
        [&](int w) { return *reinterpret_cast<const float4*>(output(stage, w, h) + d); });
  }
  __device__ __forceinline__ void keep_part(int n, int h, int d, const Triple& t) const {
    *reinterpret_cast<float4*>(part(n, h) + d) = t.o;
    if (d == 0) *reinterpret_cast<float2*>(part(n, h) + D) = {t.m, t.l};
  }
  __device__ __forceinline__ Triple merged_parts(int count, int h, int d) const {
    return merge<kGroup>(
        count, [&](int n) { return statistics(part(n, h)); },
        [&](int n) { return *reinterpret_cast<const float4*>(part(n, h) + d); });
  }
};

// What came before and what comes after.
__device__ __forceinline__ Triple join(const Triple& a, const Triple& b) {
  const float m = fmaxf(a.m, b.m), v = weight_of(a.m, m), w = weight_of(b.m, m);
  return {m,
          __fmaf_rn(w, b.l, __fmul_rn(v, a.l)),
          {__fmaf_rn(w, b.o.x, __fmul_rn(v, a.o.x)), __fmaf_rn(w, b.o.y, __fmul_rn(v, a.o.y)),
           __fmaf_rn(w, b.o.z, __fmul_rn(v, a.o.z)), __fmaf_rn(w, b.o.w, __fmul_rn(v, a.o.w))}};
}

}  // namespace nibblelm::cuda
