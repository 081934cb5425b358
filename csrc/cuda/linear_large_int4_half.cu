// The kernel for many rows of x and int4 codes in groups of 128, multiplied in fp16.
#include "linear_groups.cuh"

namespace nibblelm::cuda {

template void launch_large_format<WeightFormat::int4_half>(const LargeArgs&, int, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
