// clang-format off: the assembly is laid out by hand
// The inner loop of prefill on AVX-512 VNNI: six rows of digits times four tiles of byte codes, in registers.
//
// In assembly, because GCC 12 interleaves the same 24 chains so that they run at 0.87 of the instruction's peak on
// Zen 5, and spills them as soon as code that uses the sums is in sight; this runs at 0.97 and leaves the sums in
// registers.
#pragma once

#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {

#define NIBBLE_ROW(address, x, a, b, c, d)      \
  "vpbroadcastd " address ", %%" x "\n"         \
  "vpdpbusd %%" x ", %%zmm24, %[" a "]\n"       \
  "vpdpbusd %%" x ", %%zmm25, %[" b "]\n"       \
  "vpdpbusd %%" x ", %%zmm26, %[" c "]\n"       \
  "vpdpbusd %%" x ", %%zmm27, %[" d "]\n"

// Four k: codes at rax, digits of rows 0 to 2 at rcx and of rows 3 to 5 at rdx.
#define NIBBLE_FOUR(c0, c1, c2, c3, at)                                         \
  "vmovdqu64 " c0 "(%%rax), %%zmm24\n"                                          \
  "vmovdqu64 " c1 "(%%rax), %%zmm25\n"                                          \
  "vmovdqu64 " c2 "(%%rax), %%zmm26\n"                                          \
  "vmovdqu64 " c3 "(%%rax), %%zmm27\n"                                          \
  NIBBLE_ROW(at "(%%rcx)", "zmm28", "a0", "a1", "a2", "a3")                     \
  NIBBLE_ROW(at "(%%rcx, %[stride])", "zmm29", "a4", "a5", "a6", "a7")          \
  NIBBLE_ROW(at "(%%rcx, %[stride], 2)", "zmm28", "a8", "a9", "a10", "a11")     \
  NIBBLE_ROW(at "(%%rdx)", "zmm29", "a12", "a13", "a14", "a15")                 \
  NIBBLE_ROW(at "(%%rdx, %[stride])", "zmm28", "a16", "a17", "a18", "a19")      \
  NIBBLE_ROW(at "(%%rdx, %[stride], 2)", "zmm29", "a20", "a21", "a22", "a23")

#define NIBBLE_CLEAR(a, b, c, d)        \
  "vpxord %[" a "], %[" a "], %[" a "]\n" \
  "vpxord %[" b "], %[" b "], %[" b "]\n" \
  "vpxord %[" c "], %[" c "], %[" c "]\n" \
  "vpxord %[" d "], %[" d "], %[" d "]\n"

// sums[row * 4 + tile] = dot products over `width` (a positive multiple of 8) k.
NIBBLE_INLINE void dot_six_rows(const uint8_t* codes, const int8_t* digits, int64_t stride, int64_t width,
                                I32 (&sums)[24]) {
  asm volatile(
      "mov %[codes], %%rax\n"
      "mov %[digits], %%rcx\n"
      "lea (%[digits], %[stride], 2), %%rdx\n"
      "add %[stride], %%rdx\n"
      "mov %[width], %%r8\n"
      NIBBLE_CLEAR("a0", "a1", "a2", "a3")
      NIBBLE_CLEAR("a4", "a5", "a6", "a7")
      NIBBLE_CLEAR("a8", "a9", "a10", "a11")
      NIBBLE_CLEAR("a12", "a13", "a14", "a15")
      NIBBLE_CLEAR("a16", "a17", "a18", "a19")
      NIBBLE_CLEAR("a20", "a21", "a22", "a23")
      ".p2align 5\n"
      "1:\n"
      NIBBLE_FOUR("0", "64", "128", "192", "0")
      NIBBLE_FOUR("256", "320", "384", "448", "4")
      "add $512, %%rax\n"
      "add $8, %%rcx\n"
      "add $8, %%rdx\n"
      "sub $8, %%r8\n"
      "jg 1b\n"
      : [a0] "=&v"(sums[0].v), [a1] "=&v"(sums[1].v), [a2] "=&v"(sums[2].v), [a3] "=&v"(sums[3].v),
        [a4] "=&v"(sums[4].v), [a5] "=&v"(sums[5].v), [a6] "=&v"(sums[6].v), [a7] "=&v"(sums[7].v),
        [a8] "=&v"(sums[8].v), [a9] "=&v"(sums[9].v), [a10] "=&v"(sums[10].v), [a11] "=&v"(sums[11].v),
        [a12] "=&v"(sums[12].v), [a13] "=&v"(sums[13].v), [a14] "=&v"(sums[14].v), [a15] "=&v"(sums[15].v),
        [a16] "=&v"(sums[16].v), [a17] "=&v"(sums[17].v), [a18] "=&v"(sums[18].v), [a19] "=&v"(sums[19].v),
        [a20] "=&v"(sums[20].v), [a21] "=&v"(sums[21].v), [a22] "=&v"(sums[22].v), [a23] "=&v"(sums[23].v)
      : [codes] "r"(codes), [digits] "r"(digits), [stride] "r"(stride), [width] "r"(width)
      : "rax", "rcx", "rdx", "r8", "cc", "memory", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29");
}

#undef NIBBLE_ROW
#undef NIBBLE_FOUR
#undef NIBBLE_CLEAR

}  // namespace nibblelm::NIBBLE_ISA
