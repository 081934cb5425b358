#include "cpu/kv_cache.h"
#include "cpu/team.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

NIBBLE_INLINE uint16_t to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint32_t rounded = word + 0x7fff + ((word >> 16) & 1);
  return static_cast<uint16_t>((word & 0x7fffffff) > 0x7f800000 ? (word >> 16) | 0x40 : rounded >> 16);
}

// Where a value is not finite, neither is the scale, and what is read is NaN.
void quantize(const float* x, int8_t* codes, float* scale, int64_t width) {
  I32 tops = bits(set1(0x1p-100f));  // below, 127 / top would overflow
  for (int64_t i = 0; i < width; i += kLanes) {
    const F32 part = load_first(x + i, static_cast<int>(min(kLanes, width - i)));
    tops = max(tops, bits(magnitude(part)));  // magnitudes are ordered as their bits are, and NaN is above all
  }
  const int32_t highest = max_lanes(tops);
  float top;
  std::memcpy(&top, &highest, 4);
  *scale = top / 127.0f;
  const bool finite = highest < 0x7f800000;
  const F32 inverse = set1(127.0f / top);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(min(kLanes, width - i));
    int8_t lanes[kLanes] = {};
    if (finite) store_low_bytes(lanes, round_to_int(load_first(x + i, n) * inverse));
    std::memcpy(codes + i, lanes, static_cast<size_t>(n));
  }
}

// Into row `row` of k or v.
void write_head(const float* from, void* cache, float* scales, int64_t row, int64_t width, int64_t bytes) {
  if (bytes == 1) return quantize(from, static_cast<int8_t*>(cache) + row * width, scales + row, width);
  if (bytes == 4) {
    std::memcpy(static_cast<float*>(cache) + row * width, from, sizeof(float) * static_cast<size_t>(width));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(cache) + row * width;
  for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace

void kv_append(const KvAppendArgs& a) {
  const KvCache& c = a.cache;
  for (int64_t m = 0; m < a.m; ++m) require_rows(c, a.slots[m], a.positions[m], a.positions[m]);
  parallel_for(a.m, 1 + 32768 / (c.heads * c.width), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t row = cache_row(c, a.slots[m], head, a.positions[m]);
        write_head(a.k + m * a.k_stride + head * c.width, c.k, c.k_scales, row, c.width, c.bytes);
        write_head(a.v + m * a.v_stride + head * c.width, c.v, c.v_scales, row, c.width, c.bytes);
      }
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
