// Sixteen lanes of fp32 or int32 with the same arithmetic on every instruction set.
//
// Kernels are written once on these types and compiled once per instruction set (see CMakeLists.txt). Lane
// count, order of operations, fused multiply-adds and reduction trees are equal everywhere, so results are equal
// bit for bit. Everything lives in a namespace of its own per instruction set: no inline function compiled with
// AVX-512 flags can be picked by the linker for a machine without it.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define NIBBLE_INLINE static inline __attribute__((always_inline))

namespace nibblelm::NIBBLE_ISA {

constexpr int kLanes = 16;

// Not std::min and std::max: those could be emitted out of line, once for all instruction sets.
NIBBLE_INLINE constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
NIBBLE_INLINE constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

#if defined(__AVX512F__)

struct F32 {
  __m512 v;
};
struct I32 {  // also 64 raw bytes
  __m512i v;
};

constexpr bool kHasDot4{true};  // dot4 is one instruction

// Accumulators (sixteen lanes each) that a micro-kernel may keep: rows (tokens) by vectors (columns).
constexpr int kBlockRows = 6, kBlockVectors = 4;

NIBBLE_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

NIBBLE_INLINE F32 set1(float x) { return {_mm512_set1_ps(x)}; }
NIBBLE_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
NIBBLE_INLINE F32 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
NIBBLE_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
NIBBLE_INLINE void store_first(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
NIBBLE_INLINE F32 load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
NIBBLE_INLINE F32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
NIBBLE_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
NIBBLE_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
NIBBLE_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
NIBBLE_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
NIBBLE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger, and b where either is NaN.
NIBBLE_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
// b where mask > limit is false (or unordered), else a.
NIBBLE_INLINE F32 select_greater(F32 mask, F32 limit, F32 a, F32 b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(mask.v, limit.v, _CMP_GT_OQ), b.v, a.v)};
}

NIBBLE_INLINE I32 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
NIBBLE_INLINE I32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
NIBBLE_INLINE I32 load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
NIBBLE_INLINE void store(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
NIBBLE_INLINE void store_bytes(void* p, I32 a) { _mm512_storeu_si512(p, a.v); }
NIBBLE_INLINE I32 broadcast4(const void* p) {  // four bytes into every lane
  int32_t word;
  std::memcpy(&word, p, 4);
  return {_mm512_set1_epi32(word)};
}
NIBBLE_INLINE I32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
NIBBLE_INLINE I32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
NIBBLE_INLINE void store_low_bytes(int8_t* p, I32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
NIBBLE_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
NIBBLE_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
NIBBLE_INLINE I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
NIBBLE_INLINE I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
NIBBLE_INLINE I32 max(I32 a, I32 b) { return {_mm512_max_epi32(a.v, b.v)}; }
NIBBLE_INLINE I32 min(I32 a, I32 b) { return {_mm512_min_epi32(a.v, b.v)}; }
template <int kBits>
NIBBLE_INLINE I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
NIBBLE_INLINE I32 shift_right(I32 a) {  // arithmetic
  return {_mm512_srai_epi32(a.v, kBits)};
}
NIBBLE_INLINE I32 low_nibbles(I32 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
NIBBLE_INLINE I32 high_nibbles(I32 a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
NIBBLE_INLINE I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
NIBBLE_INLINE F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
NIBBLE_INLINE F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
NIBBLE_INLINE I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest even

// acc + sum of four unsigned x signed byte products per lane, exact for codes of kCodeBits (4 or 8).
template <int kCodeBits>
NIBBLE_INLINE I32 dot4(I32 acc, I32 codes, I32 digits) {
  return {_mm512_dpbusd_epi32(acc.v, codes.v, digits.v)};
}

// Every lane the largest of the eight lanes that it is in.
NIBBLE_INLINE I32 max_of_eight(I32 a) {
  __m512i m = _mm512_max_epi32(a.v, _mm512_shuffle_epi32(a.v, _MM_PERM_CDAB));
  m = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_BADC));
  return {_mm512_max_epi32(m, _mm512_shuffle_i64x2(m, m, 0xb1))};
}
NIBBLE_INLINE __m256 halves_sum(F32 a) {
  return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
NIBBLE_INLINE __m256 halves_max(F32 a) {
  return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
NIBBLE_INLINE __m256i halves_sum(I32 a) {
  return _mm256_add_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
}
NIBBLE_INLINE __m256i halves_max(I32 a) {
  return _mm256_max_epi32(_mm512_castsi512_si256(a.v), _mm512_extracti32x8_epi32(a.v, 1));
}

#elif defined(__AVX2__)

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};

constexpr int kBlockRows = 6, kBlockVectors = 1;
#if defined(__AVXVNNI__)
constexpr bool kHasDot4{true};
#else
constexpr bool kHasDot4{false};
#endif

NIBBLE_INLINE F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
NIBBLE_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
NIBBLE_INLINE F32 load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(n));
  return load(lanes);
}
NIBBLE_INLINE void store(float* p, F32 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
NIBBLE_INLINE void store_first(float* p, F32 a, int n) {
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(n));
}
NIBBLE_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
NIBBLE_INLINE __m256 widen_bf16(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
NIBBLE_INLINE F32 load_bf16(const uint16_t* p) { return {widen_bf16(load_half(p)), widen_bf16(load_half(p + 8))}; }
NIBBLE_INLINE F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))};
}
NIBBLE_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
NIBBLE_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
NIBBLE_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
NIBBLE_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
NIBBLE_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
NIBBLE_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
NIBBLE_INLINE F32 select_greater(F32 mask, F32 limit, F32 a, F32 b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(mask.lo, limit.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(mask.hi, limit.hi, _CMP_GT_OQ))};
}

NIBBLE_INLINE I32 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
NIBBLE_INLINE I32 load_bytes(const void* p) {
  const auto* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
NIBBLE_INLINE void store_bytes(void* p, I32 a) {
  auto* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, a.lo);
  _mm256_storeu_si256(q + 1, a.hi);
}
NIBBLE_INLINE I32 load(const int32_t* p) { return load_bytes(p); }
NIBBLE_INLINE void store(int32_t* p, I32 a) { store_bytes(p, a); }
NIBBLE_INLINE I32 broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1(word);
}
NIBBLE_INLINE I32 load_u8(const uint8_t* p) {
  const __m128i b = load_half(p);
  return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
NIBBLE_INLINE I32 load_i8(const int8_t* p) {
  const __m128i b = load_half(p);
  return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))};
}
NIBBLE_INLINE void store_low_bytes(int8_t* p, I32 a) {
  alignas(32) int32_t lanes[kLanes];
  store(lanes, a);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
NIBBLE_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
NIBBLE_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
NIBBLE_INLINE I32 operator*(I32 a, I32 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
NIBBLE_INLINE I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
NIBBLE_INLINE I32 max(I32 a, I32 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
NIBBLE_INLINE I32 min(I32 a, I32 b) { return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)}; }
template <int kBits>
NIBBLE_INLINE I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
NIBBLE_INLINE I32 shift_right(I32 a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
NIBBLE_INLINE I32 low_nibbles(I32 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
NIBBLE_INLINE I32 high_nibbles(I32 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), mask)};
}
NIBBLE_INLINE I32 bits(F32 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
NIBBLE_INLINE F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
NIBBLE_INLINE F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
NIBBLE_INLINE I32 round_to_int(F32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

template <int kCodeBits>
NIBBLE_INLINE __m256i dot4_half(__m256i acc, __m256i codes, __m256i digits) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, codes, digits);
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (kCodeBits == 4) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, digits), ones));
  }
  // vpmaddubsw saturates at 16 bits: 255 * 127 * 2 does not fit, but 127 * 127 * 2 and 128 * -128 * 2 do.
  const __m256i top = _mm256_and_si256(codes, _mm256_set1_epi8(-128));
  const __m256i rest = _mm256_xor_si256(codes, top);
  const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(top, digits), ones),
                                       _mm256_madd_epi16(_mm256_maddubs_epi16(rest, digits), ones));
  return _mm256_add_epi32(acc, sum);
#endif
}
template <int kCodeBits>
NIBBLE_INLINE I32 dot4(I32 acc, I32 codes, I32 digits) {
  return {dot4_half<kCodeBits>(acc.lo, codes.lo, digits.lo), dot4_half<kCodeBits>(acc.hi, codes.hi, digits.hi)};
}

NIBBLE_INLINE __m256i max_of_eight(__m256i a) {
  __m256i m = _mm256_max_epi32(a, _mm256_shuffle_epi32(a, 0xb1));
  m = _mm256_max_epi32(m, _mm256_shuffle_epi32(m, 0x4e));
  return _mm256_max_epi32(m, _mm256_permute2x128_si256(m, m, 1));
}
NIBBLE_INLINE I32 max_of_eight(I32 a) { return {max_of_eight(a.lo), max_of_eight(a.hi)}; }
NIBBLE_INLINE __m256 halves_sum(F32 a) { return _mm256_add_ps(a.lo, a.hi); }
NIBBLE_INLINE __m256 halves_max(F32 a) { return _mm256_max_ps(a.lo, a.hi); }
NIBBLE_INLINE __m256i halves_sum(I32 a) { return _mm256_add_epi32(a.lo, a.hi); }
NIBBLE_INLINE __m256i halves_max(I32 a) { return _mm256_max_epi32(a.lo, a.hi); }

#else  // portable

struct F32 {
  float v[kLanes];
};
struct I32 {
  int32_t v[kLanes];
};

constexpr int kBlockRows = 2, kBlockVectors = 1;
constexpr bool kHasDot4{false};

#define NIBBLE_LANES(type, expression)                    \
  type r;                                                 \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

NIBBLE_INLINE float as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
NIBBLE_INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float magnitude = as_float(rest << 13) * 0x1p112f;  // rebias; also right for subnormal halves
  return sign != 0 ? -magnitude : magnitude;
}

NIBBLE_INLINE F32 set1(float x) { NIBBLE_LANES(F32, x); }
NIBBLE_INLINE F32 load(const float* p) { NIBBLE_LANES(F32, p[i]); }
NIBBLE_INLINE F32 load_first(const float* p, int n) { NIBBLE_LANES(F32, i < n ? p[i] : 0.0f); }
NIBBLE_INLINE void store(float* p, F32 a) { std::memcpy(p, a.v, sizeof(a.v)); }
NIBBLE_INLINE void store_first(float* p, F32 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
NIBBLE_INLINE F32 load_bf16(const uint16_t* p) { NIBBLE_LANES(F32, as_float(static_cast<uint32_t>(p[i]) << 16)); }
NIBBLE_INLINE F32 load_f16(const uint16_t* p) { NIBBLE_LANES(F32, half_to_float(p[i])); }
NIBBLE_INLINE F32 operator+(F32 a, F32 b) { NIBBLE_LANES(F32, a.v[i] + b.v[i]); }
NIBBLE_INLINE F32 operator-(F32 a, F32 b) { NIBBLE_LANES(F32, a.v[i] - b.v[i]); }
NIBBLE_INLINE F32 operator*(F32 a, F32 b) { NIBBLE_LANES(F32, a.v[i] * b.v[i]); }
NIBBLE_INLINE F32 operator/(F32 a, F32 b) { NIBBLE_LANES(F32, a.v[i] / b.v[i]); }
NIBBLE_INLINE F32 fma(F32 a, F32 b, F32 c) { NIBBLE_LANES(F32, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
NIBBLE_INLINE F32 max(F32 a, F32 b) { NIBBLE_LANES(F32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
NIBBLE_INLINE F32 select_greater(F32 mask, F32 limit, F32 a, F32 b) {
  NIBBLE_LANES(F32, mask.v[i] > limit.v[i] ? a.v[i] : b.v[i]);
}

NIBBLE_INLINE I32 set1(int32_t x) { NIBBLE_LANES(I32, x); }
NIBBLE_INLINE I32 load_bytes(const void* p) {
  I32 r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
NIBBLE_INLINE void store_bytes(void* p, I32 a) { std::memcpy(p, a.v, sizeof(a.v)); }
NIBBLE_INLINE I32 load(const int32_t* p) { return load_bytes(p); }
NIBBLE_INLINE void store(int32_t* p, I32 a) { store_bytes(p, a); }
NIBBLE_INLINE I32 broadcast4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1(word);
}
NIBBLE_INLINE I32 load_u8(const uint8_t* p) { NIBBLE_LANES(I32, p[i]); }
NIBBLE_INLINE I32 load_i8(const int8_t* p) { NIBBLE_LANES(I32, p[i]); }
NIBBLE_INLINE void store_low_bytes(int8_t* p, I32 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}
// Wrapping arithmetic, as vector units do it.
NIBBLE_INLINE int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
NIBBLE_INLINE uint32_t u(int32_t x) { return static_cast<uint32_t>(x); }
NIBBLE_INLINE I32 operator+(I32 a, I32 b) { NIBBLE_LANES(I32, wrap(u(a.v[i]) + u(b.v[i]))); }
NIBBLE_INLINE I32 operator-(I32 a, I32 b) { NIBBLE_LANES(I32, wrap(u(a.v[i]) - u(b.v[i]))); }
NIBBLE_INLINE I32 operator*(I32 a, I32 b) { NIBBLE_LANES(I32, wrap(u(a.v[i]) * u(b.v[i]))); }
NIBBLE_INLINE I32 operator&(I32 a, I32 b) { NIBBLE_LANES(I32, a.v[i] & b.v[i]); }
NIBBLE_INLINE I32 max(I32 a, I32 b) { NIBBLE_LANES(I32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
NIBBLE_INLINE I32 min(I32 a, I32 b) { NIBBLE_LANES(I32, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
template <int kBits>
NIBBLE_INLINE I32 shift_left(I32 a) {
  NIBBLE_LANES(I32, wrap(u(a.v[i]) << kBits));
}
template <int kBits>
NIBBLE_INLINE I32 shift_right(I32 a) {
  NIBBLE_LANES(I32, a.v[i] >> kBits);
}
NIBBLE_INLINE I32 low_nibbles(I32 a) { NIBBLE_LANES(I32, a.v[i] & 0x0f0f0f0f); }
NIBBLE_INLINE I32 high_nibbles(I32 a) { NIBBLE_LANES(I32, (a.v[i] >> 4) & 0x0f0f0f0f); }
NIBBLE_INLINE I32 bits(F32 a) { return load_bytes(a.v); }
NIBBLE_INLINE F32 from_bits(I32 a) {
  F32 r;
  std::memcpy(r.v, a.v, sizeof(r.v));
  return r;
}
NIBBLE_INLINE F32 to_float(I32 a) { NIBBLE_LANES(F32, static_cast<float>(a.v[i])); }
NIBBLE_INLINE I32 round_to_int(F32 a) { NIBBLE_LANES(I32, static_cast<int32_t>(__builtin_rintf(a.v[i]))); }
template <int kCodeBits>
NIBBLE_INLINE I32 dot4(I32 acc, I32 codes, I32 digits) {
  uint8_t c[64];
  int8_t d[64];
  store_bytes(c, codes);
  store_bytes(d, digits);
  for (int i = 0; i < kLanes; ++i) {
    acc.v[i] +=
        c[4 * i] * d[4 * i] + c[4 * i + 1] * d[4 * i + 1] + c[4 * i + 2] * d[4 * i + 2] + c[4 * i + 3] * d[4 * i + 3];
  }
  return acc;
}
NIBBLE_INLINE I32 max_of_eight(I32 a) {
  for (int step = 1; step < 8; step *= 2) {
    const I32 before = a;
    for (int i = 0; i < kLanes; ++i) a.v[i] = before.v[i] > before.v[i ^ step] ? before.v[i] : before.v[i ^ step];
  }
  return a;
}
#undef NIBBLE_LANES

#endif

// Calls f(0), ..., f(N - 1) with constants. Arrays indexed by them become registers, which GCC does not manage for
// loops that it unrolls itself: it leaves a store per accumulator in the innermost loop.
template <int N, typename F>
NIBBLE_INLINE void unroll(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}
#define NIBBLE_LAMBDA __attribute__((always_inline))

// Sum of the lanes in a fixed tree (distance 8, 4, 2, 1), and the largest lane (of no NaN).
#if defined(__AVX2__)
NIBBLE_INLINE float sum_lanes(F32 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(halves_sum(a)), _mm256_extractf128_ps(halves_sum(a), 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
NIBBLE_INLINE float max_lanes(F32 a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(halves_max(a)), _mm256_extractf128_ps(halves_max(a), 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
NIBBLE_INLINE int32_t sum_lanes(I32 a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(halves_sum(a)), _mm256_extracti128_si256(halves_sum(a), 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
NIBBLE_INLINE int32_t max_lanes(I32 a) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(halves_max(a)), _mm256_extracti128_si256(halves_max(a), 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
#else
NIBBLE_INLINE float sum_lanes(F32 a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
  }
  return a.v[0];
}
NIBBLE_INLINE float max_lanes(F32 a) {
  for (int i = 1; i < kLanes; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
NIBBLE_INLINE int32_t sum_lanes(I32 a) {
  for (int i = 1; i < kLanes; ++i) a.v[0] += a.v[i];
  return a.v[0];
}
NIBBLE_INLINE int32_t max_lanes(I32 a) {
  for (int i = 1; i < kLanes; ++i) a.v[0] = a.v[i] > a.v[0] ? a.v[i] : a.v[0];
  return a.v[0];
}
#endif

// e^x for x <= 0 to about 1 ulp; below -87.3, where the result would be subnormal, zero. NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial to r^7 (remainder 2e-9 relative).
NIBBLE_INLINE F32 exp_nonpositive(F32 x) {
  const F32 low = set1(-87.3f), magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32 clamped = max(low, x);
  const F32 shifted = fma(clamped, set1(1.44269504088896341f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, set1(-0.693145751953125f), clamped);  // ln 2 in two parts, the first exact times n
  r = fma(n, set1(-1.42860682030941723212e-6f), r);
  F32 p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  const F32 scaled = from_bits(bits(p) + shift_left<23>(bits(shifted)));  // times 2^n through the exponent
  const F32 kept_nan = scaled + (clamped - clamped);
  return select_greater(low, x, set1(0.0f), kept_nan);
}

NIBBLE_INLINE F32 magnitude(F32 x) { return from_bits(bits(x) & set1(0x7fffffff)); }

// To about 1e-7 absolute.
NIBBLE_INLINE F32 tanh(F32 x) {
  const F32 one = set1(1.0f), e = exp_nonpositive(set1(-2.0f) * magnitude(x));
  const F32 positive = (one - e) / (one + e);
  return select_greater(set1(0.0f), x, set1(0.0f) - positive, positive);
}

}  // namespace nibblelm::NIBBLE_ISA
