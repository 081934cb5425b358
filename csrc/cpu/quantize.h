// Rows of real weights to unsigned int4 / int8 codes with a scale and zero-point per row or group.
// The definition, in plain PyTorch, is runtime/quant/{affine,minmax,mse}.py; this agrees with it code for code.
#pragma once

#include <cstdint>

namespace nibblelm {

enum class FloatType { fp32, bf16, fp16 };

struct QuantizeScheme {
  int bits;        // 4 or 8
  int64_t group;   // weights that share a scale: cols for one per row, else a multiple of 8
  bool symmetric;  // zero-point fixed at 2^(bits-1)
  bool search;     // search the clip for least squared error ("mse"); false takes minimum and maximum
  FloatType weight_type;
  FloatType scale_type;
};

struct QuantizedRows {
  uint32_t* codes;        // (rows, ceil(cols / (32 / bits))), low code first
  void* scales;           // (rows, groups)
  uint8_t* zeros;         // (rows, groups), unpacked
  double* squared_error;  // (rows) sum of (w - dequantized)^2
  double* squared_norm;   // (rows) sum of w^2
};

// What the kernel of an instruction set needs for any range of rows (quantize_range.cpp); its `w` holds one group,
// padded to a multiple of kGroupPadding.
struct QuantizeArgs {
  const void* weights;
  int64_t cols;
  QuantizeScheme scheme;
  QuantizedRows out;
};
constexpr int64_t kGroupPadding{16};

// weights is (rows, cols), contiguous. Returns the first row with a NaN or an infinity, or -1; the outputs of that
// row are undefined. The result depends neither on `threads` nor on the instruction set.
int64_t quantize_rows(const void* weights, int64_t rows, int64_t cols, const QuantizeScheme& scheme,
                      const QuantizedRows& out, int threads);

}  // namespace nibblelm
