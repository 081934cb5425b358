// Device helpers and the checked launch that every kernel of this folder uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "launch.h"

namespace nibblelm::cuda {

constexpr int kWarp{32};
constexpr unsigned kAllLanes{0xffffffffu};

// The value of lane 0, which the compiler then knows to be that of all.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

// What this code is compiled for: 80, 90, 120 ... (0 in the host's pass).
#ifdef __CUDA_ARCH__
constexpr int kArchitecture{__CUDA_ARCH__ / 10};
#else
constexpr int kArchitecture{0};
#endif

using bf16 = __nv_bfloat16;
using half = __half;

// ---- scalars -------------------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ float to_float(T v) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __bfloat162float(v);
  } else if constexpr (std::is_same_v<T, half>) {
    return __half2float(v);
  } else {
    return static_cast<float>(v);
  }
}

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same_v<T, half>) {
    return __float2half_rn(v);
  } else {
    return v;
  }
}

// One element of a tensor whose dtype is known only at run time (scales, biases, outputs: never in an inner loop).
__device__ __forceinline__ float load_as_float(const void* p, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return __bfloat162float(static_cast<const bf16*>(p)[i]);
    case DType::f16:
      return __half2float(static_cast<const half*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

__device__ __forceinline__ void store_from_float(void* p, int64_t i, DType dtype, float v) {
  switch (dtype) {
    case DType::bf16:
      static_cast<bf16*>(p)[i] = __float2bfloat16_rn(v);
      break;
    case DType::f16:
      static_cast<half*>(p)[i] = __float2half_rn(v);
      break;
    default:
      static_cast<float*>(p)[i] = v;
      break;
  }
}

// ---- 16-byte access ------------------------------------------------------------------------------------------

// `Vec<T>` is 16 bytes of T: 4 floats or 8 half-precision values.
template <typename T>
struct alignas(16) Vec {
  static constexpr int kSize{16 / sizeof(T)};
  T v[kSize];
};

// Data that changes between launches (activations): an ordinary coherent load.
template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}

template <typename T>
__device__ __forceinline__ void store_vec(T* p, const Vec<T>& v) {
  *reinterpret_cast<Vec<T>*>(p) = v;
}

// True where `p` and a row stride in bytes both allow 16-byte access.
inline bool aligned16(const void* p, int64_t stride_bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && stride_bytes % 16 == 0;
}

// ---- asynchronous copies to shared memory (sm_80 and later) --------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// By its address in shared memory: from a pointer, the block's base would be made anew in every round of a loop. Keeps
// its place among barriers and waits.
template <typename T>
__device__ __forceinline__ T load_shared(uint32_t at) {
  T out;
  if constexpr (std::is_same_v<T, float4>) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
                 : "r"(at));
  } else if constexpr (sizeof(T) == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "r"(at));
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "r"(at));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(out) : "r"(at));
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(out) : "r"(at));
  } else {
    uint32_t byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(at));
    out = static_cast<T>(byte);
  }
  return out;
}

__device__ __forceinline__ void store_shared(uint32_t at, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t at, int v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t at, const int2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same with a hint for L2, as createpolicy makes it on Hopper. What is not read again soon leaves first, so that
// tables, code and what kernels hand on stay. Where ptxas 13.0 makes `shared` the sum of a uniform and another
// register, it encodes an instruction that does not exist: seen once (linear_large.cuh), where the sum is made by `|`
// since.
constexpr uint64_t kEvictNormal{0x1000000000000000}, kEvictFirst{0x12f0000000000000};
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, uint64_t hint) {
  if constexpr (kArchitecture == 90) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(hint)
                 : "memory");
  } else {
    copy_async_16(shared, global);
  }
}

__device__ __forceinline__ void copy_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void copy_async_8(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when at most `Pending` of this thread's most recent groups are still in flight.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Keeps a value in a register where the compiler would compute it again in every round.
__device__ __forceinline__ int keep(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ float keep(float v) {
  asm volatile("" : "+f"(v));
  return v;
}
__device__ __forceinline__ const bf16* keep(const bf16* p) {
  asm volatile("" : "+l"(p));
  return p;
}

__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- reductions ----------------------------------------------------------------------------------------------
// Butterflies: every lane ends with the same value, and the order of additions is fixed (results are reproducible).

template <typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T v, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    v = op(v, __shfl_xor_sync(kAllLanes, v, offset));
  }
  return v;
}

__device__ __forceinline__ float warp_sum(float v) {
  return warp_reduce(v, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float warp_max(float v) {
  return warp_reduce(v, [](float a, float b) { return fmaxf(a, b); });
}

// Reduction over the block; `scratch` is 32 elements of shared memory, free again after the caller's next barrier.
// Every thread of the block calls it (blockDim.x a multiple of 32) and gets the result.
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T v, T identity, T* scratch, Op op) {
  v = warp_reduce(v, op);
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
  if (lane == 0) {
    scratch[threadIdx.x / kWarp] = v;
  }
  __syncthreads();
  return warp_reduce(lane < warps ? scratch[lane] : identity, op);
}

__device__ __forceinline__ float block_sum(float v, float* scratch) {
  return block_reduce(v, 0.0f, scratch, [](float a, float b) { return a + b; });
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------
// Contract of every kernel here: *every* thread block calls `dependency_wait()` before it reads or writes anything
// that a step changes, also blocks that then return at once. Weights, gains and scales may be read before it. A block
// that skipped it would let its successor overtake its predecessor. After the wait what the kernel before has stored is
// visible (PTX ISA, "griddepcontrol"), and so is what it has waited for itself. Both are no-ops when the launch did not
// ask.

__device__ __forceinline__ void dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks start beside this one's, some 1.4 us after the last block has called it (H200). So it
// comes first, before the own wait, where what the next one asks for meanwhile leaves this one's loads their turn
// (DecodeChain::paced; of other kernels where it was measured), else once the block's own long loads are under way.
__device__ __forceinline__ void dependency_release() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- host side -----------------------------------------------------------------------------------------------

// Throws with `what` (op, shapes, dtype) in the message; used after every runtime call.
inline void check(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // clear it: the next launch must not report this one
    throw std::runtime_error(what + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
  }
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device{0}, value{0};
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Lets a kernel have that much dynamic shared memory. The multiprocessor is divided as if it needed all: what the
// driver would leave to L1 is then there for a block of the next kernel.
template <typename What, typename Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, What what) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        what());
}

// Whether the kernel that is launched next may start before this one has ended.
inline bool overlaps(const Launch& launch) { return launch.programmatic && compiled_architecture() >= 90; }

// What this thread has launched last, of kernels that linears or attention may follow.
struct LastLaunch {
  int shared_bytes;  // of a block
  bool starts_next;  // before its own wait: linears behind it fill their rings bit by bit
  bool slowly;       // they do so stage by stage, since it reads much by then
};
inline thread_local LastLaunch last_launch{};

// Whether kernels say more than they need to, for a tool that follows neither `__syncwarp` nor who waits for whom
// across blocks: then every lane arrives where one does for its warp, and blocks that store in each other end together.
// `scripts/sanitize.py` asks for it.
inline bool for_racecheck() {
  static const char* const value{std::getenv("NIBBLELM_FOR_RACECHECK")};
  return value != nullptr && value[0] == '1';
}

// How many blocks of so many bytes fit on a multiprocessor beside one of that kernel.
inline int fit_beside_last(int bytes) {
  constexpr int kReserved{1024};  // the system's, of each block
  const int room = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) - last_launch.shared_bytes - kReserved;
  return room / (bytes + kReserved);
}

// Launches `kernel` on `launch.stream` in clusters of `cluster` blocks, raising its shared memory limit where needed.
// `what()` builds the text for the error message ("rms_norm x=(3, 4096) bf16") and runs only on failure.
template <typename What, typename... Params, typename... Args>
void launch_cluster(const Launch& launch, What what, void (*kernel)(Params...), int cluster, dim3 grid, dim3 block,
                    size_t shared_bytes, Args... args) {
  if (shared_bytes > 48 * 1024) allow_shared_memory(kernel, static_cast<int>(shared_bytes), what);
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (launch.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (status != cudaSuccess) {
    check(status, what());
  }
  last_launch = {static_cast<int>(shared_bytes)};
}

// The same without clusters.
template <typename What, typename... Params, typename... Args>
void launch_kernel(const Launch& launch, What what, void (*kernel)(Params...), dim3 grid, dim3 block,
                   size_t shared_bytes, Args... args) {
  launch_cluster(launch, what, kernel, 1, grid, block, shared_bytes, args...);
}

}  // namespace nibblelm::cuda
