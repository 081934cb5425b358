// What every op takes (pointers, sizes, strides in elements) and the table of one instruction set's kernels.
// Rows of activations are contiguous in their last dimension. All ops run on the team of team.h.
#pragma once

#include <cstdint>

#include "cpu/panels.h"
#include "cpu/quantize.h"

namespace nibblelm {

enum class Activation : int { silu = 0, gelu_tanh = 1, gelu_erf = 2, softcap = 3, relu = 4, scale = 5 };

// What is done with the products of a linear. gated: the first half of the columns is activated and multiplied with the
// second, so that there are half as many; the weight then has a multiple of 2 kPanelRows rows.
struct After {
  Activation form;
  bool activates, gated;
};

struct QuantizedLinearArgs {
  const QuantizedPanels* weight;
  const float* x;     // (m, k), row stride x_stride
  const float* bias;  // (n) or null
  float* out;         // (m, n) or, gated, (m, n / 2), row stride out_stride
  int64_t m, x_stride, out_stride;
  int activation_digits;  // 1, 2 or 3 signed bytes per activation
  After after;
};

struct FullLinearArgs {
  const FullPanels* weight;
  const float* x;
  const float* bias;
  float* out;
  int64_t m, x_stride, out_stride;
};

struct RmsNormArgs {
  const float* x;         // (m, heads, width), stride of m: x_stride
  const float* residual;  // the same, residual_stride, or null
  const float* weight;    // (width)
  float* out;             // (m, heads, width), out_stride; may be x
  float* sum;             // (m, heads, width) contiguous: x + residual; null without residual
  int64_t m, heads, width, x_stride, residual_stride, out_stride;
  float eps;
  bool plus_one;
};

struct LayerNormArgs {
  const float* x;         // (m, heads, width), stride of m: x_stride
  const float* residual;  // the same, residual_stride, or null
  const float* weight;    // (width), or per_head (heads, width)
  const float* bias;      // (width) or null
  float* out;             // (m, heads, width), contiguous
  float* sum;             // the same: x + residual; null without residual
  int64_t m, heads, width, x_stride, residual_stride;
  float eps;
  bool per_head;
};

struct AddArgs {
  const float *x, *y;  // (m, width), strides
  float* out;          // (m, width), contiguous
  int64_t m, width, x_stride, y_stride;
};

struct RopeArgs {
  float* x;  // (m, heads, width), stride of m: x_stride; in place
  const int32_t* positions;
  const float *cos, *sin;  // (capacity, half)
  int64_t m, heads, width, x_stride, half, capacity;
  bool interleaved;
};

struct KvCache {
  void *k, *v;                 // (pages, heads, kPage, width), contiguous
  float *k_scales, *v_scales;  // (pages, heads, kPage): what int8 values are multiplied with
  const int32_t* tables;       // (slots, table_width): the page of position p of slot s is [s][p / kPage]
  int64_t pages, slots, table_width, heads, width;
  int64_t bytes;  // of a value: 4 (fp32), 2 (bf16) or 1 (int8)
};

struct KvAppendArgs {
  const float *k, *v;  // (m, heads, width), strides of m
  KvCache cache;
  const int32_t *slots, *positions;
  int64_t m, k_stride, v_stride;
};

struct AttentionArgs {
  const float* q;  // (m, heads, width), stride of m: q_stride
  KvCache cache;
  const int32_t *slots, *positions;
  float* out;  // (m, heads * width), contiguous
  int64_t m, heads, q_stride, window;
  float scale, softcap;   // softcap 0: none
  const float* slopes;    // (heads) of ALiBi, or null
  const int32_t* prefix;  // (m): positions before it are seen too; or null
  const int32_t* starts;  // (slots): the first valid position; or null
  const float* mask;      // (m, mask_columns), added to the scores, rows mask_stride apart; or null
  int64_t mask_stride, mask_columns;
};

struct ActivationArgs {
  const float* x;  // (m, width), or gated (m, 2 width): activation(gate) * up; stride
  float* out;      // (m, width), contiguous
  int64_t m, width, stride;
  Activation form;
  bool gated;
  float cap;  // softcap: cap * tanh(x / cap); scale: cap * x
};

struct EmbeddingArgs {
  const int32_t* ids;
  float* out;  // (m, width), contiguous
  int64_t m, rows, width;
  float multiplier;   // of every value
  const void* table;  // full: (rows, width) contiguous; quantized: null
  DType dtype;        // of the full table
  QuantizedRowMajor quantized;
};

struct RowsArgs {  // softmax, log_softmax
  const float* x;  // (m, n), stride
  float* out;      // (m, n), contiguous
  int64_t m, n, stride;
};

struct ArgmaxArgs {
  const float* x;  // (m, n), stride
  int32_t* out;    // (m)
  int64_t m, n, stride;
};

struct MaskArgs {
  const float* x;        // (m, n), stride
  const uint32_t* mask;  // (m, words), bit i % 32 of word i / 32 for column i
  float* out;            // (m, n), contiguous: -infinity where the bit is 0
  int64_t m, n, stride, words;
};

struct ReadArgs {
  const void* memory;
  int64_t bytes;
};

struct MultiplyArgs {
  int64_t items, steps;
  double* products;  // how many byte products that was
};

// Ops that read ids, slots, positions or tables throw std::invalid_argument when an entry is out of range.
struct Kernels {
  int64_t (*quantize_range)(const QuantizeArgs&, int64_t begin, int64_t end, float* w);
  void (*quantized_linear)(const QuantizedLinearArgs&);
  void (*full_linear)(const FullLinearArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*layer_norm)(const LayerNormArgs&);
  void (*add)(const AddArgs&);
  void (*rope)(const RopeArgs&);
  void (*kv_append)(const KvAppendArgs&);
  void (*attention)(const AttentionArgs&);
  void (*activate)(const ActivationArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*softmax)(const RowsArgs&);
  void (*log_softmax)(const RowsArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*mask_logits)(const MaskArgs&);
  void (*read_memory)(const ReadArgs&);         // as fast as it can
  void (*multiply_bytes)(const MultiplyArgs&);  // items x steps of the dot product instruction, from registers
};

}  // namespace nibblelm
