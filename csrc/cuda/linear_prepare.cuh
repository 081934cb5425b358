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

// Brings bf16 activations of a row to the stage: x, or h with its sums of squares. Returns the largest magnitude of x.
template <bool Aligned>
__device__ __forceinline__ uint32_t stage_row(const DecodeArgs& a, const WarpShare& share, int row, uint8_t* stage,
                                              float* step_sums, bool keep) {
  const int begin = share.begin(), step = share.step(), lane = threadIdx.x % kWarp;
  const auto place = [&](int k) { return reinterpret_cast<uint4*>(stage + 2 * k); };
  uint32_t largest{0};
  if (a.gain != nullptr) {
    if constexpr (Aligned) {
#pragma unroll 1
      for (int k = begin; k - 8 * lane < share.last; k += step) {  // all lanes together
        float sum{0.0f};
        if (k < share.last) {
          const Chunk<false> h = load_sum(a, row, k, keep);
          *place(k) = h.word[0];
          sum = squares(h);
        }
        sum = norm_step_sum(sum);
        if (lane % 16 == 0 && k < share.last) step_sums[k / kStepK] = sum;
      }
    }
  } else {
    constexpr int kHeld{4};  // loads under way together
#pragma unroll 1
    for (int first = begin; first < share.last; first += kHeld * step) {
      Chunk<false> chunk[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        chunk[i] = {};
        if (first + i * step < share.last) chunk[i] = load_chunk<false, Aligned>(a, row, first + i * step, share.last);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * step < share.last) *place(first + i * step) = chunk[i].word[0];
        largest = max(largest, chunk[i].largest());
      }
    }
  }
  return largest;
}

__device__ __forceinline__ float norm_factor(const DecodeArgs& a, const float* step_sums) {
  return rsqrtf(norm_row_sum(step_sums, a.steps) * (1.0f / static_cast<float>(a.k)) + a.eps);
}

// As rms_norm rounds it.
__device__ __forceinline__ Chunk<false> normed(const DecodeArgs& a, const Chunk<false>& chunk, float factor,
                                               const float (&gain)[8]) {
  float v[8];
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = v[i] * factor * (a.plus_one ? 1.0f + gain[i] : gain[i]);
  return pack_chunk(v);
}

// Norms what is staged, in place. Returns the largest magnitude.
__device__ __forceinline__ uint32_t norm_staged(const DecodeArgs& a, const WarpShare& share, uint8_t* stage,
                                                const float* step_sums) {
  const int begin = share.begin();
  float gain[8];
  if (begin < min(share.last, a.k)) load_constant(a.gain + begin, gain);

  const float factor = norm_factor(a, step_sums);
  uint32_t largest{0};
#pragma unroll 1
  for (int k = begin; k < min(share.last, a.k); k += share.step()) {
    uint4* const at = reinterpret_cast<uint4*>(stage + 2 * k);
    const Chunk<false> chunk = normed(a, {{*at}}, factor, gain);
    *at = chunk.word[0];
    largest = max(largest, chunk.largest());
    if (k + share.step() < min(share.last, a.k)) load_constant(a.gain + k + share.step(), gain);
  }
  return largest;
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
    const bool keep = a.h != nullptr && static_cast<int>(blockIdx.x) == row;
    largest = stage_row<Aligned>(a, share, row, to.stage, scratch.steps, keep);
    if (a.gain != nullptr) {
      __syncthreads();
      largest = norm_staged(a, share, to.stage, scratch.steps);
    }
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

// The same for a row of which every thread has at most 8 activations: they stay in registers, and their gains are at
// hand before the wait for the kernel ahead. `slice_sums` in shared memory (D a slice of the block's) gets the digit
// sums.
template <WeightFormat F, bool Grouped, int D, int C>
__device__ __forceinline__ void prepare_short_row(const DecodeArgs& a, int row, const WarpShare& share,
                                                  RowScratch<D>& scratch, const RowTarget& to, uint8_t* image,
                                                  int* slice_sums) {
  constexpr bool kScaled{Format<F>::kScaled}, kSummed{Format<F>::kInteger && !Grouped};
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, k = share.begin();
  const bool in = k < share.last, known = in && k < a.k;
  // No more than the slices have: what lies behind belongs to warps that may be past the wait already.
  if (kSummed && static_cast<int>(threadIdx.x) < kDecodeWarps / share.subs * D) slice_sums[threadIdx.x] = 0;
  float gain[8]{};
  if (known && a.gain != nullptr) load_constant(a.gain + k, gain);
  dependency_wait();
  dependency_release();
  Chunk<false> x{};
  if (known) x = load_sum(a, row, k, a.h != nullptr && static_cast<int>(blockIdx.x) == row);
  if (a.gain != nullptr) {
    const float sum = norm_step_sum(squares(x));
    if (in && lane % kNormLanes == 0) scratch.steps[k / kStepK] = sum;
    __syncthreads();
    x = normed(a, x, norm_factor(a, scratch.steps), gain);
  }
  float inverse{1.0f}, scale{1.0f};
  if constexpr (kScaled) {
    const uint32_t mine = __reduce_max_sync(kAllLanes, x.largest());
    if (lane == 0) scratch.largest[warp] = mine;
    __syncthreads();
    const uint32_t largest = scratch.largest[lane % share.subs * (kDecodeWarps / share.subs) + share.slice];
    inverse = normalizer<F, D>(__reduce_max_sync(kAllLanes, largest), scale);
  }
  const int in_part = share.slice & (p.block_slices() - 1);
  if (share.sub == 0 && lane == 0) reinterpret_cast<float*>(image + p.scales_at)[in_part * C + row] = scale;
  int total[D]{};
  emit<F, Grouped, D, C>(a, row, k, in, to, inverse, reinterpret_cast<int*>(image + p.sums_at), total,
                         [&](float (&v)[8]) { x.unpack(v); });
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
  if constexpr (!kFloatActivations<F, D>) {
    if (a.x_aligned && p.short_row()) {
      prepare_short_row<F, Grouped, D, C>(a, row, share, scratch, to, image, scratch.sums);
      if constexpr (Format<F>::kInteger && !Grouped) put_slice_sums<D, C>(a, row, share, scratch, image);
      return;
    }
  }
  dependency_wait();
  dependency_release();
  a.x_aligned ? prepare_row<F, Grouped, D, C, true>(a, row, share, scratch, to, image)
              : prepare_row<F, Grouped, D, C, false>(a, row, share, scratch, to, image);
}

// Waits for the kernel ahead and brings the block's image to shared memory; `scratch` there holds a RowScratch.
template <WeightFormat F, bool Grouped, int D, int C>
__device__ __forceinline__ void prepare_image(const DecodeArgs& a, uint8_t* image, void* scratch, int part) {
  const DecodePlan& p = a.plan;
  if constexpr (C == 1 && !kFloatActivations<F, D>) {
    if (a.images == nullptr && p.short_row()) {
      const WarpShare share(a, 0, p.block_log);
      const RowTarget to{image + p.planes_at + share.slice * p.plane_pad, nullptr, 0};
      prepare_short_row<F, Grouped, D, 1>(a, 0, share, *static_cast<RowScratch<D>*>(scratch), to, image,
                                          reinterpret_cast<int*>(image + p.sums_at));
      return;
    }
  }
  dependency_wait();
  dependency_release();
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
