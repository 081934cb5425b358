#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

NIBBLE_INLINE F32 load_upto(const float* p, int64_t n) {
  return n >= kLanes ? load(p) : load_first(p, static_cast<int>(n));
}
NIBBLE_INLINE void store_upto(float* p, F32 v, int64_t n) {
  n >= kLanes ? store(p, v) : store_first(p, v, static_cast<int>(n));
}

void norm_row(const RmsNormArgs& a, const float* x, const float* residual, float* sum, float* out) {
  F32 squares = set1(0.0f);
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t n = a.width - i;
    F32 h = load_upto(x + i, n);
    if (residual != nullptr) {
      h = h + load_upto(residual + i, n);
      store_upto(sum + i, h, n);
    }
    squares = fma(h, h, squares);
  }
  const float mean = sum_lanes(squares) / static_cast<float>(a.width);
  const F32 inverse = set1(1.0f / __builtin_sqrtf(mean + a.eps)), offset = set1(a.plus_one ? 1.0f : 0.0f);
  const float* h = residual != nullptr ? sum : x;
  for (int64_t i = 0; i < a.width; i += kLanes) {
    const int64_t n = a.width - i;
    store_upto(out + i, load_upto(h + i, n) * inverse * (load_upto(a.weight + i, n) + offset), n);
  }
}

}  // namespace

void rms_norm(const RmsNormArgs& a) {
  parallel_for(a.m * a.heads, 1 + 16384 / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t m = row / a.heads, head = row % a.heads * a.width;
      norm_row(a, a.x + m * a.x_stride + head,
               a.residual == nullptr ? nullptr : a.residual + m * a.residual_stride + head,
               a.sum == nullptr ? nullptr : a.sum + row * a.width, a.out + m * a.out_stride + head);
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
