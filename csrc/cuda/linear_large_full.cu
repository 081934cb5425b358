// The kernel for many rows of x and fp16 or bf16 weights; of bf16 activations, which are one term.
#include "linear_large.cuh"

namespace nibblelm::cuda {

template void launch_large_format<WeightFormat::f16>(const LargeArgs&, int, const Launch&, const std::string&);
template void launch_large_format<WeightFormat::bf16>(const LargeArgs&, int, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
