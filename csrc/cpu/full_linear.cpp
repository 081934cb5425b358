// y = x W^T + b with bf16, fp16 or fp32 W and fp32 x, for one token or many, bit-equal between the two.
//
// Lanes are rows of W, so every output is one chain of fused multiply-adds over ascending k, cut into blocks whose
// sums are added up in order (the rounding error then grows with the block, not with k).
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/vec.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

constexpr int64_t kChain{256};           // k per block
constexpr int64_t kPrefetchBytes{2048};  // ahead in the panel
constexpr int64_t kFewestTokens{48};     // per work item, when there are too few panels for the threads
constexpr int kPanelTiles{kPanelRows / kTileRows};

template <DType kType>
NIBBLE_INLINE F32 load_weights(const uint8_t* p) {
  if constexpr (kType == DType::fp32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kType == DType::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(p));
  return load_f16(reinterpret_cast<const uint16_t*>(p));
}

constexpr int tiles_for(int rows) {
  int tiles = kPanelTiles;
  while (tiles > 1 && tiles * rows > kBlockRows * kBlockVectors) tiles /= 2;
  return tiles;
}

// total += products of k in [0, width) for kTokens tokens with one panel.
template <DType kType, int kTokens>
NIBBLE_INLINE void add_block(const uint8_t* weights, const float* x, int64_t stride, int64_t width,
                             float (*total)[kPanelRows]) {
  constexpr int kTiles = tiles_for(kTokens);
  constexpr int64_t kTileBytes = kTileRows * size_of(kType), kStep = kPanelRows * size_of(kType);
#pragma GCC unroll 1
  for (int tile = 0; tile < kPanelTiles; tile += kTiles) {
    F32 acc[kTokens][kTiles];
#pragma GCC unroll 6
    for (int m = 0; m < kTokens; ++m) {
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) acc[m][t] = set1(0.0f);
    }
    const uint8_t* p = weights + tile * kTileBytes;
    for (int64_t k = 0; k < width; ++k, p += kStep) {
      F32 w[kTiles];
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        w[t] = load_weights<kType>(p + t * kTileBytes);
        if (t * kTileBytes % 64 == 0) __builtin_prefetch(p + kPrefetchBytes + t * kTileBytes);
      }
#pragma GCC unroll 6
      for (int m = 0; m < kTokens; ++m) {
        const F32 value = set1(x[m * stride + k]);
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) acc[m][t] = fma(w[t], value, acc[m][t]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < kTokens; ++m) {
#pragma GCC unroll 4
      for (int t = 0; t < kTiles; ++t) {
        float* sum = total[m] + (tile + t) * kLanes;
        store(sum, load(sum) + acc[m][t]);
      }
    }
  }
}

template <DType kType, int kTokens>
void multiply_tokens(const FullLinearArgs& args, int64_t index, int64_t token) {
  alignas(64) float total[kTokens][kPanelRows] = {};
  const FullPanels& w = *args.weight;
  const uint8_t* panel = w.buffer->data() + index * w.panel_bytes();
  for (int64_t k = 0; k < w.k; k += kChain) {
    add_block<kType, kTokens>(panel + k * kPanelRows * size_of(kType), args.x + token * args.x_stride + k,
                              args.x_stride, min(kChain, w.k - k), total);
  }
  const int64_t first = index * kPanelRows;
  for (int m = 0; m < kTokens; ++m) {
    float* out = args.out + (token + m) * args.out_stride + first;
    for (int row = 0; row < kPanelRows && first + row < w.n; row += kLanes) {
      const int n = static_cast<int>(min(kLanes, w.n - first - row));
      F32 y = load(total[m] + row);
      if (args.bias != nullptr) y = y + load_first(args.bias + first + row, n);
      store_first(out + row, y, n);
    }
  }
}

template <DType kType, int kTokens>
void multiply(const FullLinearArgs& args, int64_t index, int64_t token, int64_t end) {
  for (; token + kTokens <= end; token += kTokens) multiply_tokens<kType, kTokens>(args, index, token);
  if constexpr (kTokens > 1) {
    if (token < end) multiply<kType, kTokens - 1>(args, index, token, end);
  }
}

template <DType kType>
void run(const FullLinearArgs& args) {
  const FullPanels& w = *args.weight;
  const int64_t split = w.panels() >= 8 * threads() ? args.m : min(args.m, kFewestTokens);
  const int64_t splits = (args.m + split - 1) / split;
  const int64_t cost = w.panel_bytes() * min(args.m, split);
  parallel_for(w.panels() * splits, 1 + 32768 / (cost + 1), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % splits * split;
      multiply<kType, kBlockRows>(args, item / splits, token, min(token + split, args.m));
    }
  });
}

}  // namespace

void full_linear(const FullLinearArgs& args) {
  if (args.m == 0) return;
  switch (args.weight->type) {
    case DType::fp32:
      return run<DType::fp32>(args);
    case DType::bf16:
      return run<DType::bf16>(args);
    case DType::fp16:
      return run<DType::fp16>(args);
  }
}

}  // namespace nibblelm::NIBBLE_ISA
