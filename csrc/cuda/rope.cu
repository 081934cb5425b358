// Rotary embedding (Su et al. 2021): half-split, interleaved, partial, and with two position streams (ChatGLM-6B).
#include "rope.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{128};

template <class T>
__global__ void rope_kernel(T* x, int64_t stride, int rows, int heads, int head_dim, RopeTable table) {
  dependency_wait();
  dependency_release();
  const int row = blockIdx.x, pairs = table.half * table.streams;
  const int i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= heads * pairs) return;
  const RopePair pair = rope_pair(table, i % pairs, row, rows, head_dim);
  T* const head = x + row * stride + static_cast<int64_t>(i / pairs) * head_dim;
  const float a = to_float(head[pair.first]), b = to_float(head[pair.second]);
  const float2 rotated = rotate(a, b, pair.cos, pair.sin);
  head[pair.first] = from_float<T>(rotated.x);
  head[pair.second] = from_float<T>(rotated.y);
}

}  // namespace

void rope(void* x, int64_t stride, int64_t rows, int heads, int head_dim, const RopeTable& table, DType dtype,
          const Launch& launch) {
  const int pairs = heads * table.half * table.streams;
  if (rows == 0 || pairs == 0) return;
  const auto what = [&] {
    return "rope rows=" + std::to_string(rows) + " heads=" + std::to_string(heads) +
           " head_dim=" + std::to_string(head_dim) + " " + name(dtype);
  };
  with_activation(dtype, "rope", [&]<class T>() {
    launch_kernel(launch, what, rope_kernel<T>, dim3(static_cast<unsigned>(rows), ceil_div(pairs, kThreads)),
                  dim3(kThreads), 0, static_cast<T*>(x), stride, static_cast<int>(rows), heads, head_dim, table);
  });
}

}  // namespace nibblelm::cuda
