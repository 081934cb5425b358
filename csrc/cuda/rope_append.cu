// rope_append: norms of the heads, rotary embedding of q and k, and the KV write in one kernel. A decode step has few
// rows, and every kernel it does without saves about a microsecond a layer.
#include "norm.cuh"
#include "paged_cache.cuh"
#include "rope.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kWarps{4};
constexpr int kMaxHeadDim{256};
constexpr unsigned kFewRows{16};

// Lets the next kernel start, waits for the one before, and meanwhile asks L2 for the row's angles and its place in the
// page table, which a layer's weights have driven out. Where the row stands may change until the wait: then the guess
// was in vain. Of many rows, the next kernel's blocks would only be in the way.
__device__ __forceinline__ void begin(const RopeTable& t, const PagedCache& c, int row, int lane) {
  constexpr int kLine{128 / sizeof(float)};
  const bool few = gridDim.x <= kFewRows;
  if (few) {
    dependency_release();
    const int slot = __ldcg(c.slots + row), position = __ldcg(c.positions + row), angle = __ldcg(t.positions + row);
    if (slot >= 0 && slot < c.slot_count && position >= 0 && position < c.capacity())
      prefetch_l2(table_entry(c, slot, position));
    if (const int i = lane * kLine; i < t.half && angle >= 0 && angle < t.entries) {
      prefetch_l2(t.cos + static_cast<int64_t>(angle) * t.half + i);
      prefetch_l2(t.sin + static_cast<int64_t>(angle) * t.half + i);
    }
  }
  dependency_wait();
  if (!few) dependency_release();
}

// LayerNorm of a head of d_count values, into `values`, by a warp whose lanes are blockDim.x.
template <class T>
__device__ __forceinline__ void centre_head(const T* x, int d_count, const float* gain, const float* bias, float eps,
                                            float* values) {
  constexpr int V{kWide<T>}, kHeld{kMaxHeadDim / (V * kWarp)}, kSteps{kHeld * kWarp / kNormLanes};
  __shared__ float scratch[kWarps][2][kSteps];
  const auto first = [](int i) { return (i * kWarp + static_cast<int>(threadIdx.x)) * V; };
  float v[kHeld][V]{};
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    if (first(i) < d_count) load(x + first(i), v[i]);
  float (&own)[2][kSteps] = scratch[threadIdx.y];
  const RowStatistics s = statistics<true>(v, d_count, eps, own[0], own[1]);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int d = first(i);
    if (d >= d_count) continue;
    float normed[V];
    norm_values(v[i], s, gain + d, bias == nullptr ? nullptr : bias + d, false, normed);
#pragma unroll
    for (int j = 0; j < V; ++j) values[d + j] = to_float(from_float<T>(normed[j]));
  }
}

// One warp takes one head of one row. Values are rounded to T between norm and rotation, as the separate ops do.
template <class T, bool kCentred>
__global__ void rope_append_kernel(T* qkv, int64_t stride, int rows, int heads, RopeTable table, PagedCache cache,
                                   HeadNorms norms) {
  __shared__ float buffer[kWarps][kMaxHeadDim];
  const int row = blockIdx.x, warp = threadIdx.y, lane = threadIdx.x;
  begin(table, cache, row, lane);
  const int head = blockIdx.y * kWarps + warp, d_count = cache.head_dim;
  if (head >= heads + 2 * cache.kv_heads) return;
  T* const x = qkv + row * stride + static_cast<int64_t>(head) * d_count;
  const bool is_q = head < heads, is_v = head >= heads + cache.kv_heads;
  const int kv_head = is_v ? head - heads - cache.kv_heads : head - heads;
  const int64_t target = is_q ? 0 : written_row(cache, cache.slots[row], cache.positions[row], kv_head);
  if (target < 0) return;
  if (is_v) {
    store_row(cache, true, target, [&](int d) { return to_float(x[d]); });
    return;
  }

  float* const values = buffer[warp];
  const float* const gain = is_q ? norms.q : norms.k;
  if constexpr (kCentred) {
    const int own = norms.per_head ? (is_q ? head : kv_head) * d_count : 0;
    centre_head(x, d_count, gain + own, is_q ? norms.q_bias : norms.k_bias, norms.eps, values);
  } else {
    float squares = 0.0f;
    for (int d = lane; d < d_count; d += kWarp) {
      values[d] = to_float(x[d]);
      squares = __fmaf_rn(values[d], values[d], squares);
    }
    if (gain != nullptr) {
      const float factor = head_norm_factor(squares, d_count, norms.eps);
      for (int d = lane; d < d_count; d += kWarp)
        values[d] = head_normed<T>(values[d], factor, gain[d], norms.plus_one);
    }
  }
  __syncwarp();
  for (int i = lane; i < table.half * table.streams; i += kWarp) {
    const RopePair pair = rope_pair(table, i, row, rows, d_count);
    const float2 rotated = rotate(values[pair.first], values[pair.second], pair.cos, pair.sin);
    values[pair.first] = rotated.x;
    values[pair.second] = rotated.y;
  }
  __syncwarp();
  if (!is_q) return store_row(cache, false, target, [&](int d) { return to_float(from_float<T>(values[d])); });
  for (int d = lane; d < d_count; d += kWarp) x[d] = from_float<T>(values[d]);
}

// The same for bf16 without norms, all of a head rotated in halves: a lane takes two neighbours of each half. In int8 a
// head has at most 128 values: a lane has all of its share in registers.
template <bool kInt8>
__global__ void __launch_bounds__(kWarps* kWarp)
    rope_append_halves_kernel(bf16* qkv, int64_t stride, int heads, RopeTable table, PagedCache cache) {
  const int row = blockIdx.x, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, half = table.half;
  begin(table, cache, row, lane);
  const int slot = cache.slots[row], position = cache.positions[row];
  const int64_t entry = static_cast<int64_t>(table.positions[row]) * half;
#pragma unroll 4
  for (int head = blockIdx.y * kWarps + warp; head < heads + 2 * cache.kv_heads; head += gridDim.y * kWarps) {
    bf16* const x = qkv + row * stride + static_cast<int64_t>(head) * 2 * half;
    const bool is_q = head < heads, is_v = head >= heads + cache.kv_heads;
    bf16* to = x;
    int64_t target{0};
    if (!is_q) {
      const int kv_head = is_v ? head - heads - cache.kv_heads : head - heads;
      target = written_row(cache, slot, position, kv_head);
      if (target < 0) continue;
      if constexpr (!kInt8) to = static_cast<bf16*>(is_v ? cache.v : cache.k) + target * 2 * half;
    }
    __nv_bfloat162 first{}, second{};
    for (int d = 2 * lane; d < half; d += 2 * kWarp) {
      first = *reinterpret_cast<const __nv_bfloat162*>(x + d);
      second = *reinterpret_cast<const __nv_bfloat162*>(x + half + d);
      if (!is_v) {
        const float2 cos = *reinterpret_cast<const float2*>(table.cos + entry + d);
        const float2 sin = *reinterpret_cast<const float2*>(table.sin + entry + d);
        const float2 a = rotate(to_float(first.x), to_float(second.x), cos.x, sin.x);
        const float2 b = rotate(to_float(first.y), to_float(second.y), cos.y, sin.y);
        first = {from_float<bf16>(a.x), from_float<bf16>(b.x)};
        second = {from_float<bf16>(a.y), from_float<bf16>(b.y)};
      }
      if (kInt8 && !is_q) break;
      *reinterpret_cast<__nv_bfloat162*>(to + d) = first;
      *reinterpret_cast<__nv_bfloat162*>(to + half + d) = second;
    }
    if constexpr (kInt8) {
      if (is_q) continue;
      const float values[4]{to_float(first.x), to_float(first.y), to_float(second.x), to_float(second.y)};
      unsigned top{0};
#pragma unroll
      for (int i = 0; i < 4; ++i) top = max(top, magnitude_bits(values[i]));
      const Int8Scale scale(__reduce_max_sync(kAllLanes, top));
      int8_t* const codes = static_cast<int8_t*>(is_v ? cache.v : cache.k) + target * 2 * half + 2 * lane;
      if (2 * lane < half) {
        *reinterpret_cast<char2*>(codes) = {scale.code(values[0]), scale.code(values[1])};
        *reinterpret_cast<char2*>(codes + half) = {scale.code(values[2]), scale.code(values[3])};
      }
      if (lane == 0) (is_v ? cache.v_scales : cache.k_scales)[target] = scale.scale;
    }
  }
}

bool rotates_halves(const void* qkv, int64_t stride, const RopeTable& t, const PagedCache& c, const HeadNorms& norms,
                    DType dtype) {
  const bool cached = c.dtype == DType::bf16 || (c.dtype == DType::i8 && t.half <= 2 * kWarp);
  return dtype == DType::bf16 && cached && norms.q == nullptr && norms.k == nullptr && t.streams == 1 &&
         !t.interleaved && 2 * t.half == c.head_dim && t.half % 2 == 0 && stride % 2 == 0 && aligned16(qkv, 0);
}

}  // namespace

void rope_append(void* qkv, int64_t stride, int64_t rows, int heads, const RopeTable& table, const PagedCache& cache,
                 const HeadNorms& norms, DType dtype, const Launch& launch) {
  if (rows == 0) return;
  const auto what = [&] {
    return "rope_append rows=" + std::to_string(rows) + " heads=" + std::to_string(heads) + "+2*" +
           std::to_string(cache.kv_heads) + " head_dim=" + std::to_string(cache.head_dim) + " " + name(dtype);
  };
  if (cache.head_dim > kMaxHeadDim) throw std::invalid_argument(what() + ": head_dim is at most 256");
  if (rotates_halves(qkv, stride, table, cache, norms, dtype)) {
    // of a prompt, several heads a warp: what a row's entries say is read once
    const int blocks = ceil_div(heads + 2 * cache.kv_heads, kWarps), shared_by = rows < 256 ? 1 : 4;
    launch_kernel(launch, what,
                  cache.dtype == DType::i8 ? rope_append_halves_kernel<true> : rope_append_halves_kernel<false>,
                  dim3(static_cast<unsigned>(rows), ceil_div(blocks, shared_by)), dim3(kWarps * kWarp), 0,
                  static_cast<bf16*>(qkv), stride, heads, table, cache);
    return;
  }
  with_activation(dtype, "rope_append", [&]<class T>() {
    if (norms.centred && (norms.q == nullptr || norms.k == nullptr || cache.head_dim % 8 != 0 ||
                          !aligned16(qkv, stride * sizeof(T)) || !aligned16(norms.q, 0) || !aligned16(norms.k, 0) ||
                          !aligned16(norms.q_bias, 0) || !aligned16(norms.k_bias, 0)))
      throw std::invalid_argument(what() + ": LayerNorm needs gains, on 16 bytes as qkv, and a head_dim of 8 n");
    const dim3 grid(static_cast<unsigned>(rows), ceil_div(heads + 2 * cache.kv_heads, kWarps));
    launch_kernel(launch, what, norms.centred ? rope_append_kernel<T, true> : rope_append_kernel<T, false>, grid,
                  dim3(kWarp, kWarps), 0, static_cast<T*>(qkv), stride, static_cast<int>(rows), heads, table, cache,
                  norms);
  });
}

}  // namespace nibblelm::cuda
