// kv_append: new keys and values into the cache, converted to its dtype.
#include "paged_cache.cuh"
#include "rope.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{128};

template <class T>
__global__ void kv_append_kernel(const T* k, const T* v, int64_t k_stride, int64_t v_stride, PagedCache cache) {
  dependency_wait();
  dependency_release();
  const int row = blockIdx.x, i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= cache.kv_heads * cache.head_dim) return;
  const int64_t target = written_row(cache, cache.slots[row], cache.positions[row], i / cache.head_dim);
  if (target < 0) return;
  const int d = i % cache.head_dim;
  store_from_float(cache.k, target + d, cache.dtype, to_float(k[row * k_stride + i]));
  store_from_float(cache.v, target + d, cache.dtype, to_float(v[row * v_stride + i]));
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
    const dim3 grid(static_cast<unsigned>(rows), ceil_div(cache.kv_heads * cache.head_dim, kThreads));
    launch_kernel(launch, what, kv_append_kernel<T>, grid, dim3(kThreads), 0, static_cast<const T*>(k),
                  static_cast<const T*>(v), k_stride, v_stride, cache);
  });
}

}  // namespace nibblelm::cuda
