// The decode kernel for fp16, bf16 and fp32 weights. Activations become terms in the weight's half precision (bf16
// activations: one; fp32: two of fp16 or three of bf16), so that every product is exact and the sums are fp32.
#include "linear_decode.cuh"

namespace nibblelm::cuda {

template void launch_decode_format<WeightFormat::f16>(const DecodeChain&, int, const Launch&, const std::string&);
template void launch_decode_format<WeightFormat::bf16>(const DecodeChain&, int, const Launch&, const std::string&);
template void launch_decode_format<WeightFormat::f32>(const DecodeChain&, int, const Launch&, const std::string&);

}  // namespace nibblelm::cuda
