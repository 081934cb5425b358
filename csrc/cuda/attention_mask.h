// The stand-alone mask kernels on a score matrix (B, H, Q, K), in place: launchers.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// scores = value where mask (B, Q, K) > 0.99.
void attention_mask(void* scores, const void* mask, float value, int64_t batch, int64_t heads, int64_t queries,
                    int64_t keys, DType dtype, const Launch& launch);

// Query i is position keys - queries + i: scores += slopes[head] * column up to it, and `value` after it.
void alibi_mask(void* scores, const float* slopes, float value, int64_t batch, int64_t heads, int64_t queries,
                int64_t keys, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
