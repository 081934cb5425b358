// Words from pinned host memory, over the bus.
#include "read_pinned.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};

__global__ void read_pinned_kernel(const int32_t* x, int32_t* y, int64_t count) {
  dependency_wait();
  dependency_release();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) y[i] = __ldcv(x + i);  // a replay finds what the host wrote since the last one
}

}  // namespace

void read_pinned(const int32_t* x, int32_t* y, int64_t count, const Launch& launch) {
  if (count == 0) return;
  const auto what = [&] { return "read_pinned count=" + std::to_string(count); };
  launch_kernel(launch, what, read_pinned_kernel, dim3(static_cast<unsigned>(ceil_div(count, kThreads))),
                dim3(kThreads), 0, x, y, count);
}

}  // namespace nibblelm::cuda
