// The machine's own limits, which benchmarks hold the kernels' figures against.
#include <atomic>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

std::atomic<int32_t> sink;  // keeps the compiler from dropping work whose result nobody wants

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kChains{4};  // of two registers

// vpmaddubsw and the addition of its sums, as in dot_avx2.h; in assembly, so that it is not done once for all steps.
NIBBLE_INLINE __m256i add_products(__m256i acc, __m256i codes, __m256i digits) {
  __m256i sums;
  asm volatile("vpmaddubsw %3, %2, %1\nvpaddw %1, %0, %0" : "+x"(acc), "=&x"(sums) : "x"(codes), "x"(digits));
  return acc;
}
NIBBLE_INLINE I32 add_products(I32 acc, I32 codes, I32 digits) {
  return {add_products(acc.lo, codes.lo, digits.lo), add_products(acc.hi, codes.hi, digits.hi)};
}
#else
constexpr int kChains{2 * kBlockRows};
NIBBLE_INLINE I32 add_products(I32 acc, I32 codes, I32 digits) { return dot4<8>(acc, codes, digits); }
#endif

}  // namespace

void read_memory(const ReadArgs& a) {
  constexpr int64_t kPiece{1 << 17}, kAhead{4096};
  parallel_for(a.bytes / kPiece, 1, [&](int64_t begin, int64_t end) {
    const auto *p = static_cast<const uint8_t*>(a.memory) + begin * kPiece, *stop = p + (end - begin) * kPiece;
    I32 sum[4] = {set1(0), set1(0), set1(0), set1(0)};
    for (; p < stop; p += 256) {
      for (int i = 0; i < 4; ++i) {
        __builtin_prefetch(p + kAhead + i * 64);
        sum[i] = sum[i] + load_bytes(p + i * 64);
      }
    }
    sink.store(sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3])), std::memory_order_relaxed);
  });
}

void multiply_bytes(const MultiplyArgs& a) {
  *a.products = 64.0 * kChains * static_cast<double>(a.steps * a.items);
  parallel_for(a.items, 1, [&](int64_t begin, int64_t end) {
    I32 acc[kChains], codes = set1(0x01020304), digits = set1(0x02010301);
    for (auto& chain : acc) chain = set1(static_cast<int32_t>(begin));
    for (int64_t step = 0; step < a.steps * (end - begin); ++step) {
      unroll<kChains>([&](auto i) NIBBLE_LAMBDA { acc[i] = add_products(acc[i], codes, digits); });
    }
    for (auto& chain : acc) sink.store(sum_lanes(chain), std::memory_order_relaxed);
  });
}

}  // namespace nibblelm::NIBBLE_ISA
