// The decode kernel for int4 weights: bf16 activations take two digits, fp32 three.
#include "linear_decode.cuh"

namespace nibblelm::cuda {

template void launch_format<WeightFormat::int4>(const DecodeChain&, bool, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
