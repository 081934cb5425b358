// Splits rows over threads; the arithmetic is in quantize_range.cpp.
#include "cpu/quantize.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/isa.h"

namespace nibblelm {

int64_t quantize_rows(const void* weights, int64_t rows, int64_t cols, const QuantizeScheme& scheme,
                      const QuantizedRows& out, int threads) {
  const QuantizeArgs args{weights, cols, scheme, out};
  const auto quantize_range = kernels().quantize_range;
  const int64_t chunk = std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(cols, 1));
  std::atomic<int64_t> next{0}, first_bad{rows};
  const auto work = [&] {
    std::vector<float> w(static_cast<size_t>(std::min(scheme.group, cols) + kGroupPadding));
    for (int64_t begin = next.fetch_add(chunk); begin < rows; begin = next.fetch_add(chunk)) {
      const int64_t bad = quantize_range(args, begin, std::min(begin + chunk, rows), w.data());
      if (bad < 0) continue;
      int64_t seen = first_bad.load();
      while (bad < seen && !first_bad.compare_exchange_weak(seen, bad)) {
      }
    }
  };
  const int64_t chunks = (rows + chunk - 1) / chunk;
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(threads, chunks); ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: those there are do it all
  }
  work();
  for (std::thread& other : others) other.join();
  return first_bad == rows ? -1 : first_bad.load();
}

}  // namespace nibblelm
