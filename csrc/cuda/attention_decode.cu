// Split-KV decode attention on tensor cores for bf16 (Dao et al. 2023, "Flash-Decoding").
//
// The heads of one KV head are the eight columns of mma.m16n8k16 and positions its rows: scores are K q, the output is
// V^T p, and both operands come from row-major tiles by ldmatrix. Each warp brings its own tiles by cp.async, several
// ahead, and waits for no other warp before the end.
#include "attention.cuh"
#include "mma.cuh"
#include "rope.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kHeads{8};  // columns of the mma
constexpr int kTile{16};  // positions a warp takes at a time

// A warp's tiles of 16 positions, keys then values, in shared memory. Rows are split into chunks of 16 bytes whose
// place is exclusive-ored with the row, so that neither copies nor ldmatrix meet bank conflicts, and a copy takes whole
// 128-byte lines. (Each lane copying its own operands, 64 bytes of a row at a time, was held at 3.0 TB/s by L2.)
template <int D>
struct Ring {
  static constexpr int kWarps{D <= 128 ? 8 : 4};  // of a block; with the stages, 192 KB in flight on a multiprocessor
  static constexpr int kStages{D == 64 ? 6 : 3};
  static constexpr int kTileBytes{kTile * D * 2};
  static constexpr int kBytes{kWarps * kStages * 2 * kTileBytes};

  uint32_t base;  // of the warp's stage 0
  const bf16* k;
  const bf16* v;
  int end;  // positions from here on read as zeros: an unwritten value may be NaN, and 0 * NaN would reach the sum
  int lane;

  __device__ __forceinline__ static uint32_t place(int row, int chunk) {
    return row * (D * 2) + ((chunk ^ (row & 7)) << 4);
  }
  __device__ __forceinline__ void fetch(int stage, int p) const {
    constexpr int kChunks{D / 8}, kRowsAtOnce{kWarp / kChunks};
    const uint32_t target = base + stage * 2 * kTileBytes;
    const int first = lane / kChunks, chunk = lane % kChunks;
#pragma unroll
    for (int i = 0; i < kTile; i += kRowsAtOnce) {
      const int64_t source = static_cast<int64_t>(p + first + i) * D + 8 * chunk;
      copy_or_zero(target + place(first + i, chunk), k + source, p + first + i < end);
      copy_or_zero(target + kTileBytes + place(first + i, chunk), v + source, p + first + i < end);
    }
  }
  __device__ __forceinline__ void insert(int stage, int row, const bf16* key, const bf16* value) const {
    for (int chunk = lane; chunk < D / 8; chunk += kWarp) {
      const uint32_t target = base + stage * 2 * kTileBytes + place(row, chunk);
      store_shared_16(target, reinterpret_cast<const uint4*>(key)[chunk]);
      store_shared_16(target + kTileBytes, reinterpret_cast<const uint4*>(value)[chunk]);
    }
    __syncwarp();
  }
  // Operand A of 16 positions at d = 16 c .. + 15.
  __device__ __forceinline__ void key(uint32_t (&r)[4], int stage, int c) const {
    ldmatrix_x4(r, base + stage * 2 * kTileBytes + place(lane % 16, 2 * c + lane / 16));
  }
  // Operand A of d = 16 c .. + 15 by 16 positions.
  __device__ __forceinline__ void value(uint32_t (&r)[4], int stage, int c) const {
    ldmatrix_x4_trans(r, base + (stage * 2 + 1) * kTileBytes + place(lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
  }
};

// Online softmax of a warp's positions for heads 2j and 2j + 1 of the group (lane = 4 g + j); o[c] holds d = 16 c + g
// of both heads and then d = 16 c + g + 8.
template <int D>
struct Accumulator {
  float o[D / 16][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's positions only, until the end

  __device__ __forceinline__ static void dots(float (&s)[4], const Ring<D>& ring, int stage,
                                              const uint32_t (&q)[D / 16][2]) {
    float odd[4]{};  // a second chain of products halves the wait for results
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t k[4];
      ring.key(k, stage, c);
      mma_16816(c % 2 == 0 ? s : odd, k[0], k[1], k[2], k[3], q[c][0], q[c][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
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
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2)
        highest[h] = fmaxf(highest[h], __shfl_xor_sync(kAllLanes, highest[h], offset));
      const float factor = weight_of(m[h], highest[h]);
      m[h] = highest[h];
      l[h] *= factor;
#pragma unroll
      for (int c = 0; c < D / 16; ++c) o[c][h] *= factor, o[c][2 + h] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = weight_of(s[i], m[i & 1]);
      l[i & 1] += s[i];
    }
    p0 = transpose_8x8(pack2<bf16>(s[0], s[1]));
    p1 = transpose_8x8(pack2<bf16>(s[2], s[3]));
  }

  __device__ __forceinline__ void add(const Ring<D>& ring, int stage, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t v[4];
      ring.value(v, stage, c);
      mma_16816(o[c], v[0], v[1], v[2], v[3], p0, p1);
    }
  }
};

// Query heads of a block after norm and rotation, and the new position's key and value. A row of padding keeps the
// reads of eight heads off each other's banks.
template <int D>
struct Prepared {
  bf16 q[kHeads][D + 8];
  bf16 kv[2][D];
  float scratch[Ring<D>::kWarps][D];
};
template <>
struct Prepared<0> {};

// Norm and rotation of the block's query heads and, in the block of the last split, of the new key, which enters the
// cache with the new value.
template <int D>
__device__ __forceinline__ void prepare_heads(Prepared<D>& to, const AttentionArgs& a, const HeadArgs& args,
                                              int64_t row, int first_head, int heads, int kv_head, bool last) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bf16* const qkv = static_cast<const bf16*>(a.q) + row * a.q_stride;
  for (int item = warp; item < heads + (last ? 2 : 0); item += Ring<D>::kWarps) {
    const bool is_q = item < heads, is_v = item == heads + 1;
    const int head = is_q ? first_head + item : a.heads + (is_v ? a.kv_heads : 0) + kv_head;
    float* const values = to.scratch[warp];
    if (!is_v) {
      rotate_head(values, qkv + head * D, args, is_q ? args.q_norm : args.k_norm, static_cast<int>(row),
                  static_cast<int>(a.rows), D);
    }
    const int64_t position = a.positions[row];
    auto* const cache =
        const_cast<bf16*>(static_cast<const bf16*>(cache_row(is_v ? a.v : a.k, a, a.slots[row], kv_head)));
    for (int d = lane; d < D; d += kWarp) {
      const bf16 x = is_v ? qkv[head * D + d] : from_float<bf16>(values[d]);
      if (is_q) {
        to.q[item][d] = x;
      } else {
        to.kv[is_v][d] = x;
        cache[position * D + d] = x;
      }
    }
    __syncwarp();
  }
}

// Grid (splits, kv_heads * head groups, rows). Warps take tiles in turn; their triples are merged in warp order.
template <int D, bool kOptions, bool kFused>
__global__ void __launch_bounds__(Ring<D>::kWarps* kWarp)
    attention_decode_kernel(AttentionArgs a, HeadArgs prepare, int64_t first_row, int groups, int limit) {
  using R = Ring<D>;
  constexpr int kWarps{R::kWarps}, kThreads{kWarps * kWarp};
  extern __shared__ __align__(128) unsigned char storage[];
  __shared__ float2 statistics[kWarps][kHeads];
  __shared__ __align__(16) Prepared<kFused ? D : 0> prepared;
  // The ring's memory serves the merge of the warps, and then as the weights of the merge of the splits.
  float (*const outputs)[kHeads][D] = reinterpret_cast<float (*)[kHeads][D]>(storage);
  static_assert(sizeof(float) * kWarps * kHeads * D <= R::kBytes && kMaxSplits <= kWarps * D);
  dependency_wait();
  dependency_release();
  const int64_t row = first_row + blockIdx.z;
  const int per_kv = a.heads / a.kv_heads, kv_head = blockIdx.y / groups;
  const int in_group = blockIdx.y % groups * kHeads, first_head = kv_head * per_kv + in_group;
  const int heads = min(kHeads, per_kv - in_group);
  const Interval range = attended(a, row);
  const Splits plan = splits_of(range, limit);
  const int split = blockIdx.x;
  if (split >= max(plan.count, 1)) return;
  if (plan.count == 0) {
    for (int i = threadIdx.x; i < heads * D; i += kThreads)
      static_cast<bf16*>(a.out)[(row * a.heads + first_head) * D + i] = from_float<bf16>(0.0f);
    return;
  }

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const int begin = range.first + split * plan.span, end = min(range.end, begin + plan.span);
  const int position = a.positions[row];
  constexpr int kStep{kWarps * kTile};
  const R ring{shared_address(storage) + warp * R::kStages * 2 * R::kTileBytes,
               static_cast<const bf16*>(cache_row(a.k, a, a.slots[row], kv_head)),
               static_cast<const bf16*>(cache_row(a.v, a, a.slots[row], kv_head)), kFused ? min(end, position) : end,
               lane};
  int p = begin + warp * kTile;
#pragma unroll
  for (int i = 0; i < R::kStages - 1; ++i) {
    if (p + i * kStep < end) ring.fetch(i, p + i * kStep);
    copy_async_commit();
  }
  uint32_t q[D / 16][2];
  const bf16* query = static_cast<const bf16*>(a.q) + row * a.q_stride + (first_head + g) * D;
  if constexpr (kFused) {  // meanwhile the tiles are on their way
    prepare_heads(prepared, a, prepare, row, first_head, heads, kv_head, split == plan.count - 1);
    __syncthreads();
    query = prepared.q[g];
  }
#pragma unroll
  for (int c = 0; c < D / 16; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      q[c][i] = g < heads ? *reinterpret_cast<const uint32_t*>(query + 16 * c + 8 * i + 2 * j) : 0u;
  Accumulator<D> sum;
  for (int stage = 0; p < end; p += kStep, stage = stage + 1 == R::kStages ? 0 : stage + 1) {
    copy_async_wait<R::kStages - 2>();
    __syncwarp();  // this tile has arrived for every lane, and every lane is done with the one before
    const int ahead = p + (R::kStages - 1) * kStep;
    if (ahead < end) ring.fetch(stage == 0 ? R::kStages - 1 : stage - 1, ahead);
    copy_async_commit();
    if constexpr (kFused) {  // the new position is not in the cache yet: its place in the tile was left empty
      if (position >= p && position < p + kTile) ring.insert(stage, position - p, prepared.kv[0], prepared.kv[1]);
    }
    float s[4]{};
    sum.dots(s, ring, stage, q);
    uint32_t p0, p1;
    sum.template weigh<kOptions>(a, s, row, position, first_head, p, end, g, j, p0, p1);
    sum.add(ring, stage, p0, p1);
  }
  copy_async_wait<0>();
  __syncthreads();  // the ring is done with

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) sum.l[h] += __shfl_xor_sync(kAllLanes, sum.l[h], offset);
    if (g == 0) statistics[warp][2 * j + h] = {sum.m[h], sum.l[h]};
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      outputs[warp][2 * j + h][16 * c + g] = sum.o[c][h];
      outputs[warp][2 * j + h][16 * c + g + 8] = sum.o[c][2 + h];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * D; i += kThreads) {
    const int h = i / D, d = i % D;
    float m = -INFINITY, l = 0.0f, o = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) m = fmaxf(m, statistics[w][h].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = weight_of(statistics[w][h].x, m);
      l += weight * statistics[w][h].y;
      o += weight * outputs[w][h][d];
    }
    if (plan.count == 1) {
      static_cast<bf16*>(a.out)[(row * a.heads + first_head) * D + i] = from_float<bf16>(l == 0.0f ? 0.0f : o / l);
    } else {
      const Partials partials(a, row, first_head + h, gridDim.x);
      partials.outputs[static_cast<int64_t>(split) * D + d] = o;
      if (d == 0) partials.statistics[split] = {m, l};
    }
  }
  if (plan.count == 1 || !arrives_last(static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y), plan.count)) return;
  merge_splits<kThreads>(a, row, first_head, heads, plan.count, gridDim.x, reinterpret_cast<float*>(storage));
}

template <int D, bool kFused>
void launch_decode(const AttentionArgs& a, const HeadArgs& prepare, const Launch& launch) {
  const int groups = ceil_div(a.heads / a.kv_heads, kHeads), limit = split_limit(a.kv_heads * groups);
  auto kernel = attention_decode_kernel<D, false, kFused>;
  if constexpr (!kFused) {
    if (has_options(a)) kernel = attention_decode_kernel<D, true, false>;
  }
  for_row_chunks(a, a.kv_heads * groups, [&](int64_t first, int64_t rows) {
    const dim3 grid(std::min(limit, ceil_div(a.capacity, kMinSpan)), a.kv_heads * groups, static_cast<unsigned>(rows));
    launch_kernel(
        launch, [&] { return describe("attention", a); }, kernel, grid, dim3(Ring<D>::kWarps * kWarp), Ring<D>::kBytes,
        a, prepare, first, groups, limit);
  });
}

bool on_tensor_cores(const AttentionArgs& a) {
  return a.type == DType::bf16 && a.cache == DType::bf16 && a.q_stride % 8 == 0 && aligned16(a.q, 0) &&
         (a.head_dim == 64 || a.head_dim == 128 || a.head_dim == 256);
}

}  // namespace

int64_t attention_workspace(int64_t rows, int heads, int head_dim, int64_t capacity) {
  return rows * heads * std::min(kMaxSplits, ceil_div(capacity, kMinSpan)) * (head_dim + 2) *
         static_cast<int64_t>(sizeof(float));
}

void attention_decode(const AttentionArgs& a, const Launch& launch) {
  if (!on_tensor_cores(a)) return attention_decode_fma(a, launch);
  if (a.head_dim == 64) return launch_decode<64, false>(a, {}, launch);
  if (a.head_dim == 128) return launch_decode<128, false>(a, {}, launch);
  launch_decode<256, false>(a, {}, launch);
}

bool attention_fuses(const AttentionArgs& a) {
  return on_tensor_cores(a) && a.head_dim <= 128 && !has_options(a) && a.prefix == nullptr && a.starts == nullptr;
}

void attention_rope(const AttentionArgs& a, const RopeTable& table, const float* q_norm, const float* k_norm, float eps,
                    bool plus_one, const Launch& launch) {
  if (!attention_fuses(a)) throw std::invalid_argument(describe("attention_rope", a) + ": not a fused case");
  const HeadArgs prepare{table, q_norm, k_norm, eps, plus_one};
  if (a.head_dim == 64) return launch_decode<64, true>(a, prepare, launch);
  launch_decode<128, true>(a, prepare, launch);
}

}  // namespace nibblelm::cuda
