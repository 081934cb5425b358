// Activations of the decode kernel as "planes" in shared memory: int8 digits with a power-of-two scale per slice and
// row (integer weights), or terms in the weight's half precision whose sum is the activation.
#pragma once

#include "linear.h"
#include "norm_sum.cuh"
#include "tiles.h"
#include "vector.cuh"

namespace nibblelm::cuda {

template <WeightFormat F>
struct Format {
  static constexpr bool kInteger{F == WeightFormat::int4 || F == WeightFormat::int8};
  static constexpr int kStageBytes{stage_bytes(F)};
  static constexpr int kCopies{kStageBytes / 512};  // 16-byte copies of a lane for one stage
  static constexpr int kStageK{kInteger ? kStepK : F == WeightFormat::f32 ? 32 : 64};
  static constexpr int kPlaneBytes{kInteger ? 1 : 2};                 // of one element of a plane
  static constexpr bool kScaled{kInteger || F == WeightFormat::f16};  // planes are x * 2^-e, e per slice and row
  using Accumulator = std::conditional_t<kInteger, int, float>;
};

// bf16 activations take the fewest planes of a format, fp32 the most.
template <WeightFormat F, int D>
constexpr bool kFloatActivations{D == decode_planes(F, DType::f32)};

template <WeightFormat F, int D>
constexpr bool kDigitColumns{digit_columns(Format<F>::kInteger, D)};

struct DecodeArgs {
  const uint8_t* data;
  const uint8_t* records;
  const void* x;
  void* y;
  const float* bias;
  float* partials;
  uint8_t* images;  // planes, sums and scales of every part, prepared once; null: each block prepares its own
  int* arrivals;
  int64_t x_stride;
  int64_t y_stride;
  int64_t pitch_bytes;  // full formats
  int n, k;
  int strips, steps;
  int stages;               // of one strip
  int groups, group_shift;  // integer formats: groups of a row; log2 of the group size, or 0 for per-row
  int record_bytes, minimum_at, default_zero;
  DType scale_dtype, y_dtype;
  bool has_zero, has_minimum, x_aligned;
  const float* gain;  // null: no norm
  const void* residual;
  void* h;
  int64_t residual_stride;
  float eps;
  bool plus_one, swiglu;
  DecodePlan plan;
};

// Launches the kernel for one weight format; defined in linear_decode.cuh, one file per format instantiates it.
template <WeightFormat F>
void launch_format(const DecodeArgs& a, bool float_activations, const Launch& launch, const std::string& what);

// Eight activations as they are in memory.
template <bool Float>
struct Chunk {
  uint4 word[Float ? 2 : 1];

  // The largest magnitude, as the bits of a float: NaN is larger than infinity, which is larger than every number.
  __device__ __forceinline__ uint32_t largest() const {
    if constexpr (Float) {
      uint32_t out{0};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t w[4]{word[i].x, word[i].y, word[i].z, word[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) out = max(out, w[j] & 0x7fffffffu);
      }
      return out;
    } else {
      constexpr uint32_t kSigns{0x7fff7fffu};
      const uint32_t pair =
          __vmaxu2(__vmaxu2(word[0].x & kSigns, word[0].y & kSigns), __vmaxu2(word[0].z & kSigns, word[0].w & kSigns));
      return max(pair << 16, pair & 0xffff0000u);
    }
  }

  __device__ __forceinline__ void unpack(float (&v)[8]) const {
    if constexpr (Float) {
      memcpy(v, word, 32);
    } else {
      const uint32_t w[4]{word[0].x, word[0].y, word[0].z, word[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = __uint_as_float(w[i] << 16);
        v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      }
    }
  }
};

__device__ __forceinline__ Chunk<false> pack_chunk(const float (&v)[8]) {
  return {{{pack2<bf16>(v[0], v[1]), pack2<bf16>(v[2], v[3]), pack2<bf16>(v[4], v[5]), pack2<bf16>(v[6], v[7])}}};
}

// Activations from column k on; zeros from `last` or K on. Vector loads need aligned rows and K a multiple of 8.
template <bool Float, bool Aligned>
__device__ __forceinline__ Chunk<Float> load_chunk(const DecodeArgs& a, int row, int k, int last) {
  using T = std::conditional_t<Float, float, bf16>;
  const T* const p = static_cast<const T*>(a.x) + row * a.x_stride + k;
  Chunk<Float> out{};
  if constexpr (Aligned) {
    if (k < min(last, a.k)) {
      out.word[0] = *reinterpret_cast<const uint4*>(p);
      if constexpr (Float) out.word[1] = reinterpret_cast<const uint4*>(p)[1];
    }
  } else {
    alignas(16) T v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = k + i < min(last, a.k) ? p[i] : from_float<T>(0.0f);
    memcpy(&out, v, sizeof(out));
  }
  return out;
}

// Columns k to k + 7 of x + residual, rounded; zeros from K on. `keep`: also into h.
__device__ __forceinline__ Chunk<false> load_sum(const DecodeArgs& a, int row, int k, bool keep) {
  Chunk<false> x = load_chunk<false, true>(a, row, k, a.k);
  if (a.residual == nullptr || k >= a.k) return x;
  const bf16* const residual = static_cast<const bf16*>(a.residual) + row * a.residual_stride + k;
  const Chunk<false> r{{*reinterpret_cast<const uint4*>(residual)}};
  float v[8], w[8];
  x.unpack(v), r.unpack(w);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += w[i];
  x = pack_chunk(v);
  if (keep) *reinterpret_cast<uint4*>(static_cast<bf16*>(a.h) + static_cast<int64_t>(row) * a.k + k) = x.word[0];
  return x;
}

// ---- planes --------------------------------------------------------------------------------------------------

// Gathers byte `Byte` of four words.
template <int Byte>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kPair{(Byte + 4u) << 4 | Byte};
  return __byte_perm(__byte_perm(a, b, kPair), __byte_perm(c, d, kPair), 0x5410);
}

// Balanced base-256 digits of v * inverse rounded to integers, most significant plane first. With 128 added at every
// digit but the first, the digits are the integer's bytes, each 128 too high.
template <int D>
__device__ __forceinline__ void encode_digits(const float (&v)[8], float inverse, uint2 (&plane)[D]) {
  uint32_t e[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (D == 2) {  // 1.5 x 2^23: the sum's last bits are the rounded integer
      e[i] = __float_as_uint(fmaf(v[i], inverse, 12582912.0f + 128.0f));
    } else {
      e[i] = static_cast<uint32_t>(__float2int_rn(v[i] * inverse)) + 0x8080u;
    }
  }
  const auto gather = [&]<int Byte>(uint32_t flip) {
    return make_uint2(gather_bytes<Byte>(e[0], e[1], e[2], e[3]) ^ flip,
                      gather_bytes<Byte>(e[4], e[5], e[6], e[7]) ^ flip);
  };
  plane[0] = gather.template operator()<D - 1>(0u);
  if constexpr (D == 3) plane[1] = gather.template operator()<1>(0x80808080u);
  plane[D - 1] = gather.template operator()<0>(0x80808080u);
}

// Writes 8 activations as D planes at `shared`; adds the digits to `sums` (integer formats).
template <WeightFormat F, int D>
__device__ __forceinline__ void store_planes(uint8_t* shared, const float (&v)[8], float inverse, int (&sums)[D]) {
  if constexpr (Format<F>::kInteger) {
    uint2 plane[D];
    encode_digits<D>(v, inverse, plane);
#pragma unroll
    for (int d = 0; d < D; ++d) {
      sums[d] = __dp4a(static_cast<int>(plane[d].x), 0x01010101, sums[d]);
      sums[d] = __dp4a(static_cast<int>(plane[d].y), 0x01010101, sums[d]);
    }
    if constexpr (D == 2) {
      reinterpret_cast<uint2*>(shared)[0] = plane[0], reinterpret_cast<uint2*>(shared)[2] = plane[1];
    } else {
#pragma unroll
      for (int d = 0; d < D; ++d) reinterpret_cast<uint2*>(shared)[d] = plane[d];
    }
  } else {
    using T = std::conditional_t<F == WeightFormat::f16, half, bf16>;
    float rest[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) rest[i] = v[i] * inverse;
#pragma unroll
    for (int d = 0; d < D; ++d) {
      Vec<T> term;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        term.v[i] = from_float<T>(rest[i]);
        rest[i] -= to_float(term.v[i]);  // exact
      }
      store_vec(reinterpret_cast<T*>(shared) + 8 * d, term);
    }
  }
}

// Where 8 columns of a row's planes start, from column k on (a multiple of 8). Digits of 64 columns lie as the lanes
// read them: [k / 8 % 4][digit][k / 32 % 2], so that 16 bytes serve two tiles and 8 lanes meet all banks.
template <WeightFormat F, int D>
__device__ __forceinline__ int plane_offset(int k) {
  if constexpr (kDigitColumns<F, D>) {
    return k / 64 * 128 + k / 8 % 4 * 32 + k / 32 % 2 * 8;
  } else {
    return k * D * Format<F>::kPlaneBytes;
  }
}

// The power of two that brings `largest` (the bits of a non-negative float) just under the top of the planes' range,
// and its inverse in `scale`, which is NaN where an activation is infinite or NaN, so that the row's outputs are.
template <WeightFormat F, int D>
__device__ __forceinline__ float normalizer(uint32_t largest, float& scale) {
  constexpr float kTop{F == WeightFormat::f16 ? 32768.0f : D == 2 ? 127.0f * 256 : 127.0f * 65536};
  // On the bits of floats: a difference of exponents, one less where the mantissa borrows; no division.
  constexpr uint32_t kOne{0x3f800000u}, kExponent{0x7f800000u}, kLeast{0x0da24260u};  // 1e-30
  const uint32_t inverse = (__float_as_uint(kTop) - max(largest, kLeast) + kOne) & kExponent;
  scale = __uint_as_float(largest >= kExponent ? 0x7fc00000u : 2 * kOne - inverse);
  return largest == 0 ? 0.0f : __uint_as_float(inverse);
}

// Words of a group's digit sums: two digits of a group of 128 fit int32 together, three do not.
template <int D>
constexpr int kGroupWords{D == 2 ? 1 : D};

// ---- preparation -----------------------------------------------------------------------------------------------
//
// A block prepares a whole row, since RMSNorm needs all of it; `subs` warps share a slice and take rounds of 256
// columns in turn. Latency is all that counts here, and loops stay rolled: this code runs once a launch, when
// instructions that are not in the cache cost more than the work.

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
