// What one warp of the decode kernel computes: a stage of weights by the planes, on tensor cores, with the scales of
// weights that have groups.
#pragma once

#include "linear_planes.cuh"

namespace nibblelm::cuda {

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

// What a warp does in a link: one slice of K (C > 1: `own` neighbouring slices) in every strip_step-th strip.
struct WarpPart {
  int me, sub;  // warp of the strip, strip of the block
  int first_slice, own;
  int begin;                // step of K
  int first_stage, stages;  // of a strip
  int first_strip, strip_step;

  template <WeightFormat F, int C>
  __device__ __forceinline__ static WarpPart of(const DecodeArgs& a) {
    constexpr int kStepStages{kStepK / Format<F>::kStageK};
    const DecodePlan& p = a.plan;
    const int warp = threadIdx.x / kWarp, part = blockIdx.x & (p.parts() - 1), part_blocks = gridDim.x >> p.parts_log;
    WarpPart w;
    w.me = warp & (p.strip_warps() - 1), w.sub = warp >> (p.block_log - p.own_log);
    w.own = C == 1 ? 1 : 1 << p.own_log, w.first_slice = w.me * w.own;
    const int slice = (part << p.block_log) + w.first_slice;
    w.begin = slice_begin(slice, p.slices_log, a.steps), w.first_stage = w.begin * kStepStages;
    w.stages = min(slice_begin(slice + w.own, p.slices_log, a.steps) * kStepStages, a.stages) - w.first_stage;
    w.first_strip = (blockIdx.x >> p.parts_log) + w.sub * part_blocks, w.strip_step = part_blocks * p.block_strips;
    return w;
  }
  __device__ __forceinline__ int strips(const DecodeArgs& a) const {  // how many it takes
    return first_strip < a.strips ? (a.strips - first_strip + strip_step - 1) / strip_step : 0;
  }
};

// Scale, zero-point and minimum of one row in one group.
struct RowTerms {
  float scale, minimum;
  int zero;
};

// Two scales of 16 bits.
__device__ __forceinline__ void unpack_pair(uint32_t pair, bool brain, float& low, float& high) {
  low = brain ? __uint_as_float(pair << 16) : __half2float(__ushort_as_half(pair & 0xffff));
  high = brain ? __uint_as_float(pair & 0xffff0000u) : __half2float(__ushort_as_half(pair >> 16));
}

// Of rows r and r + 8 of a record.
template <WeightFormat F>
__device__ __forceinline__ void read_record(const DecodeArgs& a, const uint8_t* record, int r, RowTerms (&rows)[2]) {
  const auto read_pair = [&](const uint8_t* at, float& low, float& high) {
    if (a.scale_dtype == DType::f32) {
      const float2 pair = reinterpret_cast<const float2*>(at)[r];
      low = pair.x, high = pair.y;
    } else {
      unpack_pair(reinterpret_cast<const uint32_t*>(at)[r], a.scale_dtype == DType::bf16, low, high);
    }
  };
  read_pair(record, rows[0].scale, rows[1].scale);
  rows[0].minimum = rows[1].minimum = 0.0f;
  if (a.has_minimum) read_pair(record + a.minimum_at, rows[0].minimum, rows[1].minimum);
  rows[0].zero = rows[1].zero = a.default_zero;
  if (a.has_zero) {
    const uint8_t* const zeros = record + (a.scale_dtype == DType::f32 ? 64 : 32);
    const int both = F == WeightFormat::int4 ? zeros[r] : reinterpret_cast<const uint16_t*>(zeros)[r];
    rows[0].zero = both & (F == WeightFormat::int4 ? 15 : 255);
    rows[1].zero = both >> (F == WeightFormat::int4 ? 4 : 8);
  }
}

// What the sum of one row of W needs, as it is in memory: asked for long before, and first looked at then.
template <WeightFormat F>
struct RowBits {
  uint32_t scale, minimum{0}, zeros{0};
  float bias{0.0f};

  // Of row `row` of a strip, row n of the weight.
  __device__ __forceinline__ static RowBits read(const DecodeArgs& a, int strip, int row) {
    RowBits out;
    const uint8_t* const record = a.records + static_cast<int64_t>(strip) * a.record_bytes;
    const int at = 2 * (row % 8) + row / 8;
    const auto word = [&](const uint8_t* from) -> uint32_t {
      return a.scale_dtype == DType::f32 ? reinterpret_cast<const uint32_t*>(from)[at]
                                         : reinterpret_cast<const uint16_t*>(from)[at];
    };
    out.scale = word(record);
    if (a.has_minimum) out.minimum = word(record + a.minimum_at);
    if (a.has_zero) {
      out.zeros = record[(a.scale_dtype == DType::f32 ? 64 : 32) + (F == WeightFormat::int4 ? row % 8 : at)];
    }
    return out;
  }

  __device__ __forceinline__ RowTerms terms(const DecodeArgs& a, int row) const {
    const auto value = [&](uint32_t bits) {
      return a.scale_dtype == DType::f32    ? __uint_as_float(bits)
             : a.scale_dtype == DType::bf16 ? __uint_as_float(bits << 16)
                                            : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    };
    const int zero = F == WeightFormat::int4 ? zeros >> row / 8 * 4 & 15 : zeros;
    return {value(scale), value(minimum), a.has_zero ? zero : a.default_zero};
  }
};

// sum of codes x digits -> scale * sum of (code - zero) x activation + minimum * sum of activations.
template <int D>
__device__ __forceinline__ float scale_sums(const int (&raw)[D], const int (&digits)[D], const RowTerms& row,
                                            float slice_scale, bool has_minimum) {
  float value{0.0f};
#pragma unroll
  for (int d = 0; d < D; ++d) value = fmaf(value, 256.0f, static_cast<float>(raw[d] - row.zero * digits[d]));
  value = __fmul_rn(row.scale, value);
  if (has_minimum) {
    float total{0.0f};
#pragma unroll
    for (int d = 0; d < D; ++d) total = fmaf(total, 256.0f, static_cast<float>(digits[d]));
    value = fmaf(row.minimum, total, value);
  }
  return __fmul_rn(value, slice_scale);
}

// Sums of one strip in a warp: raw ones (int32, or fp32 for full formats), and scaled ones for weights with groups.
template <WeightFormat F, bool Grouped, int D, int C>
struct Tile {
  static constexpr bool kDigits{
      kDigitColumns<F, D>};  // column 2 m + d is digit d of row m of x, else column m is row m
  static constexpr int kTiles{kDigits ? (C + 3) / 4 : (C + 7) / 8};  // of 8 columns
  static constexpr int kPlanes{kDigits ? 1 : D};                     // tensor-core products of a tile
  static constexpr int kColumns{kDigits || C == 1 ? 1 : 2};          // rows of x of a thread in a tile
  // With one row of x all four lanes of a quad have its sums: each scales one of four groups.
  static constexpr bool kFours{Grouped && kDigits && C == 1};
  // int4: low nibbles, and high ones times 16, which saves their shift: not where every group takes its own sums, nor
  // where the registers are better spent on planes read ahead.
  static constexpr int kSets{F == WeightFormat::int4 && (!Grouped || kFours) && C <= 4 ? 2 : 1};
  static constexpr int kTimes{kFours && kSets == 2 ? 16 : 1};  // what `sum` is too large by
  typename Format<F>::Accumulator acc[kSets][kTiles][kPlanes][4]{};
  float sum[Grouped ? kTiles : 1][2][kColumns]{};  // [tile][row half][column]
  int groups{0}, before[2]{},
      value[2]{};  // of kFours: groups since the last addition, the sums of all and of this lane's

  // The sum of plane d in row half h and this lane's column j of tile t.
  __device__ __forceinline__ auto raw(int t, int d, int h, int j) const {
    const auto element = [&](int set) { return kDigits ? acc[set][t][0][2 * h + d] : acc[set][t][d][2 * h + j]; };
    if constexpr (kSets == 2) {
      return element(0) + (element(1) >> 4);
    } else {
      return element(0);
    }
  }

  // The row of x of this lane's column j of tile t.
  static __device__ __forceinline__ int column(int t, int j, int lane) {
    return C == 1 ? 0 : kDigits ? t * 4 + lane % 4 : t * 8 + lane % 4 * 2 + j;
  }

  // Adds the scaled sums of a group, whose digit sums are `sums`, and clears the raw ones.
  __device__ __forceinline__ void end_group(const DecodeArgs& a, const uint8_t* record, const int* sums, int lane) {
    if constexpr (kFours) {
      hold_group(lane);
      return;
    }
    RowTerms rows[2];
    read_record<F>(a, record, lane / 4, rows);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int m = column(t, j, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (D == 2) {
            const int both = raw(t, 0, h, j) * 256 + raw(t, 1, h, j) - rows[h].zero * sums[m];
            sum[t][h][j] = fmaf(rows[h].scale, static_cast<float>(both), sum[t][h][j]);
            if (a.has_minimum) sum[t][h][j] = fmaf(rows[h].minimum, static_cast<float>(sums[m]), sum[t][h][j]);
          } else {
            int raws[D], digits[D];
#pragma unroll
            for (int d = 0; d < D; ++d) raws[d] = raw(t, d, h, j), digits[d] = sums[d * C + m];
            sum[t][h][j] += scale_sums<D>(raws, digits, rows[h], 1.0f, a.has_minimum);
          }
        }
      }
#pragma unroll
      for (int d = 0; d < kPlanes; ++d) acc[0][t][d][0] = acc[0][t][d][1] = acc[0][t][d][2] = acc[0][t][d][3] = 0;
    }
  }

  // The group's sums are what the raw ones grew by: modulo 2^32 those may overflow. Lane `groups` of the quad keeps
  // them.
  __device__ __forceinline__ void hold_group(int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t digits[2];
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        digits[d] = static_cast<uint32_t>(acc[0][0][0][2 * h + d]);
        if constexpr (kSets == 2) digits[d] = digits[d] * 16u + static_cast<uint32_t>(acc[1][0][0][2 * h + d]);
      }
      const uint32_t all = digits[0] * 256u + digits[1];
      if (lane % 4 == groups) value[h] = static_cast<int>(all - static_cast<uint32_t>(before[h]));
      before[h] = static_cast<int>(all);
    }
    ++groups;
  }

  // Adds up to four groups in their order; `rows` are the terms of this lane's, `sums` the digit sums of the first.
  __device__ __forceinline__ void add_groups(const DecodeArgs& a, const RowTerms (&rows)[2], const int* sums,
                                             int lane) {
    const bool held = lane % 4 < groups;  // else the terms are of another group, or none
    const int digit_sum = held ? sums[lane % 4] : 0;
    const float digits = static_cast<float>(digit_sum) * kTimes;
    float product[2], scale[2], minimum[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      product[h] = held ? static_cast<float>(value[h] - rows[h].zero * (digit_sum * kTimes)) : 0.0f;
      scale[h] = held ? rows[h].scale : 0.0f, minimum[h] = held ? rows[h].minimum : 0.0f;
    }
    const auto add = [&]<bool Minimum>() {
#pragma unroll
      for (int of = 0; of < 4; ++of) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float next = fmaf(scale[h], product[h], sum[0][h][0]);
          if constexpr (Minimum) next = fmaf(minimum[h], digits, next);
          sum[0][h][0] = __shfl_sync(kAllLanes, next, of, 4);
        }
      }
    };
    a.has_minimum ? add.template operator()<true>() : add.template operator()<false>();
    groups = 0;
  }
};

// With one row of x, what this lane needs of its group's record of every four, copied to shared memory (a load into
// registers would be waited for with the next load of any kind). A slot is [word][lane]: scales, minimums, zero-points.
template <WeightFormat F, int C>
struct LaneRecords {
  const DecodeChain& chain;
  int lane;
  int link{-1}, strips_left{0};  // of what is to be copied next
  int left, slice_groups;        // groups of the slice, from the next four on
  const uint8_t* from;           // the record of this lane
  int64_t strip_jump;

  // To the next link that has work for this warp.
  __device__ __forceinline__ void next_link() {
    while (++link < chain.count) {
      const DecodeArgs& a = chain.links[link];
      const WarpPart w = WarpPart::of<F, C>(a);
      strips_left = w.strips(a);
      if (strips_left == 0) continue;
      left = slice_groups = w.stages * kStepK >> a.group_shift;
      const int first = (w.begin * kStepK >> a.group_shift) + lane % 4;
      from = a.records + (static_cast<int64_t>(w.first_strip) * a.groups + first) * a.record_bytes;
      strip_jump = (w.strip_step * a.groups - (slice_groups + 3) / 4 * 4) * a.record_bytes;
      return;
    }
  }

  // Copies into the slot at `to` (a shared address) and goes on.
  __device__ __forceinline__ void copy(uint32_t to) {
    if (strips_left == 0) return;
    const DecodeArgs& a = chain.links[link];
    if (lane % 4 < left) {
      const int r = lane / 4, pair = a.scale_dtype == DType::f32 ? 8 : 4;
      to += lane * 4;
      const auto copy_pair = [&](const uint8_t* pairs) {
        copy_async_4(to, pairs + r * pair);
        if (pair == 8) copy_async_4(to + 128, pairs + r * 8 + 4);
        to += pair * 32;
      };
      copy_pair(from);
      if (a.has_minimum) copy_pair(from + a.minimum_at);
      if (a.has_zero) copy_async_4(to, from + pair * 8 + (F == WeightFormat::int4 ? r / 4 * 4 : r / 2 * 4));
    }
    from += 4 * a.record_bytes, left -= 4;
    if (left <= 0) {  // back to the slice's start, in the next strip
      left = slice_groups, from += strip_jump;
      if (--strips_left == 0) next_link();
    }
  }

  // What a slot says of rows r and r + 8.
  __device__ __forceinline__ void read(const DecodeArgs& a, const uint8_t* slot, RowTerms (&rows)[2]) const {
    const int r = lane / 4;
    const uint32_t* word = reinterpret_cast<const uint32_t*>(slot) + lane;
    const auto read_pair = [&](float& low, float& high) {
      if (a.scale_dtype == DType::f32) {
        low = __uint_as_float(word[0]), high = __uint_as_float(word[kWarp]);
        word += 2 * kWarp;
      } else {
        unpack_pair(word[0], a.scale_dtype == DType::bf16, low, high);
        word += kWarp;
      }
    };
    read_pair(rows[0].scale, rows[1].scale);
    rows[0].minimum = rows[1].minimum = 0.0f;
    if (a.has_minimum) read_pair(rows[0].minimum, rows[1].minimum);
    rows[0].zero = rows[1].zero = a.default_zero;
    if (a.has_zero) {
      const uint32_t both = F == WeightFormat::int4 ? *word >> r % 4 * 8 : *word >> r % 2 * 16;
      rows[0].zero = both & (F == WeightFormat::int4 ? 15 : 255);
      rows[1].zero = both >> (F == WeightFormat::int4 ? 4 : 8) & (F == WeightFormat::int4 ? 15 : 255);
    }
  }
};

// This lane's place in the planes: its 8 columns of K in the plane or digit that is its column of the tensor-core tile.
// Lanes beyond the last row of x read that row again: their columns of the result are not used.
template <int Tiles>
struct PlaneAt {
  const uint8_t* shared;
  int row[Tiles];

  template <typename T>
  __device__ __forceinline__ T read(int tile, int offset) const {
    return *reinterpret_cast<const T*>(shared + row[tile] + offset);
  }
};

// acc += one 32-column tile of codes x digits, `offset` bytes into the planes.
template <int D, int Tiles>
__device__ __forceinline__ void multiply_codes(int (&acc)[Tiles][D][4], const uint32_t (&a)[4],
                                               const PlaneAt<Tiles>& planes, int offset) {
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
#pragma unroll
    for (int d = 0; d < D; ++d) mma(acc[t][d], a, planes.template read<uint2>(t, offset + d * 8));
  }
}

// Takes the bf16 part out of a pair of fp32, leaving the rest.
__device__ __forceinline__ uint32_t take_bf16(float& low, float& high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  low -= __low2float(pair);
  high -= __high2float(pair);
  uint32_t word;
  memcpy(&word, &pair, 4);
  return word;
}

// acc += one unit of a full format x planes; w: the lane's 16 bytes of rows r and r + 8.
template <WeightFormat F, int D, int Tiles>
__device__ __forceinline__ void multiply_full(float (&acc)[Tiles][D][4], const uint4 (&w)[2],
                                              const PlaneAt<Tiles>& planes, int offset) {
  if constexpr (F == WeightFormat::f32) {
    uint32_t a[3][4];  // the weight as three bf16 terms
    float low[4]{__uint_as_float(w[0].x), __uint_as_float(w[1].x), __uint_as_float(w[0].z), __uint_as_float(w[1].z)};
    float high[4]{__uint_as_float(w[0].y), __uint_as_float(w[1].y), __uint_as_float(w[0].w), __uint_as_float(w[1].w)};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int q = 0; q < 4; ++q) a[i][q] = take_bf16(low[q], high[q]);
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
#pragma unroll
      for (int d = D - 1; d >= 0; --d) {
        const uint2 b = planes.template read<uint2>(t, offset + d * 16);
#pragma unroll
        for (int i = 2 - d; i >= 0; --i) mma<false>(acc[t][0], a[i], b);  // terms under 2^-24 are left out
      }
    }
  } else {
    const uint32_t first[4]{w[0].x, w[1].x, w[0].y, w[1].y}, second[4]{w[0].z, w[1].z, w[0].w, w[1].w};
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
#pragma unroll
      for (int d = D - 1; d >= 0; --d) {
        const uint4 b = planes.template read<uint4>(t, offset + d * 16);
        mma<F == WeightFormat::f16>(acc[t][d], first, make_uint2(b.x, b.y));
        mma<F == WeightFormat::f16>(acc[t][d], second, make_uint2(b.z, b.w));
      }
    }
  }
}

// Where the groups of the warp's slice are: the record of the next one, in the ring, and its digit sums.
struct GroupAt {
  const uint8_t* record;
  const int* sums;
};

// Adds the products of the stage at `here` (in the ring) with the planes; k is its first column.
template <WeightFormat F, bool Grouped, int D, int C>
__device__ __forceinline__ void multiply_stage(const DecodeArgs& a, Tile<F, Grouped, D, C>& tile, const uint8_t* here,
                                               const PlaneAt<Tile<F, Grouped, D, C>::kTiles>& planes, GroupAt& group,
                                               int group_mask, int k, int lane) {
  using Fmt = Format<F>;
  using Tiles = Tile<F, Grouped, D, C>;
  constexpr int kChunk{8 * D * Fmt::kPlaneBytes};
  if constexpr (Fmt::kInteger) {
    constexpr int kWords{Fmt::kCopies / 2};
#pragma unroll
    for (int u = 0; u < kStepK / 64; ++u) {
      uint4 w[kWords], digits[Tiles::kTiles];
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = *reinterpret_cast<const uint4*>(here + (u * kWords + i) * 512);
      if constexpr (Tiles::kDigits) {
#pragma unroll
        for (int i = 0; i < Tiles::kTiles; ++i) digits[i] = planes.template read<uint4>(i, u * 128);
      }
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const uint4 from = w[t * kWords / 2];
        uint32_t words[4]{from.x, from.y, from.z, from.w};
        if constexpr (F == WeightFormat::int4) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (tile.kSets == 2) {
              words[i] &= t == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u;
            } else {
              words[i] = words[i] >> t * 4 & 0x0f0f0f0fu;
            }
          }
        }
        if constexpr (Tiles::kDigits) {
#pragma unroll
          for (int i = 0; i < Tiles::kTiles; ++i) {
            const uint4 b = digits[i];
            mma(tile.acc[t % tile.kSets][i][0], words, t == 0 ? make_uint2(b.x, b.y) : make_uint2(b.z, b.w));
          }
        } else {
          multiply_codes(tile.acc[t % tile.kSets], words, planes, (u * 2 + t) * 4 * kChunk);
        }
        if constexpr (Grouped) {
          if (t == 0 ? group_mask == 0 : u == 1 || group_mask < 3) {  // the mask is 0, 1 or 3
            tile.end_group(a, group.record, group.sums, lane);
            if constexpr (!Tiles::kFours) {
              group.record += a.record_bytes;
              group.sums += kGroupWords<D> * C;
            }
          }
        }
      }
    }
  } else {
    const int row = lane / 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (k + u * Fmt::kStageK / 2 < a.k) {  // the last stage may be half full
        const uint8_t* const at = here + row * 128 + ((4 * u + lane % 4) ^ (row & 1) << 2) * 16;
        const uint4 w[2]{*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 8 * 128)};
        multiply_full<F, D>(tile.acc[0], w, planes, u * Fmt::kStageK / 16 * kChunk);
      }
    }
  }
}

}  // namespace nibblelm::cuda
