// argmax over long rows by several blocks a row. Value and index travel as one 64-bit key whose maximum does not
// depend on the order of arrival, so an atomic maximum is deterministic.
#include <algorithm>

#include "argmax.h"
#include "ordered.cuh"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};
constexpr int kColumnsPerBlock{4096};
constexpr int kRowsPerLaunch{4096};

// Zero between launches: the last block of a row puts back what it took.
__device__ unsigned long long best_keys[kRowsPerLaunch];
__device__ unsigned arrivals[kRowsPerLaunch];

template <class T, int V>
__global__ void argmax_kernel(const T* x, int32_t* y, int64_t columns, int64_t stride) {
  __shared__ uint64_t scratch[kWarp];
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.y, first = static_cast<int64_t>(blockIdx.x) * kColumnsPerBlock;
  const int64_t last = min(columns, first + kColumnsPerBlock);
  uint64_t best = 0;
#pragma unroll 4
  for (int64_t c = first + threadIdx.x * V; c < last; c += kThreads * V) {
    float v[V];
    load(x + row * stride + c, v);
#pragma unroll
    for (int i = 0; i < V; ++i) best = max(best, ranked_key(v[i], static_cast<uint32_t>(c + i)));
  }
  best = block_reduce(best, uint64_t{0}, scratch, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  if (threadIdx.x != 0) return;
  atomicMax(best_keys + row, static_cast<unsigned long long>(best));
  __threadfence();
  if (atomicAdd(arrivals + row, 1u) != gridDim.x - 1) return;
  __threadfence();
  y[row] = static_cast<int32_t>(~static_cast<uint32_t>(atomicExch(best_keys + row, 0ull)));
  arrivals[row] = 0;
}

}  // namespace

void argmax(const void* x, int32_t* y, int64_t rows, int64_t columns, int64_t x_stride, DType dtype,
            const Launch& launch) {
  const auto what = [&] {
    return "argmax rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) + " " + name(dtype);
  };
  if (columns == 0) throw std::invalid_argument(what() + ": rows need at least one column");
  with_activation(dtype, "argmax", [&]<class T>() {
    const bool wide = aligned16(x, x_stride * sizeof(T)) && columns % kWide<T> == 0;
    const auto kernel = wide ? argmax_kernel<T, kWide<T>> : argmax_kernel<T, 1>;
    for (int64_t first = 0; first < rows; first += kRowsPerLaunch) {
      const auto count = static_cast<unsigned>(std::min<int64_t>(kRowsPerLaunch, rows - first));
      launch_kernel(launch, what, kernel, dim3(ceil_div(columns, kColumnsPerBlock), count), dim3(kThreads), 0,
                    static_cast<const T*>(x) + first * x_stride, y + first, columns, x_stride);
    }
  });
}

}  // namespace nibblelm::cuda
