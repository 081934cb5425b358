// The kernel of linear for more than 16 rows of x: tiles of 256 rows of W by `Rows` rows of x, weights unpacked in
// registers, sums exact within a slice of K (or a group) and added as the decode kernel adds them.
//
// W is the operand that comes from registers, x the one in shared memory, so that 17 rows of x are padded to 32 and not
// to 64. A block has 16 warps that multiply, a strip of 16 rows of W each, and one that copies: stages of 128 bytes a
// column of x (128 digits, or 64 halves) with the weights beside them, in a ring. A tile's K may be shared out over
// blocks by whole slices, whose sums a second kernel adds.
#pragma once

#include "barrier.cuh"
#include "linear_prepare.cuh"
#include "linear_reduction.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace nibblelm::cuda {

// ---- rows of x as tiles ---------------------------------------------------------------------------------------

// Where row `row` of x goes: a tile has `rows` columns for every plane, plane by plane, and in one stage 128 bytes of a
// column; the digit sums of the stage's groups lie behind it.
template <WeightFormat F, bool Grouped, int D>
struct TileRow {
  const LargeArgs& g;
  int row;
  int kSumStep{g.p.rows};

  __device__ __forceinline__ uint8_t* tile(int k) const {
    constexpr int kTileK{128 / Format<F>::kPlaneBytes};
    return g.tiles + (static_cast<int64_t>(row / g.p.rows) * g.p.stages + k / kTileK) * g.p.tile_bytes;
  }
  __device__ __forceinline__ void store(int k, const PlaneWords<F, D>& words) const {
    constexpr int kWords{PlaneWords<F, D>::kWords}, kTileK{128 / Format<F>::kPlaneBytes};
    const int in_row = row % g.p.rows, unit = k % kTileK / 32, quarter = k % 32 / 8;
    uint8_t* const to = tile(k) + in_row * 128 + quarter * 4;
#pragma unroll
    for (int d = 0; d < D; ++d) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int chunk = (unit * kWords + i) ^ in_row % 8;
        *reinterpret_cast<uint32_t*>(to + d * g.p.rows * 128 + chunk * 16) = words.plane[d][i];
      }
    }
  }
  __device__ __forceinline__ int* group_sums(int k, int shift) const {
    int* const sums = reinterpret_cast<int*>(tile(k) + D * g.p.rows * 128) + row % g.p.rows;
    return sums + (k % kStepK >> shift) * kGroupWords<D> * g.p.rows;
  }
  __device__ __forceinline__ int* slice_sum(int slice, int d) const {
    return g.sums + (slice * D + d) * g.p.padded_rows() + row;
  }
  __device__ __forceinline__ float* scale(int slice) const { return g.scales + slice * g.p.padded_rows() + row; }
};

template <WeightFormat F, bool Grouped, int D>
__global__ void __launch_bounds__(kDecodeThreads) linear_tiles_kernel(const __grid_constant__ LargeArgs g) {
  extern __shared__ __align__(16) uint8_t stage[];
  __shared__ RowScratch<D> scratch;
  prepare_to_memory<F, Grouped, D>(g.a, WarpShare(g.a, 0, g.a.plan.slices_log), scratch,
                                   TileRow<F, Grouped, D>{g, static_cast<int>(blockIdx.x)}, stage);
}

// ---- the ring of stages ----------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_async_16_or_zeros(uint32_t shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// Arrives at the barrier when this lane's copies have.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// What one block computes at a time: a tile, in the slices [first_slice, last_slice).
struct LargeWork {
  int first_strip, token_tile, part, first_slice, last_slice;

  __device__ __forceinline__ LargeWork(const LargeArgs& g, int index) {
    const LargePlan& p = g.p;
    const int tile = index / p.parts, slices = 1 << g.a.plan.slices_log;
    part = index % p.parts;
    first_strip = tile / p.token_tiles * p.strips;
    token_tile = tile % p.token_tiles;
    first_slice = part * slices / p.parts;
    last_slice = (part + 1) * slices / p.parts;
  }
};

// Slots, stages and parities of the ring, the same for those that fill it and those that empty it.
struct RingPosition {
  int slot{0}, parity{0};
  __device__ __forceinline__ void next(int stages) {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

// The warp that copies.
template <WeightFormat F>
struct LargeProducer {
  using Fmt = Format<F>;
  static constexpr bool kBulk{kArchitecture >= 90};
  static constexpr bool kBulkWeights{kBulk && Fmt::kInteger};
  // Lanes that arrive with their own copies, and the one that expects the bulk ones.
  static constexpr int kArrivals{(kBulkWeights ? 0 : kWarp) + (kBulk ? 1 : 0)};
  static constexpr int kStripBytes{F == WeightFormat::int4 ? 1024 : 2048};  // of a stage
  const LargeArgs& g;
  uint32_t shared, full;  // shared addresses
  int lane;

  __device__ __forceinline__ void weights(const LargeWork& w, int stage, int slot) const {
    const DecodeArgs& a = g.a;
    const uint32_t to = shared + slot * g.p.slot_bytes + g.p.weights_at, barrier = full + slot * 8;
    const int strips = min(g.p.strips, a.strips - w.first_strip);
    if (kBulk && lane == 0) {
      barrier_arrive_expect(barrier, g.p.tile_bytes + (kBulkWeights ? strips * kStripBytes : 0));
    }
    __syncwarp();
    if constexpr (Fmt::kInteger) {
      const uint8_t* const from = a.data + (static_cast<int64_t>(w.first_strip) * a.stages + stage) * kStripBytes;
      if constexpr (kBulk) {
        if (lane < strips) {
          copy_bulk(to + lane * kStripBytes, from + static_cast<int64_t>(lane) * a.stages * kStripBytes, kStripBytes,
                    barrier);
        }
      } else {
#pragma unroll 1
        for (int strip = 0; strip < strips; ++strip) {
#pragma unroll
          for (int i = 0; i < kStripBytes / 512; ++i) {
            const int at = (i * kWarp + lane) * 16;
            copy_async_16(to + strip * kStripBytes + at, from + static_cast<int64_t>(strip) * a.stages * kStripBytes + at);
          }
        }
      }
    } else {  // 8 lanes to the 128 bytes of a row, odd rows with their halves swapped; rows beyond N repeat the last
      const int column = stage * 128 + lane % 8 * 16;
      const uint32_t at = to + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16;
      const uint8_t* const from = a.data + (column < a.pitch_bytes ? column : 0);
#pragma unroll 8
      for (int i = 0; i < g.p.strips * kStripRows / 4; ++i) {
        const int row = min(w.first_strip * kStripRows + 4 * i + lane / 8, a.n - 1);
        copy_async_16_or_zeros(at + i * 512, from + row * a.pitch_bytes, column < a.pitch_bytes);
      }
    }
  }

  __device__ __forceinline__ void activations(const LargeWork& w, int stage, int slot) const {
    const uint32_t to = shared + slot * g.p.slot_bytes, barrier = full + slot * 8;
    const uint8_t* const from =
        g.tiles + (static_cast<int64_t>(w.token_tile) * g.p.stages + stage) * static_cast<int64_t>(g.p.tile_bytes);
    if constexpr (kBulk) {
      if (lane == 0) copy_bulk(to, from, g.p.tile_bytes, barrier);
    } else {
#pragma unroll 4
      for (int at = lane * 16; at < g.p.tile_bytes; at += kWarp * 16) copy_async_16(to + at, from + at);
    }
    if constexpr (!kBulkWeights) barrier_arrive_copies(barrier);
  }

  // Weights of the first stages come before the wait for what makes the activations.
  __device__ __forceinline__ void run(uint32_t empty) const {
    constexpr int kStepStages{kStepK * Fmt::kPlaneBytes / 128};
    const int log = g.a.plan.slices_log, ring = g.p.ring_stages;
    RingPosition at;
    int made{0}, ahead{0};  // stages, and those of the first round whose weights are under way
#pragma unroll 1
    for (int index = blockIdx.x; index < g.p.work(); index += gridDim.x) {
      const LargeWork w(g, index);
      const int first = slice_begin(w.first_slice, log, g.a.steps) * kStepStages,
                last = slice_begin(w.last_slice, log, g.a.steps) * kStepStages;
      if (made == 0) {
        ahead = min(ring, last - first);
#pragma unroll 1
        for (int i = 0; i < ahead; ++i) weights(w, first + i, i);
        dependency_wait();
        dependency_release();
      }
#pragma unroll 1
      for (int stage = first; stage < last; ++stage, ++made) {
        if (made >= ring) barrier_wait(empty + at.slot * 8, at.parity ^ 1);
        if (made >= ahead) weights(w, stage, at.slot);
        activations(w, stage, at.slot);
        at.next(ring);
      }
    }
  }
};

// ---- a warp's strip --------------------------------------------------------------------------------------------

// The scales and digit sums of a slice, for the rows of x of a tile: spread over the lanes, two neighbouring rows each.
template <WeightFormat F, bool Grouped, int D, int Rows>
struct SliceTerms {
  static constexpr int kSums{Format<F>::kInteger && !Grouped ? D : 0};
  static constexpr int kPieces{(Rows + 2 * kWarp - 1) / (2 * kWarp)};
  float2 scale[kPieces];
  int2 digits[kSums + 1][kPieces];

  __device__ __forceinline__ SliceTerms(const LargeArgs& g, int slice, int first_row, int lane) {
    const int padded = g.p.padded_rows();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int row = first_row + (2 * kWarp * i + 2 * lane) % Rows;
      scale[i] = *reinterpret_cast<const float2*>(g.scales + slice * padded + row);
#pragma unroll
      for (int d = 0; d < kSums; ++d) {
        digits[d][i] = *reinterpret_cast<const int2*>(g.sums + (slice * D + d) * padded + row);
      }
    }
  }
  // For this lane's two rows of x in tile t of 8.
  __device__ __forceinline__ void of_tile(int t, float (&scales)[2], int (&sums)[2][D]) const {
    const int from = t % 8 * 4 + threadIdx.x % 4;
    scales[0] = __shfl_sync(kAllLanes, scale[t / 8].x, from), scales[1] = __shfl_sync(kAllLanes, scale[t / 8].y, from);
#pragma unroll
    for (int d = 0; d < kSums; ++d) {
      sums[0][d] = __shfl_sync(kAllLanes, digits[d][t / 8].x, from);
      sums[1][d] = __shfl_sync(kAllLanes, digits[d][t / 8].y, from);
    }
  }
};

// Sums of a strip by `Rows` rows of x in D planes.
template <WeightFormat F, bool Grouped, int D, int Rows>
struct LargeTile {
  static constexpr int kTiles{Rows / 8};  // of 8 rows of x
  typename Format<F>::Accumulator acc[D * kTiles][4];
  float sum[Grouped ? kTiles : 1][4];  // of the groups so far in this slice

  // Element e of a tile of 8 rows of x: row e / 2 of the lane's two rows of W, column e % 2 of its two rows of x.
  // Adds the scaled sums of a group. digits: of this lane's rows of x, a shared address.
  __device__ __forceinline__ void end_group(RecordForm<F> form, const RowTerms (&rows)[2], uint32_t digits_at,
                                            bool first) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      int digits[kGroupWords<D>][2];
#pragma unroll
      for (int d = 0; d < kGroupWords<D>; ++d) {
        const uint2 pair = load_shared<uint2>(digits_at + (d * Rows + t * 8) * 4);
        digits[d][0] = static_cast<int>(pair.x), digits[d][1] = static_cast<int>(pair.y);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const RowTerms& row = rows[e / 2];
        float before = first ? 0.0f : sum[t][e];
        if constexpr (D == 2) {
          before = add_group(before, row, acc[t][e], acc[kTiles + t][e], digits[0][e % 2], form.has_minimum());
        } else {
          int raws[D], own[D];
#pragma unroll
          for (int d = 0; d < D; ++d) raws[d] = acc[d * kTiles + t][e], own[d] = digits[d][e % 2];
          before += scale_sums<D>(raws, own, row, 1.0f, form.has_minimum());
        }
        sum[t][e] = before;
      }
    }
  }

  // The sums of a slice in tile t of 8 rows of x, scaled.
  __device__ __forceinline__ void slice_values(const SliceTerms<F, Grouped, D, Rows>& terms, int t,
                                               const RowTerms (&rows)[2], bool has_minimum, float (&value)[4]) const {
    float scale[2];
    int digits[2][D];
    terms.of_tile(t, scale, digits);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (Grouped) {
        value[e] = __fmul_rn(sum[t][e], scale[e % 2]);
      } else if constexpr (Format<F>::kInteger) {
        int raws[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = acc[d * kTiles + t][e];
        value[e] = scale_sums<D>(raws, digits[e % 2], rows[e / 2], scale[e % 2], has_minimum);
      } else {
        float total{0.0f};  // the smallest terms first
#pragma unroll
        for (int d = D - 1; d >= 0; --d) total += acc[d * kTiles + t][e];
        value[e] = __fmul_rn(total, scale[e % 2]);
      }
    }
  }
};

// The lane's 16-byte pieces of two tensor-core products of a stage, 64 columns of codes or 32 of halves.
template <WeightFormat F>
struct WeightPieces {
  static constexpr int kPieces{F == WeightFormat::int4 ? 1 : 2};
  uint4 piece[kPieces];

  __device__ __forceinline__ WeightPieces(uint32_t strip, int u, int lane) {
    if constexpr (Format<F>::kInteger) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) piece[i] = load_shared<uint4>(strip + (u * kPieces + i) * 512 + lane * 16);
    } else {
      const int row = lane / 4;
      const uint32_t at = strip + row * 128 + ((4 * u + lane % 4) ^ (row & 1) << 2) * 16;
      piece[0] = load_shared<uint4>(at), piece[1] = load_shared<uint4>(at + 8 * 128);
    }
  }
  __device__ __forceinline__ void unpack(uint32_t (&words)[2][4]) const {
    if constexpr (F == WeightFormat::int4) {
      const uint32_t w[4]{piece[0].x, piece[0].y, piece[0].z, piece[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) words[0][i] = w[i] & 0x0f0f0f0fu, words[1][i] = w[i] >> 4 & 0x0f0f0f0fu;
    } else if constexpr (F == WeightFormat::int8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i][0] = piece[i].x, words[i][1] = piece[i].y, words[i][2] = piece[i].z, words[i][3] = piece[i].w;
      }
    } else {
      words[0][0] = piece[0].x, words[0][1] = piece[1].x, words[0][2] = piece[0].y, words[0][3] = piece[1].y;
      words[1][0] = piece[0].z, words[1][1] = piece[1].z, words[1][2] = piece[0].w, words[1][3] = piece[1].w;
    }
  }
};

// acc = or += a strip's words by product `i` of a stage (32 bytes of every column), by mma.sync.
template <WeightFormat F, int Columns>
__device__ __forceinline__ void multiply_sync(typename Format<F>::Accumulator (&acc)[Columns][4],
                                              const uint32_t (&words)[4], uint32_t tile, int i, bool add_to, int lane) {
  const int g = lane / 4;
  const uint32_t row = tile + g * 128 + lane % 4 * 4;
#pragma unroll
  for (int t = 0; t < Columns; ++t) {
    if (!add_to) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
    const uint2 b{load_shared<uint32_t>(row + t * 1024 + ((2 * i ^ g) << 4)),
                  load_shared<uint32_t>(row + t * 1024 + ((2 * i + 1 ^ g) << 4))};
    if constexpr (Format<F>::kInteger) {
      mma(acc[t], words, b);
    } else {
      mma<F == WeightFormat::f16>(acc[t], words, b);
    }
  }
}

// ---- results ---------------------------------------------------------------------------------------------------

// Stores a tile of 8 rows of x from `row` on, with the biases added. All lanes together.
__device__ __forceinline__ void store_tile(const LargeArgs& g, int strip, int row, const float4& sum,
                                           const float (&bias)[2], int lane) {
  const DecodeArgs& a = g.a;
  const float value[4]{sum.x + bias[0], sum.y + bias[0], sum.z + bias[1], sum.w + bias[1]};
  const int n = strip * kStripRows, outputs = a.swiglu ? 8 : kStripRows;
  if (a.y_dtype == DType::bf16 && g.p.paired_stores && n + kStripRows <= a.n) {
    // Two rows of x by one of W a word -> after the transposition one row of x by two of W
    uint32_t words[2];
    if (a.swiglu) {
      words[0] = pack2<bf16>(gated(a, value[0], value[2]), gated(a, value[1], value[3]));
    } else {
      words[0] = pack2<bf16>(value[0], value[1]), words[1] = pack2<bf16>(value[2], value[3]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && a.swiglu) return;
      const uint32_t word = transpose_8x8(words[i]);
      if (row + lane / 4 >= g.rows) continue;
      bf16* const y = static_cast<bf16*>(a.y) + (row + lane / 4) * a.y_stride + strip * outputs + i * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(y) = word;
    }
    return;
  }
  const int m = row + lane % 4 * 2;
  if (m < g.rows) store_rows(a, strip, lane, m, value[0], value[2]);
  if (m + 1 < g.rows) store_rows(a, strip, lane, m + 1, value[1], value[3]);
}

// Sums of one tile, in one slot of the partials: [tile of 8 rows of x][thread], four floats each.
__device__ __forceinline__ float4* partial_at(const LargeArgs& g, int tile, int slot, int t) {
  const int64_t tiles = g.p.rows / 8, at = static_cast<int64_t>(tile) * g.p.slots() + slot;
  return reinterpret_cast<float4*>(g.partials) + (at * tiles + t) * g.p.threads() + threadIdx.x;
}

// Adds the slices of tiles whose K was shared out: slot 0 has those of the first part, the others one each.
template <int Unused = 0>
__global__ void __launch_bounds__(512) linear_merge_kernel(const __grid_constant__ LargeArgs g) {
  dependency_wait();
  dependency_release();
  const int tile = blockIdx.x, t = blockIdx.y, lane = threadIdx.x % kWarp;
  const int strip = tile / g.p.token_tiles * g.p.strips + threadIdx.x / kWarp;
  if (strip >= g.a.strips) return;
  float4 part[kMaxSlices];
#pragma unroll
  for (int s = 0; s < kMaxSlices; ++s) {
    if (s < g.p.slots()) part[s] = *partial_at(g, tile, s, t);
  }
  float4 sum = part[0];
#pragma unroll
  for (int s = 1; s < kMaxSlices; ++s) {
    if (s < g.p.slots()) sum.x += part[s].x, sum.y += part[s].y, sum.z += part[s].z, sum.w += part[s].w;
  }
  float bias[2];
  load_bias(g.a, strip, lane, bias);
  store_tile(g, strip, tile % g.p.token_tiles * g.p.rows + t * 8, sum, bias, lane);
}

// ---- kernel ----------------------------------------------------------------------------------------------------

// Moves registers of a block (96 a thread, or 168) from the warps that copy to those that multiply. What is asked for in
// all must not exceed what the block was launched with: it would wait for ever.
template <int Registers, bool More>
__device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (More) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
  }
#endif
}

// By a warp that multiplies its strip of every tile of the block.
template <WeightFormat F, bool Grouped, int D, int Rows, int Strips, bool Wgmma>
__device__ __forceinline__ void multiply_tiles(const LargeArgs& g, uint8_t* shared, uint32_t full, uint32_t empty) {
  using Fmt = Format<F>;
  using Tile = LargeTile<F, Grouped, D, Rows>;
  using Producer = LargeProducer<F>;
  constexpr int kStepStages{kStepK * Fmt::kPlaneBytes / 128}, kThreads{Strips * kWarp};
  const LargePlan& p = g.p;
  const DecodeArgs& a = g.a;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t base = shared_address(shared);
  dependency_wait();

  const RecordForm<F> form(a);
  const int group_shift = Grouped ? a.group_shift : 0;
  RingPosition at;
#pragma unroll 1
  for (int index = blockIdx.x; index < p.work(); index += gridDim.x) {
    const LargeWork w(g, index);
    const int strip = min(w.first_strip + warp, a.strips - 1);  // beyond the last one: computed, not stored
    const uint8_t* record = a.records + static_cast<int64_t>(strip) * a.groups * a.record_bytes;
    RowTerms rows[2]{};
    const auto read_terms = [&](const uint8_t* from) {
      read_record<F>(form, lane / 4, rows, [&]<class T>(int offset) { return __ldg(reinterpret_cast<const T*>(from + offset)); });
    };
#pragma unroll 1
    for (int slice = w.first_slice; slice < w.last_slice; ++slice) {
      const int begin = slice_begin(slice, a.plan.slices_log, a.steps),
                stages = (slice_begin(slice + 1, a.plan.slices_log, a.steps) - begin) * kStepStages;
      Tile tile;
      bool add_to{false}, first_group{true};  // to the sums of the slice, or of the group
      int held{-1};                           // slot of the stage before, still being read
      const auto release = [&] {
        if constexpr (Wgmma) wgmma_wait();
        __syncwarp();
        if (held >= 0 && lane == 0) barrier_arrive(empty + held * 8);
        held = -1;
      };
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        const uint32_t slot = base + at.slot * p.slot_bytes;
        const uint32_t codes = slot + p.weights_at + warp * Producer::kStripBytes;
        int group{0};  // of the stage
        const auto end_group = [&] {
          if constexpr (Grouped) {
            if constexpr (Wgmma) wgmma_commit(), wgmma_wait();
            read_terms(record + ((((begin + stage) * kStepK) >> group_shift) + group) * a.record_bytes);
            tile.end_group(form, rows, slot + D * Rows * 128 + (group * kGroupWords<D> * Rows + lane % 4 * 2) * 4,
                           first_group);
            first_group = false, add_to = false;
            ++group;
          }
        };
        barrier_wait(full + at.slot * 8, at.parity);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const WeightPieces<F> pieces(codes, u, lane);
          if (u == 0) {
            release();
          } else if constexpr (Wgmma) {
            wgmma_wait();
          }
          uint32_t words[2][4];
          pieces.unpack(words);
          if constexpr (Wgmma) wgmma_fence();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (Wgmma) {
              const uint64_t descriptor = wgmma_descriptor(slot + (u * 2 + i) * 32);
              if constexpr (Fmt::kInteger) {
                wgmma(tile.acc, words[i], descriptor, add_to);
              } else {
                wgmma<F == WeightFormat::f16>(tile.acc, words[i], descriptor, add_to);
              }
            } else {
              multiply_sync<F>(tile.acc, words[i], slot, u * 2 + i, add_to, lane);
            }
            add_to = true;
            if (Grouped && (group_shift == 5 || (i == 1 && (group_shift == 6 || u == 1)))) {
              end_group();
              if (Wgmma && i == 0) wgmma_fence();
            }
          }
          if constexpr (Wgmma) wgmma_commit();
        }
        held = at.slot;
        at.next(p.ring_stages);
      }
      release();
      // What follows is asked for only now: registers are short while the sums grow.
      const uint32_t totals = base + p.totals_at + threadIdx.x * 16;
      const bool first = slice == w.first_slice || w.part > 0;
      const SliceTerms<F, Grouped, D, Rows> terms(g, slice, w.token_tile * Rows, lane);
      if constexpr (Fmt::kInteger && !Grouped) read_terms(record);
#pragma unroll
      for (int t = 0; t < Tile::kTiles; ++t) {
        float value[4];
        tile.slice_values(terms, t, rows, form.has_minimum(), value);
        const uint32_t total = totals + t * kThreads * 16;
        if (!first) {
          const float4 before = load_shared<float4>(total);
          value[0] = before.x + value[0], value[1] = before.y + value[1];
          value[2] = before.z + value[2], value[3] = before.w + value[3];
        }
        store_shared(total, make_float4(value[0], value[1], value[2], value[3]));
      }
      if (w.first_strip + warp >= a.strips || (w.part == 0 && slice < w.last_slice - 1)) continue;
      float bias[2];
      load_bias(a, strip, lane, bias);
#pragma unroll 1
      for (int t = 0; t < Tile::kTiles; ++t) {
        const float4 sum = load_shared<float4>(totals + t * kThreads * 16);
        if (p.parts > 1) {
          *partial_at(g, index / p.parts, p.slot_of(slice), t) = sum;
        } else {
          store_tile(g, strip, w.token_tile * Rows + t * 8, sum, bias, lane);
        }
      }
    }
  }
}

template <WeightFormat F, bool Grouped, int D, int Rows, int Strips, bool Wgmma>
__global__ void __launch_bounds__(Strips* kWarp + 128, 1) linear_large_kernel(const __grid_constant__ LargeArgs g) {
  using Producer = LargeProducer<F>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared), full = base + g.p.barriers_at, empty = full + g.p.ring_stages * 8;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int i = 0; i < g.p.ring_stages; ++i) {
      barrier_init(full + i * 8, Producer::kArrivals);
      barrier_init(empty + i * 8, Strips);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Strips * kWarp) {
    take_registers<24, false>();
    if (threadIdx.x < (Strips + 1) * kWarp) Producer{g, base, full, static_cast<int>(threadIdx.x % kWarp)}.run(empty);
  } else {
    take_registers<Strips == 16 ? 112 : 240, true>();
    multiply_tiles<F, Grouped, D, Rows, Strips, Wgmma>(g, shared, full, empty);
  }
}

// ---- launcher --------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int Rows>
void launch_large(const LargeArgs& g, const Launch& launch, const std::string& what) {
  constexpr int kStrips{large_strips(F, D, Grouped, Rows)};
  const auto kernel = g.p.wgmma ? linear_large_kernel<F, Grouped, D, Rows, kStrips, true>
                                : linear_large_kernel<F, Grouped, D, Rows, kStrips, false>;
  launch_kernel(
      launch, [&] { return what; }, kernel, dim3(std::min(g.p.work(), g.p.most_blocks)), dim3(g.p.threads() + 128),
      g.p.shared_bytes, g);
}

template <WeightFormat F>
void launch_large_format(const LargeArgs& g, int planes, const Launch& launch, const std::string& what) {
  const auto text = [&] { return what; };
  with_planes<F>(planes, g.a.group_shift > 0, [&]<bool Grouped, int D>() {
    constexpr int kFew{large_rows(F, D, Grouped, 1)}, kMany{large_rows(F, D, Grouped, 1 << 20)};
    if constexpr (kFew > 0) {
      launch_kernel(launch, text, linear_tiles_kernel<F, Grouped, D>, dim3(g.rows), dim3(kDecodeThreads),
                    stage_row_bytes<F, D>(g.a), g);
      g.p.rows == kFew ? launch_large<F, Grouped, D, kFew>(g, launch, what)
                       : launch_large<F, Grouped, D, kMany>(g, launch, what);
    }
  });
  if (g.p.slots() > 1) {
    launch_kernel(launch, text, linear_merge_kernel<>, dim3(g.p.row_tiles * g.p.token_tiles, g.p.rows / 8),
                  dim3(g.p.threads()), 0, g);
  }
}

}  // namespace nibblelm::cuda
