// silu, gelu and their gated forms (swiglu, geglu): launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu_erf = 2, softcap = 3, relu = 4, scale = 5 };

// gated: x (M, 2 columns) -> y (M, columns), activation(gate) * up; the gates are the first half of a row, or in pairs
// 8 gates are followed by their 8 ups. Else elementwise on (M, columns).
// Only silu and the gelus are of gates; others refuse them.
// softcap is cap * tanh(x / cap) and scale cap * x, for which alone `cap` counts.
// Rows of x start x_stride elements apart; y is contiguous.
void activate(const void* x, void* y, int64_t rows, int64_t columns, int64_t x_stride, Activation activation, float cap,
              bool gated, bool pairs, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
