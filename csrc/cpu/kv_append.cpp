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

void write_head(const float* from, void* cache, int64_t at, int64_t width, bool bf16) {
  if (!bf16) {
    std::memcpy(static_cast<float*>(cache) + at, from, sizeof(float) * static_cast<size_t>(width));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(cache) + at;
  for (int64_t i = 0; i < width; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace

void kv_append(const KvAppendArgs& a) {
  const KvCache& c = a.cache;
  for (int64_t m = 0; m < a.m; ++m) require_rows(c, a.slots[m], a.positions[m], a.positions[m]);
  parallel_for(a.m, 1 + 32768 / (c.heads * c.width), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t at = cache_row(c, a.slots[m], head, a.positions[m]);
        write_head(a.k + m * a.k_stride + head * c.width, c.k, at, c.width, c.bf16);
        write_head(a.v + m * a.v_stride + head * c.width, c.v, at, c.width, c.bf16);
      }
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
