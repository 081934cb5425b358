// Rotary embedding, the KV write, and both fused with QK-norm: launchers.
#pragma once

#include <cstdint>

#include "paged_cache.h"

namespace nibblelm::cuda {

// Tables are (entries, half) fp32 with half = R / 2. `streams` 2 rotates each half of a head by its own stream:
// positions is then (2, rows). Pairs are (i, i + half) or, interleaved, (2i, 2i + 1).
struct RopeTable {
  const int32_t* positions;
  const float* cos;
  const float* sin;
  int half;
  int streams;
  bool interleaved;
  int entries;
};

// x (rows, heads, head_dim), rows x_stride elements apart, in place.
void rope(void* x, int64_t x_stride, int64_t rows, int heads, int head_dim, const RopeTable& table, DType dtype,
          const Launch& launch);

// k, v (rows, kv_heads, head_dim), rows k_stride and v_stride elements apart. A row whose slot, position or page is
// outside the cache is not written.
void kv_append(const void* k, const void* v, int64_t k_stride, int64_t v_stride, int64_t rows, const PagedCache& cache,
               DType dtype, const Launch& launch);

// qkv (rows, heads + 2 kv_heads, head_dim): normed and rotated q in place, k and v into the cache. q_norm, k_norm
// (head_dim,) fp32 or null.
void rope_append(void* qkv, int64_t stride, int64_t rows, int heads, const RopeTable& table, const PagedCache& cache,
                 const float* q_norm, const float* k_norm, float eps, bool plus_one, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
