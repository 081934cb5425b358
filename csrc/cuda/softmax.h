// softmax and log_softmax over the last dimension: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// How a row is held: `automatic` picks by its length; the others are for tests and measurements.
enum class SoftmaxForm : int { automatic = 0, warp = 1, block = 2, cluster = 3, online = 4 };

// x, y (rows, columns), contiguous; logarithm selects log_softmax.
void softmax(const void* x, void* y, int64_t rows, int64_t columns, bool logarithm, SoftmaxForm form, DType dtype,
             const Launch& launch);

}  // namespace nibblelm::cuda
