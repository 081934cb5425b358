#include "cpu/memory.h"

#include <cstdlib>  // defines __GLIBC__

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace nibblelm {

void keep_freed_memory() {
#if defined(__GLIBC__)
  constexpr int kLargest{1 << 30};
  mallopt(M_MMAP_THRESHOLD, kLargest);
  mallopt(M_TRIM_THRESHOLD, kLargest);
#endif
}

}  // namespace nibblelm
