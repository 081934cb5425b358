// What one warp of the decode kernel computes: a stage of weights by the planes, on tensor cores, with the scales of
// weights that have groups.
#pragma once

#include "linear_records.cuh"

namespace nibblelm::cuda {

// c += codes x digits.
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

// Sums of one strip in a warp: raw ones (int32, or fp32 for full formats), and scaled ones for weights with groups.
template <WeightFormat F, bool Grouped, int D, int C>
struct Tile {
  static constexpr bool kDigits{
      kDigitColumns<F, D>};  // column 2 m + d is digit d of row m of x, else column m is row m
  static constexpr int kTiles{kDigits ? (C + 3) / 4 : (C + 7) / 8};  // of 8 columns
  static constexpr int kPlanes{kDigits ? 1 : D};                     // tensor-core products of a tile
  static constexpr int kColumns{kDigits || C == 1 ? 1 : 2};          // rows of x of a thread in a tile
  // int4: low nibbles, and high ones times 16, which saves their shift: not where the registers are better spent on
  // planes read ahead.
  static constexpr int kSets{F == WeightFormat::int4 && (Grouped ? C == 1 : C <= 4) ? 2 : 1};
  typename Format<F>::Accumulator acc[kSets][kTiles][kPlanes][4]{};
  float sum[Grouped ? kTiles : 1][2][kColumns]{};  // [tile][row half][column]

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

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSets * kTiles * kPlanes; ++i) {
      auto& c = acc[i / (kTiles * kPlanes)][i / kPlanes % kTiles][i % kPlanes];
      c[0] = c[1] = c[2] = c[3] = 0;
    }
  }

  // Adds the scaled sums of a group and clears the raw ones.
  __device__ __forceinline__ void end_group(const GroupAt<F>& group, int lane) {
    RowTerms rows[2];
    read_record<F>(group.form, lane / 4, rows, [&]<class T>(int at) { return load_shared<T>(group.record + at); });
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int m = column(t, j, lane);
        int digits[D];
#pragma unroll
        for (int d = 0; d < kGroupWords<D>; ++d) digits[d] = load_shared<int>(group.sums + (d * C + m) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (D == 2) {
            add_whole(t, h, j, rows[h], digits[0], group.form.has_minimum());
          } else {
            int raws[D];
#pragma unroll
            for (int d = 0; d < D; ++d) raws[d] = raw(t, d, h, j);
            sum[t][h][j] += scale_group<D>(raws, digits, rows[h], group.form.has_minimum());
          }
        }
      }
    }
    clear();
  }

  __device__ __forceinline__ void add_whole(int t, int h, int j, const RowTerms& row, int digits, bool has_minimum) {
    sum[t][h][j] = add_group(sum[t][h][j], row, raw(t, 0, h, j) * 256 + raw(t, 1, h, j), digits, has_minimum);
  }
};

// This lane's place in the planes: its 8 columns of K in the plane or digit that is its column of the tensor-core tile.
// Lanes beyond the last row of x read that row again: their columns of the result are not used.
template <int Tiles>
struct PlaneAt {
  uint32_t row[Tiles];  // shared addresses

  template <typename T>
  __device__ __forceinline__ T read(int tile, int offset) const {
    return load_shared<T>(row[tile] + offset);
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

// Adds the products of the stage at `here` (in the ring, a shared address) with the planes; k is its first column.
// Simple: its groups are as GroupAt::kSimple says, and there is one row of x.
template <WeightFormat F, bool Grouped, int D, int C, bool Simple>
__device__ __forceinline__ void multiply_stage(const DecodeArgs& a, Tile<F, Grouped, D, C>& tile, uint32_t here,
                                               const PlaneAt<Tile<F, Grouped, D, C>::kTiles>& planes, GroupAt<F>& group,
                                               int k, int lane) {
  using Fmt = Format<F>;
  using Tiles = Tile<F, Grouped, D, C>;
  constexpr int kChunk{8 * D * Fmt::kPlaneBytes};
  if constexpr (Fmt::kInteger) {
    constexpr int kWords{Fmt::kCopies / 2};
    uint32_t scales;
    int zeros, digit_sum;
    if constexpr (Simple) {  // asked for before the products, used behind them
      scales = load_shared<uint32_t>(group.record + lane / 4 * 4);
      zeros = group.form.default_zero() * (F == WeightFormat::int4 ? 0x11 : 0x101);
      if (group.form.has_zero()) {
        zeros = load_shared<ZeroPair<F>>(group.record + 2 * kStripRows + lane / 4 * sizeof(ZeroPair<F>));
      }
      digit_sum = load_shared<int>(group.sums);
    }
#pragma unroll
    for (int u = 0; u < kStepK / 64; ++u) {
      uint4 w[kWords], digits[Tiles::kTiles];
#pragma unroll
      for (int i = 0; i < kWords; ++i) w[i] = load_shared<uint4>(here + (u * kWords + i) * 512);
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
        if constexpr (Grouped && !Simple) {
          if (t == 0 ? group.mask == 0 : u == 1 || group.mask < 3) {
            tile.end_group(group, lane);
            group.record += a.record_bytes;
            group.sums += kGroupWords<D> * C * 4;
          }
        }
      }
    }
    if constexpr (Simple) {
      float scale[2];
      unpack_pair(scales, group.form.brain(), scale[0], scale[1]);
#pragma unroll
      for (int h = 0; h < 2; ++h) tile.add_whole(0, h, 0, {scale[h], 0.0f, zero_of<F>(zeros, h)}, digit_sum, false);
      tile.clear();
      group.sums += 4;
    }
  } else {
    const int row = lane / 4;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (k + u * Fmt::kStageK / 2 < a.k) {  // the last stage may be half full
        const uint32_t at = here + row * 128 + ((4 * u + lane % 4) ^ (row & 1) << 2) * 16;
        const uint4 w[2]{load_shared<uint4>(at), load_shared<uint4>(at + 8 * 128)};
        multiply_full<F, D>(tile.acc[0], w, planes, u * Fmt::kStageK / 16 * kChunk);
      }
    }
  }
}

}  // namespace nibblelm::cuda
