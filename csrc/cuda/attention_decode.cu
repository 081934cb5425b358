// Split-KV decode attention on tensor cores for bf16 (Dao et al. 2023, "Flash-Decoding"), alone or with what comes
// before it: QK-norm, rotary embedding and the KV write.
//
// The heads of one KV head are the eight columns of mma.m16n8k16 and positions its rows: scores are K q, the output is
// V^T p, and both operands come from row-major tiles by ldmatrix. Each warp brings its own tiles by cp.async, several
// ahead, and waits for no other warp before the end. The blocks of a thread-block cluster divide a row's positions and
// merge through distributed shared memory; only long rows take several clusters and a merge through device memory.
#include <bit>

#include "attention_heads.cuh"
#include "attention_tiles.cuh"
#include "cluster.cuh"

namespace nibblelm::cuda {
namespace {

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
                                             int most_clusters) {
    const Interval range = kPlain ? attended_plain(a, slot, position) : attended(a, row, slot, position);
    const Plan plan = Plan::of<kCluster>(range, most_clusters);
    const int begin = range.first + static_cast<int>(blockIdx.x) * plan.span;
    return {slot, position, range, plan, begin, min(range.end, begin + plan.span)};
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
  for (int at = threadIdx.x * 128; at < bytes; at += kWarpsOf<D> * kWarp * 128) {
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

// Where the ring was: behind each other in every warp's share, its output, then the parts of some of the cluster's
// blocks (of the first block only). A share is done with by its own warp alone, so no barrier comes before.
template <int D, int kBytes>
struct MergeSpace {
  using R = Ring<D, kBytes>;
  static constexpr int kPitch{D + 4};  // keeps the lanes' stores off each other's banks
  static constexpr int kOutputBytes{kHeads * (kPitch * 4 + 8)};
  static constexpr int kPartBytes{kHeads * (D * 4 + 8)};
  static_assert(kOutputBytes + kClusterBlocks / R::kWarps * kPartBytes <= R::kWarpBytes &&
                kClusterBlocks % R::kWarps == 0);
  unsigned char* storage;

  __device__ __forceinline__ float* output(int warp, int h) const {
    return reinterpret_cast<float*>(storage + warp * R::kWarpBytes) + h * kPitch;
  }
  __device__ __forceinline__ float2* statistics(int warp) const {
    return reinterpret_cast<float2*>(storage + warp * R::kWarpBytes + kHeads * kPitch * 4);
  }
  __device__ __forceinline__ float* part(int rank, int h) const {
    const int at = rank % R::kWarps * R::kWarpBytes + kOutputBytes + rank / R::kWarps * kPartBytes;
    return reinterpret_cast<float*>(storage + at) + h * D;
  }
  __device__ __forceinline__ float2* part_statistics(int rank) const {
    return reinterpret_cast<float2*>(part(rank, kHeads));
  }
};

// ---- kernel ----

// Grid (parts, kv_heads * head groups, rows); parts in clusters. Warps take tiles in turn; their triples are merged in
// the order of warps, then of blocks, then of clusters.
template <int D, int kBytes, bool kOptions, bool kFused>
__global__ void __launch_bounds__(kWarpsOf<D>* kWarp, D == 256 ? 2 : 3)
    attention_decode_kernel(const __grid_constant__ AttentionArgs a, const __grid_constant__ HeadArgs head_args,
                            int64_t first_row, int groups, int most_clusters) {
  using R = Ring<D, kBytes>;
  constexpr int kCluster{kArchitecture >= 90 ? kClusterBlocks : 1};
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ __align__(16) Prepared<kFused ? D : 0> prepared;
  __shared__ uint64_t received;  // in the cluster's first block: reports of the parts
  const int64_t row = first_row + blockIdx.z;
  const int per_kv = a.heads / a.kv_heads, kv_head = blockIdx.y / groups;
  const int in_group = blockIdx.y % groups * kHeads, first_head = kv_head * per_kv + in_group;
  const int heads = min(kHeads, per_kv - in_group);
  const int warp = threadIdx.x / kWarp, lane = static_cast<int>(keep(threadIdx.x % kWarp)), g = lane / 4, j = lane % 4;
  const int part = blockIdx.x, rank = part % kCluster;
  if (kCluster > 1 && rank == 0 && threadIdx.x == 0) cluster_init(&received);
  __syncwarp();
  // Where the row stands may change until the wait; a guess from before it is right but for the step after a change,
  // and what it is used for then is done again. It is read around L1, which would keep it.
  Share share{};
  if constexpr (kFused) {
    const int guess = __ldcg(a.positions + row);
    share = Share::of<kCluster, true>(a, row, guess < a.capacity ? __ldcg(a.slots + row) : -1, guess, most_clusters);
    prefetch_tiles<D>(a, share, kv_head);
  }
  dependency_wait();
  RawHeads<D> raw;
  if constexpr (kFused) raw.read(a, row, first_head, heads, kv_head);
  const int slot = a.slots[row], position = a.positions[row];
  if constexpr (!kFused) share = Share::of<kCluster, false>(a, row, slot, position, most_clusters);
  constexpr int kStep{R::kWarps * kTile}, kQuads{D / 4}, kRounds{(kHeads * kQuads + R::kThreads - 1) / R::kThreads};
#pragma unroll 1
  for (;;) {
    if (!share.empty()) {
      const R ring(shared_address(storage), a, share.slot, kv_head,
                   kFused && share.position == share.end - 1 ? share.position : share.end, warp, lane);
#pragma unroll 1
      for (int i = 0, at = share.begin + warp * kTile; i < R::kStages - 1; ++i, at += kStep) {
        if (at < share.end) ring.fetch(i, at);
        copy_async_commit();
      }
      if constexpr (kFused) raw.read_angles(head_args, share.position);
    }
    if (!kFused || (share.slot == slot && share.position == position)) break;
    copy_async_wait<0>();
    __syncwarp();
    share = Share::of<kCluster, true>(a, row, slot, position, most_clusters);
  }
  bf16* const out = static_cast<bf16*>(a.out) + (row * a.heads + first_head) * D;
  const Plan plan = share.plan;
  if (share.empty()) {
    if (plan.length == 0 && part == 0)
      for (int i = threadIdx.x; i < heads * D; i += R::kThreads) out[i] = from_float<bf16>(0.0f);
    return;
  }
  const int begin = share.begin, end = share.end;
  const bool newest = kFused && position == end - 1;  // its key and value are not in the cache yet
  const R ring(shared_address(storage), a, slot, kv_head, newest ? position : end, warp, lane);
  int p = begin + warp * kTile;
  // Not before the last tile is asked for: the next kernel's weights would go first.
  if (p + (R::kStages - 1) * kStep >= end) dependency_release();
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
  const int ranks = min(kCluster, parts - (part - rank));  // blocks with work in this cluster
  const MergeSpace<D, kBytes> space{storage};
  const auto finish = [&](int h, int d, const Triple& t) {
    if (clusters > 1) {
      const Partials partials(a, row, first_head + h, gridDim.x / kCluster);
      *reinterpret_cast<float4*>(partials.outputs + static_cast<int64_t>(part / kCluster) * D + d) = t.o;
      if (d == 0) partials.statistics[part / kCluster] = {t.m, t.l};
    } else {
      const float inverse = t.l == 0.0f ? 0.0f : __fdividef(1.0f, t.l);
      *reinterpret_cast<uint2*>(out + h * D + d) = {pack2<bf16>(__fmul_rn(t.o.x, inverse), __fmul_rn(t.o.y, inverse)),
                                                    pack2<bf16>(__fmul_rn(t.o.z, inverse), __fmul_rn(t.o.w, inverse))};
    }
  };
  Accumulator<D, kBytes> sum;
#pragma unroll 1
  for (int stage = 0; p < end; p += kStep, stage = stage + 1 == R::kStages ? 0 : stage + 1) {
    copy_async_wait<R::kStages - 2>();
    __syncwarp();  // this tile has arrived for every lane, and every lane is done with the one before
    const int far = p + (R::kStages - 1) * kStep;
    if (far < end) {
      ring.fetch(stage == 0 ? R::kStages - 1 : stage - 1, far);
    } else {
      dependency_release();
    }
    copy_async_commit();
    if constexpr (kFused) {
      if (newest && position >= p && position < p + kTile) ring.insert(stage, position - p, &prepared.key_value[0][0]);
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
  if (ranks > 1) cluster_arrive();  // what was read from this warp's ring has been used
  __syncthreads();

  // Quads of the output, (head, d .. d + 3); a thread keeps its own throughout.
  Triple merged[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    const int i = threadIdx.x + r * R::kThreads, h = i / kQuads, d = i % kQuads * 4;
    if (h >= heads) break;
    merged[r] = merge<R::kWarps>(
        R::kWarps, [&](int w) { return space.statistics(w)[h]; },
        [&](int w) { return *reinterpret_cast<const float4*>(space.output(w, h) + d); });
    if (ranks == 1) finish(h, d, merged[r]);
  }
  if (ranks > 1) {
    if (rank == 0 && threadIdx.x == 0) cluster_expect(&received, ranks * heads * (D * 4 + 8));
    cluster_wait();
    const uint32_t barrier = cluster_address(&received, 0);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int i = threadIdx.x + r * R::kThreads, h = i / kQuads, d = i % kQuads * 4;
      if (h >= heads) break;
      cluster_store(cluster_address(space.part(rank, h) + d, 0), merged[r].o, barrier);
      if (d == 0)
        cluster_store(cluster_address(space.part_statistics(rank) + h, 0), float2{merged[r].m, merged[r].l}, barrier);
    }
    if (rank != 0) return;
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
  merge_splits<R::kThreads>(a, row, first_head, heads, clusters, gridDim.x / kCluster,
                            reinterpret_cast<float*>(storage));
}

// ---- launcher ----

using Kernel = void (*)(AttentionArgs, HeadArgs, int64_t, int, int);

struct Choice {
  Kernel kernel;
  int bytes;  // of shared memory
};

// The result is the same whatever is chosen.
template <int D, bool kFused>
Choice choose(const AttentionArgs& a) {
  if constexpr (!kFused) {
    if (has_options(a)) return {attention_decode_kernel<D, kBeside, true, false>, kBeside};
  } else {
    if (a.rows > 1) return {attention_decode_kernel<D, kManyBlocks, false, true>, kManyBlocks};
  }
  const bool room = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= kLongRows + 4096;
  if (a.capacity > kLongCapacity && room) return {attention_decode_kernel<D, kLongRows, false, kFused>, kLongRows};
  return {attention_decode_kernel<D, kBeside, false, kFused>, kBeside};
}

template <int D, bool kFused>
void launch_decode(const AttentionArgs& a, const HeadArgs& head_args, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] { return describe(kFused ? "rope_attention" : "attention", a); };
  const int groups = ceil_div(a.heads / a.kv_heads, kHeads), per_row = a.kv_heads * groups;
  const auto [kernel, bytes] = choose<D, kFused>(a);
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, kernel), "attention: cudaFuncGetAttributes");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "attention: cudaFuncSetAttribute");
  const int cluster = compiled.ptxVersion >= 90 ? kClusterBlocks : 1;
  const int most_clusters = static_cast<int>(
      std::bit_floor(static_cast<unsigned>(std::clamp(kBlocksPerRow / (cluster * per_row), 1, kMaxSplits))));
  const int wanted = ceil_div(a.capacity, cluster * kPartPositions);
  const int clusters = std::min(most_clusters, static_cast<int>(std::bit_ceil(static_cast<unsigned>(wanted))));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kWarpsOf<D> * kWarp);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (launch.programmatic ? 1 : 0);
  for_row_chunks(a, per_row, [&](int64_t first, int64_t rows) {
    config.gridDim = dim3(cluster * clusters, per_row, static_cast<unsigned>(rows));
    check(cudaLaunchKernelEx(&config, kernel, a, head_args, first, groups, most_clusters), what());
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
