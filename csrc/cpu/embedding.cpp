#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

NIBBLE_INLINE F32 load_as(const void* p, int64_t at, DType type) {
  const auto* halves = static_cast<const uint16_t*>(p) + at;
  return type == DType::fp32   ? load(static_cast<const float*>(p) + at)
         : type == DType::bf16 ? load_bf16(halves)
                               : load_f16(halves);
}

// One value, through a copy of whole lanes: tables end where their last row ends.
NIBBLE_INLINE float value_at(const void* p, int64_t at, DType type) {
  uint32_t words[kLanes] = {};
  std::memcpy(words, static_cast<const uint8_t*>(p) + at * size_of(type), static_cast<size_t>(size_of(type)));
  float lanes[kLanes];
  store(lanes, load_as(words, 0, type));
  return lanes[0];
}

void copy_row(const EmbeddingArgs& a, int64_t id, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= a.width; i += kLanes) {
    store(out + i, load_as(a.table, id * a.width + i, a.dtype) * set1(a.multiplier));
  }
  for (; i < a.width; ++i) out[i] = value_at(a.table, id * a.width + i, a.dtype) * a.multiplier;
}

void dequantize_row(const QuantizedRowMajor& q, int64_t id, float multiplier, float* out) {
  const int64_t per_word = 32 / q.bits, groups = (q.k + q.group - 1) / q.group;
  const uint32_t* words = q.codes + id * ((q.k + per_word - 1) / per_word);
  const uint32_t mask = (1u << q.bits) - 1;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = value_at(q.scale, id * groups + g, q.scale_type);
    float minimum = 0.0f;
    int32_t zero = 0;
    switch (q.offset()) {
      case Offset::symmetric:
        zero = 1 << (q.bits - 1);
        break;
      case Offset::minimum:
        minimum = value_at(q.minimum, id * groups + g, q.scale_type);
        break;
      case Offset::zero_point:
        zero = static_cast<int32_t>(q.zero[id / per_word * groups + g] >> (id % per_word * q.bits) & mask);
    }
    for (int64_t k = g * q.group; k < min(q.k, (g + 1) * q.group); ++k) {
      const auto code = static_cast<int32_t>(words[k / per_word] >> (k % per_word * q.bits) & mask);
      out[k] = (static_cast<float>(code - zero) * scale + minimum) * multiplier;
    }
  }
}

}  // namespace

void embedding(const EmbeddingArgs& a) {
  for (int64_t m = 0; m < a.m; ++m) {
    if (a.ids[m] < 0 || a.ids[m] >= a.rows) throw std::invalid_argument("embedding: an id is outside the table");
  }
  parallel_for(a.m, 1 + 8192 / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      float* out = a.out + m * a.width;
      a.table != nullptr ? copy_row(a, a.ids[m], out) : dequantize_row(a.quantized, a.ids[m], a.multiplier, out);
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
