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
constexpr int kLongRow{16384};              // longer rows have more
static_assert(kPartPositions >= kMinSpan);  // attention_workspace() counts splits of that size

// Groups of parts, at most, of a row of `length` positions. `most`: of one that is not long. In int8 warps wait for
// latencies, not for memory, so that more of them are faster.
template <class T>
__host__ __device__ constexpr int groups_of(int length, int most) {
  return length <= kLongRow ? most : (sizeof(T) == 1 ? 4 : 2) * most;
}

// Groups are a power of two, so that finding one's place takes no division.
struct Plan {
  int length;
  int span;  // positions a part

  // `most_groups`: of a row that is not long. T: of the cache.
  template <class T>
  __device__ __forceinline__ static Plan of(Interval range, int most_groups) {
    const int length = range.end - range.first, over = max(length - 1, 0) / (kGroup * kPartPositions);
    const int parts = kGroup * min(groups_of<T>(length, most_groups), 1 << (kWarp - __clz(over)));
    const int even = (length + parts - 1) >> (31 - __clz(parts));
    return {length, (max(even, 1) + kLeastSpan - 1) / kLeastSpan * kLeastSpan};
  }
  __device__ __forceinline__ int parts() const { return (length + span - 1) / span; }
};

// ---- tiles ----

// The head sizes of a kernel: kD, or, where not kExact, the multiples of 16 in (kD / 2, kD), whose rows are filled up
// with zeros to kD columns on their way to shared memory and nowhere else. To keep the library small, the kernels of
// the latter are compiled once, with options, and ask for them at run time; those with rotation have none.
template <int kD, bool kIsExact>
struct HeadSize {
  static constexpr int D{kD};
  static constexpr bool kExact{kIsExact};

  // Columns of a row in global memory; in shared memory it has D.
  __device__ __forceinline__ static int width(const PagedCache& cache) { return kExact ? D : cache.head_dim; }
  // Whether it has column d: of most this is known.
  __device__ __forceinline__ static bool has(const PagedCache& cache, int d) {
    return kExact || d <= D / 2 || d < cache.head_dim;
  }
  __device__ __forceinline__ static int64_t row_start(const PagedCache& cache, int page, int kv_head, int position) {
    return cache_row<kExact ? D : 0>(cache, page, kv_head, position);
  }
};

// How a block is built; it changes the time, never the result. `Value`: of the cache, bf16 or int8_t. kClusterBlocks:
// 1, or the parts of a group where the card has clusters. kPerMultiprocessor: blocks that shall fit. kMostParts: that a
// block takes one after the other; of a cluster whose blocks take several, every kClusterBlocks-th one, from its rank
// on. kOneWarp: a block is one warp, which takes the tiles of all chains. kBlockTeams: of a warp for each chain, to
// which parts are dealt in the same way. Only the number of chains shows in the result, so all forms of a size have the
// same.
template <class Size, class Value, int kRing, int kClusterBlocks, int kPerMultiprocessor, int kMostParts = 1,
          bool kOneWarp = false, int kBlockTeams = 1>
struct Form : Size {
  using Size::D;
  using T = Value;
  static constexpr bool kInt8{std::is_same_v<T, int8_t>};
  static constexpr int kChains{D == 256 ? 2 : 4};  // of tiles in turn, each with an online softmax of its own
  static constexpr int kTeams{kBlockTeams};
  static constexpr int kWarps{kOneWarp ? 1 : kChains * kTeams};
  static constexpr int kRingBytes{kRing};
  static constexpr int kTiles{kRing / (2 * kTile * D * static_cast<int>(sizeof(T)))};  // of keys and values
  // Behind the ring the scales of the keys and of the values of each tile.
  static constexpr int kScaleBytes{kInt8 ? 2 * kTile * static_cast<int>(sizeof(float)) : 0};
  static constexpr int kBytes{kRing + kTiles * kScaleBytes};
  static constexpr int kHostCluster{kClusterBlocks}, kCluster{kArchitecture >= 90 ? kClusterBlocks : 1};
  static constexpr int kBlocks{kPerMultiprocessor};
  static constexpr int kParts{kMostParts};
  // Parts are dealt to the blocks of a cluster or to the teams of a block.
  static constexpr bool kDealt{kTeams > 1 || (kClusterBlocks > 1 && kMostParts > 1)};
  static constexpr int kDealtTo{kTeams > 1 ? kTeams : kCluster};
  // Its blocks seldom find room before the kernel ahead has ended, so that nothing is gained by what is read before.
  static constexpr bool kLate{kClusterBlocks == 1 && kMostParts > 1};
  // Two tiles at a time, where a multiprocessor has one block whose warps wait for latencies rather than for memory.
  static constexpr bool kPairs{kInt8 && kClusterBlocks == 1 && kMostParts == 1};
  // At most, of a block that takes several parts; of a warp's or dealt ones, which are of the least span, of a row.
  static constexpr int kPositions{kOneWarp || kDealt ? kGroup * kLeastSpan : 2048};
};

// Measured on the H200. At most 128 registers a thread and 67 KB: beside a block of the linears, whose weights then
// come while this one works and the other way round; of a batch, three to a multiprocessor.
template <class S, class T>
using RowForm = Form<S, T, S::D == 256 ? 96 << 10 : 64 << 10, kGroup, S::D == 256 ? 2 : 4>;
// The same for a short row, whose warps have a tile each: beside linears that leave less. Merges take 12,608 bytes a
// warp, more than a tile.
template <class S, class T>
using ShortForm = Form<S, T, 4 * 12672, kGroup, 4>;
// A short row of many KV heads, whose parts would be more blocks than there are multiprocessors: so few that all fit
// beside the linears at once (measured with 32 heads). Three, since an H200 has room for 30 clusters of four, not 33.
template <class S, class T>
using DealtForm = Form<S, T, 64 << 10, 3, 4, 3>;
// One row that may be long: no clusters, which would crowd some parts of the device and leave others empty, and no two
// blocks on one multiprocessor, whose memory they would share. In int8, where warps wait for latencies, several may be.
template <class S, class T>
using LongForm =
    std::conditional_t<sizeof(T) == 1, Form<S, T, 64 << 10, 1, (S::D == 256 ? 2 : 4)>, Form<S, T, 128 << 10, 1, 1>>;
// The same where a block fits beside one of the linears, and by that alone: it has its first tiles by the time they
// end, and the next ones have theirs. Where nothing is beside them, two would meet.
template <class S, class T>
using BesideForm = Form<S, T, 64 << 10, 1, 4>;
// Some short rows, at most one head of them a multiprocessor: four teams have a part each at a time, a tile a warp.
template <class S, class T>
using TeamForm = Form<S, T, 32 * kTile * S::D* static_cast<int>(sizeof(T)), 1, 1, kGroup / 4, false, 4>;
// Many rows: a block has one to itself, or a good length of it, and streams through its parts without a pause. A third
// block hides more of the way to the first tile than a longer ring.
template <class S, class T>
using ManyForm = Form<S, T, 32 << 10, 1, S::D == 256 ? 2 : 3, kGroup>;
// Very many rows, none of which may be longer than parts with a tile for each chain: a warp for each KV head of each.
// It prepares the heads once, not four times, and waits for no other warp; all chains are in its registers, so eight
// fit on a multiprocessor. Of longer rows that differ much, the others would wait for the longest one's warp.
template <class S, class T>
using WarpForm = Form<S, T, 8 << 10, 1, 8, kGroup, true>;
// The same in bf16 where all of them fit with twice the tiles: each has another one under way. Six at least shall fit.
template <class S, class T>
using WideWarpForm = Form<S, T, 16 << 10, 1, 6, kGroup, true>;

// A warp's tiles of 16 positions, keys then values, in shared memory. Rows are split into chunks of 16 bytes whose
// place is exclusive-ored with the row (or pair of rows of 64 bytes), so that neither copies nor ldmatrix meet bank
// conflicts, and a copy takes whole 128-byte lines.
template <class F>
struct Ring {
  using T = F::T;
  static constexpr int D{F::D};
  static constexpr int kWarps{F::kWarps};
  static constexpr int kThreads{kWarps * kWarp};
  static constexpr int kWarpBytes{F::kRingBytes / kWarps};
  static constexpr int kPitch{D * static_cast<int>(sizeof(T))}, kTileBytes{kTile * kPitch};
  static constexpr int kUnits{kWarpBytes / kTileBytes / 2 * 2};      // a tile's keys or its values are a unit
  static constexpr int kPerChunk{16 / static_cast<int>(sizeof(T))};  // values
  static constexpr int kChunks{D / kPerChunk}, kRowsAtOnce{kWarp / kChunks};
  // From a warp's tile to its next.
  static constexpr int kStep{kWarps / F::kTeams * kTile * (F::kDealt ? F::kDealtTo : 1)};
  static constexpr int kAround{kUnits / 2 * kStep};  // and to the one that takes its place
  static_assert(kUnits > 0 && kWarpBytes % 128 == 0);
  // To where a tile goes on that starts too late for its page: that of the warp's next tile is the same, if it is near.
  static constexpr int kFurther{F::kDealt ? kTile : kStep};
  static_assert(kTile <= kFurther && kFurther <= kPage);
  static constexpr int kLanes{F::kDealt ? kWarp / 2 : kWarp};  // pages() has a tile a lane
  static_assert(kUnits / 2 < kLanes);
  static_assert(!F::kDealt || F::kParts <= kUnits / 2 + 1);  // attend_tile() asks for one tile behind the first ones

  // Shared addresses in unit 0 of this lane's first chunk of copies and of operands; others differ by a constant, as
  // exclusive or with the chunk (128-byte rows of chunks are aligned) or as sum.
  uint32_t copies, keys, values, scales;
  const PagedCache& cache;
  int slot, kv_head;
  int chunk;    // this lane's first value, of position 0 of page 0
  int end;      // of the part
  int written;  // positions from here on read as zeros: an unwritten value may be NaN, and 0 * NaN would reach the sum
  int lane;

  // `newest`: the last position is not in the cache yet.
  __device__ __forceinline__ Ring(uint32_t storage, const PagedCache& cache, int slot, int kv_head, int end,
                                  bool newest, int warp, int lane)
      : cache(cache), slot(slot), kv_head(kv_head), end(end), written(newest ? end - 1 : end), lane(lane) {
    const uint32_t base = storage + warp * kWarpBytes;
    const int first = lane / kChunks, column = lane % kChunks;
    copies = keep(base + first * kPitch + ((column ^ turn(first)) << 4));
    keys = keep(base + key_place());
    if constexpr (F::kInt8) {
      scales = keep(storage + F::kRingBytes + warp * (kUnits / 2 * F::kScaleBytes));
    } else {
      values = keep(base + (lane / 16 * 8 + lane % 8) * kPitch + ((lane / 8 % 2 ^ lane % 8) << 4));
    }
    chunk = keep(static_cast<int>(F::row_start(cache, 0, kv_head, 0)) + first * F::width(cache) +
                 (has_column() ? column * kPerChunk : 0));
  }
  // Whether this lane's chunks are of rows; others are zeros, without which 0 * NaN would reach the scores.
  __device__ __forceinline__ bool has_column() const { return F::has(cache, lane % kChunks * kPerChunk); }
  __device__ __forceinline__ static int turn(int row) { return kChunks < 8 ? row / 2 % 4 : row % 8; }
  // Of the row that the lane gives ldmatrix, in a unit.
  __device__ __forceinline__ uint32_t key_place() const {
    return lane % 16 * kPitch + ((lane / 16 ^ turn(lane % 16)) << 4);
  }
  // The page of the tile at p, or, behind the last one, of the last position.
  template <bool kEarly = false>
  __device__ __forceinline__ int page(int p) const {
    return page_of<kEarly>(cache, slot, min(p, end - 1));
  }
  // Of the warp's tiles from p on, one a lane, and behind kLanes those on which they go on; may be asked for before
  // dependency_wait().
  __device__ __forceinline__ int pages(int p) const {
    return page<true>(F::kDealt ? p + lane % kLanes * kStep + lane / kLanes * kFurther : p + lane * kStep);
  }
  // Chunk 2 c further than at `address`, whose chunk is even or odd in its row's order.
  __device__ __forceinline__ static uint32_t further(uint32_t address, int c) {
    return (address ^ (2 * c % 8) << 4) + 2 * c / 8 * 128;
  }
  // The keys or the values at p, from their pool; the tile starts on `page`, the one kFurther behind it on `next`.
  __device__ __forceinline__ void fetch(int unit, const void* pool, int p, int page, int next) const {
    const uint32_t target = copies + unit * kTileBytes;
    const T* const from = static_cast<const T*>(pool) + F::row_start(cache, page, 0, p) + chunk;
    const int on_page = kPage - static_cast<unsigned>(p) % kPage;  // rows
    const int width = F::width(cache);
    if (p + kTile <= written && on_page >= kTile) {
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce) {
        const uint32_t to = (target ^ (i % 8) << 4) + i * kPitch;
        F::kExact ? copy_async_16(to, from + i * width, kEvictFirst) : copy_or_zero(to, from + i * width, has_column());
      }
    } else {
      const int first = lane / kChunks;
      // As if the next page's rows came before its first.
      const T* const behind = static_cast<const T*>(pool) + F::row_start(cache, next, 0, 0) + chunk - on_page * width;
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce)
        copy_or_zero((target ^ (i % 8) << 4) + i * kPitch, (first + i < on_page ? from : behind) + i * width,
                     p + first + i < written && has_column());
    }
  }
  // The same with all scales: the weights of values want theirs before the values have come.
  __device__ __forceinline__ void fetch_keys(int unit, int p, int page, int next) const {
    fetch(unit, cache.k, p, page, next);
    if constexpr (F::kInt8) {
      const int row_of_tile = lane % kTile, position = p + row_of_tile;
      const int on_page = kPage - static_cast<unsigned>(p) % kPage;
      const int64_t row = scale_row(cache, row_of_tile < on_page ? page : next, kv_head, position);
      copy_or_zero_4(scales + unit * (F::kScaleBytes / 2) + lane * 4,
                     (lane < kTile ? cache.k_scales : cache.v_scales) + row, position < written);
    }
  }
  // Asks for what fits of the tiles from p on, whose pages() are given: a group of copies for each unit; of pairs for
  // the keys of both, then for the values.
  __device__ __forceinline__ void fill(int p, int pages) const {
    if constexpr (F::kPairs) {
      static_assert(kUnits % 4 == 0);
#pragma unroll 1
      for (int unit = 0; unit < kUnits; unit += 4, p += 2 * kStep) {
        int page[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) page[i] = __shfl_sync(kAllLanes, pages, unit / 2 + i);
        fetch_pair(unit, p, page, [&](int at, int from, int own, int next) { fetch_keys(at, from, own, next); });
        fetch_pair(unit, p, page,
                   [&](int at, int from, int own, int next) { fetch(at + 1, cache.v, from, own, next); });
      }
    } else {
#pragma unroll 1
      for (int unit = 0; unit < kUnits; unit += 2, p += kStep) {
        const int page = __shfl_sync(kAllLanes, pages, unit / 2);
        const int next = __shfl_sync(kAllLanes, pages, unit / 2 + (F::kDealt ? kLanes : 1));
        if (p < end) fetch_keys(unit, p, page, next);
        copy_async_commit();
        if (p < end) fetch(unit + 1, cache.v, p, page, next);
        copy_async_commit();
      }
    }
  }
  // A group of copies for the two tiles from p on, which start on page[0] and page[1].
  template <class Fetch>
  __device__ __forceinline__ void fetch_pair(int unit, int p, const int (&page)[3], Fetch fetch) const {
    if (p < end) fetch(unit, p, page[0], page[1]);
    if (p + kStep < end) fetch(unit + 2, p + kStep, page[1], page[2]);
    copy_async_commit();
  }
  // A key or value, (D,), as row `row` of a unit.
  __device__ __forceinline__ void insert(int unit, int row, const T* x) const {
    const uint32_t tile = keys - key_place() + unit * kTileBytes;
    if (lane < kChunks)
      store_shared_16(tile + row * kPitch + ((lane ^ turn(row)) << 4), reinterpret_cast<const uint4*>(x)[lane]);
    __syncwarp();
  }
  // Their scales, of the key in this unit and of the value in the next.
  __device__ __forceinline__ void insert_scales(int unit, int row, const float (&x)[2]) const {
    if (lane < 2) store_shared(scales + unit * (F::kScaleBytes / 2) + (lane * kTile + row) * 4, x[lane]);
    __syncwarp();
  }
  // Of positions g and g + 8 of the tile: of their keys, then of their values.
  __device__ __forceinline__ void tile_scales(float (&x)[4], int unit) const {
    if constexpr (F::kInt8) {
      const uint32_t at = scales + unit * (F::kScaleBytes / 2) + (lane & ~3);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(load_shared<uint32_t>(at + i * 32));
    }
  }
  // Operand A of 16 positions at d = 16 c .. + 15; in int8 at d = 32 c .. + 31.
  __device__ __forceinline__ void key(uint32_t (&r)[4], int unit, int c) const {
    ldmatrix_x4(r, further(keys + unit * kTileBytes, c));
  }
  // Operand A of d = 16 c .. + 15 by 16 positions; in int8, as bf16, of two such, whose rows g and g + 8 are 2 g and
  // 2 g + 1: a transposed word has both of them at both of a lane's positions.
  __device__ __forceinline__ void value(uint32_t (&r)[4], int unit, int c) const {
    ldmatrix_x4_trans(r, further(values + unit * kTileBytes, c));
  }
  __device__ __forceinline__ void values_as_bf16(uint32_t (&r)[2][4], int unit, int c) const {
    uint32_t codes[4];
    ldmatrix_x4_trans(codes, further(keys + unit * kTileBytes, c));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[i / 2][i % 2 * 2] = bf16_of_bytes(codes[i]);
      r[i / 2][i % 2 * 2 + 1] = bf16_of_bytes(codes[i] >> 8);
    }
  }
};

// The queries of a block as operand B: of bf16 as they are; for int8 keys as n * scale with n of two signed digits to
// base 256, so that products with codes are exact. The scale is a power of two: only values below a 128th of their
// head's largest lose a bit, and what all of them lose moves a score by less than a 40th of what rounding its key did.
template <class F>
struct Queries {
  static constexpr int D{F::D};
  uint32_t x[D / 16][2];  // [c][i] has d = 16 c + 8 i + 2 j; int8: [2 c + digit][i] has d = 32 c + 16 i + 4 j
  float scale[2];         // int8: of heads 2 j and 2 j + 1

  // `query`: (width,) of the lane's head of the group (lane = 4 g + j has g), if there is one.
  __device__ __forceinline__ Queries(const PagedCache& cache, const bf16* query, bool there, int j) {
    if constexpr (F::kInt8) {
      uint2 raw[D / 32][2];
      unsigned top{0x0d800000};  // 2^-100: the exponents below stay in range
#pragma unroll
      for (int c = 0; c < D / 32; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int d = 32 * c + 16 * i;
          raw[c][i] = there && F::has(cache, d) ? *reinterpret_cast<const uint2*>(query + d + 4 * j) : uint2{};
          top = max(top, max(raw[c][i].x << 16 & 0x7fff0000u, raw[c][i].x & 0x7fff0000u));
          top = max(top, max(raw[c][i].y << 16 & 0x7fff0000u, raw[c][i].y & 0x7fff0000u));
        }
      top = max(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = max(top, __shfl_xor_sync(kAllLanes, top, 2));
      const int exponent = static_cast<int>(top >> 23);  // the largest is in [2^14, 2^15) times the scale
      const float inverse = __int_as_float((127 + 127 + 14 - exponent) << 23);
      const float own = exponent == 255 ? INFINITY : __int_as_float((exponent - 14) << 23);
#pragma unroll
      for (int c = 0; c < D / 32; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 first = unpack2<bf16>(raw[c][i].x), second = unpack2<bf16>(raw[c][i].y);
          const float values[4]{first.x, first.y, second.x, second.y};
          uint32_t high{0}, low{0};
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int n = min(__float2int_rn(__fmul_rn(values[e], inverse)), 127 * 256 + 127);  // what two digits say
            high |= (static_cast<uint32_t>((n + 128) >> 8) & 255u) << 8 * e;
            low |= (static_cast<uint32_t>(n) & 255u) << 8 * e;
          }
          x[2 * c][i] = high, x[2 * c + 1][i] = low;
        }
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = __shfl_sync(kAllLanes, own, (2 * j + h) * 4);
    } else {
#pragma unroll
      for (int c = 0; c < D / 16; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x[c][i] =
              there && F::has(cache, 16 * c) ? *reinterpret_cast<const uint32_t*>(query + 16 * c + 8 * i + 2 * j) : 0u;
    }
  }
};

// Online softmax of a warp's positions for heads 2j and 2j + 1 of the group (lane = 4 g + j); o[c] holds d = 16 c + g
// of both heads and then d = 16 c + g + 8, in int8 d = 16 c + 2 g and d + 1. Its arithmetic leaves nothing to the
// compiler's contraction, so that the kernels with and without rotation have the same bits.
template <class F>
struct Accumulator {
  using R = Ring<F>;
  static constexpr int D{F::D};
  float o[D / 16][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's positions only, until the end

  // Calls f(d, value) for this lane's values of head h's output.
  template <class Each>
  __device__ __forceinline__ void each(int h, int g, Each f) const {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      f(16 * c + (F::kInt8 ? 2 * g : g), o[c][h]);
      f(16 * c + (F::kInt8 ? 2 * g + 1 : g + 8), o[c][2 + h]);
    }
  }
  // Head h's output, (D,), to shared memory.
  __device__ __forceinline__ void store(float* to, int h, int g) const {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      if constexpr (F::kInt8) {
        *reinterpret_cast<float2*>(to + 16 * c + 2 * g) = {o[c][h], o[c][2 + h]};
      } else {
        to[16 * c + g] = o[c][h];
        to[16 * c + g + 8] = o[c][2 + h];
      }
    }
  }

  // Of kTiles tiles, whose units follow each other; `scales`: tile_scales().
  template <int kTiles>
  __device__ __forceinline__ static void dots(float (&s)[kTiles][4], const R& ring, int unit, const Queries<F>& q,
                                              const float (&scales)[kTiles][4]) {
    if constexpr (F::kInt8) {
      int high[kTiles][4]{}, low[kTiles][4]{};
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        if (!F::has(ring.cache, 32 * c)) break;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint32_t k[4];
          ring.key(k, unit + 2 * t, c);
          mma_16832(high[t], k, q.x[2 * c][0], q.x[2 * c][1]);
          mma_16832(low[t], k, q.x[2 * c + 1][0], q.x[2 * c + 1][1]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          s[t][i] =
              __fmul_rn(__int2float_rn(high[t][i] * 256 + low[t][i]), __fmul_rn(q.scale[i & 1], scales[t][i >> 1]));
    } else {
      float odd[kTiles][4]{};  // a second chain of products halves the wait for results
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][i] = 0.0f;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        if (!F::has(ring.cache, c / 2 * 32)) break;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint32_t k[4];
          ring.key(k, unit + 2 * t, c);
          mma_16816(c % 2 == 0 ? s[t] : odd[t], k[0], k[1], k[2], k[3], q.x[c][0], q.x[c][1]);
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[t][i] = __fadd_rn(s[t][i], odd[t][i]);
    }
  }

  // Takes the dot products of kTiles tiles, the first of 16 positions from p on and the others each F::kStep further,
  // and leaves their scores, and the highest of each tile and of all that is before it.
  template <bool kOptions, int kTiles>
  __device__ __forceinline__ void score_tiles(const AttentionArgs& a, float (&s)[kTiles][4],
                                              float (&highest)[kTiles][2], int64_t row, int position, int first_head,
                                              int p, int end, int g, int j) const {
    const auto scored = [&](float dot, int head, int at) {
      if constexpr (F::kExact || !kOptions) return score<kOptions, true>(a, dot, row, position, head, at);
      return has_options(a) ? score<true, true>(a, dot, row, position, head, at)
                            : score<false>(a, dot, row, position, head, at);
    };
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      highest[t][0] = m[0], highest[t][1] = m[1];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = p + t * R::kStep + g + 8 * (i >> 1), head = min(first_head + 2 * j + (i & 1), a.heads - 1);
        s[t][i] = at < end ? scored(s[t][i], head, at) : -INFINITY;
        highest[t][i & 1] = fmaxf(highest[t][i & 1], s[t][i]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int offset = 4; offset < kWarp; offset *= 2)
          highest[t][h] = fmaxf(highest[t][h], __shfl_xor_sync(kAllLanes, highest[t][h], offset));
#pragma unroll
    for (int t = 1; t < kTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) highest[t][h] = fmaxf(highest[t][h], highest[t - 1][h]);
  }

  // Takes a tile's scores and leaves their weights, as operands, in p0 and p1: in int8 times the values' scales, so
  // that these cost no rounding of their own. kFirst: there is nothing in the sum yet.
  template <bool kFirst>
  __device__ __forceinline__ void weigh(float (&s)[4], const float (&highest)[2], const float (&scales)[4],
                                        uint32_t& p0, uint32_t& p1) {
    if (!kFirst &&
        __any_sync(kAllLanes, highest[0] != m[0] || highest[1] != m[1])) {  // else every factor is 1, or of nothing
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = weight_of(m[h], highest[h]);
        l[h] = __fmul_rn(l[h], factor);
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
          o[c][h] = __fmul_rn(o[c][h], factor);
          o[c][2 + h] = __fmul_rn(o[c][2 + h], factor);
        }
      }
    }
    m[0] = highest[0], m[1] = highest[1];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = weight_of(s[i], m[i & 1]);
      l[i & 1] = __fadd_rn(l[i & 1], s[i]);
      if constexpr (F::kInt8) s[i] = __fmul_rn(s[i], scales[2 + (i >> 1)]);
    }
    p0 = transpose_8x8(pack2<bf16>(s[0], s[1]));
    p1 = transpose_8x8(pack2<bf16>(s[2], s[3]));
  }

  __device__ __forceinline__ void add(const R& ring, int unit, uint32_t p0, uint32_t p1) {
    if constexpr (F::kInt8) {
#pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        if (!F::has(ring.cache, 32 * c)) break;
        uint32_t v[2][4];
        ring.values_as_bf16(v, unit, c);
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_16816(o[2 * c + i], v[i][0], v[i][1], v[i][2], v[i][3], p0, p1);
      }
    } else {
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        if (!F::has(ring.cache, c / 2 * 32)) break;
        uint32_t v[4];
        ring.value(v, unit, c);
        mma_16816(o[c], v[0], v[1], v[2], v[3], p0, p1);
      }
    }
  }
};

// A warp's tile at p, which fill() asked for, and on to its next; `page` is that of the tile to ask for next, of dealt
// parts of the only one, `unit` this one's. kFirst: the sum is empty. insert(unit, p, which) puts in a key (0) or value
// (1) that the cache lacks; scored(sum, dots, highest, p) is Accumulator::score_tiles.
template <bool kFirst, class F, class Insert, class Scored>
__device__ __forceinline__ void attend_tile(Accumulator<F>& sum, const Ring<F>& ring, const Queries<F>& q, int& p,
                                            int& page, int& unit, Insert insert, Scored scored) {
  using R = Ring<F>;
  const int far = p + R::kAround;
  const int next = far < ring.end ? ring.page(far + R::kFurther) : 0;  // a tile before it is needed
  float s[1][4], scales[1][4], highest[1][2];
  copy_async_wait<R::kUnits - 1>();
  __syncwarp();  // the keys have arrived for every lane
  insert(unit, p, 0);
  ring.tile_scales(scales[0], unit);
  sum.dots(s, ring, unit, q, scales);
  __syncwarp();  // every lane is done with them
  if (far < ring.end) {
    ring.fetch_keys(unit, far, page, next);
  } else {
    dependency_release();
  }
  copy_async_commit();
  uint32_t p0, p1;
  scored(sum, s, highest, p);
  sum.template weigh<kFirst>(s[0], highest[0], scales[0], p0, p1);
  copy_async_wait<R::kUnits - 1>();
  __syncwarp();
  insert(unit + 1, p, 1);
  sum.add(ring, unit + 1, p0, p1);
  __syncwarp();
  if (far < ring.end) ring.fetch(unit + 1, ring.cache.v, far, page, next);
  copy_async_commit();
  page = next;
  p += R::kStep, unit = unit + 2 == R::kUnits ? 0 : unit + 2;
}

// The same for two tiles at a time, with the same arithmetic: of the second one, which may be behind the end, the keys'
// products and the highest score are there when the first has been added. Pages of tiles to ask for are spread over the
// lanes: lane `asked` of `pages` has that of this pair's first, and where the lanes end they are read anew.
template <class F, class Insert, class Scored>
__device__ __forceinline__ void attend_pair(Accumulator<F>& sum, const Ring<F>& ring, const Queries<F>& q, int& p,
                                            int& pages, int& asked, int& unit, Insert insert, Scored scored) {
  using R = Ring<F>;
  const int far = p + R::kAround;
  int page[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) page[i] = __shfl_sync(kAllLanes, pages, asked + i);
  asked += 2;
  if (asked + 2 >= kWarp) pages = ring.pages(far + 2 * R::kStep), asked = 0;
  float s[2][4], scales[2][4], highest[2][2];
  copy_async_wait<R::kUnits / 2 - 1>();
  __syncwarp();  // the keys have arrived for every lane
  insert(unit, p, 0), insert(unit + 2, p + R::kStep, 0);
  ring.tile_scales(scales[0], unit), ring.tile_scales(scales[1], unit + 2);
  sum.dots(s, ring, unit, q, scales);
  __syncwarp();  // every lane is done with them
  if (far >= ring.end) dependency_release();
  ring.fetch_pair(unit, far, page, [&](int at, int from, int own, int next) { ring.fetch_keys(at, from, own, next); });
  scored(sum, s, highest, p);
  uint32_t p0, p1;
  sum.template weigh<false>(s[0], highest[0], scales[0], p0, p1);
  copy_async_wait<R::kUnits / 2 - 1>();
  __syncwarp();
  insert(unit + 1, p, 1), insert(unit + 3, p + R::kStep, 1);
  sum.add(ring, unit + 1, p0, p1);
  if (p + R::kStep < ring.end) {
    sum.template weigh<false>(s[1], highest[1], scales[1], p0, p1);
    sum.add(ring, unit + 3, p0, p1);
  }
  __syncwarp();
  ring.fetch_pair(unit, far, page,
                  [&](int at, int from, int own, int next) { ring.fetch(at + 1, ring.cache.v, from, own, next); });
  p += 2 * R::kStep, unit = unit + 4 == R::kUnits ? 0 : unit + 4;
}

// Its tiles from p to the end of a part. page: of the tile to ask for next; of pairs those of all lanes.
template <class F, class Insert, class Scored>
__device__ __forceinline__ void attend(Accumulator<F>& sum, const Ring<F>& ring, const Queries<F>& q, int& p, int end,
                                       int& page, int& unit, Insert insert, Scored scored) {
  int asked{Ring<F>::kUnits / 2};
#pragma unroll 1
  while (p < end) {
    if constexpr (F::kPairs) {
      attend_pair(sum, ring, q, p, page, asked, unit, insert, scored);
    } else {
      attend_tile<false>(sum, ring, q, p, page, unit, insert, scored);
    }
  }
}

}  // namespace nibblelm::cuda
