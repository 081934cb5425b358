// Attention of new tokens against the cache by online softmax: launchers.
#pragma once

#include <cstdint>

#include "launch.h"
#include "rope.h"

namespace nibblelm::cuda {

// Row m attends to the interval of positions of cache slots[m] that positions, window, prefix, starts and the mask's
// width allow. A row with a slot outside the cache (-1: an idle row of a batch) gives zeros.
struct AttentionArgs {
  const void* q;  // (rows, heads, head_dim) of dtype `type`, rows q_stride elements apart
  const void* k;  // (slot_count, kv_heads, capacity, head_dim) of dtype `cache`
  const void* v;
  void* out;                 // (rows, heads * head_dim) of dtype `type`
  float* workspace;          // attention_workspace() bytes; decode only
  const int32_t* slots;      // (rows,)
  const int32_t* positions;  // (rows,)
  const float* slopes;       // (heads,) or null
  const int32_t* prefix;     // (rows,) or null
  const int32_t* starts;     // (slot_count,) or null
  const float* mask;         // (rows, mask_columns), rows mask_stride apart, or null
  int64_t q_stride;
  int64_t mask_stride;
  int64_t rows;
  int64_t capacity;
  int mask_columns;
  int slot_count;
  int heads;
  int kv_heads;
  int head_dim;
  int window;  // 0: none
  float scale;
  float softcap;  // 0: none
  DType type;
  DType cache;
};

// Bytes of scratch that attention_decode needs for partial results.
int64_t attention_workspace(int64_t rows, int heads, int head_dim, int64_t capacity);

// Any rows, each on its own: split-KV. A row's result does not depend on the others. Launches on one device share
// counters and must not run at the same time: use one stream.
void attention_decode(const AttentionArgs& args, const Launch& launch);

// rope_append and attention_decode in one: q of `args` is the fused projection (rows, heads + 2 kv_heads, head_dim),
// whose k and v enter the cache; rows have different slots. The result has the bits of the two one after the other.
// q_norm, k_norm (head_dim,) fp32 or null; the table has a row for every position of the cache. For what
// attention_fuses() says.
void attention_rope(const AttentionArgs& args, const RopeTable& table, const float* q_norm, const float* k_norm,
                    float eps, bool plus_one, const Launch& launch);
bool attention_fuses(const AttentionArgs& args, const RopeTable& table);

// All rows on slots[0]: tiles of rows share the keys they read.
void attention_prefill(const AttentionArgs& args, const Launch& launch);

// The same two in plain fp32 arithmetic, for fp32 and for head sizes without a tensor-core kernel (which call these).
void attention_decode_fma(const AttentionArgs& args, const Launch& launch);
void attention_prefill_fma(const AttentionArgs& args, const Launch& launch);

}  // namespace nibblelm::cuda
