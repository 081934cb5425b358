// The kernels of a decode step alone, from attention to attention, layer after layer in a graph with programmatic
// launches: microseconds a layer, and a hash of what was computed. For variants of a kernel: what was changed is
// compiled, on a machine with or without a card, and linked to the other objects of the extension, without Python.
//
//   make cuda     (or: nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icsrc scripts/bench_step.cu OBJECTS)
//   build/bench_step phi3-mini|llama-3-8b|llama-3.2-1b ROWS[,ROWS...] [POSITIONS [LAYERS [GROUP [ACTIVATIONS [KV]]]]]
//
// ROWS: sequences, 1 to 2048, one measurement after the other. POSITIONS: tokens that each has, 256 if not said; 0: no
// attention. LAYERS: 0 for the model's; keys and values of fewer may stay in L2, of all and a thousand rows they take
// 70 GB. GROUP: of the int4 weights, -1 for a scale per row, 32, 64 or 128. ACTIVATIONS: 16 or 8 bits. KV: bf16 or
// int8. Weights and inputs are random, the same in every run. The hash is of what four steps compute, the time a median
// of 25 measurements of 5 steps.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <sstream>
#include <vector>

#include "cuda/attention.h"
#include "cuda/common.cuh"
#include "cuda/linear.h"

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
// Device memory of one measurement, and how many times it has drawn random numbers.
struct Memory {
  std::vector<void*> held;
  uint32_t seed{0};

  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    for (void* const pointer : held) cudaFree(pointer);
  }
  template <class T>
  T* get(size_t count) {
    void* to;
    check(cudaMalloc(&to, count * sizeof(T) + 256), "cudaMalloc of " + std::to_string(count * sizeof(T)) + " bytes");
    held.push_back(to);
    return static_cast<T*>(to);
  }
  template <class T>
  T* random(size_t count, float middle = 0.0f, float range = 1.0f) {
    T* const to = get<T>(count);
    fill<<<1024, 256>>>(to, count, ++seed, middle, range);
    return to;
  }
  template <class T>
  T* zeros(size_t count) {
    T* const to = get<T>(count);
    check(cudaMemset(to, 0, count * sizeof(T)), "cudaMemset");
    return to;
  }
  int32_t* upload(const std::vector<int32_t>& from) {
    int32_t* const to = get<int32_t>(from.size());
    check(cudaMemcpy(to, from.data(), from.size() * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
    return to;
  }
};

struct Shape {
  int hidden, inner, heads, kv_heads, head_dim, layers;
};
struct Options {
  int rows, positions, group_size;
  bool eight_bits, int8_cache;
};
struct Weight {
  LinearWeight weight{};
  int* arrivals;

  Weight(Memory& memory, int n, int k, int group_size) {
    weight.format = WeightFormat::int4, weight.n = n, weight.k = k, weight.group_size = group_size;
    weight.scale_dtype = DType::bf16, weight.has_zero = group_size > 0;
    weight.data = memory.random<uint32_t>(static_cast<size_t>(weight.strips()) * weight.steps() * 256);
    const size_t records = static_cast<size_t>(weight.strips()) * weight.groups() * weight.record_bytes() / 2;
    weight.records = memory.random<bf16>(records, 0.0f, 12.0f / static_cast<float>(k));
    arrivals = memory.zeros<int>(weight.strips() + 1);  // and the barrier of a grid
  }
};

// The layers of a model, with the buffers of one step.
struct Step {
  Shape s;
  Options options;
  int room{512}, qkv_width, q_width;
  std::vector<Weight> qkv, o, gate_up, down;
  std::vector<PagedCache> caches;
  bf16 *h[2], *y, *inner, *projected, *attended;
  float *gain, *cos, *sin;
  void* linear_space;
  float* attention_space;
  Memory memory;

  Step(const Shape& shape, const Options& of_step) : s(shape), options(of_step) {
    const int rows = options.rows;
    while (room < options.positions) room *= 2;
    qkv_width = (s.heads + 2 * s.kv_heads) * s.head_dim, q_width = s.heads * s.head_dim;
    const auto draw = [&](int width) { return memory.random<bf16>(static_cast<size_t>(rows) * width); };
    for (bf16*& row : h) row = draw(s.hidden);
    y = draw(s.hidden), inner = draw(s.inner), projected = draw(qkv_width), attended = draw(q_width);
    gain = memory.random<float>(s.hidden, 1.0f, 0.1f);
    cos = memory.random<float>(room * s.head_dim / 2), sin = memory.random<float>(room * s.head_dim / 2);
    const int pages = room / kPage;
    std::vector<int32_t> tables(rows * pages), slots(rows), at(rows, std::max(options.positions, 1) - 1);
    for (int i = 0; i < rows * pages; ++i) tables[i] = i;
    for (int i = 0; i < rows; ++i) slots[i] = i;
    PagedCache cache{};
    cache.tables = memory.upload(tables), cache.slots = memory.upload(slots), cache.positions = memory.upload(at);
    cache.pages = rows * pages, cache.slot_count = rows, cache.table_width = cache.table_stride = pages;
    cache.kv_heads = s.kv_heads, cache.head_dim = s.head_dim,
    cache.dtype = options.int8_cache ? DType::i8 : DType::bf16;
    for (int layer = 0; layer < s.layers; ++layer) {
      const int group = options.group_size;
      qkv.emplace_back(memory, qkv_width, s.hidden, group), o.emplace_back(memory, s.hidden, q_width, group);
      gate_up.emplace_back(memory, 2 * s.inner, s.hidden, group), down.emplace_back(memory, s.hidden, s.inner, group);
      const size_t heads = static_cast<size_t>(rows) * room * s.kv_heads, values = heads * s.head_dim;
      if (options.int8_cache) {
        cache.k = memory.random<uint32_t>(values / 4), cache.v = memory.random<uint32_t>(values / 4);
        cache.k_scales = memory.random<float>(heads, 0.01f, 0.005f);
        cache.v_scales = memory.random<float>(heads, 0.01f, 0.005f);
      } else {
        cache.k = memory.random<bf16>(values), cache.v = memory.random<bf16>(values);
      }
      caches.push_back(cache);
    }
    int64_t most{0};
    for (const Weight* const w : {&qkv[0], &o[0], &gate_up[0], &down[0]}) {
      const int64_t bytes =
          linear_workspace(w->weight, y, w->weight.k, DType::bf16, rows, options.eight_bits);  // y: as aligned as all
      most = std::max(most, bytes);
    }
    linear_space = memory.get<char>(most);
    attention_space = reinterpret_cast<float*>(memory.get<char>(attention_workspace(attention_of(0))));
  }

  AttentionArgs attention_of(int layer) const {
    AttentionArgs a{};
    a.q = projected, a.out = attended, a.workspace = attention_space;
    a.cache = caches[layer], a.q_stride = qkv_width, a.rows = options.rows, a.heads = s.heads, a.scale = 0.1f;
    a.type = DType::bf16;
    return a;
  }

  LinearStep linear_of(const Weight& w, const bf16* x, bf16* to, int width, const bf16* residual = nullptr,
                       bf16* sum = nullptr) const {
    LinearArgs a{};
    a.x = x, a.x_stride = w.weight.k, a.x_dtype = a.y_dtype = DType::bf16;
    a.y = to, a.y_stride = width, a.m = options.rows, a.workspace = linear_space, a.arrivals = w.arrivals;
    a.eps = 1e-5f, a.eight_bits = options.eight_bits;
    a.gain = residual == nullptr ? nullptr : gain, a.residual = residual, a.residual_stride = s.hidden, a.h = sum;
    return {w.weight, a};
  }
  void launch(const Launch& launch) const {
    for (int layer = 0; layer < s.layers; ++layer) {
      if (options.positions > 0) {
        const AttentionArgs a = attention_of(layer);
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

void measure(const std::string& name, const Options& options, int layers) {
  const std::map<std::string, Shape> shapes{{"phi3-mini", {3072, 8192, 32, 32, 96, 32}},
                                            {"llama-3-8b", {4096, 14336, 32, 8, 128, 32}},
                                            {"llama-3.2-1b", {2048, 8192, 32, 8, 64, 16}}};
  const auto found = shapes.find(name);
  if (found == shapes.end()) throw std::invalid_argument(name + ": phi3-mini, llama-3-8b or llama-3.2-1b");
  Shape shape = found->second;
  if (layers > 0) shape.layers = layers;
  const Step step(shape, options);
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
  std::vector<uint16_t> sum(options.rows * shape.hidden);
  check(cudaMemcpy(sum.data(), step.h[0], sum.size() * 2, cudaMemcpyDeviceToHost), "cudaMemcpy");
  uint64_t hash{1469598103934665603ull};  // FNV-1a
  for (const uint16_t bits : sum) hash = (hash ^ bits) * 1099511628211ull;

  constexpr int kSteps{5}, kTimes{25};
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
  std::printf(
      "%s, %d rows of %d, int4 %s, %d-bit activations, %s cache: %.2f us a layer (%.2f to %.2f), hash %016llx\n",
      name.c_str(), options.rows, options.positions, options.group_size > 0 ? "in groups" : "per row",
      options.eight_bits ? 8 : 16, options.int8_cache ? "int8" : "bf16", times[kTimes / 2], times[0], times[kTimes - 1],
      static_cast<unsigned long long>(hash));
  std::fflush(stdout);
  check(cudaEventDestroy(begin), "cudaEventDestroy"), check(cudaEventDestroy(end), "cudaEventDestroy");
  check(cudaGraphExecDestroy(program), "cudaGraphExecDestroy"), check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

int number(const std::string& what, const std::string& word, int least, int most) {
  int value{0};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc{} || end != word.data() + word.size() || value < least || value > most) {
    throw std::invalid_argument(what + " '" + word + "': a number from " + std::to_string(least) + " to " +
                                std::to_string(most));
  }
  return value;
}

// Which of the choices it is; the first one where there is no such word.
size_t one_of(const std::string& what, const std::vector<std::string>& words, size_t at,
              const std::vector<std::string>& choices) {
  if (at >= words.size()) return 0;
  const auto found = std::find(choices.begin(), choices.end(), words[at]);
  if (found != choices.end()) return found - choices.begin();
  std::string all;
  for (const std::string& choice : choices) all += (all.empty() ? "" : ", ") + choice;
  throw std::invalid_argument(what + " '" + words[at] + "': one of " + all);
}

void run(const std::vector<std::string>& words) {
  constexpr int kGroups[]{0, 32, 64, 128};
  Options options{};
  options.positions = words.size() > 2 ? number("POSITIONS", words[2], 0, 1 << 20) : 256;
  const int layers = words.size() > 3 ? number("LAYERS", words[3], 0, 1000) : 0;
  options.group_size = kGroups[one_of("GROUP", words, 4, {"-1", "32", "64", "128"})];
  options.eight_bits = one_of("ACTIVATIONS", words, 5, {"16", "8"}) == 1;
  options.int8_cache = one_of("KV", words, 6, {"bf16", "int8"}) == 1;
  std::istringstream counts(words[1]);
  std::vector<int> rows;
  for (std::string count; std::getline(counts, count, ',');) rows.push_back(number("ROWS", count, 1, 2048));
  if (rows.empty()) number("ROWS", "", 1, 2048);
  for (const int count : rows) {
    options.rows = count;
    measure(words[0], options, layers);
  }
}

}  // namespace
}  // namespace nibblelm::cuda

int main(int count, char** words) {
  if (count < 3 || count > 8) {
    return std::puts("usage: bench_step SHAPE ROWS[,ROWS...] [POSITIONS [LAYERS [GROUP [ACTIVATIONS [KV]]]]]"), 2;
  }
  try {
    nibblelm::cuda::run(std::vector<std::string>(words + 1, words + count));
    return 0;
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "bench_step: %s\n", error.what()), 1;
  }
}
