// Embedding rows from full, int8 and int4 tables.
#include "embedding.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

constexpr int kThreads{128};

// w = scale * (code - zero), or scale * code + minimum.
__device__ __forceinline__ float dequantized(const EmbeddingArgs& a, int64_t id, int column) {
  const int per_word = 32 / a.bits;
  const uint32_t mask = (1u << a.bits) - 1;
  const uint32_t word = static_cast<const uint32_t*>(a.codes)[id * a.words + column / per_word];
  const auto code = static_cast<float>(word >> (column % per_word * a.bits) & mask);
  const int group = column / a.group_size;
  const float scale = load_as_float(a.scale, id * a.groups + group, a.table);
  if (a.minimum != nullptr) return scale * code + load_as_float(a.minimum, id * a.groups + group, a.table);
  uint32_t zero = 1u << (a.bits - 1);
  if (a.zero != nullptr) {
    const auto packed = static_cast<uint32_t>(a.zero[id / per_word * a.groups + group]);
    zero = packed >> (id % per_word * a.bits) & mask;
  }
  return scale * (code - static_cast<float>(zero));
}

template <class T>
__global__ void embedding_kernel(EmbeddingArgs a) {
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.x, id = a.ids[row];
  T* const y = static_cast<T*>(a.y) + row * a.columns;
  const bool known = id >= 0 && id < a.vocab;
  for (int c = blockIdx.y * kThreads + threadIdx.x; c < a.columns; c += gridDim.y * kThreads) {
    float value = NAN;
    if (known) value = a.bits >= 16 ? load_as_float(a.codes, id * a.columns + c, a.table) : dequantized(a, id, c);
    y[c] = from_float<T>(value * a.multiplier);
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, DType dtype, const Launch& launch) {
  if (args.rows == 0) return;
  const auto what = [&] {
    return "embedding rows=" + std::to_string(args.rows) + " table=(" + std::to_string(args.vocab) + ", " +
           std::to_string(args.columns) + ") bits=" + std::to_string(args.bits);
  };
  with_activation(dtype, "embedding", [&]<class T>() {
    // A decode step waits for one row: a column a thread, so that memory is waited for once.
    const int columns_each = args.rows <= 16 ? 1 : 4;
    const dim3 grid(static_cast<unsigned>(args.rows), ceil_div(args.columns, columns_each * kThreads));
    launch_kernel(launch, what, embedding_kernel<T>, grid, dim3(kThreads), 0, args);
  });
}

}  // namespace nibblelm::cuda
