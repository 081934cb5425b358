// The decode kernel for fp16, bf16 and fp32 weights. Activations become terms in the weight's half precision whose sum
// is the activation (bf16 activations: one term; fp32: two fp16 or three bf16), products are exact, sums fp32.
#include "linear_decode.cuh"

namespace nibblelm::cuda {

template <>
void launch_decode<WeightFormat::f16>(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  a.x_is_float ? launch_decode<WeightFormat::f16, false, 2>(a, launch, what)
               : launch_decode<WeightFormat::f16, false, 1>(a, launch, what);
}

template <>
void launch_decode<WeightFormat::bf16>(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  a.x_is_float ? launch_decode<WeightFormat::bf16, false, 3>(a, launch, what)
               : launch_decode<WeightFormat::bf16, false, 1>(a, launch, what);
}

template <>
void launch_decode<WeightFormat::f32>(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  a.x_is_float ? launch_decode<WeightFormat::f32, false, 3>(a, launch, what)
               : launch_decode<WeightFormat::f32, false, 1>(a, launch, what);
}

}  // namespace nibblelm::cuda
