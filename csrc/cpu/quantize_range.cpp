// Clip search for int4 / int8 weights. A group stays in L1/L2 while about sixty (scale, zero-point) pairs are tried.
//
// Every instruction set runs the same fixed-width vector arithmetic in the same order (no fused multiply-add, eight
// lanes whatever the register width), so all machines choose the same codes.
#include "cpu/quantize.h"
#include "cpu/vec.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace nibblelm::NIBBLE_ISA {
namespace {

// ------------------------------------------------------------------------------------------------ helpers

// As in vec.h, no template of the standard library is called: one could be emitted out of line, once for all
// instruction sets.
NIBBLE_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
NIBBLE_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
NIBBLE_INLINE double smaller(double a, double b) { return a < b ? a : b; }
NIBBLE_INLINE double larger(double a, double b) { return a > b ? a : b; }
NIBBLE_INLINE float smaller(float a, float b) { return a < b ? a : b; }
NIBBLE_INLINE float larger(float a, float b) { return a > b ? a : b; }
NIBBLE_INLINE int smaller(int a, int b) { return a < b ? a : b; }
NIBBLE_INLINE int larger(int a, int b) { return a > b ? a : b; }

using F32x8 = float __attribute__((vector_size(32)));
using F64x8 = double __attribute__((vector_size(64)));

constexpr int64_t kStep{kGroupPadding};  // weights per iteration: two vectors
constexpr int64_t kCheck{256};           // weights between two looks at whether a candidate has already lost
constexpr float kRound{0x1.8p23F};       // adding and subtracting it rounds to nearest even
constexpr double kRoundWide{0x1.8p52};

// Ratios of the clip search, as in mse.py: sixteen quarter octaves, then finer steps around the best.
constexpr double kQuarterOctave{0.8408964152537145};
constexpr int kCoarse{16};
constexpr double kFine[]{1.0442737824274138, 1.0108892860517005};  // 2^(1/16), 2^(1/64)
constexpr int kReach{3};

struct Choice {
  float scale{1.0F};
  int zero{0};
  double error{__builtin_inf()};
};

// Branch-free, so that the loop over a row vectorises; subnormals come out exact, infinities keep their exponent.
NIBBLE_INLINE float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float scaled = float_of(magnitude) * 0x1p112F;
  const uint32_t top = (half & 0x7c00) == 0x7c00 ? 0x7f800000U : 0U;
  return float_of(bits_of(scaled) | top | static_cast<uint32_t>(half & 0x8000) << 16);
}

// `value` > 0 rounded to `type`, at least its smallest usable scale (one whose reciprocal is finite in fp32) and at
// most its largest finite one.
NIBBLE_INLINE float round_scale(double value, FloatType type) {
  float scale = static_cast<float>(smaller(value, 0x1.fffffep127));
  const uint32_t bits = bits_of(scale);
  if (type == FloatType::bf16) {
    scale = smaller(float_of((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000U), 0x1.fep127F);
  } else if (type == FloatType::fp16) {
    if (scale < 0x1p-14F) {
      scale = larger((scale + 0.75F) - 0.75F, 0x1p-24F);  // subnormals are multiples of 2^-24, the ulp of 0.75
    } else {
      scale = smaller(float_of((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000U), 65504.0F);
    }
  }
  return larger(scale, 0x1p-126F);
}

// The bits of an already rounded scale in its own type.
NIBBLE_INLINE void store_scale(void* scales, int64_t index, float scale, FloatType type) {
  const uint32_t bits = bits_of(scale);
  if (type == FloatType::fp32) {
    static_cast<float*>(scales)[index] = scale;
  } else if (type == FloatType::bf16) {
    static_cast<uint16_t*>(scales)[index] = static_cast<uint16_t>(bits >> 16);
  } else {
    const bool subnormal = scale < 0x1p-14F;
    static_cast<uint16_t*>(scales)[index] =
        static_cast<uint16_t>(subnormal ? static_cast<uint32_t>(scale * 0x1p24F) : (bits >> 13) - (112U << 10));
  }
}

// Returns false where a weight is not finite.
NIBBLE_INLINE bool load_group(const void* weights, int64_t first, int64_t count, FloatType type, float* w) {
  if (type == FloatType::fp32) {
    __builtin_memcpy(w, static_cast<const float*>(weights) + first, sizeof(float) * count);
  } else if (type == FloatType::bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(weights) + first;
    for (int64_t k = 0; k < count; ++k) w[k] = float_of(static_cast<uint32_t>(source[k]) << 16);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(weights) + first;
    for (int64_t k = 0; k < count; ++k) w[k] = half_to_float(source[k]);
  }
  uint32_t bad = 0;
  for (int64_t k = 0; k < count; ++k) bad |= (bits_of(w[k]) & 0x7fffffffU) >= 0x7f800000U;
  for (int64_t k = count; k % kStep != 0; ++k) w[k] = 0.0F;  // zero is exact in every scheme: no error added
  return bad == 0;
}

NIBBLE_INLINE F64x8 squared_error(const float* w, const F32x8& inverse, const F32x8& scale, const F32x8& low,
                                  const F32x8& high) {
  F32x8 weight;
  __builtin_memcpy(&weight, w, sizeof weight);
  F32x8 x = weight * inverse;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F32x8 error = weight - ((x + kRound) - kRound) * scale;
  const F64x8 wide = __builtin_convertvector(error, F64x8);
  return wide * wide;
}

// Squared error of (scale, zero) over a padded group; stops once it cannot beat `limit`.
NIBBLE_INLINE double group_error(const float* w, int64_t padded, float scale, int zero, int top, double limit) {
  const F32x8 inverse = F32x8{} + 1.0F / scale, step = F32x8{} + scale;
  const F32x8 low = F32x8{} + static_cast<float>(-zero), high = F32x8{} + static_cast<float>(top - zero);
  double total = 0.0;
  for (int64_t begin = 0; begin < padded && total < limit; begin += kCheck) {
    const int64_t end = min(begin + kCheck, padded);
    F64x8 first{}, second{};
    for (int64_t k = begin; k < end; k += kStep) {
      first += squared_error(w + k, inverse, step, low, high);
      second += squared_error(w + k + kStep / 2, inverse, step, low, high);
    }
    first += second;
    total += ((first[0] + first[1]) + (first[2] + first[3])) + ((first[4] + first[5]) + (first[6] + first[7]));
  }
  return total;
}

struct Group {
  const float* w;
  int64_t padded;
  double low, high;  // minimum and maximum, both widened to include 0
};

NIBBLE_INLINE Choice range_choice(double low, double high, const QuantizeScheme& scheme) {
  const int top = (1 << scheme.bits) - 1, middle = 1 << (scheme.bits - 1);
  Choice choice;
  if (scheme.symmetric) {
    choice.scale = round_scale(larger(high / (top - middle), -low / middle), scheme.scale_type);
    choice.zero = middle;
  } else {
    choice.scale = round_scale((high - low) / top, scheme.scale_type);
    choice.zero = static_cast<int>(
        smaller(larger((-low / choice.scale + kRoundWide) - kRoundWide, 0.0), static_cast<double>(top)));
  }
  return choice;
}

NIBBLE_INLINE void keep_better(Choice& best, Choice candidate, const Group& group, int top) {
  candidate.error = group_error(group.w, group.padded, candidate.scale, candidate.zero, top, best.error);
  if (candidate.error < best.error) best = candidate;
}

NIBBLE_INLINE Choice choose(const Group& group, const QuantizeScheme& scheme) {
  const int top = (1 << scheme.bits) - 1, middle = 1 << (scheme.bits - 1);
  const double largest = larger(-group.low, group.high);
  if (largest == 0.0) return {1.0F, middle, 0.0};
  Choice best = range_choice(group.low, group.high, scheme);
  best.error = group_error(group.w, group.padded, best.scale, best.zero, top, best.error);
  if (!scheme.search) return best;

  // Constant and ternary rows are exact with the magnitude itself as the scale.
  const int ternary = scheme.symmetric ? middle : group.low < 0.0 ? 1 : 0;
  keep_better(best, {round_scale(largest, scheme.scale_type), ternary}, group, top);

  double clip = largest;
  for (int i = 0; i < kCoarse; ++i) {
    clip *= kQuarterOctave;
    keep_better(best, range_choice(larger(group.low, -clip), smaller(group.high, clip), scheme), group, top);
  }
  const int shift = scheme.symmetric ? 0 : 1;
  for (const double ratio : kFine) {
    const Choice centre = best;
    for (int zero = larger(centre.zero - shift, 0); zero <= smaller(centre.zero + shift, top); ++zero) {
      double scale = centre.scale;
      for (int i = 0; i < kReach; ++i) scale /= ratio;
      for (int i = -kReach; i <= kReach; ++i, scale *= ratio) {
        keep_better(best, {round_scale(scale, scheme.scale_type), zero}, group, top);
      }
    }
  }
  return best;
}

NIBBLE_INLINE void store_codes(const float* w, int64_t count, const Choice& choice, int bits, uint32_t* words) {
  const float inverse = 1.0F / choice.scale;
  const float low = static_cast<float>(-choice.zero), high = static_cast<float>((1 << bits) - 1 - choice.zero);
  const int per_word = 32 / bits;
  for (int64_t first = 0; first < count; first += per_word) {
    const int used = static_cast<int>(min(per_word, count - first));
    uint32_t word = 0;
    for (int i = 0; i < used; ++i) {
      const float x = smaller(larger(w[first + i] * inverse, low), high);
      word |= static_cast<uint32_t>(static_cast<int>((x + kRound) - kRound) + choice.zero) << (bits * i);
    }
    words[first / per_word] = word;
  }
}

// ------------------------------------------------------------------------------------------------ kernel

}  // namespace

// Rows [begin, end). Returns the first row that is not finite, or -1.
int64_t quantize_range(const QuantizeArgs& args, int64_t begin, int64_t end, float* w) {
  const auto& [weights, cols, scheme, out] = args;
  const int64_t groups = (cols + scheme.group - 1) / scheme.group;
  const int per_word = 32 / scheme.bits;
  const int64_t words = (cols + per_word - 1) / per_word;
  for (int64_t row = begin; row < end; ++row) {
    double error = 0.0, norm = 0.0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * scheme.group, count = min(scheme.group, cols - first);
      if (!load_group(weights, row * cols + first, count, scheme.weight_type, w)) return row;
      const int64_t padded = (count + kStep - 1) / kStep * kStep;
      F32x8 low{}, high{};
      F64x8 squares{};
      for (int64_t k = 0; k < padded; k += 8) {
        F32x8 x;
        __builtin_memcpy(&x, w + k, sizeof x);
        low = x < low ? x : low;
        high = x > high ? x : high;
        const F64x8 wide = __builtin_convertvector(x, F64x8);
        squares += wide * wide;
      }
      Group group{w, padded, 0.0, 0.0};
      for (int lane = 0; lane < 8; ++lane) {
        group.low = smaller(group.low, static_cast<double>(low[lane]));
        group.high = larger(group.high, static_cast<double>(high[lane]));
        norm += squares[lane];
      }
      const Choice choice = choose(group, scheme);
      error += choice.error;
      store_scale(out.scales, row * groups + g, choice.scale, scheme.scale_type);
      out.zeros[row * groups + g] = static_cast<uint8_t>(choice.zero);
      store_codes(w, count, choice, scheme.bits, out.codes + row * words + first / per_word);
    }
    out.squared_error[row] = error;
    out.squared_norm[row] = norm;
  }
  return -1;
}

}  // namespace nibblelm::NIBBLE_ISA
