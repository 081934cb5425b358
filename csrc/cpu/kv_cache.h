// Where rows are in the paged cache: the only place of the CPU kernels that knows.
#pragma once

#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/vec.h"
#include "page.h"

namespace nibblelm::NIBBLE_ISA {

NIBBLE_INLINE int32_t page_of(const KvCache& c, int64_t slot, int64_t position) {
  return c.tables[slot * c.table_width + position / kPage];
}

// The row of k and v that a head has for `position`; those of its page follow each other.
NIBBLE_INLINE int64_t cache_row(const KvCache& c, int64_t slot, int64_t head, int64_t position) {
  return (page_of(c, slot, position) * c.heads + head) * kPage + position % kPage;
}

// Throws unless the slot, the positions [first, last] and their pages are in the cache.
NIBBLE_INLINE void require_rows(const KvCache& c, int64_t slot, int64_t first, int64_t last) {
  bool good = slot >= 0 && slot < c.slots && first >= 0 && last < c.table_width * kPage;
  for (int64_t p = first; good && p / kPage <= last / kPage; p += kPage) {
    good = page_of(c, slot, p) >= 0 && page_of(c, slot, p) < c.pages;
  }
  if (!good) throw std::invalid_argument("a slot, position or page is outside the cache");
}

}  // namespace nibblelm::NIBBLE_ISA
