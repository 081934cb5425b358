#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {

void add(const AddArgs& a) {
  parallel_for(a.m, 1 + 8192 / a.width, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float *x = a.x + m * a.x_stride, *y = a.y + m * a.y_stride;
      for (int64_t i = 0; i < a.width; i += kLanes) {
        const int n = static_cast<int>(min(kLanes, a.width - i));
        store_first(a.out + m * a.width + i, load_first(x + i, n) + load_first(y + i, n), n);
      }
    }
  });
}

}  // namespace nibblelm::NIBBLE_ISA
