// RMSNorm (Zhang & Sennrich 2019): launcher. The kernel is in norm.cuh.
#include "norm.cuh"

namespace nibblelm::cuda {

void rms_norm(const NormArgs& args, DType dtype, const Launch& launch) {
  launch_norm<false>(args, dtype, "rms_norm", launch);
}

}  // namespace nibblelm::cuda
