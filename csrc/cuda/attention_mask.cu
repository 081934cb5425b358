// attention_mask: forbidden scores become the mask value.
#include "attention_mask.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{256};
constexpr float kForbidden{0.99f};

// One block takes kThreads * V elements of one (batch, head) plane of `plane` = Q * K elements.
template <class T, int V>
__global__ void attention_mask_kernel(T* scores, const T* mask, float value, int64_t heads, int64_t plane) {
  dependency_wait();
  dependency_release();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * V;
  if (i >= plane) return;
  T* const s = scores + blockIdx.y * plane + i;
  float x[V], m[V];
  load(s, x);
  load(mask + blockIdx.y / heads * plane + i, m);
#pragma unroll
  for (int j = 0; j < V; ++j) x[j] = m[j] > kForbidden ? value : x[j];
  store(s, x);
}

}  // namespace

void attention_mask(void* scores, const void* mask, float value, int64_t batch, int64_t heads, int64_t queries,
                    int64_t keys, DType dtype, const Launch& launch) {
  const int64_t plane = queries * keys;
  if (batch * heads * plane == 0) return;
  const auto what = [&] {
    return "attention_mask planes=" + std::to_string(batch * heads) + " queries=" + std::to_string(queries) +
           " keys=" + std::to_string(keys) + " " + name(dtype);
  };
  if (batch * heads > 65535) throw std::invalid_argument(what() + ": more than 65535 planes");
  with_activation(dtype, "attention_mask", [&]<class T>() {
    const bool wide = aligned16(scores, plane * sizeof(T)) && aligned16(mask, plane * sizeof(T));
    const dim3 grid(ceil_div(plane, kThreads * (wide ? kWide<T> : 1)), static_cast<unsigned>(batch * heads));
    launch_kernel(launch, what, wide ? attention_mask_kernel<T, kWide<T>> : attention_mask_kernel<T, 1>, grid,
                  dim3(kThreads), 0, static_cast<T*>(scores), static_cast<const T*>(mask), value, heads, plane);
  });
}

}  // namespace nibblelm::cuda
