// alibi_mask: causal mask with linear biases (Press et al. 2022).
#include "attention_mask.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};

// One block takes kThreads columns of one query row of one (batch, head) plane; columns are the fastest index, so the
// scalar accesses of a warp are one 64- or 128-byte line.
template <class T>
__global__ void alibi_mask_kernel(T* scores, const float* slopes, float value, int heads, int queries, int keys) {
  dependency_wait();
  dependency_release();
  const int column = blockIdx.x * kThreads + threadIdx.x;
  const int64_t row = blockIdx.y + static_cast<int64_t>(blockIdx.z) * queries;
  if (column >= keys) return;
  T* const s = scores + row * keys + column;
  const bool allowed = column <= keys - queries + static_cast<int>(blockIdx.y);
  *s = from_float<T>(allowed ? to_float(*s) + slopes[blockIdx.z % heads] * static_cast<float>(column) : value);
}

}  // namespace

void alibi_mask(void* scores, const float* slopes, float value, int64_t batch, int64_t heads, int64_t queries,
                int64_t keys, DType dtype, const Launch& launch) {
  if (batch * heads * queries * keys == 0) return;
  const auto what = [&] {
    return "alibi_mask planes=" + std::to_string(batch * heads) + " queries=" + std::to_string(queries) +
           " keys=" + std::to_string(keys) + " " + name(dtype);
  };
  if (batch * heads > 65535 || queries > 65535)
    throw std::invalid_argument(what() + ": more than 65535 planes or queries");
  with_activation(dtype, "alibi_mask", [&]<class T>() {
    const dim3 grid(ceil_div(keys, kThreads), static_cast<unsigned>(queries), static_cast<unsigned>(batch * heads));
    launch_kernel(launch, what, alibi_mask_kernel<T>, grid, dim3(kThreads), 0, static_cast<T*>(scores), slopes, value,
                  static_cast<int>(heads), static_cast<int>(queries), static_cast<int>(keys));
  });
}

}  // namespace nibblelm::cuda
