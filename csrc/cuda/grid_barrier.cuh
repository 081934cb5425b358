// A barrier of all blocks of a grid that are on the card together.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

// Block 0 brings what makes every round add 2^31, so that the word's top bit turns over when all have arrived and its
// other bits are zero again: it needs no reset between rounds or launches. (As cooperative groups do it.)
// Threads: of a block, its first ones, that take part; 0: all.
template <int Threads = 0>
struct GridBarrier {
  uint32_t* word;
  uint32_t arrived{0};  // of the first thread: the word when this block arrived

  static __device__ __forceinline__ void sync() {
    if constexpr (Threads == 0) {
      __syncthreads();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(Threads) : "memory");
    }
  }
  // By all of them; what the block has written before is visible to every block after its wait.
  __device__ __forceinline__ void arrive() {
    sync();
    if (threadIdx.x != 0) return;
    asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(arrived)
                 : "l"(word), "r"(blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u)
                 : "memory");
  }

  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0) {
      uint32_t now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
      } while (((now ^ arrived) & 0x80000000u) == 0);
    }
    sync();
  }
};

}  // namespace nibblelm::cuda
