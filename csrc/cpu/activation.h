// Elementwise activations of sixteen lanes.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {

// sigmoid(x), with the exponential taken of -|x| so that it cannot overflow.
NIBBLE_INLINE F32 sigmoid(F32 x) {
  const F32 zero = set1(0.0f), one = set1(1.0f);
  const F32 e = exp_nonpositive(zero - magnitude(x));
  return select_greater(x, zero, one, e) / (one + e);
}

// The normal distribution function by the complementary error function's approximation 7.1.26 of Abramowitz and Stegun
// (absolute error at most 1.5e-7).
NIBBLE_INLINE F32 normal_cdf(F32 x) {
  const F32 one = set1(1.0f), z = magnitude(x) * set1(0.70710678118654752f);
  const F32 t = one / fma(set1(0.3275911f), z, one);
  F32 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F32 tail = set1(0.5f) * p * t * exp_nonpositive(set1(0.0f) - z * z);
  return select_greater(x, set1(0.0f), one - tail, tail);
}

template <Activation kForm>
NIBBLE_INLINE F32 activation(F32 x, float cap) {
  if constexpr (kForm == Activation::silu) {
    return x * sigmoid(x);
  } else if constexpr (kForm == Activation::gelu_tanh) {  // (1 + tanh u) / 2 = sigmoid(2 u)
    return x * sigmoid(set1(1.5957691216057308f) * fma(set1(0.044715f) * x * x, x, x));
  } else if constexpr (kForm == Activation::gelu_erf) {
    return x * normal_cdf(x);
  } else if constexpr (kForm == Activation::softcap) {
    return set1(cap) * tanh(x / set1(cap));
  } else if constexpr (kForm == Activation::relu) {
    return max(set1(0.0f), x);  // in this order NaN stays
  } else {
    return x * set1(cap);
  }
}

// Calls f with the form as a constant.
template <typename F>
NIBBLE_INLINE void with_form(Activation form, const F& f) {
  switch (form) {
    case Activation::silu:
      return f(std::integral_constant<Activation, Activation::silu>{});
    case Activation::gelu_tanh:
      return f(std::integral_constant<Activation, Activation::gelu_tanh>{});
    case Activation::gelu_erf:
      return f(std::integral_constant<Activation, Activation::gelu_erf>{});
    case Activation::softcap:
      return f(std::integral_constant<Activation, Activation::softcap>{});
    case Activation::relu:
      return f(std::integral_constant<Activation, Activation::relu>{});
    case Activation::scale:
      return f(std::integral_constant<Activation, Activation::scale>{});
  }
}

}  // namespace nibblelm::NIBBLE_ISA
