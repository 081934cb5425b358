// silu(x) = x * sigmoid(x) and the tanh form of gelu, one definition for the kernels that have them inside.
#pragma once

namespace nibblelm::cuda {

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kRootTwoOverPi{0.7978845608028654f};
  return 0.5f * x * (1.0f + tanhf(kRootTwoOverPi * (x + 0.044715f * x * x * x)));
}

}  // namespace nibblelm::cuda
