// Split-KV decode attention on tensor cores for bf16 (Dao et al. 2023, "Flash-Decoding").
//
// The heads of one KV head are the eight columns of mma.m16n8k16 and positions its rows, so keys and values go from
// device memory straight into operand registers: the order of d within a dot product is free as long as q uses the
// same, and value rows of neighbouring positions are interleaved by byte permutes. No shared memory is on the way.
#include "attention.cuh"
#include "mma.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kWarps{4};
constexpr int kThreads{kWarps * kWarp};
constexpr int kHeads{8};  // columns of the mma
constexpr int kTile{16};  // positions a warp takes at a time

// Keys and values of 16 positions as lane (g = lane / 4, j = lane % 4) needs them: keys of positions g and g + 8 at
// d = 32 c + 8 j .. + 7, values of positions 2j, 2j + 1, 2j + 8, 2j + 9 at d = 64 b + 8 g .. + 7.
template <int D>
struct Tile {
  uint4 k[2][D / 32];
  uint4 v[4][D / 64];
};

__device__ __forceinline__ uint4 read_if(const bf16* p, bool wanted) {
  uint4 x{0, 0, 0, 0};
  if (wanted)
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p));
  return x;
}

// Positions from `end` on read as zeros: an unwritten value may be NaN, and 0 * NaN would reach the sum.
template <int D>
__device__ __forceinline__ void read_tile(Tile<D>& tile, const bf16* k, const bf16* v, int p, int end, int g, int j) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = p + g + 8 * half;
#pragma unroll
    for (int c = 0; c < D / 32; ++c)
      tile.k[half][c] = read_if(k + static_cast<int64_t>(row) * D + 32 * c + 8 * j, row < end);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = p + 2 * j + (i & 1) + 8 * (i >> 1);
#pragma unroll
    for (int b = 0; b < D / 64; ++b)
      tile.v[i][b] = read_if(v + static_cast<int64_t>(row) * D + 64 * b + 8 * g, row < end);
  }
}

__device__ __forceinline__ uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Online softmax of a warp's positions for heads 2j and 2j + 1 of the group; o[b][i] holds d = 64 b + 8 g + 2 i (first
// pair) and the next d (second pair) of both heads.
template <int D>
struct Accumulator {
  float o[D / 64][4][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's positions only, until the end

  template <bool kOptions>
  __device__ __forceinline__ void add(const AttentionArgs& a, const Tile<D>& tile, const uint4 (&q)[D / 32],
                                      int64_t row, int position, int first_head, int p, int end, int g, int j) {
    float s[4]{};
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
      const uint4 &low = tile.k[0][c], &high = tile.k[1][c];
      mma_16816(s, low.x, high.x, low.y, high.y, q[c].x, q[c].y);
      mma_16816(s, low.z, high.z, low.w, high.w, q[c].z, q[c].w);
    }
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
      for (int b = 0; b < D / 64; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][i][h] *= factor, o[b][i][2 + h] *= factor;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = weight_of(s[i], m[i & 1]);
      l[i & 1] += s[i];
    }
    const uint32_t p0 = transpose_8x8(pack2<bf16>(s[0], s[1])), p1 = transpose_8x8(pack2<bf16>(s[2], s[3]));
#pragma unroll
    for (int b = 0; b < D / 64; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t v0 = word(tile.v[0][b], i), v1 = word(tile.v[1][b], i), v2 = word(tile.v[2][b], i),
                       v3 = word(tile.v[3][b], i);
        mma_16816(o[b][i], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                  __byte_perm(v2, v3, 0x7632), p0, p1);
      }
  }
};

// Grid (splits, kv_heads * head groups, rows). Warps take tiles in turn; their triples are merged in warp order.
template <int D, bool kOptions>
__global__ void __launch_bounds__(kThreads, 2)
    attention_decode_kernel(AttentionArgs a, int64_t first_row, int groups, int splits) {
  __shared__ __align__(16) float outputs[kWarps][kHeads][D];
  __shared__ float2 statistics[kWarps][kHeads];
  static_assert(kHeads * kMaxSplits <= kWarps * kHeads * D);  // `outputs` serves as the weights of the merge
  dependency_wait();
  dependency_release();
  const int64_t row = first_row + blockIdx.z;
  const int per_kv = a.heads / a.kv_heads, kv_head = blockIdx.y / groups;
  const int in_group = blockIdx.y % groups * kHeads, first_head = kv_head * per_kv + in_group;
  const int heads = min(kHeads, per_kv - in_group);
  const Interval range = attended(a, row);
  const Splits plan = splits_of(range);
  const int split = blockIdx.x;
  if (split >= max(plan.count, 1)) return;
  if (plan.count == 0) {
    for (int i = threadIdx.x; i < heads * D; i += kThreads)
      static_cast<bf16*>(a.out)[(row * a.heads + first_head) * D + i] = from_float<bf16>(0.0f);
    return;
  }

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const int begin = range.first + split * plan.span, end = min(range.end, begin + plan.span);
  const auto* const k = static_cast<const bf16*>(cache_row(a.k, a, a.slots[row], kv_head));
  const auto* const v = static_cast<const bf16*>(cache_row(a.v, a, a.slots[row], kv_head));
  const int position = a.positions[row];
  constexpr int kStep{kWarps * kTile};
  // Two tiles in registers keep a second one in flight; at D = 256 one fills them.
  constexpr int kTiles{D <= 128 ? 2 : 1};
  Tile<D> tiles[kTiles];
  int p = begin + warp * kTile;
  if (kTiles == 2 && p < end) read_tile(tiles[0], k, v, p, end, g, j);
  const bf16* const query = static_cast<const bf16*>(a.q) + row * a.q_stride + (first_head + g) * D + 8 * j;
  uint4 q[D / 32];
#pragma unroll
  for (int c = 0; c < D / 32; ++c)
    q[c] = g < heads ? *reinterpret_cast<const uint4*>(query + 32 * c) : uint4{0, 0, 0, 0};
  Accumulator<D> sum;
  if constexpr (kTiles == 2) {
    for (; p < end; p += 2 * kStep) {
      if (p + kStep < end) read_tile(tiles[1], k, v, p + kStep, end, g, j);
      sum.template add<kOptions>(a, tiles[0], q, row, position, first_head, p, end, g, j);
      if (p + kStep >= end) break;
      if (p + 2 * kStep < end) read_tile(tiles[0], k, v, p + 2 * kStep, end, g, j);
      sum.template add<kOptions>(a, tiles[1], q, row, position, first_head, p + kStep, end, g, j);
    }
  } else {
    for (; p < end; p += kStep) {
      read_tile(tiles[0], k, v, p, end, g, j);
      sum.template add<kOptions>(a, tiles[0], q, row, position, first_head, p, end, g, j);
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) sum.l[h] += __shfl_xor_sync(kAllLanes, sum.l[h], offset);
    if (g == 0) statistics[warp][2 * j + h] = {sum.m[h], sum.l[h]};
#pragma unroll
    for (int b = 0; b < D / 64; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<float2*>(&outputs[warp][2 * j + h][64 * b + 8 * g + 2 * i]) = {sum.o[b][i][h],
                                                                                         sum.o[b][i][2 + h]};
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
      const Partials partials(a, row, first_head + h, splits);
      partials.outputs[static_cast<int64_t>(split) * D + d] = o;
      if (d == 0) partials.statistics[split] = {m, l};
    }
  }
  if (plan.count == 1 || !arrives_last(static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y), plan.count)) return;
  merge_splits<kThreads>(a, row, first_head, heads, plan.count, splits, &outputs[0][0][0]);
}

template <int D>
void launch_decode(const AttentionArgs& a, const Launch& launch) {
  const int groups = ceil_div(a.heads / a.kv_heads, kHeads), splits = max_splits(a.capacity);
  const auto kernel = has_options(a) ? attention_decode_kernel<D, true> : attention_decode_kernel<D, false>;
  for_row_chunks(a, a.kv_heads * groups, [&](int64_t first, int64_t rows) {
    launch_kernel(
        launch, [&] { return describe("attention", a); }, kernel,
        dim3(splits, a.kv_heads * groups, static_cast<unsigned>(rows)), dim3(kThreads), 0, a, first, groups, splits);
  });
}

}  // namespace

int64_t attention_workspace(int64_t rows, int heads, int head_dim, int64_t capacity) {
  return rows * heads * max_splits(capacity) * (head_dim + 2) * static_cast<int64_t>(sizeof(float));
}

void attention_decode(const AttentionArgs& a, const Launch& launch) {
  const bool tensor_cores = a.type == DType::bf16 && a.cache == DType::bf16 && a.q_stride % 8 == 0 && aligned16(a.q, 0);
  if (tensor_cores && a.head_dim == 64) return launch_decode<64>(a, launch);
  if (tensor_cores && a.head_dim == 128) return launch_decode<128>(a, launch);
  if (tensor_cores && a.head_dim == 256) return launch_decode<256>(a, launch);
  attention_decode_fma(a, launch);
}

}  // namespace nibblelm::cuda
