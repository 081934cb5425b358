// From the sums of slices to results: a binary tree whose shape depends on K alone.
#pragma once

#include "linear_tile.cuh"
#include "silu.cuh"

namespace nibblelm::cuda {

// Sum as a tree of neighbours; fewer values with zeros behind them give the tree of those values.
__device__ __forceinline__ float tree_sum(float (&v)[kMaxSlices]) {
#pragma unroll
  for (int level = 0; level < 3; ++level) {
#pragma unroll
    for (int i = 0; i < kMaxSlices / 2; ++i) {
      if (i < kMaxSlices / 2 >> level) v[i] = v[2 * i] + v[2 * i + 1];
    }
  }
  static_assert(kMaxSlices == 8);
  return v[0];
}

// Adds value i of a sequence to the tree of the ones before it, those of full subtrees waiting; after 2^n values,
// `value` is their tree_sum.
template <int N>
__device__ __forceinline__ void carry_sum(float (&value)[N], float (&waiting)[3][N], int i) {
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const bool second = (i >> level & 1) != 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (second) {
        value[n] = waiting[level][n] + value[n];
      } else {
        waiting[level][n] = value[n];
      }
    }
    if (!second) return;
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
      if (a.y_dtype == DType::bf16) value = to_float(from_float<bf16>(value));
      const float up = __shfl_down_sync(kAllLanes, value, 8);
      if (wanted && row < 8) store_from_float(a.y, m * a.y_stride + strip * 8 + row, a.y_dtype, silu(value) * up);
    } else if (wanted) {
      store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value);
    }
  }

  // Where one warp has taken all of K, this lane's values are the result.
  __device__ __forceinline__ void store_values(const float (&value)[kValues]) const {
    const int r = lane / 4, n = strip * kStripRows + r;
    float bias[2]{};
    if (a.bias != nullptr) bias[0] = n < a.n ? a.bias[n] : 0.0f, bias[1] = n + 8 < a.n ? a.bias[n + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
      if (m >= a.plan.m) continue;
      float low = value[i] + bias[0], high = value[i + 1] + bias[1];
      if (a.swiglu) {
        if (a.y_dtype == DType::bf16) low = to_float(from_float<bf16>(low)), high = to_float(from_float<bf16>(high));
        store_from_float(a.y, m * a.y_stride + strip * 8 + r, a.y_dtype, silu(low) * high);
      } else {
        if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, low);
        if (n + 8 < a.n) store_from_float(a.y, m * a.y_stride + n + 8, a.y_dtype, high);
      }
    }
  }

  // The sum over the strip's warps of row `row` and row m of x; with one row of x, two lanes share it.
  __device__ __forceinline__ float add_slices(int m, int row, const RowTerms& terms) const {
    const int count = a.plan.strip_warps();
    if constexpr (C == 1) {
      float v[kMaxSlices / 2];
#pragma unroll
      for (int i = 0; i < kMaxSlices / 2; ++i) {
        const int at = lane / kStripRows * (kMaxSlices / 2) + i, slice = min(at, count - 1);
        const int* const from = red + (slice * kStripRows + row) * kWords;
        if constexpr (kRaw) {
          int raws[D], digits[D];
#pragma unroll
          for (int d = 0; d < D; ++d) raws[d] = from[d], digits[d] = sums[slice * D + d];
          v[i] = scale_sums<D>(raws, digits, terms, scales[slice], a.has_minimum);
        } else {
          v[i] = __int_as_float(*from);
        }
        if (at >= count) v[i] = 0.0f;
      }
      const float half = (v[0] + v[1]) + (v[2] + v[3]);
      return half + __shfl_xor_sync(kAllLanes, half, kStripRows);
    } else {
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        v[s] = s < count ? __int_as_float(red[(s * a.plan.m + m) * kStripRows + row]) : 0.0f;
      }
      return tree_sum(v);
    }
  }

  // Warp `me` of the strip finishes every strip_warps()th round of two rows of x, a half of the warp each; the loops
  // stay rolled, since code that runs once comes from memory. `terms` and `bias`: of row lane % 16.
  __device__ __forceinline__ void finish(const RowTerms& terms, float bias, int me) const {
    const DecodePlan& p = a.plan;
    const int rounds = C == 1 ? 1 : (p.m + 1) / 2;
    const int row = lane % kStripRows, m_count = C == 1 ? 1 : p.m;
    const int m_first = C == 1 ? 0 : lane / kStripRows;
    float* const partials = a.partials + static_cast<int64_t>(strip) * m_count * kStripRows + row;
    const int64_t part_step = static_cast<int64_t>(p.strips) * m_count * kStripRows;
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const bool wanted = m_first + 2 * i < m_count && (C > 1 || lane < kStripRows);
      const int m = min(m_first + 2 * i, m_count - 1);
      const float value = add_slices(m, row, terms);
      if (p.parts_log == 0) {
        store(m, row, value, bias, wanted);
      } else if (wanted) {
        partials[part * part_step + m * kStripRows] = value;
      }
    }
    if (p.parts_log == 0) return;
    // The block that arrives last adds the parts, in their order. Four bits of a counter for every warp of a strip.
    __threadfence();
    __syncwarp();
    int ticket{0};
    if (lane == 0) ticket = atomicAdd(a.arrivals + strip, 1 << 4 * me) >> 4 * me & 15;
    if (__shfl_sync(kAllLanes, ticket, 0) != p.parts() - 1) return;
    __threadfence();
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const bool wanted = m_first + 2 * i < m_count && (C > 1 || lane < kStripRows);
      const int m = min(m_first + 2 * i, m_count - 1);
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        v[s] = s < p.parts() ? __ldcg(partials + s * part_step + m * kStripRows) : 0.0f;
      }
      store(m, row, tree_sum(v), bias, wanted);
    }
    if (lane == 0) atomicSub(a.arrivals + strip, p.parts() << 4 * me);
  }
};

}  // namespace nibblelm::cuda
