// The inner loop of quantized_linear for several rows of digits, on AVX2 without VNNI.
//
// The instruction at hand, vpmaddubsw, adds two products in 16 bits, where those of a whole 8-bit code saturate. Four
// bits of a code at a time fit, and eight such sums one on top of the other too (8 * 2 * 15 * 128 < 2^15), so that the
// widening to 32 bits happens once in 32 k.
#pragma once

#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {

NIBBLE_INLINE __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
NIBBLE_INLINE __m256i high_nibbles(__m256i bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }

// acc + two products in each of 16 lanes. GCC would add products to each other first, and spill: 1.5 times as long.
NIBBLE_INLINE __m256i add_products(__m256i acc, __m256i nibbles, __m256i digits) {
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(nibbles, digits));
  asm("" : "+x"(acc));
  return acc;
}

// out[r][lane] = exact dot products of kRows rows of digits with the codes of kTiles tiles over `width` (a multiple of
// 8) k. A code is a byte of which kCodeBits are used, or, kPacked, half a byte as in the panel.
template <int kCodeBits, bool kPacked, int kRows, int kTiles, int64_t kPrefetch>
NIBBLE_INLINE void dot_nibbles(const uint8_t* codes, const int8_t* digits, int64_t stride, int64_t width,
                               int32_t (*out)[64]) {
  constexpr int kVectors = kCodeBits == 8 && kRows > 2 ? 1 : 2;  // of eight lanes: as many as stay in registers
  constexpr int64_t kFour{256};                                  // bytes from four k of a panel to the next four
  for (int lane = 0; lane < 16 * kTiles; lane += 8 * kVectors) {
    const uint8_t* p = codes + 4 * lane;
    const int8_t* x = digits;
    __m256i sum[kRows * kVectors];
    unroll<kRows * kVectors>([&](auto i) NIBBLE_LAMBDA { sum[i] = _mm256_setzero_si256(); });
    for (int64_t left = width; left > 0; left -= 32) {
      __m256i low[kRows * kVectors], high[kRows * kVectors];
      unroll<kRows * kVectors>([&](auto i) NIBBLE_LAMBDA { low[i] = high[i] = _mm256_setzero_si256(); });
      const auto add_eight = [&](auto) NIBBLE_LAMBDA {  // k
        unroll<2>([&](auto half) NIBBLE_LAMBDA {        // the first and the last four k
          constexpr int64_t kAt = kPacked ? 0 : half * kFour;
          if (kPrefetch > 0 && !(kPacked && half == 1) && lane % 16 == 0) __builtin_prefetch(p + kPrefetch + kAt);
          __m256i bytes[kVectors];
          unroll<kVectors>([&](auto v) NIBBLE_LAMBDA {
            bytes[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kAt + v * 32));
          });
          unroll<kRows>([&](auto r) NIBBLE_LAMBDA {
            int32_t word;
            std::memcpy(&word, x + r * stride + half * 4, 4);
            const __m256i four = _mm256_set1_epi32(word);
            unroll<kVectors>([&](auto v) NIBBLE_LAMBDA {
              constexpr int kSum = r * kVectors + v;
              const __m256i first = kCodeBits == 4 && !kPacked ? bytes[v]
                                    : kPacked && half == 1     ? high_nibbles(bytes[v])
                                                               : low_nibbles(bytes[v]);
              low[kSum] = add_products(low[kSum], first, four);
              if constexpr (kCodeBits == 8) high[kSum] = add_products(high[kSum], high_nibbles(bytes[v]), four);
            });
          });
        });
        x += 8, p += kPacked ? kFour : 2 * kFour;
      };
      if (left >= 32) {
        unroll<4>(add_eight);
      } else {
        for (int64_t k = left; k > 0; k -= 8) add_eight(0);
      }
      unroll<kRows * kVectors>([&](auto i) NIBBLE_LAMBDA {
        sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(low[i], _mm256_set1_epi16(1)));
        if constexpr (kCodeBits == 8) {
          sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(high[i], _mm256_set1_epi16(16)));
        }
      });
    }
    unroll<kRows * kVectors>([&](auto i) NIBBLE_LAMBDA {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[i / kVectors] + lane + i % kVectors * 8), sum[i]);
    });
  }
}

}  // namespace nibblelm::NIBBLE_ISA
