#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/graph.h"

namespace nibblelm::cuda {

std::size_t graph_nodes(void* graph) {
  std::size_t count{0};
  const cudaError_t status = cudaGraphGetNodes(static_cast<cudaGraph_t>(graph), nullptr, &count);
  if (status != cudaSuccess) throw std::runtime_error(std::string("graph_nodes: ") + cudaGetErrorString(status));
  return count;
}

}  // namespace nibblelm::cuda
