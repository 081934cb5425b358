// What a launcher needs from its caller; no CUDA header, so the binding file compiles with the host compiler alone.
#pragma once

#include <cstdint>
#include <string>

#ifdef __CUDACC__
#define NIBBLELM_HOST_DEVICE __host__ __device__
#else
#define NIBBLELM_HOST_DEVICE
#endif

namespace nibblelm::cuda {

// The order is the binding's: `_cuda.DTYPES` lists the names.
enum class DType : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };

inline const char* name(DType dtype) {
  constexpr const char* kNames[]{"fp32", "fp16", "bf16", "int8"};
  return kNames[static_cast<int>(dtype)];
}

struct Launch {
  void* stream;       // cudaStream_t
  bool programmatic;  // programmatic dependent launch: may start before the kernel ahead of it has finished
};

// Of the code that runs on the present card (`kArchitecture` there), which may be older than the card.
int compiled_architecture();

}  // namespace nibblelm::cuda
