// Named wrappers of the tensor-core instructions (PTX ISA, "Warp-level matrix instructions"); sm_80 and later.
// Lane (g = lane / 4, j = lane % 4) holds of m16n8k16: A rows g, g + 8 at k = 2j, 2j + 1 (a0, a1) and k + 8 (a2, a3);
// B column g at k = 2j, 2j + 1 (b0) and k + 8 (b1); C rows g (c0, c1) and g + 8 (c2, c3) at columns 2j, 2j + 1.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// c += a * b in bf16 with fp32 accumulation.
__device__ __forceinline__ void mma_16816(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c += a * b in int8, exact. Of m16n8k32: A rows g, g + 8 at k = 4j .. 4j + 3 (a0, a1) and k + 16 (a2, a3); B column g
// at the same (b0, b1); C as above.
__device__ __forceinline__ void mma_16832(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// (x & mask) | bits, which would be two instructions if the compiler chose them.
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// Bytes 0 and 2 of a word, signed, as two bf16: 128 + (x & 127) less 128, or 256 where x is negative. All are exact.
__device__ __forceinline__ uint32_t bf16_of_bytes(uint32_t x) {
  constexpr uint32_t k128{0x43004300}, kMinusOne{0xbf80bf80};
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(y)
      : "r"(masked_or(x, 0x00800080, k128)), "r"(kMinusOne), "r"(masked_or(x, 0x007f007f, k128)));
  return y;
}

// Transposes an 8 x 8 matrix of 16-bit values; lane (g, j) holds row g, columns 2j and 2j + 1.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Four 8 x 8 matrices from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

}  // namespace nibblelm::cuda
