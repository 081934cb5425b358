// Rows of a full or quantized table: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// `bits` 4 or 8 reads the layout of `QuantizedWeight`; 16 or 32 a full table of dtype `table`.
struct EmbeddingArgs {
  const int32_t* ids;   // (rows,)
  const void* codes;    // (vocab, words) int32, or the full table (vocab, columns)
  const void* scale;    // (vocab, groups) of dtype `table`
  const int32_t* zero;  // (ceil(vocab / (32 / bits)), groups), or null
  const void* minimum;  // (vocab, groups) of dtype `table`, or null
  void* y;              // (rows, columns)
  int64_t rows;
  int64_t vocab;
  int columns;
  int words;  // int32 words a row of codes
  int groups;
  int group_size;
  int bits;
  DType table;
  float multiplier;  // of every value
};

// An id outside the table gives a row of NaN: ids come from the device, where they cannot be refused.
void embedding(const EmbeddingArgs& args, DType dtype, const Launch& launch);

}  // namespace nibblelm::cuda
