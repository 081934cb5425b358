// From the sums of slices to results: added from left to right, so that every kernel can.
#pragma once

#include "cluster.cuh"
#include "gates.cuh"
#include "linear_tile.cuh"

namespace nibblelm::cuda {

// What swiglu or geglu makes of a gate and its up, rounded as the separate op would find them.
__device__ __forceinline__ float gated(const DecodeArgs& a, float gate, float up) {
  if (a.y_dtype == DType::bf16) gate = to_float(from_float<bf16>(gate)), up = to_float(from_float<bf16>(up));
  return times_sigmoid(gate, a.gelu ? gelu_argument(gate) : gate) * up;
}

// What comes after, of a result rounded as the separate op would find it.
__device__ __forceinline__ float afterwards(const DecodeArgs& a, float value) {
  if (a.after == After::nothing) return value;
  if (a.y_dtype == DType::bf16) value = to_float(from_float<bf16>(value));
  if (a.after == After::relu) return relu(value);
  return a.after == After::gelu_erf ? gelu_erf(value) : gelu_tanh(value);
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
  if (a.gated) {
    store_from_float(a.y, m * a.y_stride + strip * 8 + g, a.y_dtype, gated(a, low, high));
  } else {
    if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, low);
    if (n + 8 < a.n) store_from_float(a.y, m * a.y_stride + n + 8, a.y_dtype, high);
  }
}

// Where the warps of a strip leave their sums: [strip in flight][slice][row of x][row of the strip][word]. Joined: in
// the block of the strip's two that adds them up. GoesOn: something may come after.
template <WeightFormat F, bool Grouped, int D, int C, bool Joined, bool GoesOn>
struct Reduction {
  // One row of x leaves most lanes without a result, so its digit sums are scaled by the warp that adds them.
  static constexpr bool kRaw{Format<F>::kInteger && !Grouped && C == 1};
  static constexpr bool kOne{kOneSum<F, Grouped, D>};
  static constexpr int kWords{kRaw ? D : 1};
  using Tiles = Tile<F, Grouped, D, C>;
  static constexpr int kValues{Tiles::kTiles * Tiles::kColumns * 2};  // of a lane: [tile][column][row half]
  const DecodeArgs& a;
  const int* sums;
  const float* scales;  // of the slices that are added here, or shifts, as ImageRow::store_scale has left them
  int* red;             // of this strip in flight
  int part, strip, lane;
  int owner;  // Joined: the rank of that block

  // A slice's sums of this lane, over its scale.
  __device__ __forceinline__ void read(const Tiles& tile, float (&value)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int t = i / 2 / Tiles::kColumns, j = i / 2 % Tiles::kColumns, h = i % 2;
      if constexpr (Grouped) {
        value[i] = tile.sum[t][h][j];
      } else if constexpr (kOne) {
        value[i] = __int_as_float(tile.raw(t, 0, h, j));
      } else if constexpr (Format<F>::kInteger) {
        int raws[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = tile.raw(t, d, h, j);
        value[i] = join_digits<D>(raws);
      } else {
        value[i] = 0.0f;  // the smallest terms first
#pragma unroll
        for (int d = D - 1; d >= 0; --d) value[i] += tile.raw(t, d, h, j);
      }
    }
  }

  // Adds what `read` gave of a slice, from zero on.
  __device__ __forceinline__ void add(float (&total)[kValues], const float (&value)[kValues], int slice) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
      const float scale = scales[slice * C + m];  // of columns beyond the rows of x: anything
      if constexpr (kOne) {
        total[i] = __int_as_float(shifted(__float_as_int(total[i]), __float_as_int(scale)) + __float_as_int(value[i]));
      } else {
        total[i] = fmaf(value[i], scale, total[i]);
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
      int* const to = place(i, from);
      if (to == nullptr) continue;
      if constexpr (Joined) {
        cluster_store(cluster_address(to, owner), value[i]);
      } else {
        *to = __float_as_int(value[i]);
      }
    }
  }

  __device__ __forceinline__ uint32_t raw_at(int slice, int row) const {
    return shared_address(red) + (slice * kStripRows + row) * D * 4;
  }
  __device__ __forceinline__ void deliver_raw(const Tiles& tile, int from) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t to = raw_at(from, lane / 4) + h * 8 * D * 4;
      if constexpr (D == 2) {
        store_shared(to, make_int2(tile.raw(0, 0, h, 0), tile.raw(0, 1, h, 0)));
      } else {
#pragma unroll
        for (int d = 0; d < D; ++d) store_shared(to + d * 4, tile.raw(0, d, h, 0));
      }
    }
  }

  // By all lanes together. In a strip of pairs, lane r has a gate and lane r + 8 its up, rounded as the separate op
  // would find them.
  __device__ __forceinline__ void store(int m, int row, float value, float bias, bool wanted) const {
    const int n = strip * kStripRows + row;
    wanted = wanted && n < a.n;
    value += bias;
    if (a.gated) {
      const float up = __shfl_down_sync(kAllLanes, value, 8);
      if (wanted && row < 8) store_from_float(a.y, m * a.y_stride + strip * 8 + row, a.y_dtype, gated(a, value, up));
    } else if (wanted) {
      if constexpr (GoesOn) value = afterwards(a, value);
      store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value);
    }
  }

  // The result of row m of x in a row of W from the sum of its slices.
  __device__ __forceinline__ float finished(float sum, const RowTerms& row, float x_total) const {
    return Format<F>::kInteger && !Grouped ? finish_row(row, a.has_minimum, sum, x_total) : sum;
  }

  // Where one warp has taken all of K, this lane's sums give the results. x_totals: the sums of the rows of x, behind
  // them the units of sums that stay integers.
  __device__ __forceinline__ void store_values(const float (&sum)[kValues], const RowTerms (&rows)[2],
                                               const float* x_totals) const {
    float bias[2];
    load_bias(a, strip, lane, bias);
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
      if (m >= a.plan.m) continue;
      const auto total = [&](float value) {
        if constexpr (!kOne) return value;
        return SliceSum<true>{__float_as_int(value)}.result(x_totals[C + m]);
      };
      const float low = finished(total(sum[i]), rows[0], x_totals[m]),
                  high = finished(total(sum[i + 1]), rows[1], x_totals[m]);
      store_rows(a, strip, lane, m, low + bias[0], high + bias[1]);
    }
  }

  // What was delivered of a slice of the block for row `row` of the strip and row m of x.
  __device__ __forceinline__ float delivered(int slice, int m, int row) const {
    const int* const from = red + ((slice * (C == 1 ? 1 : a.plan.m) + m) * kStripRows + row) * kWords;
    if constexpr (kRaw && !kOne) {
      int raws[D];
#pragma unroll
      for (int d = 0; d < D; ++d) raws[d] = from[d];
      return join_digits<D>(raws);
    } else {
      return __int_as_float(*from);
    }
  }

  // One row's digit sums of a block that has all of K: what `finish` does, with all that does not depend on the sums
  // before `wait`, since the next link waits for this.
  template <class Wait>
  __device__ __forceinline__ void finish_raw(const RowTerms& terms, float bias, float x_total, Wait wait) const {
    constexpr int kHeld{kMaxSlices / 2};  // slices of a lane
    const int row = lane % kStripRows, first = lane / kStripRows * kHeld, last = a.plan.block_slices() - 1;
    uint32_t from[kHeld];
#pragma unroll
    for (int s = 0; s < kHeld; ++s) from[s] = raw_at(min(first + s, last), row);
    alignas(16) float scale[kHeld];  // zero for slices that are not there
    *reinterpret_cast<float4*>(scale) = *reinterpret_cast<const float4*>(scales + first);
    const float unit = kOne ? scales[last] : 1.0f;
    if constexpr (kOne) {
      float before = scales[max(first - 1, 0)];
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        const float own = scale[s];
        scale[s] = __int_as_float(unit_shift(__float_as_int(before) - __float_as_int(own) >> 23)), before = own;
      }
    }
    wait();
    float value[kHeld];
    SliceSum<kOne> sum;
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      int raws[D];
      if constexpr (D == 2) {
        const uint2 both = load_shared<uint2>(from[s]);
        raws[0] = static_cast<int>(both.x), raws[1] = static_cast<int>(both.y);
      } else {
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = load_shared<int>(from[s] + d * 4);
      }
      value[s] = kOne ? __int_as_float(raws[0]) : join_digits<D>(raws);
    }
    const auto add = [&] {
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        if (!kOne || first + s <= last) sum.add(value[s], scale[s]);
      }
    };
    add();
    sum = sum.of_lane(kStripRows);  // the upper half goes on where the lower one ends
    add();
    store(0, row, finish_row(terms, a.has_minimum, sum.result(unit), x_total), bias, first > 0);
  }

  // Warp `me` of the strip finishes every strip_warps()th round of two rows of x, a half of the warp each; one row of x
  // by half of the slices each, the upper half having the result. The loops stay rolled, since code that runs once
  // comes from memory. `terms` and `bias`: of row lane % 16; x_totals: the sums of the rows of x, behind them the units
  // of sums that stay integers.
  __device__ __forceinline__ void finish(const RowTerms& terms, float bias, const float* x_totals, int me) const {
    static_assert(kMaxSlices == 8);
    constexpr int kHeld{C == 1 ? 4 : kMaxSlices};  // slices of a lane
    const DecodePlan& p = a.plan;
    const int rounds = C == 1 ? 1 : (p.m + 1) / 2, count = Joined ? p.slices() : p.block_slices();
    const int row = lane % kStripRows, half = lane / kStripRows, m_count = C == 1 ? 1 : p.m;
    const int first = C == 1 ? 4 * half : 0;
    float* const partials = a.partials + static_cast<int64_t>(strip) * m_count * kStripRows + row;
    const int64_t slice_step = static_cast<int64_t>(p.strips) * m_count * kStripRows;
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const int m = C == 1 ? 0 : min(half + 2 * i, m_count - 1);
      const bool wanted = C == 1 || half + 2 * i < m_count;
      float value[kHeld];
#pragma unroll
      for (int s = 0; s < kHeld; ++s) value[s] = delivered(min(first + s, count - 1), m, row);
      if (!Joined && p.parts_log > 0) {
        float* const to = partials + (part << p.block_log) * slice_step + m * kStripRows;
#pragma unroll
        for (int s = 0; s < kHeld; ++s) {
          if (wanted && first + s < count) to[(first + s) * slice_step] = value[s];
        }
        continue;
      }
      SliceSum<kOne> sum;
      const auto add = [&] {
#pragma unroll
        for (int s = 0; s < kHeld; ++s) {
          SliceSum<kOne> more = sum;
          more.add(value[s], scales[min(first + s, count - 1) * C + m]);
          if (first + s < count) sum = more;
        }
      };
      add();
      if constexpr (C == 1) {  // the upper half goes on where the lower one ends
        sum = sum.of_lane(kStripRows);
        add();
      }
      store(m, row, finished(sum.result(x_totals[C + m]), terms, x_totals[m]), bias, C == 1 ? half == 1 : wanted);
    }
    if (Joined || p.parts_log == 0) return;
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
      SliceSum<kOne> sum;
#pragma unroll 4
      for (int s = 0; s < p.slices(); ++s) {
        const uint8_t* const image = a.images + (s >> p.block_log) * p.image_bytes;
        const float scale = reinterpret_cast<const float*>(image + p.scales_at)[(s & (count - 1)) * C + m];
        sum.add(__ldcg(partials + s * slice_step + m * kStripRows), scale);
      }
      store(m, row, finished(sum.result(x_totals[C + m]), terms, x_totals[m]), bias,
            C == 1 ? half == 1 : half + 2 * i < m_count);
    }
    if (lane == 0) atomicSub(a.arrivals + strip, p.parts() << 4 * me);
  }
};

}  // namespace nibblelm::cuda
