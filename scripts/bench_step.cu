// The kernels of a decode step alone, from attention to attention, layer after layer in a graph with programmatic
// launches: microseconds a layer, and a hash of what was computed. For variants of a kernel: one file, compiled in a
// minute on a machine with or without a card, without Python.
//
//   nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icsrc -DROWS=1 -DGROUP=0 scripts/bench_step.cu -o step
//   ./step phi3-mini|llama-3-8b|llama-3.2-1b [POSITIONS [LAYERS]]; 0 POSITIONS: without attention
//
// ROWS: 1 to 8 sequences of POSITIONS tokens each, 256 if not said; GROUP: of the int4 weights, 0: a scale per row.
// Weights are random; those of the LAYERS that are taken if none are said are more than L2 holds. The hash is of what
// three steps compute, the time a median of 40 measurements of 20 steps.
#include <algorithm>
#include <cstdio>
#include <map>
#include <vector>

#include "cuda/linear_decode.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef GROUP
#define GROUP 0
#endif

namespace nibblelm::cuda {

// Of all formats and numbers of rows only what is measured is compiled.
template <>
void launch_decode_format<WeightFormat::int4>(const DecodeChain& chain, int, const Launch& launch,
                                              const std::string& what) {
  launch_decode<WeightFormat::int4, (GROUP > 0), 2, decode_columns(ROWS, true)>(chain, launch, what);
}
#define NOT_COMPILED(name, args, format)                                                      \
  template <>                                                                                 \
  void name<WeightFormat::format>(const args&, int, const Launch&, const std::string& what) { \
    throw std::runtime_error(what + ": not compiled here");                                   \
  }
NOT_COMPILED(launch_decode_format, DecodeChain, int8)
NOT_COMPILED(launch_decode_format, DecodeChain, f16)
NOT_COMPILED(launch_decode_format, DecodeChain, bf16)
NOT_COMPILED(launch_decode_format, DecodeChain, f32)
NOT_COMPILED(launch_large_format, LargeArgs, int4)
NOT_COMPILED(launch_large_format, LargeArgs, int8)
NOT_COMPILED(launch_large_format, LargeArgs, f16)
NOT_COMPILED(launch_large_format, LargeArgs, bf16)

}  // namespace nibblelm::cuda

// Here, so that they find the functions above.
#include "cuda/activations.cu"
#include "cuda/architecture.cu"
#include "cuda/attention_rope.cu"
#include "cuda/linear.cu"

namespace nibblelm::cuda {
namespace {

__device__ uint32_t random_bits(size_t i, uint32_t seed) {
  uint64_t x = i * 0x9E3779B97F4A7C15ull + seed;
  x ^= x >> 29, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 32;
  return static_cast<uint32_t>(x);
}
// Words as they come, or numbers within `range` of `middle`.
template <class T>
__global__ void fill(T* to, size_t count, uint32_t seed, float middle, float range) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    const uint32_t bits = random_bits(i, seed);
    if constexpr (std::is_same_v<T, uint32_t>) {
      to[i] = bits;
    } else {
      to[i] = from_float<T>(middle + range * (static_cast<float>(bits & 0xffff) / 32768.0f - 1.0f));
    }
  }
}
template <class T>
T* random(size_t count, float middle = 0.0f, float range = 1.0f) {
  static uint32_t seed{0};
  T* to;
  check(cudaMalloc(&to, count * sizeof(T) + 256), "cudaMalloc");
  fill<<<1024, 256>>>(to, count, ++seed, middle, range);
  return to;
}
template <class T>
T* zeros(size_t count) {
  T* to;
  check(cudaMalloc(&to, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(to, 0, count * sizeof(T)), "cudaMemset");
  return to;
}

struct Shape {
  int hidden, inner, heads, kv_heads, head_dim, layers;
};
struct Weight {
  LinearWeight weight{};
  int* arrivals;

  Weight(int n, int k) {
    weight.format = WeightFormat::int4, weight.n = n, weight.k = k, weight.group_size = GROUP;
    weight.scale_dtype = DType::bf16, weight.has_zero = GROUP > 0;
    weight.data = random<uint32_t>(static_cast<size_t>(weight.strips()) * weight.steps() * 256);
    const size_t records = static_cast<size_t>(weight.strips()) * weight.groups() * weight.record_bytes() / 2;
    weight.records = random<bf16>(records, 0.0f, 12.0f / static_cast<float>(k));
    arrivals = zeros<int>(weight.strips() + 1);
  }
};

// The layers of a model, with the buffers of one step.
struct Step {
  Shape s;
  int positions, room{512}, qkv_width, q_width;
  std::vector<Weight> qkv, o, gate_up, down;
  std::vector<PagedCache> caches;
  bf16 *h[2], *y, *inner, *projected, *attended;
  float *gain, *cos, *sin;
  char* workspace;

  Step(const Shape& shape, int positions_of_row) : s(shape), positions(positions_of_row) {
    while (room < positions) room *= 2;
    qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim, q_width = s.heads * s.head_dim;
    for (bf16*& row : h) row = random<bf16>(ROWS * s.hidden);
    y = random<bf16>(ROWS * s.hidden), inner = random<bf16>(ROWS * s.inner);
    projected = random<bf16>(ROWS * qkv_width), attended = random<bf16>(ROWS * q_width);
    gain = random<float>(s.hidden, 1.0f, 0.1f), workspace = zeros<char>(256 << 20);
    cos = random<float>(room * s.head_dim / 2), sin = random<float>(room * s.head_dim / 2);
    const int pages = room / kPage;
    std::vector<int32_t> tables(ROWS * pages), slots(ROWS), at(ROWS, std::max(positions, 1) - 1);
    for (int i = 0; i < ROWS * pages; ++i) tables[i] = i;
    for (int i = 0; i < ROWS; ++i) slots[i] = i;
    const auto upload = [](const std::vector<int32_t>& from) {
      int32_t* const to = zeros<int32_t>(from.size());
      check(cudaMemcpy(to, from.data(), from.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
      return to;
    };
    PagedCache cache{};
    cache.tables = upload(tables), cache.slots = upload(slots), cache.positions = upload(at);
    cache.pages = ROWS * pages, cache.slot_count = ROWS, cache.table_width = cache.table_stride = pages;
    cache.kv_heads = s.kv_heads, cache.head_dim = s.head_dim, cache.dtype = DType::bf16;
    for (int layer = 0; layer < s.layers; ++layer) {
      qkv.emplace_back(qkv_width, s.hidden), o.emplace_back(s.hidden, q_width);
      gate_up.emplace_back(2 * s.inner, s.hidden), down.emplace_back(s.hidden, s.inner);
      const size_t values = static_cast<size_t>(ROWS) * room * s.kv_heads * s.head_dim;
      cache.k = random<bf16>(values), cache.v = random<bf16>(values);
      caches.push_back(cache);
    }
  }

  LinearStep linear_of(const Weight& w, const bf16* x, bf16* to, int width, const bf16* residual = nullptr,
                       bf16* sum = nullptr) const {
    LinearArgs a{};
    a.x = x, a.x_stride = w.weight.k, a.x_dtype = a.y_dtype = DType::bf16;
    a.y = to, a.y_stride = width, a.m = ROWS, a.workspace = workspace, a.arrivals = w.arrivals, a.eps = 1e-5f;
    a.gain = residual == nullptr ? nullptr : gain, a.residual = residual, a.residual_stride = s.hidden, a.h = sum;
    return {w.weight, a};
  }
  void launch(const Launch& launch) const {
    for (int layer = 0; layer < s.layers; ++layer) {
      if (positions > 0) {
        AttentionArgs a{};
        a.q = projected, a.out = attended, a.workspace = reinterpret_cast<float*>(workspace + (128 << 20));
        a.cache = caches[layer], a.q_stride = qkv_width, a.rows = ROWS, a.heads = s.heads, a.scale = 0.1f;
        a.type = DType::bf16;
        const RopeTable table{a.cache.positions, cos, sin, s.head_dim / 2, 1, false, room};
        attention_rope(a, table, nullptr, nullptr, 0.0f, false, launch);
      }
      LinearStep steps[]{linear_of(o[layer], attended, y, s.hidden),
                         linear_of(gate_up[layer], y, inner, s.inner, h[0], h[1]),
                         linear_of(down[layer], inner, y, s.hidden),
                         linear_of(qkv[(layer + 1) % s.layers], y, projected, qkv_width, h[1], h[0])};
      steps[1].args.gate = Gate::silu;
      linear(steps, launch);
    }
  }
};

int run(const std::string& name, int positions, int layers) {
  const std::map<std::string, Shape> shapes{{"phi3-mini", {3072, 8192, 32, 32, 96, 16}},
                                            {"llama-3-8b", {4096, 14336, 32, 8, 128, 12}},
                                            {"llama-3.2-1b", {2048, 8192, 32, 8, 64, 16}}};
  const auto found = shapes.find(name);
  if (found == shapes.end()) throw std::invalid_argument(name + ": phi3-mini, llama-3-8b or llama-3.2-1b");
  Shape shape = found->second;
  if (layers > 0) shape.layers = layers;
  const Step step(shape, positions);
  cudaStream_t stream;
  check(cudaDeviceSynchronize(), name);
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  step.launch({stream, false});  // loads the kernels
  check(cudaStreamSynchronize(stream), name);
  cudaGraph_t graph;
  cudaGraphExec_t program;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  step.launch({stream, true});
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&program, graph, 0), "cudaGraphInstantiate");
  const auto replay = [&](int times) {
    for (int i = 0; i < times; ++i) check(cudaGraphLaunch(program, stream), "cudaGraphLaunch");
  };
  replay(3);
  check(cudaStreamSynchronize(stream), name);
  std::vector<uint16_t> sum(ROWS * shape.hidden);
  check(cudaMemcpy(sum.data(), step.h[0], sum.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  uint64_t hash{1469598103934665603ull};  // FNV-1a
  for (const uint16_t bits : sum) hash = (hash ^ bits) * 1099511628211ull;

  constexpr int kSteps{20}, kTimes{40};
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  replay(3 * kSteps);
  std::vector<float> times;
  for (int i = 0; i < kTimes; ++i) {
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    replay(kSteps);
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), name);
    float ms;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    times.push_back(ms * 1000.0f / (kSteps * shape.layers));
  }
  std::sort(times.begin(), times.end());
  std::printf("%s, %d rows of %d, int4 %s: %.2f us a layer (%.2f to %.2f), hash %016llx\n", name.c_str(), ROWS,
              positions, GROUP > 0 ? "in groups" : "per row", times[kTimes / 2], times[0], times[kTimes - 1],
              static_cast<unsigned long long>(hash));
  return 0;
}

}  // namespace
}  // namespace nibblelm::cuda

int main(int count, char** words) {
  if (count < 2) return std::puts("usage: step SHAPE [POSITIONS [LAYERS]]"), 2;
  try {
    return nibblelm::cuda::run(words[1], count > 2 ? std::atoi(words[2]) : 256, count > 3 ? std::atoi(words[3]) : 0);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "step: %s\n", error.what()), 1;
  }
}
