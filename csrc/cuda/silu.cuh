// silu(x) = x * sigmoid(x), one definition for the kernels that have it inside.
#pragma once

namespace nibblelm::cuda {

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

}  // namespace nibblelm::cuda
