// The next token of each row from its logits, on the device: launcher.
#pragma once

#include <cstdint>

#include "launch.h"

namespace nibblelm::cuda {

// All arrays are in device memory, so that one captured launch serves every step. Per row unless said otherwise.
struct SamplingArgs {
  const float* logits;       // (rows, vocab), rows logits_stride apart
  float* workspace;          // (rows, vocab)
  int32_t* ids;              // result; -1 where no logit is finite
  const float* temperature;  // 0: argmax
  const int32_t* top_k;      // 0: off
  const float* top_p;        // 1 or more: off
  const float* min_p;        // 0: off
  const float* repetition;   // 1: off
  const float* presence;     // 0: off
  const float* frequency;    // 0: off
  const uint64_t* seeds;
  int64_t* steps;         // output tokens drawn so far; incremented
  const float* bias;      // (rows, vocab) or null
  const uint8_t* prompt;  // (rows, vocab), 1 where the prompt has the token, or null
  int32_t* counts;        // (rows, vocab), how often the output has the token, incremented; or null
  int32_t* positions;     // incremented; or null
  int32_t* host_ids;      // (2, rows) in pinned host memory, row steps % 2 gets the ids too; or null
  int64_t logits_stride;
  int64_t rows;
  int vocab;
  int blocks;  // of a row; 0: by its length
};

// The definition is in runtime/sampler.py: bias, penalties, temperature, top-k, top-p, min-p, inverse of the
// cumulative distribution with Philox numbers. A row's token does not depend on the other rows.
void sample(const SamplingArgs& args, const Launch& launch);

}  // namespace nibblelm::cuda
