// Logits with minus infinity where a token is not allowed: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// x (rows, columns) fp32, rows x_stride elements apart; mask (rows, ceil(columns / 32)), bit c % 32 of word c / 32 for
// column c; y (rows, columns).
void mask_logits(const float* x, const uint32_t* mask, float* y, int64_t rows, int64_t columns, int64_t x_stride,
                 const Launch& launch);

}  // namespace nibblelm::cuda
