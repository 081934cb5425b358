// The decode kernel: y = x W^T for 1 to 16 rows of x, limited by the bytes of W.
//
// A warp owns one slice of K for one strip of 16 rows at a time and streams it through a private ring in shared memory:
// every lane reads back only the 16 bytes it copied itself, so the ring needs no barrier. The rows of x are the 8
// columns of the tensor-core tile, one tile per plane (linear_planes.cuh). Integer products are exact in int32. Slices
// are added as a binary tree whose shape depends on K alone: every m, split over blocks and grid gives the same bits.
#pragma once

#include "linear_planes.cuh"

namespace nibblelm::cuda {

// ---- device helpers ------------------------------------------------------------------------------------------

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

// Scale, zero-point and minimum of row r + 8 * half of one record.
struct RowTerms {
  float scale, minimum;
  int zero;
};

template <WeightFormat F>
__device__ __forceinline__ RowTerms read_record(const DecodeArgs& a, const uint8_t* record, int r, int half) {
  const auto read = [&](const uint8_t* at) {  // 16-bit scales without a branch between their two kinds
    if (a.scale_dtype == DType::f32) return reinterpret_cast<const float*>(at)[2 * r + half];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(at)[2 * r + half];
    return a.scale_dtype == DType::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                        : __half2float(__ushort_as_half(bits));
  };
  RowTerms out{read(record), 0.0f, a.default_zero};
  if (a.has_minimum) out.minimum = read(record + a.minimum_at);
  if (a.has_zero) {
    const uint8_t* const zeros = record + (a.scale_dtype == DType::f32 ? 64 : 32);
    out.zero = F == WeightFormat::int4 ? zeros[r] >> (4 * half) & 15 : zeros[2 * r + half];
  }
  return out;
}

// The warp's place in its stream of stages, kStages ahead of what it computes.
template <WeightFormat F, bool Grouped>
struct Stream {
  using Fmt = Format<F>;
  static constexpr int kUnitStep{Fmt::kInteger ? 512 : 64};  // bytes from one unit to the next in memory
  const DecodeArgs& a;
  uint32_t ring, record_ring;  // shared addresses
  int lane, first_unit, slice_units, strip, strip_step;
  int unit{0}, slot{0};
  const uint8_t* source[Fmt::kLoads];

  __device__ __forceinline__ void start_strip() {
    if constexpr (Fmt::kInteger) {
      source[0] = a.data + (static_cast<int64_t>(strip) * a.units + first_unit) * 512 + lane * 16;
    } else {
      constexpr int kElementBytes{64 / Fmt::kUnitK};
      const int column = first_unit * Fmt::kUnitK + lane % 4 * (Fmt::kUnitK / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // rows beyond N repeat the last one; their results are not stored
        const int row = min(strip * kStripRows + 8 * half + lane / 4, a.n - 1);
        source[half] = a.data + row * a.pitch_bytes + static_cast<int64_t>(column) * kElementBytes;
      }
    }
  }

  __device__ __forceinline__ void copy_unit(int u) {
#pragma unroll
    for (int i = 0; i < Fmt::kLoads; ++i) {
      copy_async_16(ring + slot * kStageBytes + u * Fmt::kUnitBytes + i * 512 + lane * 16, source[i] + u * kUnitStep);
    }
  }

  __device__ __forceinline__ void issue() {
    if (strip < a.strips) {
      const int count = min(Fmt::kStageUnits, slice_units - unit);
      if (count == Fmt::kStageUnits) {
#pragma unroll
        for (int u = 0; u < Fmt::kStageUnits; ++u) copy_unit(u);
      } else {
#pragma unroll 1
        for (int u = 0; u < count; ++u) copy_unit(u);
      }
      if constexpr (Grouped) {
        const int group = (first_unit + unit) * Fmt::kUnitK >> a.group_shift;
        const int bytes = (count * Fmt::kUnitK >> a.group_shift) * a.record_bytes;
        const uint8_t* const records = a.records + (static_cast<int64_t>(strip) * a.groups + group) * a.record_bytes;
#pragma unroll 1
        for (int at = 8 * lane; at < bytes; at += 8 * kWarp) {
          copy_async_8(record_ring + slot * a.plan.record_slot + at, records + at);
        }
      }
#pragma unroll
      for (int i = 0; i < Fmt::kLoads; ++i) source[i] += count * kUnitStep;
      slot = slot == kStages - 1 ? 0 : slot + 1;
      unit += count;
      if (unit == slice_units) {
        unit = 0;
        strip += strip_step;
        start_strip();
      }
    }
    copy_async_commit();
  }
};

// Sums of one strip in a warp: raw ones (int32, or fp32 for full formats), and scaled ones for weights with groups.
template <WeightFormat F, bool Grouped, int D, int C>
struct Tile {
  static constexpr int kTiles{(C + 7) / 8};                     // of 8 columns
  static constexpr int kColumns{C == 1 ? 1 : 2};                // of a thread in a tile
  static constexpr int kSets{F == WeightFormat::int4 ? 2 : 1};  // int4: low nibbles, and high ones times 16
  typename Format<F>::Accumulator acc[kSets][kTiles][D][4]{};
  float sum[Grouped ? kTiles : 1][2][kColumns]{};  // [tile][row half][column]

  // The sum of element q of plane d.
  __device__ __forceinline__ auto raw(int t, int d, int q) const {
    if constexpr (F == WeightFormat::int4) {
      return acc[0][t][d][q] + (acc[1][t][d][q] >> 4);
    } else {
      return acc[0][t][d][q];
    }
  }

  // sum += scale * (raw - zero * digit sums) + minimum * digit sums at the end of a group; clears raw.
  __device__ __forceinline__ void end_group(const DecodeArgs& a, const uint8_t* record, const int* sums, int lane) {
    const RowTerms rows[2]{read_record<F>(a, record, lane / 4, 0), read_record<F>(a, record, lane / 4, 1)};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int m = C == 1 ? 0 : t * 8 + lane % 4 * 2 + j;
        float value[2], total;
        if constexpr (D == 2) {  // a group of 128 of two digits fits int32 together
          const int digits = sums[m] * 256 + sums[C + m];
          total = static_cast<float>(digits);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            value[h] = static_cast<float>(raw(t, 0, 2 * h + j) * 256 + raw(t, 1, 2 * h + j) - rows[h].zero * digits);
          }
        } else {
          value[0] = value[1] = total = 0.0f;
#pragma unroll
          for (int d = 0; d < D; ++d) {
            const int digits = sums[d * C + m];
            total = fmaf(total, 256.0f, static_cast<float>(digits));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              value[h] = fmaf(value[h], 256.0f, static_cast<float>(raw(t, d, 2 * h + j) - rows[h].zero * digits));
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sum[t][h][j] = fmaf(rows[h].scale, value[h], sum[t][h][j]);
          if (a.has_minimum) sum[t][h][j] = fmaf(rows[h].minimum, total, sum[t][h][j]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int d = 0; d < D; ++d) acc[s][t][d][0] = acc[s][t][d][1] = acc[s][t][d][2] = acc[s][t][d][3] = 0;
      }
    }
  }
};

// acc += one 32-column tile of codes x digits; `planes` is this lane's chunk for rows of x under 8.
template <int D, int Tiles>
__device__ __forceinline__ void multiply_codes(int (&acc)[Tiles][D][4], const uint32_t (&a)[4], const uint8_t* planes,
                                               int pitch8, int row, int m) {
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const bool used = t * 8 + row < m;
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
    for (int d = 0; d < D; ++d) mma(acc[t][d], a, b[d]);
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
__device__ __forceinline__ void multiply_full(float (&acc)[Tiles][D][4], const uint4 (&w)[2], const uint8_t* planes,
                                              int pitch8, int row, int m) {
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
        const bool used = t * 8 + row < m;
        const uint2 b = used ? *reinterpret_cast<const uint2*>(planes + t * pitch8 + d * 16) : make_uint2(0, 0);
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
        const bool used = t * 8 + row < m;
        const uint4 b = used ? *reinterpret_cast<const uint4*>(planes + t * pitch8 + d * 16) : make_uint4(0, 0, 0, 0);
        mma<F == WeightFormat::f16>(acc[t][d], first, make_uint2(b.x, b.y));
        mma<F == WeightFormat::f16>(acc[t][d], second, make_uint2(b.z, b.w));
      }
    }
  }
}

// What a block's threads need to turn the slices' sums into outputs.
template <WeightFormat F, bool Grouped, int D, int C>
struct Outputs {
  static constexpr bool kRaw{Format<F>::kInteger && !Grouped};  // `red` holds raw digit sums, else scaled floats
  static constexpr int kWords{kRaw ? D : 1};
  const DecodeArgs& a;
  const int* sums;
  const float* scales;
  RowTerms terms;

  // Output `at` of a strip group is [strip of the block][row of x][row of the strip].
  __device__ __forceinline__ int row(int at) const { return C == 1 ? 0 : at / kStripRows % a.plan.m; }
  __device__ __forceinline__ int sub(int at) const { return C == 1 ? at / kStripRows : at / kStripRows / a.plan.m; }
  __device__ __forceinline__ int column(int group, int at) const {
    return (group * a.plan.block_strips + sub(at)) * kStripRows + at % kStripRows;
  }

  __device__ __forceinline__ void load_terms(int n) {  // weights: may be read ahead of time
    if constexpr (kRaw) {
      if (n >= a.n) return;
      const uint8_t* const record = a.records + static_cast<int64_t>(n / kStripRows) * a.record_bytes;
      terms = read_record<F>(a, record, n % 8, n / 8 % 2);
    }
  }

  __device__ __forceinline__ float add_slices(const int* red, int at) const {
    const DecodePlan& p = a.plan;
    const int m = row(at), step = p.m * kStripRows;
    const int* from = red + ((sub(at) << p.block_log) * step + m * kStripRows + at % kStripRows) * kWords;
    float v[kMaxSlices];
#pragma unroll
    for (int s = 0; s < kMaxSlices; ++s) {
      v[s] = 0.0f;
      if (s < p.block_slices()) {
        if constexpr (kRaw) {
          float value{0.0f}, total{0.0f};
#pragma unroll
          for (int d = 0; d < D; ++d) {
            const int digits = sums[(s * D + d) * C + m];
            value = fmaf(value, 256.0f, static_cast<float>(from[d] - terms.zero * digits));
            total = fmaf(total, 256.0f, static_cast<float>(digits));
          }
          value *= terms.scale;
          if (a.has_minimum) value = fmaf(terms.minimum, total, value);
          v[s] = value * scales[s * C + m];
        } else {
          v[s] = __int_as_float(*from) * scales[s * C + m];
        }
        from += step * kWords;
      }
    }
    return tree_sum(v);
  }

  __device__ __forceinline__ void store(int group, int at, float value) const {
    const int n = column(group, at), m = row(at);
    if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value + (a.bias ? a.bias[n] : 0.0f));
  }
};

// ---- kernel --------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
__global__ void __launch_bounds__(kDecodeThreads, C == 1 ? 3 : 2)
    linear_decode_kernel(const __grid_constant__ DecodeArgs a) {
  using Fmt = Format<F>;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int ticket;
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int part = blockIdx.x & (p.parts() - 1);
  const int first_group = blockIdx.x >> p.parts_log, group_step = gridDim.x >> p.parts_log;
  const int slice = warp & (p.block_slices() - 1), sub = warp >> p.block_log;
  const int begin = slice_begin((part << p.block_log) + slice, p.slices_log, a.steps);
  const int end = slice_begin((part << p.block_log) + slice + 1, p.slices_log, a.steps);
  const int slice_k = (begin - slice_begin(part << p.block_log, p.slices_log, a.steps)) * kStepK;  // in the image
  constexpr int kStepUnits{kStepK / Fmt::kUnitK};

  const uint8_t* const ring = shared + warp * kStages * kStageBytes;
  const uint8_t* const record_ring = shared + p.records_at + warp * kStages * p.record_slot;
  Stream<F, Grouped> stream{a,
                            shared_address(ring),
                            shared_address(record_ring),
                            lane,
                            begin * kStepUnits,
                            min(end * kStepUnits, a.units) - begin * kStepUnits,
                            first_group * p.block_strips + sub,
                            group_step * p.block_strips};
  stream.start_strip();
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) stream.issue();  // weights: the step does not change them
  uint8_t* const image = shared + p.image_at;
  const int* const sums = reinterpret_cast<const int*>(image + p.sums_at);
  const float* const scales = reinterpret_cast<const float*>(image + p.scales_at);
  const int outputs = p.block_strips * p.m * kStripRows;
  Outputs<F, Grouped, D, C> out{a, sums, scales, {}};
  out.load_terms(out.column(first_group, threadIdx.x));

  dependency_wait();
  dependency_release();
  prepare_image<F, Grouped, D, C>(a, image, part);
  __syncthreads();

  // This lane's 8 columns of K in the planes of row lane / 4.
  constexpr int kChunk{8 * D * Fmt::kPlaneBytes};
  const uint8_t* const planes = image + p.planes_at + lane / 4 * p.plane_pitch + slice_k / 8 * kChunk +
                                (F == WeightFormat::f32 ? lane % 4 / 2 * kChunk + lane % 2 * 8 : lane % 4 * kChunk);
  int* const red = reinterpret_cast<int*>(shared + p.red_at);
  int slot{0}, half{0};

  for (int group = first_group; group < p.strip_groups; group += group_step, half ^= 1) {
    constexpr int kWords{Outputs<F, Grouped, D, C>::kWords};
    int* const red_now = red + half * kDecodeWarps * p.m * kStripRows * kWords;
    if (group * p.block_strips + sub < a.strips) {
      Tile<F, Grouped, D, C> tile;
      const auto multiply = [&](int unit, int u) {  // unit u of the stage that starts at `unit`
        const uint8_t* const here = ring + slot * kStageBytes + u * Fmt::kUnitBytes + lane * 16;
        const uint8_t* const b = planes + (unit + u) * (Fmt::kUnitK / 8) * kChunk;
        if constexpr (Fmt::kInteger) {
          const uint4 w = *reinterpret_cast<const uint4*>(here);
#pragma unroll
          for (int t = 0; t < Fmt::kUnitK / 32; ++t) {
            uint32_t words[4]{w.x, w.y, w.z, w.w};
            if constexpr (F == WeightFormat::int4) {  // high nibbles stay where they are: Tile::raw divides by 16
#pragma unroll
              for (int i = 0; i < 4; ++i) words[i] &= t == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u;
            }
            multiply_codes(tile.acc[t], words, b + t * 4 * kChunk, 8 * p.plane_pitch, lane / 4, p.m);
            if constexpr (Grouped) {
              const int k = u * Fmt::kUnitK + 32 * t;  // from the stage's first
              if ((k + 32) % (1 << a.group_shift) == 0) {
                const int group_sums = (slice_k + unit * Fmt::kUnitK + k) >> a.group_shift;
                tile.end_group(a, record_ring + slot * p.record_slot + (k >> a.group_shift) * a.record_bytes,
                               sums + group_sums * D * C, lane);
              }
            }
          }
        } else {
          const uint4 w[2]{*reinterpret_cast<const uint4*>(here), *reinterpret_cast<const uint4*>(here + 512)};
          multiply_full<F, D>(tile.acc[0], w, b, 8 * p.plane_pitch, lane / 4, p.m);
        }
      };
#pragma unroll 1
      for (int unit = 0; unit < stream.slice_units; unit += Fmt::kStageUnits) {
        copy_async_wait<kStages - 1>();
        if constexpr (Grouped) __syncwarp();  // records were copied by other lanes
        const int count = min(Fmt::kStageUnits, stream.slice_units - unit);
        if (!Grouped && count == Fmt::kStageUnits) {
#pragma unroll
          for (int u = 0; u < Fmt::kStageUnits; ++u) multiply(unit, u);
        } else {
#pragma unroll 1
          for (int u = 0; u < count; ++u) multiply(unit, u);
        }
        if constexpr (Grouped) __syncwarp();  // every lane has read the slot's records
        slot = slot == kStages - 1 ? 0 : slot + 1;
        stream.issue();
      }
#pragma unroll
      for (int t = 0; t < tile.kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < tile.kColumns; ++j) {
          const int m = C == 1 ? 0 : t * 8 + lane % 4 * 2 + j;
          if (C == 1 ? lane % 4 != 0 : m >= p.m) continue;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int* const to = red_now + ((warp * p.m + m) * kStripRows + 8 * h + lane / 4) * kWords;
            if constexpr (Grouped) {
              *to = __float_as_int(tile.sum[t][h][j]);
            } else if constexpr (Fmt::kInteger) {
#pragma unroll
              for (int d = 0; d < D; ++d) to[d] = tile.raw(t, d, 2 * h + j);
            } else {
              float value{0.0f};  // the smallest terms first
#pragma unroll
              for (int d = D - 1; d >= 0; --d) value += tile.raw(t, d, 2 * h + j);
              *to = __float_as_int(value);
            }
          }
        }
      }
    }
    __syncthreads();  // the next round writes the other half of `red`, so one barrier a round is enough

    float* const partials = a.partials + static_cast<int64_t>(group) * outputs;
    const int64_t part_step = static_cast<int64_t>(p.strip_groups) * outputs;
#pragma unroll 1
    for (int at = threadIdx.x; at < outputs; at += kDecodeThreads) {
      const float value = out.add_slices(red_now, at);
      if (p.parts_log == 0) {
        out.store(group, at, value);
      } else {
        partials[part * part_step + at] = value;
      }
      const bool more = at + kDecodeThreads < outputs;
      out.load_terms(out.column(more ? group : group + group_step, more ? at + kDecodeThreads : threadIdx.x));
    }
    if (p.parts_log > 0) {  // the block that arrives last adds the parts, in their order
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) ticket = atomicAdd(a.arrivals + group, 1);
      __syncthreads();
      if (ticket == p.parts() - 1) {
        __threadfence();
#pragma unroll 1
        for (int at = threadIdx.x; at < outputs; at += kDecodeThreads) {
          float v[kMaxSlices];
#pragma unroll
          for (int s = 0; s < kMaxSlices; ++s) v[s] = s < p.parts() ? __ldcg(partials + s * part_step + at) : 0.0f;
          out.store(group, at, tree_sum(v));
        }
        if (threadIdx.x == 0) a.arrivals[group] = 0;
      }
    }
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  const auto text = [&] { return what; };
  if (a.images != nullptr) {
    const int warps = a.plan.m << a.plan.slices_log;
    launch_kernel(launch, text, linear_planes_kernel<F, Grouped, D, C>, dim3((warps + kDecodeWarps - 1) / kDecodeWarps),
                  dim3(kDecodeThreads), 0, a);
  }
  launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, C>, dim3(a.plan.grid), dim3(kDecodeThreads),
                a.plan.shared_bytes, a);
}

template <WeightFormat F, bool Grouped, int D>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  if (a.plan.m == 1) {
    launch_decode<F, Grouped, D, 1>(a, launch, what);
  } else if (a.plan.m <= 8) {
    launch_decode<F, Grouped, D, 8>(a, launch, what);
  } else {
    launch_decode<F, Grouped, D, 16>(a, launch, what);
  }
}

// Over the dtypes of x and the presence of groups; one file per format instantiates it.
template <WeightFormat F>
void launch_format(const DecodeArgs& a, bool float_activations, const Launch& launch, const std::string& what) {
  constexpr int kFewest{decode_planes(F, DType::bf16)}, kMost{decode_planes(F, DType::f32)};
  if constexpr (Format<F>::kInteger) {
    if (a.group_shift > 0) {
      float_activations ? launch_decode<F, true, kMost>(a, launch, what)
                        : launch_decode<F, true, kFewest>(a, launch, what);
      return;
    }
  }
  float_activations ? launch_decode<F, false, kMost>(a, launch, what)
                    : launch_decode<F, false, kFewest>(a, launch, what);
}

}  // namespace nibblelm::cuda
