// kv_append: new keys and values into the cache, converted to its dtype.
#include "paged_cache.cuh"
#include "rope.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kWarps{4};

// One warp takes one head of a row's keys or values.
template <class T>
__global__ void kv_append_kernel(const T* k, const T* v, int64_t k_stride, int64_t v_stride, PagedCache cache) {
  dependency_wait();
  dependency_release();
  const int row = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / kWarp;
  if (head >= 2 * cache.kv_heads) return;
  const bool is_v = head >= cache.kv_heads;
  const int kv_head = is_v ? head - cache.kv_heads : head;
  const int64_t target = written_row(cache, cache.slots[row], cache.positions[row], kv_head);
  if (target < 0) return;
  const T* const x = (is_v ? v + row * v_stride : k + row * k_stride) + kv_head * cache.head_dim;
  store_row(cache, is_v, target, [&](int d) { return to_float(x[d]); });
}

}  // namespace

void kv_append(const void* k, const void* v, int64_t k_stride, int64_t v_stride, int64_t rows, const PagedCache& cache,
               DType dtype, const Launch& launch) {
  if (rows == 0) return;
  const auto what = [&] {
    return "kv_append rows=" + std::to_string(rows) + " kv_heads=" + std::to_string(cache.kv_heads) +
           " head_dim=" + std::to_string(cache.head_dim) + " " + name(dtype);
  };
  with_activation(dtype, "kv_append", [&]<class T>() {
    const dim3 grid(static_cast<unsigned>(rows), ceil_div(2 * cache.kv_heads, kWarps));
    launch_kernel(launch, what, kv_append_kernel<T>, grid, dim3(kWarps * kWarp), 0, static_cast<const T*>(k),
                  static_cast<const T*>(v), k_stride, v_stride, cache);
  });
}

}  // namespace nibblelm::cuda
