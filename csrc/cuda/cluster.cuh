// Thread-block clusters (PTX ISA, "barrier.cluster", "mapa", "st.async"); sm_90 and later.
#pragma once

#include "common.cuh"

namespace nibblelm::cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A barrier of one arrival a phase, which stores from other blocks may report to after the cluster's next barrier.
__device__ __forceinline__ void cluster_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By whole warps: all threads of the cluster, but those that have left. Relaxed: it says that a thread is there, and
// publishes nothing but initialized barriers (a release waits for all of a thread's stores to reach L2).
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// The address, for the stores below, of what lies at `shared` in the block of this rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}
__device__ __forceinline__ uint32_t cluster_address(const void* shared, int rank) {
  return cluster_address(shared_address(shared), rank);
}

// Stores that report their bytes to a barrier of the same block.
__device__ __forceinline__ void cluster_store(uint32_t address, const float4& x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void cluster_store(uint32_t address, const float2& x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(address),
               "f"(x.x), "f"(x.y), "r"(barrier)
               : "memory");
}

// By one thread, once a phase: how many bytes will be stored in all.
__device__ __forceinline__ void cluster_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// A plain store, and an arrival of every lane at a barrier of any block: what it has stored is visible to who waits.
__device__ __forceinline__ void cluster_store(uint32_t address, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As `barrier_wait`, for what other blocks have stored.
__device__ __forceinline__ void cluster_barrier_wait(uint32_t barrier, int parity) {
  uint32_t done{0};
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

// Until the first phase's bytes have arrived.
__device__ __forceinline__ void cluster_receive(uint64_t* barrier) { cluster_barrier_wait(shared_address(barrier), 0); }

#else  // named, but never reached: the launcher asks for no clusters where the kernels were not compiled for them

__device__ __forceinline__ void cluster_init(uint64_t*) {}
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ uint32_t cluster_address(uint32_t, int) { return 0; }
__device__ __forceinline__ uint32_t cluster_address(const void*, int) { return 0; }
__device__ __forceinline__ void cluster_store(uint32_t, float) {}
__device__ __forceinline__ void cluster_barrier_arrive(uint32_t) {}
__device__ __forceinline__ void cluster_barrier_wait(uint32_t, int) {}
__device__ __forceinline__ void cluster_store(uint32_t, const float4&, uint32_t) {}
__device__ __forceinline__ void cluster_store(uint32_t, const float2&, uint32_t) {}
__device__ __forceinline__ void cluster_expect(uint64_t*, int) {}
__device__ __forceinline__ void cluster_receive(uint64_t*) {}

#endif

}  // namespace nibblelm::cuda
