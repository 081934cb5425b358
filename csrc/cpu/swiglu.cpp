#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

// x * sigmoid(x), with the exponential taken of -|x| so that it cannot overflow.
NIBBLE_INLINE F32 silu(F32 x) {
  const F32 zero = set1(0.0f), one = set1(1.0f);
  const F32 magnitude = from_bits(bits(x) & set1(0x7fffffff));
  const F32 e = exp_nonpositive(zero - magnitude);
  return x * (select_greater(x, zero, one, e) / (one + e));
}

}  // namespace

void swiglu(const SwigluArgs& a) {
  constexpr int64_t kPiece{2048};  // columns per work item; about 1 us
  const int64_t pieces = (a.width + kPiece - 1) / kPiece;
  parallel_for(a.m * pieces, 2, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t m = item / pieces, first = item % pieces * kPiece, last = min(first + kPiece, a.width);
      const float *gate = a.gate_up + m * a.stride, *up = gate + a.width;
      for (int64_t i = first; i < last; i += kLanes) {
        const int n = static_cast<int>(min(kLanes, last - i));
        store_first(a.out + m * a.width + i, silu(load_first(gate + i, n)) * load_first(up + i, n), n);
      }
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
