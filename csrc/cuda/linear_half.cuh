// Codes of int4 weights in groups of 128, less their zero-points, in fp16, where they are exact. So are activations
// over their slice's scale, integers of at most 8 significant bits, and a group's sum in fp32 (kBounded): the integer
// that digits give, in whatever order it is added up.
#pragma once

#include "linear_records.cuh"
#include "mma.cuh"

namespace nibblelm::cuda {

// The terms of a group for rows r and r + 8 of a strip.
struct HalfGroup {
  uint32_t scales;
  uint32_t low[2], high[2];  // pairs of -(1024 + zero-point) and -(64 + zero-point)

  // From a record in shared memory; of lane 4 r + c.
  template <bool Zeros>
  __device__ __forceinline__ static HalfGroup read(uint32_t record, int lane) {
    constexpr uint32_t kLow{0xe400e400u}, kHigh{0xd400d400u};
    HalfGroup out;
    out.scales = load_shared<uint32_t>(record + lane / 4 * 4);
    uint32_t zeros{0x88};
    if constexpr (Zeros) zeros = load_shared<uint8_t>(record + 2 * kStripRows + lane / 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t pair = (zeros >> 4 * i & 15) * 0x00010001u;
      out.low[i] = kLow + pair, out.high[i] = kHigh + pair * 16;  // their last places are 1 and 1 / 16
    }
    return out;
  }
};

__device__ __forceinline__ uint32_t add_half2(uint32_t x, uint32_t y) {
  uint32_t out;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  return out;
}
__device__ __forceinline__ uint32_t fma_half2(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(x), "r"(y), "r"(z));
  return out;
}

// A lane's 16 bytes of a unit of 64 columns -> A of four products of 16 columns. A nibble in the last places of 1024 is
// 1024 + code, four places further on 1024 + 16 codes.
__device__ __forceinline__ void unpack_half(const uint4& unit, const HalfGroup& group, uint32_t (&words)[4][4]) {
  constexpr uint32_t k1024{0x64006400u}, kSixteenth{0x2c002c00u};
  const uint32_t raw[4]{unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int half = i % 2;  // row r or r + 8
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {  // columns 0 and 2 of four, 1 and 3
      const uint32_t w = odd == 0 ? raw[i] : raw[i] >> 8;
      words[i / 2][2 * odd + half] = add_half2(masked_or(w, 0x000f000fu, k1024), group.low[half]);
      words[2 + i / 2][2 * odd + half] = fma_half2(masked_or(w, 0x00f000f0u, k1024), kSixteenth, group.high[half]);
    }
  }
}

}  // namespace nibblelm::cuda
