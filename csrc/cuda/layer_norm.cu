// LayerNorm (Ba et al. 2016): launcher. The kernel is in norm.cuh.
#include "norm.cuh"

namespace nibblelm::cuda {

void layer_norm(const NormArgs& args, DType dtype, const Launch& launch) {
  launch_norm<true>(args, dtype, "layer_norm", launch);
}

}  // namespace nibblelm::cuda
