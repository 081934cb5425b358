// x + y.
#include <algorithm>

#include "add.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};

template <class T, int V>
__global__ void add_kernel(const T* x, const T* y, T* out, int64_t columns, int64_t x_stride, int64_t y_stride) {
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.y, column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (column >= columns) return;
  float a[V], b[V];
  load(x + row * x_stride + column, a);
  load(y + row * y_stride + column, b);
#pragma unroll
  for (int i = 0; i < V; ++i) a[i] += b[i];
  store(out + row * columns + column, a);
}

}  // namespace

void add(const void* x, const void* y, void* out, int64_t rows, int64_t columns, int64_t x_stride, int64_t y_stride,
         DType dtype, const Launch& launch) {
  constexpr int64_t kGridRows{65535};
  const auto what = [&] {
    return "add rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) + " " + name(dtype);
  };
  with_activation(dtype, "add", [&]<class T>() {
    const int64_t size = sizeof(T);
    const bool wide = aligned16(x, x_stride * size) && aligned16(y, y_stride * size) && aligned16(out, columns * size);
    const auto run = wide ? add_kernel<T, kWide<T>> : add_kernel<T, 1>;
    for (int64_t first = 0; first < rows; first += kGridRows) {
      const int count = static_cast<int>(std::min(kGridRows, rows - first));
      launch_kernel(launch, what, run, dim3(ceil_div(columns, kThreads * (wide ? kWide<T> : 1)), count), dim3(kThreads),
                    0, static_cast<const T*>(x) + first * x_stride, static_cast<const T*>(y) + first * y_stride,
                    static_cast<T*>(out) + first * columns, columns, x_stride, y_stride);
    }
  });
}

}  // namespace nibblelm::cuda
