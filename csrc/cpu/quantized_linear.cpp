// y = x W^T + b with 4- or 8-bit W, for one token or many, bit-equal between the two.
//
// Per group of k an activation is a fixed-point number made of one to three signed bytes ("digits", base 256), so
// the dot product with the codes is exact in int32 whatever the order. Only the sum over groups is in fp32, in
// ascending order with one fused multiply-add per group: the same for every m, thread count and instruction set.
// Where one digit is asked for, a group whose largest value leaves the others too few steps has two; the second ones
// have a sum of their own, which is added last.
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"
#if defined(__AVX512VNNI__)
#include "cpu/dot_avx512.h"
#elif defined(__AVX2__) && !defined(__AVXVNNI__)
#include "cpu/dot_avx2.h"
#define NIBBLE_DOT_NIBBLES
#endif

namespace nibblelm::NIBBLE_ISA {
namespace {

// Activations that share a scale, unless the weights' groups are smaller. One digit rounds to steps of the largest
// among them: for the same error twice as many would need half as many steps again.
constexpr int64_t group_of(int digits) { return digits == 1 ? 64 : 128; }
// A group of one digit gets a second where its largest value is more than so many times its mean magnitude. Gaussian
// values are at 3. Behind a norm outliers steer queries, keys and gates, which multiply their error; 6 costs Gaussian
// rows nothing. What SwiGLU gives is at 5 to 12 by nature and its error is only added: there 16 leaves it alone.
constexpr int32_t crest(bool normed) { return normed ? 6 : 16; }
constexpr int64_t kPrefetchBytes{
    8192};                           // ahead in a streamed panel; best of 1 to 16 KiB on Zen 5, and better than into L2
constexpr int64_t kBlockK{512};      // of a panel that all tokens meet together: 32 KiB of codes
constexpr int64_t kMostTokens{512};  // per work item: their sums for one panel fill 128 KiB
constexpr int64_t kFewestTokens{48};  // the same when there are too few panels for the threads
constexpr int kPanelTiles{kPanelRows / kTileRows};

struct Activations {
  int8_t* digits;  // (m, kDigits) rows of `stride` bytes, most significant digit last
  float* scale;    // (m, groups)
  int32_t* sums;   // (m, groups, kDigits): sum of the digits, for the zero-point
  int64_t stride, group, groups;
};

// With one digit: the second digits of the groups that have them, side by side for the tokens of one work item.
struct SecondDigits {
  int32_t* count;  // (items, groups): how many tokens have one; they come in any order
  int32_t* token;  // (items, groups, tokens): within the item
  float* scale;    // the same: that of the second digit
  int32_t* sums;   // the same
  int8_t* digits;  // the same, rows of `stride` bytes
  float* row_sum;  // (m): sum of the rounded activations
  int64_t tokens, stride;
};

// The digits of one group for some tokens.
struct GroupDigits {
  const int8_t* digits;
  int64_t stride;  // bytes from digit to digit and, kDigits times, from token to token
  const float* scale;
  const int32_t* sums;
  int64_t step;          // scales from token to token
  const int32_t* token;  // which they are, or null: one after another
};

// ------------------------------------------------------------------------------------------- activations

// One group of one token. The largest magnitude becomes the largest value that kDigits balanced digits can hold.
// Returns the sum of the magnitudes of the most significant digits.
template <int kDigits>
NIBBLE_INLINE int32_t quantize_group(const float* x, int64_t width, int8_t* digits, int64_t stride, float* scale,
                                     int32_t* sums) {
  constexpr int32_t kLimit = kDigits == 1 ? 127 : kDigits == 2 ? 127 * 257 : 127 * 65793;
  I32 largest_bits = set1(0);  // as integers, so that NaN and infinity count as largest
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i < kLanes ? width - i : kLanes);
    const F32 v = n == kLanes ? load(x + i) : load_first(x + i, n);
    largest_bits = max(largest_bits, bits(v) & set1(0x7fffffff));
  }
  const int32_t top = max_lanes(largest_bits);
  float largest;
  std::memcpy(&largest, &top, 4);
  const bool finite = top < 0x7f800000;
  const bool usable = finite && largest > 0x1p-100f;  // smaller ones would overflow the reciprocal: taken as zero
  *scale = usable ? largest / static_cast<float>(kLimit) : finite ? 0.0f : __builtin_nanf("");
  const F32 inverse = set1(usable ? static_cast<float>(kLimit) / largest : 0.0f);

  I32 sum[kDigits], magnitudes = set1(0);
  for (auto& s : sum) s = set1(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i < kLanes ? width - i : kLanes);
    const F32 v = n == kLanes ? load(x + i) : load_first(x + i, n);
    I32 rest = usable ? min(max(round_to_int(v * inverse), set1(-kLimit)), set1(kLimit)) : set1(0);
    for (int d = 0; d < kDigits; ++d) {
      const I32 digit = shift_right<24>(shift_left<24>(rest));
      store_low_bytes(digits + d * stride + i, digit);  // may run into the next group, which is written later
      sum[d] = sum[d] + digit;
      if (d == kDigits - 1) magnitudes = magnitudes + max(digit, set1(0) - digit);
      rest = shift_right<8>(rest + set1(128));
    }
  }
  for (int d = 0; d < kDigits; ++d) sums[d] = sum_lanes(sum[d]);
  return sum_lanes(magnitudes);
}

// One group of one token in one digit, or in two where one is too coarse. Returns the sum of the rounded values.
NIBBLE_INLINE float quantize_adaptively(const float* x, int64_t width, const Activations& a, const SecondDigits& second,
                                        int32_t most, int64_t m, int64_t g) {
  int8_t* digits = a.digits + m * a.stride + g * a.group;
  float& scale = a.scale[m * a.groups + g];
  int32_t sums[2] = {0, 0};
  const int64_t magnitudes = quantize_group<1>(x, width, digits, 0, &scale, sums);
  if (scale > 0.0f && magnitudes * most < 127 * width) {
    const int64_t item = m / second.tokens * a.groups + g;
    const int64_t at = item * second.tokens + __atomic_fetch_add(second.count + item, 1, __ATOMIC_RELAXED);
    quantize_group<2>(x, width, digits, second.digits + at * second.stride - digits, &scale, sums);
    second.token[at] = static_cast<int32_t>(m % second.tokens);
    second.scale[at] = scale * 256.0f;
    second.sums[at] = sums[1];
  }
  a.sums[m * a.groups + g] = sums[0];
  return __builtin_fmaf(static_cast<float>(sums[1]), 256.0f, static_cast<float>(sums[0])) * scale;
}

template <int kDigits>
void quantize_activations(const QuantizedLinearArgs& args, const Activations& a, const SecondDigits& second) {
  const int64_t k = args.weight->k;
  parallel_for(args.m, 1 + 16384 / k, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      float row_sum = 0.0f;
      for (int64_t g = 0; g < a.groups; ++g) {
        const int64_t first = g * a.group, width = min(a.group, k - first);
        const float* x = args.x + m * args.x_stride + first;
        if constexpr (kDigits == 1) {
          row_sum = row_sum + quantize_adaptively(x, width, a, second, crest(args.normed), m, g);
        } else {
          quantize_group<kDigits>(x, width, a.digits + m * kDigits * a.stride + first, a.stride,
                                  a.scale + m * a.groups + g, a.sums + (m * a.groups + g) * kDigits);
        }
      }
      if constexpr (kDigits == 1) second.row_sum[m] = row_sum;
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

alignas(64) constexpr int32_t kZeros[kPanelRows] = {};

// One scale per row is applied after the sum over k; the minimum form cannot wait that long.
NIBBLE_INLINE bool scale_at_end(const QuantizedPanels& w) { return w.groups == 1 && w.offset != Offset::minimum; }

// What the inner loops read for one group of a panel; each array has a value per row.
struct Group {
  const uint8_t* codes;
  const float* factor;
  const int32_t* zero;
  const float* minimum;  // null in the zero-point form
  bool at_end;           // scale and zero-point are applied once, after the sum over k

  Group(const uint8_t* group_codes, const GroupValues& v, const QuantizedPanels& w, bool one_digit)
      : codes(group_codes),
        factor(scale_at_end(w) ? kOnes : v.scale),
        zero(v.zero),
        minimum(w.offset == Offset::minimum ? v.minimum : nullptr),
        at_end(one_digit && scale_at_end(w)) {}
};

// Reads a panel a few groups at a time. For many tokens 4-bit codes are expanded to bytes in scratch memory, and the
// groups stay in L1 while all tokens meet them; for few tokens codes are read where they lie.
class PanelReader {
 public:
  PanelReader(const QuantizedPanels& w, int64_t index, int64_t group, bool expand, bool one_digit)
      : w_(w),
        base_(w.buffer->data() + index * w.panel_bytes()),
        group_(group),
        shared_(groups_per_scale(w, group)),
        expand_(expand),
        one_digit_(one_digit) {
    if (w.groups == 1) row_values_.decode(w, base_ + w.code_bytes(w.padded_k()));
  }
  // Groups of activations to one scale of the weights, where these have several.
  static int64_t groups_per_scale(const QuantizedPanels& w, int64_t group) {
    return w.groups == 1 ? 1 : w.group / group;
  }
  static int64_t groups_at_once(const QuantizedPanels& w, int64_t group) {
    const int64_t shared = groups_per_scale(w, group);
    return shared * max(1, kBlockK / (shared * group));
  }
  static size_t scratch_bytes(const QuantizedPanels& w, int64_t group) {
    const int64_t groups = groups_at_once(w, group);
    return static_cast<size_t>(groups * group * kPanelRows + groups * int64_t{sizeof(GroupValues) + sizeof(Group)});
  }
  int64_t width(int64_t g) const { return min(group_, w_.padded_k() - g * group_); }
  const float* row_scale() const { return scale_at_end(w_) ? row_values_.scale : kOnes; }
  const int32_t* row_zero() const { return one_digit_ && scale_at_end(w_) ? row_values_.zero : kZeros; }

  // Groups [g, g + count), count at most groups_at_once() and g the first with its scale; valid until the next call.
  const Group* read(int64_t g, int64_t count, uint8_t* scratch) {
    auto* values = reinterpret_cast<GroupValues*>(scratch + groups_at_once(w_, group_) * group_ * kPanelRows);
    auto* groups = reinterpret_cast<Group*>(values + groups_at_once(w_, group_));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k = (g + i) * group_, scale = w_.groups == 1 ? 0 : (g + i) / shared_;
      const uint8_t* codes = base_ + w_.code_bytes(k) + scale * (w_.scale_bytes() + w_.offset_bytes());
      if (w_.groups > 1 && i % shared_ == 0) {
        values[i].decode(w_, codes + w_.code_bytes(min(w_.group, w_.padded_k() - k)));
      }
      if (expand_) codes = expand(codes, scratch + i * group_ * kPanelRows, width(g + i));
      groups[i] = Group(codes, w_.groups == 1 ? row_values_ : values[i - i % shared_], w_, one_digit_);
    }
    return groups;
  }

 private:
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
  const int64_t group_;   // of the activations
  const int64_t shared_;  // of those to one of the weights
  const bool expand_, one_digit_;
  GroupValues row_values_;
};

// ------------------------------------------------------------------------------------------- kernels

// How codes lie where they are read: packed as in the panel, or one to a byte with eight or only four bits used.
enum class Codes { nibbles, bytes, small_bytes };
// Where one instruction takes any byte, expanded 4-bit codes need no kernels of their own.
constexpr Codes kExpanded{kHasDot4 ? Codes::bytes : Codes::small_bytes};

// Rows of digits whose sums are in registers together. Without VNNI half of these are needed for products.
constexpr int kMostRows{kHasDot4 ? kBlockRows : (kBlockRows + 1) / 2};

constexpr int tiles_for(int rows) {
  int tiles = kPanelTiles;
  while (tiles > 1 && tiles * rows > kMostRows * kBlockVectors) tiles /= 2;
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
void add_minimum(const Group& group, const GroupDigits& x, float* const (&total)[kTokens]) {
  for (int m = 0; m < kTokens; ++m) {
    const int32_t* sums = x.sums + m * x.step * kDigits;
    float sum = static_cast<float>(sums[kDigits - 1]);
    for (int d = kDigits - 2; d >= 0; --d) sum = __builtin_fmaf(sum, 256.0f, static_cast<float>(sums[d]));
    for (int row = 0; row < kPanelRows; row += kLanes) {
      const F32 x_scaled = load(group.minimum + row) * set1(x.scale[m * x.step]);
      store(total[m] + row, fma(set1(sum), x_scaled, load(total[m] + row)));
    }
  }
}

// total += scale * dot products, where dot(row, tile) are those of row = token * kDigits + digit, constants both.
template <int kDigits, int kTokens, typename Dot>
NIBBLE_INLINE void add_dots(const Group& group, const GroupDigits& x, const Dot& dot, float* const (&total)[kTokens]) {
  if (kDigits == 1 && group.at_end) {
    unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA {
      unroll<kTokens>([&](auto m) NIBBLE_LAMBDA {
        float* out = total[m] + t * kLanes;
        store(out, fma(to_float(dot(m, t)), set1(x.scale[m * x.step]), load(out)));
      });
    });
    return;
  }
  unroll<kPanelTiles>([&](auto t) NIBBLE_LAMBDA {
    const I32 zero = load(group.zero + t * kLanes);
    const F32 factor = load(group.factor + t * kLanes);
    unroll<kTokens>([&](auto m) NIBBLE_LAMBDA {
      F32 value = set1(0.0f);
      unroll<kDigits>([&](auto i) NIBBLE_LAMBDA {  // from the most significant digit down
        constexpr int kDigit = kDigits - 1 - i;
        const I32 sum = set1(x.sums[m * x.step * kDigits + kDigit]);
        const F32 digit = to_float(dot(std::integral_constant<int, m * kDigits + kDigit>{}, t) - zero * sum);
        value = i == 0 ? digit : fma(value, set1(256.0f), digit);
      });
      float* out = total[m] + t * kLanes;
      store(out, fma(value, factor * set1(x.scale[m * x.step]), load(out)));
    });
  });
}

// total += group's share, for kTokens tokens.
template <Codes kCodes, int kDigits, int kTokens, bool kStreamed>
NIBBLE_INLINE void add_group(const Group& group, const GroupDigits& x, int64_t width, float* const (&totals)[kTokens]) {
  constexpr int kRows = kTokens * kDigits, kTiles = tiles_for(kRows);
#if defined(__AVX512VNNI__)
  constexpr bool kInRegisters = kCodes == Codes::bytes && kRows == 6 && !kStreamed;
#else
  constexpr bool kInRegisters = false;
#endif
  if constexpr (kInRegisters) {
#if defined(__AVX512VNNI__)
    I32 dots[kRows * kPanelTiles];
    dot_six_rows(group.codes, x.digits, x.stride, width, dots);
    const auto dot = [&](auto row, auto tile) NIBBLE_LAMBDA { return dots[row * kPanelTiles + tile]; };
    add_dots<kDigits, kTokens>(group, x, dot, totals);
#endif
  } else {
    alignas(64) int32_t dots[kRows][kPanelRows];
    for (int tile = 0; tile < kPanelTiles; tile += kTiles) {
      auto* out = reinterpret_cast<int32_t (*)[kPanelRows]>(dots[0] + tile * kLanes);
      dot_group<kCodes, kRows, kTiles, kStreamed>(group.codes + tile * 64, x.digits, x.stride, width, out);
    }
    const auto dot = [&](auto row, auto tile) NIBBLE_LAMBDA { return load(dots[row] + tile * kLanes); };
    add_dots<kDigits, kTokens>(group, x, dot, totals);
  }
  if (group.minimum != nullptr) add_minimum<kDigits, kTokens>(group, x, totals);
}

// The same for `count` groups, all `group` wide but for the last one.
template <Codes kCodes, int kDigits, int kTokens, bool kStreamed>
__attribute__((noinline)) void add_block(const Group* groups, int64_t count, GroupDigits x, int64_t group, int64_t last,
                                         float (*total)[kPanelRows]) {
  float* totals[kTokens];
  for (int m = 0; m < kTokens; ++m) totals[m] = total[x.token == nullptr ? m : x.token[m]];
  for (int64_t i = 0; i < count; ++i, x.digits += group, ++x.scale, x.sums += kDigits) {
    add_group<kCodes, kDigits, kTokens, kStreamed>(groups[i], x, i < count - 1 ? group : last, totals);
  }
}

// total (tokens, 64) += the share of `count` groups from g on. Tokens go in blocks as large as the registers hold,
// then the rest in one smaller block.
template <Codes kCodes, int kDigits, int kTokens, bool kStreamed>
void add_groups(const PanelReader& panel, const Group* groups, int64_t g, int64_t count, const Activations& a,
                int64_t token, int64_t end, float (*total)[kPanelRows]) {
  for (; token + kTokens <= end; token += kTokens, total += kTokens) {
    const int64_t at = token * a.groups + g;
    const int8_t* digits = a.digits + token * kDigits * a.stride + g * a.group;
    const GroupDigits x{digits, a.stride, a.scale + at, a.sums + at * kDigits, a.groups, nullptr};
    add_block<kCodes, kDigits, kTokens, kStreamed>(groups, count, x, a.group, panel.width(g + count - 1), total);
  }
  if constexpr (kTokens > 1) {
    if (token < end) {
      add_groups<kCodes, kDigits, kTokens - 1, kStreamed>(panel, groups, g, count, a, token, end, total);
    }
  }
}

// total (tokens, 64) += the share of one group's second digits, those from `first` to `end` in its list.
template <Codes kCodes, int kTokens, bool kStreamed>
void add_second(const Group& group, const SecondDigits& second, int64_t first, int64_t end, int64_t width,
                float (*total)[kPanelRows]) {
  for (; first + kTokens <= end; first += kTokens) {
    const GroupDigits x{second.digits + first * second.stride,
                        second.stride,
                        second.scale + first,
                        second.sums + first,
                        1,
                        second.token + first};
    add_block<kCodes, 1, kTokens, kStreamed>(&group, 1, x, width, width, total);
  }
  if constexpr (kTokens > 1) {
    if (first < end) add_second<kCodes, kTokens - 1, kStreamed>(group, second, first, end, width, total);
  }
}

// What the sum over k leaves to do, and who asks for it.
template <int kDigits>
void finish(const QuantizedLinearArgs& args, const PanelReader& panel, const float* row_sum, int64_t first,
            int64_t token, int64_t end, const float (*total)[kPanelRows], const float (*second)[kPanelRows]) {
  const float* row_scale = panel.row_scale();
  const int32_t* row_zero = panel.row_zero();
  for (; token < end; ++token, ++total, ++second) {
    for (int row = 0; row < kPanelRows && first + row < args.weight->n; row += kLanes) {
      const int n = static_cast<int>(min(kLanes, args.weight->n - first - row));
      F32 y = load(*total + row);
      if constexpr (kDigits == 1) {
        y = y + load(*second + row);
        y = fma(to_float(load(row_zero + row)), set1(-row_sum[token]), y);
      }
      if (args.bias != nullptr) {
        y = fma(y, load(row_scale + row), load_first(args.bias + first + row, n));
      } else {
        y = y * load(row_scale + row);
      }
      store_first(args.out + token * args.out_stride + first + row, y, n);
    }
  }
}

constexpr int block_tokens(int digits) { return kMostRows / digits > 0 ? kMostRows / digits : 1; }

// The share of groups [g, g + count) of one panel, of both digits.
template <Codes kCodes, int kDigits, bool kStreamed>
void add(const PanelReader& panel, const Group* groups, int64_t g, int64_t count, const Activations& a,
         const SecondDigits& second, int64_t token, int64_t end, float (*total)[kPanelRows]) {
  constexpr int kTokens = block_tokens(kDigits);
  add_groups<kCodes, kDigits, kTokens, kStreamed>(panel, groups, g, count, a, token, end, total);
  if constexpr (kDigits == 1) {
    total += end - token;
    for (int64_t i = g; i < g + count; ++i) {
      const int64_t item = token / second.tokens * a.groups + i, first = item * second.tokens;
      add_second<kCodes, kTokens, kStreamed>(groups[i - g], second, first, first + second.count[item], panel.width(i),
                                             total);
    }
  }
}

// One panel for tokens [token, end).
template <int kDigits>
void multiply(const QuantizedLinearArgs& args, const Activations& a, const SecondDigits& second, int64_t index,
              int64_t token, int64_t end) {
  const QuantizedPanels& w = *args.weight;
  const bool streamed = end - token <= 2 * block_tokens(kDigits);
  const int64_t total_bytes = (kDigits == 1 ? 2 : 1) * (end - token) * kPanelRows * int64_t{sizeof(float)};
  auto* scratch =
      static_cast<uint8_t*>(local_scratch(static_cast<size_t>(total_bytes) + PanelReader::scratch_bytes(w, a.group)));
  auto* total = reinterpret_cast<float (*)[kPanelRows]>(scratch);
  std::memset(scratch, 0, static_cast<size_t>(total_bytes));
  PanelReader panel(w, index, a.group, w.bits == 4 && !streamed, kDigits == 1);
  // Streaming decodes scales one at a time, close behind the prefetch.
  const int64_t step =
      streamed && w.groups > 1 ? PanelReader::groups_per_scale(w, a.group) : PanelReader::groups_at_once(w, a.group);
  for (int64_t g = 0; g < a.groups; g += step) {
    const int64_t count = min(step, a.groups - g);
    const Group* groups = panel.read(g, count, scratch + total_bytes);
    if (!streamed) {
      w.bits == 4 ? add<kExpanded, kDigits, false>(panel, groups, g, count, a, second, token, end, total)
                  : add<Codes::bytes, kDigits, false>(panel, groups, g, count, a, second, token, end, total);
    } else if (w.bits == 4) {
      add<Codes::nibbles, kDigits, true>(panel, groups, g, count, a, second, token, end, total);
    } else {
      add<Codes::bytes, kDigits, true>(panel, groups, g, count, a, second, token, end, total);
    }
  }
  finish<kDigits>(args, panel, second.row_sum, index * kPanelRows, token, end, total, total + (end - token));
}

// Hands out the memory of one scratch buffer, whose size a first round without one finds.
class Carver {
 public:
  explicit Carver(void* memory) : at_(reinterpret_cast<uintptr_t>(memory)), start_(at_) {}
  template <typename T>
  void take(T*& out, int64_t count) {
    out = reinterpret_cast<T*>(at_);
    at_ += static_cast<uintptr_t>((count * int64_t{sizeof(T)} + 63) / 64 * 64);
  }
  size_t bytes() const { return at_ - start_; }

 private:
  uintptr_t at_, start_;
};

template <int kDigits>
void run(const QuantizedLinearArgs& args) {
  const QuantizedPanels& w = *args.weight;
  const int64_t split = min(args.m, w.panels() >= 8 * threads() ? kMostTokens : kFewestTokens);
  const int64_t splits = (args.m + split - 1) / split;
  constexpr int64_t kGroup = group_of(kDigits);
  Activations a;
  a.group = w.groups == 1 || (kDigits == 1 && w.group % kGroup == 0 && w.group <= kBlockK) ? kGroup : w.group;
  a.groups = (w.k + a.group - 1) / a.group;
  a.stride = (w.k + 63) / 64 * 64 + 64;  // slack for whole-vector stores; the odd line keeps rows off one cache set
  SecondDigits second{};
  second.tokens = split;
  second.stride = (a.group + 63) / 64 * 64;
  const auto carve = [&](void* memory) {
    Carver carver(memory);
    carver.take(a.scale, args.m * a.groups);
    carver.take(a.sums, args.m * a.groups * kDigits);
    carver.take(a.digits, args.m * kDigits * a.stride);
    if (kDigits == 1) {
      const int64_t places = splits * a.groups * split;
      carver.take(second.count, splits * a.groups);
      carver.take(second.token, places);
      carver.take(second.scale, places);
      carver.take(second.sums, places);
      carver.take(second.digits, places * second.stride);
      carver.take(second.row_sum, args.m);
    }
    return carver.bytes();
  };
  carve(shared_scratch(carve(nullptr)));
  if (kDigits == 1) std::memset(second.count, 0, static_cast<size_t>(splits * a.groups) * sizeof(int32_t));
  quantize_activations<kDigits>(args, a, second);

  const int64_t cost = w.panel_bytes() * split + 1;  // threads pay off from about 32 KiB of codes on
  parallel_for(w.panels() * splits, 1 + 32768 / cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % splits * split;
      multiply<kDigits>(args, a, second, item / splits, token, min(token + split, args.m));
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
