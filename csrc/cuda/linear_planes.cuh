// Activations of the decode kernel as "planes" in shared memory: int8 digits with a power-of-two scale per slice and
// row (integer weights), or terms in the weight's half precision whose sum is the activation.
#pragma once

#include "linear.h"
#include "norm.h"
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
  int norm_threads;
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

// ---- RMSNorm of bf16 activations on their way in, to the bit as norm.cuh does it -------------------------------

__device__ __forceinline__ Chunk<false> pack_chunk(const float (&v)[8]) {
  return {{{pack2<bf16>(v[0], v[1]), pack2<bf16>(v[2], v[3]), pack2<bf16>(v[4], v[5]), pack2<bf16>(v[6], v[7])}}};
}

// x + residual, rounded; zeros from K on.
__device__ __forceinline__ Chunk<false> load_sum(const DecodeArgs& a, int row, int k) {
  Chunk<false> x = load_chunk<false, true>(a, row, k, a.k);
  if (a.residual == nullptr || k >= a.k) return x;
  const bf16* const residual = static_cast<const bf16*>(a.residual) + row * a.residual_stride + k;
  const Chunk<false> r{{*reinterpret_cast<const uint4*>(residual)}};
  float v[8], w[8];
  x.unpack(v), r.unpack(w);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += w[i];
  return pack_chunk(v);
}

// What thread `thread` of norm_kernel's block adds to the sum of squares of a row; with `keep` it also writes h.
__device__ __forceinline__ float norm_squares(const DecodeArgs& a, int row, int thread, bool keep) {
  Chunk<false> held[kNormHeld];
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) held[i] = load_sum(a, row, 8 * (thread + i * a.norm_threads));
  float sum{0.0f};
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) {
    const int k = 8 * (thread + i * a.norm_threads);
    float v[8];
    held[i].unpack(v);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(v[j], v[j], sum);
    if (keep && k < a.k)
      *reinterpret_cast<uint4*>(static_cast<bf16*>(a.h) + static_cast<int64_t>(row) * a.k + k) = held[i].word[0];
  }
  return sum;
}

// By a whole warp: `part` is what warp `lane` of norm_kernel's block has, 0 beyond them.
__device__ __forceinline__ float norm_factor(const DecodeArgs& a, float part) {
  return rsqrtf(warp_sum(part) / static_cast<float>(a.k) + a.eps);
}

// One row of activations as the kernel multiplies them: x, or its norm.
template <bool Float, bool Aligned>
struct Input {
  const DecodeArgs& a;
  int row;
  float factor;  // of the norm

  __device__ __forceinline__ Chunk<Float> read(int k, int last) const {
    if constexpr (!Float && Aligned) {
      if (a.gain != nullptr) {
        Chunk<false> chunk{};
        if (k >= min(last, a.k)) return chunk;
        float v[8], gain[8];
        load_constant(a.gain + k, gain);
        load_sum(a, row, k).unpack(v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * factor * (a.plus_one ? 1.0f + gain[i] : gain[i]);
        return pack_chunk(v);
      }
    }
    return load_chunk<Float, Aligned>(a, row, k, last);
  }
};

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
      *reinterpret_cast<uint4*>(shared) = make_uint4(plane[0].x, plane[0].y, plane[1].x, plane[1].y);
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

// The power of two that brings `largest` (the bits of a non-negative float) just under the top of the planes' range,
// and its inverse in `scale`, which is NaN where an activation is infinite or NaN, so that the row's outputs are.
template <WeightFormat F, int D>
__device__ __forceinline__ float normalizer(uint32_t largest, float& scale) {
  constexpr float kTop{F == WeightFormat::f16 ? 32768.0f : D == 2 ? 127.0f * 256 : 127.0f * 65536};
  const float ratio = fminf(kTop / fmaxf(__uint_as_float(largest), 1e-30f), 1e37f);
  const float inverse = __uint_as_float(__float_as_uint(ratio) & 0x7f800000u);
  scale = largest >= 0x7f800000u ? __uint_as_float(0x7fc00000u) : 1.0f / inverse;
  return largest == 0 ? 0.0f : inverse;
}

// Words of a group's digit sums: two digits of a group of 128 fit int32 together, three do not.
template <int D>
constexpr int kGroupWords{D == 2 ? 1 : D};

constexpr int kRound{8 * kWarp};  // columns of a warp at a time

// The first rounds of a slice of a row stay in registers between maximum and planes.
template <bool Float, bool Aligned>
struct HeldSlice {
  static constexpr int kRounds{Float ? 1 : 2};
  Chunk<Float> chunk[kRounds];

  __device__ __forceinline__ void load(const Input<Float, Aligned>& input, int first, int last) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) chunk[i] = input.read(first + i * kRound + 8 * (threadIdx.x % kWarp), last);
  }
};

// Columns of a slice, and the first column of its part.
struct SliceColumns {
  int first, last, block;
};

__device__ __forceinline__ SliceColumns slice_columns(const DecodeArgs& a, int part, int slice) {
  const DecodePlan& p = a.plan;
  const int at = (part << p.block_log) + slice;
  return {slice_begin(at, p.slices_log, a.steps) * kStepK, slice_begin(at + 1, p.slices_log, a.steps) * kStepK,
          slice_begin(part << p.block_log, p.slices_log, a.steps) * kStepK};
}

// Planes, sums and scales of one slice of one row, by one warp, into `image` (laid out as the plan says).
template <WeightFormat F, bool Grouped, int D, int C, bool Aligned>
__device__ __forceinline__ void prepare_slice(const DecodeArgs& a, uint8_t* image, const SliceColumns& columns,
                                              int slice, const Input<kFloatActivations<F, D>, Aligned>& input,
                                              const HeldSlice<kFloatActivations<F, D>, Aligned>& held) {
  constexpr bool kFloat{kFloatActivations<F, D>};
  constexpr int kHeld{HeldSlice<kFloat, Aligned>::kRounds};
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, row = input.row;
  const auto [first, last, block_k] = columns;
  int* const sums = reinterpret_cast<int*>(image + p.sums_at);

  float inverse{1.0f}, scale{1.0f};
  if constexpr (Format<F>::kScaled) {
    uint32_t largest{0};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest = max(largest, held.chunk[i].largest());
#pragma unroll 1
    for (int k = first + kHeld * kRound + 8 * lane; k < last; k += kRound) {
      largest = max(largest, input.read(k, last).largest());
    }
    inverse = normalizer<F, D>(__reduce_max_sync(kAllLanes, largest), scale);
  }
  if (lane == 0) reinterpret_cast<float*>(image + p.scales_at)[slice * C + row] = scale;

  int slice_sum[D]{};
  const auto emit = [&](const Chunk<kFloat>& chunk, int base) {  // all lanes together
    const int k = base + 8 * lane;
    int sum[D]{};
    if (k < last) {
      float v[8];
      chunk.unpack(v);
      uint8_t* const at = image + p.planes_at + row * p.plane_pitch + (k - block_k) * D * Format<F>::kPlaneBytes;
      store_planes<F, D>(at, v, inverse, sum);
    }
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
      if (k < last && lane % lanes == 0) {
        int* const to = sums + ((k - block_k) >> a.group_shift) * kGroupWords<D> * C + row;
        if constexpr (D == 2) {
          *to = sum[0] * 256 + sum[1];
        } else {
#pragma unroll
          for (int d = 0; d < D; ++d) to[d * C] = sum[d];
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < D; ++d) slice_sum[d] += sum[d];
    }
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * kRound < last) emit(held.chunk[i], first + i * kRound);
  }
#pragma unroll 1
  for (int base = first + kHeld * kRound; base < last; base += kRound) {
    emit(input.read(base + 8 * lane, last), base);
  }
  if constexpr (Format<F>::kInteger && !Grouped) {
#pragma unroll
    for (int d = 0; d < D; ++d) {
      const int total = __reduce_add_sync(kAllLanes, slice_sum[d]);
      if (lane == 0) sums[(slice * D + d) * C + row] = total;
    }
  }
}

// One warp per slice and row, for plans whose blocks copy their part's image instead of preparing it again.
template <WeightFormat F, bool Grouped, int D, int C>
__global__ void __launch_bounds__(kDecodeThreads) linear_planes_kernel(const __grid_constant__ DecodeArgs a) {
  dependency_wait();
  dependency_release();
  const int warp = blockIdx.x * kDecodeWarps + threadIdx.x / kWarp;
  if (warp >= a.plan.m << a.plan.slices_log) return;
  const int slice = warp & (a.plan.slices() - 1), row = warp >> a.plan.slices_log, part = slice >> a.plan.block_log;
  uint8_t* const image = a.images + part * a.plan.image_bytes;
  const int in_part = slice & (a.plan.block_slices() - 1);
  const SliceColumns columns = slice_columns(a, part, in_part);
  float factor{1.0f};
  if (a.gain != nullptr) {  // every warp of a row adds up all of it
    const int lane = threadIdx.x % kWarp;
    float part{0.0f};
    for (int w = 0; w < a.norm_threads / kWarp; ++w) {
      const float sum = warp_sum(norm_squares(a, row, w * kWarp + lane, slice == 0 && a.h != nullptr));
      if (lane == w) part = sum;
    }
    factor = norm_factor(a, part);
  }
  const auto prepare = [&]<bool Aligned>() {
    const Input<kFloatActivations<F, D>, Aligned> input{a, row, factor};
    HeldSlice<kFloatActivations<F, D>, Aligned> held;
    held.load(input, columns.first, columns.last);
    prepare_slice<F, Grouped, D, C, Aligned>(a, image, columns, in_part, input, held);
  };
  a.x_aligned ? prepare.template operator()<true>() : prepare.template operator()<false>();
}

// The block's image, into shared memory; `scratch` there holds a warp of floats for every row of x.
template <WeightFormat F, bool Grouped, int D, int C>
__device__ __forceinline__ void prepare_image(const DecodeArgs& a, uint8_t* image, float* scratch, int part) {
  const DecodePlan& p = a.plan;
  if (a.images != nullptr) {
    const uint4* const from = reinterpret_cast<const uint4*>(a.images + part * p.image_bytes);
#pragma unroll 4
    for (int i = threadIdx.x; i < p.image_bytes / 16; i += kDecodeThreads) reinterpret_cast<uint4*>(image)[i] = from[i];
  } else {
    // A warp keeps its slice and goes through rows, the next row's loads under way while it works on one.
    constexpr bool kFloat{kFloatActivations<F, D>};
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, slice = warp & (p.block_slices() - 1);
    const int norm_warps = a.norm_threads / kWarp;
    const bool normed = !kFloat && a.gain != nullptr;
    if (normed) {
#pragma unroll 1
      for (int item = warp; item < p.m * norm_warps; item += kDecodeWarps) {
        const int row = C == 1 ? 0 : item / norm_warps, w = item - row * norm_warps;
        const float sum = warp_sum(norm_squares(a, row, w * kWarp + lane, blockIdx.x == 0 && a.h != nullptr));
        if (lane == 0) scratch[row * kWarp + w] = sum;
      }
      __syncthreads();
    }
    const auto factor_of = [&](int row) {
      return normed ? norm_factor(a, lane < norm_warps ? scratch[row * kWarp + lane] : 0.0f) : 1.0f;
    };
    const SliceColumns columns = slice_columns(a, part, slice);
    HeldSlice<kFloat, true> held, next;
    int row = warp >> p.block_log;
    float factor{1.0f};
    if (row < p.m) {
      factor = factor_of(row);
      next.load(Input<kFloat, true>{a, row, factor}, columns.first, columns.last);
    }
#pragma unroll 1
    for (; row < p.m; row += p.block_strips) {
      held = next;
      const Input<kFloat, true> now{a, row, factor};
      if (C > 1 && row + p.block_strips < p.m) {
        factor = factor_of(row + p.block_strips);
        next.load(Input<kFloat, true>{a, row + p.block_strips, factor}, columns.first, columns.last);
      }
      prepare_slice<F, Grouped, D, C, true>(a, image, columns, slice, now, held);
    }
  }
}

}  // namespace nibblelm::cuda
