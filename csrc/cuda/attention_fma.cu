// Attention in plain fp32 arithmetic, for fp32 models and for any head_dim of at most 256. One kernel serves both
// phases: a block takes up to 32 query vectors, eight a warp, that share a KV head. In prefill they are consecutive
// rows of one head; in decode the heads of one row over one split of the positions.
#include "attention.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kWarps{4};
constexpr int kThreads{kWarps * kWarp};
constexpr int kVectors{8};  // query vectors a warp
constexpr int kBlock{kWarps * kVectors};
constexpr int kColumns{kWarp};  // positions of a tile: one a lane in the products with q
constexpr int kPad{4};          // keeps the 16-byte reads of eight lanes off each other's banks

__host__ __device__ constexpr int padded(int head_dim) { return head_dim + kPad; }

size_t shared_bytes(int head_dim) {
  return sizeof(float) * (padded(head_dim) * (2 * kColumns + kBlock) + kWarps * kColumns * kVectors);
}

static_assert(kColumns <= kPage);  // a tile, which may start anywhere, is on two pages at most

// The pages of a tile: of its first position, and from position `turn` on.
struct TilePages {
  int low, high, turn;

  __device__ __forceinline__ TilePages(const PagedCache& cache, int slot, int first, int end) {
    const int last = min(first + kColumns, end) - 1;
    low = page_of(cache, slot, first);
    high = page_of(cache, slot, last);
    turn = last / kPage * kPage;
  }
};

// A tile's rows of head_dim values into padded fp32 rows, zeros from `end` on.
template <class T>
__device__ __forceinline__ void fetch(float* target, const void* pool, const float* scales, const PagedCache& cache,
                                      const TilePages& pages, int kv_head, int first, int end) {
  constexpr bool kInt8{std::is_same_v<T, int8_t>};
  constexpr int kV{kInt8 ? 8 : kWide<T>};
  const int head_dim = cache.head_dim, chunks = head_dim / kV;
  for (int i = threadIdx.x; i < kColumns * chunks; i += kThreads) {
    const int row = i / chunks, d = i % chunks * kV;
    float x[kV] = {};
    const int p = first + row;
    if (p < end) {
      const int64_t at = scale_row(cache, p < pages.turn ? pages.low : pages.high, kv_head, p);
      const T* const from = static_cast<const T*>(pool) + at * head_dim + d;
      if constexpr (kInt8) {
#pragma unroll
        for (int e = 0; e < kV; ++e) x[e] = __fmul_rn(static_cast<float>(from[e]), scales[at]);
      } else {
        load(from, x);
      }
    }
#pragma unroll
    for (int e = 0; e < kV; ++e) target[row * padded(head_dim) + d + e] = x[e];
  }
}

// Grid: decode (splits, kv_heads * head groups, rows), prefill (1, heads, tiles of rows). kDims * 32 >= head_dim.
template <class T, int kDims, bool kDecode>
__global__ void __launch_bounds__(kThreads)
    attention_fma_kernel(AttentionArgs a, int64_t first_row, int groups, int splits) {
  extern __shared__ __align__(16) float storage[];
  dependency_wait();
  dependency_release();
  const int D = a.cache.head_dim, per_kv = a.heads / a.cache.kv_heads;
  float* const keys = storage;
  float* const values = keys + kColumns * padded(D);
  float* const queries = values + kColumns * padded(D);
  float* const weights = queries + kBlock * padded(D);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  // Vector i is head first_head + i of `row` (decode) or head first_head of row + i (prefill).
  const int kv_head = kDecode ? blockIdx.y / groups : blockIdx.y / per_kv;
  const int in_group = kDecode ? blockIdx.y % groups * kBlock : 0;
  const int first_head = kDecode ? kv_head * per_kv + in_group : blockIdx.y;
  const RowTile tile = kDecode ? RowTile{} : row_tile<kBlock>(a, blockIdx.z);
  const int64_t row = kDecode ? first_row + blockIdx.z : tile.first;
  const int count = kDecode ? min(kBlock, per_kv - in_group) : tile.end - tile.first;
  if (count <= 0) return;
  const auto row_of = [&](int i) { return kDecode ? row : row + i; };
  const auto head_of = [&](int i) { return kDecode ? first_head + i : first_head; };

  Interval block = attended(a, row);
  Splits plan{0, 1};
  if constexpr (kDecode) {
    plan = splits_of(block);
    if (static_cast<int>(blockIdx.x) >= max(plan.count, 1)) return;
    block.first += blockIdx.x * plan.span;
    block.end = min(block.end, block.first + plan.span);
  } else {
    for (int i = 1; i < count; ++i) {  // the union; an empty interval adds nothing
      const Interval next = attended(a, row + i);
      if (next.first >= next.end) continue;
      block = block.first >= block.end ? next : Interval{min(block.first, next.first), max(block.end, next.end)};
    }
    if (block.first >= block.end) block.end = 0;  // nothing is read: of an int8 cache it may not have been unpacked
    block.first = block.first / kColumns * kColumns;
  }
  for (int i = threadIdx.x; i < kBlock * D; i += kThreads) {
    const int n = i / D, d = i % D;
    queries[n * padded(D) + d] =
        n < count ? load_as_float(a.q, row_of(n) * a.q_stride + head_of(n) * D + d, a.type) : 0.0f;
  }

  Interval range[kVectors];
  int position[kVectors];
  float o[kVectors][kDims] = {}, m[kVectors], l[kVectors] = {};
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = warp * kVectors + n;
    m[n] = -INFINITY;
    range[n] = i < count ? (kDecode ? block : attended(a, row_of(i))) : Interval{0, 0};
    position[n] = i < count ? a.cache.positions[row_of(i)] : 0;
  }
  const int slot = max(a.cache.slots[row], 0);
  float* const p = weights + warp * kColumns * kVectors;  // (column, vector)

  for (int first = block.first; first < block.end; first += kColumns) {
    const TilePages pages(a.cache, slot, first, block.end);
    __syncthreads();
    fetch<T>(keys, a.cache.k, a.cache.k_scales, a.cache, pages, kv_head, first, block.end);
    fetch<T>(values, a.cache.v, a.cache.v_scales, a.cache, pages, kv_head, first, block.end);
    __syncthreads();
    if (warp * kVectors >= count) continue;
    float s[kVectors] = {};
    for (int d = 0; d < D; d += 4) {
      const float4 key = *reinterpret_cast<const float4*>(keys + lane * padded(D) + d);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        const float4 q = *reinterpret_cast<const float4*>(queries + (warp * kVectors + n) * padded(D) + d);
        s[n] += q.x * key.x + q.y * key.y + q.z * key.z + q.w * key.w;
      }
    }
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int i = warp * kVectors + n, at = first + lane;
      const bool seen = at >= range[n].first && at < range[n].end;
      s[n] = seen ? score<true>(a, s[n], row_of(i), position[n], head_of(i), at) : -INFINITY;
      const float highest = fmaxf(m[n], warp_max(s[n])), factor = weight_of(m[n], highest);
      const float weight = weight_of(s[n], highest);
      m[n] = highest;
      l[n] = l[n] * factor + warp_sum(weight);
      p[lane * kVectors + n] = weight;
#pragma unroll
      for (int e = 0; e < kDims; ++e) o[n][e] *= factor;
    }
    __syncwarp();
    for (int column = 0; column < kColumns; ++column) {
      float x[kDims];
#pragma unroll
      for (int e = 0; e < kDims; ++e)
        x[e] = lane + kWarp * e < D ? values[column * padded(D) + lane + kWarp * e] : 0.0f;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        const float weight = p[column * kVectors + n];
#pragma unroll
        for (int e = 0; e < kDims; ++e) o[n][e] += weight * x[e];
      }
    }
    __syncwarp();
  }

#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    const int i = warp * kVectors + n;
    if (i >= count) break;
    const float inverse = l[n] == 0.0f ? 0.0f : 1.0f / l[n];
#pragma unroll
    for (int e = 0; e < kDims; ++e) {
      const int d = lane + kWarp * e;
      if (d >= D) break;
      if (plan.count <= 1) {
        store_from_float(a.out, (row_of(i) * a.heads + head_of(i)) * D + d, a.type, o[n][e] * inverse);
      } else {
        Partials(a, gridDim.z, blockIdx.z, head_of(i), splits).outputs[static_cast<int64_t>(blockIdx.x) * D + d] =
            o[n][e];
      }
    }
    if (plan.count > 1 && lane == 0)
      Partials(a, gridDim.z, blockIdx.z, head_of(i), splits).statistics[blockIdx.x] = {m[n], l[n]};
  }
  if constexpr (kDecode) {
    if (plan.count <= 1) return;
    if (!arrives_last(static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y), plan.count)) return;
    merge_splits<kThreads>(a, row, first_head, count, plan.count, splits, storage);
  }
}

template <class T, bool kDecode>
auto* kernel(int head_dim) {
  if (head_dim <= 32) return attention_fma_kernel<T, 1, kDecode>;
  if (head_dim <= 64) return attention_fma_kernel<T, 2, kDecode>;
  if (head_dim <= 128) return attention_fma_kernel<T, 4, kDecode>;
  return attention_fma_kernel<T, 8, kDecode>;
}

template <bool kDecode>
auto* kernel_of(const AttentionArgs& a) {
  if (a.cache.head_dim % 8 != 0 || a.cache.head_dim > 256 || a.cache.head_dim < 8)
    throw std::invalid_argument(describe("attention", a) + ": head_dim is a multiple of 8 up to 256");
  if constexpr (kDecode)
    if (a.cache.dtype == DType::i8) return kernel<int8_t, kDecode>(a.cache.head_dim);
  return a.cache.dtype == DType::f32 ? kernel<float, kDecode>(a.cache.head_dim)
                                     : kernel<bf16, kDecode>(a.cache.head_dim);
}

int groups_of(const AttentionArgs& a) { return ceil_div(a.heads / a.cache.kv_heads, kBlock); }

RowChunks chunks_of(const AttentionArgs& a) {
  return RowChunks::of(a, max_splits(a.cache.capacity()), a.cache.kv_heads * groups_of(a));
}

}  // namespace

int64_t attention_workspace_fma(const AttentionArgs& a) { return chunks_of(a).bytes; }

void attention_decode_fma(const AttentionArgs& a, const Launch& launch) {
  const int groups = groups_of(a), splits = max_splits(a.cache.capacity());
  // The merge keeps the weights of up to 32 heads where the tiles were.
  const size_t shared = std::max(shared_bytes(a.cache.head_dim), sizeof(float) * kBlock * kMaxSplits);
  chunks_of(a).each(a, [&](int64_t first, int64_t rows) {
    launch_kernel(
        launch, [&] { return describe("attention", a); }, kernel_of<true>(a),
        dim3(splits, a.cache.kv_heads * groups, static_cast<unsigned>(rows)), dim3(kThreads), shared, a, first, groups,
        splits);
  });
}

void attention_prefill_fma(const AttentionArgs& a, const Launch& launch) {
  const int tiles = a.tile_count * (kPrefillTile / kBlock);
  if (tiles > 65535) throw std::invalid_argument(describe("attention prefill", a) + ": too many tiles in one call");
  launch_kernel(
      launch, [&] { return describe("attention prefill", a); }, kernel_of<false>(a),
      dim3(1, a.heads, static_cast<unsigned>(tiles)), dim3(kThreads), shared_bytes(a.cache.head_dim), a, int64_t{0}, 1,
      1);
}

}  // namespace nibblelm::cuda
