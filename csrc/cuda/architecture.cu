#include <array>
#include <atomic>

#include "common.cuh"

namespace nibblelm::cuda {

static __global__ void architecture_probe() {}

int compiled_architecture() {
  static std::array<std::atomic<int>, 64> known{};  // of each card; cards of one machine may differ
  int device{0};
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& architecture = known.at(static_cast<size_t>(device));
  if (architecture == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, architecture_probe), "cudaFuncGetAttributes");
    architecture = attributes.ptxVersion;
  }
  return architecture;
}

}  // namespace nibblelm::cuda
