// wgmma: a warpgroup of 4 warps multiplies 64 rows of A by columns of B in shared memory (PTX ISA, "Asynchronous
// warpgroup level matrix instructions"); sm_90a alone.
//
// A's registers and the sums lie as those of mma.m16n8k32 and m16n8k16, warp w of the group having rows 16 w ... 16 w +
// 15 and the columns in tiles of 8. In shared memory B is stored by columns of 128 bytes along K, A by such rows,
// swizzled: 16-byte chunk c of column n is at c ^ n % 8.
#pragma once

#include "common.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error \
    "Compile for sm_90a: plain sm_90 has no wgmma, and the launchers choose it on every card of compute capability 9.0"
#endif

namespace nibblelm::cuda {

// Whether this code is compiled for it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWgmma{true};
#else
constexpr bool kHasWgmma{false};
#endif

// Registers and memory that the next products read are written.
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Ends a batch of products; waits until at most `Pending` of the latest batches are under way.
__device__ __forceinline__ void wgmma_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

// Of B, or A, from a shared address on; groups of 8 columns are 1,024 bytes apart, which they are multiples of.
//
// B may also be stored by rows: 64 columns of a row of K in 128 bytes, the same swizzle, groups of 8 rows 1,024 bytes
// apart and groups of 64 columns `apart`.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t apart = 16) {
  constexpr uint64_t kGroupsOf8{uint64_t{1024 / 16} << 32}, kSwizzle128{uint64_t{1} << 62};
  return shared >> 4 | uint64_t{apart / 16} << 16 | kGroupsOf8 | kSwizzle128;
}

// `bytes` further on, a multiple of 16. Only the low word changes: shared memory ends far below its 14 bits.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  uint64_t out;
  const uint32_t low = static_cast<uint32_t>(descriptor) + bytes / 16, high = descriptor >> 32;
  asm("mov.b64 %0, {%1, %2};" : "=l"(out) : "r"(low), "r"(high));
  return out;
}

// What an instruction's text and operands need for 8, 16, 32, 48, 64 and 128 registers of sums.
#define NIBBLELM_TEXT_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NIBBLELM_TEXT_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NIBBLELM_TEXT_32 NIBBLELM_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NIBBLELM_TEXT_48 NIBBLELM_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NIBBLELM_TEXT_64 NIBBLELM_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NIBBLELM_TEXT_96                                             \
  NIBBLELM_TEXT_64                                                   \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NIBBLELM_TEXT_128                                                        \
  NIBBLELM_TEXT_96                                                               \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define NIBBLELM_SUMS_OF_4(type, i) type(c[i][0]), type(c[i][1]), type(c[i][2]), type(c[i][3])
#define NIBBLELM_SUMS_OF_16(type, i)                                                             \
  NIBBLELM_SUMS_OF_4(type, i), NIBBLELM_SUMS_OF_4(type, i + 1), NIBBLELM_SUMS_OF_4(type, i + 2), \
      NIBBLELM_SUMS_OF_4(type, i + 3)
#define NIBBLELM_SUMS_8(type) NIBBLELM_SUMS_OF_4(type, 0), NIBBLELM_SUMS_OF_4(type, 1)
#define NIBBLELM_SUMS_16(type) NIBBLELM_SUMS_OF_16(type, 0)
#define NIBBLELM_SUMS_32(type) NIBBLELM_SUMS_OF_16(type, 0), NIBBLELM_SUMS_OF_16(type, 4)
#define NIBBLELM_SUMS_48(type) NIBBLELM_SUMS_32(type), NIBBLELM_SUMS_OF_16(type, 8)
#define NIBBLELM_SUMS_64(type) NIBBLELM_SUMS_48(type), NIBBLELM_SUMS_OF_16(type, 12)
#define NIBBLELM_SUMS_96(type) NIBBLELM_SUMS_64(type), NIBBLELM_SUMS_OF_16(type, 16), NIBBLELM_SUMS_OF_16(type, 20)
#define NIBBLELM_SUMS_128(type) NIBBLELM_SUMS_96(type), NIBBLELM_SUMS_OF_16(type, 24), NIBBLELM_SUMS_OF_16(type, 28)
#define NIBBLELM_WGMMA(shape, types, sums, a0, a1, a2, a3, b, add, rest, type)           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add                                  \
               ", 0;\n"                                                                  \
               "wgmma.mma_async.sync.aligned." shape "." types " {" NIBBLELM_TEXT_##sums \
               "}, {%" a0 ",%" a1 ",%" a2 ",%" a3 "}, %" b ", p" rest ";\n}"             \
               : NIBBLELM_SUMS_##sums(type)                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add_to ? 1 : 0))

// c = a b, or c += a b: codes by digits, 32 columns of K.
template <int Tiles>
__device__ __forceinline__ void wgmma(int (&c)[Tiles][4], const uint32_t (&a)[4], uint64_t descriptor, bool add_to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Tiles == 4) {
    NIBBLELM_WGMMA("m64n32k32", "s32.u8.s8", 16, "16", "17", "18", "19", "20", "21", "", "+r");
  } else if constexpr (Tiles == 8) {
    NIBBLELM_WGMMA("m64n64k32", "s32.u8.s8", 32, "32", "33", "34", "35", "36", "37", "", "+r");
  } else if constexpr (Tiles == 12) {
    NIBBLELM_WGMMA("m64n96k32", "s32.u8.s8", 48, "48", "49", "50", "51", "52", "53", "", "+r");
  } else if constexpr (Tiles == 16) {
    NIBBLELM_WGMMA("m64n128k32", "s32.u8.s8", 64, "64", "65", "66", "67", "68", "69", "", "+r");
  } else {
    static_assert(Tiles == 32);
    NIBBLELM_WGMMA("m64n256k32", "s32.u8.s8", 128, "128", "129", "130", "131", "132", "133", "", "+r");
  }
#endif
}

// The same of 16 columns in fp16 or bf16.
template <bool Half, int Tiles>
__device__ __forceinline__ void wgmma(float (&c)[Tiles][4], const uint32_t (&a)[4], uint64_t descriptor, bool add_to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Tiles == 8 || Tiles == 16 || (Half && (Tiles == 2 || Tiles == 4)));
  if constexpr (Tiles == 2) {
    NIBBLELM_WGMMA("m64n16k16", "f32.f16.f16", 8, "8", "9", "10", "11", "12", "13", ", 1, 1, 0", "+f");
  } else if constexpr (Tiles == 4) {
    NIBBLELM_WGMMA("m64n32k16", "f32.f16.f16", 16, "16", "17", "18", "19", "20", "21", ", 1, 1, 0", "+f");
  } else if constexpr (Half && Tiles == 8) {
    NIBBLELM_WGMMA("m64n64k16", "f32.f16.f16", 32, "32", "33", "34", "35", "36", "37", ", 1, 1, 0", "+f");
  } else if constexpr (Half) {
    NIBBLELM_WGMMA("m64n128k16", "f32.f16.f16", 64, "64", "65", "66", "67", "68", "69", ", 1, 1, 0", "+f");
  } else if constexpr (Tiles == 8) {
    NIBBLELM_WGMMA("m64n64k16", "f32.bf16.bf16", 32, "32", "33", "34", "35", "36", "37", ", 1, 1, 0", "+f");
  } else {
    NIBBLELM_WGMMA("m64n128k16", "f32.bf16.bf16", 64, "64", "65", "66", "67", "68", "69", ", 1, 1, 0", "+f");
  }
#endif
}

// 16 columns in bf16, B stored by rows.
template <int Tiles>
__device__ __forceinline__ void wgmma_by_rows(float (&c)[Tiles][4], const uint32_t (&a)[4], uint64_t descriptor,
                                              bool add_to = true) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Tiles == 8) {
    NIBBLELM_WGMMA("m64n64k16", "f32.bf16.bf16", 32, "32", "33", "34", "35", "36", "37", ", 1, 1, 1", "+f");
  } else if constexpr (Tiles == 16) {
    NIBBLELM_WGMMA("m64n128k16", "f32.bf16.bf16", 64, "64", "65", "66", "67", "68", "69", ", 1, 1, 1", "+f");
  } else {
    static_assert(Tiles == 32);
    NIBBLELM_WGMMA("m64n256k16", "f32.bf16.bf16", 128, "128", "129", "130", "131", "132", "133", ", 1, 1, 1", "+f");
  }
#endif
}

#undef NIBBLELM_WGMMA

// 16 columns in bf16, A in shared memory too.
#define NIBBLELM_WGMMA_SHARED(shape, sums, a, b, add)                                                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add                                                            \
               ", 0;\n"                                                                                            \
               "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" NIBBLELM_TEXT_##sums "}, %" a ", %" b      \
                                                                                             ", p, 1, 1, 0, 0;\n}" \
               : NIBBLELM_SUMS_##sums("+f")                                                                        \
               : "l"(a_descriptor), "l"(b_descriptor), "r"(add_to ? 1 : 0))

template <int Tiles>
__device__ __forceinline__ void wgmma(float (&c)[Tiles][4], uint64_t a_descriptor, uint64_t b_descriptor, bool add_to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Tiles == 8) {
    NIBBLELM_WGMMA_SHARED("m64n64k16", 32, "32", "33", "34");
  } else {
    static_assert(Tiles == 16);
    NIBBLELM_WGMMA_SHARED("m64n128k16", 64, "64", "65", "66");
  }
#endif
}

#undef NIBBLELM_WGMMA_SHARED

}  // namespace nibblelm::cuda
