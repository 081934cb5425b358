// From the sums of slices to results: added from left to right, so that every kernel can.
#pragma once

#include "linear_tile.cuh"
#include "silu.cuh"

namespace nibblelm::cuda {

// The sums of `count` slices from left to right, at most kMaxSlices.
__device__ __forceinline__ float ordered_sum(const float (&v)[kMaxSlices], int count) {
  float sum = v[0];
#pragma unroll
  for (int i = 1; i < kMaxSlices; ++i) sum = i < count ? sum + v[i] : sum;
  return sum;
}

// What swiglu makes of a gate and its up, rounded as the separate op would find them.
__device__ __forceinline__ float gated(const DecodeArgs& a, float gate, float up) {
  if (a.y_dtype == DType::bf16) gate = to_float(from_float<bf16>(gate)), up = to_float(from_float<bf16>(up));
  return silu(gate) * up;
}

// The biases of this lane's rows of a strip, g = lane / 4 and g + 8.
__device__ __forceinline__ void load_bias(const DecodeArgs& a, int strip, int lane, float (&bias)[2]) {
  const int n = strip * kStripRows + lane / 4;
  bias[0] = a.bias != nullptr && n < a.n ? a.bias[n] : 0.0f;
  bias[1] = a.bias != nullptr && n + 8 < a.n ? a.bias[n + 8] : 0.0f;
}

// Of row m of x the results of these rows, which in a strip of pairs are a gate and its up.
__device__ __forceinline__ void store_rows(const DecodeArgs& a, int strip, int lane, int m, float low, float high) {
  const int g = lane / 4, n = strip * kStripRows + g;
  if (a.swiglu) {
    store_from_float(a.y, m * a.y_stride + strip * 8 + g, a.y_dtype, gated(a, low, high));
  } else {
    if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, low);
    if (n + 8 < a.n) store_from_float(a.y, m * a.y_stride + n + 8, a.y_dtype, high);
  }
}

// Where the warps of a strip leave their sums: [strip in flight][slice][row of x][row of the strip][word].
template <WeightFormat F, bool Grouped, int D, int C>
struct Reduction {
  // One row of x leaves most lanes without a result, so its digit sums are scaled by the warp that adds them.
  static constexpr bool kRaw{Format<F>::kInteger && !Grouped && C == 1};
  static constexpr int kWords{kRaw ? D : 1};
  using Tiles = Tile<F, Grouped, D, C>;
  static constexpr int kValues{Tiles::kTiles * Tiles::kColumns * 2};  // of a lane: [tile][column][row half]
  const DecodeArgs& a;
  const int* sums;
  const float* scales;
  int* red;  // of this strip in flight
  int part, strip, lane;

  // A slice's sums of this lane, scaled.
  __device__ __forceinline__ void scale(const Tiles& tile, const RowTerms (&rows)[2], int slice,
                                        float (&value)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int t = i / 2 / Tiles::kColumns, j = i / 2 % Tiles::kColumns, h = i % 2, m = Tiles::column(t, j, lane);
      const float slice_scale = scales[slice * C + m];  // of columns beyond the rows of x: anything
      if constexpr (Grouped) {
        value[i] = __fmul_rn(tile.sum[t][h][j], slice_scale);
      } else if constexpr (Format<F>::kInteger) {
        int raws[D], digits[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = tile.raw(t, d, h, j), digits[d] = sums[(slice * D + d) * C + m];
        value[i] = scale_sums<D>(raws, digits, rows[h], slice_scale, a.has_minimum);
      } else {
        float sum{0.0f};  // the smallest terms first
#pragma unroll
        for (int d = D - 1; d >= 0; --d) sum += tile.raw(t, d, h, j);
        value[i] = __fmul_rn(sum, slice_scale);
      }
    }
  }

  // Where this lane's value i goes from warp `from` of the strip; null where it is of no row of x.
  __device__ __forceinline__ int* place(int i, int from) const {
    const int m_count = C == 1 ? 1 : a.plan.m,
              m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
    if (C == 1 ? lane % 4 != 0 : m >= m_count) return nullptr;
    return red + ((from * m_count + m) * kStripRows + i % 2 * 8 + lane / 4) * kWords;
  }

  __device__ __forceinline__ void deliver(const float (&value)[kValues], int from) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (int* const to = place(i, from)) *to = __float_as_int(value[i]);
    }
  }

  __device__ __forceinline__ void deliver_raw(const Tiles& tile, int from) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (int* const to = place(h, from)) {
#pragma unroll
        for (int d = 0; d < D; ++d) to[d] = tile.raw(0, d, h, 0);
      }
    }
  }

  // By all lanes together. In a strip of pairs, lane r has a gate and lane r + 8 its up, rounded as the separate op
  // would find them.
  __device__ __forceinline__ void store(int m, int row, float value, float bias, bool wanted) const {
    const int n = strip * kStripRows + row;
    wanted = wanted && n < a.n;
    value += bias;
    if (a.swiglu) {
      const float up = __shfl_down_sync(kAllLanes, value, 8);
      if (wanted && row < 8) store_from_float(a.y, m * a.y_stride + strip * 8 + row, a.y_dtype, gated(a, value, up));
    } else if (wanted) {
      store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value);
    }
  }

  // Where one warp has taken all of K, this lane's values are the result.
  __device__ __forceinline__ void store_values(const float (&value)[kValues]) const {
    float bias[2];
    load_bias(a, strip, lane, bias);
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
      if (m < a.plan.m) store_rows(a, strip, lane, m, value[i] + bias[0], value[i + 1] + bias[1]);
    }
  }

  // The sums of the strip's slices in row `row` of the strip and row m of x, four of the eight from `first` on.
  __device__ __forceinline__ void read_slices(int m, int row, int first, const RowTerms& terms, float (&v)[4]) const {
    const int count = a.plan.block_slices();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slice = min(first + i, count - 1);
      const int* const from = red + ((slice * (C == 1 ? 1 : a.plan.m) + m) * kStripRows + row) * kWords;
      if constexpr (kRaw) {
        int raws[D], digits[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = from[d], digits[d] = sums[slice * D + d];
        v[i] = scale_sums<D>(raws, digits, terms, scales[slice], a.has_minimum);
      } else {
        v[i] = __int_as_float(*from);
      }
    }
  }

  // Warp `me` of the strip finishes every strip_warps()th round of two rows of x, a half of the warp each; one row of x
  // by half of the slices each, the upper half having the result. The loops stay rolled, since code that runs once comes
  // from memory. `terms` and `bias`: of row lane % 16.
  __device__ __forceinline__ void finish(const RowTerms& terms, float bias, int me) const {
    static_assert(kMaxSlices == 8);
    const DecodePlan& p = a.plan;
    const int rounds = C == 1 ? 1 : (p.m + 1) / 2, count = p.block_slices();
    const int row = lane % kStripRows, half = lane / kStripRows, m_count = C == 1 ? 1 : p.m;
    float* const partials = a.partials + static_cast<int64_t>(strip) * m_count * kStripRows + row;
    const int64_t slice_step = static_cast<int64_t>(p.strips) * m_count * kStripRows;
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const int m = C == 1 ? 0 : min(half + 2 * i, m_count - 1);
      float v[C == 1 ? 1 : 2][4];
#pragma unroll
      for (int q = 0; q < (C == 1 ? 1 : 2); ++q) read_slices(m, row, 4 * (C == 1 ? half : q), terms, v[q]);
      if (p.parts_log > 0) {
        if (C > 1 && half + 2 * i >= m_count) continue;
        float* const to = partials + (part << p.block_log) * slice_step + m * kStripRows;
#pragma unroll
        for (int s = 0; s < (C == 1 ? 4 : kMaxSlices); ++s) {
          const int slice = C == 1 ? 4 * half + s : s;
          if (slice < count) to[slice * slice_step] = v[s / 4][s % 4];
        }
        continue;
      }
      float sum = v[0][0];
      if constexpr (C == 1) {
#pragma unroll
        for (int s = 1; s < 4; ++s) sum = s < count ? sum + v[0][s] : sum;
        const float lower = __shfl_xor_sync(kAllLanes, sum, kStripRows);
        sum = lower;
#pragma unroll
        for (int s = 0; s < 4; ++s) sum = 4 + s < count ? sum + v[0][s] : sum;
      } else {
#pragma unroll
        for (int s = 1; s < kMaxSlices; ++s) sum = s < count ? sum + v[s / 4][s % 4] : sum;
      }
      store(m, row, sum, bias, C == 1 ? half == 1 : half + 2 * i < m_count);
    }
    if (p.parts_log == 0) return;
    // The block that arrives last adds the slices, in their order. Four bits of a counter for every warp of a strip.
    __threadfence();
    __syncwarp();
    int ticket{0};
    if (lane == 0) ticket = atomicAdd(a.arrivals + strip, 1 << 4 * me) >> 4 * me & 15;
    if (__shfl_sync(kAllLanes, ticket, 0) != p.parts() - 1) return;
    __threadfence();
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const int m = C == 1 ? 0 : min(half + 2 * i, m_count - 1);
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        v[s] = s < p.slices() ? __ldcg(partials + s * slice_step + m * kStripRows) : 0.0f;
      }
      store(m, row, ordered_sum(v, p.slices()), bias, C == 1 ? half == 1 : half + 2 * i < m_count);
    }
    if (lane == 0) atomicSub(a.arrivals + strip, p.parts() << 4 * me);
  }
};

}  // namespace nibblelm::cuda
