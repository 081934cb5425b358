#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/team.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

// A mask mostly has words of one kind: nothing of a stretch of the vocabulary is allowed, or all of it.
void mask_row(const float* x, const uint32_t* mask, float* out, int64_t n) {
  for (int64_t first = 0; first < n; first += 32) {
    const uint32_t word = mask[first / 32];
    const int count = static_cast<int>(std::min<int64_t>(32, n - first));
    if (word == 0) {
      std::fill_n(out + first, count, -__builtin_inff());
    } else if (word == ~0u) {
      std::copy_n(x + first, count, out + first);
    } else {
      for (int i = 0; i < count; ++i) out[first + i] = word >> i & 1 ? x[first + i] : -__builtin_inff();
    }
  }
}

}  // namespace

void mask_logits(const MaskArgs& a) {
  parallel_for(a.m, 1 + 65536 / a.n, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) mask_row(a.x + m * a.stride, a.mask + m * a.words, a.out + m * a.n, a.n);
  });
}

}  // namespace nibblelm::NIBBLE_ISA
