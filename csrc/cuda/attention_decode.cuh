// Split-KV decode attention on tensor cores for bf16 (Dao et al. 2023, "Flash-Decoding"), alone or with what comes
// before it: QK-norm, rotary embedding and the KV write.
//
// The heads of one KV head are the eight columns of mma.m16n8k16 and positions its rows: scores are K q, the output is
// V^T p, and both operands come from row-major tiles by ldmatrix. Each warp brings its own tiles by cp.async, several
// ahead, and waits for no other warp before the end. The blocks of a thread-block cluster divide a row's positions and
// merge through distributed shared memory; where a row takes several, or none, the rest is merged through device
// memory. A short row of many KV heads has fewer blocks, to which its parts are dealt. Of many rows, a block takes all
// parts of one, or a good length of them, with the same merges in its own memory, and what longer rows have behind it
// is shared out among all; of some short ones, the teams of a block take several parts at a time; of very many, a warp
// takes all. Head sizes are 64 to 256; those that share a kernel are filled up with zeros in shared memory.
#pragma once

#include <bit>
#include <cstddef>

#include "attention_heads.cuh"
#include "attention_merge.cuh"
#include "attention_tiles.cuh"
#include "attention_warp.cuh"

namespace nibblelm::cuda {
namespace {

// What is the same in all blocks of a launch.
struct Launched {
  int64_t first_row;
  int rows;
  int groups;            // of heads, of a KV head
  int most_groups;       // of parts, of a row that is not long
  int partials_of_head;  // in device memory
  bool starts_next;      // before anything else

  __device__ __forceinline__ Partials partials(const AttentionArgs& a, int64_t row, int head) const {
    return {a, rows, static_cast<int>(row - first_row), head, partials_of_head};
  }
  // Of the row's heads.
  __device__ __forceinline__ int counter(int64_t row) const {
    return static_cast<int>(row - first_row) * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y);
  }
};

// Some parts of the row at (slot, position), for a block to take.
template <class F>
struct Share {
  int slot;
  int position;
  Interval range;
  Plan plan;
  int first;  // of the parts
  int parts;  // at most
  int begin;
  int end;

  // A block for each part, or the parts that are the row's own block's.
  template <bool kPlain>
  __device__ __forceinline__ static Share of(const AttentionArgs& a, int64_t row, int slot, int position,
                                             int most_groups) {
    const Interval range = kPlain ? attended_plain(a, slot, position) : attended(a, row, slot, position);
    Share share{slot, position, range, Plan::of<typename F::T>(range, most_groups)};
    share.take(F::kTeams > 1                 ? static_cast<int>(threadIdx.x) / (F::kChains * kWarp)
               : F::kParts == 1 || F::kDealt ? static_cast<int>(blockIdx.x)
                                             : 0,
               share.together());
    return share;
  }
  __device__ __forceinline__ void take(int from, int count) {
    first = from, parts = count;
    begin = range.first + first * plan.span, end = min(range.end, begin + parts * plan.span);
  }
  // How many a block takes: a power of two. What is dealt begins with the block's first part and ends with the row.
  __device__ __forceinline__ int together() const {
    if (F::kDealt) return kGroup;
    return F::kParts == 1 ? 1 : min(F::kParts, 1 << (31 - __clz(max(F::kPositions / plan.span, 1))));
  }
  // Shares behind the own block's.
  __device__ __forceinline__ int further() const {
    const int each = together();
    return max(plan.parts() - 1, 0) / each;
  }
  __device__ __forceinline__ void take_further(int n) {
    const int each = together();
    take((1 + n) * each, each);
  }
  __device__ __forceinline__ bool empty() const { return begin >= end; }
  // Neither for this block's other teams.
  __device__ __forceinline__ bool idle() const { return F::kTeams > 1 ? plan.length == 0 : empty(); }
  __device__ __forceinline__ bool newest() const { return position == end - 1; }  // is among these positions
  // And in one of the block's own parts.
  __device__ __forceinline__ bool has_newest() const {
    return newest() && (!F::kDealt || F::kTeams > 1 || (plan.parts() - 1 - first) % F::kCluster == 0);
  }
};

// By a warp: share `number` of those that rows have behind their own blocks', and its row. False: there are fewer, and
// `number` is what is left of it.
template <class F, bool kPlain>
__device__ __forceinline__ bool find_further(const AttentionArgs& a, const Launched& launched, int& number,
                                             int64_t& row, Share<F>& share) {
  const int lane = threadIdx.x % kWarp;
  const auto of = [&](int64_t r) {
    return Share<F>::template of<kPlain>(a, r, a.cache.slots[r], a.cache.positions[r], launched.most_groups);
  };
#pragma unroll 1
  for (int first = 0; first < launched.rows; first += kWarp) {
    const int count = first + lane < launched.rows ? of(launched.first_row + first + lane).further() : 0;
    int sum{count};
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
    const int at = __popc(__ballot_sync(kAllLanes, sum <= number));
    if (at < kWarp) {
      row = launched.first_row + first + at;
      share = of(row);
      share.take_further(number - __shfl_sync(kAllLanes, sum - count, at));
      return true;
    }
    number -= __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return false;
}

// ---- kernel ----

// Which row, heads and part a block has, and where in it a thread stands (lane = 4 g + j). `row` is anew for each share
// behind rows' own blocks.
template <class F>
struct Place {
  int64_t row;
  int kv_head, in_group, first_head, heads;
  int part, rank;        // of the block, in its cluster or of the warp's team
  int warp, lane, g, j;  // warp of the team

  __device__ __forceinline__ Place(const AttentionArgs& a, int64_t first_row, int groups) {
    const int per_kv = a.heads / a.cache.kv_heads;
    row = first_row + blockIdx.z;
    kv_head = blockIdx.y / groups;
    in_group = blockIdx.y % groups * kHeads;
    first_head = kv_head * per_kv + in_group;
    heads = min(kHeads, per_kv - in_group);
    warp = threadIdx.x / kWarp, lane = static_cast<int>(keep(threadIdx.x % kWarp)), g = lane >> 2, j = lane & 3;
    part = blockIdx.x, rank = F::kTeams > 1 ? warp / F::kChains : part % F::kCluster;
    warp %= F::kWarps / F::kTeams;
  }
  __device__ __forceinline__ int ring() const { return threadIdx.x / kWarp; }  // of the block's
};

// Asks L2 for a warp's tiles of a short row, from number `tile` on; those of a long one would be gone from L2 before
// their turn, as would those of a thousand rows at a time.
template <class F>
__device__ __forceinline__ void prefetch_tiles(const PagedCache& cache, const Share<F>& share, const Place<F>& at,
                                               int pages, int tile) {
  using T = F::T;
  constexpr int D{F::D}, kLine{D * sizeof(T) < 128 ? D : static_cast<int>(128 / sizeof(T))};  // values
  if (F::kWarps == 1 || share.end - share.begin > 2 * kPartPositions) return;
  int p = share.begin + at.warp * kTile + tile * Ring<F>::kStep;
#pragma unroll 1
  for (; p < share.end; ++tile, p += Ring<F>::kStep) {
    const int page = __shfl_sync(kAllLanes, pages, tile);
#pragma unroll
    for (int i = at.lane; i < 2 * kTile * D / kLine; i += kWarp) {  // keys, then values
      const int row = i / (D / kLine) % kTile, column = i % (D / kLine) * kLine;
      if (!F::has(cache, column)) continue;
      const void* const pool = i < kTile * D / kLine ? cache.k : cache.v;
      // Modulo its size, a row stays on the page.
      prefetch_l2(static_cast<const T*>(pool) + F::row_start(cache, page, at.kv_head, p + row) + column);
    }
    if (F::kInt8 && at.lane < 2)
      prefetch_l2((at.lane == 0 ? cache.k_scales : cache.v_scales) + scale_row(cache, page, at.kv_head, p));
  }
}

// Where the row stands, with its first tiles on their way. What the kernel ahead wrote is asked for before them.
template <class F, bool kFused>
__device__ __forceinline__ Share<F> begin_late(const AttentionArgs& a, const HeadArgs& head_args, const Place<F>& at,
                                               int most_groups, uint32_t tiles, RawHeads<F>& raw, int& pages) {
  dependency_wait();
  const int slot = a.cache.slots[at.row], position = a.cache.positions[at.row];
  if constexpr (kFused) raw.read(a, at.row, at.first_head, at.heads, at.kv_head);
  const auto share = Share<F>::template of<kFused>(a, at.row, slot, position, most_groups);
  if (share.idle()) return share;
  const Ring<F> ring(tiles, a.cache, slot, at.kv_head, share.end, kFused && share.newest(), at.ring(), at.lane);
  const int first = share.begin + at.warp * kTile;
  if (!share.empty()) pages = ring.pages(first);
  if constexpr (kFused) raw.read_angles(a, head_args, position);
  ring.fill(first, pages);
  prefetch_tiles<F>(a.cache, share, at, pages, Ring<F>::kUnits / 2);
  return share;
}

// The same of a block that may start before the kernel ahead has ended. It may change until the wait; a guess from
// before it is right but for the step after a change, and what it was used for then is done again. It is read around
// L1, which would keep it.
template <class F, bool kOptions, bool kFused>
__device__ __forceinline__ Share<F> begin(const AttentionArgs& a, const HeadArgs& head_args, const Place<F>& at,
                                          int most_groups, uint32_t tiles, RawHeads<F>& raw, int& pages) {
  using Share = Share<F>;
  const bool guesses = kFused || ((!kOptions || a.mask == nullptr) && a.prefix == nullptr && a.starts == nullptr);
  // With rotation, all that is read of the cache was written steps ago. Scales of int8 would come through L1.
  constexpr bool kEarly{kFused && !F::kInt8};
  Share share{};
  const auto ring = [&] {
    return Ring<F>(tiles, a.cache, share.slot, at.kv_head, share.end, kFused && share.newest(), at.ring(), at.lane);
  };
  const auto ask_pages = [&] {
    if (!share.empty()) pages = ring().pages(share.begin + at.warp * kTile);
  };
  if (guesses) {
    const int guess = __ldcg(a.cache.positions + at.row);
    share = Share::template of<true>(a, at.row, guess < a.cache.capacity() ? __ldcg(a.cache.slots + at.row) : -1, guess,
                                     most_groups);
    ask_pages();
    if (!share.empty()) {
      prefetch_tiles<F>(a.cache, share, at, pages, 0);
      if constexpr (kFused) raw.read_angles(a, head_args, share.position);
      if (kEarly) ring().fill(share.begin + at.warp * kTile, pages);
    }
  }
  dependency_wait();
  if constexpr (kFused) raw.read(a, at.row, at.first_head, at.heads, at.kv_head);
  const int slot = a.cache.slots[at.row], position = a.cache.positions[at.row];
  if (!guesses) {
    share = Share::template of<false>(a, at.row, slot, position, most_groups);
    ask_pages();
  }
  bool asked{kEarly};
#pragma unroll 1
  for (;;) {
    if (!asked && !share.empty()) ring().fill(share.begin + at.warp * kTile, pages);
    if (share.slot == slot && share.position == position) return share;
    copy_async_wait<0>();
    __syncwarp();
    share = Share::template of<true>(a, at.row, slot, position, most_groups);
    ask_pages();
    if constexpr (kFused)
      if (!share.empty()) raw.read_angles(a, head_args, share.position);
    asked = false;
  }
}

// Norm and rotation of the query heads and the new key, while the tiles are on their way; writes the new position.
template <class F>
__device__ __forceinline__ void prepare(const AttentionArgs& a, const HeadArgs& head_args, const Place<F>& at,
                                        const Share<F>& share, RawHeads<F>& raw,
                                        Prepared<F::D, typename F::T>& prepared) {
  using T = F::T;
  const int64_t row =
      share.has_newest() && at.in_group == 0 ? written_row(a.cache, share.slot, share.position, at.kv_head) : -1;
  const auto place = [&](void* pool, float* scales) {
    return row < 0 ? NewRow<T>{} : NewRow<T>{static_cast<T*>(pool) + row * F::width(a.cache), scales + row};
  };
  raw.prepare(prepared, a, at.row, at.first_head, head_args, at.heads, place(a.cache.k, a.cache.k_scales),
              place(a.cache.v, a.cache.v_scales));
  __syncthreads();
}

// All parts of this row's heads are in device memory, or merged by clusters: their blocks' last one writes the result.
template <class F, class Write>
__device__ __forceinline__ void merge_row(const AttentionArgs& a, const Place<F>& at, int parts,
                                          const Launched& launched, Write write) {
  constexpr int kQuads{F::D / 4};
#pragma unroll 1
  for (int i = threadIdx.x; i < at.heads * kQuads; i += F::kWarps * kWarp) {
    const int h = i / kQuads, d = i % kQuads * 4;
    if (!F::has(a.cache, d)) continue;
    const Partials partials = launched.partials(a, at.row, at.first_head + h);
    const auto statistics = [&](int n) { return __ldcg(partials.statistics + n); };
    const auto output = [&](int n) {
      return __ldcg(
          reinterpret_cast<const float4*>(partials.outputs + static_cast<int64_t>(n) * F::width(a.cache) + d));
    };
    Triple t;
#pragma unroll 2
    for (int first = 0; first < parts; first += kGroup) {
      Triple group;
      if constexpr (F::kCluster > 1) {
        const float2 s = statistics(first / kGroup);
        group = {s.x, s.y, output(first / kGroup)};
      } else {
        group = merge<kGroup>(
            parts - first, [&](int n) { return statistics(first + n); }, [&](int n) { return output(first + n); });
      }
      t = first == 0 ? group : join(t, group);
    }
    write(h, d, t);
  }
}

// Of shared memory behind the ring of a block of one warp: the new key and value, which it needs up to the last tile.
template <class Prepared>
constexpr int kQueriesAt{static_cast<int>(offsetof(Prepared, q))};
template <class F, bool kFused>
constexpr int kBeforeParts{kFused ? kQueriesAt<Prepared<F::D, typename F::T>> : 0};

template <class F, bool kFused>
using Heads = Prepared<kFused ? F::D : 0, typename F::T>;

// A share whose first tiles are on their way. Warps take tiles in turn; their triples are merged in the order of warps,
// then of the parts of a group, then of groups.
template <class F, bool kOptions, bool kFused>
__device__ __forceinline__ void attend_share(const AttentionArgs& a, const HeadArgs& head_args,
                                             const Launched& launched, const Place<F>& at, const Share<F>& share,
                                             RawHeads<F>& raw, int pages, unsigned char* storage,
                                             Heads<F, kFused>& prepared, uint64_t& received) {
  constexpr int D{F::D}, kQuads{D / 4};
  using R = Ring<F>;
  constexpr int kRounds{(kHeads * kQuads + R::kThreads - 1) / R::kThreads};
  const int width = F::width(a.cache);
  bf16* const out = static_cast<bf16*>(a.out) + (at.row * a.heads + at.first_head) * width;
  const bool newest = kFused && share.newest();  // its key and value are not in the cache yet
  const R ring(shared_address(storage), a.cache, share.slot, at.kv_head, share.end, newest, at.ring(), at.lane);
  const int first = share.begin + at.warp * kTile;
  // Where it has not yet, not before the last tile is asked for: the next kernel's weights would go first.
  if (first + R::kAround >= share.end) dependency_release();
  const bf16* query = static_cast<const bf16*>(a.q) + at.row * a.q_stride + (at.first_head + at.g) * width;
  if constexpr (kFused) {
    prepare<F>(a, head_args, at, share, raw, prepared);
    query = prepared.q[at.g];
  }
  const Queries<F> q(a.cache, query, at.g < at.heads, at.j);

  const int newest_at = newest ? share.position : -1;
  const auto insert = [&](int unit, int p, int which) {
    if constexpr (kFused) {
      if (static_cast<unsigned>(newest_at - p) < kTile) {
        ring.insert(unit, share.position - p, &prepared.key_value[which][0]);
        if constexpr (F::kInt8)
          if (which == 0) ring.insert_scales(unit, share.position - p, prepared.scales);
      }
    }
  };
  const auto scored = [&]<int kTiles>(const Accumulator<F>& sum, float (&s)[kTiles][4], float (&highest)[kTiles][2],
                                      int p) {
    sum.template score_tiles<kOptions>(a, s, highest, at.row, share.position, at.first_head, p, share.end, at.g, at.j);
  };
  int p = first, page = F::kPairs ? pages : __shfl_sync(kAllLanes, pages, R::kUnits / 2), unit = 0;
  const int parts = share.plan.parts();
  const auto write = [&](int h, int d, const Triple& t) {
    const float inverse = t.l == 0.0f ? 0.0f : __fdividef(1.0f, t.l);
    *reinterpret_cast<uint2*>(out + h * width + d) = {
        pack2<bf16>(__fmul_rn(t.o.x, inverse), __fmul_rn(t.o.y, inverse)),
        pack2<bf16>(__fmul_rn(t.o.z, inverse), __fmul_rn(t.o.w, inverse))};
  };
  const auto leave = [&](int n, int h, int d, const Triple& t) {  // partial result n in device memory
    const Partials partials = launched.partials(a, at.row, at.first_head + h);
    *reinterpret_cast<float4*>(partials.outputs + static_cast<int64_t>(n) * width + d) = t.o;
    if (d == 0) partials.statistics[n] = {t.m, t.l};
  };
  // A thread's quads of the output, (head, d .. d + 3), the same ones each time. Where there may be many, most models
  // have few, and unrolled they drive a layer's other code out of the instruction cache.
  constexpr bool kRolled{kRounds > 2};
  const auto each_quad = [&](auto f) {
    const auto round = [&](int r) {
      const int i = threadIdx.x + r * R::kThreads, h = i / kQuads;
      if (h < at.heads && F::has(a.cache, i % kQuads * 4)) f(r, h, i % kQuads * 4);
    };
    if constexpr (kRolled) {
#pragma unroll 1
      for (int r = 0; r * R::kThreads < at.heads * kQuads; ++r) round(r);
    } else {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) round(r);
    }
  };
  if constexpr (F::kWarps == 1) {
    Accumulator<F> chains[F::kChains];
    // Where the queries were, which are in registers by now.
    const WarpParts<F> space{reinterpret_cast<float4*>(storage + F::kBytes + kBeforeParts<F, kFused>),
                             (at.heads + 1) / 2};
    int part{0};
#pragma unroll 1
    for (int from = share.begin; from < share.end; from += kLeastSpan, ++part) {
      attend_chains(chains, ring, q, p, min(from + kLeastSpan, share.end), page, unit, insert, scored);
      merge_chains<F>(chains);
      space.keep(part, chains[0], at.g, at.j);
    }
    __syncwarp();  // the ring is free, too
    write_row(a.cache, space.merged(part, at.g, at.j), reinterpret_cast<bf16*>(storage), out, at.heads, at.lane);
    return;
  }
  if constexpr (F::kTeams > 1) {
    const PartSpace<F> space{reinterpret_cast<float*>(storage + F::kBytes), at.heads};
#pragma unroll 1
    for (int part = at.rank; part < parts; part += F::kTeams) {
      Accumulator<F> sum;
      if (p < share.end) attend_tile<true>(sum, ring, q, p, page, unit, insert, scored);
      space.store(sum, part, at.warp, at.g, at.j);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < parts * at.heads * kQuads; i += R::kThreads) {
      const int row = i / kQuads, part = row / at.heads, h = row - part * at.heads, d = i % kQuads * 4;
      if (F::has(a.cache, d)) space.keep_part(part, h, d, space.merged(part, h, d));
    }
    __syncthreads();
    each_quad([&](int, int h, int d) { write(h, d, space.merged_parts(parts, h, d)); });
    return;
  }
  if constexpr (F::kDealt) {
    const PartSpace<F> space{reinterpret_cast<float*>(storage + F::kBytes), at.heads};
    cluster_arrive();
    int own{0};
#pragma unroll 1
    for (int part = at.rank; part < parts; part += F::kCluster, ++own) {
      Accumulator<F> sum;
      if (p < share.end) attend_tile<true>(sum, ring, q, p, page, unit, insert, scored);
      space.store(sum, own, at.warp, at.g, at.j);
    }
    if (at.rank == 0 && threadIdx.x == 0) cluster_expect(&received, parts * at.heads * (width * 4 + 8));
    __syncthreads();
    cluster_wait();
    const uint32_t barrier = cluster_address(&received, 0);
#pragma unroll 1
    for (int h = 0; h < at.heads; ++h) {
#pragma unroll 1
      for (int i = threadIdx.x; i < own * kQuads; i += R::kThreads) {
        const int d = i % kQuads * 4;
        if (!F::has(a.cache, d)) continue;
        const uint32_t to = cluster_address(space.part(at.rank + i / kQuads * F::kCluster, h), 0);
        const Triple t = space.merged(i / kQuads, h, d);
        cluster_store(to + d * 4, t.o, barrier);
        if (d == 0) cluster_store(to + D * 4, float2{t.m, t.l}, barrier);
      }
    }
    if (at.rank != 0) return;
    cluster_receive(&received);
#pragma unroll 1
    for (int i = threadIdx.x; i < at.heads * kQuads; i += R::kThreads) {
      const int h = i / kQuads, d = i % kQuads * 4;
      if (F::has(a.cache, d)) write(h, d, space.merged_parts(parts, h, d));
    }
    return;
  }
  Accumulator<F> sum;
  if constexpr (F::kParts > 1) {
    const PartSpace<F> space{reinterpret_cast<float*>(storage + F::kBytes), at.heads};
    const bool whole = parts <= share.parts;
    int part{0};
#pragma unroll 1
    for (int from = share.begin; from < share.end; from += share.plan.span, ++part) {
      attend(sum, ring, q, p, min(from + share.plan.span, share.end), page, unit, insert, scored);
      space.store(sum, part % 2, at.warp, at.g, at.j);
      __syncthreads();
      each_quad([&](int, int h, int d) {
        const Triple t = space.merged(part % 2, h, d);
        whole ? space.keep_part(part, h, d, t) : leave(share.first + part, h, d, t);
      });
    }
    if (whole) {
      __syncthreads();
      each_quad([&](int, int h, int d) { write(h, d, space.merged_parts(parts, h, d)); });
    } else if (arrives_last(launched.counter(at.row), 1 + share.further())) {
      merge_row<F>(a, at, parts, launched, write);
    }
    return;
  }
  attend(sum, ring, q, p, share.end, page, unit, insert, scored);

  const int partials_of_row = (parts + F::kCluster - 1) / F::kCluster;
  const int ranks = min(F::kCluster, parts - (at.part - at.rank));  // blocks with work in this cluster
  const MergeSpace<F> space{storage};
  space.store(sum, at.warp, at.g, at.j, at.heads);
  if (ranks > 1) cluster_arrive();  // what was read from this warp's ring has been used
  __syncthreads();
  const auto finish = [&](int h, int d, const Triple& t) {
    partials_of_row == 1 ? write(h, d, t) : leave(at.part / F::kCluster, h, d, t);
  };
  Triple merged[kRolled ? 1 : kRounds];
  if (!kRolled || ranks == 1) {
    each_quad([&](int r, int h, int d) {
      merged[kRolled ? 0 : r] = space.merged(h, d);
      if (ranks == 1) finish(h, d, merged[kRolled ? 0 : r]);
    });
  }
  if (ranks > 1) {
    if (at.rank == 0 && threadIdx.x == 0) cluster_expect(&received, ranks * at.heads * (width * 4 + 8));
    cluster_wait();
    const uint32_t barrier = cluster_address(&received, 0);
    each_quad([&](int r, int h, int d) {
      if constexpr (kRolled) merged[0] = space.merged(h, d);
      const Triple& t = merged[kRolled ? 0 : r];
      cluster_store(cluster_address(space.part(at.rank, h) + d, 0), t.o, barrier);
      if (d == 0) cluster_store(cluster_address(space.part_statistics(at.rank) + h, 0), float2{t.m, t.l}, barrier);
    });
    if (at.rank != 0) return;
    cluster_receive(&received);
    // Not unrolled: the registers of eight parts at a time would be taken from the loop over tiles.
#pragma unroll 1
    for (int i = threadIdx.x; i < at.heads * kQuads; i += R::kThreads) {
      const int h = i / kQuads, d = i % kQuads * 4;
      if (!F::has(a.cache, d)) continue;
      finish(h, d,
             merge<kGroup>(
                 ranks, [&](int r) { return space.part_statistics(r)[h]; },
                 [&](int r) { return *reinterpret_cast<const float4*>(space.part(r, h) + d); }));
    }
  }
  if (partials_of_row > 1 && arrives_last(launched.counter(at.row), partials_of_row))
    merge_row<F>(a, at, parts, launched, write);
}

// Grid (parts, kv_heads * head groups, rows); parts in clusters, or alone. Where a block takes several parts, one has a
// good length of each row, and those behind the rows' own share out what is left of the longer ones, if there are any.
template <class F, bool kOptions, bool kFused, bool kFurther>
__global__ void __launch_bounds__(F::kWarps* kWarp, F::kBlocks)
    attention_decode_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ HeadArgs head_args,
                            const __grid_constant__ Launched launched) {
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ __align__(16) std::conditional_t<F::kWarps == 1, char, Heads<F, kFused>> beside;
  Heads<F, kFused>& prepared =
      *reinterpret_cast<Heads<F, kFused>*>(F::kWarps == 1 ? static_cast<void*>(storage + F::kBytes) : &beside);
  if constexpr (F::kHostCluster > F::kCluster && F::kDealt) return;  // never launched
  __shared__ uint64_t received;  // in the cluster's first block: reports of the parts
  if (launched.starts_next) dependency_release();
  if (!kFurther || static_cast<int>(blockIdx.z) < launched.rows) {
    const Place<F> at(a, launched.first_row, launched.groups);
    if (F::kCluster > 1 && at.rank == 0 && threadIdx.x == 0) cluster_init(&received);
    __syncwarp();
    RawHeads<F> raw;
    int pages{};  // of this warp's first tiles, one a lane
    const Share<F> share = [&] {
      const uint32_t tiles = shared_address(storage);
      if constexpr (F::kLate) {
        return begin_late<F, kFused>(a, head_args, at, launched.most_groups, tiles, raw, pages);
      } else {
        return begin<F, kOptions, kFused>(a, head_args, at, launched.most_groups, tiles, raw, pages);
      }
    }();
    if (!share.idle()) {
      attend_share<F, kOptions, kFused>(a, head_args, launched, at, share, raw, pages, storage, prepared, received);
    } else if (share.plan.length == 0 && at.part == 0) {
      const int width = F::width(a.cache);
      bf16* const out = static_cast<bf16*>(a.out) + (at.row * a.heads + at.first_head) * width;
      for (int i = threadIdx.x; i < at.heads * width; i += F::kWarps * kWarp) out[i] = from_float<bf16>(0.0f);
    }
    return;
  }
  if constexpr (kFurther) {
    // Zero between launches, as arrivals are: of the blocks that find no more, the last one puts it back.
    unsigned& claims = attention_arrivals[launched.counter(launched.first_row + launched.rows)];
    __shared__ int claimed;
    dependency_wait();
#pragma unroll 1
    for (;;) {
      if (threadIdx.x == 0) claimed = static_cast<int>(atomicAdd(&claims, 1u));
      copy_async_wait<0>();
      __syncthreads();  // the ring and what is beside it are free
      int number{claimed};
      Place<F> at(a, launched.first_row, launched.groups);
      Share<F> share;
      if (!find_further<F, kFused>(a, launched, number, at.row, share)) {
        if (threadIdx.x == 0 && number == static_cast<int>(gridDim.z) - launched.rows - 1) claims = 0;
        return;
      }
      const Ring<F> ring(shared_address(storage), a.cache, share.slot, at.kv_head, share.end, kFused && share.newest(),
                         at.warp, at.lane);
      const int first = share.begin + at.warp * kTile, pages = ring.pages(first);
      ring.fill(first, pages);
      RawHeads<F> raw;
      if constexpr (kFused) {
        raw.read_angles(a, head_args, share.position);
        raw.read(a, at.row, at.first_head, at.heads, at.kv_head);
      }
      attend_share<F, kOptions, kFused>(a, head_args, launched, at, share, raw, pages, storage, prepared, received);
    }
  }
}

// ---- launcher ----

using Kernel = void (*)(AttentionArgs, HeadArgs, Launched);

struct Choice {
  Kernel kernel;
  int threads;
  int bytes;    // of shared memory that is asked for
  int fixed;    // and that the kernel has
  int cluster;  // blocks
  int parts;    // at most, that a block takes
  int further;  // blocks behind those of rows, where rows may have more than their own block takes

  bool deals() const { return cluster > 1 && parts > 1; }
};

// Dynamic shared memory of a block with `heads` heads.
template <class F, bool kFused>
constexpr int form_bytes(int heads) {
  if constexpr (F::kWarps == 1) return F::kBytes + kBeforeParts<F, kFused> + WarpParts<F>::bytes(heads);
  return F::kBytes + (F::kParts > 1 ? PartSpace<F>::bytes(heads) : 0);
}

template <class F, bool kOptions, bool kFused>
Choice choice(const AttentionArgs& a) {
  constexpr bool kSeveral{F::kParts > 1 && F::kWarps > 1 && !F::kDealt};
  const int heads = std::min(kHeads, a.heads / a.cache.kv_heads);
  const bool further = kSeveral && a.cache.capacity() > F::kPositions;
  const Kernel kernel = further ? attention_decode_kernel<F, kOptions, kFused, kSeveral>
                                : attention_decode_kernel<F, kOptions, kFused, false>;
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, kernel), "attention: cudaFuncGetAttributes");
  return {kernel,
          F::kWarps * kWarp,
          form_bytes<F, kFused>(heads),
          static_cast<int>(compiled.sharedSizeBytes),
          compiled.ptxVersion >= 90 ? F::kHostCluster : 1,
          F::kParts,
          further ? F::kBlocks * device_attribute(cudaDevAttrMultiProcessorCount) : 0};
}

// With rotation, a soft-cap is the only option, of the head sizes of models that have one.
template <class S>
constexpr bool kCaps{S::kExact && S::D >= 128};

// The result is the same whatever is chosen.
template <class S, class T, bool kFused>
Choice choose(const AttentionArgs& a) {
  constexpr int kStatic{8192};  // at most, beside what is asked for
  static_assert(sizeof(Prepared<S::D, T>) < kStatic);
  const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStatic;
  const int per_kv = a.heads / a.cache.kv_heads, heads = std::min(kHeads, per_kv);
  const int64_t blocks = a.rows * a.cache.kv_heads * ceil_div(per_kv, kHeads);
  const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  // No row can be longer than parts with a tile for each chain. Else a few rows want more blocks, which clusters have.
  const bool brief = a.cache.capacity() <= kGroup * kLeastSpan;
  const bool many = (brief ? 5 : 4) * blocks >= 3 * processors && room >= form_bytes<ManyForm<S, T>, kFused>(heads);
  if constexpr (!kFused)
    if (!S::kExact || has_options(a))
      return many ? choice<ManyForm<S, T>, true, false>(a) : choice<RowForm<S, T>, true, false>(a);
  if constexpr (kFused && kCaps<S>)
    if (has_options(a)) return many ? choice<ManyForm<S, T>, true, true>(a) : choice<RowForm<S, T>, true, true>(a);
  // Blocks of a form that fit the card: `most` on a multiprocessor, by registers. The system and static ones take
  // shared memory beside (at most so much, which spares asking for a kernel that may not be taken).
  const auto at_once = [&]<class F>(int most) {
    constexpr int kBeside{1024 + 128 + (F::kWarps == 1 ? 0 : static_cast<int>(sizeof(Heads<F, kFused>)))};
    const int bytes = form_bytes<F, kFused>(heads);
    const int fit = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (bytes + kBeside);
    return bytes <= room ? processors * std::min(fit, most) : 0;
  };
  if constexpr (kFused && S::D == 128) {
    // Twice the blocks a multiprocessor from which on a warp is faster, as measured with four heads to a KV head and
    // one.
    const int twice_least = heads > 1 ? (sizeof(T) == 1 ? 7 : 5) : (sizeof(T) == 1 ? 12 : 6);
    using Wide = WideWarpForm<S, T>;
    using Warp = WarpForm<S, T>;
    static_assert(Warp::kPositions == kGroup * kLeastSpan);
    if (brief && 2 * blocks >= twice_least * processors) {
      if constexpr (sizeof(T) > 1) {
        const int fit = at_once.template operator()<Wide>(Warp::kBlocks);
        if (blocks <= fit && fit >= Wide::kBlocks * processors) return choice<Wide, false, true>(a);
      }
      if (at_once.template operator()<Warp>(Warp::kBlocks) == Warp::kBlocks * processors)
        return choice<Warp, false, true>(a);
    }
  }
  if constexpr (kFused && S::D <= 128) {
    // Clusters of fewer rows have two blocks a multiprocessor at most.
    using Team = TeamForm<S, T>;
    if (brief && a.rows > 1 && kGroup * blocks > 2 * processors && blocks <= processors &&
        room >= form_bytes<Team, kFused>(heads))
      return choice<Team, false, true>(a);
  }
  if constexpr (kFused && S::D <= 128 && sizeof(T) > 1) {
    using Dealt = DealtForm<S, T>;
    if (a.rows == 1 && brief && compiled_architecture() >= 90 && kGroup * blocks > processors &&
        Dealt::kHostCluster * blocks <= processors) {
      const Choice dealt = choice<Dealt, false, true>(a);
      if (fit_beside_last(dealt.bytes + dealt.fixed) > 0) return dealt;
    }
  }
  if constexpr (S::kExact || kFused) {
    if (many) return choice<ManyForm<S, T>, false, kFused>(a);
    if constexpr (S::kExact)
      if (a.rows == 1 && a.cache.capacity() > kLongRow && room >= LongForm<S, bf16>::kBytes) {
        if constexpr (kFused && S::D <= 128 && sizeof(T) > 1) {
          const Choice beside = choice<BesideForm<S, T>, false, true>(a);
          if (fit_beside_last(beside.bytes + beside.fixed) == 1) return beside;
        }
        return choice<LongForm<S, T>, false, kFused>(a);
      }
    const Choice row = choice<RowForm<S, T>, false, kFused>(a);
    if constexpr (kFused && S::kExact && S::D == 128 && sizeof(T) > 1) {
      const auto fits = [](const Choice& c) { return fit_beside_last(c.bytes + c.fixed) > 0; };
      if (a.rows == 1 && brief && !fits(row)) {
        const Choice small = choice<ShortForm<S, T>, false, true>(a);
        if (fits(small)) return small;
      }
    }
    return row;
  }
}

// How a row is divided among blocks.
struct Division {
  int head_groups;  // of a KV head
  int per_row;      // head groups of all KV heads
  int most_groups;  // of parts, of a row that is not long
  int row_groups;   // of parts, of the longest row that the cache has room for
  int blocks;       // of a row's heads
  int further;      // of a launch's heads, behind those of rows
  int partials;     // in device memory, of a head, at most
  RowChunks chunks;

  template <class T>
  static Division of(const AttentionArgs& a, const Choice& chosen) {
    Division d{};
    d.head_groups = ceil_div(a.heads / a.cache.kv_heads, kHeads);
    d.per_row = a.cache.kv_heads * d.head_groups;
    d.most_groups = static_cast<int>(
        std::bit_floor(static_cast<unsigned>(std::clamp(kBlocksPerRow / (kGroup * d.per_row), 1, kMaxSplits))));
    const int capacity = a.cache.capacity(), wanted = ceil_div(capacity, kGroup * kPartPositions);
    d.row_groups =
        std::min(groups_of<T>(capacity, d.most_groups), static_cast<int>(std::bit_ceil(static_cast<unsigned>(wanted))));
    d.blocks = kGroup * d.row_groups, d.partials = d.blocks / chosen.cluster;
    if (chosen.deals()) {
      d.blocks = chosen.cluster, d.partials = 1;
    } else if (chosen.parts > 1) {
      d.blocks = 1;
      if (chosen.further == 0) d.partials = 1;
      d.further = ceil_div(chosen.further, d.per_row);
    }
    d.chunks = RowChunks::of(a, d.partials, d.per_row);
    return d;
  }
};

// Shared memory that each of `blocks` asks for so that no multiprocessor has more of them than an even share: those
// that are free first would take as many as find room, and others none.
inline int evenly(const Choice& c, int64_t blocks) {
  const int64_t share = ceil_div(blocks, device_attribute(cudaDevAttrMultiProcessorCount));
  const int64_t one_more = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (share + 1);
  return std::max(c.bytes, static_cast<int>(one_more) - 1024 - c.fixed + 128);  // the system's; steps of an allocation
}

template <class S, class T, bool kFused>
void launch_decode(const AttentionArgs& a, const HeadArgs& head_args, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] { return describe(kFused ? "rope_attention" : "attention", a); };
  Choice chosen = choose<S, T, kFused>(a);
  const Division division = Division::of<T>(a, chosen);
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - chosen.fixed;
  const int64_t blocks = a.rows * division.per_row * division.blocks;
  const bool several =
      a.rows > 1 ? chosen.parts > 1 : sizeof(T) == 1 && blocks > device_attribute(cudaDevAttrMultiProcessorCount);
  if (several && chosen.cluster == 1 && division.further == 0)  // longer rows' rest wants room
    chosen.bytes = std::min(most, evenly(chosen, blocks));
  allow_shared_memory(chosen.kernel, most, what);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(chosen.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(chosen.threads);
  config.dynamicSmemBytes = static_cast<size_t>(chosen.bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = chosen.cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (chosen.cluster > 1 ? 1 : 0) + (launch.programmatic ? 1 : 0);
  // One row's blocks, each beside one of the linears that were launched before, as those behind it mostly are; or those
  // of a few rows, behind which a small kernel comes that finds room beside them.
  constexpr int kMostEarlyRows{8};
  const bool beside = division.blocks * division.per_row <= device_attribute(cudaDevAttrMultiProcessorCount) &&
                      fit_beside_last(chosen.bytes + chosen.fixed) > 0;
  const bool starts_next = kFused && overlaps(launch) && (a.rows == 1 ? beside : a.rows <= kMostEarlyRows);
  division.chunks.each(a, [&](int64_t first, int64_t rows) {
    config.gridDim = dim3(division.blocks, division.per_row, static_cast<unsigned>(rows) + division.further);
    const Launched launched{
        first, static_cast<int>(rows), division.head_groups, division.most_groups, division.partials, starts_next};
    check(cudaLaunchKernelEx(&config, chosen.kernel, a, head_args, launched), what());
    last_launch = {chosen.bytes, starts_next, starts_next && chosen.deals()};
  });
}

// Calls f.template operator()<S, T>() with the head sizes and the cache's type of the tensor-core kernels; false: there
// are none. With rotation those between 128 and 256 have none.
template <bool kFused, class F>
bool with_tensor_cores(const AttentionArgs& a, F&& f) {
  if (a.type != DType::bf16 || a.q_stride % 8 != 0 || !aligned16(a.q, 0)) return false;
  const int head_dim = a.cache.head_dim;
  const auto with_type = [&]<class T>() {
    if (head_dim == 64) return f.template operator()<HeadSize<64, true>, T>(), true;
    if (head_dim == 128) return f.template operator()<HeadSize<128, true>, T>(), true;
    if (head_dim == 256) return f.template operator()<HeadSize<256, true>, T>(), true;
    if (head_dim % 16 != 0 || head_dim < 64 || head_dim > 256) return false;
    if (head_dim < 128) return f.template operator()<HeadSize<128, false>, T>(), true;
    if constexpr (!kFused) return f.template operator()<HeadSize<256, false>, T>(), true;
    return false;
  };
  if (a.cache.dtype == DType::i8) return with_type.template operator()<int8_t>();
  return a.cache.dtype == DType::bf16 && with_type.template operator()<bf16>();
}

}  // namespace
}  // namespace nibblelm::cuda
