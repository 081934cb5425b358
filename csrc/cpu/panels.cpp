// Repacking at load: from rows on disk to panels. Memory-bound once the 16 x 16 transposes stay in registers or L1.
#include "cpu/panels.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cpu/team.h"

namespace nibblelm {

constexpr size_t kHugePage{size_t{2} << 20};

Buffer::Buffer(size_t bytes) : mapped_bytes_(bytes + kHugePage) {
  mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED) throw std::bad_alloc();
  const auto start = (reinterpret_cast<uintptr_t>(mapped_) + kHugePage - 1) / kHugePage * kHugePage;
  data_ = reinterpret_cast<uint8_t*>(start);
#if defined(MADV_HUGEPAGE)
  madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: streaming 2 MiB pages misses the TLB 512 times less often
#endif
}

Buffer::~Buffer() { munmap(mapped_, mapped_bytes_); }

namespace {

struct Row {  // where a packed row comes from
  size_t part;
  int64_t row;
};

template <typename Part>
std::vector<Row> stacked_rows(const std::vector<Part>& parts) {
  std::vector<Row> rows;
  for (size_t p = 0; p < parts.size(); ++p) {
    for (int64_t r = 0; r < parts[p].n; ++r) rows.push_back({p, r});
  }
  return rows;
}

// Eight nibbles of a word, k first in the low bits -> four bytes, the first four k in the low nibbles.
inline uint32_t interleave_nibbles(uint32_t word) {
  const auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ffu;
    return (half | half << 4) & 0x0f0f0f0fu;
  };
  return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// Words [0, count) of each of 64 rows -> for each word, 64 rows. Missing rows are null and give zeros.
template <bool kNibbles>
void interleave_words(const uint32_t* const* rows, int64_t first, int64_t count, uint8_t* out) {
  constexpr int64_t kStep = 16;
  uint32_t block[kStep][kPanelRows];
  for (int64_t w = 0; w < count; w += kStep) {
    const int64_t n = std::min(kStep, count - w);
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = rows[r] == nullptr ? 0 : rows[r][first + w + i];
        block[i][r] = kNibbles ? interleave_nibbles(word) : word;
      }
    }
    std::memcpy(out + w * kPanelRows * 4, block, static_cast<size_t>(n * kPanelRows * 4));
  }
}

class QuantizedPacker {
 public:
  QuantizedPacker(const std::vector<QuantizedRowMajor>& parts, const QuantizedPanels& out)
      : parts_(parts), rows_(stacked_rows(parts)), out_(out) {}

  void pack(int64_t panel) const {
    const int64_t per_word = 32 / out_.bits, words = (out_.k + per_word - 1) / per_word;
    const uint32_t* codes[kPanelRows] = {};
    for (int64_t r = 0; r < kPanelRows; ++r) {
      if (const Row* row = source(panel, r)) codes[r] = parts_[row->part].codes + row->row * words;
    }
    uint8_t* p = out_.buffer->data() + panel * out_.panel_bytes();
    for (int64_t g = 0; g < out_.groups; ++g) {
      const int64_t first = g * out_.group, width = std::min(out_.group, out_.padded_k() - first);
      const int64_t real = std::min(width / per_word, words - first / per_word);  // padding words stay zero
      out_.bits == 4 ? interleave_words<true>(codes, first / per_word, real, p)
                     : interleave_words<false>(codes, first / per_word, real, p);
      p += out_.code_bytes(width);
      pack_values(panel, g, p);
      p += out_.scale_bytes() + out_.offset_bytes();
    }
  }

 private:
  const Row* source(int64_t panel, int64_t r) const {
    const auto index = static_cast<size_t>(panel * kPanelRows + r);
    return index < rows_.size() ? &rows_[index] : nullptr;
  }

  void pack_values(int64_t panel, int64_t g, uint8_t* out) const {
    const int64_t size = size_of(out_.scale_type);
    for (int64_t r = 0; r < kPanelRows; ++r) {
      const Row* row = source(panel, r);
      if (row == nullptr) continue;  // scale 0
      const QuantizedRowMajor& part = parts_[row->part];
      const int64_t at = (row->row * out_.groups + g) * size;
      std::memcpy(out + r * size, static_cast<const uint8_t*>(part.scale) + at, static_cast<size_t>(size));
      if (out_.offset == Offset::zero_point) {
        const int64_t per_word = 32 / out_.bits;
        const uint32_t word = part.zero[row->row / per_word * out_.groups + g];
        const auto shift = static_cast<uint32_t>(row->row % per_word * out_.bits);
        out[out_.scale_bytes() + r] = static_cast<uint8_t>(word >> shift & ((1u << out_.bits) - 1));
      } else if (out_.offset == Offset::minimum) {
        std::memcpy(out + out_.scale_bytes() + r * size, static_cast<const uint8_t*>(part.minimum) + at,
                    static_cast<size_t>(size));
      }
    }
  }

  const std::vector<QuantizedRowMajor>& parts_;
  std::vector<Row> rows_;
  const QuantizedPanels& out_;
};

template <typename T>
void interleave_values(const T* const* rows, int64_t k, T* out) {
  constexpr int64_t kStep = 32;
  for (int64_t first = 0; first < k; first += kStep) {
    const int64_t n = std::min(kStep, k - first);
    T block[kStep][kPanelRows];
    for (int64_t r = 0; r < kPanelRows; ++r) {
      for (int64_t i = 0; i < n; ++i) block[i][r] = rows[r] == nullptr ? T{0} : rows[r][first + i];
    }
    std::memcpy(out + first * kPanelRows, block, sizeof(T) * static_cast<size_t>(n * kPanelRows));
  }
}

template <typename T>
void pack_full_as(const std::vector<FullRowMajor>& parts, const FullPanels& out) {
  const std::vector<Row> rows = stacked_rows(parts);
  parallel_for(out.panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const T* sources[kPanelRows] = {};
      for (int64_t r = 0; r < kPanelRows && panel * kPanelRows + r < out.n; ++r) {
        const Row& row = rows[static_cast<size_t>(panel * kPanelRows + r)];
        sources[r] = static_cast<const T*>(parts[row.part].values) + row.row * out.k;
      }
      interleave_values<T>(sources, out.k, reinterpret_cast<T*>(out.buffer->data() + panel * out.panel_bytes()));
    }
  });
}

template <typename Part>
int64_t total_rows(const std::vector<Part>& parts) {
  int64_t n = 0;
  for (const auto& part : parts) n += part.n;
  return n;
}

}  // namespace

std::unique_ptr<QuantizedPanels> pack_quantized(const std::vector<QuantizedRowMajor>& parts) {
  const auto lock = lock_team();
  const QuantizedRowMajor& first = parts.at(0);
  auto out = std::make_unique<QuantizedPanels>();
  out->n = total_rows(parts);
  out->k = first.k;
  out->groups = (first.k + first.group - 1) / first.group;
  out->group = out->groups == 1 ? out->padded_k() : first.group;
  out->bits = first.bits;
  out->scale_type = first.scale_type;
  out->offset = first.offset();
  // 62,205 columns of byte codes overflow int32 where 16 of them meet values of two digits (quantized_linear.cpp).
  if (out->groups > 1 && out->group > 32768)
    throw std::invalid_argument("groups of more than 32768 would overflow the int32 sums");
  out->buffer = std::make_unique<Buffer>(out->bytes());
  const QuantizedPacker packer(parts, *out);
  parallel_for(out->panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) packer.pack(panel);
  });
  return out;
}

std::unique_ptr<FullPanels> pack_full(const std::vector<FullRowMajor>& parts, int64_t k, DType type) {
  const auto lock = lock_team();
  auto out = std::make_unique<FullPanels>();
  out->n = total_rows(parts);
  out->k = k;
  out->type = type;
  out->buffer = std::make_unique<Buffer>(out->bytes());
  type == DType::fp32 ? pack_full_as<uint32_t>(parts, *out) : pack_full_as<uint16_t>(parts, *out);
  return out;
}

}  // namespace nibblelm
