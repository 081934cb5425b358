// Sampling without a sort. Weights exp((x - max) / temperature) are integers in units of 2^-40, so every sum is exact
// and independent of order; top-k and top-p thresholds come from histograms, of counts or of weights, over ever smaller
// ranges of values. A cluster of blocks shares a row and keeps it in registers; what its warps find travels by writes
// into each other's shared memory, one barrier an exchange. Without clusters one block walks over a copy of the row.
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
constexpr int kWarps{kThreads / kWarp};
constexpr int kMaxBlocks{16};      // of a cluster, where the device has room for such ones
constexpr int kPortableBlocks{8};  // of any cluster
constexpr int kMostPer{36};        // ids of a thread
constexpr int kRun{4};             // neighbouring ids of a lane; those of a warp's lanes are one run of 128
constexpr int kBinBits{11};
constexpr int kBins{1 << kBinBits};
constexpr int kGroup{kBins / kWarps};      // bins that one warp adds up
constexpr float kUnits{1099511627776.0f};  // 2^40: a sum over fewer than 2^19 tokens stays below 2^59
constexpr float kReach{29.0f};             // e^-29 is less than half of one
using Mass = unsigned long long;

static_assert(kGroup == 2 * kWarp);

__device__ __forceinline__ Mass mass_of_bin(uint2 bin) { return (static_cast<Mass>(bin.y) << 32) + bin.x; }

// A value per warp of the row, by block and warp.
template <class T>
using PerWarp = T[kMaxBlocks][kWarps];

// A range of keys in which a sum over keys, from the largest down, reaches its target.
struct Threshold {
  uint32_t key;   // the largest
  uint32_t keys;  // how many
  Mass above;     // mass of larger keys
  Mass mass;      // of the range
  Mass target;    // 0 as long as nothing is summed
};

struct Shared {
  uint2 bins[2][kBins];  // sums, low words modulo 2^32 first: atomics on 64 bits of shared memory are loops
  PerWarp<Mass> sums[2];
  Mass warp_values[2][kWarps], block_values[2][kMaxBlocks];
  Threshold found;
  float floor;
};

// The blocks of one row. On devices without clusters a row has one block.
struct Team {
  Shared& shared;
  int rank, size;
  int turn{0};  // two buffers in turn: with a barrier a turn, nobody reads what others begin to write

  __device__ void arrive() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) cg::this_cluster().barrier_arrive();
#endif
  }
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) return cg::this_cluster().barrier_wait();
#endif
    __syncthreads();
  }
  // Where another block has `own`.
  template <class T>
  __device__ T* there(T* own, int other) const {
#if __CUDA_ARCH__ >= 900
    if (size > 1) return cg::this_cluster().map_shared_rank(own, other);
#endif
    return own;
  }
  // Afterwards every block has every warp's `value`, which its lanes agree on.
  template <class T>
  __device__ void exchange(PerWarp<T>& slots, T value) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane < size) *there(&slots[rank][warp], lane) = value;
    arrive();
    wait();
  }
  // Afterwards every block has its warps' values and what `combine` makes of each block's, for which one warp writes.
  template <class Combine>
  __device__ void exchange(Mass (&warps)[kWarps], Mass (&blocks)[kMaxBlocks], Mass value, Combine combine) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (lane == 0) warps[warp] = value;
    __syncthreads();
    if (warp == 0) {
      const Mass whole = combine(warps[lane]);
      if (lane < size) *there(&blocks[rank], lane) = whole;
    }
    arrive();
    wait();
  }
};

// Sum over the lanes up to this one.
__device__ __forceinline__ Mass warp_scan(Mass x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Mass below = __shfl_up_sync(kAllLanes, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

__device__ __forceinline__ Mass warp_total(Mass x) {
  return warp_reduce(x, [](Mass a, Mass b) { return a + b; });
}

// The largest of all lanes, by the halves of the keys.
__device__ __forceinline__ Mass warp_best(Mass key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t top = __reduce_max_sync(kAllLanes, high);
  return static_cast<Mass>(top) << 32 | __reduce_max_sync(kAllLanes, high == top ? static_cast<uint32_t>(key) : 0u);
}

// Sum over the row (`all`) and over the warps before this one (`before`), blocks in rank order.
__device__ __forceinline__ void team_scan(Team& team, Mass x, Mass& before, Mass& all) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int side = team.turn++ & 1;
  const Mass(&warps)[kWarps] = team.shared.warp_values[side];
  const Mass(&blocks)[kMaxBlocks] = team.shared.block_values[side];
  team.exchange(team.shared.warp_values[side], team.shared.block_values[side], warp_total(x),
                [](Mass v) { return warp_total(v); });
  const Mass total = lane < team.size ? blocks[lane] : 0;
  const Mass ahead = (lane < team.rank ? total : 0) + (lane < warp ? warps[lane] : 0);
  before = warp_total(ahead), all = warp_total(total);
}

// The penalised logits of a lane, NaN as -inf: of each of its warp's runs of 128 ids kRun neighbours. In registers, or
// (kPer = 0) in a copy of the row in device memory.
template <int kPer>
struct Owned {
  float x[kPer > 0 ? kPer : 1];
  float* copy;
  int first;  // id of the first
  int runs;
  int vocab;

  // f(value, id) for one run, in the order of ids; values in registers beyond the vocabulary are -inf.
  template <class F>
  __device__ __forceinline__ void run(int r, F&& f) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int id = first + r * kRun * kWarp + i;
      if constexpr (kPer > 0) {
        f(x[r * kRun + i], id);
      } else if (id < vocab) {
        f(copy[id], id);
      }
    }
  }
  // f(r) for every run.
  template <class F>
  __device__ __forceinline__ void each_run(F&& f) {
    if constexpr (kPer > 0) {
#pragma unroll
      for (int r = 0; r < kPer / kRun; ++r) f(r);
    } else {
      for (int r = 0; r < runs; ++r) f(r);
    }
  }
  template <class F>
  __device__ __forceinline__ void each(F&& f) {
    each_run([&](int r) { run(r, f); });
  }
};

// Adds up bins of falling values over the cluster and narrows `found` to the bin in which the mass reaches the target.
// bin_of(x) is outside of 0..kBins - 1 for values that do not count, range_of(bin) gives the bin's largest key and how
// many keys it has, target_of(sum of all bins) a target of at least 1. Values below `floor` do not count.
template <class Row, class BinOf, class MassOf, class TargetOf, class RangeOf>
__device__ __forceinline__ void histogram(Team& team, Row& row, float floor, Threshold& found, BinOf bin_of,
                                          MassOf mass_of, TargetOf target_of, RangeOf range_of) {
  Shared& shared = team.shared;
  auto& bins = shared.bins[team.turn & 1];
  auto& sums = shared.sums[team.turn++ & 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = {0, 0};
  __syncthreads();
  row.each([&](float x, int) {
    if (x < floor) return;
    const auto bin = static_cast<unsigned>(bin_of(x));
    if (bin >= kBins) return;
    const Mass mass = mass_of(x);
    const auto low = static_cast<unsigned>(mass);
    const unsigned before = low == 0 ? 0 : atomicAdd(&bins[bin].x, low);
    const unsigned high = static_cast<unsigned>(mass >> 32) + (before + low < before ? 1u : 0u);
    if (high != 0) atomicAdd(&bins[bin].y, high);
  });
  __syncthreads();
  const int own = warp * kGroup + 2 * lane;
  team.exchange(sums, warp_total(mass_of_bin(bins[own]) + mass_of_bin(bins[own + 1])));
  if (warp == 0) {
    Mass group = 0;  // a lane's group of bins, over all blocks
#pragma unroll
    for (int other = 0; other < kMaxBlocks; ++other)
      if (other < team.size) group += sums[other][lane];
    const Mass groups = warp_scan(group);
    const Mass target = found.target != 0 ? found.target : target_of(__shfl_sync(kAllLanes, groups, kWarp - 1));
    Mass above = found.above + groups - group;
    const int which = __ffs(__ballot_sync(kAllLanes, above < target && above + group >= target)) - 1;
    above = __shfl_sync(kAllLanes, above, which);
    const int first = which * kGroup + 2 * lane;
    Mass left = 0, right = 0;
#pragma unroll
    for (int other = 0; other < kMaxBlocks; ++other) {
      if (other >= team.size) continue;
      const uint4 pair = *reinterpret_cast<const uint4*>(team.there(&bins[first], other));
      left += mass_of_bin({pair.x, pair.y}), right += mass_of_bin({pair.z, pair.w});
    }
    above += warp_scan(left + right) - left - right;
    const bool in_left = above + left >= target;
    const int holder = __ffs(__ballot_sync(kAllLanes, above < target && above + left + right >= target)) - 1;
    Threshold narrow{0, 0, in_left ? above : above + left, in_left ? left : right, target};
    range_of(__shfl_sync(kAllLanes, in_left ? first : first + 1, holder), narrow.key, narrow.keys);
    if (lane == holder) shared.found = narrow;
  }
  __syncthreads();
  found = shared.found;
}

// The key at which the mass, summed from the largest value down, reaches target_of(mass of all): mass above it is less.
// Or a range of keys, where it holds one token. Values below `floor` do not count. `reach` below the peak is where most
// of the mass is.
template <class Row, class MassOf, class TargetOf>
__device__ __forceinline__ Threshold search(Team& team, Row& row, float peak, float floor, float reach, MassOf mass_of,
                                            TargetOf target_of) {
  Threshold found{ordered_key(peak), ordered_key(peak) - ordered_key(floor) + 1, 0, 0, 0};
  // First by equal steps of the distance to the peak: keys would crowd at the exponents that most logits share.
  const float scale = static_cast<float>(kBins - 1) / fmaxf(fminf(reach, peak - floor), 1e-30f);
  const auto step_of = [=](float x) { return min(kBins - 1, static_cast<int>((peak - x) * scale)); };
  bool steps = true;
#pragma unroll 1
  do {
    const uint32_t key = found.key, keys = found.keys;
    const int shift = max(0, kWarp - __clz(static_cast<int>(keys - 1)) - kBinBits);
    const auto bin_of = [&](float x) {
      const uint32_t below = key - ordered_key(x);  // wraps above the range
      if (below >= keys) return -1;
      return steps ? step_of(x) : static_cast<int>(below >> shift);
    };
    const auto range_of = [&](int bin, uint32_t& largest, uint32_t& count) {
      if (!steps) {
        largest = key - (static_cast<uint32_t>(bin) << shift);
        count = min(1u << shift, keys - (key - largest));
        return;
      }
      // Half a warp each finds the least keys of this step and of the one before it, 16 candidates at a time.
      const int half = static_cast<int>(threadIdx.x) % kWarp / 16;
      const uint32_t place = threadIdx.x % 16;
      uint32_t low = key - (keys - 1), high = key + 1;
      while (__any_sync(kAllLanes, low < high)) {
        const uint32_t stride = (high - low + 15) / 16, candidate = low + place * stride;
        const bool reached = candidate >= high || step_of(value_of(candidate)) <= bin - half;
        const uint32_t before = __popc(~__ballot_sync(kAllLanes, reached) >> 16 * half & 0xffffu);
        high = min(high, low + before * stride);
        if (before > 0) low += (before - 1) * stride + 1;
      }
      const uint32_t least = __shfl_sync(kAllLanes, low, 0);
      largest = __shfl_sync(kAllLanes, low, 16) - 1;
      count = largest - least + 1;
    };
    histogram(team, row, floor, found, bin_of, mass_of, target_of, range_of);
    steps = false;
    // Two tokens would weigh about twice what the least of the range does, or more.
  } while (found.keys > 1 && 2 * found.mass >= 3 * mass_of(value_of(found.key - (found.keys - 1))));
  return found;
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

// The part of warp `warp` of the `warps` that share the row.
template <int kPer>
__device__ __forceinline__ Owned<kPer> read_row(const SamplingArgs& a, int64_t row, int warp, int warps) {
  constexpr int kIds{kRun * kWarp};  // of a run
  Owned<kPer> own;
  own.runs = kPer > 0 ? kPer / kRun : (a.vocab + warps * kIds - 1) / (warps * kIds);
  own.first = warp * own.runs * kIds + static_cast<int>(threadIdx.x) % kWarp * kRun;
  own.vocab = a.vocab;
  own.copy = a.workspace + row * a.vocab;
  const float* logits = a.logits + row * a.logits_stride;
  if (kPer == 0 || a.bias != nullptr || a.counts != nullptr || a.prompt != nullptr) {
    // Through the copy in any case: penalties in line for every register would fill the instruction cache.
#pragma unroll 1
    for (int r = 0; r < own.runs; ++r)
      for (int id = own.first + r * kIds; id < min(own.first + r * kIds + kRun, a.vocab); ++id)
        own.copy[id] = fmaxf(penalised(a, logits[id], row, id), -INFINITY);
    logits = own.copy;
  }
  if constexpr (kPer > 0) {
    const bool wide = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) own.x[i] = -INFINITY;
    own.each_run([&](int r) {
      const int id = own.first + r * kIds;
      float* const x = own.x + r * kRun;
      if (wide && id + kRun <= a.vocab) {
        read_16(logits + id, x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          if (id + i < a.vocab) x[i] = logits[id + i];
      }
    });
    own.each([](float& x, int) { x = fmaxf(x, -INFINITY); });  // NaN too becomes -inf
  }
  return own;
}

// `step` and `position` are what the row had, read at the start: a load here would end the kernel later.
__device__ __forceinline__ void finish(const SamplingArgs& a, int64_t row, int64_t step, int position, int token) {
  a.ids[row] = token;
  if (a.host_ids != nullptr) a.host_ids[step % 2 * a.rows + row] = token;
  a.steps[row] = step + 1;
  if (a.positions != nullptr) a.positions[row] = position + 1;
  if (a.counts != nullptr && token >= 0) a.counts[row * a.vocab + token] += 1;
}

// A value that at least top_k tokens reach: the top_k-th of the peaks of up to 256 warps, or -inf if they are fewer.
__device__ __forceinline__ float floor_of(Team& team, Mass warp_peak, int top_k) {
  Shared& shared = team.shared;
  auto& slots = shared.sums[team.turn++ & 1];
  team.exchange(slots, warp_peak);
  const Mass* const peaks = slots[0];
  constexpr int kPeaks{256}, kParts{kThreads / kPeaks};  // threads that look at one peak
  const int count = min(kPeaks, team.size * kWarps);
  if (threadIdx.x == 0) shared.floor = -INFINITY;
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x) / kParts;
  int larger = 0;
  if (mine < count)
    for (int i = static_cast<int>(threadIdx.x) % kParts; i < count; i += kParts) larger += peaks[i] > peaks[mine];
#pragma unroll
  for (int offset = kParts / 2; offset > 0; offset /= 2) larger += __shfl_xor_sync(kAllLanes, larger, offset);
  if (mine < count && larger == top_k - 1) shared.floor = value_of(static_cast<uint32_t>(peaks[mine] >> 32));
  __syncthreads();
  return shared.floor;
}

// Grid (blocks of a row, rows), one cluster a row.
template <int kPer>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(SamplingArgs a) {
  __shared__ Shared shared;
  Team team{shared, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  team.arrive();  // awaited before anything is written to other blocks: by then they run
  dependency_wait();
  dependency_release();
  const int64_t row = blockIdx.y;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const float temperature = a.temperature[row];
  const uint64_t seed = a.seeds[row];
  const int64_t step = a.steps[row];
  const int position = a.positions != nullptr ? a.positions[row] : 0;
  Owned<kPer> own = read_row<kPer>(a, row, team.rank * kWarps + warp, team.size * kWarps);

  float largest = -INFINITY;
  own.each([&](float x, int) { largest = fmaxf(largest, x); });
  largest = value_of(__reduce_max_sync(kAllLanes, ordered_key(largest)));
  uint32_t id_of_largest = ~0u;
  own.each([&](float x, int id) {
    if (x == largest) id_of_largest = min(id_of_largest, static_cast<uint32_t>(id));
  });
  team.wait();
  const Mass warp_peak = ranked_key(largest, __reduce_min_sync(kAllLanes, id_of_largest));
  team.exchange(shared.warp_values[0], shared.block_values[0], warp_peak, [](Mass v) { return warp_best(v); });
  ++team.turn;
  const Mass best = warp_best(lane < team.size ? shared.block_values[0][lane] : 0);
  const float peak = value_of(static_cast<uint32_t>(best >> 32));
  if (temperature == 0.0f || !isfinite(peak)) {
    if (team.rank == 0 && threadIdx.x == 0)
      finish(a, row, step, position, isfinite(peak) ? static_cast<int>(~static_cast<uint32_t>(best)) : -1);
    return;
  }

  const float min_p = a.min_p[row];
  const float inverse = 1.4426950408889634f / fmaxf(temperature, 1e-30f);  // weights are powers of 2
  const auto weight_of = [=](float x) { return exp2_fast((x - peak) * inverse); };
  float floor = -INFINITY;  // the least that may be drawn
  const auto mass_of = [=](float x) -> Mass { return __float2ull_rn(weight_of(x) * kUnits); };
#pragma unroll 1
  for (int filter = 0; filter < 2; ++filter) {
    const bool by_count = filter == 0;
    const int top_k = a.top_k[row];
    const float top_p = a.top_p[row];
    if (by_count ? top_k <= 0 || top_k >= a.vocab : top_p >= 1.0f) continue;
    if (by_count) floor = floor_of(team, warp_peak, top_k);
    const auto target_of = [&](Mass all) {
      if (by_count) return static_cast<Mass>(top_k);
      const double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(all));
      return max(Mass{1}, min(all, static_cast<Mass>(wanted)));
    };
    const float reach = by_count && floor > -INFINITY ? INFINITY : kReach * temperature;
    const auto weigh = [=](float x) { return by_count ? Mass{1} : mass_of(x); };
    const Threshold t = search(team, own, peak, floor, reach, weigh, target_of);
    floor = value_of(t.key - (t.keys - 1));
    if (by_count || t.keys > 1) continue;
    // Of the tokens at the threshold the first ones stay, as many as it takes.
    const Mass each = mass_of(floor), kept = (t.target - t.above + each - 1) / each;
    if (kept * each >= t.mass) continue;
    Mass equals = 0, seen = 0, all = 0;
    own.each([&](float x, int) { equals += x == floor; });
    team_scan(team, equals, seen, all);
    own.each_run([&](int r) {
      Mass count = 0;
      own.run(r, [&](float x, int) { count += x == floor; });
      const Mass inclusive = warp_scan(count);
      Mass before = seen + inclusive - count;
      own.run(r, [&](float& x, int) {
        if (x == floor && before++ >= kept) x = -INFINITY;
      });
      seen += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
    });
  }

  const auto drawn_mass = [=](float x) -> Mass { return x >= floor && weight_of(x) >= min_p ? mass_of(x) : 0; };
  Mass mass = 0, before = 0, total = 0;
  own.each([&](float x, int) { mass += drawn_mass(x); });
  team_scan(team, mass, before, total);
  // floor(total * random / 2^32): the token is the first whose cumulative mass exceeds it.
  const Mass random = philox(seed, static_cast<uint64_t>(step));
  const Mass point = (total >> 32) * random + ((total & 0xffffffffu) * random >> 32);
  if (point < before || point >= before + warp_total(mass)) return;
  own.each_run([&](int r) {
    Mass sum = 0;
    own.run(r, [&](float x, int) { sum += drawn_mass(x); });
    const Mass start = before;
    before += warp_total(sum);
    if (point < start || point >= before) return;
    Mass first = start + warp_scan(sum) - sum;
    if (point < first || point >= first + sum) return;
    int token = -1;
    own.run(r, [&](float x, int id) {
      first += drawn_mass(x);
      if (token < 0 && first > point) token = id;
    });
    finish(a, row, step, position, token);
  });
}

}  // namespace

void sample(const SamplingArgs& a, const Launch& launch) {
  if (a.rows == 0) return;
  const auto what = [&] { return "sample rows=" + std::to_string(a.rows) + " vocab=" + std::to_string(a.vocab); };
  if (a.vocab < 1 || a.vocab > kPortableBlocks * kThreads * kMostPer || a.rows > 65535)
    throw std::invalid_argument(what() + ": vocab is 1 to 294912, rows at most 65535");
  if (a.blocks != 0 && (a.blocks < 0 || a.blocks > kPortableBlocks || a.blocks * kThreads * kMostPer < a.vocab))
    throw std::invalid_argument(what() + ": blocks are 1 to 8 of up to 36864 ids each, got " +
                                std::to_string(a.blocks));
  const bool clusters = device_attribute(cudaDevAttrClusterLaunch) != 0;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = attributes;
  config.numAttrs = launch.programmatic ? 2 : 1;
  auto kernel = sample_kernel<0>;
  const auto share_among = [&](int blocks) {
    const int per = ceil_div(a.vocab, static_cast<int64_t>(blocks) * kThreads);
    if (clusters) {
      kernel = per <= 4    ? sample_kernel<4>
               : per <= 8  ? sample_kernel<8>
               : per <= 12 ? sample_kernel<12>
               : per <= 16 ? sample_kernel<16>
               : per <= 32 ? sample_kernel<32>
                           : sample_kernel<kMostPer>;  // Gemma 3 has 262,208 words
    }
    config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.rows));
    attributes[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  };
  const int wanted = a.blocks != 0 ? a.blocks : static_cast<int>(std::bit_ceil(unsigned(ceil_div(a.vocab, 4096))));
  int side_by_side = 0;  // clusters of more than kPortableBlocks that the device runs
  if (clusters && wanted > kPortableBlocks) {
    share_among(std::min(kMaxBlocks, wanted));
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what());
    check(cudaOccupancyMaxActiveClusters(&side_by_side, kernel, &config), what());
  }
  if (side_by_side < a.rows) share_among(clusters ? std::min(kPortableBlocks, wanted) : 1);
  if (!clusters) ++config.attrs, --config.numAttrs;
  check(cudaLaunchKernelEx(&config, kernel, a), what());
}

}  // namespace nibblelm::cuda
