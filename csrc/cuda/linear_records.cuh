// Scales, zero-points and minima of quantized weights, as the decode kernel reads them (linear.h has their layout).
#pragma once

#include "linear_planes.cuh"

namespace nibblelm::cuda {

// Scale, zero-point and minimum of one row in one group.
struct RowTerms {
  float scale, minimum;
  int zero;
};

// Two scales of 16 bits.
__device__ __forceinline__ void unpack_pair(uint32_t pair, bool brain, float& low, float& high) {
  low = brain ? __uint_as_float(pair << 16) : __half2float(__ushort_as_half(pair & 0xffff));
  high = brain ? __uint_as_float(pair & 0xffff0000u) : __half2float(__ushort_as_half(pair >> 16));
}

// What the records of a weight hold, in one register.
template <WeightFormat F>
struct RecordForm {
  int bits{0};

  RecordForm() = default;
  __device__ __forceinline__ explicit RecordForm(const DecodeArgs& a)
      : bits(keep(static_cast<int>(a.scale_dtype) | (a.has_zero ? 4 : 0) | (a.has_minimum ? 8 : 0))) {}
  __device__ __forceinline__ bool wide() const { return (bits & 3) == static_cast<int>(DType::f32); }
  __device__ __forceinline__ bool brain() const { return (bits & 3) == static_cast<int>(DType::bf16); }
  __device__ __forceinline__ bool has_zero() const { return (bits & 4) != 0; }
  __device__ __forceinline__ bool has_minimum() const { return (bits & 8) != 0; }
  __device__ __forceinline__ int default_zero() const { return has_minimum() ? 0 : Format<F>::kInt4 ? 8 : 128; }
  __device__ __forceinline__ int zeros_at() const { return kStripRows * (wide() ? 4 : 2); }
  __device__ __forceinline__ int minimum_at() const {
    return zeros_at() + (has_zero() ? Format<F>::kInt4 ? 8 : 16 : 0);
  }
};

// Where the groups of the warp's slice are: the record of the next one, in the ring, and its digit sums.
template <WeightFormat F>
struct GroupAt {
  static constexpr int kSimple{7};  // groups of 128, scales of 16 bits, no minimum
  RecordForm<F> form;
  int mask;               // 0, 1 or 3 for groups of 32, 64 or 128; or kSimple
  uint32_t sums, record;  // shared addresses
};

template <WeightFormat F>
using ZeroPair = std::conditional_t<Format<F>::kInt4, uint8_t, uint16_t>;

// The zero-points of rows r and r + 8.
template <WeightFormat F>
__device__ __forceinline__ int zero_of(int pair, int half) {
  constexpr int kBits{Format<F>::kInt4 ? 4 : 8};
  return pair >> half * kBits & ((1 << kBits) - 1);
}

// Of rows r and r + 8 of a record. load<T>(offset): from the record.
template <WeightFormat F, class Load>
__device__ __forceinline__ void read_record(RecordForm<F> form, int r, RowTerms (&rows)[2], Load load) {
  const auto read_pair = [&](int at, float& low, float& high) {
    if (form.wide()) {
      const uint2 pair = load.template operator()<uint2>(at + 8 * r);
      low = __uint_as_float(pair.x), high = __uint_as_float(pair.y);
    } else {
      unpack_pair(load.template operator()<uint32_t>(at + 4 * r), form.brain(), low, high);
    }
  };
  read_pair(0, rows[0].scale, rows[1].scale);
  rows[0].minimum = rows[1].minimum = 0.0f;
  if (form.has_minimum()) read_pair(form.minimum_at(), rows[0].minimum, rows[1].minimum);
  rows[0].zero = rows[1].zero = form.default_zero();
  if (form.has_zero()) {
    const int pair = load.template operator()<ZeroPair<F>>(form.zeros_at() + r * static_cast<int>(sizeof(ZeroPair<F>)));
    rows[0].zero = zero_of<F>(pair, 0), rows[1].zero = zero_of<F>(pair, 1);
  }
}

// What the sum of one row of W needs, as it is in memory: asked for long before, and first looked at then.
template <WeightFormat F>
struct RowBits {
  uint32_t scale, minimum{0}, zeros{0};
  float bias{0.0f};

  // Of row `row` of a strip whose record this is.
  __device__ __forceinline__ static RowBits read(RecordForm<F> form, const uint8_t* record, int row) {
    RowBits out;
    const int at = 2 * (row % 8) + row / 8;
    const auto word = [&](const uint8_t* from) -> uint32_t {
      return form.wide() ? reinterpret_cast<const uint32_t*>(from)[at] : reinterpret_cast<const uint16_t*>(from)[at];
    };
    out.scale = word(record);
    if (form.has_minimum()) out.minimum = word(record + form.minimum_at());
    if (form.has_zero()) out.zeros = record[form.zeros_at() + (Format<F>::kInt4 ? row % 8 : at)];
    return out;
  }

  __device__ __forceinline__ RowTerms terms(RecordForm<F> form, int row) const {
    const auto value = [&](uint32_t bits) {
      return form.wide()    ? __uint_as_float(bits)
             : form.brain() ? __uint_as_float(bits << 16)
                            : __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
    };
    const int zero = Format<F>::kInt4 ? zeros >> row / 8 * 4 & 15 : zeros;
    return {value(scale), value(minimum), form.has_zero() ? zero : form.default_zero()};
  }
};

// Adds a group's share to `before`: raw, its sum of codes x two digits, fits int32; `digits`: the digits' sum.
__device__ __forceinline__ float add_group(float before, const RowTerms& row, int raw, int digits, bool has_minimum) {
  const float sum = fmaf(row.scale, static_cast<float>(raw - row.zero * digits), before);
  return has_minimum ? fmaf(row.minimum, static_cast<float>(digits), sum) : sum;
}

// Sums of codes by every digit -> the sum of codes by activations, over the slice's scale; one rounding where the sums
// are exact in fp32.
template <int D>
__device__ __forceinline__ float join_digits(const int (&sums)[D]) {
  float value = static_cast<float>(sums[0]);
#pragma unroll
  for (int d = 1; d < D; ++d) value = fmaf(value, 256.0f, static_cast<float>(sums[d]));
  return value;
}

// What slices come to, added from left to right: a slice's value in units of its scale. OneSum: of both the bits are
// integers'.
template <bool OneSum>
struct SliceSum {
  float sum{0.0f};
  __device__ __forceinline__ void add(float value, float scale) { sum = fmaf(value, scale, sum); }
  __device__ __forceinline__ SliceSum of_lane(int other) const { return {__shfl_xor_sync(kAllLanes, sum, other)}; }
  __device__ __forceinline__ float result(float) const { return sum; }
};

// How far a sum is shifted for units that are 2^-finer of what they were: to the left, and in the second byte to the
// right, which rounds down.
__device__ __forceinline__ int unit_shift(int finer) { return max(finer, 0) | max(-finer, 0) << 8; }
__device__ __forceinline__ int shifted(int sum, int shift) { return sum << (shift & 31) >> (shift >> 8); }

// An integer and the slice's shift come as bits of floats; unit: the scale of the last slice.
template <>
struct SliceSum<true> {
  int sum{0};
  __device__ __forceinline__ void add(float value, float shift) {
    sum = shifted(sum, __float_as_int(shift)) + __float_as_int(value);
  }
  __device__ __forceinline__ SliceSum of_lane(int other) const { return {__shfl_xor_sync(kAllLanes, sum, other)}; }
  __device__ __forceinline__ float result(float unit) const { return __fmul_rn(static_cast<float>(sum), unit); }
};

// A group's share in other than two digits: scale * sum of (code - zero) x activation + minimum * sum of activations.
template <int D>
__device__ __forceinline__ float scale_group(const int (&raw)[D], const int (&digits)[D], const RowTerms& row,
                                             bool has_minimum) {
  int centred[D];
#pragma unroll
  for (int d = 0; d < D; ++d) centred[d] = raw[d] - row.zero * digits[d];
  const float value = __fmul_rn(row.scale, join_digits<D>(centred));
  return has_minimum ? fmaf(row.minimum, join_digits<D>(digits), value) : value;
}

// What a row of W with one scale adds for a row of x: this times its sum.
__device__ __forceinline__ float row_offset(const RowTerms& row, bool has_minimum) {
  return has_minimum ? row.minimum : __fmul_rn(-row.scale, static_cast<float>(row.zero));
}

// What the slices of such a row have added up to -> its product with a row of x, whose sum is `x_total`.
__device__ __forceinline__ float finish_row(float scale, float offset, float sum, float x_total) {
  return fmaf(offset, x_total, __fmul_rn(scale, sum));
}
__device__ __forceinline__ float finish_row(const RowTerms& row, bool has_minimum, float sum, float x_total) {
  return finish_row(row.scale, row_offset(row, has_minimum), sum, x_total);
}

}  // namespace nibblelm::cuda
