// Softmax and its logarithm over rows of any length: maximum, then sum, then result.
#include <cmath>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

constexpr float kInfinity{__builtin_inff()};
constexpr int64_t kSumBlock{1024};  // columns summed before they join the total: keeps rounding errors small

NIBBLE_INLINE F32 load_or_lowest(const float* p, int64_t n) {  // -infinity where the row has ended
  if (n >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : -kInfinity;
  return load(lanes);
}

float row_maximum(const float* x, int64_t n) {
  F32 top = set1(-kInfinity);
  for (int64_t i = 0; i < n; i += kLanes) top = max(load_or_lowest(x + i, n - i), top);
  return max_lanes(top);
}

float sum_of_exponentials(const float* x, int64_t n, float top) {
  F32 total = set1(0.0f);
  for (int64_t first = 0; first < n; first += kSumBlock) {
    F32 sum = set1(0.0f);
    for (int64_t i = first; i < min(n, first + kSumBlock); i += kLanes) {
      sum = sum + exp_nonpositive(load_or_lowest(x + i, n - i) - set1(top));
    }
    total = total + sum;
  }
  return sum_lanes(total);
}

template <typename Row>
void for_rows(const RowsArgs& a, const Row& row) {
  parallel_for(a.m, 1 + 8192 / a.n, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) row(a.x + m * a.stride, a.out + m * a.n);
  });
}

// For each vector of the row: out = value(x).
template <typename Value>
void map_row(const float* x, float* out, int64_t n, const Value& value) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(min(kLanes, n - i));
    store_first(out + i, value(load_first(x + i, count)), count);
  }
}

}  // namespace

void softmax(const RowsArgs& a) {
  for_rows(a, [&](const float* x, float* out) {
    const float top = row_maximum(x, a.n);
    // No maximum: -infinity gives zero, NaN stays NaN.
    if (top == -kInfinity) return map_row(x, out, a.n, [](F32 v) { return exp_nonpositive(v); });
    const F32 inverse = set1(1.0f / sum_of_exponentials(x, a.n, top));
    map_row(x, out, a.n, [&](F32 v) { return exp_nonpositive(v - set1(top)) * inverse; });
  });
}

void log_softmax(const RowsArgs& a) {
  for_rows(a, [&](const float* x, float* out) {
    const float top = row_maximum(x, a.n);
    if (top == -kInfinity) return map_row(x, out, a.n, [](F32 v) { return v; });
    const F32 log_sum = set1(static_cast<float>(std::log(static_cast<double>(sum_of_exponentials(x, a.n, top)))));
    map_row(x, out, a.n, [&](F32 v) { return (v - set1(top)) - log_sum; });
  });
}

}  // namespace nibblelm::NIBBLE_ISA
