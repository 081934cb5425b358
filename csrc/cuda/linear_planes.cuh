// Activations as "planes": int8 digits with a scale per slice and row, of two and three digits a power of two (integer
// weights), or terms in the weight's half precision whose sum is the activation.
#pragma once

#include "linear.h"
#include "tensor_map.cuh"
#include "tiles.h"
#include "vector.cuh"

namespace nibblelm::cuda {

template <WeightFormat F>
struct Format {
  static constexpr bool kInteger{is_integer(F)}, kCodes{is_codes(F)}, kInt4{is_int4(F)};
  static constexpr bool kHalf{F == WeightFormat::f16 || F == WeightFormat::int4_half};  // products in fp16
  static constexpr int kStageBytes{stage_bytes(F)};
  static constexpr int kCopies{kStageBytes / 512};  // 16-byte copies of a lane for one stage
  static constexpr int kStageK{kCodes ? kStepK : F == WeightFormat::f32 ? 32 : 64};
  static constexpr int kPlaneBytes{kInteger ? 1 : 2};  // of one element of a plane
  static constexpr bool kScaled{kInteger || kHalf};    // planes are x * 2^-e, e per slice and row
  using Accumulator = std::conditional_t<kInteger, int, float>;
};

// bf16 activations take the fewest planes of a format, fp32 the most.
template <WeightFormat F, int D>
constexpr bool kFloatActivations{D == activation_planes(F, DType::f32)};

template <WeightFormat F, int D>
constexpr bool kDigitColumns{digit_columns(Format<F>::kInteger, D)};

// Whether the sums of slices stay integers, so that no kernel keeps totals beside them: all slices' scales are one
// number by powers of two, and one digit by int4 codes leaves room in int32 for shifts between them.
template <WeightFormat F, bool Grouped, int D>
constexpr bool kOneSum{one_sum(F, D, Grouped)};

// Whether a slice's scale also keeps the sums of 128 activations so small that their products with codes less
// zero-points, at most 15, add up to less than 2^24: exact in fp32 as in int32. Gaussian rows lose 0.6 of a bit by
// it, rows of one magnitude one or two.
template <WeightFormat F, bool Grouped, int D>
constexpr bool kBounded{F == WeightFormat::int4_half || (F == WeightFormat::int4 && Grouped && D == 2)};

// Where it is bounded, the scale of a slice is that of the largest of these: a sixteenth of eight magnitudes' sum, or
// of the largest of them as much as brings it to two digits (kOfLargest). Sixteen sums of eight are at most 2^24 / 15
// then, a half for each rounding included; sixteenths, lest they overflow.
constexpr float kTopOfEight{4367.0f}, kOfLargest{0.13435f};
static_assert(kTopOfEight / kOfLargest <= 127.0f * 256 &&
              15.0f * (16 * 16 * kTopOfEight * 1.000001f + 64) <= 16777216.0f);

struct DecodeArgs {
  const uint8_t* data;
  const uint8_t* records;
  const void* x;
  void* y;
  const float* bias;
  float* partials;
  uint8_t* images;  // planes, sums and scales of every part, prepared once; null: each block prepares its own
  int* arrivals;
  int64_t x_stride;
  int64_t y_stride;
  int64_t pitch_bytes;  // full formats
  int n, k;
  int strips, steps;
  int stages;               // of one strip
  int groups, group_shift;  // integer formats: groups of a row; log2 of the group size, or 0 for per-row
  int record_bytes;
  DType scale_dtype, y_dtype;
  bool has_zero, has_minimum, x_aligned;
  const float* gain;  // null: no norm
  const void* residual;
  void* h;
  int64_t residual_stride;
  float eps;
  bool plus_one, gated;
  DecodePlan plan;
  // Last, since registers of kernels that take more rows follow where the rest is.
  const float* post_gain;  // null: no norm of x before the residual is added
  float post_eps;
  bool gelu;     // gates with it, else with silu
  bool centres;  // the norm is a LayerNorm
  After after;   // with one row of x; more rows have a kernel of their own for it
  bool apart;    // reads nothing that the links before it store which no link has waited for
  const float* gain_bias;
  const void* addend;
  int64_t addend_stride;
};

// What a kernel is compiled for, since each wants registers and code: RMSNorm or none; also one before the residual is
// added; also LayerNorm, an addend, and what may come after.
enum class Extras { none, post, layer };

inline Extras extras_of(const DecodeArgs& a) {
  if (a.post_gain != nullptr) return Extras::post;
  return a.centres || a.addend != nullptr || a.after != After::nothing ? Extras::layer : Extras::none;
}

// What the kernel for more rows is launched with.
struct LargeArgs {
  DecodeArgs a;  // of its plan: slices_log and row_rounds
  LargePlan p;
  int rows;             // of x
  uint8_t* tiles;       // x in digits or halves
  float* scales;        // (slices, padded rows of x)
  float* totals;        // (padded rows of x): their sums, for weights with one scale a row
  int* shifts;          // (slices, padded rows of x): unit_shift from the slice before, where sums stay integers
  float* partials;      // sums of slices that wait to be added
  CUtensorMap weights;  // codes, in stages of a tile's strips, where large_mapped says so
};

// What one launch computes: linears of one row of x, each of what the one before it has stored, or a single linear.
// Their rings and records have the same places in shared memory.
struct DecodeChain {
  DecodeArgs links[kMaxLinks];
  int count;
  bool paced;          // rings are filled bit by bit: the kernel before is still to load what all wait for
  bool slowly;         // stage by stage
  int* barrier;        // between two links; see grid_barrier.cuh
  bool ends_together;  // blocks that store in each other, though each waits for what is stored in it
};

// Launches the kernel for one weight format; defined in linear_decode.cuh, one file per format instantiates it.
template <WeightFormat F>
void launch_decode_format(const DecodeChain& chain, int planes, const Launch& launch, const std::string& what);

// The same for more rows; defined in linear_large.cuh.
template <WeightFormat F>
void launch_large_format(const LargeArgs& args, int planes, const Launch& launch, const std::string& what);

// Calls call<Grouped, D>() for what a format is compiled for.
template <WeightFormat F, class Call>
void with_planes(int planes, bool grouped, Call call) {
  constexpr int kFewest{activation_planes(F, DType::bf16)}, kMost{activation_planes(F, DType::f32)};
  if constexpr (F == WeightFormat::int4_half) {
    call.template operator()<true, 1>();
  } else if constexpr (Format<F>::kInteger) {
    if (grouped) {
      planes == 1         ? call.template operator()<true, 1>()
      : planes == kFewest ? call.template operator()<true, kFewest>()
                          : call.template operator()<true, kMost>();
    } else if (planes == 1) {
      call.template operator()<false, 1>();
    } else {
      planes == kFewest ? call.template operator()<false, kFewest>() : call.template operator()<false, kMost>();
    }
  } else {
    planes == kFewest ? call.template operator()<false, kFewest>() : call.template operator()<false, kMost>();
  }
}

// Calls call<E>() with what is wanted; fp32 activations have none of it.
template <bool Float, class Call>
void with_extras(Extras wanted, Call call) {
  if constexpr (!Float) {
    if (wanted == Extras::post) return call.template operator()<Extras::post>();
    if (wanted == Extras::layer) return call.template operator()<Extras::layer>();
  }
  call.template operator()<Extras::none>();
}

// Eight activations as they are in memory.
template <bool Float>
struct Chunk {
  uint4 word[Float ? 2 : 1];

  // The largest magnitude, as the bits of a float: NaN is larger than infinity, which is larger than every number.
  __device__ __forceinline__ uint32_t largest() const {
    if constexpr (Float) {
      uint32_t out{0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t w[4]{word[i].x, word[i].y, word[i].z, word[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) out = max(out, w[j] & 0x7fffffffu);
      }
      return out;
    } else {
      constexpr uint32_t kSigns{0x7fff7fffu};
      const uint32_t pair =
          __vmaxu2(__vmaxu2(word[0].x & kSigns, word[0].y & kSigns), __vmaxu2(word[0].z & kSigns, word[0].w & kSigns));
      return max(pair << 16, pair & 0xffff0000u);
    }
  }

  // What the slice's scale depends on.
  template <bool Bounded>
  __device__ __forceinline__ uint32_t range() const {
    if constexpr (!Bounded) return largest();
    float v[8], sum{0.0f};
    unpack(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(fabsf(v[i]), 0.0625f, sum);
    return max(__float_as_uint(sum), __float_as_uint(__fmul_rn(__uint_as_float(largest()), kOfLargest)));
  }

  __device__ __forceinline__ void unpack(float (&v)[8]) const {
    if constexpr (Float) {
      memcpy(v, word, 32);
    } else {
      const uint32_t w[4]{word[0].x, word[0].y, word[0].z, word[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(w[i] << 16);
        v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      }
    }
  }
};

__device__ __forceinline__ Chunk<false> pack_chunk(const float (&v)[8]) {
  return {{{pack2<bf16>(v[0], v[1]), pack2<bf16>(v[2], v[3]), pack2<bf16>(v[4], v[5]), pack2<bf16>(v[6], v[7])}}};
}

// Activations from column k on; zeros from `last` or K on. Vector loads need aligned rows and K a multiple of 8.
template <bool Float, bool Aligned>
__device__ __forceinline__ Chunk<Float> load_chunk(const DecodeArgs& a, int row, int k, int last) {
  using T = std::conditional_t<Float, float, bf16>;
  const T* const p = static_cast<const T*>(a.x) + row * a.x_stride + k;
  Chunk<Float> out{};
  if constexpr (Aligned) {
    if (k < min(last, a.k)) {
      out.word[0] = *reinterpret_cast<const uint4*>(p);
      if constexpr (Float) out.word[1] = reinterpret_cast<const uint4*>(p)[1];
    }
  } else {
    alignas(16) T v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = k + i < min(last, a.k) ? p[i] : from_float<T>(0.0f);
    memcpy(&out, v, sizeof(out));
  }
  return out;
}

// Where a thread's activations are: x, or x + residual, which one block keeps in h.
struct RowSource {
  const bf16 *x, *residual, *h;  // the latter two or null; residual: where it is added to x as it is

  // `norms_x`: x is normed before the residual is added.
  __device__ __forceinline__ RowSource(const DecodeArgs& a, int row, int k, bool norms_x)
      : x(keep(static_cast<const bf16*>(a.x) + row * a.x_stride + k)), residual(nullptr), h(nullptr) {
    if (a.residual == nullptr) return;
    if (!norms_x) residual = keep(residual_of(a, row, k));
    if (static_cast<int>(blockIdx.x) == row)
      h = keep(static_cast<const bf16*>(a.h) + static_cast<int64_t>(row) * a.k + k);
  }
  __device__ __forceinline__ static const bf16* residual_of(const DecodeArgs& a, int row, int k) {
    return static_cast<const bf16*>(a.residual) + row * a.residual_stride + k;
  }
  __device__ __forceinline__ static Chunk<false> read(const bf16* p) { return {{*reinterpret_cast<const uint4*>(p)}}; }

  // Eight from column k + `at` on.
  __device__ __forceinline__ Chunk<false> load(int at) const {
    const Chunk<false> own = read(x + at);
    return residual == nullptr ? own : sum(own, read(residual + at), at);
  }
  // The same of x + addend, where there is one.
  __device__ __forceinline__ Chunk<false> load(int at, const bf16* addend) const {
    if (addend == nullptr) return load(at);
    const Chunk<false> own = read(x + at), more = read(addend + at), other = read(residual + at);
    return sum(plus(own, more), other, at);
  }
  __device__ __forceinline__ Chunk<false> sum(const Chunk<false>& own, const Chunk<false>& other, int at) const {
    const Chunk<false> out = plus(own, other);
    if (h != nullptr) *reinterpret_cast<uint4*>(const_cast<bf16*>(h) + at) = out.word[0];
    return out;
  }
  // Rounded.
  __device__ __forceinline__ static Chunk<false> plus(const Chunk<false>& own, const Chunk<false>& other) {
    float v[8], w[8];
    own.unpack(v), other.unpack(w);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += w[i];
    return pack_chunk(v);
  }
};

// ---- planes --------------------------------------------------------------------------------------------------

// Gathers byte `Byte` of four words.
template <int Byte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kPair{(Byte + 4u) << 4 | Byte};
  return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

// Balanced base-256 digits of v * inverse rounded to integers, most significant plane first. With 128 added at every
// digit but the first, the digits are the integer's bytes, each 128 too high.
template <int D>
__device__ __forceinline__ void encode_digits(const float (&v)[8], float inverse, uint32_t (&plane)[D][2]) {
  uint32_t e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (D <= 2) {  // 1.5 x 2^23: the sum's last bits are the rounded integer
      e[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.0f + (D == 2 ? 128.0f : 0.0f)));
    } else {
      e[i] = static_cast<uint32_t>(__float2int_rn(v[i] * inverse)) + 0x8080u;
    }
  }
  const auto gather = [&]<int Byte>(uint32_t (&to)[2], uint32_t flip) {
    to[0] = gather_bytes<Byte>(e[0], e[1], e[2], e[3]) ^ flip;
    to[1] = gather_bytes<Byte>(e[4], e[5], e[6], e[7]) ^ flip;
  };
  gather.template operator()<D - 1>(plane[0], 0u);
  if constexpr (D == 3) gather.template operator()<1>(plane[1], 0x80808080u);
  if constexpr (D > 1) gather.template operator()<0>(plane[D - 1], 0x80808080u);
}

// 8 activations as D planes; adds the digits to `sums` (integer formats).
template <WeightFormat F, int D>
struct PlaneWords {
  static constexpr int kWords{2 * Format<F>::kPlaneBytes};
  uint32_t plane[D][kWords];

  __device__ __forceinline__ PlaneWords(const float (&v)[8], float inverse, int (&sums)[D]) {
    if constexpr (Format<F>::kInteger) {
      encode_digits<D>(v, inverse, plane);
#pragma unroll
      for (int d = 0; d < D; ++d) {
        sums[d] = __dp4a(static_cast<int>(plane[d][0]), 0x01010101, sums[d]);
        sums[d] = __dp4a(static_cast<int>(plane[d][1]), 0x01010101, sums[d]);
      }
    } else {
      using T = std::conditional_t<Format<F>::kHalf, half, bf16>;
      float rest[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        rest[i] = v[i] * inverse;
        if constexpr (Format<F>::kCodes) rest[i] = rintf(rest[i]);  // of 8 significant bits or under 2^8: exact in fp16
      }
#pragma unroll
      for (int d = 0; d < D; ++d) {
        Vec<T> term;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          // Of codes, columns 0 and 2, 1 and 3 of four are pairs, as they are unpacked.
          T& own = term.v[Format<F>::kCodes && i % 4 % 3 != 0 ? i ^ 3 : i];
          own = from_float<T>(rest[i]);
          rest[i] -= to_float(own);  // exact
        }
        memcpy(plane[d], &term, sizeof(term));
      }
    }
  }
};

// Writes them at `shared`, as the decode kernel reads them.
template <WeightFormat F, int D>
__device__ __forceinline__ void store_planes(uint8_t* shared, const PlaneWords<F, D>& words) {
#pragma unroll
  for (int d = 0; d < D; ++d) {
    const uint32_t* const w = words.plane[d];
    if constexpr (Format<F>::kInteger) {
      reinterpret_cast<uint2*>(shared)[kDigitColumns<F, D> ? 2 * d : d] = make_uint2(w[0], w[1]);
    } else {
      reinterpret_cast<uint4*>(shared)[d] = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

// Where 8 columns of a row's planes start, from column k on (a multiple of 8). Digits of 64 columns lie as the lanes
// read them: [k / 8 % 4][digit][k / 32 % 2], so that 16 bytes serve two tiles and 8 lanes meet all banks.
template <WeightFormat F, int D>
__device__ __forceinline__ int plane_offset(uint32_t k) {
  if constexpr (kDigitColumns<F, D>) {
    return k / 64 * 128 + k / 8 % 4 * 32 + k / 32 % 2 * 8;
  } else {
    return k * D * Format<F>::kPlaneBytes;
  }
}

// The power of two that brings `largest` (the bits of a non-negative float) just under the top of the planes' range,
// and its inverse in `scale`, which is NaN where an activation is infinite or NaN, so that the row's outputs are. A
// single digit has no bit to lose: its factor brings `largest` to the very top. Bounded: `largest` is what range()
// gave.
template <WeightFormat F, bool Bounded, int D>
__device__ __forceinline__ float normalizer(uint32_t largest, float& scale) {
  if constexpr (Format<F>::kInteger && D == 1) {
    const float most = fmaxf(__uint_as_float(largest), 1e-30f);
    scale = largest >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : __fdiv_rn(most, 127.0f);
    return largest == 0 || largest >= 0x7f800000u ? 0.0f : __fdiv_rn(127.0f, most);
  }
  constexpr float kTop{Bounded                  ? kTopOfEight
                       : F == WeightFormat::f16 ? 32768.0f
                       : D == 2                 ? 127.0f * 256
                                                : 127.0f * 65536};
  // On the bits of floats: a difference of exponents, one less where the mantissa borrows; no division.
  constexpr uint32_t kOne{0x3f800000u}, kExponent{0x7f800000u}, kLeast{0x0da24260u};  // 1e-30
  const uint32_t inverse = (__float_as_uint(kTop) - max(largest, kLeast) + kOne) & kExponent;
  scale = __uint_as_float(largest >= kExponent ? 0x7fc00000u : 2 * kOne - inverse);
  return largest == 0 ? 0.0f : __uint_as_float(inverse);
}

// For kOneSum: by what power of two a slice's scale is finer than that of the row's largest. It brings the slice's
// largest just under the top, unless the row's sum in units of the least scale might not fit int32.
__device__ __forceinline__ int finer_by(uint32_t of_row, uint32_t of_slice, int columns) {
  return min(static_cast<int>(of_row - of_slice >> 23), __clz(127 * 15 * columns) - 1);
}

// Words of a group's digit sums: two digits of a group of 128 fit int32 together, three do not.
template <int D>
constexpr int kGroupWords{D == 2 ? 1 : D};

}  // namespace nibblelm::cuda
