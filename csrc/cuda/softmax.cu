// softmax and log_softmax: every row is read once and written once, held in registers by a warp, a block, or a
// thread-block cluster; rows too long for that, and cards without clusters, take the online two-pass form (Milakov &
// Gimelshein 2018). The running maximum starts at -inf, so rows of negatives and of -inf are right.
#include <cooperative_groups.h>

#include <algorithm>

#include "softmax.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kWarpsPerBlock{8};  // of the warp form
constexpr int kMaxThreads{1024};
constexpr int kMaxValues{32};  // values a thread holds: 32 of the 64 registers that 1024 threads leave it
constexpr int kMaxCluster{8};  // the largest that every device with clusters takes
constexpr int64_t kMaxBlockColumns{int64_t{kMaxThreads} * kMaxValues};

// Maximum m and sum d of exp(x - m) of part of a row. Merging is associative and commutative; (-inf, 0) is neutral.
struct Partial {
  float m;
  float d;
};

__device__ __forceinline__ Partial merge(Partial a, Partial b) {
  const float m = fmaxf(a.m, b.m);
  if (m == -INFINITY) return {m, 0.0f};  // also keeps exp(-inf - -inf) = NaN out
  return {m, a.d * expf(a.m - m) + b.d * expf(b.m - m)};
}

// What is subtracted before the exponential: the maximum, or 0 where all values are -inf, which keeps NaN out.
__device__ __forceinline__ float base_of(float m) { return m == -INFINITY ? 0.0f : m; }

// Part of a row in registers.
template <class T, int V, int kValues>
struct Held {
  float x[kValues];

  // All loads are issued before the first value is used.
  __device__ __forceinline__ void read(const T* row, int columns, int thread, int threads) {
    constexpr int kWords{V * static_cast<int>(sizeof(T)) / 4};
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kValues; i += V) {
      const int c = (i / V * threads + thread) * V;
      if (c >= columns) continue;
      if constexpr (kWords == 4 && sizeof(T) == 4) {
        read_16(row + c, x[i], x[i + 1], x[i + 2], x[i + 3]);
      } else if constexpr (kWords == 4) {
        read_16(row + c, x[i], x[i + 1], x[i + 2], x[i + 3]);  // two values a word, spread below
      } else {
        x[i] = to_float(row[c]);
      }
    }
    if constexpr (kWords == 4 && sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kValues; i += V) {
        const bool real = (i / V * threads + thread) * V < columns;
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = __float_as_uint(x[i + j]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack2<T>(words[j]);
          x[i + 2 * j] = real ? pair.x : -INFINITY;
          x[i + 2 * j + 1] = real ? pair.y : -INFINITY;
        }
      }
    }
  }
  __device__ __forceinline__ float maximum() const {
    float m = -INFINITY;
#pragma unroll
    for (int i = 0; i < kValues; ++i) m = fmaxf(m, x[i]);
    return m;
  }
  // Sums exp(x - base). Leaves the exponentials in place, so that softmax computes each once, or the differences.
  __device__ __forceinline__ float exponentials(float base, bool logarithm) {
    float d = 0.0f;
    if (logarithm) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        x[i] -= base;
        d += expf(x[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        x[i] = expf(x[i] - base);
        d += x[i];
      }
    }
    return d;
  }
  // `m` is the maximum whose base `exponentials` was given, `row` the merged statistics of the whole row.
  __device__ __forceinline__ void write(T* out, int columns, int thread, int threads, float m, Partial row,
                                        bool logarithm) const {
    const float shift = base_of(row.m);
    const float scale = logarithm ? 1.0f : row.d == 0.0f ? 0.0f : expf(m - shift) / row.d;
    const float offset = !logarithm ? 0.0f : (base_of(m) - shift) - (row.d == 0.0f ? 0.0f : logf(row.d));
#pragma unroll
    for (int i = 0; i < kValues; i += V) {
      const int c = (i / V * threads + thread) * V;
      float v[V];
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = x[i + j] * scale + offset;
      if (c < columns) store(out + c, v);
    }
  }
};

// kRows rows a warp: short rows need several for enough bytes in flight.
template <class T, int V, int kValues, int kRows>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    softmax_warp(const T* x, T* y, int64_t rows, int columns, bool logarithm) {
  dependency_wait();
  dependency_release();
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp) * kRows;
  const int lane = threadIdx.x % kWarp;
  Held<T, V, kValues> held[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) held[r].read(x + (first + r) * columns, first + r < rows ? columns : 0, lane, kWarp);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float m = warp_max(held[r].maximum()), d = warp_sum(held[r].exponentials(base_of(m), logarithm));
    const int count = first + r < rows ? columns : 0;
    held[r].write(y + (first + r) * columns, count, lane, kWarp, m, {m, d}, logarithm);
  }
}

// One row per cluster of `gridDim.x` blocks (1 without clusters), `share` columns a block. The blocks exchange their
// (m, d) through distributed shared memory and merge them in rank order, so all get the same bits.
template <class T, int V, int kValues>
__global__ void __launch_bounds__(kMaxThreads) softmax_block(const T* x, T* y, int columns, int share, bool logarithm) {
  __shared__ float scratch[2][kWarp];
  __shared__ Partial parts[kMaxCluster];
  dependency_wait();
  dependency_release();
  const int first = blockIdx.x * share, count = min(share, columns - first);
  const int64_t start = static_cast<int64_t>(blockIdx.y) * columns + first;
  Held<T, V, kValues> held;
  held.read(x + start, count, threadIdx.x, blockDim.x);
  Partial row{block_max(held.maximum(), scratch[0]), 0.0f};
  row.d = block_sum(held.exponentials(base_of(row.m), logarithm), scratch[1]);
  const float m = row.m;
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();  // every block runs: its shared memory may be written
    if (threadIdx.x < gridDim.x) *cluster.map_shared_rank(&parts[cluster.block_rank()], threadIdx.x) = row;
    cluster.sync();
    row = parts[0];
    for (unsigned i = 1; i < gridDim.x; ++i) row = merge(row, parts[i]);
  }
#endif
  held.write(y + start, count, threadIdx.x, blockDim.x, m, row, logarithm);
}

// Two passes over the row: (m, d) online, then the results.
template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads) softmax_online(const T* x, T* y, int64_t columns, bool logarithm) {
  __shared__ Partial scratch[kWarp];
  dependency_wait();
  dependency_release();
  x += blockIdx.x * columns;
  y += blockIdx.x * columns;
  constexpr int kValues{4 * kWide<T>};
  const int64_t step = static_cast<int64_t>(kValues) * blockDim.x;
  Held<T, V, kValues> held;
  Partial part{-INFINITY, 0.0f};
  for (int64_t c = 0; c < columns; c += step) {
    held.read(x + c, static_cast<int>(min(step, columns - c)), threadIdx.x, blockDim.x);
    const float m = fmaxf(part.m, held.maximum());
    part = merge(part, {m, held.exponentials(base_of(m), false)});
  }
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const auto warp_merge = [](Partial p) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      p = merge(p, {__shfl_xor_sync(kAllLanes, p.m, offset), __shfl_xor_sync(kAllLanes, p.d, offset)});
    return p;
  };
  part = warp_merge(part);
  if (lane == 0) scratch[threadIdx.x / kWarp] = part;
  __syncthreads();
  part = warp_merge(lane < warps ? scratch[lane] : Partial{-INFINITY, 0.0f});
  for (int64_t c = 0; c < columns; c += step) {
    const int count = static_cast<int>(min(step, columns - c));
    held.read(x + c, count, threadIdx.x, blockDim.x);
    held.exponentials(base_of(part.m), logarithm);
    held.write(y + c, count, threadIdx.x, blockDim.x, part.m, part, logarithm);
  }
}

template <class T>
using BlockKernel = void (*)(const T*, T*, int, int, bool);

struct BlockShape {
  int values;  // held by a thread: 8, 16 or 32
  int threads;
};

template <class T>
BlockKernel<T> block_kernel(bool wide, int values) {
  constexpr int kV{kWide<T>};
  if (values == 8) return wide ? softmax_block<T, kV, 8> : softmax_block<T, 1, 8>;
  if (values == 16) return wide ? softmax_block<T, kV, 16> : softmax_block<T, 1, 16>;
  return wide ? softmax_block<T, kV, 32> : softmax_block<T, 1, 32>;
}

// The block that keeps the most columns in flight on one multiprocessor, by occupancy.
template <class T>
BlockShape block_shape(bool wide, int64_t share, const char* op) {
  BlockShape best{32, kMaxThreads};
  int64_t most = 0;
  for (const int values : {8, 16, 32}) {
    const int threads = std::max(2 * kWarp, ceil_div(share, values * kWarp) * kWarp);
    if (threads > kMaxThreads) continue;
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, block_kernel<T>(wide, values), threads, 0), op);
    if (blocks * share > most) most = blocks * share, best = {values, threads};
  }
  return best;
}

// Blocks a row: small shares keep several rows in flight on a multiprocessor (8192 columns a block on the H200).
int cluster_size(int64_t columns) {
  int size = 1;
  while (size < kMaxCluster && columns > size * int64_t{8192}) size *= 2;
  return size;
}

template <class T>
void launch_block(const T* x, T* y, int64_t rows, int64_t columns, bool logarithm, bool wide, int cluster,
                  const Launch& launch) {
  const int64_t v = wide ? kWide<T> : 1;
  const int64_t share = (columns + cluster * v - 1) / (cluster * v) * v;
  const BlockShape shape = block_shape<T>(wide, share, "softmax");
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(shape.threads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (launch.programmatic ? 1 : 0);
  constexpr int64_t kGridRows{65535};
  for (int64_t first = 0; first < rows; first += kGridRows) {
    config.gridDim = dim3(cluster, static_cast<unsigned>(std::min(kGridRows, rows - first)));
    check(cudaLaunchKernelEx(&config, block_kernel<T>(wide, shape.values), x + first * columns, y + first * columns,
                             static_cast<int>(columns), static_cast<int>(share), logarithm),
          "softmax rows=" + std::to_string(rows) + " columns=" + std::to_string(columns));
  }
}

}  // namespace

void softmax(const void* x, void* y, int64_t rows, int64_t columns, bool logarithm, SoftmaxForm form, DType dtype,
             const Launch& launch) {
  if (rows == 0 || columns == 0) return;
  const auto what = [&] {
    return "softmax rows=" + std::to_string(rows) + " columns=" + std::to_string(columns) + " " + name(dtype);
  };
  const bool clusters = device_attribute(cudaDevAttrClusterLaunch) != 0;
  if (form == SoftmaxForm::automatic) {
    form = columns <= kWarp * kMaxValues                                   ? SoftmaxForm::warp
           : columns <= 8192 || (!clusters && columns <= kMaxBlockColumns) ? SoftmaxForm::block
           : clusters && columns <= kMaxCluster * kMaxBlockColumns         ? SoftmaxForm::cluster
                                                                           : SoftmaxForm::online;
  }
  const int64_t limit = form == SoftmaxForm::warp      ? kWarp * kMaxValues
                        : form == SoftmaxForm::block   ? kMaxBlockColumns
                        : form == SoftmaxForm::cluster ? kMaxCluster * kMaxBlockColumns
                                                       : columns;
  if (columns > limit) throw std::invalid_argument(what() + ": this form takes at most " + std::to_string(limit));
  with_dtype(dtype, "softmax", [&]<class T>() {
    constexpr int kV{kWide<T>};
    const bool wide = aligned16(x, columns * sizeof(T)) && aligned16(y, 0);
    const auto* in = static_cast<const T*>(x);
    auto* out = static_cast<T*>(y);
    if (form == SoftmaxForm::warp) {
      const bool few = columns <= kWarp * 8;
      const auto kernel = few ? (wide ? softmax_warp<T, kV, 8, 4> : softmax_warp<T, 1, 8, 4>)
                              : (wide ? softmax_warp<T, kV, 32, 1> : softmax_warp<T, 1, 32, 1>);
      launch_kernel(launch, what, kernel, dim3(ceil_div(rows, kWarpsPerBlock * (few ? 4 : 1))),
                    dim3(kWarpsPerBlock * kWarp), 0, in, out, rows, static_cast<int>(columns), logarithm);
    } else if (form == SoftmaxForm::online) {
      launch_kernel(launch, what, wide ? softmax_online<T, kV> : softmax_online<T, 1>,
                    dim3(static_cast<unsigned>(rows)), dim3(kMaxThreads), 0, in, out, columns, logarithm);
    } else {
      const int cluster = form == SoftmaxForm::block ? 1 : std::max(2, cluster_size(columns));
      launch_block(in, out, rows, columns, logarithm, wide, cluster, launch);
    }
  });
}

}  // namespace nibblelm::cuda
