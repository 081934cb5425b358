// The kernel for many rows of x and int4 weights.
#include "linear_large.cuh"

namespace nibblelm::cuda {

template void launch_large_format<WeightFormat::int4>(const LargeArgs&, int, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
