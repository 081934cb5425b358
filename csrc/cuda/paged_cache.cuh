// Where rows are in the paged cache: the only place of the CUDA kernels that knows.
#pragma once

#include "common.cuh"
#include "paged_cache.h"

namespace nibblelm::cuda {

// The slot's table entry for a position of it.
__device__ __forceinline__ const int32_t* table_entry(const PagedCache& c, int slot, int position) {
  return c.tables + static_cast<int64_t>(slot) * c.table_width + static_cast<unsigned>(position) / kPage;
}

// The page to read a position from. kEarly: before dependency_wait(), around L1, which would keep what lies beside the
// entry. Then the position may be one that the row has left behind with its page: for an entry without a page this
// gives another, so that nothing outside the cache is read.
template <bool kEarly = false>
__device__ __forceinline__ int page_of(const PagedCache& c, int slot, int position) {
  const int32_t* const entry = table_entry(c, slot, position);
  return static_cast<int>(min(static_cast<unsigned>(kEarly ? __ldcg(entry) : *entry), c.pages - 1u));
}

// The element of k and v at which a KV head's row of `position` starts, if the position is on `page`. Further rows of
// the page follow. D is head_dim where it is known.
template <int D = 0>
__device__ __forceinline__ int64_t cache_row(const PagedCache& c, int page, int kv_head, int position) {
  const int width = D == 0 ? c.head_dim : D;
  return static_cast<int64_t>(page * c.kv_heads + kv_head) * (kPage * width) +
         static_cast<unsigned>(position) % kPage * width;
}

// The same for a row that is written, or -1 where the slot, the position or its page is outside the cache.
__device__ __forceinline__ int64_t written_row(const PagedCache& c, int slot, int position, int kv_head) {
  if (slot < 0 || slot >= c.slot_count || position < 0 || position >= c.capacity()) return -1;
  const int page = *table_entry(c, slot, position);
  return page < 0 || page >= c.pages ? -1 : cache_row(c, page, kv_head, position);
}

}  // namespace nibblelm::cuda
