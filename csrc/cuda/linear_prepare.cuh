// From rows of x to planes: RMSNorm where one comes first, the scale of each slice, digits and their sums.
//
// A block prepares a whole row, since RMSNorm needs all of it; `subs` warps share a slice and take rounds of 256
// columns in turn. This runs once a launch, before any product, so what counts is the chain of dependent instructions:
// short, not wide.
#pragma once

#include "linear_planes.cuh"
#include "norm_sum.cuh"

namespace nibblelm::cuda {

constexpr int kRound{8 * kWarp};  // columns of a warp at a time
constexpr int kMostRounds{4};     // of a row that stays in registers: at least the longest that is normed
static_assert(kMaxNormColumns <= kMostRounds * kRound * kDecodeWarps);

// Sums of a row on their way.
template <int D>
struct RowScratch {
  float steps[kMaxNormColumns / kStepK];  // of squares
  static_assert(kStepK == 8 * kNormLanes);
  uint32_t largest[kDecodeWarps];
  int sums[kMaxSlices * D];
};
static_assert(sizeof(RowScratch<3>) <= kDecodeWarps * kStripRows * sizeof(float));  // what the sums of one row take

// What one warp does of every row: its slice, counted from `first_slice` on, and its place in the slice.
struct WarpShare {
  int slice, sub, subs;
  int first, last;  // columns of the slice
  __device__ __forceinline__ WarpShare(const DecodeArgs& a, int first_slice, int log) {
    const int warp = threadIdx.x / kWarp;
    slice = warp & ((1 << log) - 1), sub = warp >> log, subs = kDecodeWarps >> log;
    first = slice_begin(first_slice + slice, a.plan.slices_log, a.steps) * kStepK;
    last = slice_begin(first_slice + slice + 1, a.plan.slices_log, a.steps) * kStepK;
  }
  // The lane's columns of the warp's first round, and from one round to the next.
  __device__ __forceinline__ int begin() const {
    return first + sub * kRound + 8 * static_cast<int>(threadIdx.x % kWarp);
  }
  __device__ __forceinline__ int step() const { return subs * kRound; }
};

// Where a row's planes, sums and scales go, and where bf16 activations wait for their scale: in shared memory, for an
// image there in the very place of their planes, which are as large.
struct RowTarget {
  uint8_t* planes;  // of column `first_column`
  uint8_t* stage;   // of column 0
  int first_column;
};

__device__ __forceinline__ float squares(const Chunk<false>& chunk) {
  float v[8], sum{0.0f};
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
  return sum;
}

// Brings bf16 activations of a row to the stage. Returns the largest magnitude.
template <bool Aligned>
__device__ __forceinline__ uint32_t stage_row(const DecodeArgs& a, const WarpShare& share, int row, uint8_t* stage) {
  constexpr int kHeld{4};  // loads under way together
  const int step = share.step();
  uint32_t largest{0};
#pragma unroll 1
  for (int first = share.begin(); first < share.last; first += kHeld * step) {
    Chunk<false> chunk[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      chunk[i] = {};
      if (first + i * step < share.last) chunk[i] = load_chunk<false, Aligned>(a, row, first + i * step, share.last);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * step < share.last) {
        *reinterpret_cast<uint4*>(stage + 2 * (first + i * step)) = chunk[i].word[0];
      }
      largest = max(largest, chunk[i].largest());
    }
  }
  return largest;
}

// Gains of 8 columns as factors.
__device__ __forceinline__ void load_gain(const DecodeArgs& a, int k, float (&gain)[8]) {
  load_constant(a.gain + k, gain);
  if (!a.plus_one) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) gain[i] += 1.0f;
}

// As rms_norm rounds it.
__device__ __forceinline__ Chunk<false> normed(const Chunk<false>& chunk, float factor, const float (&gain)[8]) {
  float v[8];
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = v[i] * factor * gain[i];
  return pack_chunk(v);
}

// Writes 8 activations at column k (`in`: of the slice) as planes, and digit sums of groups; all lanes together. Adds
// the digits to `total` where the sums are those of slices.
template <WeightFormat F, bool Grouped, int D, int C, class Load>
__device__ __forceinline__ void emit(const DecodeArgs& a, int row, int k, bool in, const RowTarget& to, float inverse,
                                     int* sums, int (&total)[D], Load load) {
  const int lane = threadIdx.x % kWarp, at = k - to.first_column;
  int sum[D]{};
  float v[8];
  if (in) load(v);
  __syncwarp();  // neighbours have read what this lane may write over
  // In digit columns, a lane of the tile finds 8 columns and the 8 that are 32 further side by side.
  const int offset =
      kDigitColumns<F, D> ? at / 64 * 128 + at / 8 % 4 * 32 + at / 32 % 2 * 8 : at * D * Format<F>::kPlaneBytes;
  if (in) store_planes<F, D>(to.planes + offset, v, inverse, sum);
  if constexpr (Grouped) {
    const int lanes = (1 << a.group_shift) / 8;
#pragma unroll
    for (int d = 0; d < D; ++d) {
#pragma unroll
      for (int offset = 1; offset < 16; offset *= 2) {
        const int other = __shfl_xor_sync(kAllLanes, sum[d], offset);
        if (offset < lanes) sum[d] += other;
      }
    }
    if (in && lane % lanes == 0) {
      int* const target = sums + (at >> a.group_shift) * kGroupWords<D> * C + row;
      if constexpr (D == 2) {
        *target = sum[0] * 256 + sum[1];
      } else {
#pragma unroll
        for (int d = 0; d < D; ++d) target[d * C] = sum[d];
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < D; ++d) total[d] += sum[d];
  }
}

// Adds a warp's digits to the sums of its slice, D neighbours.
template <int D>
__device__ __forceinline__ void add_digits(const int (&total)[D], int* slice_sums) {
#pragma unroll
  for (int d = 0; d < D; ++d) {
    const int all = __reduce_add_sync(kAllLanes, total[d]);
    if (threadIdx.x % kWarp == 0) atomicAdd(slice_sums + d, all);
  }
}

// By the whole block: what its warps have added up goes to the image.
template <int D, int C>
__device__ __forceinline__ void put_slice_sums(const DecodeArgs& a, int row, const WarpShare& share,
                                               const RowScratch<D>& scratch, uint8_t* image) {
  const int lane = threadIdx.x % kWarp, in_part = share.slice & (a.plan.block_slices() - 1);
  __syncthreads();
  if (share.sub == 0 && lane < D) {
    reinterpret_cast<int*>(image + a.plan.sums_at)[(in_part * D + lane) * C + row] =
        scratch.sums[share.slice * D + lane];
  }
}

// Slices [first_slice, first_slice + (1 << log)) of one row by the whole block. `to`: where the planes of this warp's
// slice go; `image`: the image that holds them. The block synchronizes before it uses the result.
template <WeightFormat F, bool Grouped, int D, int C, bool Aligned>
__device__ __forceinline__ void prepare_row(const DecodeArgs& a, int row, const WarpShare& share,
                                            RowScratch<D>& scratch, const RowTarget& to, uint8_t* image) {
  constexpr bool kFloat{kFloatActivations<F, D>}, kScaled{Format<F>::kScaled}, kSummed{Format<F>::kInteger && !Grouped};
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto put_largest = [&](uint32_t largest) {
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane == 0) scratch.largest[warp] = largest;
  };
  if (kSummed && threadIdx.x < kMaxSlices * D) scratch.sums[threadIdx.x] = 0;
  uint32_t largest{0};
  if constexpr (!kFloat) {
    largest = stage_row<Aligned>(a, share, row, to.stage);
  } else if constexpr (kScaled) {
#pragma unroll 2
    for (int k = share.begin(); k < share.last; k += share.step()) {
      largest = max(largest, load_chunk<true, Aligned>(a, row, k, share.last).largest());
    }
  }
  float inverse{1.0f}, scale{1.0f};
  if constexpr (kScaled) {
    put_largest(largest);
    __syncthreads();
    largest = scratch.largest[lane % share.subs * (kDecodeWarps / share.subs) + share.slice];
    inverse = normalizer<F, D>(__reduce_max_sync(kAllLanes, largest), scale);
  }
  const int in_part = share.slice & (p.block_slices() - 1);
  int* const sums = reinterpret_cast<int*>(image + p.sums_at);
  if (share.sub == 0 && lane == 0) reinterpret_cast<float*>(image + p.scales_at)[in_part * C + row] = scale;
  int total[D]{};
#pragma unroll 1
  for (int k = share.begin(); k - 8 * lane < share.last; k += share.step()) {  // all lanes together
    emit<F, Grouped, D, C>(a, row, k, k < share.last, to, inverse, sums, total, [&](float (&v)[8]) {
      Chunk<kFloat> chunk;
      if constexpr (kFloat) {
        chunk = load_chunk<true, Aligned>(a, row, k, share.last);
      } else {
        chunk.word[0] = *reinterpret_cast<const uint4*>(to.stage + 2 * k);
      }
      chunk.unpack(v);
    });
  }
  if constexpr (kSummed) {
    add_digits<D>(total, scratch.sums + share.slice * D);
    put_slice_sums<D, C>(a, row, share, scratch, image);
  }
}

// The same for a row of which every thread has at most 8 R activations, after an RMSNorm where there is one: they stay
// in registers, and what does not depend on them is done before the wait for what stores them. `slice_sums` in shared
// memory (D a slice of the block's) gets the digit sums.
template <WeightFormat F, bool Grouped, int D, int C, int R, class Wait>
__device__ __forceinline__ void prepare_short_row(const DecodeArgs& a, int row, const WarpShare& share,
                                                  RowScratch<D>& scratch, const RowTarget& to, uint8_t* image,
                                                  int* slice_sums, Wait wait) {
  constexpr bool kScaled{Format<F>::kScaled}, kSummed{Format<F>::kInteger && !Grouped};
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, begin = share.begin(), step = share.step();
  const int last = min(share.last, a.k), in_part = share.slice & (p.block_slices() - 1);
  const RowSource source(a, row, begin);
  const bool norms = a.gain != nullptr;
  const float each = keep(1.0f / static_cast<float>(a.k)), eps = keep(a.eps);
  float gain[8]{};
  if (R == 1 && norms && begin < last) load_gain(a, begin, gain);
  wait();
  // No more than the slices have: what lies behind belongs to other warps already.
  if (kSummed && static_cast<int>(threadIdx.x) < kDecodeWarps / share.subs * D) slice_sums[threadIdx.x] = 0;
  Chunk<false> x[R]{};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (begin + r * step < last) x[r] = source.load(r * step);
  }
  if (norms) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float sum = norm_step_sum(squares(x[r]));
      if (begin + r * step < share.last && lane % kNormLanes == 0) scratch.steps[(begin + r * step) / kStepK] = sum;
    }
    __syncthreads();
    const float factor = rsqrtf(norm_row_sum(scratch.steps, a.steps) * each + eps);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (R > 1 && begin + r * step < last) load_gain(a, begin + r * step, gain);
      x[r] = normed(x[r], factor, gain);
    }
  }
  float inverse{1.0f}, scale{1.0f};
  if constexpr (kScaled) {
    uint32_t largest{0};
#pragma unroll
    for (int r = 0; r < R; ++r) largest = max(largest, x[r].largest());
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane == 0) scratch.largest[warp] = largest;
    __syncthreads();
    largest = scratch.largest[lane % share.subs * (kDecodeWarps / share.subs) + share.slice];
    inverse = normalizer<F, D>(__reduce_max_sync(kAllLanes, largest), scale);
  }
  if (share.sub == 0 && lane == 0) reinterpret_cast<float*>(image + p.scales_at)[in_part * C + row] = scale;
  int total[D]{};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int k = begin + r * step;
    emit<F, Grouped, D, C>(a, row, k, k < share.last, to, inverse, reinterpret_cast<int*>(image + p.sums_at), total,
                           [&](float (&v)[8]) { x[r].unpack(v); });
  }
  if constexpr (kSummed) add_digits<D>(total, slice_sums + share.slice * D);
}

// One block per row, for plans whose blocks copy their part's image instead of preparing it again.
template <WeightFormat F, bool Grouped, int D, int C>
__global__ void __launch_bounds__(kDecodeThreads) linear_planes_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) uint8_t stage[];
  __shared__ RowScratch<D> scratch;
  const DecodePlan& p = a.plan;
  const int row = blockIdx.x;
  const WarpShare share(a, 0, p.slices_log);
  const int part = share.slice >> p.block_log;
  uint8_t* const image = a.images + part * p.image_bytes;
  const int first_step = slice_begin(part << p.block_log, p.slices_log, a.steps),
            begin = share.first / kStepK - first_step;
  const int at = p.planes_of(share.slice & (p.block_slices() - 1), row, begin, share.last / kStepK - first_step);
  const RowTarget to{image + p.planes_at + at - begin * kStepK * p.column_bytes, stage, first_step * kStepK};
  const auto wait = [] {
    dependency_wait();
    dependency_release();
  };
  if constexpr (!kFloatActivations<F, D>) {
    if (a.x_aligned && p.row_rounds <= kMostRounds) {
      p.row_rounds == 1
          ? prepare_short_row<F, Grouped, D, C, 1>(a, row, share, scratch, to, image, scratch.sums, wait)
          : prepare_short_row<F, Grouped, D, C, kMostRounds>(a, row, share, scratch, to, image, scratch.sums, wait);
      if constexpr (Format<F>::kInteger && !Grouped) put_slice_sums<D, C>(a, row, share, scratch, image);
      return;
    }
  }
  wait();
  a.x_aligned ? prepare_row<F, Grouped, D, C, true>(a, row, share, scratch, to, image)
              : prepare_row<F, Grouped, D, C, false>(a, row, share, scratch, to, image);
}

// Waits for what has stored x and brings the block's image to shared memory; `scratch` there holds a RowScratch.
template <WeightFormat F, bool Grouped, int D, int C, class Wait>
__device__ __forceinline__ void prepare_image(const DecodeArgs& a, uint8_t* image, void* scratch, int part, Wait wait) {
  const DecodePlan& p = a.plan;
  if constexpr (C == 1 && !kFloatActivations<F, D>) {
    if (a.images == nullptr && p.row_rounds <= kMostRounds) {
      const WarpShare share(a, 0, p.block_log);
      const RowTarget to{image + p.planes_at + share.slice * p.plane_pad, nullptr, 0};
      RowScratch<D>& sums = *static_cast<RowScratch<D>*>(scratch);
      int* const digits = reinterpret_cast<int*>(image + p.sums_at);
      p.row_rounds == 1 ? prepare_short_row<F, Grouped, D, 1, 1>(a, 0, share, sums, to, image, digits, wait)
                        : prepare_short_row<F, Grouped, D, 1, kMostRounds>(a, 0, share, sums, to, image, digits, wait);
      return;
    }
  }
  wait();
  if (C == 1 && a.images == nullptr) {
    const int first_column = slice_begin(part << p.block_log, p.slices_log, a.steps) * kStepK;
    const WarpShare share(a, part << p.block_log, p.block_log);
    uint8_t* const planes = image + p.planes_at + share.slice * p.plane_pad;
    const RowTarget to{planes, planes - 2 * first_column, first_column};
    prepare_row<F, Grouped, D, 1, true>(a, 0, share, *static_cast<RowScratch<D>*>(scratch), to, image);
  } else {
    const uint4* const from = reinterpret_cast<const uint4*>(a.images + part * p.image_bytes);
#pragma unroll 4
    for (int i = threadIdx.x; i < p.image_bytes / 16; i += kDecodeThreads) reinterpret_cast<uint4*>(image)[i] = from[i];
  }
}

}  // namespace nibblelm::cuda
