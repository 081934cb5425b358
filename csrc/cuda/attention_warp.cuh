// Of the decode attention on tensor cores: a row's positions by one warp, which has all chains in its registers.
#pragma once

#include "attention_merge.cuh"

namespace nibblelm::cuda {

// What parts came to: outputs as lanes have them in registers, of those that have heads, and statistics of pairs of
// heads. A lane reads what it has stored itself, but for the statistics.
template <class F>
struct WarpParts {
  static constexpr int kOutputs{F::D / 16}, kRows{kWarp / 4};  // of four values; of lanes
  float4* storage;
  int pairs;  // of heads

  static constexpr int bytes(int heads) {
    return kGroup * (kOutputs * kRows + 1) * ((heads + 1) / 2) * static_cast<int>(sizeof(float4));
  }
  // Output c of lane 4 g + j.
  __device__ __forceinline__ float4& output(int part, int c, int g, int j) const {
    return storage[((part * (kOutputs * kRows + 1) + c * kRows) * pairs) + g * pairs + j];
  }
  // (m, l) of heads 2 j and 2 j + 1.
  __device__ __forceinline__ float4& statistics(int part, int j) const { return output(part, kOutputs, 0, j); }

  __device__ __forceinline__ void keep(int part, const Accumulator<F>& sum, int g, int j) const {
    if (j >= pairs) return;
    if (g == 0) statistics(part, j) = {sum.m[0], sum.l[0], sum.m[1], sum.l[1]};
#pragma unroll
    for (int c = 0; c < kOutputs; ++c) output(part, c, g, j) = {sum.o[c][0], sum.o[c][1], sum.o[c][2], sum.o[c][3]};
  }
  // All of them, with the arithmetic of merge().
  __device__ __forceinline__ Accumulator<F> merged(int parts, int g, int j) const {
    Accumulator<F> sum;
    const int own = min(j, pairs - 1);
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float4 s = statistics(part, own);
      sum.m[0] = fmaxf(sum.m[0], s.x), sum.m[1] = fmaxf(sum.m[1], s.z);
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float4 s = statistics(part, own);
      const float w[2]{weight_of(s.x, sum.m[0]), weight_of(s.z, sum.m[1])};
      sum.l[0] = __fmaf_rn(w[0], s.y, sum.l[0]), sum.l[1] = __fmaf_rn(w[1], s.w, sum.l[1]);
#pragma unroll
      for (int c = 0; c < kOutputs; ++c) {
        const float4 o = output(part, c, g, own);
        sum.o[c][0] = __fmaf_rn(w[0], o.x, sum.o[c][0]), sum.o[c][1] = __fmaf_rn(w[1], o.y, sum.o[c][1]);
        sum.o[c][2] = __fmaf_rn(w[0], o.z, sum.o[c][2]), sum.o[c][3] = __fmaf_rn(w[1], o.w, sum.o[c][3]);
      }
    }
    return sum;
  }
};

// The chains of a part become one, in the first, with the arithmetic of merge().
template <class F>
__device__ __forceinline__ void merge_chains(Accumulator<F> (&chains)[F::kChains]) {
  float weight[F::kChains][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m{-INFINITY}, l{0.0f};
#pragma unroll
    for (Accumulator<F>& chain : chains) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        chain.l[h] = __fadd_rn(chain.l[h], __shfl_xor_sync(kAllLanes, chain.l[h], offset));
      m = fmaxf(m, chain.m[h]);
    }
#pragma unroll
    for (int i = 0; i < F::kChains; ++i) {
      weight[i][h] = weight_of(chains[i].m[h], m);
      l = __fmaf_rn(weight[i][h], chains[i].l[h], l);
    }
    chains[0].m[h] = m, chains[0].l[h] = l;
  }
#pragma unroll
  for (int c = 0; c < F::D / 16; ++c)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float o{0.0f};
#pragma unroll
      for (int i = 0; i < F::kChains; ++i) o = __fmaf_rn(weight[i][e % 2], chains[i].o[c][e], o);
      chains[0].o[c][e] = o;
    }
}

// attend() for a part with no more than a tile of each chain.
template <class F, class Insert, class Scored>
__device__ __forceinline__ void attend_chains(Accumulator<F> (&chains)[F::kChains], const Ring<F>& ring,
                                              const Queries<F>& q, int& p, int end, int& page, int& unit, Insert insert,
                                              Scored scored) {
#pragma unroll
  for (Accumulator<F>& chain : chains) {
    chain = {};
    if (p < end) attend_tile<true>(chain, ring, q, p, page, unit, insert, scored);
  }
}

// Writes a merged row of heads: first to `rows` in shared memory, (heads, D + 8), for the sake of whole words.
template <class F>
__device__ __forceinline__ void write_row(const PagedCache& cache, const Accumulator<F>& sum, bf16* rows, bf16* out,
                                          int heads, int lane) {
  constexpr int kPitch{F::D + 8}, kQuads{F::D / 4};
  const int g = lane / 4, j = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (2 * j + h >= heads) break;
    const float inverse = sum.l[h] == 0.0f ? 0.0f : __fdividef(1.0f, sum.l[h]);
    sum.each(h, g, [&](int d, float x) { rows[(2 * j + h) * kPitch + d] = from_float<bf16>(__fmul_rn(x, inverse)); });
  }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < heads * kQuads; i += kWarp) {
    const int h = i / kQuads, d = i % kQuads * 4;
    if (F::has(cache, d))
      *reinterpret_cast<uint2*>(out + h * F::width(cache) + d) = *reinterpret_cast<const uint2*>(rows + h * kPitch + d);
  }
}

}  // namespace nibblelm::cuda
