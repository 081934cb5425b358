// wgmma: a warpgroup of 4 warps multiplies 64 rows of A from registers by columns of B in shared memory (PTX ISA,
// "Asynchronous warpgroup level matrix instructions"); sm_90a alone.
//
// A's registers and the sums lie as those of mma.m16n8k32 and m16n8k16, warp w of the group having rows 16 w ... 16 w +
// 15 and the columns in tiles of 8. B is stored by columns of 128 bytes along K, swizzled: 16-byte chunk c of column n
// is at c ^ n % 8.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// Registers and memory that the next products read are written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a batch of products and waits for all that are under way.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Of B from a shared address on; groups of 8 columns are 1,024 bytes apart, which they are multiples of.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared) {
  constexpr uint64_t kColumnGroups{uint64_t{1024 / 16} << 32}, kSwizzle128{uint64_t{1} << 62}, kUnused{uint64_t{1} << 16};
  return (shared & 0x3ffff) >> 4 | kUnused | kColumnGroups | kSwizzle128;
}

// What an instruction's text and operands need for 32, 48 and 64 registers of sums.
#define NIBBLELM_TEXT_16 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NIBBLELM_TEXT_32 NIBBLELM_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NIBBLELM_TEXT_48 NIBBLELM_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NIBBLELM_TEXT_64 NIBBLELM_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NIBBLELM_SUMS_4(type, i) type(c[i][0]), type(c[i][1]), type(c[i][2]), type(c[i][3])
#define NIBBLELM_SUMS_16(type, i) \
  NIBBLELM_SUMS_4(type, i), NIBBLELM_SUMS_4(type, i + 1), NIBBLELM_SUMS_4(type, i + 2), NIBBLELM_SUMS_4(type, i + 3)
#define NIBBLELM_SUMS_32(type) NIBBLELM_SUMS_16(type, 0), NIBBLELM_SUMS_16(type, 4)
#define NIBBLELM_SUMS_48(type) NIBBLELM_SUMS_32(type), NIBBLELM_SUMS_16(type, 8)
#define NIBBLELM_SUMS_64(type) NIBBLELM_SUMS_48(type), NIBBLELM_SUMS_16(type, 12)
#define NIBBLELM_WGMMA(shape, types, sums, a0, a1, a2, a3, b, add, rest, type)                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add ", 0;\n"                                                    \
               "wgmma.mma_async.sync.aligned." shape "." types " {" NIBBLELM_TEXT_##sums "}, {%" a0 ",%" a1 ",%" a2   \
               ",%" a3 "}, %" b ", p" rest ";\n}"                                                                    \
               : NIBBLELM_SUMS_##sums(type)                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add_to ? 1 : 0))

// c = a b, or c += a b: codes (unsigned bytes) by digits, 32 columns of K.
template <int Tiles>
__device__ __forceinline__ void wgmma(int (&c)[Tiles][4], const uint32_t (&a)[4], uint64_t descriptor, bool add_to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Tiles == 8) {
    NIBBLELM_WGMMA("m64n64k32", "s32.u8.s8", 32, "32", "33", "34", "35", "36", "37", "", "+r");
  } else if constexpr (Tiles == 12) {
    NIBBLELM_WGMMA("m64n96k32", "s32.u8.s8", 48, "48", "49", "50", "51", "52", "53", "", "+r");
  } else {
    static_assert(Tiles == 16);
    NIBBLELM_WGMMA("m64n128k32", "s32.u8.s8", 64, "64", "65", "66", "67", "68", "69", "", "+r");
  }
#endif
}

// The same of 16 columns in fp16 or bf16.
template <bool Half, int Tiles>
__device__ __forceinline__ void wgmma(float (&c)[Tiles][4], const uint32_t (&a)[4], uint64_t descriptor, bool add_to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(Tiles == 8 || Tiles == 16);
  if constexpr (Half && Tiles == 8) {
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

#undef NIBBLELM_WGMMA

}  // namespace nibblelm::cuda
