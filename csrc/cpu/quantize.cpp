// Clip search for int4 / int8 weights. A group stays in L1/L2 while about sixty (scale, zero-point) pairs are tried.
//
// Every clone below runs the same fixed-width vector arithmetic in the same order (no fused multiply-add, eight
// lanes whatever the register width), so all machines choose the same codes.
#include "cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#define NIBBLELM_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define NIBBLELM_CLONES
#endif
#define NIBBLELM_INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace nibblelm {
namespace {

// ------------------------------------------------------------------------------------------------ helpers

using F32x8 = float __attribute__((vector_size(32)));
using F64x8 = double __attribute__((vector_size(64)));

constexpr int64_t kStep{16};          // weights per iteration: two vectors; groups are padded to it with zeros
constexpr int64_t kCheck{256};        // weights between two looks at whether a candidate has already lost
constexpr float kRound{12582912.0F};  // 1.5 * 2^23: adding and subtracting it rounds to nearest even

// Ratios of the clip search, as in mse.py: sixteen quarter octaves, then finer steps around the best.
constexpr double kQuarterOctave{0.8408964152537145};
constexpr int kCoarse{16};
constexpr double kFine[]{1.0442737824274138, 1.0108892860517005};  // 2^(1/16), 2^(1/64)
constexpr int kReach{3};

struct Choice {
  float scale{1.0F};
  int zero{0};
  double error{std::numeric_limits<double>::infinity()};
};

// Branch-free, so that the loop over a row vectorises; subnormals come out exact, infinities keep their exponent.
NIBBLELM_INLINE float half_to_float(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112F;
  const uint32_t top = (half & 0x7c00) == 0x7c00 ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | top | static_cast<uint32_t>(half & 0x8000) << 16);
}

// `value` > 0 rounded to `type`, at least its smallest usable scale (one whose reciprocal is finite in fp32) and at
// most its largest finite one.
NIBBLELM_INLINE float round_scale(double value, FloatType type) {
  float scale = static_cast<float>(std::min(value, 0x1.fffffep127));
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  if (type == FloatType::bf16) {
    scale = std::min(std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000U), 0x1.fep127F);
  } else if (type == FloatType::fp16) {
    if (scale < 0x1p-14F) {
      scale = std::max((scale + 0.75F) - 0.75F, 0x1p-24F);  // subnormals are multiples of 2^-24, the ulp of 0.75
    } else {
      scale = std::min(std::bit_cast<float>((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000U), 65504.0F);
    }
  }
  return std::max(scale, std::numeric_limits<float>::min());
}

// The bits of an already rounded scale in its own type.
NIBBLELM_INLINE void store_scale(void* scales, int64_t index, float scale, FloatType type) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
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
NIBBLELM_INLINE bool load_group(const void* weights, int64_t first, int64_t count, FloatType type, float* w) {
  if (type == FloatType::fp32) {
    std::memcpy(w, static_cast<const float*>(weights) + first, sizeof(float) * count);
  } else if (type == FloatType::bf16) {
    const uint16_t* source = static_cast<const uint16_t*>(weights) + first;
    for (int64_t k = 0; k < count; ++k) w[k] = std::bit_cast<float>(static_cast<uint32_t>(source[k]) << 16);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(weights) + first;
    for (int64_t k = 0; k < count; ++k) w[k] = half_to_float(source[k]);
  }
  uint32_t bad = 0;
  for (int64_t k = 0; k < count; ++k) bad |= (std::bit_cast<uint32_t>(w[k]) & 0x7fffffffU) >= 0x7f800000U;
  for (int64_t k = count; k % kStep != 0; ++k) w[k] = 0.0F;  // zero is exact in every scheme: no error added
  return bad == 0;
}

NIBBLELM_INLINE F64x8 squared_error(const float* w, F32x8 inverse, F32x8 scale, F32x8 low, F32x8 high) {
  F32x8 weight;
  std::memcpy(&weight, w, sizeof weight);
  F32x8 x = weight * inverse;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F32x8 error = weight - ((x + kRound) - kRound) * scale;
  const F64x8 wide = __builtin_convertvector(error, F64x8);
  return wide * wide;
}

// Squared error of (scale, zero) over a padded group; stops once it cannot beat `limit`.
NIBBLELM_INLINE double group_error(const float* w, int64_t padded, float scale, int zero, int top, double limit) {
  const F32x8 inverse = F32x8{} + 1.0F / scale, step = F32x8{} + scale;
  const F32x8 low = F32x8{} + static_cast<float>(-zero), high = F32x8{} + static_cast<float>(top - zero);
  double total = 0.0;
  for (int64_t begin = 0; begin < padded && total < limit; begin += kCheck) {
    const int64_t end = std::min(begin + kCheck, padded);
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

NIBBLELM_INLINE Choice range_choice(double low, double high, const QuantizeScheme& scheme) {
  const int top = (1 << scheme.bits) - 1, middle = 1 << (scheme.bits - 1);
  Choice choice;
  if (scheme.symmetric) {
    choice.scale = round_scale(std::max(high / (top - middle), -low / middle), scheme.type);
    choice.zero = middle;
  } else {
    choice.scale = round_scale((high - low) / top, scheme.type);
    choice.zero = static_cast<int>(std::clamp(std::nearbyint(-low / choice.scale), 0.0, static_cast<double>(top)));
  }
  return choice;
}

NIBBLELM_INLINE void keep_better(Choice& best, Choice candidate, const Group& group, int top) {
  candidate.error = group_error(group.w, group.padded, candidate.scale, candidate.zero, top, best.error);
  if (candidate.error < best.error) best = candidate;
}

NIBBLELM_INLINE Choice choose(const Group& group, const QuantizeScheme& scheme) {
  const int top = (1 << scheme.bits) - 1, middle = 1 << (scheme.bits - 1);
  const double largest = std::max(-group.low, group.high);
  if (largest == 0.0) return {1.0F, middle, 0.0};
  Choice best = range_choice(group.low, group.high, scheme);
  best.error = group_error(group.w, group.padded, best.scale, best.zero, top, best.error);
  if (!scheme.search) return best;

  // Constant and ternary rows are exact with the magnitude itself as the scale.
  const int ternary = scheme.symmetric ? middle : group.low < 0.0 ? 1 : 0;
  keep_better(best, {round_scale(largest, scheme.type), ternary}, group, top);

  double clip = largest;
  for (int i = 0; i < kCoarse; ++i) {
    clip *= kQuarterOctave;
    keep_better(best, range_choice(std::max(group.low, -clip), std::min(group.high, clip), scheme), group, top);
  }
  const int shift = scheme.symmetric ? 0 : 1;
  for (const double ratio : kFine) {
    const Choice centre = best;
    for (int zero = std::max(centre.zero - shift, 0); zero <= std::min(centre.zero + shift, top); ++zero) {
      double scale = centre.scale;
      for (int i = 0; i < kReach; ++i) scale /= ratio;
      for (int i = -kReach; i <= kReach; ++i, scale *= ratio) {
        keep_better(best, {round_scale(scale, scheme.type), zero}, group, top);
      }
    }
  }
  return best;
}

NIBBLELM_INLINE void store_codes(const float* w, int64_t count, const Choice& choice, int bits, uint32_t* words) {
  const float inverse = 1.0F / choice.scale;
  const float low = static_cast<float>(-choice.zero), high = static_cast<float>((1 << bits) - 1 - choice.zero);
  const int per_word = 32 / bits;
  for (int64_t first = 0; first < count; first += per_word) {
    const int used = static_cast<int>(std::min<int64_t>(per_word, count - first));
    uint32_t word = 0;
    for (int i = 0; i < used; ++i) {
      const float x = std::min(std::max(w[first + i] * inverse, low), high);
      word |= static_cast<uint32_t>(static_cast<int>((x + kRound) - kRound) + choice.zero) << (bits * i);
    }
    words[first / per_word] = word;
  }
}

// ------------------------------------------------------------------------------------------------ kernel

// Rows [begin, end). Returns the first row that is not finite, or -1. `w` holds one padded group.
NIBBLELM_CLONES
int64_t quantize_range(const void* weights, int64_t begin, int64_t end, int64_t cols, const QuantizeScheme& scheme,
                       const QuantizedRows& out, float* w) {
  const int64_t groups = (cols + scheme.group - 1) / scheme.group;
  const int per_word = 32 / scheme.bits;
  const int64_t words = (cols + per_word - 1) / per_word;
  for (int64_t row = begin; row < end; ++row) {
    double error = 0.0, norm = 0.0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * scheme.group, count = std::min(scheme.group, cols - first);
      if (!load_group(weights, row * cols + first, count, scheme.type, w)) return row;
      const int64_t padded = (count + kStep - 1) / kStep * kStep;
      F32x8 low{}, high{};
      F64x8 squares{};
      for (int64_t k = 0; k < padded; k += 8) {
        F32x8 x;
        std::memcpy(&x, w + k, sizeof x);
        low = x < low ? x : low;
        high = x > high ? x : high;
        const F64x8 wide = __builtin_convertvector(x, F64x8);
        squares += wide * wide;
      }
      Group group{w, padded, 0.0, 0.0};
      for (int lane = 0; lane < 8; ++lane) {
        group.low = std::min(group.low, static_cast<double>(low[lane]));
        group.high = std::max(group.high, static_cast<double>(high[lane]));
        norm += squares[lane];
      }
      const Choice choice = choose(group, scheme);
      error += choice.error;
      store_scale(out.scales, row * groups + g, choice.scale, scheme.type);
      out.zeros[row * groups + g] = static_cast<uint8_t>(choice.zero);
      store_codes(w, count, choice, scheme.bits, out.codes + row * words + first / per_word);
    }
    out.squared_error[row] = error;
    out.squared_norm[row] = norm;
  }
  return -1;
}

}  // namespace

// ------------------------------------------------------------------------------------------------ launcher

int64_t quantize_rows(const void* weights, int64_t rows, int64_t cols, const QuantizeScheme& scheme,
                      const QuantizedRows& out, int threads) {
  const int64_t chunk = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(cols, 1));
  std::atomic<int64_t> next{0}, first_bad{rows};
  const auto work = [&] {
    std::vector<float> w(static_cast<size_t>(std::min(scheme.group, cols) + kStep));
    for (int64_t begin = next.fetch_add(chunk); begin < rows; begin = next.fetch_add(chunk)) {
      const int64_t bad = quantize_range(weights, begin, std::min(begin + chunk, rows), cols, scheme, out, w.data());
      if (bad < 0) continue;
      int64_t seen = first_bad.load();
      while (bad < seen && !first_bad.compare_exchange_weak(seen, bad)) {
      }
    }
  };
  const int64_t chunks = (rows + chunk - 1) / chunk;
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(threads, chunks); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
  return first_bad == rows ? -1 : first_bad.load();
}

}  // namespace nibblelm
