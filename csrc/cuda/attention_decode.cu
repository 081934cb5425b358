// Decode attention without what comes before it.
#include "attention_decode.cuh"

namespace nibblelm::cuda {

int64_t attention_workspace(const AttentionArgs& a) {
  int64_t bytes{0};
  const auto count = [&]<class S, class T>() { bytes = Division::of<T>(a, choose<S, T, false>(a)).chunks.bytes; };
  return with_tensor_cores<false>(a, count) ? bytes : attention_workspace_fma(a);
}

void attention_decode(const AttentionArgs& a, const Launch& launch) {
  if (!with_tensor_cores<false>(a, [&]<class S, class T>() { launch_decode<S, T, false>(a, {}, launch); }))
    attention_decode_fma(a, launch);
}

}  // namespace nibblelm::cuda
