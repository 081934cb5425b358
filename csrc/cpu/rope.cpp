#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = static_cast<int>(min(kLanes, half - i));
    const F32 c = load_first(cos + i, n), s = load_first(sin + i, n);
    const F32 a = load_first(x + i, n), b = load_first(x + half + i, n);
    store_first(x + i, a * c - b * s, n);
    store_first(x + half + i, b * c + a * s, n);
  }
}

void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

void rope(const RopeArgs& a) {
  for (int64_t m = 0; m < a.m; ++m) {
    if (a.positions[m] < 0 || a.positions[m] >= a.capacity) {
      throw std::invalid_argument("rope: a position is outside the tables");
    }
  }
  const int64_t row = a.heads * a.width + 1;
  parallel_for(a.m, 1 + 16384 / row, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float *cos = a.cos + a.positions[m] * a.half, *sin = a.sin + a.positions[m] * a.half;
      for (int64_t head = 0; head < a.heads; ++head) {
        float* x = a.x + m * a.x_stride + head * a.width;
        a.interleaved ? rotate_pairs(x, cos, sin, a.half) : rotate_halves(x, cos, sin, a.half);
      }
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
