#include "cpu/activation.h"

#include "cpu/team.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

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
  with_form(a.form, [&](auto form) { run<form>(a); });
}

}  // namespace nibblelm::NIBBLE_ISA
