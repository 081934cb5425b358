// Of the decode attention on tensor cores: how positions are divided, tiles of them in shared memory, and the online
// softmax of a warp.
#pragma once

#include "attention.cuh"
#include "mma.cuh"

namespace nibblelm::cuda {

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

template <int D>
constexpr int kWarpsOf{D == 256 ? 2 : 4};

// Bytes of a block's tiles; they change the time, never the result. Measured on the H200.
constexpr int kManyBlocks{64 << 10};  // batches: three blocks a multiprocessor
constexpr int kBeside{96 << 10};      // the next kernel's block (107 KB) fits beside; cards of 99 KB take it too
constexpr int kLongRows{192 << 10};   // long rows, whose reads alone fill the device
constexpr int kLongCapacity{16384};

// A warp's tiles of 16 positions, keys then values, in shared memory. Rows are split into chunks of 16 bytes whose
// place is exclusive-ored with the row, so that neither copies nor ldmatrix meet bank conflicts, and a copy takes whole
// 128-byte lines.
template <int D, int kBytes>
struct Ring {
  static constexpr int kWarps{kWarpsOf<D>};
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

}  // namespace nibblelm::cuda
