// Attention of new tokens against the cache by online softmax: launchers.
#pragma once

#include <cstdint>

#include "paged_cache.h"
#include "rope.h"

namespace nibblelm::cuda {

constexpr int kPrefillTile{128};  // rows of a tile of `tiles`, at most

// Row m attends to the interval of positions of cache.slots[m] that its position, window, prefix, starts and the mask's
// width allow. A row with a slot outside the cache (-1: an idle row of a batch) gives zeros.
struct AttentionArgs {
  const void* q;     // (rows, heads, head_dim) of dtype `type`, rows q_stride elements apart
  void* out;         // (rows, heads * head_dim) of dtype `type`
  float* workspace;  // attention_workspace() bytes; decode only
  PagedCache cache;
  const float* slopes;    // (heads,) or null
  const int32_t* prefix;  // (rows,) or null
  const int32_t* starts;  // (slot_count,) or null
  const float* mask;      // (rows, mask_columns), rows mask_stride apart, or null
  const int32_t* tiles;   // (tile_count, 2) first row and number of rows of each tile; prefill only
  int64_t q_stride;
  int64_t mask_stride;
  int64_t rows;
  int tile_count;
  int mask_columns;
  int heads;
  int window;  // 0: none
  float scale;
  float softcap;  // 0: none
  bool mma_sync;  // no wgmma, as on cards that have none
  DType type;
};

// Bytes of scratch that attention_decode and attention_rope need for partial results; `args` without it.
int64_t attention_workspace(const AttentionArgs& args);

// Any number of rows, each on its own: split-KV. A row's result does not depend on the others. Launches on one device
// share counters and must not run at the same time: use one stream.
void attention_decode(const AttentionArgs& args, const Launch& launch);

// rope_append and attention_decode in one: q of `args` is the fused projection (rows, heads + 2 kv_heads, head_dim),
// whose k and v enter the cache; rows have different slots. The result has the bits of the two one after the other.
// q_norm, k_norm (head_dim,) fp32 or null; the table has a row for every position of the cache. For what
// attention_fuses() says; `norms`: q_norm or k_norm is given.
void attention_rope(const AttentionArgs& args, const RopeTable& table, const float* q_norm, const float* k_norm,
                    float eps, bool plus_one, const Launch& launch);
bool attention_fuses(const AttentionArgs& args, const RopeTable& table, bool norms);

// Rows of prompts: those of a tile are of one slot and share the keys they read. A row's result does not depend on the
// others; of a row in no tile there is none. Launches on one device share a counter, as those of decode do. An int8
// cache is read by way of kv_unpack.
void attention_prefill(const AttentionArgs& args, const Launch& launch);
// The kernel that it takes for what attention_fits_sm90() says, on cards for which sm_90a was compiled.
void attention_prefill_sm90(const AttentionArgs& args, const Launch& launch);
bool attention_fits_sm90(const AttentionArgs& args);

// The pages of an int8 cache that the tiles' rows see, into cache.k_unpacked and cache.v_unpacked.
void kv_unpack(const AttentionArgs& args, const Launch& launch);

// The same two in plain fp32 arithmetic, for fp32 and for head sizes without a tensor-core kernel (which call these).
void attention_decode_fma(const AttentionArgs& args, const Launch& launch);
int64_t attention_workspace_fma(const AttentionArgs& args);
void attention_prefill_fma(const AttentionArgs& args, const Launch& launch);

}  // namespace nibblelm::cuda
