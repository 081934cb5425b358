// The decode kernel for int4 weights: bf16 activations take two digits, fp32 three.
#include "linear_decode.cuh"

namespace nibblelm::cuda {

template <>
void launch_decode<WeightFormat::int4>(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  constexpr auto F = WeightFormat::int4;
  if (a.x_is_float) {
    a.group_shift > 0 ? launch_decode<F, true, 3>(a, launch, what) : launch_decode<F, false, 3>(a, launch, what);
  } else {
    a.group_shift > 0 ? launch_decode<F, true, 2>(a, launch, what) : launch_decode<F, false, 2>(a, launch, what);
  }
}

}  // namespace nibblelm::cuda
