// softmax and log_softmax: every row is read once and written once, held on the chip by a warp, a block, or a
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
constexpr int kClusterThreads{256};
constexpr int kClusterValues{24};  // the others of a thread's values are in shared memory
constexpr int kClusterBlocks{4};   // on a multiprocessor: 256 KB of long fp32 rows in flight on each

// Maximum m and sum d of exp(x - m) of part of a row. Merging is associative and commutative; (-inf, 0) is neutral.
struct Partial {
  float m;
  float d;
};

__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

// What is subtracted before the exponential: the maximum, or 0 where all values are -inf, which keeps NaN out.
__device__ __forceinline__ float base_of(float m) { return m == -INFINITY ? 0.0f : m; }

__device__ __forceinline__ Partial merge(Partial a, Partial b) {
  const float m = fmaxf(a.m, b.m), base = base_of(m);
  return {m, a.d * exp_fast(a.m - base) + b.d * exp_fast(b.m - base)};
}

// The same over a warp's lanes, of which kLanes share a row; the order of additions is fixed.
template <int kLanes = kWarp>
__device__ __forceinline__ Partial merge_lanes(Partial part) {
  const auto over_lanes = [](float v, auto op) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(kAllLanes, v, offset));
    return v;
  };
  const float m = over_lanes(part.m, [](float a, float b) { return fmaxf(a, b); });
  return {m, over_lanes(part.d * exp_fast(part.m - base_of(m)), [](float a, float b) { return a + b; })};
}

// One (m, d) per warp, by block and warp.
using Parts = Partial[kMaxCluster][kWarp];

// The statistics of a row from those of all threads of its block or cluster, with one barrier.
__device__ __forceinline__ Partial merge_threads(Parts& parts, Partial part, int blocks) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  part = merge_lanes(part);
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    const cg::cluster_group cluster = cg::this_cluster();
    cluster.barrier_wait();  // for what arrived at the kernel's start: every block runs
    if (lane < blocks) *cluster.map_shared_rank(&parts[cluster.block_rank()][warp], lane) = part;
    cluster.sync();
  } else
#endif
  {
    if (lane == 0) parts[0][warp] = part;
    __syncthreads();
  }
  Partial row{-INFINITY, 0.0f};
#pragma unroll
  for (int block = 0; block < kMaxCluster; ++block)
    if (block < blocks && lane < warps) row.m = fmaxf(row.m, parts[block][lane].m);
  const float base = base_of(row.m);
#pragma unroll
  for (int block = 0; block < kMaxCluster; ++block)
    if (block < blocks && lane < warps) row.d += parts[block][lane].d * exp_fast(parts[block][lane].m - base);
  return merge_lanes(row);
}

// Turns exponentials of, or differences to, a thread's own base into results of the row.
struct Scaling {
  float scale;
  float offset;

  __device__ __forceinline__ Scaling(float m, Partial row, bool logarithm) {
    const float shift = base_of(row.m);
    scale = logarithm ? 1.0f : row.d == 0.0f ? 0.0f : exp_fast(m - shift) / row.d;
    offset = !logarithm ? 0.0f : (base_of(m) - shift) - (row.d == 0.0f ? 0.0f : logf(row.d));
  }
};

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
      if constexpr (kWords == 4) {  // 16-bit values come two a word and are spread below
        read_16(row + c, x[i], x[i + 1], x[i + 2], x[i + 3]);
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
        d += exp_fast(x[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        x[i] = exp_fast(x[i] - base);
        d += x[i];
      }
    }
    return d;
  }
  // `m` is the maximum whose base `exponentials` was given, `row` the merged statistics of the whole row.
  __device__ __forceinline__ void write(T* out, int columns, int thread, int threads, float m, Partial row,
                                        bool logarithm) const {
    const Scaling to(m, row, logarithm);
#pragma unroll
    for (int i = 0; i < kValues; i += V) {
      const int c = (i / V * threads + thread) * V;
      float v[V];
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = x[i + j] * to.scale + to.offset;
      if (c < columns) store(out + c, v);
    }
  }
};

// kLanes lanes a row, so that a warp has enough bytes of short rows in flight and spends few shuffles on them.
template <class T, int V, int kValues, int kLanes>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    softmax_warp(const T* x, T* y, int64_t rows, int columns, bool logarithm) {
  dependency_wait();
  dependency_release();
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock * kWarp + threadIdx.x) / kLanes;
  const int lane = threadIdx.x % kLanes, count = row < rows ? columns : 0;
  Held<T, V, kValues> held;
  held.read(x + row * columns, count, lane, kLanes);
  const float m = held.maximum();
  const Partial part{m, held.exponentials(base_of(m), logarithm)};
  held.write(y + row * columns, count, lane, kLanes, m, merge_lanes<kLanes>(part), logarithm);
}

// One row per block or, of gridDim.x > 1, per cluster, `share` columns a block, in registers. The blocks of a cluster
// exchange (m, d) through distributed shared memory; all merge them in the same order, so all get the same bits.
template <class T, int V, int kValues>
__global__ void __launch_bounds__(kMaxThreads) softmax_block(const T* x, T* y, int columns, int share, bool logarithm) {
  __shared__ Parts parts;
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) cg::this_cluster().barrier_arrive();
#endif
  dependency_wait();
  if (gridDim.x == 1) dependency_release();
  const int first = blockIdx.x * share, count = min(share, columns - first);
  const int64_t start = static_cast<int64_t>(blockIdx.y) * columns + first;
  Held<T, V, kValues> held;
  held.read(x + start, count, threadIdx.x, blockDim.x);
  const float m = held.maximum();
  const Partial part{m, held.exponentials(base_of(m), logarithm)};
  const Partial row = merge_threads(parts, part, static_cast<int>(gridDim.x));
  held.write(y + start, count, threadIdx.x, blockDim.x, m, row, logarithm);
}

// The same for aligned rows, by more columns a thread than fit its registers: the others are in shared memory, copied
// there and read again by the same thread. No early release: with clusters waiting beside it this kernel was 10 %
// slower.
template <class T>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocks)
    softmax_cluster(const T* x, T* y, int columns, int share, bool logarithm) {
#if __CUDA_ARCH__ >= 900
  constexpr int kV{kWide<T>}, kHeld{kClusterThreads * kClusterValues};
  extern __shared__ __align__(16) unsigned char storage[];
  __shared__ Parts parts;
  T* const others = reinterpret_cast<T*>(storage) + threadIdx.x * kV;
  cg::this_cluster().barrier_arrive();
  dependency_wait();
  const int first = blockIdx.x * share, count = min(share, columns - first);
  const int64_t start = static_cast<int64_t>(blockIdx.y) * columns + first;
  // f(values of this thread, place) of the part in shared memory, `place` from its start and the thread's.
  const int end = count - kHeld - static_cast<int>(threadIdx.x) * kV;
  const auto each = [&](auto&& f) {
#pragma unroll 4
    for (int c = 0; c < end; c += kClusterThreads * kV) {
      float v[kV];
      load(others + c, v);
      f(v, c);
    }
  };
  const int64_t rest = start + kHeld + threadIdx.x * kV;
#pragma unroll 8
  for (int c = 0; c < end; c += kClusterThreads * kV) copy_async_16(shared_address(others + c), x + rest + c);
  copy_async_commit();
  Held<T, kV, kClusterValues> held;
  held.read(x + start, min(count, kHeld), threadIdx.x, kClusterThreads);
  float m = held.maximum();
  copy_async_wait<0>();
  each([&](const float (&v)[kV], int) {
#pragma unroll
    for (int i = 0; i < kV; ++i) m = fmaxf(m, v[i]);
  });
  const float base = base_of(m);
  float d = held.exponentials(base, logarithm);
  each([&](const float (&v)[kV], int) {
#pragma unroll
    for (int i = 0; i < kV; ++i) d += exp_fast(v[i] - base);
  });
  const Partial row = merge_threads(parts, {m, d}, static_cast<int>(gridDim.x));
  held.write(y + start, min(count, kHeld), threadIdx.x, kClusterThreads, m, row, logarithm);
  const Scaling to(m, row, logarithm);
  each([&](float (&v)[kV], int c) {
#pragma unroll
    for (int i = 0; i < kV; ++i) v[i] = (logarithm ? v[i] - base : exp_fast(v[i] - base)) * to.scale + to.offset;
    store(y + rest + c, v);
  });
#endif
}

// Two passes over the row: (m, d) online, then the results.
template <class T, int V>
__global__ void __launch_bounds__(kMaxThreads) softmax_online(const T* x, T* y, int64_t columns, bool logarithm) {
  __shared__ Parts parts;
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
  part = merge_threads(parts, part, 1);
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

// Blocks a row: up to 16384 columns a block, of which kClusterBlocks fit on a multiprocessor of the H200.
int cluster_size(int64_t columns) {
  int size = 2;
  while (size < kMaxCluster && columns > size * int64_t{16384}) size *= 2;
  return size;
}

// Launch attributes of a grid of clusters.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int cluster, int threads, size_t shared, const Launch& launch) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = attributes;
    config.numAttrs = launch.programmatic ? 2 : 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
};

template <class T, class What>
void launch_block(const T* x, T* y, int64_t rows, int64_t columns, bool logarithm, bool wide, int cluster,
                  const Launch& launch, What what) {
  const int64_t v = wide ? kWide<T> : 1;
  const int64_t share = (columns + cluster * v - 1) / (cluster * v) * v;
  const BlockShape shape = block_shape<T>(wide, share, "softmax");
  BlockKernel<T> kernel = block_kernel<T>(wide, shape.values);
  int threads = shape.threads, shared = 0;
  if (cluster > 1 && wide && share > kClusterThreads * kClusterValues) {
    kernel = softmax_cluster<T>;
    threads = kClusterThreads;
    shared = static_cast<int>((share - kClusterThreads * kClusterValues) * sizeof(T));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), what());
  }
  ClusterLaunch clusters(cluster, threads, shared, launch);
  constexpr int64_t kGridRows{65535};
  for (int64_t first = 0; first < rows; first += kGridRows) {
    clusters.config.gridDim = dim3(cluster, static_cast<unsigned>(std::min(kGridRows, rows - first)));
    check(cudaLaunchKernelEx(&clusters.config, kernel, x + first * columns, y + first * columns,
                             static_cast<int>(columns), static_cast<int>(share), logarithm),
          what());
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
    form = columns <= kWarp * kMaxValues                           ? SoftmaxForm::warp
           : columns <= kMaxBlockColumns                           ? SoftmaxForm::block
           : clusters && columns <= kMaxCluster * kMaxBlockColumns ? SoftmaxForm::cluster
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
      const int lanes = columns <= 128 ? 8 : columns <= 256 ? 16 : 32;
      const auto kernel = lanes == 8       ? (wide ? softmax_warp<T, kV, 16, 8> : softmax_warp<T, 1, 16, 8>)
                          : lanes == 16    ? (wide ? softmax_warp<T, kV, 16, 16> : softmax_warp<T, 1, 16, 16>)
                          : columns <= 512 ? (wide ? softmax_warp<T, kV, 16, 32> : softmax_warp<T, 1, 16, 32>)
                                           : (wide ? softmax_warp<T, kV, 32, 32> : softmax_warp<T, 1, 32, 32>);
      launch_kernel(launch, what, kernel, dim3(ceil_div(rows, kWarpsPerBlock * kWarp / lanes)),
                    dim3(kWarpsPerBlock * kWarp), 0, in, out, rows, static_cast<int>(columns), logarithm);
    } else if (form == SoftmaxForm::online) {
      launch_kernel(launch, what, wide ? softmax_online<T, kV> : softmax_online<T, 1>,
                    dim3(static_cast<unsigned>(rows)), dim3(kMaxThreads), 0, in, out, columns, logarithm);
    } else {
      const int cluster = form == SoftmaxForm::block ? 1 : cluster_size(columns);
      launch_block(in, out, rows, columns, logarithm, wide, cluster, launch, what);
    }
  });
}

}  // namespace nibblelm::cuda
