// What the attention kernels share: which positions a row sees, its scores, its splits, and how splits are merged.
#pragma once

#include <algorithm>

#include "attention.h"
#include "paged_cache.cuh"
#include "vector.cuh"

namespace nibblelm::cuda {

constexpr float kLog2e{1.4426950408889634f};  // scores are kept times log2(e), so that 2^x serves
constexpr int kMinSpan{256};                  // positions of the shortest split: one wave of blocks at 8k on the H200
constexpr int kMaxSplits{128};
constexpr int kMaxArrivals{1 << 16};
constexpr int64_t kMaxWorkspace{128 << 20};  // bytes; rows that would need more take several launches

// Positions [first, end).
struct Interval {
  int first;
  int end;
};

// Without prefix, starts and mask.
__device__ __forceinline__ Interval attended_plain(const AttentionArgs& a, int slot, int position) {
  if (slot < 0 || slot >= a.cache.slot_count) return {0, 0};
  const int end = max(0, min(position + 1, a.cache.capacity()));
  return {a.window > 0 ? min(max(0, position + 1 - a.window), end) : 0, end};
}

__device__ __forceinline__ Interval attended(const AttentionArgs& a, int64_t row, int slot, int position) {
  if (slot < 0 || slot >= a.cache.slot_count) return {0, 0};
  int end = position + 1, first = 0;
  if (a.prefix != nullptr) end = max(end, a.prefix[row]);
  end = min(end, a.cache.capacity());
  if (a.mask != nullptr) end = min(end, a.mask_columns);
  if (a.window > 0) first = max(0, position + 1 - a.window);
  if (a.starts != nullptr) first = max(first, a.starts[slot]);
  return {min(first, max(end, 0)), max(end, 0)};
}

__device__ __forceinline__ Interval attended(const AttentionArgs& a, int64_t row) {
  return attended(a, row, a.cache.slots[row], a.cache.positions[row]);
}

// Rows [first, end) of prompts.
struct RowTile {
  int first;
  int end;
};

// Number `index` of the tiles of at most kRows rows, into which a.tiles are cut. May be empty.
template <int kRows>
__device__ __forceinline__ RowTile row_tile(const AttentionArgs& a, int index) {
  static_assert(kPrefillTile % kRows == 0);
  const int32_t* const tile = a.tiles + 2 * (index / (kPrefillTile / kRows));
  const int first = tile[0] + index % (kPrefillTile / kRows) * kRows;
  return {first, min(first + kRows, tile[0] + tile[1])};
}

// 16 bytes to shared memory by cp.async, zeros where they are not wanted.
__device__ __forceinline__ void copy_or_zero(uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void copy_or_zero_4(uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(wanted ? 4 : 0)
               : "memory");
}

// The score of q . k = `dot` at position p, times log2(e). Without options only the scale is applied. kQuick: for
// results of bf16, a soft-cap to within 3e-7 of it and without tanhf's branches, which a warp alone would wait for.
template <bool kOptions, bool kQuick = false>
__device__ __forceinline__ float score(const AttentionArgs& a, float dot, int64_t row, int position, int head, int p) {
  if constexpr (!kOptions) return __fmul_rn(dot, a.scale * kLog2e);  // the same bits wherever it is inlined
  float s = dot * a.scale;
  if (a.softcap > 0.0f) s = __fmul_rn(a.softcap, kQuick ? tanh_fast(__fdividef(s, a.softcap)) : tanhf(s / a.softcap));
  if (a.slopes != nullptr) s += a.slopes[head] * static_cast<float>(p - position);
  if (a.mask != nullptr) s += a.mask[row * a.mask_stride + p];
  return s * kLog2e;
}

// 2^(x - m), 0 where nothing has been seen (m = -inf).
__device__ __forceinline__ float weight_of(float x, float m) { return m == -INFINITY ? 0.0f : exp2_fast(x - m); }

// Head sizes that prompts take on tensor cores: 64, 128 and 256 by kernels of their own, others by those for as many
// columns as come next.
__host__ __device__ inline bool has_tiled_head(const PagedCache& cache) {
  return cache.head_dim % 8 == 0 && cache.head_dim >= 64 && cache.head_dim <= 256;
}
template <class Call>
void with_tiled_head(const PagedCache& cache, Call call) {
  const int d = cache.head_dim;
  if (d == 64) return call.template operator()<64, true>();
  if (d == 128) return call.template operator()<128, true>();
  if (d == 256) return call.template operator()<256, true>();
  d < 128 ? call.template operator()<128, false>() : call.template operator()<256, false>();
}

// ---- splits: a function of the row's own interval alone, so batching cannot change a result ----

struct Splits {
  int span;   // positions a split: kMinSpan times a power of two
  int count;  // at most kMaxSplits
};

__device__ __forceinline__ Splits splits_of(Interval range) {
  const int length = range.end - range.first;
  int span = kMinSpan;
  while (length > span * kMaxSplits) span *= 2;
  return {span, (length + span - 1) / span};
}

inline int max_splits(int64_t capacity) { return std::min(kMaxSplits, ceil_div(capacity, kMinSpan)); }

// Workspace of a launch of `rows` rows: outputs (rows, heads, splits, head_dim), then (maximum, sum) pairs
// (rows, heads, splits).
struct Partials {
  float* outputs;
  float2* statistics;

  __device__ Partials(const AttentionArgs& a, int rows, int row, int head, int splits) {
    const int64_t first = (static_cast<int64_t>(row) * a.heads + head) * splits;
    const int64_t all = static_cast<int64_t>(rows) * a.heads * splits;
    outputs = a.workspace + first * a.cache.head_dim;
    statistics = reinterpret_cast<float2*>(a.workspace + all * a.cache.head_dim) + first;
  }
};

// Zero between launches: the last block of a (row, head group) puts back what the others counted.
static __device__ unsigned attention_arrivals[kMaxArrivals];

// Called by every block of a (row, head group) after it stored its partials; true in the one that arrives last, which
// then sees all of them: the barrier makes one atomic release what all threads stored, and the other one's acquire hold
// for all (two fences of every thread took 0.2 us more).
__device__ __forceinline__ bool arrives_last(int index, int count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(attention_arrivals + index)
                 : "memory");
    last = before == static_cast<unsigned>(count) - 1;
    if (last) attention_arrivals[index] = 0;
  }
  __syncthreads();
  return last;
}

// Merges the partial triples (maximum, sum, output) of `heads` heads in the order of their splits and writes out.
// `weights` is shared memory of heads * kMaxSplits floats.
template <int kThreads>
__device__ __forceinline__ void merge_splits(const AttentionArgs& a, int64_t row, int first_head, int heads, int count,
                                             int max_splits, float* weights) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int h = warp; h < heads; h += kThreads / kWarp) {
    const Partials partials(a, gridDim.z, blockIdx.z, first_head + h, max_splits);
    float m = -INFINITY, sum = 0.0f;
    for (int s = lane; s < count; s += kWarp) m = fmaxf(m, partials.statistics[s].x);
    m = warp_max(m);
    for (int s = lane; s < count; s += kWarp)
      sum = __fmaf_rn(weight_of(partials.statistics[s].x, m), partials.statistics[s].y, sum);
    sum = warp_sum(sum);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int s = lane; s < count; s += kWarp)
      weights[h * kMaxSplits + s] = weight_of(partials.statistics[s].x, m) * inverse;
  }
  __syncthreads();
  const int quads = a.cache.head_dim / 4;
  for (int i = threadIdx.x; i < heads * quads; i += kThreads) {
    const int h = i / quads, d = i % quads * 4;
    const float* const outputs = Partials(a, gridDim.z, blockIdx.z, first_head + h, max_splits).outputs + d;
    float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 16
    for (int s = 0; s < count; ++s) {
      const float w = weights[h * kMaxSplits + s];
      const float4 o = *reinterpret_cast<const float4*>(outputs + static_cast<int64_t>(s) * a.cache.head_dim);
      sum = {__fmaf_rn(w, o.x, sum.x), __fmaf_rn(w, o.y, sum.y), __fmaf_rn(w, o.z, sum.z), __fmaf_rn(w, o.w, sum.w)};
    }
    const int64_t target = (row * a.heads + first_head + h) * a.cache.head_dim + d;
    store_from_float(a.out, target, a.type, sum.x);
    store_from_float(a.out, target + 1, a.type, sum.y);
    store_from_float(a.out, target + 2, a.type, sum.z);
    store_from_float(a.out, target + 3, a.type, sum.w);
  }
}

inline std::string describe(const char* op, const AttentionArgs& a) {
  return std::string(op) + " rows=" + std::to_string(a.rows) + " heads=" + std::to_string(a.heads) + "/" +
         std::to_string(a.cache.kv_heads) + " head_dim=" + std::to_string(a.cache.head_dim) +
         " capacity=" + std::to_string(a.cache.capacity()) + " " + name(a.type) + " cache " + name(a.cache.dtype);
}

__host__ __device__ inline bool has_options(const AttentionArgs& a) {
  return a.softcap > 0.0f || a.slopes != nullptr || a.mask != nullptr;
}

// How decode rows are divided among launches, so that the arrival counters and the workspace suffice.
struct RowChunks {
  int64_t rows;   // of a launch
  int64_t bytes;  // of its workspace

  // `splits`: partial results of a head that the workspace has room for; groups_per_row: arrival counters of a row, and
  // of the launch.
  static RowChunks of(const AttentionArgs& a, int splits, int groups_per_row) {
    const int64_t bytes = static_cast<int64_t>(a.heads) * splits * (a.cache.head_dim + 2) * sizeof(float);
    const int64_t most = std::min<int64_t>({65535, kMaxArrivals / groups_per_row - 1, kMaxWorkspace / bytes, a.rows});
    return {std::max<int64_t>(1, most), std::max<int64_t>(1, most) * bytes};
  }
  // Calls run(first_row, rows).
  template <class F>
  void each(const AttentionArgs& a, F&& run) const {
    for (int64_t first = 0; first < a.rows; first += rows) run(first, std::min(rows, a.rows - first));
  }
};

}  // namespace nibblelm::cuda
