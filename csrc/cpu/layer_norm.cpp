#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

void norm_row(const LayerNormArgs& a, const float* weight, const float* x, const float* residual, float* sum,
              float* out) {
  const auto for_lanes = [&](auto&& f) {
    for (int64_t i = 0; i < a.width; i += kLanes) f(i, static_cast<int>(min(kLanes, a.width - i)));
  };
  F32 total = set1(0.0f), squares = set1(0.0f);
  for_lanes([&](int64_t i, int n) {
    F32 h = load_first(x + i, n);
    if (residual != nullptr) {
      h = h + load_first(residual + i, n);
      store_first(sum + i, h, n);
    }
    total = total + h;
  });
  const float* h = residual != nullptr ? sum : x;
  const F32 mean = set1(sum_lanes(total) / static_cast<float>(a.width));
  for_lanes([&](int64_t i, int n) {  // of the centred values, which a second look costs little for
    float lanes[kLanes] = {};
    store_first(lanes, load_first(h + i, n) - mean, n);
    const F32 centred = load(lanes);
    squares = fma(centred, centred, squares);
  });
  const F32 inverse = set1(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(a.width) + a.eps));
  for_lanes([&](int64_t i, int n) {
    const F32 offset = a.bias == nullptr ? set1(0.0f) : load_first(a.bias + i, n);
    store_first(out + i, fma((load_first(h + i, n) - mean) * inverse, load_first(weight + i, n), offset), n);
  });
}

}  // namespace

void layer_norm(const LayerNormArgs& a) {
  parallel_for(a.m * a.heads, 1 + 16384 / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t m = row / a.heads, head = row % a.heads * a.width;
      const float* residual = a.residual == nullptr ? nullptr : a.residual + m * a.residual_stride + head;
      norm_row(a, a.weight + (a.per_head ? head : 0), a.x + m * a.x_stride + head, residual,
               a.sum == nullptr ? nullptr : a.sum + row * a.width, a.out + row * a.width);
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
