// kv_unpack: the int8 pages that prompts are about to read become bf16, in a pool that numbers its pages as the cache
// does. A prompt's rows read each page many times, so that their kernels do without scales.
#include <climits>

#include "attention.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{2 * kPrefillTile};
constexpr int kCodes{8};  // a thread takes at a time

struct Pages {
  int first;
  int end;
};

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
  const int low = max(0, min(own.end, before.first) - own.first), high = max(own.first, before.end);
  const int count = low + max(0, own.end - high), chunks = kPage * cache.head_dim / kCodes;
  for (int i = blockIdx.x; i < 2 * count * cache.kv_heads; i += gridDim.x) {
    const bool is_v = i % 2 != 0;
    const int kv_head = i / 2 % cache.kv_heads, n = i / 2 / cache.kv_heads;
    const int position = (n < low ? own.first + n : high + n - low) * kPage;
    const int64_t row = scale_row(cache, page_of(cache, slot, position), kv_head, position);
    const float* const scales = (is_v ? cache.v_scales : cache.k_scales) + row;
    const auto* const from = static_cast<const int8_t*>(is_v ? cache.v : cache.k) + row * cache.head_dim;
    bf16* const to = static_cast<bf16*>(is_v ? cache.v_unpacked : cache.k_unpacked) + row * cache.head_dim;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kThreads) {
      const char4* const codes = reinterpret_cast<const char4*>(from + chunk * kCodes);
      const char4 x = codes[0], y = codes[1];
      const float scale = scales[chunk * kCodes / cache.head_dim];
      const auto pair = [&](int8_t low_code, int8_t high_code) {
        return pack2<bf16>(__fmul_rn(static_cast<float>(low_code), scale),
                           __fmul_rn(static_cast<float>(high_code), scale));
      };
      *reinterpret_cast<uint4*>(to + chunk * kCodes) = {pair(x.x, x.y), pair(x.z, x.w), pair(y.x, y.y), pair(y.z, y.w)};
    }
  }
}

}  // namespace

void kv_unpack(const AttentionArgs& a, const Launch& launch) {
  const auto what = [&] { return describe("kv_unpack", a); };
  if (a.tile_count > 65535) throw std::invalid_argument(what() + ": too many tiles in one call");
  const int blocks = device_attribute(cudaDevAttrMultiProcessorCount);
  launch_kernel(launch, what, kv_unpack_kernel, dim3(blocks, a.tile_count), dim3(kThreads), 0, a);
}

}  // namespace nibblelm::cuda
