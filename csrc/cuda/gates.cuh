// Activations, one definition for the kernels that have them inside: silu and the tanh form of gelu as x sigmoid(y).
#pragma once

namespace nibblelm::cuda {

__device__ __forceinline__ float times_sigmoid(float x, float y) { return __fdividef(x, 1.0f + __expf(-y)); }

__device__ __forceinline__ float silu(float x) { return times_sigmoid(x, x); }

// (1 + tanh(u)) / 2 is sigmoid(2 u), here of 2 sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_argument(float x) { return 1.5957691216057308f * (x + 0.044715f * x * x * x); }
__device__ __forceinline__ float gelu_tanh(float x) { return times_sigmoid(x, gelu_argument(x)); }

__device__ __forceinline__ float gelu_erf(float x) {
  constexpr float kRootHalf{0.7071067811865476f};
  return 0.5f * x * (1.0f + erff(x * kRootHalf));
}

__device__ __forceinline__ float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays

}  // namespace nibblelm::cuda
