// y = x W^T + b with 4- or 8-bit W, for one token or many, bit-equal between the two.
//
// Per group of k an activation is a fixed-point number made of one to three signed bytes ("digits", base 256), so
// the dot product with the codes is exact in int32 whatever the order. Only the sum over groups is in fp32, in
// ascending order with one fused multiply-add per group: the same for every m, thread count and instruction set.
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

constexpr int64_t kRowGroup{128};        // activations that share a scale where weights have one scale per row
constexpr int64_t kPrefetchBytes{2048};  // ahead in a streamed panel; Zen 5: +10 % over none, flat from 1 to 4 KiB
constexpr int64_t kFewestTokens{48};     // per work item, when there are too few panels for the threads
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

// A panel read where it lies, for few tokens: memory is read once, in order.
class StreamedPanel {
 public:
  StreamedPanel(const QuantizedPanels& w, int64_t index) : w_(w), base_(w.buffer->data() + index * w.panel_bytes()) {
    if (w.groups == 1) values_.decode(w, base_ + w.code_bytes(w.padded_k()));
  }
  Group group(int64_t g, int64_t group_width) {  // of the activations
    if (w_.groups == 1) return view(base_ + w_.code_bytes(g * group_width));
    const int64_t stride = w_.code_bytes(w_.group) + w_.scale_bytes() + w_.offset_bytes();
    const uint8_t* codes = base_ + g * stride;
    values_.decode(w_, codes + w_.code_bytes(min(w_.group, w_.padded_k() - g * w_.group)));
    return view(codes);
  }
  const float* row_scale() const { return scale_at_end(w_) ? values_.scale : kOnes; }

 private:
  Group view(const uint8_t* codes) const { return {codes, values_, w_}; }
  const QuantizedPanels& w_;
  const uint8_t* base_;
  GroupValues values_;
};

// A panel with one byte per code and decoded scales in this thread's scratch memory, for many tokens.
class ExpandedPanel {
 public:
  ExpandedPanel(const QuantizedPanels& w, int64_t index) : w_(w) {
    const size_t code_bytes = w.bits == 4 ? static_cast<size_t>(w.padded_k() * kPanelRows) : 0;
    const auto groups = static_cast<size_t>(w.groups);
    auto* memory = static_cast<uint8_t*>(local_scratch(code_bytes + groups * sizeof(GroupValues)));
    values_ = reinterpret_cast<GroupValues*>(memory + code_bytes);
    const uint8_t* p = w.buffer->data() + index * w.panel_bytes();
    codes_ = w.bits == 4 ? memory : p;
    for (int64_t g = 0; g < w.groups; ++g) {
      const int64_t width = w.groups == 1 ? w.padded_k() : min(w.group, w.padded_k() - g * w.group);
      if (w.bits == 4) {
        expand(p, memory + g * w.group * kPanelRows, width);
      }
      p += w.code_bytes(width);
      values_[g].decode(w, p);
      p += w.scale_bytes() + w.offset_bytes();
    }
  }
  Group group(int64_t g, int64_t group_width) const {
    const GroupValues& v = values_[w_.groups == 1 ? 0 : g];
    const int64_t behind_codes = w_.bits == 4 || w_.groups == 1 ? 0 : w_.scale_bytes() + w_.offset_bytes();
    return {codes_ + g * (group_width * kPanelRows + behind_codes), v, w_};
  }
  const float* row_scale() const { return scale_at_end(w_) ? values_->scale : kOnes; }

 private:
  static void expand(const uint8_t* from, uint8_t* to, int64_t width) {
    constexpr int64_t kStep = kPanelRows * 4;  // bytes of four k
    for (int64_t k = 0; k < width; k += 8, from += kStep, to += 2 * kStep) {
      for (int t = 0; t < kPanelTiles; ++t) {
        const I32 codes = load_bytes(from + t * 64);
        store_bytes(to + t * 64, low_nibbles(codes));
        store_bytes(to + kStep + t * 64, high_nibbles(codes));
      }
    }
  }
  const QuantizedPanels& w_;
  const uint8_t* codes_;
  GroupValues* values_;
};

// ------------------------------------------------------------------------------------------- kernels

// Exact dot products of kRows rows of digits with kTiles tiles of a group. Chains are split in two where there are
// too few to cover the latency of the dot product instruction.
template <int kBits, int kRows, int kTiles, bool kStreamed>
NIBBLE_INLINE void dot_group(const uint8_t* codes, const int8_t* digits, int64_t stride, int64_t width,
                             I32 (&acc)[kRows][kTiles]) {
  constexpr int64_t kStep = kPanelRows * 4;
  constexpr bool kSplit = kRows * kTiles <= 4;
  I32 second[kRows][kTiles];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) acc[r][t] = second[r][t] = set1(0);
  }
  for (int64_t k = 0; k < width; k += 8, digits += 8, codes += kBits == 4 ? kStep : 2 * kStep) {
    I32 even[kTiles], odd[kTiles];  // codes of the first and of the last four k
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const I32 first = load_bytes(codes + t * 64);
      even[t] = kBits == 4 ? low_nibbles(first) : first;
      odd[t] = kBits == 4 ? high_nibbles(first) : load_bytes(codes + kStep + t * 64);
      if constexpr (kStreamed) {
        __builtin_prefetch(codes + kPrefetchBytes + t * 64);
        if constexpr (kBits == 8) __builtin_prefetch(codes + kPrefetchBytes + kStep + t * 64);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const I32 x = broadcast4(digits + r * stride);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) acc[r][t] = dot4<kBits>(acc[r][t], even[t], x);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const I32 x = broadcast4(digits + r * stride + 4);
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        I32& chain = kSplit ? second[r][t] : acc[r][t];
        chain = dot4<kBits>(chain, odd[t], x);
      }
    }
  }
  if constexpr (kSplit) {
    for (int r = 0; r < kRows; ++r) {
      for (int t = 0; t < kTiles; ++t) acc[r][t] = acc[r][t] + second[r][t];
    }
  }
}

constexpr int tiles_for(int rows) {
  int tiles = kPanelTiles;
  while (tiles > 1 && tiles * rows > kBlockRows * kBlockVectors) tiles /= 2;
  return tiles;
}

// total += group's share, for kTokens tokens and kTiles tiles from `tile` on.
template <int kBits, int kDigits, int kTokens, bool kStreamed>
NIBBLE_INLINE void add_group(const Group& group, const Activations& a, int64_t token, int64_t g, int64_t width,
                             float (*total)[kPanelRows]) {
  constexpr int kRows = kTokens * kDigits, kTiles = tiles_for(kRows);
  const int8_t* digits = a.digits + token * kDigits * a.stride + g * a.group;
#pragma GCC unroll 1
  for (int tile = 0; tile < kPanelTiles; tile += kTiles) {
    I32 acc[kRows][kTiles];
    dot_group<kBits, kRows, kTiles, kStreamed>(group.codes + tile * 64, digits, a.stride, width, acc);
#pragma GCC unroll 6
    for (int m = 0; m < kTokens; ++m) {
      const int64_t at = (token + m) * a.groups + g;
      const F32 x_scale = set1(a.scale[at]);
      const int32_t* sums = a.sums + at * kDigits;
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        const int row = (tile + t) * kLanes;
        const I32 zero = load(group.zero + row);
        F32 dot = to_float(acc[m * kDigits + kDigits - 1][t] - zero * set1(sums[kDigits - 1]));
#pragma GCC unroll 2
        for (int d = kDigits - 2; d >= 0; --d) {
          dot = fma(dot, set1(256.0f), to_float(acc[m * kDigits + d][t] - zero * set1(sums[d])));
        }
        F32 sum = fma(dot, load(group.factor + row) * x_scale, load(total[m] + row));
        if (group.minimum != nullptr) {
          float digit_sum = static_cast<float>(sums[kDigits - 1]);
          for (int d = kDigits - 2; d >= 0; --d) {
            digit_sum = __builtin_fmaf(digit_sum, 256.0f, static_cast<float>(sums[d]));
          }
          sum = fma(set1(digit_sum), load(group.minimum + row) * x_scale, sum);
        }
        store(total[m] + row, sum);
      }
    }
  }
}

struct Job {
  const QuantizedLinearArgs& args;
  const Activations& a;
};

template <int kBits, int kDigits, int kTokens, bool kStreamed, typename Panel>
void multiply_tokens(const Job& job, Panel& panel, int64_t index, int64_t token) {
  const auto& [args, a] = job;
  alignas(64) float total[kTokens][kPanelRows] = {};
  const int64_t padded = args.weight->padded_k();
  for (int64_t g = 0; g < a.groups; ++g) {
    const int64_t width = min(a.group, padded - g * a.group);
    add_group<kBits, kDigits, kTokens, kStreamed>(panel.group(g, a.group), a, token, g, width, total);
  }
  const int64_t first = index * kPanelRows;
  const float* row_scale = panel.row_scale();
  for (int m = 0; m < kTokens; ++m) {
    float* out = args.out + (token + m) * args.out_stride + first;
    for (int row = 0; row < kPanelRows && first + row < args.weight->n; row += kLanes) {
      const int n = static_cast<int>(min(kLanes, args.weight->n - first - row));
      F32 y = load(total[m] + row);
      if (args.bias != nullptr) {
        y = fma(y, load(row_scale + row), load_first(args.bias + first + row, n));
      } else {
        y = y * load(row_scale + row);
      }
      store_first(out + row, y, n);
    }
  }
}

// Tokens [token, end) in blocks as large as the registers hold, then the rest in one smaller block.
template <int kBits, int kDigits, int kTokens, bool kStreamed, typename Panel>
void multiply(const Job& job, Panel& panel, int64_t index, int64_t token, int64_t end) {
  for (; token + kTokens <= end; token += kTokens) {
    multiply_tokens<kBits, kDigits, kTokens, kStreamed>(job, panel, index, token);
  }
  if constexpr (kTokens > 1) {
    if (token < end) multiply<kBits, kDigits, kTokens - 1, kStreamed>(job, panel, index, token, end);
  }
}

constexpr int block_tokens(int digits) { return kBlockRows / digits > 0 ? kBlockRows / digits : 1; }

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

  constexpr int kTokens = block_tokens(kDigits);
  const Job job{args, a};
  const bool streamed = args.m <= 2 * kTokens;
  const int64_t split = streamed || w.panels() >= 8 * threads() ? args.m : min(args.m, kFewestTokens);
  const int64_t splits = (args.m + split - 1) / split;
  const int64_t cost = w.panel_bytes() * min(args.m, split) + 1;  // threads pay off from about 32 KiB of codes on
  parallel_for(w.panels() * splits, 1 + 32768 / cost, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t index = item / splits, token = item % splits * split;
      const int64_t last = min(token + split, args.m);
      if (streamed) {
        StreamedPanel panel(w, index);
        w.bits == 4 ? multiply<4, kDigits, kTokens, true>(job, panel, index, token, last)
                    : multiply<8, kDigits, kTokens, true>(job, panel, index, token, last);
      } else {
        ExpandedPanel panel(w, index);
        multiply<8, kDigits, kTokens, false>(job, panel, index, token, last);
      }
    }
  });
}

}  // namespace

void quantized_linear(const QuantizedLinearArgs& args) {
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
