// y = x W^T + b with 4- or 8-bit W, for one token or many, bit-equal between the two.
//
// Per group of k an activation is a fixed-point number made of one to three signed bytes ("digits", base 256), so
// the dot product with the codes is exact in int32 whatever the order. Only the sum over groups is in fp32, in
// ascending order with one fused multiply-add per group: the same for every m, thread count and instruction set.
// Zero-points are taken off in each group; with one digit and one scale per row at the end, which reads scales and
// zero-points when the codes before them have brought them along. (More digits would lose some of what they are for.)
//
// Where one digit is asked for and a few values stand out from their group, the scale is that of the others: the two
// blocks of eight k that hold the largest values get a second digit. Its products are integers too, and few.
#include "cpu/activation.h"
#include "cpu/team.h"
#if defined(__AVX512VNNI__)
#include "cpu/dot_avx512.h"
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
#include "cpu/dot_avx2.h"
#define NIBBLE_DOT_NIBBLES
#endif

namespace nibblelm::NIBBLE_ISA {
namespace {

constexpr int64_t kRowGroup{128};  // activations that share a scale where weights have one scale per row
constexpr int64_t kBlock{8};       // k that share the question whether they have a second digit: a step of the codes
constexpr int kMostHigh{2};        // blocks of a group with one
// How much smaller the steps must become for it. Models with outliers and real text then stay within 1.8 times the
// error of bf16. In a small group two blocks are much of the work, and its steps are smaller anyway.
constexpr float least_gain(int64_t group) { return group < 128 ? 2.0f : 1.75f; }
constexpr int64_t kPrefetchBytes{
    8192};                           // ahead in a streamed panel; best of 1 to 16 KiB on Zen 5, and better than into L2
constexpr int64_t kMostTokens{512};  // per work item: their sums for one panel fill 128 KiB
constexpr int64_t kFewestTokens{48};  // the same when there are too few panels for the threads
constexpr int kPanelTiles{kPanelRows / kTileRows};
constexpr int64_t kSmallWidth{512};  // of a group whose sums of byte codes times digits are below 2^24
static_assert(kSmallWidth * 255 * 128 < 1 << 24);

// The blocks of a group with a second digit.
struct High {
  int32_t block[kMostHigh];
  int8_t digits[kMostHigh][kBlock];
};

struct Activations {
  int8_t* digits;       // (m, kDigits) rows of `stride` bytes, most significant digit last
  float* scale;         // (m, groups)
  int32_t* sums;        // (m, groups, kDigits): sum of the digits (with one: of the values), for the zero-point
  float* scaled_sums;   // (m), with one digit: of all groups' scale * sum
  uint8_t* high_count;  // (m, groups), with one digit: how many blocks of `high` are in use
  High* high;           // (m, groups), the same
  int64_t stride, group, groups;
};

// ------------------------------------------------------------------------------------------- activations

NIBBLE_INLINE float as_float(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

NIBBLE_INLINE I32 magnitude_bits(const float* x, int64_t left) {
  return bits(left < kLanes ? load_first(x, static_cast<int>(left)) : load(x)) & set1(0x7fffffff);
}

// The largest magnitude of a group, as bits, so that NaN and infinity count as largest.
NIBBLE_INLINE int32_t largest_of(const float* x, int64_t width) {
  I32 largest = set1(0);
  for (int64_t i = 0; i < width; i += kLanes) largest = max(largest, magnitude_bits(x + i, width - i));
  return max_lanes(largest);
}

// The largest magnitude, and that outside of the kMostHigh blocks that hold the largest ones, as bits.
struct Largest {
  int32_t all, rest;
};

NIBBLE_INLINE Largest largest_by_block(const float* x, int64_t width) {
  I32 largest[kMostHigh + 1];  // blocks at even places in lanes 0 to 7, at odd ones in 8 to 15; falling
  for (auto& place : largest) place = set1(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    I32 next = max_of_eight(magnitude_bits(x + i, width - i));
    for (auto& place : largest) {
      const I32 smaller = min(place, next);
      place = max(place, next);
      next = smaller;
    }
  }
  int32_t lanes[kMostHigh + 1][kLanes];
  for (int i = 0; i <= kMostHigh; ++i) store(lanes[i], largest[i]);
  int even = 0, odd = 0;  // how many of each kind are larger than the one looked for
  while (even + odd < kMostHigh) lanes[even][0] < lanes[odd][kLanes - 1] ? ++odd : ++even;
  return {static_cast<int32_t>(max(lanes[0][0], lanes[0][kLanes - 1])),
          static_cast<int32_t>(max(lanes[even][0], lanes[odd][kLanes - 1]))};
}

// Enter the blocks of eight lanes that are not zero.
NIBBLE_INLINE void keep_blocks(I32 digits, int64_t first, uint8_t* count, High* high) {
  int8_t bytes[kLanes];
  store_low_bytes(bytes, digits);
  for (int64_t half = 0; half < kLanes / kBlock; ++half) {
    int64_t block;
    std::memcpy(&block, bytes + half * kBlock, kBlock);
    if (block == 0) continue;
    high->block[*count] = static_cast<int32_t>(first + half);
    std::memcpy(high->digits[*count], &block, kBlock);
    ++*count;
  }
}

// One group of one token. The largest magnitude becomes the largest value that kDigits balanced digits can hold; with
// one digit, that of the blocks without a second.
template <int kDigits>
NIBBLE_INLINE void quantize_group(const float* x, int64_t width, int64_t group, int8_t* digits, int64_t stride,
                                  float* scale, int32_t* sums, uint8_t* high_count, High* high) {
  constexpr int32_t kLimit = kDigits == 1 ? 127 : kDigits == 2 ? 127 * 257 : 127 * 65793;
  constexpr int32_t kLargest = kDigits == 1 ? 127 * 257 : kLimit;
  const Largest found = kDigits == 1 ? largest_by_block(x, width) : Largest{largest_of(x, width), 0};
  const int32_t top = found.all;
  float largest = as_float(top);
  const bool finite = top < 0x7f800000;
  const bool usable = finite && largest > 0x1p-100f;  // smaller ones would overflow the reciprocal: taken as zero
  bool divided = false;                               // into blocks with one digit and with two
  if constexpr (kDigits == 1) {
    const float rest = usable ? as_float(found.rest) : largest;
    divided = largest > least_gain(group) * rest;
    if (divided) largest = __builtin_fmaxf(rest, largest * (1.0f / 257.0f));
    *high_count = 0;
  }
  *scale = usable ? largest / static_cast<float>(kLimit) : finite ? 0.0f : __builtin_nanf("");
  const F32 inverse = set1(usable ? static_cast<float>(kLimit) / largest : 0.0f);

  I32 sum[kDigits];
  for (auto& s : sum) s = set1(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i < kLanes ? width - i : kLanes);
    const F32 v = n == kLanes ? load(x + i) : load_first(x + i, n);
    I32 rest = usable ? min(max(round_to_int(v * inverse), set1(-kLargest)), set1(kLargest)) : set1(0);
    for (int d = 0; d < kDigits; ++d) {
      const I32 digit = shift_right<24>(shift_left<24>(rest));
      store_low_bytes(digits + d * stride + i, digit);  // may run into the next group, which is written later
      sum[d] = sum[d] + (kDigits == 1 ? rest : digit);
      rest = shift_right<8>(rest + set1(128));
    }
    if (divided) keep_blocks(rest, i / kBlock, high_count, high);
  }
  for (int d = 0; d < kDigits; ++d) sums[d] = sum_lanes(sum[d]);
}

template <int kDigits>
void quantize_activations(const QuantizedLinearArgs& args, const Activations& a) {
  const int64_t k = args.weight->k;
  parallel_for(args.m, 1 + 16384 / k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t first = g * a.group;
        const int64_t at = m * a.groups + g;
        quantize_group<kDigits>(args.x + m * args.x_stride + first, min(a.group, k - first), a.group,
                                a.digits + m * kDigits * a.stride + first, a.stride, a.scale + at,
                                a.sums + at * kDigits, a.high_count + at, a.high + at);
      }
      if constexpr (kDigits == 1) {
        float sum = 0.0f;
        for (int64_t at = m * a.groups; at < (m + 1) * a.groups; ++at) {
          sum = __builtin_fmaf(a.scale[at], static_cast<float>(a.sums[at]), sum);
        }
        a.scaled_sums[m] = sum;
      }
    }
  });
}

// ------------------------------------------------------------------------------------------- panels

NIBBLE_INLINE void decode_floats(const uint8_t* p, DType type, float* out) {
  for (int t = 0; t < kPanelTiles; ++t) {
    const auto* halves = reinterpret_cast<const uint16_t*>(p) + t * kLanes;
    const auto* floats = reinterpret_cast<const float*>(p) + t * kLanes;
    const F32 v = type == DType::fp32 ? load(floats) : type == DType::bf16 ? load_bf16(halves) : load_f16(halves);
    store(out + t * kLanes, v);
  }
}

struct GroupValues {
  alignas(64) float scale[kPanelRows];
  alignas(64) int32_t zero[kPanelRows];
  alignas(64) float minimum[kPanelRows];

  void decode(const QuantizedPanels& w, const uint8_t* p) {  // p: right behind the codes of the group
    for (int64_t at = 0; at < w.scale_bytes() + w.offset_bytes(); at += 64) __builtin_prefetch(p + kPrefetchBytes + at);
    decode_floats(p, w.scale_type, scale);
    p += w.scale_bytes();
    for (int t = 0; t < kPanelTiles; ++t) {
      const I32 z = w.offset == Offset::zero_point  ? load_u8(p + t * kLanes)
                    : w.offset == Offset::symmetric ? set1(1 << (w.bits - 1))
                                                    : set1(0);
      store(zero + t * kLanes, z);
    }
    if (w.offset == Offset::minimum) decode_floats(p, w.scale_type, minimum);
  }
};

alignas(64) constexpr float kOnes[kPanelRows] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                                 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// One scale per row is applied after the sum over k; the minimum form cannot wait that long.
NIBBLE_INLINE bool scale_at_end(const QuantizedPanels& w) { return w.groups == 1 && w.offset != Offset::minimum; }
NIBBLE_INLINE bool zero_at_end(const QuantizedPanels& w, int digits) { return digits == 1 && scale_at_end(w); }

// What the inner loops read for one group of a panel; each array has a value per row.
struct Group {
  const uint8_t* codes;
  const float* factor;
  const int32_t* zero;   // null where it is taken off at the end
  const float* minimum;  // null in the zero-point form

  Group(const uint8_t* group_codes, const GroupValues& v, const QuantizedPanels& w, bool whole)
      : codes(group_codes),
        factor(scale_at_end(w) ? kOnes : v.scale),
        zero(whole ? nullptr : v.zero),
        minimum(w.offset == Offset::minimum ? v.minimum : nullptr) {}
};

// Reads a panel a few groups at a time. For many tokens 4-bit codes are expanded to bytes in scratch memory, and the
// groups stay in L1 while all tokens meet them; for few tokens codes are read where they lie.
class PanelReader {
 public:
  PanelReader(const QuantizedPanels& w, int64_t index, int64_t group, int digits, bool expand)
      : w_(w),
        base_(w.buffer->data() + index * w.panel_bytes()),
        group_(group),
        zero_at_end_(zero_at_end(w, digits)),
        expand_(expand) {
    if (w.groups == 1 && !zero_at_end_) row_values();
  }
  static int64_t groups_at_once(int64_t group) { return group < kBlock ? kBlock / group : 1; }
  static size_t scratch_bytes(int64_t group) {
    const int64_t groups = groups_at_once(group);
    return static_cast<size_t>(groups * group * kPanelRows + groups * int64_t{sizeof(GroupValues) + sizeof(Group)});
  }
  int64_t width(int64_t g) const { return min(group_, w_.padded_k() - g * group_); }
  // Of the rows, once all groups are read.
  const float* row_scale() {
    if (zero_at_end_) row_values();
    return scale_at_end(w_) ? row_values_.scale : kOnes;
  }
  const int32_t* row_zero() const { return row_values_.zero; }

  // Groups [g, g + count), count at most groups_at_once(), valid until the next call.
  const Group* read(int64_t g, int64_t count, uint8_t* scratch) {
    auto* values = reinterpret_cast<GroupValues*>(scratch + groups_at_once(group_) * group_ * kPanelRows);
    auto* groups = reinterpret_cast<Group*>(values + groups_at_once(group_));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k = (g + i) * group_, behind_codes = w_.scale_bytes() + w_.offset_bytes();
      const uint8_t* codes = base_ + w_.code_bytes(k) + (w_.groups == 1 ? 0 : (g + i) * behind_codes);
      if (w_.groups > 1) values[i].decode(w_, codes + w_.code_bytes(width(g + i)));
      if (expand_) codes = expand(codes, scratch + i * group_ * kPanelRows, width(g + i));
      groups[i] = Group(codes, w_.groups == 1 ? row_values_ : values[i], w_, zero_at_end_);
    }
    return groups;
  }

 private:
  static constexpr int64_t kBlock{512};  // k: 32 KiB of codes

  void row_values() { row_values_.decode(w_, base_ + w_.code_bytes(w_.padded_k())); }

  static const uint8_t* expand(const uint8_t* from, uint8_t* to, int64_t width) {
    constexpr int64_t kStep = kPanelRows * 4;  // bytes of four k
    for (int64_t at = 0; at < width / 8 * kStep; at += kStep) {
      for (int t = 0; t < kPanelTiles; ++t) {
        const I32 codes = load_bytes(from + at + t * 64);
        store_bytes(to + 2 * at + t * 64, low_nibbles(codes));
        store_bytes(to + 2 * at + kStep + t * 64, high_nibbles(codes));
      }
    }
    return to;
  }

  const QuantizedPanels& w_;
  const uint8_t* base_;
  const int64_t group_;  // of the activations: that of the weights, or kRowGroup
  const bool zero_at_end_, expand_;
  GroupValues row_values_;
};

// ------------------------------------------------------------------------------------------- kernels

// How codes lie where they are read: packed as in the panel, or one to a byte with eight or only four bits used.
enum class Codes { nibbles, bytes, small_bytes };
// Where one instruction takes any byte, expanded 4-bit codes need no kernels of their own.
constexpr Codes kExpanded{kHasDot4 ? Codes::bytes : Codes::small_bytes};

constexpr int tiles_for(int rows) {
  int tiles = kPanelTiles;
  while (tiles > 1 && tiles * rows > kBlockRows * kBlockVectors) tiles /= 2;
  return tiles;
}

// Exact dot products of kRows rows of digits with kTiles tiles of a group: out[r][t * 16 + lane].
// Not inlined: with what follows in sight, GCC 12 spills accumulators inside the loop.
template <Codes kCodes, int kRows, int kTiles, bool kStreamed>
__attribute__((noinline)) void dot_group(const uint8_t* codes, const int8_t* digits, int64_t stride, int64_t width,
                                         int32_t (*out)[kPanelRows]) {
#if defined(NIBBLE_DOT_NIBBLES)
  if constexpr (kRows > 1) {
    constexpr int64_t kPrefetch = kStreamed ? kPrefetchBytes : 0;
    return dot_nibbles<kCodes == Codes::bytes ? 8 : 4, kCodes == Codes::nibbles, kRows, kTiles, kPrefetch>(
        codes, digits, stride, width, out);
  }
#endif
  constexpr int64_t kStep = kPanelRows * 4;
  constexpr bool kSplit = kRows * kTiles <= 4;  // too few chains to cover the latency: two for each sum
  I32 acc[kRows * kTiles], second[kRows * kTiles];
  unroll<kRows * kTiles>([&](auto i) NIBBLE_LAMBDA { acc[i] = second[i] = set1(0); });
  for (int64_t k = 0; k < width; k += 8, digits += 8, codes += kCodes == Codes::nibbles ? kStep : 2 * kStep) {
    unroll<2>([&](auto half) NIBBLE_LAMBDA {  // the first and the last four k
      const uint8_t* p = codes;
      asm("" : "+r"(p));  // 4-bit codes are loaded twice rather than kept in registers
      I32 four[kTiles];
      unroll<kTiles>([&](auto t) NIBBLE_LAMBDA {
        if constexpr (kCodes != Codes::nibbles) {
          four[t] = load_bytes(p + half * kStep + t * 64);
          if constexpr (kStreamed) __builtin_prefetch(p + kPrefetchBytes + half * kStep + t * 64);
        } else {
          four[t] = half == 0 ? low_nibbles(load_bytes(p + t * 64)) : high_nibbles(load_bytes(p + t * 64));
          if constexpr (kStreamed && half == 0) __builtin_prefetch(p + kPrefetchBytes + t * 64);
        }
      });
      unroll<kRows>([&](auto r) NIBBLE_LAMBDA {
        const I32 x = broadcast4(digits + r * stride + half * 4);
        unroll<kTiles>([&](auto t) NIBBLE_LAMBDA {
          I32& chain = kSplit && half == 1 ? second[r * kTiles + t] : acc[r * kTiles + t];
          chain = dot4<kCodes == Codes::bytes ? 8 : 4>(chain, four[t], x);
        });
      });
    });
  }
  unroll<kRows * kTiles>([&](auto i) NIBBLE_LAMBDA {
    store(out[i / kTiles] + i % kTiles * kLanes, kSplit ? acc[i] + second[i] : acc[i]);
  });
}

// The other half of the minimum form: total += minimum * sum of x.
template <int kDigits, int kTokens>
void add_minimum(const Group& group, const Activations& a, int64_t token, int64_t g, float (*total)[kPanelRows]) {
  for (int m = 0; m < kTokens; ++m) {
    const int64_t at = (token + m) * a.groups + g;
    float sum = static_cast<float>(a.sums[at * kDigits + kDigits - 1]);
    for (int d = kDigits - 2; d >= 0; --d) {
      sum = __builtin_fmaf(sum, 256.0f, static_cast<float>(a.sums[at * kDigits + d]));
    }
    for (int row = 0; row < kPanelRows; row += kLanes) {
      const F32 x_scaled = load(group.minimum + row) * set1(a.scale[at]);
      store(total[m] + row, fma(set1(sum), x_scaled, load(total[m] + row)));
    }
  }
}

// total += scale * dot products, where dot(row, tile) are those of row = token * kDigits + digit, constants both.
// kSmall: every integer is below 2^24, so that the zero-point may be taken off in fp32 (for one token that is slower).
template <int kDigits, int kTokens, bool kSmall, typename Dot>
NIBBLE_INLINE void add_dots(const Group& group, const Activations& a, int64_t token, int64_t g, const Dot& dot,
                            float (*total)[kPanelRows]) {
  const float* scale = a.scale + token * a.groups + g;
  const int32_t* sums = a.sums + (token * a.groups + g) * kDigits;
  unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA {
    const I32 zero = load(group.zero + t * kLanes);
    const F32 factor = load(group.factor + t * kLanes);
    unroll<kTokens>([&](auto m) NIBBLE_LAMBDA {
      F32 value = set1(0.0f);
      unroll<kDigits>([&](auto i) NIBBLE_LAMBDA {  // from the most significant digit down
        constexpr int kDigit = kDigits - 1 - i;
        const I32 product = dot(std::integral_constant<int, m * kDigits + kDigit>{}, t);
        const int32_t sum = sums[m * a.groups * kDigits + kDigit];
        const F32 digit = kSmall ? fma(to_float(zero), set1(static_cast<float>(-sum)), to_float(product))
                                 : to_float(product - zero * set1(sum));
        value = i == 0 ? digit : fma(value, set1(256.0f), digit);
      });
      float* out = total[m] + t * kLanes;
      store(out, fma(value, factor * set1(scale[m * a.groups]), load(out)));
    });
  });
}

// The same where scale and zero-point of a row are applied at the end.
template <int kTokens, typename Dot>
NIBBLE_INLINE void add_dots_alone(const Activations& a, int64_t token, int64_t g, const Dot& dot,
                                  float (*total)[kPanelRows]) {
  const float* scale = a.scale + token * a.groups + g;
  unroll<kTokens>([&](auto m) NIBBLE_LAMBDA {
    const F32 factor = set1(scale[m * a.groups]);
    unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA {
      float* out = total[m] + t * kLanes;
      store(out, fma(to_float(dot(m, t)), factor, load(out)));
    });
  });
}

// dots[m] += 256 times the products of the second digits of each of kTokens tokens. Behind the dot products of all
// codes, which have brought those of a group to L1.
template <Codes kCodes, int kTokens>
NIBBLE_INLINE void add_high_dots(const Group& group, const Activations& a, int64_t at, int32_t (*dots)[kPanelRows]) {
  constexpr int64_t kStep = kPanelRows * 4;
  for (int m = 0; m < kTokens; ++m, at += a.groups) {
    if (a.high_count[at] == 0) continue;
    I32 sum[kPanelTiles];
    unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA { sum[t] = set1(0); });
    for (int i = 0; i < a.high_count[at]; ++i) {
      const uint8_t* codes = group.codes + a.high[at].block[i] * kStep * (kCodes == Codes::nibbles ? 1 : 2);
      unroll<2>([&](auto half) NIBBLE_LAMBDA {
        const I32 x = broadcast4(a.high[at].digits[i] + half * 4);
        unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA {
          const I32 bytes = load_bytes(codes + (kCodes == Codes::nibbles ? 0 : half * kStep) + t * 64);
          const I32 four = kCodes != Codes::nibbles ? bytes : half == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
          sum[t] = dot4<kCodes == Codes::bytes ? 8 : 4>(sum[t], four, x);
        });
      });
    }
    unroll<kPanelTiles>(
        [&](auto t) NIBBLE_LAMBDA { store(dots[m] + t * kLanes, load(dots[m] + t * kLanes) + shift_left<8>(sum[t])); });
  }
}

// total += group's share, for kTokens tokens.
template <Codes kCodes, int kDigits, int kTokens, bool kStreamed>
__attribute__((noinline)) void add_group(const Group& group, const Activations& a, int64_t token, int64_t g,
                                         int64_t width, float (*total)[kPanelRows]) {
  constexpr int kRows = kTokens * kDigits, kTiles = tiles_for(kRows);
  const int8_t* digits = a.digits + token * kDigits * a.stride + g * a.group;
#if defined(__AVX512VNNI__)
  constexpr bool kInRegisters = kCodes == Codes::bytes && kRows == 6 && !kStreamed;
#else
  constexpr bool kInRegisters = false;
#endif
  const int64_t at = token * a.groups + g;
  bool any_high = false;
  if constexpr (kDigits == 1) {
    for (int m = 0; m < kTokens; ++m) any_high |= a.high_count[at + m * a.groups] > 0;
  }
  const auto add = [&](const auto& dot) NIBBLE_LAMBDA {
    if constexpr (kDigits == 1) {
      if (group.zero == nullptr) return add_dots_alone<kTokens>(a, token, g, dot, total);
    }
    kTokens > 1 && !any_high && width <= kSmallWidth
        ? add_dots<kDigits, kTokens, true>(group, a, token, g, dot, total)
        : add_dots<kDigits, kTokens, false>(group, a, token, g, dot, total);
    if (group.minimum != nullptr) add_minimum<kDigits, kTokens>(group, a, token, g, total);
  };
  alignas(64) int32_t dots[kRows][kPanelRows];
  if constexpr (kInRegisters) {
#if defined(__AVX512VNNI__)
    I32 sums[kRows * kPanelTiles];
    dot_six_rows(group.codes, digits, a.stride, width, sums);
    if (!any_high) {
      return add([&](auto row, auto tile) NIBBLE_LAMBDA { return sums[row * kPanelTiles + tile]; });
    }
    unroll<kRows * kPanelTiles>(
        [&](auto i) NIBBLE_LAMBDA { store(dots[i / kPanelTiles] + i % kPanelTiles * kLanes, sums[i]); });
#endif
  } else {
    for (int tile = 0; tile < kPanelTiles; tile += kTiles) {
      auto* out = reinterpret_cast<int32_t (*)[kPanelRows]>(dots[0] + tile * kLanes);
      dot_group<kCodes, kRows, kTiles, kStreamed>(group.codes + tile * 64, digits, a.stride, width, out);
    }
  }
  if constexpr (kDigits == 1) {
    if (any_high) add_high_dots<kCodes, kTokens>(group, a, at, dots);
  }
  add([&](auto row, auto tile) NIBBLE_LAMBDA { return load(dots[row] + tile * kLanes); });
}

// total (tokens, 64) += the share of `count` groups from g on. Tokens go in blocks as large as the registers hold,
// then the rest in one smaller block.
template <Codes kCodes, int kDigits, int kTokens, bool kStreamed>
void add_groups(const PanelReader& panel, const Group* groups, int64_t g, int64_t count, const Activations& a,
                int64_t token, int64_t end, float (*total)[kPanelRows]) {
  for (; token + kTokens <= end; token += kTokens, total += kTokens) {
    for (int64_t i = 0; i < count; ++i) {
      add_group<kCodes, kDigits, kTokens, kStreamed>(groups[i], a, token, g + i, panel.width(g + i), total);
    }
  }
  if constexpr (kTokens > 1) {
    if (token < end) {
      add_groups<kCodes, kDigits, kTokens - 1, kStreamed>(panel, groups, g, count, a, token, end, total);
    }
  }
}

// A panel's products: of each token 64, to be scaled.
struct Products {
  const float (*total)[kPanelRows];
  const float* row_scale;
  const float* sums;  // of each token, to be taken off row_zero times; or null
  const int32_t* row_zero;
  int64_t first;  // row of the weight

  F32 scaled(const QuantizedLinearArgs& args, int64_t token, int row, int n) const {
    F32 sum = load(total[token] + row);
    if (sums != nullptr) sum = fma(set1(-sums[token]), to_float(load(row_zero + row)), sum);
    const F32 factor = load(row_scale + row);
    return args.bias == nullptr ? sum * factor : fma(sum, factor, load_first(args.bias + first + row, n));
  }
};

// up: what activated products are multiplied with, or null.
void finish(const QuantizedLinearArgs& args, const Products& products, const Products* up, int64_t token, int64_t end) {
  const auto store_all = [&](const auto& activated) NIBBLE_LAMBDA {
    for (int64_t i = 0; i < end - token; ++i) {
      float* out = args.out + (token + i) * args.out_stride + products.first;
      for (int row = 0; row < kPanelRows && products.first + row < args.weight->n; row += kLanes) {
        const int n = static_cast<int>(min(kLanes, args.weight->n - products.first - row));
        F32 y = activated(products.scaled(args, i, row, n));
        if (up != nullptr) y = y * up->scaled(args, i, row, n);
        store_first(out + row, y, n);
      }
    }
  };
  if (!args.after.activates) return store_all([](F32 y) NIBBLE_LAMBDA { return y; });
  with_form(args.after.form, [&](auto form) NIBBLE_LAMBDA {
    store_all([](F32 y) NIBBLE_LAMBDA { return activation<decltype(form)::value>(y, 0.0f); });
  });
}

constexpr int block_tokens(int digits) { return kBlockRows / digits > 0 ? kBlockRows / digits : 1; }

// total (tokens, 64) = what a panel gives for tokens [token, end).
template <int kDigits>
void multiply(const QuantizedLinearArgs& args, const Activations& a, PanelReader& panel, bool streamed, int64_t token,
              int64_t end, float (*total)[kPanelRows], uint8_t* scratch) {
  constexpr int kTokens = block_tokens(kDigits);
  const QuantizedPanels& w = *args.weight;
  std::memset(total, 0, static_cast<size_t>(end - token) * sizeof(*total));
  // Streaming decodes scales one group at a time, close behind the prefetch.
  const int64_t step = streamed && w.groups > 1 ? 1 : PanelReader::groups_at_once(a.group);
  for (int64_t g = 0; g < a.groups; g += step) {
    const int64_t count = min(step, a.groups - g);
    const Group* groups = panel.read(g, count, scratch);
    if (!streamed) {
      w.bits == 4 ? add_groups<kExpanded, kDigits, kTokens, false>(panel, groups, g, count, a, token, end, total)
                  : add_groups<Codes::bytes, kDigits, kTokens, false>(panel, groups, g, count, a, token, end, total);
    } else if (w.bits == 4) {
      add_groups<Codes::nibbles, kDigits, kTokens, true>(panel, groups, g, count, a, token, end, total);
    } else {
      add_groups<Codes::bytes, kDigits, kTokens, true>(panel, groups, g, count, a, token, end, total);
    }
  }
}

// One panel, or a panel of gates and that of their ups, for tokens [token, end).
template <int kDigits>
void run_panel(const QuantizedLinearArgs& args, const Activations& a, int64_t index, int64_t token, int64_t end) {
  const QuantizedPanels& w = *args.weight;
  const bool streamed = end - token <= 2 * block_tokens(kDigits);
  const int64_t totals = (end - token) * (args.after.gated ? 2 : 1);
  const int64_t total_bytes = totals * kPanelRows * int64_t{sizeof(float)};
  auto* memory =
      static_cast<uint8_t*>(local_scratch(static_cast<size_t>(total_bytes) + PanelReader::scratch_bytes(a.group)));
  auto* total = reinterpret_cast<float (*)[kPanelRows]>(memory);
  const auto compute = [&](PanelReader& panel, int64_t at, float (*to)[kPanelRows]) {
    multiply<kDigits>(args, a, panel, streamed, token, end, to, memory + total_bytes);
    const float* sums = zero_at_end(w, kDigits) ? a.scaled_sums + token : nullptr;
    const float* row_scale = panel.row_scale();
    return Products{to, row_scale, sums, panel.row_zero(), at * kPanelRows};
  };
  PanelReader panel(w, index, a.group, kDigits, w.bits == 4 && !streamed);
  const Products products = compute(panel, index, total);
  if (!args.after.gated) return finish(args, products, nullptr, token, end);
  const int64_t up_index = index + w.panels() / 2;
  PanelReader up_panel(w, up_index, a.group, kDigits, w.bits == 4 && !streamed);
  const Products ups = compute(up_panel, up_index, total + (end - token));
  finish(args, products, &ups, token, end);
}

template <int kDigits>
void run(const QuantizedLinearArgs& args) {
  const QuantizedPanels& w = *args.weight;
  Activations a;
  a.group = w.groups == 1 ? kRowGroup : w.group;
  a.groups = (w.k + a.group - 1) / a.group;
  a.stride = (w.k + 63) / 64 * 64 + 64;  // slack for whole-vector stores; the odd line keeps rows off one cache set
  const int64_t scales = args.m * a.groups, high = kDigits == 1 ? scales : 0;
  const int64_t words = (scales * (1 + kDigits) + args.m) * 4, blocks = high * int64_t{sizeof(High)};
  auto* memory =
      static_cast<uint8_t*>(shared_scratch(static_cast<size_t>(words + blocks + high + args.m * kDigits * a.stride)));
  a.scale = reinterpret_cast<float*>(memory);
  a.sums = reinterpret_cast<int32_t*>(memory + scales * 4);
  a.scaled_sums = reinterpret_cast<float*>(memory + scales * 4 * (1 + kDigits));
  a.high = reinterpret_cast<High*>(memory + words);
  a.high_count = memory + words + blocks;
  a.digits = reinterpret_cast<int8_t*>(a.high_count + high);
  quantize_activations<kDigits>(args, a);

  const int64_t together = args.after.gated ? 2 : 1, panels = w.panels() / together;
  const int64_t split = min(args.m, panels >= 8 * threads() ? kMostTokens : kFewestTokens);
  const int64_t splits = (args.m + split - 1) / split;
  const int64_t cost = w.panel_bytes() * together * split + 1;  // threads pay off from about 32 KiB of codes on
  parallel_for(panels * splits, 1 + 32768 / cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % splits * split;
      run_panel<kDigits>(args, a, item / splits, token, min(token + split, args.m));
    }
  });
}

}  // namespace

void quantized_linear(const QuantizedLinearArgs& args) {
  if (args.m == 0) return;
  switch (args.activation_digits) {
    case 1:
      return run<1>(args);
    case 2:
      return run<2>(args);
    default:
      return run<3>(args);
  }
}

}  // namespace nibblelm::NIBBLE_ISA
