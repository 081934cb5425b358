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

// The norm of each head of q and k before they are rotated: RMSNorm, or LayerNorm with the bits of layer_norm().
struct HeadNorms {
  const float* q;  // gains (head_dim,), or per_head (heads, head_dim), fp32; null: no norm
  const float* k;
  const float* q_bias;  // (head_dim,) or null, of LayerNorm
  const float* k_bias;
  float eps;
  bool plus_one;  // of RMSNorm: multiply by 1 + gain
  bool centred;   // LayerNorm: q and k have gains, head_dim is a multiple of 8 and gains lie on 16 bytes, as qkv does
  bool per_head;
};

// qkv (rows, heads + 2 kv_heads, head_dim): normed and rotated q in place, k and v into the cache.
void rope_append(void* qkv, int64_t stride, int64_t rows, int heads, const RopeTable& table, const PagedCache& cache,
                 const HeadNorms& norms, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
