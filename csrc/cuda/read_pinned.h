// Words from pinned host memory: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// y = x, `count` words, x in pinned host memory, read when the kernel runs. A copy at the head of a program goes ahead
// of it: the device stood idle for 0.3 to 0.7 ms, as traced, until the 300 kernels behind it were submitted.
void read_pinned(const int32_t* x, int32_t* y, int64_t count, const Launch& launch);

}  // namespace nibblelm::cuda
