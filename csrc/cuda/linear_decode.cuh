// The decode kernel: y = x W^T for 1 to 16 rows of x, limited by the bytes of W.
//
// A block has 16 warps; a warp owns one slice of K for one strip of 16 rows at a time and streams it through a private
// ring in shared memory (every lane reads back only the 16 bytes it copied itself, so the ring needs no barrier). The
// activations stand in shared memory as "planes": int8 digits with a power-of-two scale per slice and row, or terms in
// the weight's own half precision; they are the 8 columns of the tensor-core tile. Integer products are exact in int32.
// Slices are added as a binary tree whose shape depends on K alone: every m, split and grid gives the same bits.
#pragma once

#include "common.cuh"
#include "linear.h"
#include "tiles.h"

namespace nibblelm::cuda {

// ---- device helpers ------------------------------------------------------------------------------------------

template <WeightFormat F>
struct Format {
  static constexpr bool kInteger{F == WeightFormat::int4 || F == WeightFormat::int8};
  static constexpr int kLoads{kInteger ? 1 : 2};  // 16-byte loads of a lane for one unit
  static constexpr int kUnitK{F == WeightFormat::int4 ? 64 : F == WeightFormat::f32 ? 16 : 32};
  static constexpr int kUnitBytes{512 * kLoads};
  static constexpr int kRing{kRingBytesPerWarp / kUnitBytes};
  static constexpr int kPlaneBytes{kInteger ? 1 : 2};                 // of one element of a plane
  static constexpr bool kScaled{kInteger || F == WeightFormat::f16};  // planes are x * 2^-e, e per slice and row
  using Accumulator = std::conditional_t<kInteger, int, float>;
};

struct DecodeArgs {
  const uint8_t* data;
  const uint8_t* records;
  const void* x;
  void* y;
  const float* bias;
  float* partials;
  int* arrivals;
  int64_t x_stride;
  int64_t y_stride;
  int64_t pitch_bytes;  // full formats
  int n, k;
  int strips, steps, units;  // units: of one strip
  int groups, group_shift;   // integer formats: groups of a row; log2 of the group size, or 0 for per-row
  int record_bytes, minimum_at, default_zero;
  DType scale_dtype, y_dtype;
  bool has_zero, has_minimum, x_is_float, x_aligned;
  DecodePlan plan;
};

__device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], uint2 b) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

template <bool Half>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (Half) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
}

// Sum of 16 values as a tree of neighbours; fewer values with zeros behind them give the tree of those values.
__device__ __forceinline__ float tree_sum(float (&v)[kMaxSlices]) {
  static_assert(kMaxSlices == 16);
#pragma unroll
  for (int level = 0; level < 4; ++level) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < 8 >> level) v[i] = v[2 * i] + v[2 * i + 1];
    }
  }
  return v[0];
}

// Eight activations from column k on; zeros beyond K.
__device__ __forceinline__ void load_activations(const DecodeArgs& a, int row, int k, float (&v)[8]) {
  const int64_t at = row * a.x_stride + k;
  if (a.x_aligned && k + 8 <= a.k) {
    if (a.x_is_float) {
      const auto* p = static_cast<const float*>(a.x) + at;
      const Vec<float> low = load_vec(p), high = load_vec(p + 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = low.v[i], v[4 + i] = high.v[i];
    } else {
      const Vec<bf16> all = load_vec(static_cast<const bf16*>(a.x) + at);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = to_float(all.v[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[i] = k + i < a.k ? load_as_float(a.x, at + i, a.x_is_float ? DType::f32 : DType::bf16) : 0.0f;
    }
  }
}

// Balanced base-256 digits of round(v), most significant first; |v| is within the largest that D digits hold.
template <int D>
__device__ __forceinline__ void split_digits(float v, int (&digit)[D]) {
  int rest = __float2int_rn(v);
#pragma unroll
  for (int d = D - 1; d > 0; --d) {
    digit[d] = static_cast<int8_t>(rest & 0xff);
    rest = (rest - digit[d]) >> 8;
  }
  digit[0] = rest;
}

// Writes 8 activations as D planes at `shared`; adds the digits to `sums` (integer formats).
template <WeightFormat F, int D>
__device__ __forceinline__ void store_planes(uint8_t* shared, const float (&v)[8], int (&sums)[D]) {
  if constexpr (Format<F>::kInteger) {
    uint32_t word[D][2]{};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int digit[D];
      split_digits<D>(v[i], digit);
#pragma unroll
      for (int d = 0; d < D; ++d) {
        sums[d] += digit[d];
        word[d][i / 4] |= static_cast<uint32_t>(digit[d] & 0xff) << (8 * (i % 4));
      }
    }
#pragma unroll
    for (int d = 0; d < D; ++d) reinterpret_cast<uint2*>(shared)[d] = make_uint2(word[d][0], word[d][1]);
  } else {
    using T = std::conditional_t<F == WeightFormat::f16, half, bf16>;
    float rest[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rest[i] = v[i];
#pragma unroll
    for (int d = 0; d < D; ++d) {
      Vec<T> term;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        term.v[i] = from_float<T>(rest[i]);
        rest[i] -= to_float(term.v[i]);  // exact
      }
      store_vec(reinterpret_cast<T*>(shared) + 8 * d, term);
    }
  }
}

// The power of two that brings `largest` (the bits of a non-negative float) just under the top of the planes' range,
// and its inverse in `scale`, which is NaN where an activation is infinite or NaN, so that the row's outputs are.
template <WeightFormat F, int D>
__device__ __forceinline__ float normalizer(uint32_t largest, float& scale) {
  constexpr float kTop{F == WeightFormat::f16 ? 32768.0f : D == 2 ? 127.0f * 256 : 127.0f * 65536};
  const float ratio = fminf(kTop / fmaxf(__uint_as_float(largest), 1e-30f), 1e37f);
  const float inverse = __uint_as_float(__float_as_uint(ratio) & 0x7f800000u);
  scale = largest >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : 1.0f / inverse;
  return largest == 0 ? 0.0f : inverse;
}

// Fills planes, sums and scales for the block's slices: one warp per slice and row.
template <WeightFormat F, bool Grouped, int D, int C>
__device__ __forceinline__ void prepare_planes(const DecodeArgs& a, uint8_t* shared, int part) {
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp;
  const int block_k = slice_begin(part * p.block_slices, p.slices, a.steps) * kStepK;
  int* const sums = reinterpret_cast<int*>(shared + p.sums_at);
  float* const scales = reinterpret_cast<float*>(shared + p.scales_at);
  for (int pair = threadIdx.x / kWarp; pair < p.block_slices * p.m; pair += kDecodeWarps) {
    const int slice = pair % p.block_slices, row = pair / p.block_slices;
    const int first = slice_begin(part * p.block_slices + slice, p.slices, a.steps) * kStepK;
    const int last = slice_begin(part * p.block_slices + slice + 1, p.slices, a.steps) * kStepK;
    float v[8];
    float inverse{1.0f};
    if constexpr (Format<F>::kScaled) {
      uint32_t largest{0};  // as bits: NaN is larger than infinity, which is larger than every number
      for (int k = first + 8 * lane; k < last; k += 8 * kWarp) {
        load_activations(a, row, k, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
      }
      float scale;
      inverse = normalizer<F, D>(__reduce_max_sync(kAllLanes, largest), scale);
      if (lane == 0) scales[slice * C + row] = scale;
    } else if (lane == 0) {
      scales[slice * C + row] = 1.0f;
    }
    int slice_sum[D]{};
    for (int base = first; base < last; base += 8 * kWarp) {
      const int k = base + 8 * lane;
      int sum[D]{};
      if (k < last) {
        load_activations(a, row, k, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= inverse;
        uint8_t* const at = shared + p.planes_at + row * p.plane_pitch + (k - block_k) * D * Format<F>::kPlaneBytes;
        store_planes<F, D>(at, v, sum);
      }
      if constexpr (Grouped) {
        const int lanes = (1 << a.group_shift) / 8;
#pragma unroll
        for (int d = 0; d < D; ++d) {
          for (int offset = 1; offset < lanes; offset *= 2) sum[d] += __shfl_xor_sync(kAllLanes, sum[d], offset);
          if (k < last && lane % lanes == 0) sums[(((k - block_k) >> a.group_shift) * D + d) * C + row] = sum[d];
        }
      } else {
#pragma unroll
        for (int d = 0; d < D; ++d) slice_sum[d] += sum[d];
      }
    }
    if constexpr (Format<F>::kInteger && !Grouped) {
#pragma unroll
      for (int d = 0; d < D; ++d) {
        const int total = __reduce_add_sync(kAllLanes, slice_sum[d]);
        if (lane == 0) sums[(slice * D + d) * C + row] = total;
      }
    }
  }
}

// The warp's place in its stream of units, kRing units ahead of what it computes.
template <WeightFormat F, bool Grouped>
struct Stream {
  using Fmt = Format<F>;
  const DecodeArgs& a;
  uint32_t ring, record_ring;  // shared addresses
  int lane, first_unit, slice_units, strip, strip_step, unit, slot;
  const uint8_t* source[Fmt::kLoads];

  __device__ __forceinline__ void start_strip() {
    if constexpr (Fmt::kInteger) {
      source[0] = a.data + (static_cast<int64_t>(strip) * a.units + first_unit) * 512 + lane * 16;
    } else {
      constexpr int kElements{16 / (Fmt::kUnitK / 4)};  // bytes of an element
      const int column = first_unit * Fmt::kUnitK + lane % 4 * (Fmt::kUnitK / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows beyond N repeat the last one; their results are not stored
        const int row = min(strip * kStripRows + 8 * half + lane / 4, a.n - 1);
        source[half] = a.data + row * a.pitch_bytes + static_cast<int64_t>(column) * kElements;
      }
    }
  }

  __device__ __forceinline__ void issue() {
    if (strip < a.strips) {
#pragma unroll
      for (int i = 0; i < Fmt::kLoads; ++i) {
        copy_async_16(ring + slot * Fmt::kUnitBytes + i * 512 + lane * 16, source[i]);
        source[i] += Fmt::kInteger ? 512 : 64;
      }
      if constexpr (Grouped) {
        // A record travels with the last unit of its group, where it is needed.
        const int k = (first_unit + unit) * Fmt::kUnitK;
        if ((k + Fmt::kUnitK) % (1 << a.group_shift) == 0) {
          const int64_t record = static_cast<int64_t>(strip) * a.groups + (k >> a.group_shift);
          const uint8_t* const records = a.records + record * a.record_bytes;
          for (int at = 4 * lane; at < a.plan.record_slot; at += 4 * kWarp) {
            copy_async_4(record_ring + slot * a.plan.record_slot + at, records + at);
          }
        }
      }
      slot = (slot + 1) % Fmt::kRing;
      if (++unit == slice_units) {
        unit = 0;
        strip += strip_step;
        if (strip < a.strips) start_strip();
      }
    }
    copy_async_commit();
  }
};

// Row scales, zero-points and minima of rows r and r + 8 of one group.
struct RowPair {
  float scale[2], minimum[2];
  int zero[2];
};

template <WeightFormat F>
__device__ __forceinline__ RowPair read_record(const DecodeArgs& a, const uint8_t* record, int r) {
  RowPair out;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    out.scale[h] = load_as_float(record, 2 * r + h, a.scale_dtype);
    out.minimum[h] = a.has_minimum ? load_as_float(record + a.minimum_at, 2 * r + h, a.scale_dtype) : 0.0f;
    out.zero[h] = a.default_zero;
    if (a.has_zero) {
      const uint8_t* const zeros = record + (a.scale_dtype == DType::f32 ? 64 : 32);
      out.zero[h] = F == WeightFormat::int4 ? zeros[r] >> (4 * h) & 15 : zeros[2 * r + h];
    }
  }
  return out;
}

template <WeightFormat F, int D, int C>
struct Tile {
  static constexpr int kTiles{(C + 7) / 8};       // of 8 columns
  static constexpr int kColumns{C == 1 ? 1 : 2};  // of a thread in a tile
  typename Format<F>::Accumulator acc[kTiles][D][4]{};
  float sum[kTiles][2][kColumns]{};  // scaled: [tile][row half][column]

  // sum += scale * (acc - zero * digit sums) + minimum * digit sums; clears acc.
  __device__ __forceinline__ void flush(const RowPair& rows, bool has_minimum, const int* sums, int lane) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int m = C == 1 ? 0 : t * 8 + lane % 4 * 2 + j;
        float value[2]{}, total{0.0f};
#pragma unroll
        for (int d = 0; d < D; ++d) {
          const int digits = sums[d * C + m];
          total = fmaf(total, 256.0f, static_cast<float>(digits));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            value[h] = fmaf(value[h], 256.0f, static_cast<float>(acc[t][d][2 * h + j] - rows.zero[h] * digits));
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sum[t][h][j] = fmaf(rows.scale[h], value[h], sum[t][h][j]);
          if (has_minimum) sum[t][h][j] = fmaf(rows.minimum[h], total, sum[t][h][j]);
        }
      }
#pragma unroll
      for (int d = 0; d < D; ++d) acc[t][d][0] = acc[t][d][1] = acc[t][d][2] = acc[t][d][3] = 0;
    }
  }
};

// Splits a pair of fp32 into a bf16 pair and what is left.
__device__ __forceinline__ uint32_t take_bf16(float& low, float& high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  low -= __low2float(pair);
  high -= __high2float(pair);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// acc += unit x planes for one unit of a full format. `planes`: this lane's chunk of the first column tile.
template <WeightFormat F, int D, int C>
__device__ __forceinline__ void multiply_full(Tile<F, D, C>& tile, const uint4 (&w)[2], const uint8_t* planes,
                                              int pitch8, int lane, int m) {
  constexpr int kTiles{Tile<F, D, C>::kTiles};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const bool used = t * 8 + lane / 4 < m;
    if constexpr (F == WeightFormat::f32) {
      uint32_t a[3][4];
      float low[2][2], high[2][2];
      const uint4* const rows = w;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        low[h][0] = __uint_as_float(rows[h].x), high[h][0] = __uint_as_float(rows[h].y);
        low[h][1] = __uint_as_float(rows[h].z), high[h][1] = __uint_as_float(rows[h].w);
      }
#pragma unroll
      for (int i = 0; i < 3; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) a[i][q] = take_bf16(low[q % 2][q / 2], high[q % 2][q / 2]);
      }
#pragma unroll
      for (int d = D - 1; d >= 0; --d) {
        const uint2 b = used ? *reinterpret_cast<const uint2*>(planes + t * pitch8 + d * 16) : make_uint2(0, 0);
#pragma unroll
        for (int i = 2 - d; i >= 0; --i) mma<false>(tile.acc[t][0], a[i], b);  // terms under 2^-24 are left out
      }
    } else {
      const uint32_t first[4]{w[0].x, w[1].x, w[0].y, w[1].y}, second[4]{w[0].z, w[1].z, w[0].w, w[1].w};
#pragma unroll
      for (int d = D - 1; d >= 0; --d) {
        const uint4 b = used ? *reinterpret_cast<const uint4*>(planes + t * pitch8 + d * 16) : make_uint4(0, 0, 0, 0);
        mma<F == WeightFormat::f16>(tile.acc[t][d], first, make_uint2(b.x, b.y));
        mma<F == WeightFormat::f16>(tile.acc[t][d], second, make_uint2(b.z, b.w));
      }
    }
  }
}

// acc += one 32-column tile of codes x digits.
template <WeightFormat F, int D, int C>
__device__ __forceinline__ void multiply_codes(Tile<F, D, C>& tile, const uint32_t (&a)[4], const uint8_t* planes,
                                               int pitch8, int lane, int m) {
#pragma unroll
  for (int t = 0; t < Tile<F, D, C>::kTiles; ++t) {
    const bool used = t * 8 + lane / 4 < m;
    uint2 b[D];
    if constexpr (D == 2) {
      const uint4 both = used ? *reinterpret_cast<const uint4*>(planes + t * pitch8) : make_uint4(0, 0, 0, 0);
      b[0] = make_uint2(both.x, both.y), b[1] = make_uint2(both.z, both.w);
    } else {
#pragma unroll
      for (int d = 0; d < D; ++d) {
        b[d] = used ? reinterpret_cast<const uint2*>(planes + t * pitch8)[d] : make_uint2(0, 0);
      }
    }
#pragma unroll
    for (int d = 0; d < D; ++d) mma(tile.acc[t][d], a, b[d]);
  }
}

// ---- kernel --------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
__global__ void __launch_bounds__(kDecodeThreads, C == 1 ? 2 : 1)
    linear_decode_kernel(const __grid_constant__ DecodeArgs a) {
  using Fmt = Format<F>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int ticket;
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int part = blockIdx.x % p.parts, group_step = gridDim.x / p.parts;
  const int slice = warp % p.block_slices, sub = warp / p.block_slices;
  const int begin = slice_begin(part * p.block_slices + slice, p.slices, a.steps);
  const int end = slice_begin(part * p.block_slices + slice + 1, p.slices, a.steps);
  const int block_begin = slice_begin(part * p.block_slices, p.slices, a.steps);
  constexpr int kStepUnits{kStepK / Fmt::kUnitK};
  const int first_group = blockIdx.x / p.parts;

  uint8_t* const ring = shared + warp * kRingBytesPerWarp;
  uint8_t* const record_ring = shared + p.records_at + warp * Fmt::kRing * p.record_slot;
  Stream<F, Grouped> stream{a,
                            shared_address(ring),
                            shared_address(record_ring),
                            lane,
                            begin * kStepUnits,
                            min(end * kStepUnits, a.units) - begin * kStepUnits,
                            first_group * p.block_strips + sub,
                            group_step * p.block_strips,
                            0,
                            0,
                            {}};
  stream.start_strip();
  for (int i = 0; i < Fmt::kRing; ++i) stream.issue();  // weights: the step does not change them

  dependency_wait();
  dependency_release();
  prepare_planes<F, Grouped, D, C>(a, shared, part);
  __syncthreads();

  // This lane's 8 columns of K in the planes of row lane / 4.
  constexpr int kChunk{8 * D * Fmt::kPlaneBytes};
  const uint8_t* const planes = shared + p.planes_at + lane / 4 * p.plane_pitch +
                                (F == WeightFormat::f32 ? lane % 4 / 2 * kChunk + lane % 2 * 8 : lane % 4 * kChunk) +
                                (begin - block_begin) * (kStepK / 8) * kChunk;
  const int* const sums = reinterpret_cast<const int*>(shared + p.sums_at);
  const float* const scales = reinterpret_cast<const float*>(shared + p.scales_at) + slice * C;
  float* const red = reinterpret_cast<float*>(shared + p.red_at);
  const int outputs = p.block_strips * p.m * kStripRows;
  int slot{0}, round{0};

  for (int group = first_group; group < p.strip_groups; group += group_step, ++round) {
    const int strip = group * p.block_strips + sub;
    float* const red_now = red + round % 2 * kDecodeWarps * p.m * kStripRows;
    if (strip < a.strips) {
      Tile<F, D, C> tile;
      RowPair rows;
      if constexpr (Fmt::kInteger && !Grouped) {
        rows = read_record<F>(a, a.records + static_cast<int64_t>(strip) * a.record_bytes, lane / 4);
      }
      for (int unit = 0; unit < stream.slice_units; ++unit) {
        copy_async_wait<Fmt::kRing - 1>();
        const uint8_t* const here = ring + slot * Fmt::kUnitBytes + lane * 16;
        const uint8_t* const b = planes + unit * (Fmt::kUnitK / 8) * kChunk;
        if constexpr (Fmt::kInteger) {
          if constexpr (Grouped) __syncwarp();  // records were copied by other lanes
          const uint4 w = *reinterpret_cast<const uint4*>(here);
          constexpr int kTilesK{Fmt::kUnitK / 32};
#pragma unroll
          for (int t = 0; t < kTilesK; ++t) {
            uint32_t words[4]{w.x, w.y, w.z, w.w};
            if constexpr (F == WeightFormat::int4) {
#pragma unroll
              for (int i = 0; i < 4; ++i) words[i] = words[i] >> (4 * t) & 0x0f0f0f0fu;
            }
            multiply_codes<F, D, C>(tile, words, b + t * 4 * kChunk, 8 * p.plane_pitch, lane, p.m);
            if constexpr (Grouped) {
              const int k = (begin - block_begin) * kStepK + unit * Fmt::kUnitK + 32 * t;  // from the block's first
              if ((k + 32) % (1 << a.group_shift) == 0) {
                const uint8_t* record = record_ring + slot * p.record_slot;
                if (1 << a.group_shift < Fmt::kUnitK) record += t * a.record_bytes;
                tile.flush(read_record<F>(a, record, lane / 4), a.has_minimum, sums + (k >> a.group_shift) * D * C,
                           lane);
              }
            }
          }
          if constexpr (Grouped) __syncwarp();  // every lane has read the slot's records
        } else {
          const uint4 w[2]{*reinterpret_cast<const uint4*>(here), *reinterpret_cast<const uint4*>(here + 512)};
          multiply_full<F, D, C>(tile, w, b, 8 * p.plane_pitch, lane, p.m);
        }
        slot = (slot + 1) % Fmt::kRing;
        stream.issue();
      }
      if constexpr (Fmt::kInteger && !Grouped) tile.flush(rows, a.has_minimum, sums + slice * D * C, lane);
#pragma unroll
      for (int t = 0; t < Tile<F, D, C>::kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < Tile<F, D, C>::kColumns; ++j) {
          const int m = C == 1 ? 0 : t * 8 + lane % 4 * 2 + j;
          if (C == 1 ? lane % 4 == 0 : m < p.m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float value = tile.sum[t][h][j];
              if constexpr (!Fmt::kInteger) {
                value = 0.0f;
#pragma unroll
                for (int d = D - 1; d >= 0; --d) value += tile.acc[t][d][2 * h + j];
              }
              red_now[(warp * p.m + m) * kStripRows + 8 * h + lane / 4] = scales[m] * value;
            }
          }
        }
      }
    }
    __syncthreads();  // the next round writes the other half of `red`, so one barrier a round is enough

    const auto store = [&](int at, float value) {  // at: [strip of the block][row of x][row of the strip]
      const int n = (group * p.block_strips + at / (p.m * kStripRows)) * kStripRows + at % kStripRows;
      const int m = at / kStripRows % p.m;
      if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value + (a.bias ? a.bias[n] : 0.0f));
    };
    const int64_t partials_at = static_cast<int64_t>(group) * outputs,
                  part_stride = static_cast<int64_t>(p.strip_groups) * outputs;
    // Rounds take turns with the warps that add, so that the same one is not always late.
    for (int at = (threadIdx.x + round * 32) % kDecodeThreads; at < outputs; at += kDecodeThreads) {
      const int from = at / (p.m * kStripRows) * p.block_slices * p.m * kStripRows + at % (p.m * kStripRows);
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) v[s] = s < p.block_slices ? red_now[from + s * p.m * kStripRows] : 0.0f;
      const float value = tree_sum(v);
      if (p.parts == 1) {
        store(at, value);
      } else {
        a.partials[part * part_stride + partials_at + at] = value;
      }
    }
    if (p.parts > 1) {  // the block that arrives last adds the parts, in their order
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ticket = atomicAdd(a.arrivals + group, 1);
      __syncthreads();
      if (ticket == p.parts - 1) {
        __threadfence();
        for (int at = threadIdx.x; at < outputs; at += kDecodeThreads) {
          float v[kMaxSlices];
#pragma unroll
          for (int s = 0; s < kMaxSlices; ++s) {
            v[s] = s < p.parts ? __ldcg(a.partials + s * part_stride + partials_at + at) : 0.0f;
          }
          store(at, tree_sum(v));
        }
        if (threadIdx.x == 0) a.arrivals[group] = 0;
      }
    }
  }
  copy_async_wait<0>();
}

// ---- launcher ------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  const auto text = [&] { return what; };
  const dim3 grid(a.plan.grid), block(kDecodeThreads);
  if (a.plan.m == 1) {
    launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, 1>, grid, block, a.plan.shared_bytes, a);
  } else if (a.plan.m <= 8) {
    launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, 8>, grid, block, a.plan.shared_bytes, a);
  } else {
    launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, 16>, grid, block, a.plan.shared_bytes, a);
  }
}

template <WeightFormat F>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what);

}  // namespace nibblelm::cuda
