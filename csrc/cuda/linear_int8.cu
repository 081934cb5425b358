// The decode kernel for int8 weights: bf16 activations take two digits, or one of 8 bits, fp32 three.
#include "linear_decode.cuh"

namespace nibblelm::cuda {

template void launch_decode_format<WeightFormat::int8>(const DecodeChain&, int, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
