#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

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

template <Activation kForm>
void run(const ActivationArgs& a) {
  constexpr int64_t kPiece{2048};  // columns per work item; about 1 us
  const int64_t pieces = (a.width + kPiece - 1) / kPiece;
  parallel_for(a.m * pieces, 2, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t m = item / pieces, first = item % pieces * kPiece, last = min(first + kPiece, a.width);
      const float *x = a.x + m * a.stride, *up = x + a.width;
      for (int64_t i = first; i < last; i += kLanes) {
        const int n = static_cast<int>(min(kLanes, last - i));
        F32 y = activation<kForm>(load_first(x + i, n), a.cap);
        if (a.gated) y = y * load_first(up + i, n);
        store_first(a.out + m * a.width + i, y, n);
      }
    }
  });
}

}  // namespace

void activate(const ActivationArgs& a) {
  switch (a.form) {
    case Activation::silu:
      return run<Activation::silu>(a);
    case Activation::gelu_tanh:
      return run<Activation::gelu_tanh>(a);
    case Activation::gelu_erf:
      return run<Activation::gelu_erf>(a);
    case Activation::softcap:
      return run<Activation::softcap>(a);
    case Activation::relu:
      return run<Activation::relu>(a);
    case Activation::scale:
      return run<Activation::scale>(a);
  }
}

}  // namespace nibblelm::NIBBLE_ISA
