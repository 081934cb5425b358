// Prefill attention on tensor cores for bf16 (Dao 2023, "FlashAttention-2"): a block keeps a tile of query rows, its
// warps walk over tiles of keys and values that cp.async brings to shared memory one tile ahead.
//
// Key tiles start at multiples of kColumns, and a tile that a row may not see leaves it unchanged to the bit, so a
// row's result does not depend on the rows beside it. Heads are filled up with zeros to D columns, where they are not
// of that size (kExact), on their way to shared memory.
#include "attention.cuh"
#include "mma.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kWarps{4};
constexpr int kThreads{kWarps * kWarp};
constexpr size_t kBoundsBytes{4 * sizeof(int)};

// kStrips strips of 16 query rows a warp: two halve the shared-memory reads per product where registers allow it.
template <int D>
struct Shape {
  static constexpr int kStrips{D <= 128 ? 2 : 1};
  static constexpr int kRows{kWarps * 16 * kStrips};
  static constexpr int kColumns{D <= 128 ? 64 : 32};
  static_assert(kPage % kColumns == 0);  // a tile is on one page
  // q, then two stages of keys and values, then the bounds of the rows' intervals.
  static constexpr size_t kShared{sizeof(bf16) * D * (kRows + 4 * kColumns) + kBoundsBytes};
};

// Address of 16-byte chunk `chunk` of a row of D values; the exclusive or spreads eight rows over all banks.
template <int D>
__device__ __forceinline__ uint32_t chunk_address(uint32_t base, int row, int chunk) {
  return base + row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

// kRows rows of `width` values, filled up with zeros to D, `stride` apart, from `source`; the first `count` are real.
template <int D, int kRows>
__device__ __forceinline__ void copy_tile(uint32_t shared, const bf16* source, int64_t stride, int count, int width) {
  constexpr int kChunks{D / 8};
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool real = row < count && 8 * chunk < width;
    copy_or_zero(chunk_address<D>(shared, row, chunk), source + row * stride + (8 * chunk < width ? 8 * chunk : 0),
                 real);
  }
}

// One strip of 16 query rows: this lane's rows are g and g + 8 of it.
struct Row {
  int index;
  Interval range;
  int position;
};

template <int D>
struct Strip {
  float o[D / 8][4] = {};
  float m[2]{-INFINITY, -INFINITY};
  float l[2]{0.0f, 0.0f};  // over this lane's columns only, until the end
};

// Scores of one strip in place: options (which include the scale), then -inf outside each row's interval.
template <bool kOptions, int kTiles>
__device__ __forceinline__ void scores_of(const AttentionArgs& a, float (&s)[kTiles][4], const Row (&rows)[2], int head,
                                          int column, bool inside) {
  if (!kOptions && inside) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Row& row = rows[i >> 1];
      const int p = column + 8 * t + (i & 1);
      if ((kOptions || !inside) && (p < row.range.first || p >= row.range.end)) {  // behind the last row is no mask
        s[t][i] = -INFINITY;
      } else if constexpr (kOptions) {
        s[t][i] = score<true>(a, s[t][i], row.index, row.position, head, p);
      }
    }
}

// Online softmax step: s becomes 2^(unit * (s - m)), the strip's sums are rescaled to the new maximum. `unit` is what
// remains of the scale, folded into the multiply-add that the difference needs anyway.
template <int D, int kTiles>
__device__ __forceinline__ void softmax_step(Strip<D>& strip, float (&s)[kTiles][4], float unit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = strip.m[r];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) m = fmaxf(m, fmaxf(s[t][2 * r], s[t][2 * r + 1]));
    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, 2));
    const float base = m == -INFINITY ? 0.0f : m * unit;
    const bool moved = m != strip.m[r];
    // 0 from -inf. Exactly 1 where nothing moved, which the rounding of `base` would spoil.
    const float factor = moved ? exp2_fast(strip.m[r] * unit - base) : 1.0f;
    strip.m[r] = m;
    float l = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      s[t][2 * r] = exp2_fast(s[t][2 * r] * unit - base);
      s[t][2 * r + 1] = exp2_fast(s[t][2 * r + 1] * unit - base);
      l += s[t][2 * r] + s[t][2 * r + 1];
    }
    if (!__any_sync(kAllLanes, moved)) {
      strip.l[r] += l;
      continue;
    }
    strip.l[r] = strip.l[r] * factor + l;
#pragma unroll
    for (int t = 0; t < D / 8; ++t) strip.o[t][2 * r] *= factor, strip.o[t][2 * r + 1] *= factor;
  }
}

// Grid (heads, tiles of rows); the last rows see the most keys and go first.
template <int D, bool kExact, bool kOptions>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1) attention_prefill_kernel(AttentionArgs a) {
  using S = Shape<D>;
  constexpr int kStrips{S::kStrips}, kColumns{S::kColumns}, kTiles{kColumns / 8};
  extern __shared__ __align__(128) unsigned char storage[];
  dependency_wait();
  dependency_release();
  const uint32_t q_tile = shared_address(storage), kv_tiles = q_tile + sizeof(bf16) * D * S::kRows;
  // Of the tile's rows: least and greatest first, least and greatest end.
  int* const bounds = reinterpret_cast<int*>(storage + S::kShared - kBoundsBytes);
  constexpr uint32_t kTileBytes{sizeof(bf16) * D * kColumns};
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, j = lane % 4;
  const int head = blockIdx.x, kv_head = head / (a.heads / a.cache.kv_heads), width = kExact ? D : a.cache.head_dim;
  const RowTile tile = row_tile<S::kRows>(a, gridDim.y - 1 - blockIdx.y);
  if (tile.first >= tile.end) return;
  if (threadIdx.x < 4) bounds[threadIdx.x] = threadIdx.x % 2 == 0 ? INT_MAX : 0;
  copy_tile<D, S::kRows>(q_tile, static_cast<const bf16*>(a.q) + tile.first * a.q_stride + head * width, a.q_stride,
                         tile.end - tile.first, width);
  copy_async_commit();

  Row rows[kStrips][2];
#pragma unroll
  for (int n = 0; n < kStrips; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Row& row = rows[n][r];
      row.index = tile.first + (warp * kStrips + n) * 16 + g + 8 * r;
      const bool real = row.index < tile.end;
      row.range = real ? attended(a, row.index) : Interval{0, 0};
      row.position = real ? a.cache.positions[row.index] : 0;
    }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kStrips; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (j != 0 || rows[n][r].index >= tile.end) continue;
      if (rows[n][r].range.first >= rows[n][r].range.end) {
        atomicMin(bounds + 2, 0);  // a row that sees nothing: no tile is inside all intervals
        continue;
      }
      atomicMin(bounds, rows[n][r].range.first);
      atomicMax(bounds + 1, rows[n][r].range.first);
      atomicMin(bounds + 2, rows[n][r].range.end);
      atomicMax(bounds + 3, rows[n][r].range.end);
    }
  __syncthreads();
  const int begin = bounds[0] == INT_MAX ? 0 : bounds[0] / kColumns * kColumns, end = bounds[3];
  const int first_inside = bounds[1], last_inside = bounds[2];
  const int slot = max(min(a.cache.slots[tile.first], a.cache.slot_count - 1), 0);  // idle rows see nothing of it
  const auto page_at = [&](int column) {  // or, behind the last tile, the last one's
    return page_of(a.cache, slot, max(min(column, end - 1), 0));
  };
  const auto fetch = [&](int column, int stage, int page) {
    const auto copy = [&](const void* pool, uint32_t tile) {
      const int64_t from = cache_row<kExact ? D : 0>(a.cache, page, kv_head, column);
      if (column < end) copy_tile<D, kColumns>(tile, static_cast<const bf16*>(pool) + from, width, end - column, width);
      copy_async_commit();
    };
    copy(a.cache.k, kv_tiles + 2 * stage * kTileBytes);
    copy(a.cache.v, kv_tiles + (2 * stage + 1) * kTileBytes);
  };
  int page = page_at(begin + kColumns);  // of the tile to ask for next
  fetch(begin, 0, page_at(begin));

  const float unit = kOptions ? 1.0f : a.scale * kLog2e;
  Strip<D> strips[kStrips];
  for (int column = begin, stage = 0; column < end; column += kColumns, stage ^= 1) {
    const uint32_t k_tile = kv_tiles + 2 * stage * kTileBytes, v_tile = k_tile + kTileBytes;
    fetch(column + kColumns, stage ^ 1, page);
    page = page_at(column + 2 * kColumns);
    copy_async_wait<3>();  // these keys, and q
    __syncthreads();
    float s[kStrips][kTiles][4] = {};
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      uint32_t q[kStrips][4];
#pragma unroll
      for (int n = 0; n < kStrips; ++n)
        ldmatrix_x4(q[n], chunk_address<D>(q_tile, (warp * kStrips + n) * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int t = 0; t < kTiles; t += 2) {
        uint32_t b[4];
        ldmatrix_x4(b, chunk_address<D>(k_tile, 8 * t + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < kStrips; ++n) {
          mma_16816(s[n][t], q[n][0], q[n][1], q[n][2], q[n][3], b[0], b[1]);
          mma_16816(s[n][t + 1], q[n][0], q[n][1], q[n][2], q[n][3], b[2], b[3]);
        }
      }
    }
    const bool inside = column >= first_inside && column + kColumns <= last_inside;
#pragma unroll
    for (int n = 0; n < kStrips; ++n) {
      scores_of<kOptions>(a, s[n], rows[n], head, column + 2 * j, inside);
      softmax_step(strips[n], s[n], unit);
    }
    copy_async_wait<2>();  // these values
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kTiles; t += 2) {
      uint32_t p[kStrips][4];
#pragma unroll
      for (int n = 0; n < kStrips; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = pack2<bf16>(s[n][t + i / 2][i % 2 * 2], s[n][t + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, chunk_address<D>(v_tile, 8 * t + lane % 16, d + lane / 16));
#pragma unroll
        for (int n = 0; n < kStrips; ++n) {
          mma_16816(strips[n].o[d], p[n][0], p[n][1], p[n][2], p[n][3], b[0], b[1]);
          mma_16816(strips[n].o[d + 1], p[n][0], p[n][1], p[n][2], p[n][3], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // before the next fetch overwrites this stage
  }
  copy_async_wait<0>();

#pragma unroll
  for (int n = 0; n < kStrips; ++n)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = strips[n].l[r];
      l += __shfl_xor_sync(kAllLanes, l, 1);
      l += __shfl_xor_sync(kAllLanes, l, 2);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      if (rows[n][r].index >= tile.end) continue;
      bf16* const out =
          static_cast<bf16*>(a.out) + (static_cast<int64_t>(rows[n][r].index) * a.heads + head) * width + 2 * j;
#pragma unroll
      for (int t = 0; t < D / 8; ++t) {
        if (!kExact && 8 * t >= width) break;
        *reinterpret_cast<uint32_t*>(out + 8 * t) =
            pack2<bf16>(strips[n].o[t][2 * r] * inverse, strips[n].o[t][2 * r + 1] * inverse);
      }
    }
}

template <int D, bool kExact>
void launch_prefill(const AttentionArgs& a, const Launch& launch) {
  const auto what = [&] { return describe("attention prefill", a); };
  const int tiles = a.tile_count * (kPrefillTile / Shape<D>::kRows);
  if (tiles > 65535) throw std::invalid_argument(what() + ": too many tiles in one call");
  const auto kernel =
      has_options(a) ? attention_prefill_kernel<D, kExact, true> : attention_prefill_kernel<D, kExact, false>;
  launch_kernel(launch, what, kernel, dim3(a.heads, tiles), dim3(kThreads), Shape<D>::kShared, a);
}

}  // namespace

void attention_prefill(const AttentionArgs& a, const Launch& launch) {
  if (a.tile_count == 0) return;
  if (a.cache.dtype == DType::i8) {
    kv_unpack(a, launch);
    AttentionArgs unpacked = a;
    unpacked.cache.k = a.cache.k_unpacked, unpacked.cache.v = a.cache.v_unpacked;
    unpacked.cache.dtype = DType::bf16;
    return attention_prefill(unpacked, launch);
  }
  if (attention_fits_sm90(a)) return attention_prefill_sm90(a, launch);
  const bool tensor_cores = a.type == DType::bf16 && a.cache.dtype == DType::bf16 && has_tiled_head(a.cache) &&
                            a.q_stride % 8 == 0 && aligned16(a.q, 0);
  if (!tensor_cores) return attention_prefill_fma(a, launch);
  with_tiled_head(a.cache, [&]<int D, bool kExact>() { launch_prefill<D, kExact>(a, launch); });
}

}  // namespace nibblelm::cuda
