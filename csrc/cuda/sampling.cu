// Sampling without a sort. Weights exp((x - max) / temperature) are integers in units of 2^-40, so every sum is exact
// and independent of order; top-k and top-p thresholds come from a radix search over the bits of the logits, by counts
// or by weights. A cluster of blocks shares a row, keeps it in registers and adds up its histograms through distributed
// shared memory; without clusters one block walks over a copy of the row.
#include <cooperative_groups.h>

#include <algorithm>
#include <bit>

#include "ordered.cuh"
#include "sampling.h"
#include "vector.cuh"

namespace nibblelm::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads{1024};
constexpr int kMaxBlocks{8};  // of a cluster
constexpr int kBinBits{11};
constexpr int kBins{1 << kBinBits};
constexpr float kUnits{1099511627776.0f};  // 2^40: a sum over 2^18 tokens stays below 2^58
using Mass = unsigned long long;

struct Shared {
  unsigned low[kBins];  // the bins' sums modulo 2^32: atomics on 64 bits of shared memory are loops
  unsigned high[kBins];
  Mass warps[kWarp];
  uint64_t peak;
  Mass total;    // this block's contribution to a sum over the cluster
  Mass segment;  // sum over the cluster of the bins that this block adds up
  Mass found_above;
  uint32_t found_digit;
};

// The blocks of one row. On devices without clusters a row has one block.
struct Team {
  Shared& shared;
  int rank;
  int size;

  __device__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) return cg::this_cluster().sync();
#endif
    __syncthreads();
  }
  __device__ const Shared& of(int other) const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) return *cg::this_cluster().map_shared_rank(&shared, other);
#endif
    return shared;
  }
};

__device__ __forceinline__ void add_to_bin(Shared& shared, unsigned bin, Mass mass) {
  const auto low = static_cast<unsigned>(mass);
  const unsigned before = atomicAdd(shared.low + bin, low);
  const unsigned high = static_cast<unsigned>(mass >> 32) + (before + low < before ? 1u : 0u);
  if (high != 0) atomicAdd(shared.high + bin, high);
}

// Inclusive sum over the block's threads up to this one, in thread order.
__device__ __forceinline__ Mass block_scan(Mass x, Mass* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const auto warp_scan = [lane](Mass v) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const Mass below = __shfl_up_sync(kAllLanes, v, offset);
      if (lane >= offset) v += below;
    }
    return v;
  };
  x = warp_scan(x);
  __syncthreads();
  if (lane == kWarp - 1) scratch[warp] = x;
  __syncthreads();
  const Mass sums = warp_scan(scratch[lane]);
  const Mass before = __shfl_sync(kAllLanes, sums, max(warp - 1, 0));
  return warp == 0 ? x : x + before;
}

// Sum of every thread before this one in the row (`before`) and over the row (`all`): blocks in rank order, threads
// within them in theirs.
__device__ __forceinline__ void team_scan(const Team& team, Mass x, Mass& before, Mass& all) {
  const Mass inclusive = block_scan(x, team.shared.warps);
  if (threadIdx.x == kThreads - 1) team.shared.total = inclusive;
  team.sync();
  before = inclusive - x, all = 0;
  for (int other = 0; other < team.size; ++other) {
    const Mass total = team.of(other).total;
    if (other < team.rank) before += total;
    all += total;
  }
  team.sync();
}

struct Threshold {
  uint32_t key;
  Mass above;  // mass of larger keys
  Mass total;  // mass of all
};

// The penalised logits that this thread owns: kPer neighbouring ids, in registers, or (kPer = 0) the part of a copy of
// the row in device memory.
template <int kPer>
struct Owned {
  float x[kPer > 0 ? kPer : 1];
  float* copy;
  int first;  // id of the first
  int count;

  // f(value, id), in the order of ids.
  template <class F>
  __device__ __forceinline__ void each(F&& f) const {
    if constexpr (kPer > 0) {
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (i < count) f(x[i], first + i);
    } else {
      for (int i = 0; i < count; ++i) f(copy[i], first + i);
    }
  }
};

// The key at which the mass, summed from the largest key down, reaches target_of(total): mass above it is less.
// mass_of(key) is what one element adds; target in 1..total.
template <class Row, class MassOf, class TargetOf>
__device__ __forceinline__ Threshold radix_search(const Team& team, const Row& row, MassOf mass_of,
                                                  TargetOf target_of) {
  Shared& shared = team.shared;
  constexpr int kOwn{kBins / kThreads};
  constexpr int kShifts[]{21, 10, 0};  // digits of 11, 11 and 10 bits
  Threshold result{0, 0, 0};
  Mass target = 0;
#pragma unroll
  for (int pass = 0; pass < 3; ++pass) {
    const int shift = kShifts[pass], above_shift = pass == 0 ? 0 : kShifts[pass - 1];
    const unsigned digits = pass == 2 ? kBins / 2 - 1 : kBins - 1;
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared.low[i] = shared.high[i] = 0;
    __syncthreads();
    row.each([&](float x, int) {
      const uint32_t key = ordered_key(x);
      if (pass > 0 && (key ^ result.key) >> above_shift != 0) return;
      const Mass mass = mass_of(key);
      if (mass != 0) add_to_bin(shared, key >> shift & digits, mass);
    });
    team.sync();
    // Each block adds up its segment of the bins, rank 0 the highest; threads take bins in falling order.
    const int segment = kBins / team.size, per_thread = (segment + kThreads - 1) / kThreads;
    const int top_bin = kBins - 1 - team.rank * segment - static_cast<int>(threadIdx.x) * per_thread;
    const int bins = static_cast<int>(threadIdx.x) * per_thread < segment ? per_thread : 0;
    Mass sums[kOwn]{}, own = 0;
#pragma unroll
    for (int b = 0; b < kOwn; ++b) {
      if (b >= bins) continue;
      for (int other = 0; other < team.size; ++other) {
        const Shared& there = team.of(other);
        sums[b] += (static_cast<Mass>(there.high[top_bin - b]) << 32) + there.low[top_bin - b];
      }
      own += sums[b];
    }
    const Mass inclusive = block_scan(own, shared.warps);
    if (threadIdx.x == kThreads - 1) shared.segment = inclusive;
    team.sync();
    Mass before = result.above, all = 0;  // before this block's segment
    for (int other = 0; other < team.size; ++other) {
      const Mass there = team.of(other).segment;
      if (other < team.rank) before += there;
      all += there;
    }
    if (pass == 0) {
      result.total = all;
      target = target_of(all);
    }
    Mass above = before + inclusive - own;
    if (threadIdx.x == 0) shared.found_digit = kBins;  // no digit found here
    __syncthreads();
#pragma unroll
    for (int b = 0; b < kOwn; ++b) {
      if (above < target && above + sums[b] >= target) {
        shared.found_digit = top_bin - b;
        shared.found_above = above;
      }
      above += sums[b];
    }
    team.sync();
    uint32_t digit = 0;
    for (int other = 0; other < team.size; ++other) {
      if (team.of(other).found_digit == kBins) continue;
      digit = team.of(other).found_digit;
      result.above = team.of(other).found_above;
    }
    result.key |= digit << shift;
  }
  team.sync();  // every block has read what was found
  return result;
}

// Philox-4x32-10, first word (Salmon et al. 2011).
__device__ __forceinline__ uint32_t philox(uint64_t seed, uint64_t step) {
  uint32_t c0 = static_cast<uint32_t>(step), c1 = static_cast<uint32_t>(step >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c0;
}

// Bias, repetition penalty (prompt and output), frequency and presence penalties (output) on logit x of a token.
__device__ __forceinline__ float penalised(const SamplingArgs& a, float x, int64_t row, int token) {
  const int64_t i = row * a.vocab + token;
  if (a.bias != nullptr) x += a.bias[i];
  const int count = a.counts == nullptr ? 0 : a.counts[i];
  const float repetition = a.repetition[row];
  if (repetition != 1.0f && (count > 0 || (a.prompt != nullptr && a.prompt[i] != 0)))
    x = x < 0.0f ? x * repetition : x / repetition;
  if (count > 0) {
    x -= a.frequency[row] * static_cast<float>(count);
    x -= a.presence[row];
  }
  return x;
}

template <int kPer>
__device__ __forceinline__ Owned<kPer> read_row(const SamplingArgs& a, int64_t row, int thread, int threads) {
  Owned<kPer> own;
  const int per = kPer > 0 ? kPer : (a.vocab + threads - 1) / threads;
  own.first = min(a.vocab, thread * per);
  own.count = min(per, a.vocab - own.first);
  const float* const logits = a.logits + row * a.logits_stride + own.first;
  const bool plain = a.bias == nullptr && a.counts == nullptr && a.prompt == nullptr;
  if constexpr (kPer > 0) {
    if (own.count == kPer && reinterpret_cast<uintptr_t>(logits) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kPer; i += 4) read_16(logits + i, own.x[i], own.x[i + 1], own.x[i + 2], own.x[i + 3]);
    } else {
#pragma unroll
      for (int i = 0; i < kPer; ++i) own.x[i] = i < own.count ? logits[i] : -INFINITY;
    }
    if (!plain) {
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (i < own.count) own.x[i] = penalised(a, own.x[i], row, own.first + i);
    }
  } else {
    own.copy = a.workspace + row * a.vocab + own.first;
    for (int i = 0; i < own.count; ++i) own.copy[i] = penalised(a, logits[i], row, own.first + i);
  }
  return own;
}

__device__ __forceinline__ void finish(const SamplingArgs& a, int64_t row, int token) {
  a.ids[row] = token;
  a.steps[row] += 1;
  if (a.counts != nullptr && token >= 0) a.counts[row * a.vocab + token] += 1;
}

// Grid (blocks of a row, rows), one cluster a row.
template <int kPer>
__global__ void __launch_bounds__(kThreads) sample_kernel(SamplingArgs a) {
  __shared__ Shared shared;
  __shared__ uint64_t scratch[kWarp];
  dependency_wait();
  dependency_release();
  const Team team{shared, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  const int64_t row = blockIdx.y;
  const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
  const int top_k = a.top_k[row];
  const uint32_t random = philox(a.seeds[row], static_cast<uint64_t>(a.steps[row]));
  const Owned<kPer> own =
      read_row<kPer>(a, row, team.rank * kThreads + static_cast<int>(threadIdx.x), team.size * kThreads);

  uint64_t best = 0;
  own.each([&](float x, int id) { best = max(best, ranked_key(x, static_cast<uint32_t>(id))); });
  best = block_reduce(best, uint64_t{0}, scratch, [](uint64_t x, uint64_t y) { return x > y ? x : y; });
  if (threadIdx.x == 0) shared.peak = best;
  team.sync();
  for (int other = 0; other < team.size; ++other) best = max(best, team.of(other).peak);
  const float peak = value_of(static_cast<uint32_t>(best >> 32));
  if (temperature == 0.0f || !isfinite(peak)) {
    team.sync();  // no block leaves while another reads its shared memory
    if (team.rank == 0 && threadIdx.x == 0)
      finish(a, row, isfinite(peak) ? static_cast<int>(~static_cast<uint32_t>(best)) : -1);
    return;
  }

  const float divisor = fmaxf(temperature, 1e-30f);
  uint32_t lowest = 0;  // the least key that may be drawn
  const auto weight_of = [&](uint32_t key) { return expf((value_of(key) - peak) / divisor); };
  const auto mass_of = [&](uint32_t key) -> Mass { return key < lowest ? 0 : __float2ull_rn(weight_of(key) * kUnits); };
  if (top_k > 0 && top_k < a.vocab) {
    lowest =
        radix_search(team, own, [](uint32_t) { return Mass{1}; }, [&](Mass) { return static_cast<Mass>(top_k); }).key;
  }
  Mass equals_kept = ~Mass{0};  // of the tokens with key `lowest`, this many of the lowest ids stay
  if (top_p < 1.0f) {
    Mass target = 0;
    const Threshold t = radix_search(team, own, mass_of, [&](Mass total) {
      const double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(total));
      return target = max(Mass{1}, min(total, static_cast<Mass>(wanted)));
    });
    const Mass each = mass_of(t.key);
    equals_kept = (target - t.above + each - 1) / each;
    lowest = t.key;
  }

  Mass equals = 0, equals_before = 0, unused = 0;
  if (equals_kept != ~Mass{0}) {
    own.each([&](float x, int) { equals += ordered_key(x) == lowest; });
    team_scan(team, equals, equals_before, unused);
  }
  Mass seen = equals_before;
  const auto drawn_mass = [&](float x) -> Mass {
    const uint32_t key = ordered_key(x);
    if (key == lowest && seen++ >= equals_kept) return 0;
    return weight_of(key) >= min_p ? mass_of(key) : 0;
  };
  Mass mass = 0, before = 0, total = 0;
  own.each([&](float x, int) { mass += drawn_mass(x); });
  team_scan(team, mass, before, total);
  // floor(total * random / 2^32): the token is the first whose cumulative mass exceeds it.
  const Mass point = (total >> 32) * random + ((total & 0xffffffffu) * random >> 32);
  if (point < before || point >= before + mass) return;
  seen = equals_before;
  int token = -1;
  own.each([&](float x, int id) {
    before += drawn_mass(x);
    if (token < 0 && before > point) token = id;
  });
  finish(a, row, token);
}

}  // namespace

void sample(const SamplingArgs& a, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] { return "sample rows=" + std::to_string(a.rows) + " vocab=" + std::to_string(a.vocab); };
  if (a.vocab < 1 || a.vocab > 1 << 18 || a.rows > 65535)
    throw std::invalid_argument(what() + ": vocab is 1 to 262144, rows at most 65535");
  const bool clusters = device_attribute(cudaDevAttrClusterLaunch) != 0;
  const unsigned blocks = clusters
                              ? static_cast<unsigned>(std::min(
                                    kMaxBlocks, static_cast<int>(std::bit_ceil(unsigned(ceil_div(a.vocab, 4096))))))
                              : 1;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {blocks, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks, static_cast<unsigned>(a.rows));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = blocks > 1 ? attributes : attributes + 1;
  config.numAttrs = (blocks > 1 ? 1 : 0) + (launch.programmatic ? 1 : 0);
  const int per_thread = ceil_div(a.vocab, static_cast<int64_t>(blocks) * kThreads);
  const auto kernel = per_thread <= 4 ? sample_kernel<4> : per_thread <= 16 ? sample_kernel<16> : sample_kernel<32>;
  check(cudaLaunchKernelEx(&config, clusters ? kernel : sample_kernel<0>, a), what());
}

}  // namespace nibblelm::cuda
