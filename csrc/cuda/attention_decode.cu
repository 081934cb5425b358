// Split-KV decode attention on tensor cores for bf16 (Dao et al. 2023, "Flash-Decoding"), alone or with what comes
// before it: QK-norm, rotary embedding and the KV write.
//
// The heads of one KV head are the eight columns of mma.m16n8k16 and positions its rows: scores are K q, the output is
// V^T p, and both operands come from row-major tiles by ldmatrix. Each warp brings its own tiles by cp.async, several
// ahead, and waits for no other warp before the end. The blocks of a thread-block cluster divide a row's positions and
// merge through distributed shared memory; only long rows take several clusters and a merge through device memory.
#include <bit>

#include "attention.cuh"
#include "cluster.cuh"
#include "mma.cuh"
#include "rope.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kHeads{8};  // columns of the mma
constexpr int kTile{16};  // positions a warp takes at a time

// ---- how a row's positions are divided: by its own interval and the numbers of heads, never by batch or capacity ----

constexpr int kClusterBlocks{8};            // where the card has clusters; without them every block stands alone
constexpr int kLeastSpan{64};               // spans are multiples of it: a tile for each warp
constexpr int kPartPositions{256};          // positions of a part from which on a second cluster is worth its merge
constexpr int kBlocksPerRow{64};            // of a long row
static_assert(kPartPositions >= kMinSpan);  // attention_workspace() counts splits of that size

// Clusters are a power of two, so that finding one's place takes no division.
struct Plan {
  int length;
  int span;  // positions a part

  template <int kCluster>
  __device__ __forceinline__ static Plan of(Interval range, int most_clusters) {
    const int length = range.end - range.first, over = max(length - 1, 0) / (kCluster * kPartPositions);
    const int parts = kCluster * min(most_clusters, 1 << (kWarp - __clz(over)));
    const int even = (length + parts - 1) >> (31 - __clz(parts));
    return {length, (max(even, 1) + kLeastSpan - 1) / kLeastSpan * kLeastSpan};
  }
  __device__ __forceinline__ int parts() const { return (length + span - 1) / span; }
};

// ---- tiles ----

// Keeps a value in a register where the compiler would compute it again in every round.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ const bf16* keep(const bf16* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Bytes of a block's tiles; they change the time, never the result. Measured on the H200.
constexpr int kSeveralParts{64 << 10};  // batches: a block takes several parts one after the other
constexpr int kBeside{96 << 10};        // the next kernel's block (107 KB) fits beside; cards of 99 KB take it too
constexpr int kLongRows{192 << 10};     // caches that hold long rows

// Rows longer than this have eight warps a part (four keep a multiprocessor at 62 bytes/ns, half of what it can read).
constexpr int kLongRow{16384};

template <int D, int kBytes>
constexpr int kWarpsOf{D == 256              ? 2
                       : kBytes == kLongRows ? 8
                                             : 4};

// A warp's tiles of 16 positions, keys then values, in shared memory. Rows are split into chunks of 16 bytes whose
// place is exclusive-ored with the row, so that neither copies nor ldmatrix meet bank conflicts, and a copy takes whole
// 128-byte lines.
template <int D, int kBytes>
struct Ring {
  static constexpr int kWarps{kWarpsOf<D, kBytes>};
  static constexpr int kThreads{kWarps * kWarp};
  static constexpr int kWarpBytes{kBytes / kWarps};
  static constexpr int kTileBytes{kTile * D * 2};
  static constexpr int kStages{kWarpBytes / (2 * kTileBytes)};
  static constexpr int kChunks{D / 8}, kRowsAtOnce{kWarp / kChunks}, kPitch{D * 2};

  // Shared addresses in stage 0 of this lane's first chunk of copies and of operands; others differ by a constant, as
  // exclusive or with the chunk (128-byte rows of chunks are aligned) or as sum.
  uint32_t copies, keys, values;
  const bf16* k;  // this lane's chunk of position 0
  const bf16* v;
  int end;  // positions from here on read as zeros: an unwritten value may be NaN, and 0 * NaN would reach the sum
  int lane;

  __device__ __forceinline__ Ring(uint32_t storage, const AttentionArgs& a, int slot, int kv_head, int end, int warp,
                                  int lane)
      : end(end), lane(lane) {
    const uint32_t base = storage + warp * kWarpBytes;
    const int first = lane / kChunks, chunk = lane % kChunks;
    copies = keep(base + first * kPitch + ((chunk ^ first) << 4));
    keys = keep(base + lane % 16 * kPitch + ((lane / 16 ^ lane % 8) << 4));
    values = keep(base + kTileBytes + (lane / 16 * 8 + lane % 8) * kPitch + ((lane / 8 % 2 ^ lane % 8) << 4));
    k = keep(static_cast<const bf16*>(cache_row(a.k, a, slot, kv_head)) + first * D + chunk * 8);
    v = keep(static_cast<const bf16*>(cache_row(a.v, a, slot, kv_head)) + first * D + chunk * 8);
  }
  // Warps that take tiles of a row.
  __device__ __forceinline__ static int working(const Plan& plan) {
    return D == 256 || kWarps == 4 || plan.length > kLongRow ? kWarps : 4;
  }
  // Chunk 2 c further than at `address`, whose chunk is even or odd in its row's order.
  __device__ __forceinline__ static uint32_t further(uint32_t address, int c) {
    return (address ^ (2 * c % 8) << 4) + 2 * c / 8 * 128;
  }
  __device__ __forceinline__ void fetch(int stage, int p) const {
    const uint32_t target = copies + stage * 2 * kTileBytes;
    const bf16* const from_k = k + static_cast<int64_t>(p) * D;
    const bf16* const from_v = v + static_cast<int64_t>(p) * D;
    if (p + kTile <= end) {
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce) {
        copy_async_16((target ^ (i % 8) << 4) + i * kPitch, from_k + i * D);
        copy_async_16((target ^ (i % 8) << 4) + i * kPitch + kTileBytes, from_v + i * D);
      }
    } else {
      const int left = end - p - lane / kChunks;  // rows from this lane's first on
#pragma unroll
      for (int i = 0; i < kTile; i += kRowsAtOnce) {
        copy_or_zero((target ^ (i % 8) << 4) + i * kPitch, from_k + i * D, i < left);
        copy_or_zero((target ^ (i % 8) << 4) + i * kPitch + kTileBytes, from_v + i * D, i < left);
      }
    }
  }
  // A key and the value behind it, (2, D), as row `row` of a tile.
  __device__ __forceinline__ void insert(int stage, int row, const bf16* key_value) const {
    const uint32_t tile = keys - (lane % 16 * kPitch + ((lane / 16 ^ lane % 8) << 4)) + 2 * stage * kTileBytes;
#pragma unroll
    for (int i = lane; i < 2 * kChunks; i += kWarp) {
      const uint32_t chunk = (i % kChunks ^ row % 8) << 4;
      store_shared_16(tile + i / kChunks * kTileBytes + row * kPitch + chunk,
                      reinterpret_cast<const uint4*>(key_value)[i]);
    }
    __syncwarp();
  }
  // Operand A of 16 positions at d = 16 c .. + 15.
  __device__ __forceinline__ void key(uint32_t (&r)[4], int stage, int c) const {
    ldmatrix_x4(r, further(keys + stage * 2 * kTileBytes, c));
  }
  // Operand A of d = 16 c .. + 15 by 16 positions.
  __device__ __forceinline__ void value(uint32_t (&r)[4], int stage, int c) const {
    ldmatrix_x4_trans(r, further(values + stage * 2 * kTileBytes, c));
  }
};

// Online softmax of a warp's positions for heads 2j and 2j + 1 of the group (lane = 4 g + j); o[c] holds d = 16 c + g
// of both heads and then d = 16 c + g + 8. Its arithmetic leaves nothing to the compiler's contraction, so that the
// kernels with and without rotation have the same bits.
template <int D, int kBytes>
struct Accumulator {
  using R = Ring<D, kBytes>;
  float o[D / 16][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's positions only, until the end

  __device__ __forceinline__ static void dots(float (&s)[4], const R& ring, int stage, const uint32_t (&q)[D / 16][2]) {
    float odd[4]{};  // a second chain of products halves the wait for results
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = 0.0f;
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t k[4];
      ring.key(k, stage, c);
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

  __device__ __forceinline__ void add(const R& ring, int stage, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t v[4];
      ring.value(v, stage, c);
      mma_16816(o[c], v[0], v[1], v[2], v[3], p0, p1);
    }
  }
};

// ---- norm and rotation ----

struct HeadArgs {
  const float* cos;
  const float* sin;
  const float* q_norm;
  const float* k_norm;
  float eps;
  bool plus_one;
};

// A block's query heads after norm and rotation, and the new position's key and value. A row of padding keeps the reads
// of eight heads off each other's banks.
template <int D>
struct Prepared {
  bf16 q[kHeads][D + 8];
  bf16 key_value[2][D];
};
template <>
struct Prepared<0> {};

// What a warp reads of the projection, d = lane + 32 i: its query heads (`warp`, `warp` + kWarps ...), the new key and
// value, and the angles. All of it is under way at once, and keys are turned by every warp rather than after the heads.
template <int D, int kWarps>
struct RawHeads {
  static constexpr int kValues{D / kWarp};
  static constexpr int kRounds{kHeads / kWarps};
  bf16 q[kRounds][kValues], key[kValues], value[kValues];
  float cos[kValues / 2], sin[kValues / 2];

  __device__ __forceinline__ void read(const AttentionArgs& a, int64_t row, int first_head, int heads, int kv_head) {
    const int warp = threadIdx.x / kWarp;
    const bf16* const qkv = static_cast<const bf16*>(a.q) + row * a.q_stride + threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      key[i] = qkv[(a.heads + kv_head) * D + kWarp * i];
      value[i] = qkv[(a.heads + a.kv_heads + kv_head) * D + kWarp * i];
#pragma unroll
      for (int n = 0; n < kRounds; ++n)
        if (warp + n * kWarps < heads) q[n][i] = qkv[(first_head + warp + n * kWarps) * D + kWarp * i];
    }
  }
  __device__ __forceinline__ void read_angles(const HeadArgs& a, int position) {
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const int64_t entry = static_cast<int64_t>(position) * (D / 2) + threadIdx.x % kWarp + kWarp * i;
      cos[i] = a.cos[entry];
      sin[i] = a.sin[entry];
    }
  }

  __device__ __forceinline__ void turn(bf16 (&x)[kValues], const float* gain, const HeadArgs& a) const {
    float v[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] = to_float(x[i]);
    if (gain != nullptr) {
      float squares{0.0f};
#pragma unroll
      for (int i = 0; i < kValues; ++i) squares = __fmaf_rn(v[i], v[i], squares);
      const float factor = head_norm_factor(squares, D, a.eps);
#pragma unroll
      for (int i = 0; i < kValues; ++i)
        v[i] = head_normed<bf16>(v[i], factor, gain[threadIdx.x % kWarp + kWarp * i], a.plus_one);
    }
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const float2 rotated = rotate(v[i], v[i + kValues / 2], cos[i], sin[i]);
      x[i] = from_float<bf16>(rotated.x);
      x[i + kValues / 2] = from_float<bf16>(rotated.y);
    }
  }

  // `new_key`, `new_value`: places in the cache, null where they are not this block's.
  __device__ __forceinline__ void prepare(Prepared<D>& to, const HeadArgs& a, int heads, bf16* new_key,
                                          bf16* new_value) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    turn(q[0], a.q_norm, a);
    turn(key, a.k_norm, a);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int d = lane + kWarp * i;
      to.q[warp][d] = q[0][i];
      if (warp == 0) to.key_value[0][d] = key[i];
      if (warp == 1) to.key_value[1][d] = value[i];
      if (warp == 2 && new_key != nullptr) new_key[d] = key[i];
      if (warp == 3 && new_value != nullptr) new_value[d] = value[i];
    }
#pragma unroll
    for (int n = 1; n < kRounds; ++n) {
      if (warp + n * kWarps >= heads) break;
      turn(q[n], a.q_norm, a);
#pragma unroll
      for (int i = 0; i < kValues; ++i) to.q[warp + n * kWarps][lane + kWarp * i] = q[n][i];
    }
  }
};

// What a block has to do for the row at (slot, position).
struct Share {
  int slot;
  int position;
  Interval range;
  Plan plan;
  int begin;
  int end;

  template <int kCluster, bool kPlain>
  __device__ __forceinline__ static Share of(const AttentionArgs& a, int64_t row, int slot, int position,
                                             int most_clusters, int parts) {
    const Interval range = kPlain ? attended_plain(a, slot, position) : attended(a, row, slot, position);
    const Plan plan = Plan::of<kCluster>(range, most_clusters);
    const int span = parts * plan.span, begin = range.first + static_cast<int>(blockIdx.x) * span;
    return {slot, position, range, plan, begin, min(range.end, begin + span)};
  }
  __device__ __forceinline__ bool empty() const { return begin >= end; }
};

// Asks L2 for the tiles of a short row; those of a long one would be gone from L2 before their turn.
template <int D>
__device__ __forceinline__ void prefetch_tiles(const AttentionArgs& a, const Share& share, int kv_head) {
  if (share.end - share.begin > 2 * kPartPositions) return;
  const int64_t first = static_cast<int64_t>(share.begin) * D * 2;
  const int bytes = (share.end - share.begin) * D * 2;
  const char* const k = static_cast<const char*>(cache_row(a.k, a, share.slot, kv_head)) + first;
  const char* const v = static_cast<const char*>(cache_row(a.v, a, share.slot, kv_head)) + first;
#pragma unroll 1
  for (int at = threadIdx.x * 128; at < bytes; at += blockDim.x * 128) {
    prefetch_l2(k + at);
    prefetch_l2(v + at);
  }
}

// ---- merging ----

struct Triple {
  float m;
  float l;
  float4 o;
};

// In order; at most kMost of them, whose reads overlap.
template <int kMost, class Statistics, class Output>
__device__ __forceinline__ Triple merge(int count, Statistics statistics, Output output) {
  Triple t{-INFINITY, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
  float2 s[kMost];
  float4 o[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    s[i] = {-INFINITY, 0.0f};
    if (i < count) s[i] = statistics(i), o[i] = output(i);
    t.m = fmaxf(t.m, s[i].x);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float w = weight_of(s[i].x, t.m);
    if (i >= count) continue;
    t.l = __fmaf_rn(w, s[i].y, t.l);
    t.o = {__fmaf_rn(w, o[i].x, t.o.x), __fmaf_rn(w, o[i].y, t.o.y), __fmaf_rn(w, o[i].z, t.o.z),
           __fmaf_rn(w, o[i].w, t.o.w)};
  }
  return t;
}

// Where outputs of the warps and (in the cluster's first block) of the parts lie. With one part a block, where the ring
// was: behind each other in every warp's share, its output, then some parts. A share is done with by its own warp
// alone, so no barrier comes before. With several parts the ring goes on; they lie behind it.
template <int D, int kBytes>
struct MergeSpace {
  using R = Ring<D, kBytes>;
  static constexpr bool kBehind{kBytes == kSeveralParts};
  static constexpr int kPitch{D + 4};  // keeps the lanes' stores off each other's banks
  static constexpr int kOutputBytes{kHeads * (kPitch * 4 + 8)};
  static constexpr int kPartBytes{kHeads * (D * 4 + 8)};
  static constexpr int kShare{kBehind ? kOutputBytes + kClusterBlocks / R::kWarps * kPartBytes : R::kWarpBytes};
  static_assert(kOutputBytes + kClusterBlocks / R::kWarps * kPartBytes <= kShare && kClusterBlocks % R::kWarps == 0);
  unsigned char* storage;

  __device__ __forceinline__ explicit MergeSpace(unsigned char* ring) : storage(ring + (kBehind ? kBytes : 0)) {}
  __device__ __forceinline__ float* output(int warp, int h) const {
    return reinterpret_cast<float*>(storage + warp * kShare) + h * kPitch;
  }
  __device__ __forceinline__ float2* statistics(int warp) const {
    return reinterpret_cast<float2*>(storage + warp * kShare + kHeads * kPitch * 4);
  }
  __device__ __forceinline__ float* part(int rank, int h) const {
    const int at = rank % R::kWarps * kShare + kOutputBytes + rank / R::kWarps * kPartBytes;
    return reinterpret_cast<float*>(storage + at) + h * D;
  }
  __device__ __forceinline__ float2* part_statistics(int rank) const {
    return reinterpret_cast<float2*>(part(rank, kHeads));
  }
};

// ---- kernel ----

// Grid (blocks, kv_heads * head groups, rows); a block takes per_block parts, kClusterBlocks parts are a cluster. Warps
// take tiles in turn; their triples are merged in the order of warps, then of parts, then of clusters.
template <int D, int kBytes, bool kOptions, bool kFused>
__global__ void __launch_bounds__(kWarpsOf<D, kBytes>* kWarp, kBytes == kLongRows ? 1
                                                              : D == 256          ? 2
                                                                                  : 3)
    attention_decode_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ HeadArgs head_args,
                            int64_t first_row, int groups, int most_clusters, int parts_of_block) {
  using R = Ring<D, kBytes>;
  constexpr int kCluster{kArchitecture >= 90 ? kClusterBlocks : 1};
  constexpr bool kSeveral{kBytes == kSeveralParts};
  const int per_block = kSeveral ? parts_of_block : 1;
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ __align__(16) Prepared<kFused ? D : 0> prepared;
  __shared__ uint64_t received;  // in the cluster's first block: reports of the parts
  const int64_t row = first_row + blockIdx.z;
  const int per_kv = a.heads / a.kv_heads, kv_head = blockIdx.y / groups;
  const int in_group = blockIdx.y % groups * kHeads, first_head = kv_head * per_kv + in_group;
  const int heads = min(kHeads, per_kv - in_group);
  const int warp = threadIdx.x / kWarp, lane = static_cast<int>(keep(threadIdx.x % kWarp)), g = lane / 4, j = lane % 4;
  const int first_part = blockIdx.x * per_block, first_rank = first_part % kCluster;  // of all, of its cluster
  if (kCluster > 1 && first_rank == 0 && threadIdx.x == 0) cluster_init(&received);
  __syncwarp();
  if constexpr (kSeveral) cluster_arrive();
  // Where the row stands may change until the wait; a guess from before it is right but for the step after a change,
  // and what it is used for then is done again. It is read around L1, which would keep it.
  Share share{};
  if constexpr (kFused) {
    const int guess = __ldcg(a.positions + row);
    share = Share::of<kCluster, true>(a, row, guess < a.capacity ? __ldcg(a.slots + row) : -1, guess, most_clusters,
                                      per_block);
    prefetch_tiles<D>(a, share, kv_head);
  }
  dependency_wait();
  RawHeads<D, R::kWarps> raw;
  if constexpr (kFused) raw.read(a, row, first_head, heads, kv_head);
  const int slot = a.slots[row], position = a.positions[row];
  if constexpr (!kFused) share = Share::of<kCluster, false>(a, row, slot, position, most_clusters, per_block);
  constexpr int kQuads{D / 4}, kRounds{(kHeads * kQuads + R::kThreads - 1) / R::kThreads};
  static_assert(!kSeveral || kLeastSpan % (R::kWarps * kTile) == 0);
#pragma unroll 1
  for (;;) {
    if (!share.empty()) {
      const R ring(shared_address(storage), a, share.slot, kv_head,
                   kFused && share.position == share.end - 1 ? share.position : share.end, warp, lane);
#pragma unroll 1
      for (int i = 0; i < R::kStages - 1; ++i) {
        const int working = R::working(share.plan), at = share.begin + (warp + i * working) * kTile;
        if (warp < working && at < share.end) ring.fetch(i, at);
        copy_async_commit();
      }
      if constexpr (kFused) raw.read_angles(head_args, share.position);
    }
    if (!kFused || (share.slot == slot && share.position == position)) break;
    copy_async_wait<0>();
    __syncwarp();
    share = Share::of<kCluster, true>(a, row, slot, position, most_clusters, per_block);
  }
  bf16* const out = static_cast<bf16*>(a.out) + (row * a.heads + first_head) * D;
  const Plan plan = share.plan;
  if (share.empty()) {
    if (plan.length == 0 && first_part == 0)
      for (int i = threadIdx.x; i < heads * D; i += R::kThreads) out[i] = from_float<bf16>(0.0f);
    return;
  }
  const int begin = share.begin, end = share.end;
  const bool newest = kFused && position == end - 1;  // its key and value are not in the cache yet
  const R ring(shared_address(storage), a, slot, kv_head, newest ? position : end, warp, lane);
  const int working = R::working(plan), step = working * kTile;
  int p = warp < working ? begin + warp * kTile : end;
  // Not before the last tile is asked for: the next kernel's weights would go first.
  if (warp == 0 && p + (R::kStages - 1) * step >= end) dependency_release();
  const bf16* query = static_cast<const bf16*>(a.q) + row * a.q_stride + (first_head + g) * D;
  if constexpr (kFused) {  // meanwhile the tiles are on their way
    const int64_t offset =
        ((static_cast<int64_t>(slot) * a.kv_heads + kv_head) * a.capacity + position) * D;  // of the new position
    bf16* const keys = const_cast<bf16*>(static_cast<const bf16*>(a.k));
    bf16* const values = const_cast<bf16*>(static_cast<const bf16*>(a.v));
    const bool writes = newest && in_group == 0;
    raw.prepare(prepared, head_args, heads, writes ? keys + offset : nullptr, writes ? values + offset : nullptr);
    __syncthreads();
    query = prepared.q[g];
  }
  uint32_t q[D / 16][2];
#pragma unroll
  for (int c = 0; c < D / 16; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      q[c][i] = g < heads ? *reinterpret_cast<const uint32_t*>(query + 16 * c + 8 * i + 2 * j) : 0u;
  const int parts = plan.parts(), clusters = (parts + kCluster - 1) / kCluster;
  const int ranks = min(kCluster, parts - (first_part - first_rank));  // parts of this cluster
  const MergeSpace<D, kBytes> space(storage);
  const auto finish = [&](int h, int d, const Triple& t) {
    if (clusters > 1) {
      const Partials partials(a, row, first_head + h, gridDim.x * per_block / kCluster);
      *reinterpret_cast<float4*>(partials.outputs + static_cast<int64_t>(first_part / kCluster) * D + d) = t.o;
      if (d == 0) partials.statistics[first_part / kCluster] = {t.m, t.l};
    } else {
      const float inverse = t.l == 0.0f ? 0.0f : __fdividef(1.0f, t.l);
      *reinterpret_cast<uint2*>(out + h * D + d) = {pack2<bf16>(__fmul_rn(t.o.x, inverse), __fmul_rn(t.o.y, inverse)),
                                                    pack2<bf16>(__fmul_rn(t.o.z, inverse), __fmul_rn(t.o.w, inverse))};
    }
  };
  int stage{0};
#pragma unroll 1
  for (int n = 0;; ++n) {  // parts; spans hold whole rounds of the warps, so
                           // that the ring just goes on
    const int part_end = kSeveral ? min(end, begin + (n + 1) * plan.span) : end;
    Accumulator<D, kBytes> sum;
#pragma unroll 1
    for (; p < part_end; p += step, stage = stage + 1 == R::kStages ? 0 : stage + 1) {
      copy_async_wait<R::kStages - 2>();
      __syncwarp();  // this tile has arrived for every lane, and every lane is done with the one before
      const int far = p + (R::kStages - 1) * step;
      if (far < end) {
        ring.fetch(stage == 0 ? R::kStages - 1 : stage - 1, far);
      } else {
        dependency_release();
      }
      copy_async_commit();
      if constexpr (kFused) {
        if (newest && position >= p && position < p + kTile)
          ring.insert(stage, position - p, &prepared.key_value[0][0]);
      }
      float s[4];
      sum.dots(s, ring, stage, q);
      uint32_t p0, p1;
      sum.template weigh<kOptions>(a, s, row, position, first_head, p, end, g, j, p0, p1);
      sum.add(ring, stage, p0, p1);
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        sum.l[h] = __fadd_rn(sum.l[h], __shfl_xor_sync(kAllLanes, sum.l[h], offset));
    }
    if (kSeveral && n > 0) __syncthreads();  // the outputs of the part before have been read
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (2 * j + h >= heads) continue;
      if (g == 0) space.statistics(warp)[2 * j + h] = {sum.m[h], sum.l[h]};
      float* const to = space.output(warp, 2 * j + h) + g;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) {
        to[16 * c] = sum.o[c][h];
        to[16 * c + 8] = sum.o[c][2 + h];
      }
    }
    if (!kSeveral && ranks > 1) cluster_arrive();  // what was read from this warp's ring has been used
    __syncthreads();

    // Quads of the output, (head, d .. d + 3); a thread keeps its own throughout.
    Triple merged[kRounds];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = threadIdx.x + r * R::kThreads, h = i / kQuads, d = i % kQuads * 4;
      if (h >= heads) break;
      merged[r] = merge<R::kWarps>(
          working, [&](int w) { return space.statistics(w)[h]; },
          [&](int w) { return *reinterpret_cast<const float4*>(space.output(w, h) + d); });
      if (ranks == 1) finish(h, d, merged[r]);
    }
    if (ranks > 1) {
      if (n == 0) {
        if (first_rank == 0 && threadIdx.x == 0) cluster_expect(&received, ranks * heads * (D * 4 + 8));
        cluster_wait();
      }
      const uint32_t barrier = cluster_address(&received, 0);
      const int rank = first_rank + n;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int i = threadIdx.x + r * R::kThreads, h = i / kQuads, d = i % kQuads * 4;
        if (h >= heads) break;
        cluster_store(cluster_address(space.part(rank, h) + d, 0), merged[r].o, barrier);
        if (d == 0)
          cluster_store(cluster_address(space.part_statistics(rank) + h, 0), float2{merged[r].m, merged[r].l}, barrier);
      }
    }
    if (!kSeveral || part_end == end) break;
  }
  if (ranks > 1) {
    if (first_rank != 0) return;
    cluster_receive(&received);
#pragma unroll 1
    for (int i = threadIdx.x; i < heads * kQuads; i += R::kThreads) {
      const int h = i / kQuads, d = i % kQuads * 4;
      finish(h, d,
             merge<kClusterBlocks>(
                 ranks, [&](int r) { return space.part_statistics(r)[h]; },
                 [&](int r) { return *reinterpret_cast<const float4*>(space.part(r, h) + d); }));
    }
  }
  if (clusters == 1 || !arrives_last(static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y), clusters)) return;
  merge_splits<R::kThreads>(a, row, first_head, heads, clusters, gridDim.x * per_block / kCluster,
                            reinterpret_cast<float*>(storage));
}

// ---- launcher ----

using Kernel = void (*)(AttentionArgs, HeadArgs, int64_t, int, int, int);

struct Choice {
  Kernel kernel;
  int threads;
  int bytes;      // of shared memory
  int per_block;  // parts a block takes
};

template <int D, int kBytes, bool kOptions, bool kFused>
Choice choice(int bytes, int per_block) {
  return {attention_decode_kernel<D, kBytes, kOptions, kFused>, kWarpsOf<D, kBytes> * kWarp, bytes, per_block};
}

// `blocks`: of all rows, without clusters. The result is the same whatever is chosen.
template <int D, bool kFused>
Choice choose(const AttentionArgs& a, int64_t blocks) {
  const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 4096;
  if constexpr (!kFused) {
    if (has_options(a)) return choice<D, kBeside, true, false>(kBeside, 1);
  } else {
    constexpr int kStorage{kSeveralParts + kWarpsOf<D, kSeveralParts> * MergeSpace<D, kSeveralParts>::kShare};
    const int64_t fit = device_attribute(cudaDevAttrMultiProcessorCount) / blocks;
    const int per_block =
        kClusterBlocks / static_cast<int>(std::bit_floor(std::clamp<uint64_t>(fit, 1, kClusterBlocks)));
    if (per_block > 1 && a.capacity <= kLongRow && room >= kStorage && device_attribute(cudaDevAttrClusterLaunch) != 0)
      return choice<D, kSeveralParts, false, true>(kStorage, per_block);
  }
  if (a.capacity > kLongRow && room >= kLongRows) return choice<D, kLongRows, false, kFused>(kLongRows, 1);
  return choice<D, kBeside, false, kFused>(kBeside, 1);
}

template <int D, bool kFused>
void launch_decode(const AttentionArgs& a, const HeadArgs& head_args, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] { return describe(kFused ? "rope_attention" : "attention", a); };
  const int groups = ceil_div(a.heads / a.kv_heads, kHeads), per_row = a.kv_heads * groups;
  auto [kernel, threads, bytes, per_block] = choose<D, kFused>(a, a.rows * per_row);
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, kernel), "attention: cudaFuncGetAttributes");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "attention: cudaFuncSetAttribute");
  const int cluster = compiled.ptxVersion >= 90 ? kClusterBlocks : 1;
  if (cluster == 1) per_block = 1;
  const int most_clusters = static_cast<int>(
      std::bit_floor(static_cast<unsigned>(std::clamp(kBlocksPerRow / (cluster * per_row), 1, kMaxSplits))));
  const int wanted = ceil_div(a.capacity, cluster * kPartPositions);
  const int clusters = std::min(most_clusters, static_cast<int>(std::bit_ceil(static_cast<unsigned>(wanted))));
  const int blocks = cluster / per_block;  // of a cluster
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = blocks > 1 ? attributes : attributes + 1;
  config.numAttrs = (blocks > 1 ? 1 : 0) + (launch.programmatic ? 1 : 0);
  for_row_chunks(a, per_row, [&](int64_t first, int64_t rows) {
    config.gridDim = dim3(blocks * clusters, per_row, static_cast<unsigned>(rows));
    check(cudaLaunchKernelEx(&config, kernel, a, head_args, first, groups, most_clusters, per_block), what());
  });
}

bool on_tensor_cores(const AttentionArgs& a) {
  return a.type == DType::bf16 && a.cache == DType::bf16 && a.q_stride % 8 == 0 && aligned16(a.q, 0) &&
         (a.head_dim == 64 || a.head_dim == 128 || a.head_dim == 256);
}

}  // namespace

int64_t attention_workspace(int64_t rows, int heads, int head_dim, int64_t capacity) {
  const auto splits = static_cast<int64_t>(std::bit_ceil(static_cast<unsigned>(max_splits(capacity))));
  return rows * heads * splits * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

void attention_decode(const AttentionArgs& a, const Launch& launch) {
  if (!on_tensor_cores(a)) return attention_decode_fma(a, launch);
  if (a.head_dim == 64) return launch_decode<64, false>(a, {}, launch);
  if (a.head_dim == 128) return launch_decode<128, false>(a, {}, launch);
  launch_decode<256, false>(a, {}, launch);
}

bool attention_fuses(const AttentionArgs& a, const RopeTable& t) {
  return on_tensor_cores(a) && a.head_dim <= 128 && !has_options(a) && a.prefix == nullptr && a.starts == nullptr &&
         t.streams == 1 && !t.interleaved && 2 * t.half == a.head_dim;
}

void attention_rope(const AttentionArgs& a, const RopeTable& table, const float* q_norm, const float* k_norm, float eps,
                    bool plus_one, const Launch& launch) {
  if (!attention_fuses(a, table)) throw std::invalid_argument(describe("rope_attention", a) + ": not a fused case");
  const HeadArgs head_args{table.cos, table.sin, q_norm, k_norm, eps, plus_one};
  if (a.head_dim == 64) return launch_decode<64, true>(a, head_args, launch);
  launch_decode<128, true>(a, head_args, launch);
}

}  // namespace nibblelm::cuda
