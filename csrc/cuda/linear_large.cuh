// The kernel of linear for many rows of x, and where it is faster for few: tiles of 128 to 256 rows of W by `Rows` rows
// of x, weights unpacked in registers, sums exact within a slice of K (or a group) and added as the decode kernel adds
// them.
//
// W is the operand that comes from registers, x the one in shared memory, so that 17 rows of x are padded to 32 and not
// to 64. A warp has a strip of 16 rows of W; the tile of x they share comes in stages of 128 bytes a column (128
// digits, or 64 halves). One or two stages are a chunk, in a ring that warps of their own fill.
//
// Many tiles: the blocks take them in turn, or share out their slices evenly; then a tile between two blocks is begun
// by the first and finished by the second, in the same order of sums. Few tiles: several blocks take slices of one, and
// all blocks add up their sums together.
#pragma once

#include "barrier.cuh"
#include "grid_barrier.cuh"
#include "linear_prepare.cuh"
#include "linear_reduction.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace nibblelm::cuda {

// ---- sums that wait --------------------------------------------------------------------------------------------

// Sums that wait, of one strip by 8 rows of x, four floats a lane, or the bits of integers: of slice or block `slot` in
// all.
__device__ __forceinline__ float4* partial_at(const LargeArgs& g, int slot, int t, int strip, int lane) {
  const int64_t at = static_cast<int64_t>(slot) * (g.p.rows / 8) + t;
  return reinterpret_cast<float4*>(g.partials) + (at * g.p.strips + strip) * kWarp + lane;
}

// Whether block `block` has handed on what its warp `warp` has begun.
__device__ __forceinline__ int* handed_at(const LargeArgs& g, int block, int warp) {
  return reinterpret_cast<int*>(partial_at(g, g.p.blocks, 0, 0, 0)) + block * g.p.strips + warp;
}

__device__ __forceinline__ void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const int* flag) {
  int now{0};
  while (now == 0) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(flag) : "memory");
}

// ---- rows of x as tiles ---------------------------------------------------------------------------------------

// Where row `row` of x goes: a tile has `rows` columns for every plane, plane by plane, and in one stage 128 bytes of a
// column (codes in fp16: twice 128, of 64 columns of K each); the digit sums of the stage's groups lie behind it.
template <WeightFormat F, bool Grouped, int D>
struct TileRow {
  const LargeArgs& g;
  int row;
  int kSumStep{g.p.rows};
  static constexpr int kPieceK{128 / Format<F>::kPlaneBytes}, kTileK{Format<F>::kCodes ? kStepK : kPieceK};

  __device__ __forceinline__ uint8_t* tile(int k) const {
    return g.tiles + (static_cast<int64_t>(row / g.p.rows) * g.p.stages + k / kTileK) * g.p.tile_bytes;
  }
  using Place = int;  // the column
  __device__ __forceinline__ static Place place(int k) { return k; }
  __device__ __forceinline__ static Place further(Place from, int columns) { return from + columns; }
  __device__ __forceinline__ void store(Place k, const PlaneWords<F, D>& words) const {
    constexpr int kWords{PlaneWords<F, D>::kWords};
    const int in_row = row % g.p.rows, unit = k % kPieceK / 32, quarter = k % 32 / 8;
    uint8_t* const to = tile(k) + (k % kTileK / kPieceK * g.p.rows + in_row) * 128 + quarter * 4;
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
  __device__ __forceinline__ float* scale(int slice) const { return g.scales + slice * g.p.padded_rows() + row; }
  __device__ __forceinline__ void store_scale(int slice, float scale, int shift) const {
    *this->scale(slice) = scale, g.shifts[slice * g.p.padded_rows() + row] = shift;
  }
  __device__ __forceinline__ void pad_scales(int) const {}
  __device__ __forceinline__ void store_total(float total, float) const { g.totals[row] = total; }
};

// Of many rows, two blocks a multiprocessor hide each other's latencies (apart_bytes: of few).
template <WeightFormat F, bool Grouped, int D, Extras E>
__global__ void __launch_bounds__(kDecodeThreads, 2) linear_tiles_kernel(const __grid_constant__ LargeArgs g) {
  extern __shared__ __align__(16) uint8_t stage[];
  __shared__ RowScratch<D> scratch;
  prepare_to_memory<F, Grouped, D, E>(g.a, WarpShare(g.a, 0, g.a.plan.slices_log), scratch,
                                      TileRow<F, Grouped, D>{g, static_cast<int>(blockIdx.x)}, stage);
  if (blockIdx.x == 0 && g.p.shared > 0) {
    for (int i = threadIdx.x; i < g.p.blocks * g.p.strips; i += kDecodeThreads) *handed_at(g, 0, i) = 0;
  }
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

// Of what the kernel is compiled for. Keeps: totals of slices; where there are two forms one does, one does not.
// Warps: where they are not the usual ones.
template <WeightFormat F, bool Grouped, int D, int Rows, bool Keeps,
          int Warps = large_warps(F, D, Grouped, Rows, Keeps)>
struct LargeShape {
  static constexpr int kWarps{Warps};
  static constexpr bool kTwoForms{large_two_forms(F, D, Grouped, Rows)};
  static constexpr LargeLayout kLayout{
      large_layout(F, D, Grouped, Rows, kWarps, Keeps, kArchitecture == 0 ? 90 : kArchitecture)};
  static constexpr bool kOne{kOneSum<F, Grouped, D>};
  static constexpr int kScaleBytes{large_scale_bytes(F, Rows, Keeps)}, kRecordBytes{large_record_bytes(F)};
  static constexpr int kRing{kLayout.ring < 2 ? 2 : kLayout.ring};  // where less fits the launcher takes another one
  // Chunks of weights before x is there: so few that what prepares it has memory for itself soon.
  static constexpr int kEarly{std::min(kRing, Rows == 16 ? 4 : 3)};
  static constexpr int kThreads{(kWarps + large_copy_warps(kArchitecture)) * kWarp};
  static constexpr int kCopyRegisters{!Format<F>::kCodes ? 40 : kWarps == 8 ? 24 : 32};
  // Of a thread of those with strips, when the copying ones have given away theirs: as many as were launched with.
  static constexpr int kLaunched{65536 / kThreads / 8 * 8 * kThreads};
  static constexpr int kRegisters{(kLaunched - 4 * kWarp * kCopyRegisters) / (kWarps * kWarp) / 8 * 8};
  static constexpr int kStripBytes{large_strip_bytes(F)};
  static constexpr bool kMapped{large_mapped(F, D, Rows)}, kOneReleases{large_one_releases(F, Rows)};
  static constexpr bool kSpares{large_spares(Rows, Grouped)};  // some of its warps may have no strip
  static constexpr int kChunk{large_chunk(F, D, Grouped, Rows)};
  static constexpr int kStepStages{Format<F>::kCodes ? 1 : kStepK * Format<F>::kPlaneBytes / 128};
};

// Slices of the shared tiles that are a block's, counted over all of them; one thread divides for all.
struct LargeShare {
  int begin, end;

  __device__ __forceinline__ explicit LargeShare(const LargePlan& p) {
    const int slices = p.shared << p.slices_log, blocks = gridDim.x;
    begin = static_cast<int>(blockIdx.x) * slices / blocks;
    end = (static_cast<int>(blockIdx.x) + 1) * slices / blocks;
  }
};

// What one block computes at a time: slices [first_slice, last_slice) of a tile. Where tiles are shared out evenly, a
// block begins with the first slices of a tile, which the next block goes on with at its very end, so that it does not
// wait.
struct LargeWork {
  bool valid{false};
  int token_tile, first_strip, tile, first_slice{0}, last_slice;

  // The block's work number i, from 0 on; share: the shared address of its LargeShare.
  __device__ __forceinline__ LargeWork(const LargePlan& p, uint32_t share, int i) {
    const int block = blockIdx.x, log = p.slices_log, all = 1 << log;
    const int begin = load_shared<int>(share), end = load_shared<int>(share + 4), head = end & (all - 1);
    const int index = block + (head > 0 ? i - 1 : i) * static_cast<int>(gridDim.x);
    last_slice = all, tile = 0;
    if (index < 0) {
      valid = true, tile = end >> log, last_slice = head;
    } else if (index < p.work) {
      const int part = index & ((1 << p.parts_log) - 1), step = log - p.parts_log;
      valid = true, tile = p.shared + (index >> p.parts_log), first_slice = part << step,
      last_slice = (part + 1) << step;
    } else if (p.shared > 0) {
      const int whole = (head > 0 ? i - 1 : i) - p.rounds;
      tile = ((begin + all - 1) >> log) + whole, valid = tile < end >> log;
      if (!valid && tile == end >> log && (begin & (all - 1)) > 0) {
        valid = true, tile = begin >> log, first_slice = begin & (all - 1);
      }
    }
    const int row_tile = p.token_tiles == 1 ? tile : __umulhi(tile, p.token_magic);
    token_tile = tile - row_tile * p.token_tiles, first_strip = row_tile * p.strips;
  }
  // Of this warp; beyond the last strip that one again, not stored.
  __device__ __forceinline__ int strip(const LargeArgs& g) const {
    return min(first_strip + static_cast<int>(threadIdx.x) / kWarp, g.a.strips - 1);
  }
};

// Chunks in the order in which a block computes them.
template <WeightFormat F, class Shape>
struct LargeChunks {
  int index;              // of the block's work
  int slice, last_slice;  // of it
  int left;               // stages of the slice; 0 behind the last one of all
  int tile, token;        // number of the chunk's first tile of x, and of its first row
  int first_strip, stage;

  __device__ __forceinline__ LargeChunks(const LargeArgs& g, uint32_t share) { set(g, share, 0); }
  __device__ __forceinline__ void set(const LargeArgs& g, uint32_t share, int work) {
    index = work, left = 0;
    const LargeWork w(g.p, share, index);
    if (!w.valid) return;
    slice = w.first_slice, last_slice = w.last_slice, first_strip = w.first_strip;
    stage = stages_before(g.a, slice);
    left = stages_before(g.a, slice + 1) - stage;
    tile = w.token_tile * g.p.stages + stage, token = w.token_tile * g.p.rows;
  }
  static __device__ __forceinline__ int stages_before(const DecodeArgs& a, int slice) {
    return slice_begin(slice, a.plan.slices_log, a.steps) * Shape::kStepStages;
  }
  __device__ __forceinline__ int stages() const { return min(left, Shape::kChunk); }
  __device__ __forceinline__ void next(const LargeArgs& g, uint32_t share) {
    const int stages = this->stages();
    tile += stages, stage += stages;
    if ((left -= stages) > 0) return;
    if (++slice < last_slice) {
      left = stages_before(g.a, slice + 1) - stages_before(g.a, slice);
    } else {
      set(g, share, index + 1);
    }
  }
};

// The ring of a block's chunks: the tiles of x that its warps share, and the weights of each. Warps behind those with
// strips ask for them as soon as all have left what was there: what is to be asked for next was up to 70 % of the
// instructions of a stage.
template <WeightFormat F, class Shape>
struct LargeRing {
  static constexpr bool kBulkTiles{kArchitecture >= 90};
  static constexpr bool kMapped{kBulkTiles && Shape::kMapped};
  static constexpr int kCopyWarps{large_copy_warps(kArchitecture)};
  static constexpr int kCopyLanes{
      kMapped && Shape::kRecordBytes == 0 ? 0 : kCopyWarps * kWarp};  // that arrive with their copies
  static constexpr int kArrivals{kBulkTiles + kCopyLanes};
  static constexpr int kChunkTiles{Shape::kChunk * Shape::kLayout.tile_bytes},
      kStageWeights{Shape::kWarps * Shape::kStripBytes}, kChunkWeights{Shape::kChunk * kStageWeights};
  const int& releasing;
  int lane, warp;
  uint32_t base, full, empty, share, weights;  // shared addresses
  int slot{0}, parity{0};
  int held{-1};  // the slot whose products may be under way

  __device__ __forceinline__ LargeRing(const LargeArgs& g, uint8_t* shared)
      : releasing(g.p.releasing),
        lane(keep(static_cast<int>(threadIdx.x % kWarp))),
        warp(uniform(threadIdx.x / kWarp)),
        base(shared_address(shared)),
        full(base + Shape::kLayout.barriers_at),
        empty(full + Shape::kRing * 8),
        share(empty + Shape::kRing * 8),
        weights(keep(base + Shape::kLayout.weights_at + warp * Shape::kStripBytes)) {
    if (threadIdx.x < Shape::kRing) {
      barrier_init(full + threadIdx.x * 8, kArrivals);
      barrier_init(empty + threadIdx.x * 8, Shape::kWarps * (Shape::kOneReleases ? releasing : kWarp));
      barrier_init_fence();
    }
    if (threadIdx.x == 0) {
      const LargeShare own(g.p);
      asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(share), "r"(own.begin), "r"(own.end) : "memory");
    }
    __syncthreads();
  }

  // Runs `multiply` in the warps with strips, and what fills the ring in those behind them, whose warpgroup leaves
  // them its registers.
  template <class Multiply>
  __device__ __forceinline__ void share_out(const LargeArgs& g, const Multiply& multiply) {
    if (warp < Shape::kWarps) {
      if constexpr (kHasWgmma) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kRegisters));
      dependency_wait();
      dependency_release();
      multiply();
    } else {
      if constexpr (kHasWgmma) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kCopyRegisters));
      if (kCopyLanes > 0 || warp == Shape::kWarps) produce(g, warp - Shape::kWarps);
    }
  }
  __device__ __forceinline__ void produce(const LargeArgs& g, int copier) {
    LargeChunks<F, Shape> ahead(g, share), first_tiles = ahead;
    // Weights, which the step does not change.
#pragma unroll 1
    for (int i = 0; i < Shape::kEarly && ahead.left > 0; ++i) {
      copy_weights(g, ahead, i, copier);
      ahead.next(g, share);
    }
    dependency_wait();
    dependency_release();
#pragma unroll 1
    for (int i = 0; i < Shape::kRing && first_tiles.left > 0; ++i) {
      if (i >= Shape::kEarly) {
        copy_weights(g, ahead, i, copier);
        ahead.next(g, share);
      }
      copy_tiles(g, first_tiles, i, copier);
      first_tiles.next(g, share);
    }
#pragma unroll 1
    for (; ahead.left > 0; ahead.next(g, share)) {
      barrier_wait(empty + slot * 8, parity);
      copy_weights(g, ahead, slot, copier);
      copy_tiles(g, ahead, slot, copier);
      advance();
    }
    copy_async_wait_all();
  }
  __device__ __forceinline__ void copy_weights(const LargeArgs& g, const LargeChunks<F, Shape>& c, int to,
                                               int copier) const {
    const DecodeArgs& a = g.a;
    // Else other blocks take them, too.
    const uint64_t hint = g.p.token_tiles == 1 ? kEvictFirst : kEvictNormal;
    const uint32_t own = base + Shape::kLayout.weights_at + to * kChunkWeights;
    if constexpr (kMapped) {
      static_assert(Shape::kChunk == 1 && !Shape::kSpares && Shape::kStripBytes / 8 <= 256);
      if (copier == 0 && lane == 0) {
        barrier_expect(full + to * 8, g.p.strips * Shape::kStripBytes);
        copy_rectangle(own, g.weights, c.first_strip, c.stage * (Shape::kStripBytes / 8), full + to * 8, hint);
      }
    } else {
      static_assert(Shape::kLayout.weights_at % 512 == 0 && Shape::kStripBytes % 512 == 0);
#pragma unroll
      for (int i = 0; i < Shape::kWarps; i += kCopyWarps) {
        if (Shape::kSpares && i + copier >= g.p.strips) continue;
        const int strip = min(c.first_strip + i + copier, a.strips - 1);
        copy_strip(a, c, strip, own + (i + copier) * Shape::kStripBytes, hint);
      }
    }
    if constexpr (Shape::kRecordBytes > 0) copy_records(a, c, to, copier);
    if constexpr (kBulkTiles && kCopyLanes > 0) barrier_arrive_copies(full + to * 8);  // else behind the tiles
  }
  __device__ __forceinline__ void copy_strip(const DecodeArgs& a, const LargeChunks<F, Shape>& c, int strip,
                                             uint32_t at, uint64_t hint) const {
    if constexpr (Format<F>::kCodes) {
      const uint32_t of_lane = at | lane * 16;  // no sum (copy_async_16)
      const uint8_t* const from =
          a.data + (static_cast<int64_t>(strip) * a.steps + c.stage) * Shape::kStripBytes + lane * 16;
#pragma unroll
      for (int stage = 0; stage < Shape::kChunk; ++stage) {
        if (stage >= c.stages()) continue;
#pragma unroll
        for (int j = 0; j < Shape::kStripBytes; j += kWarp * 16) {
          copy_async_16(of_lane + stage * kStageWeights + j, from + stage * Shape::kStripBytes + j, hint);
        }
      }
    } else {  // 8 lanes to the 128 bytes of a row, odd rows with their halves swapped; rows beyond N repeat the last
      const uint32_t of_lane = at + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16;
      for (int stage = 0; stage < c.stages(); ++stage) {
        const int column = (c.stage + stage) * 128 + lane % 8 * 16;
        const bool there = column < a.pitch_bytes;
#pragma unroll
        for (int j = 0; j < kStripRows / 4; ++j) {
          const int64_t row = min(strip * kStripRows + 4 * j + lane / 8, a.n - 1);
          copy_async_16_or_zeros(of_lane + stage * kStageWeights + j * 512,
                                 a.data + row * a.pitch_bytes + (there ? column : 0), there);
        }
      }
    }
  }
  // In pieces of 8 bytes, a lane each: a warp a strip took a fifth of the copying warps' instructions.
  __device__ __forceinline__ void copy_records(const DecodeArgs& a, const LargeChunks<F, Shape>& c, int to,
                                               int copier) const {
    constexpr int kPieces{Shape::kRecordBytes / 8};
    const int pieces = a.record_bytes / 8;
#pragma unroll
    for (int j = 0; j < Shape::kWarps * kPieces; j += kCopyWarps * kWarp) {
      const int i = j + copier * kWarp + lane, own = i / kPieces, piece = i % kPieces;
      if (own >= Shape::kWarps || piece >= pieces) continue;
      const int64_t strip = min(c.first_strip + own, a.strips - 1);
      copy_async_8(record(to, own) + piece * 8, a.records + (strip * a.groups + c.stage) * a.record_bytes + piece * 8);
    }
  }
  __device__ __forceinline__ void copy_tiles(const LargeArgs& g, const LargeChunks<F, Shape>& c, int to,
                                             int copier) const {
    const uint8_t* const from = g.tiles + static_cast<int64_t>(c.tile) * g.p.tile_bytes;
    const uint32_t own = base + to * kChunkTiles;
    const int at = c.slice * g.p.padded_rows() + c.token;
    const void* const from_scales = Shape::kOne ? static_cast<const void*>(g.shifts + at) : g.scales + at;
    const bool scaled = Shape::kScaleBytes > 0 && (Shape::kOne || c.left <= Shape::kChunk);
    if constexpr (kBulkTiles) {
      if (copier > 0 || lane > 0) return;
      barrier_arrive_expect(full + to * 8, c.stages() * g.p.tile_bytes + (scaled ? Shape::kScaleBytes : 0));
      if (scaled) copy_bulk(scales(to), from_scales, Shape::kScaleBytes, full + to * 8);
#pragma unroll
      for (int i = 0; i < Shape::kChunk; ++i) {
        if (i >= c.stages()) continue;
        copy_bulk(own + i * Shape::kLayout.tile_bytes, from + i * g.p.tile_bytes, g.p.tile_bytes, full + to * 8);
      }
    } else {
      for (int i = 0; i < c.stages(); ++i) {
#pragma unroll 4
        for (int j = (copier * kWarp + lane) * 16; j < g.p.tile_bytes; j += kCopyWarps * kWarp * 16) {
          copy_async_16(own + i * Shape::kLayout.tile_bytes + j, from + i * g.p.tile_bytes + j);
        }
      }
      for (int j = lane * 16; scaled && copier == 0 && j < Shape::kScaleBytes; j += kWarp * 16) {
        copy_async_16(scales(to) + j, static_cast<const uint8_t*>(from_scales) + j);
      }
      barrier_arrive_copies(full + to * 8);
    }
  }
  // Of the rows of x in a slice, with its last chunk; where sums stay integers the shifts, with every chunk.
  __device__ __forceinline__ uint32_t scales(int slot) const {
    return base + Shape::kLayout.scales_at + slot * Shape::kScaleBytes;
  }
  __device__ __forceinline__ void advance() {
    if (++slot == Shape::kRing) slot = 0, parity ^= 1;
  }

  // What the others do with each chunk: wait, read, advance, and when products by it are done, release.
  __device__ __forceinline__ uint32_t tiles() const { return base + slot * kChunkTiles; }
  __device__ __forceinline__ uint32_t record(int slot, int warp) const {
    return base + Shape::kLayout.records_at + (slot * Shape::kWarps + warp) * Shape::kRecordBytes;
  }
  __device__ __forceinline__ uint32_t codes() const { return weights + slot * kChunkWeights; }
  __device__ __forceinline__ void wait() const { barrier_wait(full + slot * 8, parity); }
  __device__ __forceinline__ void next() {
    held = slot;
    advance();
  }
  // Of this lane's two rows of x in tile t of 8, of the chunk before. Spread over the lanes they took two shuffles a
  // tile, and from global memory their latency.
  __device__ __forceinline__ float2 scale(int t) const {
    const uint2 pair = load_shared<uint2>(scales(held) + (t * 8 + lane % 4 * 2) * 4);
    return make_float2(__uint_as_float(pair.x), __uint_as_float(pair.y));
  }
  // The products of the chunk before have been waited for, and its scales read.
  __device__ __forceinline__ void release() {
    if (held < 0) return;
    if constexpr (Shape::kOneReleases) {
      __syncwarp();
      if (lane < releasing) barrier_arrive(empty + held * 8);
    } else {
      barrier_arrive(empty + held * 8);
    }
    held = -1;
  }
};

// ---- a warp's strip --------------------------------------------------------------------------------------------

// A number for every row of x of a tile, spread over the lanes: two neighbouring rows each.
template <int Rows>
struct SpreadRows {
  static constexpr int kPieces{(Rows + 2 * kWarp - 1) / (2 * kWarp)};
  float2 value[kPieces];

  __device__ __forceinline__ SpreadRows(const float* from, int lane) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      value[i] = *reinterpret_cast<const float2*>(from + (2 * kWarp * i + 2 * lane) % Rows);
    }
  }
  // For this lane's two rows of x in tile t of 8.
  __device__ __forceinline__ float2 of_tile(int t, int lane) const {
    const int from = t % 8 * 4 + lane % 4;
    const float2 own = value[t / 8];
    return make_float2(__shfl_sync(kAllLanes, own.x, from), __shfl_sync(kAllLanes, own.y, from));
  }
};

// Sums of a strip by `Rows` rows of x in D planes. Element e of a tile of 8 rows of x: row e / 2 of the lane's two rows
// of W, column e % 2 of its two rows of x.
template <WeightFormat F, bool Grouped, int D, int Rows, bool Keeps>
struct LargeTile {
  static constexpr int kTiles{Rows / 8};
  // Over a group: its high digits, then on top of them the low ones, where both together would take too many registers.
  static constexpr int kPasses{Grouped && D == 2 && Rows >= 64 ? 2 : 1};
  static constexpr int kSums{D / kPasses * kTiles};
  static constexpr bool kOne{kOneSum<F, Grouped, D>};
  typename Format<F>::Accumulator acc[kSums][4];
  float sum[Grouped ? kTiles : 1][4];           // of the groups so far in this slice
  float total[Keeps && !kOne ? kTiles : 1][4];  // of the slices so far, where acc has not got them

  // What stands for the slices so far.
  __device__ __forceinline__ auto& so_far() {
    if constexpr (kOne) {
      return acc;
    } else {
      return total;
    }
  }

  static constexpr int kHeld{2};  // tiles whose terms are asked for together

  __device__ __forceinline__ void begin_slice() {
    if constexpr (Grouped) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.0f;
    }
  }

  // Between the passes.
  __device__ __forceinline__ void shift_digits() {
#pragma unroll
    for (int t = 0; t < kSums; ++t) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[t][e] *= 256;
    }
  }

  // Adds the scaled sums of a group. digits_at: of this lane's rows of x, a shared address.
  template <bool Minimum>
  __device__ __forceinline__ void end_group(const RowTerms (&rows)[2], uint32_t digits_at) {
#pragma unroll
    for (int t0 = 0; t0 < kTiles; t0 += kHeld) {
      uint2 digits[kHeld][kGroupWords<D>];
#pragma unroll
      for (int i = 0; i < kHeld * kGroupWords<D>; ++i) {
        const int t = i / kGroupWords<D>, d = i % kGroupWords<D>;
        digits[t][d] = load_shared<uint2>(digits_at + (d * Rows + (t0 + t) * 8) * 4);
      }
#pragma unroll
      for (int i = 0; i < kHeld * 4; ++i) {
        const int t = t0 + i / 4, e = i % 4;
        int own[kGroupWords<D>];
#pragma unroll
        for (int d = 0; d < kGroupWords<D>; ++d) {
          own[d] = static_cast<int>(e % 2 == 0 ? digits[i / 4][d].x : digits[i / 4][d].y);
        }
        if constexpr (D == 2) {
          const int raw = kPasses == 2 ? acc[t][e] : acc[t][e] * 256 + acc[kSums - kTiles + t][e];
          sum[t][e] = add_group(sum[t][e], rows[e / 2], raw, own[0], Minimum);
        } else {
          int raws[D];
#pragma unroll
          for (int d = 0; d < D; ++d) raws[d] = acc[d * kTiles + t][e];
          sum[t][e] += scale_group<D>(raws, own, rows[e / 2], Minimum);
        }
      }
    }
  }

  // Brings the sums of the slices so far to units of the scales of the next one, whose first chunk is in ring.slot.
  // columns: of the tile that are rows of x.
  template <bool Wgmma, class Ring>
  __device__ __forceinline__ void rescale(const Ring& ring, int columns) {
    const uint32_t shifts = ring.scales(ring.slot);
    uint32_t any{0};
#pragma unroll
    for (int i = 0; i < (Rows + 2 * kWarp - 1) / (2 * kWarp); ++i) {
      const int at = (2 * kWarp * i + 2 * ring.lane) % Rows;
      const uint2 own = load_shared<uint2>(shifts + at * 4);
      any |= (at < columns ? own.x : 0) | (at + 1 < columns ? own.y : 0);
    }
    if (!__any_sync(kAllLanes, any != 0)) return;
    if constexpr (Wgmma) wgmma_wait<0>();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint2 own = load_shared<uint2>(shifts + (t * 8 + ring.lane % 4 * 2) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[t][e] = shifted(acc[t][e], static_cast<int>(e % 2 == 0 ? own.x : own.y));
    }
  }

  // What tile t's sums of a slice come to, over the slice's scale. Whole: two digits fit int32 together, whose value
  // join_digits rounds.
  template <bool Whole>
  __device__ __forceinline__ float4 slice_sums(int t) const {
    float value[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (Grouped) {
        value[e] = sum[t][e];
      } else if constexpr (Whole) {
        value[e] = static_cast<float>(acc[t][e] * 256 + acc[kTiles + t][e]);
      } else if constexpr (kOne) {
        value[e] = __int_as_float(acc[t][e]);
      } else if constexpr (Format<F>::kInteger) {
        int raws[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = acc[d * kTiles + t][e];
        value[e] = join_digits<D>(raws);
      } else {
        value[e] = 0.0f;  // the smallest terms first
#pragma unroll
        for (int d = D - 1; d >= 0; --d) value[e] += acc[d * kTiles + t][e];
      }
    }
    return make_float4(value[0], value[1], value[2], value[3]);
  }

  // Adds the sums of a slice to those of the slices before it.
  template <bool Whole, class Ring>
  __device__ __forceinline__ void add_slice(const Ring& ring) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float2 scale = Format<F>::kScaled ? ring.scale(t) : make_float2(1.0f, 1.0f);
      const float4 value = slice_sums<Whole>(t);
      total[t][0] = fmaf(value.x, scale.x, total[t][0]), total[t][1] = fmaf(value.y, scale.y, total[t][1]);
      total[t][2] = fmaf(value.z, scale.x, total[t][2]), total[t][3] = fmaf(value.w, scale.y, total[t][3]);
    }
  }
};

// The lane's 16-byte pieces of two tensor-core products of a stage, 64 columns of codes or 32 of halves.
template <WeightFormat F>
struct WeightPieces {
  static constexpr int kPieces{Format<F>::kInt4 ? 1 : 2};
  uint4 piece[kPieces];

  __device__ __forceinline__ void read(uint32_t strip, int u, int lane) {
    if constexpr (Format<F>::kCodes) {
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
      mma<Format<F>::kHalf>(acc[t], words, b);
    }
  }
}

// ---- results ---------------------------------------------------------------------------------------------------

// The terms of this lane's rows of a strip with one scale a row.
template <WeightFormat F>
__device__ __forceinline__ void read_row_terms(const DecodeArgs& a, int strip, int lane, RowTerms (&rows)[2]) {
  const uint8_t* const record = a.records + static_cast<int64_t>(strip) * a.record_bytes;
  read_record<F>(RecordForm<F>(a), lane / 4, rows,
                 [&]<class T>(int at) { return __ldg(reinterpret_cast<const T*>(record + at)); });
}

// Stores a strip's results for rows of x, tile by tile of 8: what the sums of all slices give. What does not depend on
// the tile is found out before: an output's kind, asked a tile, took a third to two fifths of the kernels' code.
template <bool PerRow>
struct StripStores {
  const LargeArgs& g;
  int strip, row, lane;  // row: the first one of x
  float scale[2], offset[2], bias[2];
  bool pairs;    // of bf16 results in a word
  int64_t step;  // bytes between tiles
  uint8_t* to;

  __device__ __forceinline__ StripStores(const LargeArgs& g, int strip, int row, int lane, const RowTerms (&rows)[2])
      : g(g), strip(strip), row(row), lane(lane) {
    const DecodeArgs& a = g.a;
    if constexpr (PerRow) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scale[h] = rows[h].scale, offset[h] = row_offset(rows[h], a.has_minimum);
      }
    }
    load_bias(a, strip, lane, bias);
    pairs = a.y_dtype == DType::bf16 && g.p.paired_stores && (strip + 1) * kStripRows <= a.n;
    const int outputs = a.gated ? 8 : kStripRows;
    step = 16 * static_cast<int64_t>(a.y_stride);
    to = static_cast<uint8_t*>(a.y) + (row + lane / 4) * static_cast<int64_t>(a.y_stride) * 2 +
         (strip * outputs + lane % 4 * 2) * 2;
  }

  // x: the sums of this lane's two rows of x.
  __device__ __forceinline__ float4 finished(float4 sum, float2 x) const {
    if constexpr (PerRow) {
      sum.x = finish_row(scale[0], offset[0], sum.x, x.x), sum.y = finish_row(scale[0], offset[0], sum.y, x.y);
      sum.z = finish_row(scale[1], offset[1], sum.z, x.x), sum.w = finish_row(scale[1], offset[1], sum.w, x.y);
    }
    return make_float4(sum.x + bias[0], sum.y + bias[0], sum.z + bias[1], sum.w + bias[1]);
  }

  // Two rows of x by one of W a word -> after the transposition one row of x by two of W
  __device__ __forceinline__ void store_word(int t, int i, uint32_t word) const {
    word = transpose_8x8(word);
    if (row + t * 8 + lane / 4 < g.rows) *reinterpret_cast<uint32_t*>(to + t * step + i * 16) = word;
  }

  // tile(t): what tile t's sums have come to. All lanes together.
  template <int Tiles, class Tile>
  __device__ __forceinline__ void store(const Tile& tile) const {
    const DecodeArgs& a = g.a;
    if (!pairs) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) store_apart(g, strip, lane, row + t * 8, tile(t));
    } else if (a.gated) {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        const float4 v = tile(t);
        store_word(t, 0, pack2<bf16>(gated(a, v.x, v.z), gated(a, v.y, v.w)));
      }
    } else {
#pragma unroll
      for (int t = 0; t < Tiles; ++t) {
        const float4 v = tile(t);
        store_word(t, 0, pack2<bf16>(v.x, v.y)), store_word(t, 1, pack2<bf16>(v.z, v.w));
      }
    }
  }
  static __device__ __noinline__ void store_apart(const LargeArgs& g, int strip, int lane, int row, float4 v) {
    const int m = row + lane % 4 * 2;
    if (m < g.rows) store_rows(g.a, strip, lane, m, v.x, v.z);
    if (m + 1 < g.rows) store_rows(g.a, strip, lane, m + 1, v.y, v.w);
  }
};

// A warp's sums of the slices before those that are the block's: what the block before this one has begun, or nothing.
// T: int where sums stay integers, which are handed on as their bits.
template <class T, int Tiles>
__device__ __forceinline__ void begin_totals(const LargeArgs& g, const LargeWork& w, T (&total)[Tiles][4], bool handed,
                                             int warp, int lane) {
  handed = handed && w.first_slice > 0 && w.first_strip + warp < g.a.strips;
  if (handed) wait_for_flag(handed_at(g, blockIdx.x - 1, warp));
  // No branch, by which ptxas would take the tile for one that products still add to; all are under way together.
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    const float4* const from = partial_at(g, blockIdx.x - 1, t, warp, lane);
    uint32_t bits[4];
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(bits[0]), "=&r"(bits[1]), "=&r"(bits[2]), "=&r"(bits[3])
        : "l"(from), "r"(static_cast<int>(handed))
        : "memory");
    memcpy(total[t], bits, sizeof(bits));
  }
}

// What they have come to: stored as results, or handed on to the next block.
template <WeightFormat F, bool Grouped, int Rows, class T>
__device__ __forceinline__ void end_totals(const LargeArgs& g, const LargeWork& w, const T (&total)[Rows / 8][4],
                                           int warp, int lane) {
  constexpr bool kOne{std::is_same_v<T, int>};
  const int strip = w.first_strip + warp, token = w.token_tile * Rows;
  if (strip >= g.a.strips || warp >= g.p.strips) return;
  if (w.last_slice < g.p.slices()) {
    const int* const shifts = g.shifts + w.last_slice * g.p.padded_rows() + token + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < Rows / 8; ++t) {
      float4 sum;
      if constexpr (kOne) {  // in units of the slice with which it goes on
        const int2 own = *reinterpret_cast<const int2*>(shifts + t * 8);
        sum.x = __int_as_float(shifted(total[t][0], own.x)), sum.y = __int_as_float(shifted(total[t][1], own.y));
        sum.z = __int_as_float(shifted(total[t][2], own.x)), sum.w = __int_as_float(shifted(total[t][3], own.y));
      } else {
        sum = make_float4(total[t][0], total[t][1], total[t][2], total[t][3]);
      }
      *partial_at(g, blockIdx.x, t, warp, lane) = sum;
    }
    __syncwarp();
    if (lane == 0) raise_flag(handed_at(g, blockIdx.x, warp));
    return;
  }
  constexpr bool kPerRow{Format<F>::kInteger && !Grouped};
  RowTerms rows[2]{};
  if constexpr (kPerRow) read_row_terms<F>(g.a, strip, lane, rows);
  const SpreadRows<Rows> sums((kPerRow ? g.totals : g.scales) + token, lane);  // of the rows of x
  const SpreadRows<kOne ? Rows : 8> units(g.scales + (g.p.slices() - 1) * g.p.padded_rows() + token, lane);
  const StripStores<kPerRow> stores(g, strip, token, lane, rows);
  stores.template store<Rows / 8>([&](int t) {
    float4 sum;
    if constexpr (kOne) {
      const float2 unit = units.of_tile(t, lane);
      sum.x = SliceSum<true>{total[t][0]}.result(unit.x), sum.y = SliceSum<true>{total[t][1]}.result(unit.y);
      sum.z = SliceSum<true>{total[t][2]}.result(unit.x), sum.w = SliceSum<true>{total[t][3]}.result(unit.y);
    } else {
      sum = make_float4(total[t][0], total[t][1], total[t][2], total[t][3]);
    }
    return stores.finished(sum, kPerRow ? sums.of_tile(t, lane) : float2{});
  });
}

// Adds the slices of tiles whose K was shared out, when all blocks have stored theirs. By the `Warps` warps with
// strips.
template <WeightFormat F, bool Grouped, int D, int Warps>
__device__ __forceinline__ void merge_slices(const LargeArgs& g, int warp, int lane) {
  constexpr bool kPerRow{Format<F>::kInteger && !Grouped}, kOne{kOneSum<F, Grouped, D>};
  GridBarrier<Warps * kWarp> grid{reinterpret_cast<uint32_t*>(g.a.arrivals + g.a.strips)};
  grid.arrive();
  grid.wait();
  const int pieces = g.p.rows / 8;  // of a tile
#pragma unroll 1
  for (int piece = blockIdx.x; piece < g.p.tiles() * pieces; piece += gridDim.x) {
    const int tile = piece / pieces, t = piece % pieces;
    const int strip = tile / g.p.token_tiles * Warps + warp, row = tile % g.p.token_tiles * g.p.rows + t * 8;
    if (strip >= g.a.strips) continue;
    float4 part[kMaxSlices];
    float2 scale[kMaxSlices];  // or shifts
    const float* const scales = kOne ? reinterpret_cast<const float*>(g.shifts) : g.scales;
#pragma unroll
    for (int s = 0; s < kMaxSlices; ++s) {
      if (s >= g.p.slices()) continue;
      part[s] = __ldcg(partial_at(g, tile * g.p.slices() + s, t, warp, lane));
      scale[s] = *reinterpret_cast<const float2*>(scales + s * g.p.padded_rows() + row + lane % 4 * 2);
    }
    RowTerms rows[2]{};
    if constexpr (kPerRow) read_row_terms<F>(g.a, strip, lane, rows);
    float4 sum{};
    if constexpr (kOne) {
      int own[4]{};
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        if (s >= g.p.slices()) continue;
        const int2 shift = make_int2(__float_as_int(scale[s].x), __float_as_int(scale[s].y));
        own[0] = shifted(own[0], shift.x) + __float_as_int(part[s].x);
        own[1] = shifted(own[1], shift.y) + __float_as_int(part[s].y);
        own[2] = shifted(own[2], shift.x) + __float_as_int(part[s].z);
        own[3] = shifted(own[3], shift.y) + __float_as_int(part[s].w);
      }
      const float* const last = g.scales + (g.p.slices() - 1) * g.p.padded_rows() + row;
      const float2 unit = reinterpret_cast<const float2*>(last)[lane % 4];
      sum.x = SliceSum<true>{own[0]}.result(unit.x), sum.y = SliceSum<true>{own[1]}.result(unit.y);
      sum.z = SliceSum<true>{own[2]}.result(unit.x), sum.w = SliceSum<true>{own[3]}.result(unit.y);
    } else {
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        if (s >= g.p.slices()) continue;
        sum.x = fmaf(part[s].x, scale[s].x, sum.x), sum.y = fmaf(part[s].y, scale[s].y, sum.y);
        sum.z = fmaf(part[s].z, scale[s].x, sum.z), sum.w = fmaf(part[s].w, scale[s].y, sum.w);
      }
    }
    float2 x{};
    if constexpr (kPerRow) x = *reinterpret_cast<const float2*>(g.totals + row + lane % 4 * 2);
    const StripStores<kPerRow> stores(g, strip, row, lane, rows);
    stores.template store<1>([&](int) { return stores.finished(sum, x); });
  }
}

// ---- kernel ----------------------------------------------------------------------------------------------------

// Groups of weights a kernel is compiled for.
enum class Groups : int { none, any, simple };  // simple: of 128, with scales of 16 bits and no minimum

// A simple group's scales and zero-points of the lane's rows of a strip: asked for before its products, used behind
// them.
template <WeightFormat F>
struct SimpleTerms {
  uint32_t scales;
  int zeros;

  __device__ __forceinline__ void read(RecordForm<F> form, const uint8_t* record, int lane) {
    scales = __ldg(reinterpret_cast<const uint32_t*>(record) + lane / 4);
    zeros = form.default_zero() * (F == WeightFormat::int4 ? 0x11 : 0x101);
    if (form.has_zero()) zeros = __ldg(reinterpret_cast<const ZeroPair<F>*>(record + 2 * kStripRows) + lane / 4);
  }
  __device__ __forceinline__ void rows(RecordForm<F> form, RowTerms (&rows)[2]) const {
    unpack_pair(scales, form.brain(), rows[0].scale, rows[1].scale);
    rows[0].zero = zero_of<F>(zeros, 0), rows[1].zero = zero_of<F>(zeros, 1);
  }
};

template <WeightFormat F, Groups G, int D, int Rows, bool Keeps, int Warps, bool Wgmma>
__global__ void __launch_bounds__(LargeShape<F, G != Groups::none, D, Rows, Keeps, Warps>::kThreads, 1)
    linear_large_kernel(const __grid_constant__ LargeArgs g) {
  constexpr bool kGrouped{G != Groups::none};
  using Fmt = Format<F>;
  using Shape = LargeShape<F, kGrouped, D, Rows, Keeps, Warps>;
  using Tile = LargeTile<F, kGrouped, D, Rows, Keeps>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LargePlan& p = g.p;
  const DecodeArgs& a = g.a;
  LargeRing<F, Shape> ring(g, shared);
  ring.share_out(g, [&] {
    const int lane = ring.lane, warp = ring.warp;
    const RecordForm<F> form(a);
    const int group_shift = kGrouped ? a.group_shift : 0;
    // Whether the sums of every slice wait for those of other blocks.
    const bool apart = !Keeps || (!Shape::kTwoForms && p.parts() > 1);
    // The warpgroups begin one after another, so that the sums of one meet the products of others.
    if (kGrouped && warp >= 4) __nanosleep(warp / 4 * 600);
#pragma unroll 1
    for (int i_work = 0;; ++i_work) {
      const LargeWork w(p, ring.share, i_work);
      if (!w.valid) break;
      const int strip = w.first_strip + warp;
      int begin = slice_begin(w.first_slice, a.plan.slices_log, a.steps);
      Tile tile;
      if constexpr (Keeps) begin_totals(g, w, tile.so_far(), !apart, warp, lane);
#pragma unroll 1
      for (int slice = w.first_slice; slice < w.last_slice; ++slice) {
        const int end = slice_begin(slice + 1, a.plan.slices_log, a.steps), steps = end - begin,
                  stages = steps * Shape::kStepStages;
        SimpleTerms<F> terms{};           // of the next group
        const uint8_t* record = nullptr;  // and what comes behind it
        if constexpr (kGrouped) {
          const int group = begin * kStepK >> group_shift;
          record = a.records + (static_cast<int64_t>(w.strip(g)) * a.groups + group) * a.record_bytes;
          if constexpr (G == Groups::simple) terms.read(form, record, lane);
        }
        bool add_to{Tile::kOne && !apart};  // to the sums so far: of the group, the slice or, in integers, all slices
        tile.begin_slice();
        int stage{0};
        const auto multiply_stage = [&]<bool First>(uint32_t x, uint32_t codes) {
          [[maybe_unused]] const SimpleTerms<F> own = terms;
          if constexpr (G == Groups::simple) {
            if (stage + 1 < stages) record += a.record_bytes;
            terms.read(form, record, lane);
          }
          [[maybe_unused]] const uint64_t descriptor = Wgmma ? wgmma_descriptor(x) : 0;
          uint32_t words[2][2][4];
          {
            // Nibbles are read before the wait, into registers of their own; what is not unpacked is read where
            // products under way have their operands.
            WeightPieces<F> pieces[2];
            if constexpr (Wgmma && F != WeightFormat::int4) wgmma_wait<0>();
            pieces[0].read(codes, 0, lane), pieces[1].read(codes, 1, lane);
            if constexpr (Wgmma && F == WeightFormat::int4) wgmma_wait<0>();
            if constexpr (First) ring.release();  // the chunk before
            pieces[0].unpack(words[0]), pieces[1].unpack(words[1]);
          }
          if constexpr (Wgmma) wgmma_fence();
          // By product i, 32 bytes of every column, of the planes of a pass.
          const auto multiply = [&](int i, int pass) {
            constexpr int kPassBytes{D / Tile::kPasses * Rows * 128};
            if constexpr (!Wgmma) {
              multiply_sync<F>(tile.acc, words[i / 2][i % 2], x + pass * kPassBytes, i, add_to, lane);
            } else if constexpr (Fmt::kInteger) {
              wgmma(tile.acc, words[i / 2][i % 2], descriptor + i * 2 + pass * (kPassBytes / 16), add_to);
            } else {
              wgmma<F == WeightFormat::f16>(tile.acc, words[i / 2][i % 2], descriptor + i * 2, add_to);
            }
            add_to = true;
          };
          if constexpr (!kGrouped) {
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply(i, 0);
            if constexpr (Wgmma) wgmma_commit();
          } else {
            uint32_t digits = x + D * Rows * 128 + lane % 4 * 8;  // sums of the next group's
            const auto groups_of = [&]<int Products>() {
#pragma unroll
              for (int first = 0; first < 4; first += Products) {
                add_to = false;
#pragma unroll
                for (int pass = 0; pass < Tile::kPasses; ++pass) {
                  if (Wgmma && pass + first > 0) wgmma_fence();
#pragma unroll
                  for (int i = first; i < first + Products; ++i) multiply(i, pass);
                  if constexpr (Wgmma) wgmma_commit();
                  if constexpr (Wgmma) wgmma_wait<0>();
                  if (pass + 1 < Tile::kPasses) tile.shift_digits();
                }
                RowTerms rows[2]{};
                if constexpr (G == Groups::simple) {
                  own.rows(form, rows);
                } else {
                  read_record<F>(form, lane / 4, rows,
                                 [&]<class T>(int at) { return __ldg(reinterpret_cast<const T*>(record + at)); });
                  record += a.record_bytes;
                }
                G == Groups::any&& form.has_minimum() ? tile.template end_group<true>(rows, digits)
                                                      : tile.template end_group<false>(rows, digits);
                digits += kGroupWords<D> * Rows * 4;
              }
            };
            if constexpr (G == Groups::simple) {
              groups_of.template operator()<4>();
            } else {
              group_shift == 5   ? groups_of.template operator()<1>()
              : group_shift == 6 ? groups_of.template operator()<2>()
                                 : groups_of.template operator()<4>();
            }
          }
          ++stage;
        };
        if (Tile::kOne && !apart && slice > w.first_slice) {
          ring.wait();
          tile.template rescale<Wgmma>(ring, g.rows - w.token_tile * Rows);
        }
#pragma unroll 1
        while (stage < stages) {
          const uint32_t x = ring.tiles(), codes = ring.codes();
          ring.wait();
          multiply_stage.template operator()<true>(x, codes);
          if constexpr (Shape::kChunk == 2) {
            if (stage < stages) {
              multiply_stage.template operator()<false>(x + Shape::kLayout.tile_bytes, codes + ring.kStageWeights);
            }
          }
          ring.next();
        }
        begin = end;
        if (Tile::kOne && !apart && slice + 1 < w.last_slice) continue;  // products may stay under way
        if constexpr (Wgmma) wgmma_wait<0>();
        // Two digits of int4 codes fit int32 together in up to 4,096 columns.
        constexpr bool kMayBeWhole{F == WeightFormat::int4 && !kGrouped && D == 2};
        const bool whole = kMayBeWhole && steps * kStepK <= 4096;
        if (apart) {
          ring.release();
          if (strip >= a.strips) continue;
#pragma unroll
          for (int t = 0; t < Tile::kTiles; ++t) {
            *partial_at(g, w.tile * p.slices() + slice, t, warp, lane) =
                whole ? tile.template slice_sums<kMayBeWhole>(t) : tile.template slice_sums<false>(t);
          }
        } else if constexpr (Tile::kOne) {
          ring.release();
        } else if constexpr (Keeps) {
          whole ? tile.template add_slice<kMayBeWhole>(ring) : tile.template add_slice<false>(ring);
          ring.release();
        }
      }
      if constexpr (Keeps) {
        if (!apart) end_totals<F, kGrouped, Rows>(g, w, tile.so_far(), warp, lane);
      }
    }
    if (apart) merge_slices<F, kGrouped, D, Shape::kWarps>(g, warp, lane);
  });
}

// ---- launcher --------------------------------------------------------------------------------------------------

template <WeightFormat F, Groups G, int D, int Rows, bool Keeps,
          int Warps = large_warps(F, D, G != Groups::none, Rows, Keeps)>
void launch_large(const LargeArgs& g, const Launch& launch, const std::string& what) {
  const auto kernel = g.p.wgmma ? linear_large_kernel<F, G, D, Rows, Keeps, Warps, true>
                                : linear_large_kernel<F, G, D, Rows, Keeps, Warps, false>;
  launch_kernel(launch, [&] { return what; }, kernel, dim3(g.p.blocks), dim3(g.p.threads), g.p.shared_bytes, g);
}

template <int Rows>
void launch_groups(const LargeArgs& g, const Launch& launch, const std::string& what);  // linear_groups.cuh

template <WeightFormat F, bool Grouped, int D, int Rows>
void launch_large(const LargeArgs& g, const Launch& launch, const std::string& what) {
  if constexpr (F == WeightFormat::int4_half) {
    launch_groups<Rows>(g, launch, what);
  } else {
    const auto launch_form = [&]<Groups G>() {
      if constexpr (large_two_forms(F, D, Grouped, Rows)) {
        if (g.p.parts() > 1) return launch_large<F, G, D, Rows, false>(g, launch, what);
      }
      if constexpr (constexpr int kHalf{large_warps(F, D, Grouped, Rows, true) / 2};
                    large_halves(F, D, Grouped, Rows)) {
        if (g.p.strips == kHalf) return launch_large<F, G, D, Rows, true, kHalf>(g, launch, what);
      }
      launch_large<F, G, D, Rows, true>(g, launch, what);
    };
    if constexpr (!Grouped) return launch_form.template operator()<Groups::none>();
    if constexpr (Grouped && !(F == WeightFormat::int4 && D == 2)) {
      const DecodeArgs& a = g.a;
      if (a.group_shift == 7 && a.scale_dtype != DType::f32 && !a.has_minimum) {
        return launch_form.template operator()<Groups::simple>();
      }
    }
    if constexpr (Grouped) launch_form.template operator()<Groups::any>();
  }
}

// Shared memory of the blocks that prepare rows, where these are so few that each shall have a multiprocessor to itself
// (1.5 us a layer of 32 rows).
inline int apart_bytes(int rows) {
  if (2 * rows > device_attribute(cudaDevAttrMultiProcessorCount)) return 0;
  return std::min(device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2,
                  device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(sizeof(RowScratch<3>)));
}

template <WeightFormat F>
void launch_large_format(const LargeArgs& args, int planes, const Launch& launch, const std::string& what) {
  LargeArgs g = args;
  const auto text = [&] { return what; };
  with_planes<F>(planes, g.a.group_shift > 0, [&]<bool Grouped, int D>() {
    if constexpr (large_compiled(F, D, Grouped, 64) || large_compiled(F, D, Grouped, 32)) {
      with_extras<kFloatActivations<F, D>>(extras_of(g.a), [&]<Extras E>() {
        launch_kernel(launch, text, linear_tiles_kernel<F, Grouped, D, E>, dim3(g.rows), dim3(kDecodeThreads),
                      std::max(stage_row_bytes<F, D>(g.a), apart_bytes(g.rows)), g);
      });
    }
    if (Format<F>::kCodes && large_mapped(F, planes, g.p.rows) && compiled_architecture() >= 90) {
      constexpr int kWords{large_strip_bytes(F) / 8};  // of a strip's stage
      g.weights = word_map(g.a.data, g.a.strips, static_cast<int64_t>(g.a.steps) * kWords, kWords, g.p.strips, text);
    }
    const auto launch_rows = [&]<int Rows>() {
      if constexpr (large_compiled(F, D, Grouped, Rows)) {
        if (g.p.rows == Rows) launch_large<F, Grouped, D, Rows>(g, launch, what);
      }
    };
    launch_rows.template operator()<16>(), launch_rows.template operator()<32>();
    launch_rows.template operator()<64>(), launch_rows.template operator()<128>();
  });
}

}  // namespace nibblelm::cuda
