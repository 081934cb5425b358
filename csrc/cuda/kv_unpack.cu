// kv_unpack: the int8 pages that prompts are about to read become bf16, in a pool that numbers its pages as the cache
// does. A prompt's rows read each page many times, so that their kernels do without scales.
#include <climits>

#include "attention.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{2 * kPrefillTile};
constexpr int kCodes{16};  // a thread takes at a time

struct Pages {
  int first;
  int end;
};

// Eight codes, which are of one row: a head's size is a multiple of it.
__device__ __forceinline__ uint4 unpack_8(uint32_t low, uint32_t high, float scale) {
  const auto pair = [&](uint32_t word, int shift) {
    const auto value = [&](int at) { return __fmul_rn(static_cast<float>(static_cast<int8_t>(word >> at)), scale); };
    return pack2<bf16>(value(shift), value(shift + 8));
  };
  return {pair(low, 0), pair(low, 16), pair(high, 0), pair(high, 16)};
}

// By 128 threads, `i` their number: the pages with what a tile's rows see, in `shared` after the next barrier.
__device__ __forceinline__ void find_pages(const AttentionArgs& a, const int32_t* tile, int i, Pages& shared) {
  if (i >= tile[1]) return;
  const Interval range = attended(a, tile[0] + i);
  if (range.first >= range.end) return;
  atomicMin(&shared.first, range.first / kPage);
  atomicMax(&shared.end, (range.end - 1) / kPage + 1);
}

// Grid (blocks that share a tile's pages, tiles). Of a prompt's tiles each leaves out what the one before has seen.
__global__ void __launch_bounds__(kThreads) kv_unpack_kernel(const __grid_constant__ AttentionArgs a) {
  __shared__ Pages own, before;
  dependency_wait();
  dependency_release();
  const PagedCache& cache = a.cache;
  const int32_t* const tile = a.tiles + 2 * blockIdx.y;
  if (tile[1] <= 0) return;
  const int slot = cache.slots[tile[0]];
  if (threadIdx.x == 0) own = before = {INT_MAX, 0};
  __syncthreads();
  if (threadIdx.x < kPrefillTile) {
    find_pages(a, tile, threadIdx.x, own);
  } else if (blockIdx.y > 0 && cache.slots[tile[-2]] == slot) {
    find_pages(a, tile - 2, threadIdx.x - kPrefillTile, before);
  }
  __syncthreads();
  const Pages seen = before.end == 0 ? Pages{0, 0} : before;
  const int low = max(0, min(own.end, seen.first) - own.first), high = max(own.first, seen.end);
  const int count = low + max(0, own.end - high), chunks = kPage * cache.head_dim / kCodes;
  for (int i = blockIdx.x; i < count * cache.kv_heads; i += gridDim.x) {
    const int n = i / cache.kv_heads, position = (n < low ? own.first + n : high + n - low) * kPage;
    const int64_t row = scale_row(cache, page_of(cache, slot, position), i % cache.kv_heads, position);
    const auto* const keys = reinterpret_cast<const uint4*>(static_cast<const int8_t*>(cache.k) + row * cache.head_dim);
    const auto* const values =
        reinterpret_cast<const uint4*>(static_cast<const int8_t*>(cache.v) + row * cache.head_dim);
    auto* const k = reinterpret_cast<uint4*>(static_cast<bf16*>(cache.k_unpacked) + row * cache.head_dim);
    auto* const v = reinterpret_cast<uint4*>(static_cast<bf16*>(cache.v_unpacked) + row * cache.head_dim);
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
      const uint4 key = keys[chunk], value = values[chunk];
      const int64_t first = row + chunk * kCodes / cache.head_dim, second = row + (chunk * kCodes + 8) / cache.head_dim;
      const float scales[4]{cache.k_scales[first], cache.k_scales[second], cache.v_scales[first],
                            cache.v_scales[second]};
      k[2 * chunk] = unpack_8(key.x, key.y, scales[0]);
      k[2 * chunk + 1] = unpack_8(key.z, key.w, scales[1]);
      v[2 * chunk] = unpack_8(value.x, value.y, scales[2]);
      v[2 * chunk + 1] = unpack_8(value.z, value.w, scales[3]);
    }
  }
}

}  // namespace

void kv_unpack(const AttentionArgs& a, const Launch& launch) {
  const auto what = [&] { return describe("kv_unpack", a); };
  if (a.tile_count > 65535) throw std::invalid_argument(what() + ": too many tiles in one call");
  const int blocks = 2 * device_attribute(cudaDevAttrMultiProcessorCount);  // for the first tile of a long prompt
  launch_kernel(launch, what, kv_unpack_kernel, dim3(blocks, a.tile_count), dim3(kThreads), 0, a);
}

}  // namespace nibblelm::cuda
