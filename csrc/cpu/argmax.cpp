#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

// Lowest index of the largest value. NaN is never the largest; a row without any value above -infinity gives 0.
int32_t row_argmax(const float* x, int64_t n) {
  float best_value = -__builtin_inff();
  int32_t best = 0;
  const int64_t whole = n / kLanes * kLanes;
  F32 values = set1(best_value), indices = from_bits(set1(0));
  for (int64_t i = 0; i < whole; i += kLanes) {
    const F32 v = load(x + i);
    indices = select_greater(v, values, from_bits(set1(static_cast<int32_t>(i))), indices);
    values = select_greater(v, values, v, values);
  }
  float lanes[kLanes];
  int32_t starts[kLanes];
  store(lanes, values);
  store(starts, bits(indices));
  for (int i = 0; i < kLanes; ++i) {
    const int32_t index = starts[i] + i;
    if (lanes[i] > best_value || (lanes[i] == best_value && index < best)) {
      best_value = lanes[i];
      best = index;
    }
  }
  for (int64_t i = whole; i < n; ++i) {
    if (x[i] > best_value) {
      best_value = x[i];
      best = static_cast<int32_t>(i);
    }
  }
  return best;
}

}  // namespace

void argmax(const ArgmaxArgs& a) {
  parallel_for(a.m, 1 + 65536 / a.n, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) a.out[m] = row_argmax(a.x + m * a.stride, a.n);
  });
}

}  // namespace nibblelm::NIBBLE_ISA
