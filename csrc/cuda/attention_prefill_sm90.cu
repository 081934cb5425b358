// Prefill attention by wgmma for bf16 on sm_90a (Shah et al. 2024, "FlashAttention-3"): a block on every multiprocessor
// takes items, each a tile of query rows with a head, from a list. One warp copies keys and values into a ring, ahead
// into the next item; two warpgroups of 64 query rows each multiply, the softmax of a tile of keys running under the
// products of the tile before with its values, and under the other group's products.
//
// Key tiles start at multiples of kColumns, and a tile that a row may not see leaves it unchanged to the bit, so a
// row's result does not depend on the rows beside it. Heads are filled up with zeros to D columns, where they are not
// of that size (kExact), by the copies alone.
#include "attention.cuh"
#include "barrier.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

namespace nibblelm::cuda {
namespace sm90 {  // with a name: for other cards all of this is unused, of which nvcc would warn

constexpr int kGroupRows{64};
constexpr int kGroups{kPrefillTile / kGroupRows};  // that multiply; before them comes the group of the warp that copies
constexpr int kGroupThreads{4 * kWarp};
constexpr int kThreads{(1 + kGroups) * kGroupThreads};
// Registers a thread: what the copying group leaves, the others take.
constexpr int kCopyRegisters{40}, kMultiplyRegisters{232};
static_assert((kCopyRegisters + kGroups * kMultiplyRegisters) * kGroupThreads <= 65536);

struct Item {
  int row, rows;  // rows 0: there are no more items
  int head;
  int slot;      // of the rows that see any
  Interval any;  // of the keys: those that any row sees
  Interval all;  // those that all rows see

  // Where the first tile of keys starts.
  __device__ __forceinline__ int begin(int columns) const { return any.first / columns * columns; }
};

// Where things are in shared memory.
template <int D>
struct Layout {
  static constexpr int kColumns{D <= 128 ? 128 : 64};
  static constexpr int kItems{D <= 128 ? 2 : 1};  // whose queries are there
  static constexpr int kStages{D == 64 ? 8 : 5};
  static constexpr int kQueryBytes{kPrefillTile * D * 2}, kTileBytes{kColumns * D * 2};
  static constexpr int kRing{kItems * kQueryBytes};
  static constexpr int kSeen{kRing + kStages * kTileBytes};  // the rows' intervals
  static constexpr int kSeenBytes{kPrefillTile * static_cast<int>(sizeof(Interval))};
  static constexpr int kItem{kSeen + kItems * kSeenBytes}, kItemBytes{32};
  static_assert(sizeof(Item) <= kItemBytes);
  // Barriers: of an item, its queries and its place; of a stage of the ring; of values that are not all written.
  static constexpr int kItemFull{kItem + kItems * kItemBytes}, kQueriesFull{kItemFull + kItems * 8},
      kItemEmpty{kQueriesFull + kItems * 8}, kFull{kItemEmpty + kItems * 8}, kEmpty{kFull + kStages * 8},
      kPartial{kEmpty + kStages * 8};
  static constexpr int kBytes{kPartial + 8};
  static_assert(kBytes <= 227 * 1024);
};

template <class T>
__device__ __forceinline__ T& shared_at(int offset) {
  extern __shared__ __align__(1024) unsigned char storage[];
  return *reinterpret_cast<T*>(storage + offset);
}

// A place in a ring of `Count`, and the parity of its barriers' phase.
template <int Count>
struct Place {
  int index{0}, parity{0};
  __device__ __forceinline__ void next() {
    if (++index == Count) index = 0, parity ^= 1;
  }
};

struct Maps {
  CUtensorMap q, k, v;
};

// ---- the warp that copies ----------------------------------------------------------------------------------------

// Items taken beyond every block's first; zero between launches.
__device__ unsigned items_taken;

template <int D, bool kExact>
struct Copier {
  using L = Layout<D>;
  static constexpr int kColumns{L::kColumns}, kPages{kColumns / kPage};
  const AttentionArgs& a;
  const Maps& maps;
  uint32_t base;
  int lane;
  Place<L::kItems> place;
  Place<L::kStages> stage;
  int partial_parity{0};

  __device__ __forceinline__ void run() {
    int tiles{0};  // up to the last that has rows: idle ones fill the table up
    for (int i = lane; i < a.tile_count; i += kWarp)
      if (a.tiles[2 * i + 1] > 0) tiles = i + 1;
    tiles = __reduce_max_sync(kAllLanes, tiles);
    const int count = tiles * a.heads;
    for (int index = blockIdx.x; index < count;) {
      int next{0};
      if (lane == 0) {
        const unsigned taken = atomicAdd(&items_taken, 1u);
        next = static_cast<int>(gridDim.x + taken);
        if (taken == count - 1u) items_taken = 0;  // as many as there are items: nobody asks again
      }
      // The last rows of a prompt see the most keys; heads that share keys are neighbours.
      const int tile = tiles - 1 - index / a.heads;
      Item item{a.tiles[2 * tile], a.tiles[2 * tile + 1], index % a.heads, 0, {}, {}};
      if (item.rows > 0) {
        barrier_wait(base + L::kItemEmpty + place.index * 8, place.parity ^ 1);
        copy_queries(item);
        look(item);
        put(item);
        if (item.any.end > 0) copy_keys(item);
      }
      index = __shfl_sync(kAllLanes, next, 0);
    }
    barrier_wait(base + L::kItemEmpty + place.index * 8, place.parity ^ 1);
    put({});
  }

  __device__ __forceinline__ void put(const Item& item) {
    if (lane == 0) shared_at<Item>(L::kItem + place.index * L::kItemBytes) = item;
    barrier_arrive(base + L::kItemFull + place.index * 8);
    place.next();
  }

  __device__ __forceinline__ void copy_queries(const Item& item) const {
    if (lane != 0) return;
    const uint32_t queries = base + place.index * L::kQueryBytes, full = base + L::kQueriesFull + place.index * 8;
    barrier_arrive_expect(full, L::kQueryBytes);
    for (int d = 0; d < D; d += kMapColumns) {
      const uint32_t to = queries + d / kMapColumns * (kPrefillTile * kMapRowBytes);
      kExact ? copy_rectangle(to, maps.q, item.row, item.head * D + d, full)
             : copy_rectangle_of(to, maps.q, item.row, item.head, d, full);
    }
  }

  // Puts down what each row sees, and enters what any and what all of them do.
  __device__ __forceinline__ void look(Item& item) const {
    Interval any{INT_MAX, 0}, all{0, INT_MAX};
    int slot{0};
#pragma unroll
    for (int i = lane; i < kPrefillTile; i += kWarp) {
      const Interval range = i < item.rows ? attended(a, item.row + i) : Interval{0, 0};
      (&shared_at<Interval>(L::kSeen + place.index * L::kSeenBytes))[i] = range;
      if (i >= item.rows) continue;
      if (range.first >= range.end) {
        all.end = 0;
        continue;
      }
      slot = a.cache.slots[item.row + i];
      any = {min(any.first, range.first), max(any.end, range.end)};
      all = {max(all.first, range.first), min(all.end, range.end)};
    }
    item.slot = __reduce_max_sync(kAllLanes, slot);
    item.any = {__reduce_min_sync(kAllLanes, any.first), __reduce_max_sync(kAllLanes, any.end)};
    item.all = {__reduce_max_sync(kAllLanes, all.first), __reduce_min_sync(kAllLanes, all.end)};
    if (item.any.end == 0) item.any.first = 0;
  }

  __device__ __forceinline__ void copy_keys(const Item& item) {
    const int kv_head = item.head / (a.heads / a.cache.kv_heads);
    const int begin = item.begin(kColumns), end = item.any.end;
    int from{0};  // of this lane's page: its first row in the pools
    for (int column = begin; column < end; column += kColumns) {
      const int page = (column - begin) / kPage % kWarp;
      if (page == 0) {
        const int position = column + lane * kPage;
        // A page that no row sees may be anyone's: rows outside the pool arrive as zeros.
        from = position >= end || position + kPage <= item.any.first
                   ? -kPage
                   : (page_of(a.cache, item.slot, position) * a.cache.kv_heads + kv_head) * kPage;
      }
      copy_tile(maps.k, from, page, kColumns);
      copy_tile(maps.v, from, page, min(end - column, kColumns));
    }
  }

  // A tile of keys or values on the pages that lanes `page` and following have. Behind row `rows` what has not been
  // written may be anything, and 0 times a value that is not finite would not be 0: there values become zeros.
  __device__ __forceinline__ void copy_tile(const CUtensorMap& map, int from, int page, int rows) {
    const bool partial = rows % kPage != 0;
    const uint32_t tile = base + L::kRing + stage.index * L::kTileBytes, full = base + L::kFull + stage.index * 8,
                   barrier = partial ? base + L::kPartial : full;
    int sources[kPages];
#pragma unroll
    for (int i = 0; i < kPages; ++i) sources[i] = __shfl_sync(kAllLanes, from, page + i);
    barrier_wait(base + L::kEmpty + stage.index * 8, stage.parity ^ 1);
    if (lane == 0) {
      barrier_arrive_expect(barrier, L::kTileBytes);
#pragma unroll
      for (int i = 0; i < kPages * D / kMapColumns; ++i)
        copy_rectangle(tile + i * kPage * kMapRowBytes, map, sources[i % kPages], i / kPages * kMapColumns, barrier);
    }
    if (partial) {
      barrier_wait(barrier, partial_parity);
      partial_parity ^= 1;
      const int last = (rows + kPage - 1) / kPage * kPage;
#pragma unroll
      for (int d = 0; d < D / kMapColumns; ++d)
        for (int at = rows * kMapRowBytes + lane * 16; at < last * kMapRowBytes; at += kWarp * 16)
          store_shared(tile + d * (kColumns * kMapRowBytes) + at, float4{});
      fence_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(full);
    }
    stage.next();
  }
};

// ---- the warpgroups that multiply --------------------------------------------------------------------------------

// Registers that products under way write, or have written: the compiler moves no use across.
template <int Tiles>
__device__ __forceinline__ void pin(float (&x)[Tiles][4]) {
#pragma unroll
  for (int t = 0; t < Tiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) x[t][i] = keep(x[t][i]);
}

// Lane j of every four has word j of four chunks, and gets the four words of chunk j.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], int j) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other = __shfl_xor_sync(kAllLanes, j & bit ? w[i] : w[i | bit], bit);
      (j & bit ? w[i] : w[i | bit]) = other;
    }
}

// A lane has rows g and g + 8 of the 16 of its warp.
struct Row {
  int index;  // that of another row where the tile ends before
  int position;
  Interval range;
};

struct Softmax {
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's columns only, until the end

  // s becomes 2^(unit * (s - m)). `factor`: by what earlier sums are to be multiplied, exactly 1 where the maximum has
  // not moved, which the rounding of `base` would spoil.
  template <int Tiles>
  __device__ __forceinline__ void step(float (&s)[Tiles][4], float (&factor)[2], float unit) {
    float top[2][2]{{m[0], -INFINITY}, {m[1], -INFINITY}}, sum[2][2]{};  // of even and odd tiles: shorter chains
    float base[2];
#pragma unroll
    for (int t = 0; t < Tiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r][t % 2] = fmaxf(top[r][t % 2], fmaxf(s[t][2 * r], s[t][2 * r + 1]));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(top[r][0], top[r][1]);
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
      base[r] = most == -INFINITY ? 0.0f : most * unit;
      factor[r] = most == m[r] ? 1.0f : exp2_fast(m[r] * unit - base[r]);  // 0 from -inf
      m[r] = most;
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s[t][2 * r] = exp2_fast(s[t][2 * r] * unit - base[r]);
        s[t][2 * r + 1] = exp2_fast(s[t][2 * r + 1] * unit - base[r]);
        sum[r][t % 2] += s[t][2 * r] + s[t][2 * r + 1];
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) l[r] = l[r] * factor[r] + (sum[r][0] + sum[r][1]);
  }
};

template <int D, bool kExact, bool kOptions>
struct Multiplier {
  using L = Layout<D>;
  static constexpr int kColumns{L::kColumns}, kTiles{kColumns / 8};
  using Scores = float[kTiles][4];
  using Weights = uint32_t[kTiles / 2][4];
  using Output = float[D / 8][4];
  const AttentionArgs& a;
  uint32_t base;
  int group, lane, first_row;  // of the tile: this lane's first
  Place<L::kStages> stage;

  __device__ __forceinline__ void run() {
    for (Place<L::kItems> place;; place.next()) {
      barrier_wait(base + L::kItemFull + place.index * 8, place.parity);
      Item item = shared_at<Item>(L::kItem + place.index * L::kItemBytes);
      item.rows = uniform(item.rows);
      item.any = {uniform(item.any.first), uniform(item.any.end)};
      item.all = {uniform(item.all.first), uniform(item.all.end)};
      if (item.rows == 0) break;
      Row rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 8 * r;
        rows[r].index = item.row + min(row, item.rows - 1);
        rows[r].position = kOptions ? a.cache.positions[rows[r].index] : 0;
        rows[r].range = (&shared_at<Interval>(L::kSeen + place.index * L::kSeenBytes))[row];
      }
      barrier_wait(base + L::kQueriesFull + place.index * 8, place.parity);
      Output o = {};
      Softmax softmax;
      const bool idle = group * kGroupRows >= item.rows;
      if (idle) {
        pass(item);
      } else if (item.any.end > 0) {
        walk(o, softmax, base + place.index * L::kQueryBytes + group * kGroupRows * kMapRowBytes, item, rows);
      }
      barrier_arrive(base + L::kItemEmpty + place.index * 8);
      if (!idle) store(o, softmax, item);
    }
  }

  __device__ __forceinline__ uint32_t tile() const { return base + L::kRing + stage.index * L::kTileBytes; }
  __device__ __forceinline__ void wait() const { barrier_wait(base + L::kFull + stage.index * 8, stage.parity); }
  __device__ __forceinline__ void release(const Place<L::kStages>& at) const {
    if (lane == 0) barrier_arrive(base + L::kEmpty + at.index * 8);
  }

  // A group without rows lets the tiles go by.
  __device__ __forceinline__ void pass(const Item& item) {
    for (int column = item.begin(kColumns); column < item.any.end; column += kColumns)
      for (int i = 0; i < 2; ++i) {
        wait();
        release(stage);
        stage.next();
      }
  }

  __device__ __forceinline__ void multiply_keys(Scores& s, uint32_t queries) const {
    const uint64_t q = wgmma_descriptor(queries), k = wgmma_descriptor(tile());
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < D; d += 16) {
      const auto at = [&](int rows) { return (d / kMapColumns * rows * kMapRowBytes + d % kMapColumns * 2) / 16; };
      wgmma(s, q + at(kPrefillTile), k + at(kColumns), d > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(Output& o, const Weights& p) const {
    const uint64_t v = wgmma_descriptor(tile(), kColumns * kMapRowBytes);
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < kTiles / 2; ++t) wgmma_by_rows(o, p[t], v + t * 16 * kMapRowBytes / 16);
    wgmma_commit();
  }

  // Calls f(score, which of the lane's rows, position) for the scores of a tile.
  template <class F>
  __device__ __forceinline__ void each(Scores& s, int column, F f) const {
    column += lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(s[t][i], i >> 1, column + 8 * t + (i & 1));
  }

  // In place what score() does to one (but for what is left to `unit`), an option at a time; then -inf outside each
  // row's interval.
  __device__ __forceinline__ void score_tile(Scores& s, const Item& item, const Row (&rows)[2], int column) const {
    if constexpr (kOptions) {
      if (a.softcap > 0.0f) {
        const float scale = a.scale / a.softcap;
        each(s, column, [&](float& x, int, int) { x = a.softcap * tanh_fast(x * scale); });
      } else {
        each(s, column, [&](float& x, int, int) { x *= a.scale; });
      }
      if (a.slopes != nullptr) {
        const float slope = a.slopes[item.head];
        each(s, column, [&](float& x, int r, int p) { x += slope * static_cast<float>(p - rows[r].position); });
      }
      if (a.mask != nullptr) {
        const float* const masks[2]{a.mask + rows[0].index * a.mask_stride, a.mask + rows[1].index * a.mask_stride};
        each(s, column, [&](float& x, int r, int p) { x += masks[r][min(p, a.mask_columns - 1)]; });
      }
    }
    if (column >= item.all.first && column + kColumns <= item.all.end) return;
    each(s, column, [&](float& x, int r, int p) {
      if (p < rows[r].range.first || p >= rows[r].range.end) x = -INFINITY;
    });
  }

  __device__ __forceinline__ static void pack(Weights& p, const Scores& s) {
#pragma unroll
    for (int t = 0; t < kTiles; t += 2)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[t / 2][i] = pack2<bf16>(s[t + i / 2][i % 2 * 2], s[t + i / 2][i % 2 * 2 + 1]);
  }

  // Over all tiles of keys, of which there is at least one.
  __device__ __forceinline__ void walk(Output& o, Softmax& softmax, uint32_t queries, const Item& item,
                                       const Row (&rows)[2]) {
    const float unit = kOptions ? kLog2e : a.scale * kLog2e;
    const int begin = item.begin(kColumns);
    Scores s;
    Weights p;
    float factor[2];
    wait();
    multiply_keys(s, queries);
    wgmma_wait<0>();
    pin(s);
    release(stage);
    stage.next();
    score_tile(s, item, rows, begin);
    softmax.step(s, factor, unit);
    pack(p, s);
    for (int column = begin + kColumns; column < item.any.end; column += kColumns) {
      const Place<L::kStages> values = stage;  // of the tile before
      stage.next();
      const Place<L::kStages> keys = stage;
      wait();
      pin(s), pin(o);
      multiply_keys(s, queries);
      stage = values;
      wait();
      multiply_values(o, p);
      wgmma_wait<1>();
      pin(s);
      release(keys);
      score_tile(s, item, rows, column);
      softmax.step(s, factor, unit);
      // Never so. Without a branch on the sums ptxas lets the exponentials wait for the products with values.
      if (softmax.l[0] < 0.0f || softmax.l[1] < 0.0f) __nanosleep(1);
      wgmma_wait<0>();
      pin(o);
      release(values);
      pack(p, s);
      if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int t = 0; t < D / 8; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) o[t][i] *= factor[i >> 1];
      }
      stage = keys;
      stage.next();
    }
    wait();
    pin(o);
    multiply_values(o, p);
    wgmma_wait<0>();
    pin(o);
    release(stage);
    stage.next();
  }

  __device__ __forceinline__ void store(const Output& o, const Softmax& softmax, const Item& item) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = softmax.l[r];
      l += __shfl_xor_sync(kAllLanes, l, 1);
      l += __shfl_xor_sync(kAllLanes, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const int row = first_row + 8 * r, j = lane % 4;
      const int width = kExact ? D : a.cache.head_dim;
      bf16* const out =
          static_cast<bf16*>(a.out) + (static_cast<int64_t>(item.row + row) * a.heads + item.head) * width;
#pragma unroll
      for (int t = 0; t < D / 8; t += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = pack2<bf16>(o[t + i][2 * r] * inverse, o[t + i][2 * r + 1] * inverse);
        transpose_quad(w, j);
        if (row < item.rows && (kExact || (t + j) * 8 < width))
          *reinterpret_cast<uint4*>(out + (t + j) * 8) = {w[0], w[1], w[2], w[3]};
      }
    }
  }
};

// ---- kernel and launcher -----------------------------------------------------------------------------------------

template <int D, bool kExact, bool kOptions>
__global__ void __launch_bounds__(kThreads, 1)
    attention_prefill_sm90_kernel(const __grid_constant__ Maps maps, const __grid_constant__ AttentionArgs a) {
  if constexpr (kHasWgmma) {
    using L = Layout<D>;
    const uint32_t base = shared_address(&shared_at<unsigned char>(0));
    const int warp = uniform(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
    if (threadIdx.x == 0) {
      for (int i = 0; i < L::kItems; ++i) {
        barrier_init(base + L::kItemFull + i * 8, kWarp);
        barrier_init(base + L::kQueriesFull + i * 8, 1);
        barrier_init(base + L::kItemEmpty + i * 8, kGroups * kGroupThreads);
      }
      for (int i = 0; i < L::kStages; ++i) {
        barrier_init(base + L::kFull + i * 8, 1);
        barrier_init(base + L::kEmpty + i * 8, kGroups * 4);
      }
      barrier_init(base + L::kPartial, 1);
      barrier_init_fence();
    }
    __syncthreads();
    dependency_wait();
    dependency_release();
    if (warp < 4) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
      if (warp == 0) Copier<D, kExact>{a, maps, base, lane}.run();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
      const int group = warp / 4 - 1;
      Multiplier<D, kExact, kOptions>{a, base, group, lane, group * kGroupRows + warp % 4 * 16 + lane / 4}.run();
    }
  }
}

template <int D, bool kExact>
void launch_prefill(const AttentionArgs& a, const Launch& launch) {
  const auto what = [&] { return describe("attention prefill", a); };
  const int64_t pool = static_cast<int64_t>(a.cache.pages) * a.cache.kv_heads * kPage;
  const int width = a.cache.head_dim;
  const Maps maps{kExact ? tensor_map(a.q, a.rows, static_cast<int64_t>(a.heads) * D, a.q_stride, kPrefillTile, what)
                         : tensor_map_of(a.q, a.rows, a.heads, width, a.q_stride, kPrefillTile, what),
                  tensor_map(a.cache.k, pool, width, width, kPage, what),
                  tensor_map(a.cache.v, pool, width, width, kPage, what)};
  const int64_t items = static_cast<int64_t>(a.tile_count) * a.heads;
  if (items > INT_MAX / 2) throw std::invalid_argument(what() + ": too many tiles in one call");
  const int blocks = std::min(static_cast<int>(items), device_attribute(cudaDevAttrMultiProcessorCount));
  const auto kernel =
      has_options(a) ? attention_prefill_sm90_kernel<D, kExact, true> : attention_prefill_sm90_kernel<D, kExact, false>;
  launch_kernel(launch, what, kernel, dim3(blocks), dim3(kThreads), Layout<D>::kBytes, maps, a);
}

}  // namespace sm90

bool attention_fits_sm90(const AttentionArgs& a) {
  const auto fits = [](const void* p, int64_t stride) {
    return aligned16(p, stride * static_cast<int64_t>(sizeof(bf16)));
  };
  return !a.mma_sync && compiled_architecture() == 90 && a.type == DType::bf16 && a.cache.dtype == DType::bf16 &&
         has_tiled_head(a.cache) && fits(a.q, a.q_stride) && fits(a.out, 0) && fits(a.cache.k, 0) && fits(a.cache.v, 0);
}

void attention_prefill_sm90(const AttentionArgs& a, const Launch& launch) {
  with_tiled_head(a.cache, [&]<int D, bool kExact>() { sm90::launch_prefill<D, kExact>(a, launch); });
}

}  // namespace nibblelm::cuda
