// Of the decode attention on tensor cores: how positions are divided, tiles of them in shared memory, and the online
// softmax of a warp.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace nibblelm::cuda {

constexpr int kHeads{8};  // columns of the mma
constexpr int kTile{16};  // positions a warp takes at a time

// ---- how a row's positions are divided: by its own interval and the numbers of heads, never by batch or capacity ----

constexpr int kGroup{8};                    // parts that are merged first; where the card has clusters, one cluster
constexpr int kLeastSpan{64};               // spans are multiples of it: a tile for each warp
constexpr int kPartPositions{256};          // positions of a part from which on a second group is worth its merge
constexpr int kBlocksPerRow{64};            // at most, of one row: half of a large card's multiprocessors
constexpr int kLongRow{16384};              // longer rows have twice as many
constexpr int kBlockPositions{2048};        // at most, of a block that takes several parts
static_assert(kPartPositions >= kMinSpan);  // attention_workspace() counts splits of that size

// Groups are a power of two, so that finding one's place takes no division.
struct Plan {
  int length;
  int span;  // positions a part

  // `most_groups`: of a row that is not long.
  __device__ __forceinline__ static Plan of(Interval range, int most_groups) {
    const int length = range.end - range.first, over = max(length - 1, 0) / (kGroup * kPartPositions);
    const int parts = kGroup * min(length > kLongRow ? 2 * most_groups : most_groups, 1 << (kWarp - __clz(over)));
    const int even = (length + parts - 1) >> (31 - __clz(parts));
    return {length, (max(even, 1) + kLeastSpan - 1) / kLeastSpan * kLeastSpan};
  }
  __device__ __forceinline__ int parts() const { return (length + span - 1) / span; }
};

// ---- tiles ----

// How a block is built; it changes the time, never the result. kClusterBlocks: 1, or the parts of a group where the
// card has clusters. kPerMultiprocessor: blocks that shall fit. kMostParts: that a block takes one after the other.
template <int kHeadDim, int kTileBytes, int kClusterBlocks, int kPerMultiprocessor, int kMostParts = 1>
struct Form {
  static constexpr int D{kHeadDim};
  static constexpr int kWarps{D == 256 ? 2 : 4};
  static constexpr int kBytes{kTileBytes};
  static constexpr int kHostCluster{kClusterBlocks}, kCluster{kArchitecture >= 90 ? kClusterBlocks : 1};
  static constexpr int kBlocks{kPerMultiprocessor};
  static constexpr int kParts{kMostParts};
};

// Measured on the H200. At most 128 registers a thread and 67 KB: beside a block of the linears, whose weights then
// come while this one works and the other way round; of a batch, three to a multiprocessor.
template <int D>
using RowForm = Form<D, D == 256 ? 96 << 10 : 64 << 10, kGroup, D == 256 ? 2 : 4>;
// One row that may be long: no two blocks on one multiprocessor, and no clusters, which would crowd some parts of the
// device and leave others empty.
template <int D>
using LongForm = Form<D, 128 << 10, 1, 1>;
// Many rows: a block has one to itself, or a good length of it, and streams through its parts without a pause. A third
// block hides more of the way to the first tile than a longer ring.
template <int D>
using ManyForm = Form<D, 32 << 10, 1, D == 256 ? 2 : 3, kGroup>;

// A warp's tiles of 16 positions, keys then values, in shared memory. Rows are split into chunks of 16 bytes whose
// place is exclusive-ored with the row, so that neither copies nor ldmatrix meet bank conflicts, and a copy takes whole
// 128-byte lines.
template <class F>
struct Ring {
  static constexpr int D{F::D};
  static constexpr int kWarps{F::kWarps};
  static constexpr int kThreads{kWarps * kWarp};
  static constexpr int kWarpBytes{F::kBytes / kWarps};
  static constexpr int kTileBytes{kTile * D * 2};
  static constexpr int kUnits{kWarpBytes / kTileBytes};  // a tile's keys or its values are a unit
  static constexpr int kChunks{D / 8}, kRowsAtOnce{kWarp / kChunks}, kPitch{D * 2};
  static constexpr int kStep{kWarps * kTile};        // from a warp's tile to its next
  static constexpr int kAround{kUnits / 2 * kStep};  // and to the one that takes its place
  static_assert(kUnits % 2 == 0);
  static_assert(kUnits / 2 < kWarp);  // pages() has a tile a lane
  // A tile that starts too late for its page is also on the one on which the warp's next tile starts.
  static_assert(kTile <= kStep && kStep <= kPage);

  // Shared addresses in unit 0 of this lane's first chunk of copies and of operands; others differ by a constant, as
  // exclusive or with the chunk (128-byte rows of chunks are aligned) or as sum.
  uint32_t copies, keys, values;
  const PagedCache& cache;
  int slot;
  int chunk;    // this lane's, of position 0 of page 0
  int end;      // of the part
  int written;  // positions from here on read as zeros: an unwritten value may be NaN, and 0 * NaN would reach the sum
  int lane;

  // `newest`: the last position is not in the cache yet.
  __device__ __forceinline__ Ring(uint32_t storage, const PagedCache& cache, int slot, int kv_head, int end,
                                  bool newest, int warp, int lane)
      : cache(cache), slot(slot), end(end), written(newest ? end - 1 : end), lane(lane) {
    const uint32_t base = storage + warp * kWarpBytes;
    const int first = lane / kChunks, column = lane % kChunks;
    copies = keep(base + first * kPitch + ((column ^ first) << 4));
    keys = keep(base + lane % 16 * kPitch + ((lane / 16 ^ lane % 8) << 4));
    values = keep(base + (lane / 16 * 8 + lane % 8) * kPitch + ((lane / 8 % 2 ^ lane % 8) << 4));
    chunk = keep(static_cast<int>(cache_row<D>(cache, 0, kv_head, 0)) + first * D + column * 8);
  }
  // The page of the tile at p, or, behind the last one, of the last position.
  template <bool kEarly = false>
  __device__ __forceinline__ int page(int p) const {
    return page_of<kEarly>(cache, slot, min(p, end - 1));
  }
  // Of the warp's tiles from p on, one a lane; may be asked for before dependency_wait().
  __device__ __forceinline__ int pages(int p) const { return page<true>(p + lane * kStep); }
  // Chunk 2 c further than at `address`, whose chunk is even or odd in its row's order.
  __device__ __forceinline__ static uint32_t further(uint32_t address, int c) {
    return (address ^ (2 * c % 8) << 4) + 2 * c / 8 * 128;
  }
  // The keys or the values at p, from their pool; the tile starts on `page`, the warp's next one on `next`.
  __device__ __forceinline__ void fetch(int unit, const void* pool, int p, int page, int next) const {
    const uint32_t target = copies + unit * kTileBytes;
    const bf16* const from = static_cast<const bf16*>(pool) + cache_row<D>(cache, page, 0, p) + chunk;
    const int on_page = kPage - static_cast<unsigned>(p) % kPage;  // rows
    if (p + kTile <= written && on_page >= kTile) {
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce) copy_async_16((target ^ (i % 8) << 4) + i * kPitch, from + i * D);
    } else {
      const int first = lane / kChunks;
      // As if the next page's rows came before its first.
      const bf16* const behind = static_cast<const bf16*>(pool) + cache_row<D>(cache, next, 0, 0) + chunk - on_page * D;
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce)
        copy_or_zero((target ^ (i % 8) << 4) + i * kPitch, (first + i < on_page ? from : behind) + i * D,
                     p + first + i < written);
    }
  }
  // Asks for what fits of the tiles from p on, whose pages() are given: a group of copies for each unit.
  __device__ __forceinline__ void fill(int p, int pages) const {
#pragma unroll 1
    for (int unit = 0; unit < kUnits; unit += 2, p += kStep) {
      const int page = __shfl_sync(kAllLanes, pages, unit / 2), next = __shfl_sync(kAllLanes, pages, unit / 2 + 1);
      if (p < end) fetch(unit, cache.k, p, page, next);
      copy_async_commit();
      if (p < end) fetch(unit + 1, cache.v, p, page, next);
      copy_async_commit();
    }
  }
  // A key or value, (D,), as row `row` of a unit.
  __device__ __forceinline__ void insert(int unit, int row, const bf16* x) const {
    const uint32_t tile = keys - (lane % 16 * kPitch + ((lane / 16 ^ lane % 8) << 4)) + unit * kTileBytes;
    if (lane < kChunks)
      store_shared_16(tile + row * kPitch + ((lane ^ row % 8) << 4), reinterpret_cast<const uint4*>(x)[lane]);
    __syncwarp();
  }
  // Operand A of 16 positions at d = 16 c .. + 15.
  __device__ __forceinline__ void key(uint32_t (&r)[4], int unit, int c) const {
    ldmatrix_x4(r, further(keys + unit * kTileBytes, c));
  }
  // Operand A of d = 16 c .. + 15 by 16 positions.
  __device__ __forceinline__ void value(uint32_t (&r)[4], int unit, int c) const {
    ldmatrix_x4_trans(r, further(values + unit * kTileBytes, c));
  }
};

// Online softmax of a warp's positions for heads 2j and 2j + 1 of the group (lane = 4 g + j); o[c] holds d = 16 c + g
// of both heads and then d = 16 c + g + 8. Its arithmetic leaves nothing to the compiler's contraction, so that the
// kernels with and without rotation have the same bits.
template <class F>
struct Accumulator {
  using R = Ring<F>;
  static constexpr int D{F::D};
  float o[D / 16][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's positions only, until the end

  __device__ __forceinline__ static void dots(float (&s)[4], const R& ring, int unit, const uint32_t (&q)[D / 16][2]) {
    float odd[4]{};  // a second chain of products halves the wait for results
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t k[4];
      ring.key(k, unit, c);
      mma_16816(c % 2 == 0 ? s : odd, k[0], k[1], k[2], k[3], q[c][0], q[c][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = __fadd_rn(s[i], odd[i]);
  }

  // Takes the dot products of 16 positions from p on and leaves their weights, as operands, in p0 and p1.
  template <bool kOptions>
  __device__ __forceinline__ void weigh(const AttentionArgs& a, float (&s)[4], int64_t row, int position,
                                        int first_head, int p, int end, int g, int j, uint32_t& p0, uint32_t& p1) {
    float highest[2]{m[0], m[1]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = p + g + 8 * (i >> 1), head = min(first_head + 2 * j + (i & 1), a.heads - 1);
      s[i] = at < end ? score<kOptions>(a, s[i], row, position, head, at) : -INFINITY;
      highest[i & 1] = fmaxf(highest[i & 1], s[i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        highest[h] = fmaxf(highest[h], __shfl_xor_sync(kAllLanes, highest[h], offset));
    if (__any_sync(kAllLanes, highest[0] != m[0] || highest[1] != m[1])) {  // else every factor is 1
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = weight_of(m[h], highest[h]);
        m[h] = highest[h];
        l[h] = __fmul_rn(l[h], factor);
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
          o[c][h] = __fmul_rn(o[c][h], factor);
          o[c][2 + h] = __fmul_rn(o[c][2 + h], factor);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = weight_of(s[i], m[i & 1]);
      l[i & 1] = __fadd_rn(l[i & 1], s[i]);
    }
    p0 = transpose_8x8(pack2<bf16>(s[0], s[1]));
    p1 = transpose_8x8(pack2<bf16>(s[2], s[3]));
  }

  __device__ __forceinline__ void add(const R& ring, int unit, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t v[4];
      ring.value(v, unit, c);
      mma_16816(o[c], v[0], v[1], v[2], v[3], p0, p1);
    }
  }
};

// A warp's tiles from p to the end of a part, which fill() asked for; `page` is that of the tile to ask for next,
// `unit` this one's. insert(unit, p, which) puts in a key (0) or value (1) that the cache lacks; weigh(scores, p, p0,
// p1) is Accumulator::weigh.
template <class F, class Insert, class Weigh>
__device__ __forceinline__ void attend(Accumulator<F>& sum, const Ring<F>& ring, const uint32_t (&q)[F::D / 16][2],
                                       int& p, int end, int& page, int& unit, Insert insert, Weigh weigh) {
  using R = Ring<F>;
#pragma unroll 1
  for (; p < end; p += R::kStep, unit = unit + 2 == R::kUnits ? 0 : unit + 2) {
    const int far = p + R::kAround;
    const int next = far < ring.end ? ring.page(far + R::kStep) : 0;  // a tile before it is needed
    float s[4];
    copy_async_wait<R::kUnits - 1>();
    __syncwarp();  // the keys have arrived for every lane
    insert(unit, p, 0);
    sum.dots(s, ring, unit, q);
    __syncwarp();  // every lane is done with them
    if (far < ring.end) {
      ring.fetch(unit, ring.cache.k, far, page, next);
    } else {
      dependency_release();
    }
    copy_async_commit();
    uint32_t p0, p1;
    weigh(s, p, p0, p1);
    copy_async_wait<R::kUnits - 1>();
    __syncwarp();
    insert(unit + 1, p, 1);
    sum.add(ring, unit + 1, p0, p1);
    __syncwarp();
    if (far < ring.end) ring.fetch(unit + 1, ring.cache.v, far, page, next);
    copy_async_commit();
    page = next;
  }
}

}  // namespace nibblelm::cuda
