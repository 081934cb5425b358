// y = x W^T + b with 4- or 8-bit W, for one token or many, bit-equal between the two.
//
// Per group of k an activation is a fixed-point number made of one to three signed bytes ("digits", base 256), so
// the dot product with the codes is exact in int32 whatever the order. Only the sum over groups is in fp32, in
// ascending order with one fused multiply-add per group: the same for every m, thread count and instruction set.
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

constexpr int64_t kRowGroup{128};  // activations that share a scale where weights have one scale per row
constexpr int64_t kPrefetchBytes{
    8192};                           // ahead in a streamed panel; best of 1 to 16 KiB on Zen 5, and better than into L2
constexpr int64_t kMostTokens{512};  // per work item: their sums for one panel fill 128 KiB
constexpr int64_t kFewestTokens{48};  // the same when there are too few panels for the threads
constexpr int kPanelTiles{kPanelRows / kTileRows};

struct Activations {
  int8_t* digits;  // (m, kDigits) rows of `stride` bytes, most significant digit last
  float* scale;    // (m, groups)
  int32_t* sums;   // (m, groups, kDigits): sum of the digits, for the zero-point
  int64_t stride, group, groups;
};

// ------------------------------------------------------------------------------------------- activations

// One group of one token. The largest magnitude becomes the largest value that kDigits balanced digits can hold.
template <int kDigits>
NIBBLE_INLINE void quantize_group(const float* x, int64_t width, int8_t* digits, int64_t stride, float* scale,
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

  I32 sum[kDigits];
  for (auto& s : sum) s = set1(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const int n = static_cast<int>(width - i < kLanes ? width - i : kLanes);
    const F32 v = n == kLanes ? load(x + i) : load_first(x + i, n);
    I32 rest = usable ? min(max(round_to_int(v * inverse), set1(-kLimit)), set1(kLimit)) : set1(0);
    for (int d = 0; d < kDigits; ++d) {
      const I32 digit = shift_right<24>(shift_left<24>(rest));
      store_low_bytes(digits + d * stride + i, digit);  // may run into the next group, which is written later
      sum[d] = sum[d] + digit;
      rest = shift_right<8>(rest + set1(128));
    }
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
        quantize_group<kDigits>(args.x + m * args.x_stride + first, min(a.group, k - first),
                                a.digits + m * kDigits * a.stride + first, a.stride, a.scale + m * a.groups + g,
                                a.sums + (m * a.groups + g) * kDigits);
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

// What the inner loops read for one group of a panel; each array has a value per row.
struct Group {
  const uint8_t* codes;
  const float* factor;
  const int32_t* zero;
  const float* minimum;  // null in the zero-point form

  Group(const uint8_t* group_codes, const GroupValues& v, const QuantizedPanels& w)
      : codes(group_codes),
        factor(scale_at_end(w) ? kOnes : v.scale),
        zero(v.zero),
        minimum(w.offset == Offset::minimum ? v.minimum : nullptr) {}
};

// Reads a panel a few groups at a time. For many tokens 4-bit codes are expanded to bytes in scratch memory, and the
// groups stay in L1 while all tokens meet them; for few tokens codes are read where they lie.
class PanelReader {
 public:
  PanelReader(const QuantizedPanels& w, int64_t index, int64_t group, bool expand)
      : w_(w), base_(w.buffer->data() + index * w.panel_bytes()), group_(group), expand_(expand) {
    if (w.groups == 1) row_values_.decode(w, base_ + w.code_bytes(w.padded_k()));
  }
  static int64_t groups_at_once(int64_t group) { return group < kBlock ? kBlock / group : 1; }
  static size_t scratch_bytes(int64_t group) {
    const int64_t groups = groups_at_once(group);
    return static_cast<size_t>(groups * group * kPanelRows + groups * int64_t{sizeof(GroupValues) + sizeof(Group)});
  }
  int64_t width(int64_t g) const { return min(group_, w_.padded_k() - g * group_); }
  const float* row_scale() const { return scale_at_end(w_) ? row_values_.scale : kOnes; }

  // Groups [g, g + count), count at most groups_at_once(), valid until the next call.
  const Group* read(int64_t g, int64_t count, uint8_t* scratch) {
    auto* values = reinterpret_cast<GroupValues*>(scratch + groups_at_once(group_) * group_ * kPanelRows);
    auto* groups = reinterpret_cast<Group*>(values + groups_at_once(group_));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t k = (g + i) * group_, behind_codes = w_.scale_bytes() + w_.offset_bytes();
      const uint8_t* codes = base_ + w_.code_bytes(k) + (w_.groups == 1 ? 0 : (g + i) * behind_codes);
      if (w_.groups > 1) values[i].decode(w_, codes + w_.code_bytes(width(g + i)));
      if (expand_) codes = expand(codes, scratch + i * group_ * kPanelRows, width(g + i));
      groups[i] = Group(codes, w_.groups == 1 ? row_values_ : values[i], w_);
    }
    return groups;
  }

 private:
  static constexpr int64_t kBlock{512};  // k: 32 KiB of codes

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
  const bool expand_;
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
template <int kDigits, int kTokens, typename Dot>
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
        const I32 sum = set1(sums[m * a.groups * kDigits + kDigit]);
        const F32 digit = to_float(dot(std::integral_constant<int, m * kDigits + kDigit>{}, t) - zero * sum);
        value = i == 0 ? digit : fma(value, set1(256.0f), digit);
      });
      float* out = total[m] + t * kLanes;
      store(out, fma(value, factor * set1(scale[m * a.groups]), load(out)));
    });
  });
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
  if constexpr (kInRegisters) {
#if defined(__AVX512VNNI__)
    I32 dots[kRows * kPanelTiles];
    dot_six_rows(group.codes, digits, a.stride, width, dots);
    const auto dot = [&](auto row, auto tile) NIBBLE_LAMBDA { return dots[row * kPanelTiles + tile]; };
    add_dots<kDigits, kTokens>(group, a, token, g, dot, total);
#endif
  } else {
    alignas(64) int32_t dots[kRows][kPanelRows];
    for (int tile = 0; tile < kPanelTiles; tile += kTiles) {
      auto* out = reinterpret_cast<int32_t (*)[kPanelRows]>(dots[0] + tile * kLanes);
      dot_group<kCodes, kRows, kTiles, kStreamed>(group.codes + tile * 64, digits, a.stride, width, out);
    }
    const auto dot = [&](auto row, auto tile) NIBBLE_LAMBDA { return load(dots[row] + tile * kLanes); };
    add_dots<kDigits, kTokens>(group, a, token, g, dot, total);
  }
  if (group.minimum != nullptr) add_minimum<kDigits, kTokens>(group, a, token, g, total);
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

void finish(const QuantizedLinearArgs& args, const float* row_scale, int64_t first, int64_t token, int64_t end,
            const float (*total)[kPanelRows]) {
  for (; token < end; ++token, ++total) {
    for (int row = 0; row < kPanelRows && first + row < args.weight->n; row += kLanes) {
      const int n = static_cast<int>(min(kLanes, args.weight->n - first - row));
      F32 y = load(*total + row);
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

// One panel for tokens [token, end).
template <int kDigits>
void multiply(const QuantizedLinearArgs& args, const Activations& a, int64_t index, int64_t token, int64_t end) {
  constexpr int kTokens = block_tokens(kDigits);
  const QuantizedPanels& w = *args.weight;
  const bool streamed = end - token <= 2 * kTokens;
  const int64_t total_bytes = (end - token) * kPanelRows * int64_t{sizeof(float)};
  auto* scratch =
      static_cast<uint8_t*>(local_scratch(static_cast<size_t>(total_bytes) + PanelReader::scratch_bytes(a.group)));
  auto* total = reinterpret_cast<float (*)[kPanelRows]>(scratch);
  std::memset(scratch, 0, static_cast<size_t>(total_bytes));
  PanelReader panel(w, index, a.group, w.bits == 4 && !streamed);
  // Streaming decodes scales one group at a time, close behind the prefetch.
  const int64_t step = streamed && w.groups > 1 ? 1 : PanelReader::groups_at_once(a.group);
  for (int64_t g = 0; g < a.groups; g += step) {
    const int64_t count = min(step, a.groups - g);
    const Group* groups = panel.read(g, count, scratch + total_bytes);
    if (!streamed) {
      w.bits == 4 ? add_groups<kExpanded, kDigits, kTokens, false>(panel, groups, g, count, a, token, end, total)
                  : add_groups<Codes::bytes, kDigits, kTokens, false>(panel, groups, g, count, a, token, end, total);
    } else if (w.bits == 4) {
      add_groups<Codes::nibbles, kDigits, kTokens, true>(panel, groups, g, count, a, token, end, total);
    } else {
      add_groups<Codes::bytes, kDigits, kTokens, true>(panel, groups, g, count, a, token, end, total);
    }
  }
  finish(args, panel.row_scale(), index * kPanelRows, token, end, total);
}

template <int kDigits>
void run(const QuantizedLinearArgs& args) {
  const QuantizedPanels& w = *args.weight;
  Activations a;
  a.group = w.groups == 1 ? kRowGroup : w.group;
  a.groups = (w.k + a.group - 1) / a.group;
  a.stride = (w.k + 63) / 64 * 64 + 64;  // slack for whole-vector stores; the odd line keeps rows off one cache set
  const int64_t scales = args.m * a.groups;
  auto* memory = static_cast<uint8_t*>(
      shared_scratch(static_cast<size_t>(args.m * kDigits * a.stride + scales * 4 * (1 + kDigits))));
  a.scale = reinterpret_cast<float*>(memory);
  a.sums = reinterpret_cast<int32_t*>(memory + scales * 4);
  a.digits = reinterpret_cast<int8_t*>(memory + scales * 4 * (1 + kDigits));
  quantize_activations<kDigits>(args, a);

  const int64_t split = min(args.m, w.panels() >= 8 * threads() ? kMostTokens : kFewestTokens);
  const int64_t splits = (args.m + split - 1) / split;
  const int64_t cost = w.panel_bytes() * split + 1;  // threads pay off from about 32 KiB of codes on
  parallel_for(w.panels() * splits, 1 + 32768 / cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % splits * split;
      multiply<kDigits>(args, a, item / splits, token, min(token + split, args.m));
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
