// Split arrive / wait barriers in shared memory (mbarrier, sm_80 and later): a warp that has delivered its part goes
// on.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// A lane arrives for itself (of a whole warp 32 do): what it wrote before is visible to who waits.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Returns when the phase with this parity (0 for the first, then alternating) is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  uint32_t done{0};
  while (!done) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  }
}

// ---- bulk copies that arrive at a barrier (sm_90; nothing before) ---------------------------------------------

// For the one thread that arrives at the barrier's phase: it also waits for `bytes` of copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// The same without arriving: of copies that begin before the others of the phase are known.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Makes a barrier's initialization visible to copies and to other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// By one thread: `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

}  // namespace nibblelm::cuda
