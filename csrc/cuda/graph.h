// Facts about a captured graph.
#pragma once

#include <cstddef>

namespace nibblelm::cuda {

// How many nodes (kernels and copies) a cudaGraph_t has.
std::size_t graph_nodes(void* graph);

}  // namespace nibblelm::cuda
