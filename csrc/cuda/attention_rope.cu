// Decode attention with QK-norm, rotary embedding and the KV write.
#include "attention_decode.cuh"

namespace nibblelm::cuda {

bool attention_fuses(const AttentionArgs& a, const RopeTable& t, bool norms) {
  bool fuses{false};
  with_tensor_cores<true>(
      a, [&]<class S, class>() { fuses = (S::kExact || !norms) && (kCaps<S> || !(a.softcap > 0.0f)); });
  return fuses && a.slopes == nullptr && a.mask == nullptr && a.prefix == nullptr && a.starts == nullptr &&
         t.streams == 1 && !t.interleaved && 2 * t.half == a.cache.head_dim;
}

void attention_rope(const AttentionArgs& a, const RopeTable& table, const float* q_norm, const float* k_norm, float eps,
                    bool plus_one, const Launch& launch) {
  if (!attention_fuses(a, table, q_norm != nullptr || k_norm != nullptr))
    throw std::invalid_argument(describe("rope_attention", a) + ": not a fused case");
  const HeadArgs head_args{table.cos, table.sin, q_norm, k_norm, eps, plus_one};
  with_tensor_cores<true>(a, [&]<class S, class T>() { launch_decode<S, T, true>(a, head_args, launch); });
}

}  // namespace nibblelm::cuda
