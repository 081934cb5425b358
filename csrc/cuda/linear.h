// linear: y = x W^T + b for int4 / int8 / fp16 / bf16 / fp32 weights. Launchers; the layouts are defined here.
#pragma once

#include <cstdint>
#include <span>

#include "launch.h"

namespace nibblelm::cuda {

// int4_half: int4 as the kernel for many rows multiplies it where multiplies_in_half says so, never a weight's own.
enum class WeightFormat : int { int4 = 0, int8 = 1, f16 = 2, bf16 = 3, f32 = 4, int4_half = 5 };

constexpr bool is_int4(WeightFormat format) {
  return format == WeightFormat::int4 || format == WeightFormat::int4_half;
}
// Whether products are those of codes by digits, whose sums are exact.
constexpr bool is_integer(WeightFormat format) { return format == WeightFormat::int4 || format == WeightFormat::int8; }
// Whether weights are codes in strips, with records of their scales.
constexpr bool is_codes(WeightFormat format) { return is_int4(format) || format == WeightFormat::int8; }

inline const char* name(WeightFormat format) {
  constexpr const char* kNames[]{"int4", "int8", "fp16", "bf16", "fp32", "int4"};
  return kNames[static_cast<int>(format)];
}

// What comes after a product whose rows are 8 of a gate and their 8 of up, in turn.
enum class Gate : int { none = 0, silu = 1, gelu_tanh = 2 };

// What else may come after it, number by number.
enum class After : int { nothing = 0, gelu_tanh = 1, gelu_erf = 2, relu = 3 };

constexpr int kStripRows{16};  // rows of one tensor-core tile
constexpr int kStepK{128};     // K is cut in steps: the largest group, and a multiple of every tile
constexpr int kMaxDecodeRows{16};
constexpr int kMaxNormColumns{16384};  // of a row that is normed on its way in

// An (N, K) weight on the device.
//
// Full formats: row-major, `pitch` elements a row, a multiple of 32 with zeros beyond K, 16-byte aligned.
//
// Integer formats: strips of 16 rows, K padded to steps; a strip is a sequence of 512-byte units, lane l of a warp
// owning bytes 16 l ... 16 l + 15 (r = l / 4, c = l % 4; the four words are the A fragment of mma.m16n8k32):
//   int8, 32 columns a unit: words 0 and 2 hold row r, columns 8c..8c+3 and 8c+4..8c+7; words 1 and 3 row r + 8.
//   int4, 64 columns a unit: the same twice, columns 0..31 in the low nibbles and 32..63 in the high ones.
//
// clang-format off
//   strip: 16 rows          unit of int4: 64 columns, 512 bytes     who takes which
//   +------+------+------   lane 4 r + c, bytes 16 l ... 16 l + 15  a warp takes a strip, in both kernels; a lane
//   |unit 0|unit 1| ...       word 0  row r      8c   ... 8c + 3     reads its own 16 bytes, which for few
//   +------+------+------     word 1  row r + 8  8c   ... 8c + 3     rows it has copied itself; the words
//                             word 2  row r      8c+4 ... 8c + 7     are registers a0 ... a3 of
//                             word 3  row r + 8  8c+4 ... 8c + 7     mma.m16n8k32 and wgmma.m64nNk32
//                           low nibbles: of columns 0 ... 31, high ones: 32 ... 63
// clang-format on
//
// x, as digits, has its columns in the same order: plane_offset (decode) and TileRow (many rows).
//
// `records` holds, per strip and group (one group per row when group_size is 0), for r = 0..7:
//   (scale[r], scale[r + 8]) in scale_dtype; if has_zero, the zero-points as unsigned bytes z[r], z[r + 8] (int8) or
//   one byte z[r] | z[r + 8] << 4 (int4); if has_minimum, (minimum[r], minimum[r + 8]) in scale_dtype.
struct LinearWeight {
  const void* data;
  const void* records;
  WeightFormat format;
  int n;
  int k;
  int64_t pitch;
  int group_size;
  DType scale_dtype;
  bool has_zero;  // otherwise the zero-point is 8 or 128, or 0 with a minimum
  bool has_minimum;

  bool integer() const { return is_integer(format); }
  int bits() const {
    return format == WeightFormat::int4 ? 4 : format == WeightFormat::int8 ? 8 : format == WeightFormat::f32 ? 32 : 16;
  }
  int strips() const { return (n + kStripRows - 1) / kStripRows; }
  int steps() const { return (k + kStepK - 1) / kStepK; }
  int groups() const { return group_size == 0 ? 1 : steps() * kStepK / group_size; }
  int scale_bytes() const { return scale_dtype == DType::f32 ? 4 : 2; }
  int minimum_offset() const { return kStripRows * scale_bytes() + (has_zero ? (bits() == 4 ? 8 : 16) : 0); }
  int record_bytes() const { return minimum_offset() + (has_minimum ? kStripRows * scale_bytes() : 0); }
  int default_zero() const { return has_minimum ? 0 : 1 << (bits() - 1); }
};

// x (m, k) and y (m, n) with contiguous rows `stride` elements apart.
struct LinearArgs {
  const void* x;
  int64_t x_stride;
  DType x_dtype;  // bf16 or fp32
  void* y;
  int64_t y_stride;
  DType y_dtype;      // bf16 or fp32
  const float* bias;  // (n,) or null
  int m;
  bool eight_bits;  // of bf16 x, integer weights take one digit instead of two
  bool mma_sync;    // no wgmma, as on cards that have none
  void* workspace;  // linear_workspace() bytes, 16-byte aligned
  int* arrivals;    // strips() + 1 zeros, for the kernels' counters. One stream at a time may use a weight.
  // Before: with a gain, x stands for norm(x + residual), LayerNorm where it `centres`, else RMSNorm; with a post_gain,
  // rms_norm(x) stands there for x, with an addend x + addend; both need a residual and exclude each other. The bits
  // are those of the separate ops. bf16 only.
  const float* gain;       // (k,) or null
  const float* gain_bias;  // (k,), of a LayerNorm, or null
  const float* post_gain;  // (k,), of the norm behind the layer that gave x, or null
  const void* residual;    // (m, k), rows residual_stride apart, or null
  const void* addend;      // the same, rows addend_stride apart
  void* h;                 // receives x + residual, (m, k) contiguous
  int64_t residual_stride, addend_stride;
  float eps, post_eps;
  bool plus_one;  // of both gains
  bool centres;
  Gate gate;    // with one y (m, n / 2) gets silu(gate) * up, or gelu's, as the separate op does
  After after;  // y is contiguous
};

// y = x W^T + b. Every row's bits are the same whatever m is.
struct LinearStep {
  LinearWeight weight;
  LinearArgs args;
};

// One after another; each may read what those before it have stored, and use their workspace if it has more than
// kMaxDecodeRows rows. With one row, as many as fit run as one kernel, whose weights go on streaming while its blocks
// wait for each other; the bits are the same.
void linear(std::span<const LinearStep> steps, const Launch& launch);

// Bytes of `LinearArgs::workspace` (0 for one aligned row of most shapes).
int64_t linear_workspace(const LinearWeight& weight, const void* x, int64_t x_stride, DType x_dtype, int m,
                         bool eight_bits);

// Row-major packed codes (n, words) int32 -> `LinearWeight::data`.
void linear_pack(const LinearWeight& weight, const void* codes, int64_t words, void* data, const Launch& launch);

}  // namespace nibblelm::cuda
