// From rows of x to planes: a norm where one comes first, the scale of each slice, digits and their sums.
//
// A block prepares a whole row, since a norm needs all of it; `subs` warps share a slice and take rounds of 256
// columns in turn. This runs once a launch, before any product, so what counts is the chain of dependent instructions:
// short, not wide.
#pragma once

#include "linear_records.cuh"
#include "linear_stream.cuh"
#include "norm_sum.cuh"

namespace nibblelm::cuda {

constexpr int kRound{8 * kWarp};  // columns of a warp at a time
static_assert(kMaxNormColumns <= kMostRounds * kRound * kDecodeWarps);

// Sums of a row on their way.
template <int D>
struct alignas(16) RowScratch {
  float steps[kMaxNormColumns / kStepK];  // of squares
  static_assert(kStepK == 8 * kNormLanes);
  uint32_t largest[kDecodeWarps];  // what range() gave
  int sums[kMaxSlices * kGroupWords<D>];
  float scales[kMaxSlices];
};
static_assert(sizeof(RowScratch<3>) <= kDecodeWarps * kStripRows * sizeof(float));  // what the sums of one row take

// What one warp does of every row: its slice, counted from `first_slice` on, and its place in the slice.
struct WarpShare {
  int slice, sub, slices, subs;
  int first, last;  // columns of the slice
  __device__ __forceinline__ WarpShare(const DecodeArgs& a, int first_slice, int log) {
    const int warp = threadIdx.x / kWarp;
    slices = 1 << log, slice = warp & (slices - 1), sub = warp >> log, subs = kDecodeWarps >> log;
    first = slice_begin(first_slice + slice, a.plan.slices_log, a.steps) * kStepK;
    last = slice_begin(first_slice + slice + 1, a.plan.slices_log, a.steps) * kStepK;
  }
  // The lane's columns of the warp's first round, and from one round to the next.
  __device__ __forceinline__ int begin() const {
    return first + sub * kRound + 8 * static_cast<int>(threadIdx.x % kWarp);
  }
  __device__ __forceinline__ int step() const { return subs * kRound; }
};

// Where a row's planes, digit sums and scales go in an image of the decode kernel.
template <WeightFormat F, int D, int C>
struct ImageRow {
  static constexpr int kSumStep{C};  // between the words of a group's digit sums
  uint8_t* planes;                   // of column `first_column`
  int first_column;
  uint8_t* image;
  int row;
  const DecodeArgs& a;
  const DecodePlan& p{a.plan};

  // Where the planes of column k go, and of a column that is a multiple of 64 further on.
  using Place = uint8_t*;
  __device__ __forceinline__ Place place(int k) const { return planes + plane_offset<F, D>(k - first_column); }
  __device__ __forceinline__ static Place further(Place from, int columns) {
    return from + columns * D * Format<F>::kPlaneBytes;
  }
  __device__ __forceinline__ void store(Place to, const PlaneWords<F, D>& words) const {
    store_planes<F, D>(to, words);
  }
  __device__ __forceinline__ int* sums() const { return reinterpret_cast<int*>(image + p.sums_at) + row; }
  __device__ __forceinline__ int* group_sums(int k, int shift) const {
    return sums() + (k - first_column >> shift) * kGroupWords<D> * C;
  }
  __device__ __forceinline__ float* scale(int slice) const {
    return reinterpret_cast<float*>(image + p.scales_at) + (slice & (p.block_slices() - 1)) * C + row;
  }
  // Where sums stay integers an image has shifts in the place of scales; the one row that a block prepares itself keeps
  // scales, which it sums x with.
  __device__ __forceinline__ void store_scale(int slice, float scale, int shift) const {
    *this->scale(slice) = C == 1 && a.images == nullptr ? scale : __int_as_float(shift);
  }
  // One row's scales stand for all slices there may be, so that who adds need not ask how many there are.
  __device__ __forceinline__ void pad_scales(int slices) const {
    const int slice = threadIdx.x;
    if (C == 1 && p.parts_log == 0 && slice >= slices && slice < kMaxSlices) {
      reinterpret_cast<float*>(image + p.scales_at)[slice] = 0.0f;
    }
  }
  __device__ __forceinline__ void store_total(float total, float unit) const {
    for (int part = 0; part < p.parts(); ++part) {
      float* const totals = reinterpret_cast<float*>(a.images + part * p.image_bytes + p.totals_at);
      totals[row] = total;
      if constexpr (kOneSum<F, false, D>) totals[C + row] = unit;
    }
  }
};

// The sum of a row of x from the digit sums (W words each) and scales of kMaxSlices slices, zeros where it has fewer.
template <int W>
__device__ __forceinline__ float row_total(const int* sums, const float* scales) {
  alignas(16) int own[kMaxSlices][W];
  alignas(16) float scale[kMaxSlices];
#pragma unroll
  for (int i = 0; i < kMaxSlices * W; i += 4) {
    *reinterpret_cast<int4*>(own[0] + i) = *reinterpret_cast<const int4*>(sums + i);
  }
#pragma unroll
  for (int i = 0; i < kMaxSlices; i += 4) {
    *reinterpret_cast<float4*>(scale + i) = *reinterpret_cast<const float4*>(scales + i);
  }
  float total{0.0f};
#pragma unroll
  for (int i = 0; i < kMaxSlices; ++i) total = fmaf(join_digits<W>(own[i]), scale[i], total);
  return total;
}

__device__ __forceinline__ float squares(const Chunk<false>& chunk, float mean = 0.0f) {
  float v[8], sum{0.0f};
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(v[i] - mean, v[i] - mean, sum);
  return sum;
}

__device__ __forceinline__ float added_up(const Chunk<false>& chunk) {
  float v[8], sum{0.0f};
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += v[i];
  return sum;
}

// Brings bf16 activations of a row to the stage. Returns their range.
template <bool Bounded, bool Aligned>
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
      largest = max(largest, chunk[i].range<Bounded>());
    }
  }
  return largest;
}

// Gains as factors. Whatever looks at a gain waits for it, so that this comes behind the sums where registers allow.
__device__ __forceinline__ void make_factors(const DecodeArgs& a, float (&gain)[8]) {
  if (!a.plus_one) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) gain[i] += 1.0f;
}

// As rms_norm rounds it, without negative zeros, to which it adds its bias.
__device__ __forceinline__ Chunk<false> normed(const Chunk<false>& chunk, float factor, const float (&gain)[8]) {
  float v[8];
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i] * factor, gain[i], 0.0f);
  return pack_chunk(v);
}

// As layer_norm does.
__device__ __forceinline__ Chunk<false> normed(const Chunk<false>& chunk, float mean, float factor,
                                               const float (&gain)[8], const float (&bias)[8]) {
  float v[8];
  chunk.unpack(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = fmaf((v[i] - mean) * factor, gain[i], bias[i]);
  return pack_chunk(v);
}

// Writes 8 activations at column k (`in`: of the slice) as planes, and digit sums of groups; all lanes together. Adds
// the digits to `total` where the sums are those of slices.
template <WeightFormat F, bool Grouped, int D, class To, class Load>
__device__ __forceinline__ void emit(const DecodeArgs& a, int k, bool in, const To& to, typename To::Place place,
                                     float inverse, int (&total)[D], Load load) {
  const int lane = threadIdx.x % kWarp;
  int sum[D]{};
  float v[8];
  if (in) load(v);
  __syncwarp();  // neighbours have read what this lane may write over
  if (in) to.store(place, PlaneWords<F, D>(v, inverse, sum));
  if constexpr (Grouped && Format<F>::kInteger) {
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
      int* const target = to.group_sums(k, a.group_shift);
      if constexpr (D == 2) {
        *target = sum[0] * 256 + sum[1];
      } else {
#pragma unroll
        for (int d = 0; d < D; ++d) target[d * to.kSumStep] = sum[d];
      }
    }
  } else {
#pragma unroll
    for (int d = 0; d < D; ++d) total[d] += sum[d];
  }
}

// Adds a warp's digits to the sums of its slice, W neighbours; in one word they are those of an integer.
template <int W, int D>
__device__ __forceinline__ void add_digits(const int (&total)[D], int* slice_sums) {
  static_assert(W == D || D == 2);
#pragma unroll
  for (int d = 0; d < W; ++d) {
    const int all = __reduce_add_sync(kAllLanes, W < D ? total[0] * 256 + total[1] : total[d]);
    if (threadIdx.x % kWarp == 0) atomicAdd(slice_sums + d, all);
  }
}

// Of this warp's slice: the factor of its activations, and its inverse; all warps' largest are there. `to` gets the
// inverse, and where sums stay integers what takes those of the slices before to its units.
template <WeightFormat F, bool Grouped, int D, class To>
__device__ __forceinline__ float scale_slice(const DecodeArgs& a, const WarpShare& share, RowScratch<D>& scratch,
                                             const To& to) {
  const int lane = threadIdx.x % kWarp;
  float inverse{1.0f}, scale{1.0f};
  if constexpr (Format<F>::kScaled) {
    const auto largest_of = [&](int slice) {
      return __reduce_max_sync(kAllLanes, scratch.largest[(lane & share.subs - 1) * share.slices + slice]);
    };
    const uint32_t largest = largest_of(share.slice);
    if constexpr (kOneSum<F, Grouped, D>) {
      const uint32_t of_row = __reduce_max_sync(kAllLanes, scratch.largest[lane % kDecodeWarps]);
      const auto finer_of = [&](uint32_t of_slice) { return finer_by(of_row, of_slice, a.steps * kStepK); };
      inverse = normalizer<F, false, D>(of_row, scale);
      const bool none = inverse == 0.0f;  // only zeros, or not finite
      const int finer = none ? 0 : finer_of(largest),
                before = none || share.slice == 0 ? finer : finer_of(largest_of(share.slice - 1));
      inverse = __int_as_float(__float_as_int(inverse) + (finer << 23));
      scale = __int_as_float(__float_as_int(scale) - (finer << 23));
      if (share.sub == 0 && lane == 0) {
        to.store_scale(share.slice, scratch.scales[share.slice] = scale, unit_shift(finer - before));
      }
      return inverse;
    } else {
      inverse = normalizer<F, kBounded<F, Grouped, D>, D>(largest, scale);
    }
  }
  if (share.sub == 0 && lane == 0) *to.scale(share.slice) = scratch.scales[share.slice] = scale;
  return inverse;
}

// By the whole block, before `add_digits`: sums of all slices there may be, and the scales of those that are not there.
template <int D, class To>
__device__ __forceinline__ void clear_sums(const WarpShare& share, RowScratch<D>& scratch, const To& to,
                                           int* slice_sums) {
  const int i = threadIdx.x;
  if (i < kMaxSlices * kGroupWords<D>) slice_sums[i] = 0;
  if (i >= share.slices && i < kMaxSlices) scratch.scales[i] = 0.0f;
  to.pad_scales(share.slices);
}

// One row, or what a block takes of it, by the whole block. `stage`: where bf16 activations wait for their scale, from
// column 0 on: for an image in shared memory the very place of their planes, which are as large. `slice_sums` in shared
// memory gets the digit sums of slices. The block synchronizes before it uses the result.
template <WeightFormat F, bool Grouped, int D, bool Aligned, class To>
__device__ __forceinline__ void prepare_row(const DecodeArgs& a, int row, const WarpShare& share,
                                            RowScratch<D>& scratch, const To& to, uint8_t* stage, int* slice_sums) {
  constexpr bool kFloat{kFloatActivations<F, D>}, kScaled{Format<F>::kScaled}, kSummed{Format<F>::kInteger && !Grouped};
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto put_largest = [&](uint32_t largest) {
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane == 0) scratch.largest[warp] = largest;
  };
  if (kSummed) clear_sums(share, scratch, to, slice_sums);
  uint32_t largest{0};
  if constexpr (!kFloat) {
    largest = stage_row<kBounded<F, Grouped, D>, Aligned>(a, share, row, stage);
  } else if constexpr (kScaled) {
#pragma unroll 2
    for (int k = share.begin(); k < share.last; k += share.step()) {
      largest = max(largest, load_chunk<true, Aligned>(a, row, k, share.last).largest());
    }
  }
  if constexpr (kScaled) {
    put_largest(largest);
    __syncthreads();
  }
  const float inverse = scale_slice<F, Grouped>(a, share, scratch, to);
  int total[D]{};
#pragma unroll 1
  for (int k = share.begin(); k - 8 * lane < share.last; k += share.step()) {  // all lanes together
    emit<F, Grouped, D>(a, k, k < share.last, to, to.place(k), inverse, total, [&](float (&v)[8]) {
      Chunk<kFloat> chunk;
      if constexpr (kFloat) {
        chunk = load_chunk<true, Aligned>(a, row, k, share.last);
      } else {
        chunk.word[0] = *reinterpret_cast<const uint4*>(stage + 2 * k);
      }
      chunk.unpack(v);
    });
  }
  if constexpr (kSummed) add_digits<kGroupWords<D>>(total, slice_sums + share.slice * kGroupWords<D>);
}

// The same for a row of which every thread has at most 8 R activations, after a norm where there is one (Normed: it is
// compiled for that), and what E says before the residual is added: they stay in registers, and what does not depend on
// them is done before the wait for what stores them.
template <WeightFormat F, bool Grouped, int D, int R, Extras E, bool Normed, class To, class Wait>
__device__ __forceinline__ void prepare_short_row(const DecodeArgs& a, int row, const WarpShare& share,
                                                  RowScratch<D>& scratch, const To& to, int* slice_sums, Wait wait) {
  constexpr bool kScaled{Format<F>::kScaled}, kSummed{Format<F>::kInteger && !Grouped};
  constexpr bool Post{Normed && E == Extras::post}, Layer{E == Extras::layer};
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, begin = share.begin(), step = share.step();
  const int last = min(share.last, a.k);
  const RowSource source(a, row, begin, Post && a.post_gain != nullptr);
  const bf16* addend{nullptr};
  if (Layer && a.addend != nullptr) addend = keep(static_cast<const bf16*>(a.addend) + row * a.addend_stride + begin);
  // 1: of the sum with the residual; 2: of x too; 3: of x alone
  const int plain = Normed && a.gain != nullptr;
  const int norms = keep(!Post || a.post_gain == nullptr ? plain : plain == 1 ? 2 : 3);
  const float each = keep(1.0f / static_cast<float>(a.k)), eps = keep(a.eps);
  // Two rounds together as far as registers allow: what is loaded, and their gains, before the wait or, of LayerNorm,
  // behind x.
  constexpr bool kTogether{R == 2 && Normed && !Grouped}, kHolds{R == 1 || kTogether}, kLate{Layer && kTogether};
  constexpr int kHeld{kHolds ? R : 1};
  float gain[kHeld][8]{}, post_gain[kHeld][8]{}, bias[8]{};  // of LayerNorm: asked for before the wait with one round
  if constexpr (kHolds) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int k = begin + r * step;
      const auto load = [&](const float* gains, float (&own)[8]) {
        load_constant(gains + k, own);
        if (Post) make_factors(a, own);  // no registers to put it off
      };
      if (!kLate && norms > 0 && (!Post || norms < 3) && k < last) load(a.gain, gain[r]);
      if (Post && norms > 1 && k < last) load(a.post_gain, post_gain[r]);
      if (Layer && R == 1 && a.gain_bias != nullptr && k < last) load_constant(a.gain_bias + k, bias);
    }
  }
  if constexpr (!kHolds || kLate) {  // no registers for them: asked into L2, which the weights have driven them out of
#pragma unroll 1
    for (int k = begin; norms > 0 && k < last; k += step) {
      if (!Post || norms < 3) prefetch_l2(a.gain + k);
      if (Post && norms > 1) prefetch_l2(a.post_gain + k);
      if (Layer && a.gain_bias != nullptr) prefetch_l2(a.gain_bias + k);
    }
  }
  wait();
  if (kSummed) clear_sums(share, scratch, to, slice_sums);
  Chunk<false> x[R]{};
  if constexpr (kTogether) {
    Chunk<false> other[R]{}, more[R]{};
    const bool adds_more = Layer && addend != nullptr;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (begin + r * step < last) {
        x[r] = RowSource::read(source.x + r * step);
        if (source.residual != nullptr) other[r] = RowSource::read(source.residual + r * step);
        if (adds_more) more[r] = RowSource::read(addend + r * step);
      }
    }
    if (source.residual != nullptr) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (adds_more) x[r] = RowSource::plus(x[r], more[r]);
        if (begin + r * step < last) x[r] = source.sum(x[r], other[r], r * step);
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (begin + r * step < last) x[r] = Layer ? source.load(r * step, addend) : source.load(r * step);
    }
  }
  const auto row_sum = [&](auto of) {  // of(r): over a round's columns
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float sum = norm_step_sum(of(r));
      if (begin + r * step < share.last && lane % kNormLanes == 0) scratch.steps[(begin + r * step) / kStepK] = sum;
    }
    __syncthreads();
    return norm_row_sum(scratch.steps, a.steps);
  };
  const auto norm = [&](const float* gains, float (&own)[kHeld][8], float least) {
    float mean{0.0f};
    if constexpr (kLate) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (begin + r * step < last) load_constant(gains + begin + r * step, own[r]);
      }
    }
    if (Layer && a.centres) {
      mean = __fdiv_rn(row_sum([&](int r) { return added_up(x[r]); }), static_cast<float>(a.k));
      __syncthreads();  // all have read the sums of steps
    }
    const float sum = row_sum([&](int r) {
      if constexpr (Layer) return begin + r * step < last ? squares(x[r], mean) : 0.0f;
      return squares(x[r]);
    });
    const float factor = rsqrtf(sum * each + least);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int k = begin + r * step;
      if (k < last) {
        if (!kHolds) load_constant(gains + k, own[0]);
        if (!kHolds || !Post) make_factors(a, own[r % kHeld]);
      }
      if constexpr (Layer) {
        if (R > 1 && a.gain_bias != nullptr && k < last) load_constant(a.gain_bias + k, bias);
        if (k < last) x[r] = normed(x[r], mean, factor, own[r % kHeld], bias);
      } else {
        x[r] = normed(x[r], factor, own[r % kHeld]);
      }
    }
  };
  if (Normed && norms > 0) {
    if (Post && norms > 1) {
      Chunk<false> first{};  // asked for before the norm where registers allow
      if (R == 1 && begin < last) first = RowSource::read(RowSource::residual_of(a, row, begin));
      norm(a.post_gain, post_gain, a.post_eps);
      __syncthreads();  // all have read the sums of steps that the next norm writes over
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int k = begin + r * step;
        if (k < last)
          x[r] = source.sum(x[r], R == 1 ? first : RowSource::read(RowSource::residual_of(a, row, k)), r * step);
      }
    }
    if (!Post || norms < 3) norm(a.gain, gain, eps);
  }
  if constexpr (kScaled) {
    uint32_t largest{0};
#pragma unroll
    for (int r = 0; r < R; ++r) largest = max(largest, x[r].template range<kBounded<F, Grouped, D>>());
    largest = __reduce_max_sync(kAllLanes, largest);
    if (lane == 0) scratch.largest[warp] = largest;
    __syncthreads();
  }
  const float inverse = scale_slice<F, Grouped>(a, share, scratch, to);
  int total[D]{};
  const auto place = to.place(begin);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int k = begin + r * step;
    emit<F, Grouped, D>(a, k, k < share.last, to, to.further(place, r * step), inverse, total,
                        [&](float (&v)[8]) { x[r].unpack(v); });
  }
  if constexpr (kSummed) add_digits<kGroupWords<D>>(total, slice_sums + share.slice * kGroupWords<D>);
}

// Row blockIdx.x to memory, in whatever form `to` gives it; `stage`: 2 K bytes of shared memory, unless x is fp32.
// The next kernel may start before the wait, since it takes longer to start than this one works.
template <WeightFormat F, bool Grouped, int D, Extras E, class To>
__device__ __forceinline__ void prepare_to_memory(const DecodeArgs& a, const WarpShare& share, RowScratch<D>& scratch,
                                                  const To& to, uint8_t* stage) {
  const int row = blockIdx.x;
  int* const sums = scratch.sums;
  dependency_release();
  const auto wait = [] { dependency_wait(); };
  if (!kFloatActivations<F, D> && a.x_aligned && a.plan.row_rounds <= kMostRounds) {
    if constexpr (!kFloatActivations<F, D>) {
      a.plan.row_rounds == 1
          ? prepare_short_row<F, Grouped, D, 1, E, true>(a, row, share, scratch, to, sums, wait)
          : prepare_short_row<F, Grouped, D, kMostRounds, E, true>(a, row, share, scratch, to, sums, wait);
    }
  } else {
    wait();
    a.x_aligned ? prepare_row<F, Grouped, D, true>(a, row, share, scratch, to, stage, sums)
                : prepare_row<F, Grouped, D, false>(a, row, share, scratch, to, stage, sums);
  }
  if constexpr (Format<F>::kInteger && !Grouped) {
    __syncthreads();
    if (threadIdx.x == 0) {
      to.store_total(row_total<kGroupWords<D>>(sums, scratch.scales), scratch.scales[share.slices - 1]);
    }
  }
}

// Shared memory that it needs: none for a short row, or there would be no room beside the block ahead.
template <WeightFormat F, int D>
int stage_row_bytes(const DecodeArgs& a) {
  const bool in_registers = a.x_aligned && a.plan.row_rounds <= kMostRounds;
  return kFloatActivations<F, D> || in_registers ? 0 : 2 * kStepK * a.steps;
}

// Asks L2 for what a ring takes first, of as many blocks of the linear as this kernel has: its last ones, which find no
// room before this one's have ended.
template <WeightFormat F, bool Grouped, int C>
__device__ __forceinline__ void ask_for_late_rings(const DecodeArgs& a) {
  const int block = a.plan.grid - 1 - static_cast<int>(blockIdx.x);
  if (block < 0) return;
  const WarpPart w = WarpPart::of<F, C>(a, block, a.plan.grid);
  if (w.first_strip >= a.strips) return;
  constexpr int kStage{Format<F>::kStageBytes};
  const uint8_t* const from = a.data + (static_cast<int64_t>(w.first_strip) * a.stages + w.first_stage) * kStage;
  const int bytes = min(w.stages, Stream<F, Grouped, C>::kStages) * kStage;
#pragma unroll 1
  for (int at = threadIdx.x % kWarp * 128; at < bytes; at += kWarp * 128) prefetch_l2(from + at);
}

// One block per row, for plans whose blocks copy their part's image instead of preparing it again. It fits beside a
// block of the kernel ahead.
template <WeightFormat F, bool Grouped, int D, int C, Extras E>
__global__ void __launch_bounds__(kDecodeThreads, 2) linear_planes_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(16) uint8_t stage[];
  __shared__ RowScratch<D> scratch;
  const DecodePlan& p = a.plan;
  if constexpr (C == 8 && Format<F>::kInteger) ask_for_late_rings<F, Grouped, C>(a);
  const WarpShare share(a, 0, p.slices_log);
  const int part = share.slice >> p.block_log, row = blockIdx.x;
  uint8_t* const image = a.images + part * p.image_bytes;
  const int first_step = slice_begin(part << p.block_log, p.slices_log, a.steps),
            begin = share.first / kStepK - first_step;
  const int at = p.planes_of(share.slice & (p.block_slices() - 1), row, begin, share.last / kStepK - first_step);
  uint8_t* const planes = image + p.planes_at + at - begin * kStepK * p.column_bytes;
  prepare_to_memory<F, Grouped, D, E>(a, share, scratch, ImageRow<F, D, C>{planes, first_step * kStepK, image, row, a},
                                      stage);
}

// Of one row: waits for what has stored x and brings the block's image to shared memory; `scratch` there holds a
// RowScratch.
template <WeightFormat F, bool Grouped, int D, Extras E, class Wait>
__device__ __forceinline__ void prepare_image(const DecodeArgs& a, uint8_t* image, void* scratch, int part, Wait wait) {
  const DecodePlan& p = a.plan;
  RowScratch<D>& sums = *static_cast<RowScratch<D>*>(scratch);
  if constexpr (!kFloatActivations<F, D>) {
    if (a.images == nullptr && p.row_rounds <= kMostRounds) {
      constexpr bool kShort{E != Extras::post};  // two norms of two rounds have no registers for them together
      const WarpShare share(a, 0, p.block_log);
      const ImageRow<F, D, 1> to{image + p.planes_at + share.slice * p.plane_pad, 0, image, 0, a};
      int* const digits = to.sums();
      if (p.row_rounds == 1) {
        prepare_short_row<F, Grouped, D, 1, E, true>(a, 0, share, sums, to, digits, wait);
      } else if (p.row_rounds == 2 && (kShort || (a.gain == nullptr && a.post_gain == nullptr))) {
        prepare_short_row<F, Grouped, D, 2, E, kShort>(a, 0, share, sums, to, digits, wait);
      } else {
        prepare_short_row<F, Grouped, D, kMostRounds, E, !kShort>(a, 0, share, sums, to, digits, wait);
      }
      return;
    }
  }
  wait();
  constexpr bool kLong{D > 1 || !Format<F>::kInteger};  // by one digit long rows are always prepared apart
  if (kLong && a.images == nullptr) {
    const int first_column = slice_begin(part << p.block_log, p.slices_log, a.steps) * kStepK;
    const WarpShare share(a, part << p.block_log, p.block_log);
    uint8_t* const planes = image + p.planes_at + share.slice * p.plane_pad;
    const ImageRow<F, D, 1> to{planes, first_column, image, 0, a};
    prepare_row<F, Grouped, D, true>(a, 0, share, sums, to, planes - 2 * first_column, to.sums());
  } else {
    const uint4* const from = reinterpret_cast<const uint4*>(a.images + part * p.image_bytes);
#pragma unroll 4
    for (int i = threadIdx.x; i < p.image_bytes / 16; i += kDecodeThreads) reinterpret_cast<uint4*>(image)[i] = from[i];
  }
}

}  // namespace nibblelm::cuda
