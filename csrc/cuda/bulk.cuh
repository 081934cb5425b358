// Bulk copies from global to shared memory (PTX ISA, cp.async.bulk) that report to an mbarrier; sm_90 and later.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A barrier of one arrival a phase; the caller synchronizes the block before others use it.
__device__ __forceinline__ void barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread: `bytes` and both addresses are multiples of 16; the barrier's phase ends when all have arrived.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, size_t bytes, uint64_t* barrier) {
  const uint32_t target = shared_address(shared), count = static_cast<uint32_t>(bytes);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(global), "r"(count), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

#endif

}  // namespace nibblelm::cuda
