// How the linear kernels see a weight matrix: panels of 64 rows, interleaved so that vector lanes are rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace nibblelm {

enum class DType { fp32, bf16, fp16 };
constexpr int64_t size_of(DType type) { return type == DType::fp32 ? 4 : 2; }

constexpr int64_t kPanelRows{64};
constexpr int64_t kTileRows{16};  // lanes of one vector; four tiles to a panel

// Memory that starts at a huge page, and lies in such pages where the system grants them.
class Buffer {
 public:
  explicit Buffer(size_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  uint8_t* data() const { return data_; }

 private:
  void* mapped_;
  size_t mapped_bytes_;
  uint8_t* data_;
};

// w = scale * (code - zero), or scale * code + minimum.
enum class Offset { symmetric, zero_point, minimum };

// One part of a quantized weight as it lies on disk; see QuantizedWeight in runtime/ops/types.py.
struct QuantizedRowMajor {
  const uint32_t* codes;  // (n, ceil(k / (32 / bits))), low code first
  const void* scale;      // (n, groups)
  const uint32_t* zero;   // (ceil(n / (32 / bits)), groups) or null
  const void* minimum;    // (n, groups) or null
  int64_t n, k;
  int64_t group;  // weights along k that share a scale; k when there is one per row
  int bits;
  DType scale_type;

  Offset offset() const {
    return minimum != nullptr ? Offset::minimum : zero != nullptr ? Offset::zero_point : Offset::symmetric;
  }
};

// A panel is, for each group of k, the codes of the group, then its 64 scales and (unless symmetric) its 64 zeros
// (u8) or minimums (the type of the scales). k is padded to a multiple of 8.
//   8 bits: for each 4 k, for each tile: 16 rows x 4 bytes.
//   4 bits: for each 8 k, for each tile: 16 rows x 4 bytes, low nibbles k .. k+3, high nibbles k+4 .. k+7.
// One vector of activations broadcast four bytes at a time thus meets rows in lanes, without horizontal sums.
struct QuantizedPanels {
  int64_t n, k, group, groups;
  int bits;
  DType scale_type;
  Offset offset;
  std::unique_ptr<Buffer> buffer;

  int64_t padded_k() const { return (k + 7) / 8 * 8; }
  int64_t panels() const { return (n + kPanelRows - 1) / kPanelRows; }
  int64_t code_bytes(int64_t width) const { return width * bits * (kPanelRows / 8); }  // width a multiple of 8
  int64_t scale_bytes() const { return kPanelRows * size_of(scale_type); }
  int64_t offset_bytes() const {
    return offset == Offset::symmetric ? 0 : offset == Offset::zero_point ? kPanelRows : scale_bytes();
  }
  int64_t panel_bytes() const { return code_bytes(padded_k()) + groups * (scale_bytes() + offset_bytes()); }
  size_t bytes() const { return static_cast<size_t>(panels() * panel_bytes()); }
};

// Full weights: for each k, the 64 rows' values, so 64 x 2 or x 4 bytes.
struct FullPanels {
  int64_t n, k;
  DType type;
  std::unique_ptr<Buffer> buffer;

  int64_t panels() const { return (n + kPanelRows - 1) / kPanelRows; }
  int64_t panel_bytes() const { return k * kPanelRows * size_of(type); }
  size_t bytes() const { return static_cast<size_t>(panels() * panel_bytes()); }
};

struct FullRowMajor {
  const void* values;  // (n, k) contiguous
  int64_t n;
};

// Stack parts along n and repack them, on the team. Parts agree in k, group, bits, scale_type and offset().
std::unique_ptr<QuantizedPanels> pack_quantized(const std::vector<QuantizedRowMajor>& parts);
std::unique_ptr<FullPanels> pack_full(const std::vector<FullRowMajor>& parts, int64_t k, DType type);

}  // namespace nibblelm
