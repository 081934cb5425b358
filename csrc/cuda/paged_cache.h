// The paged KV cache of one layer, as every kernel that reads or writes it takes it.
#pragma once

#include <cstdint>

#include "launch.h"
#include "page.h"

namespace nibblelm::cuda {

// Position p of slot s is row p % kPage of page tables[s][p / kPage]. A captured launch reads the tables when it is
// replayed; no kernel may write them that lets the next one start before its own end.
struct PagedCache {
  void* k;  // (pages, kv_heads, kPage, head_dim)
  void* v;
  float* k_scales;  // (pages, kv_heads, kPage) of int8: what a row's values are multiplied with; else null
  float* v_scales;
  void* k_unpacked;  // like k in bf16, of int8: where prompts read it
  void* v_unpacked;
  const int32_t* tables;     // (slot_count, table_width), rows table_stride apart
  const int32_t* slots;      // (rows,): where the rows of this launch are; a slot outside the cache marks an idle row
  const int32_t* positions;  // (rows,)
  int pages;
  int slot_count;
  int table_width;
  int table_stride;
  int kv_heads;
  int head_dim;
  DType dtype;

  // Positions of a slot.
  NIBBLELM_HOST_DEVICE int capacity() const { return table_width * kPage; }
};

}  // namespace nibblelm::cuda
