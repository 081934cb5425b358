// A barrier of all blocks of a grid that are on the card together.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// Block 0 brings what makes every round add 2^31, so that the word's top bit turns over when all have arrived and its
// other bits are zero again: it needs no reset between rounds or launches. (As cooperative groups do it.)
//
// One warp speaks for the block, the last, which is seldom the one that the block waits for: the others say that they
// are done, and go on with what needs no other block.
struct GridBarrier {
  uint32_t* word;
  uint32_t arrived{0};  // of the thread that asks: the word when this block arrived

  __device__ __forceinline__ static bool speaks() { return threadIdx.x / kWarp == blockDim.x / kWarp - 1; }
  __device__ __forceinline__ static bool asks() { return threadIdx.x == blockDim.x - 1; }

  // By every warp but the one that speaks.
  __device__ __forceinline__ static void done() { asm volatile("bar.arrive 1, %0;" ::"r"(blockDim.x) : "memory"); }

  // By the warp that speaks; what the block has written before is visible to every block after its wait.
  __device__ __forceinline__ void arrive() {
    asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
    if (!asks()) return;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(arrived)
                 : "l"(word), "r"(blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u)
                 : "memory");
  }

  // By all threads.
  __device__ __forceinline__ void wait() const {
    if (asks()) {
      uint32_t now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
      } while (((now ^ arrived) & 0x80000000u) == 0);
    }
    __syncthreads();
  }
};

}  // namespace nibblelm::cuda
