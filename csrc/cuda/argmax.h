// Index of the largest of each row: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// x (rows, columns), rows x_stride elements apart; y (rows,); ties go to the lowest index, NaN counts as -inf.
// Launches on one device must not run at the same time (they share counters): use one stream.
void argmax(const void* x, int32_t* y, int64_t rows, int64_t columns, int64_t x_stride, DType dtype,
            const Launch& launch);

}  // namespace nibblelm::cuda
