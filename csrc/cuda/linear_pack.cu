// Layout changes of integer weights: packed rows to tensor-core fragments at load, fragments to rows for large M.
#include "common.cuh"
#include "linear.h"

namespace nibblelm::cuda {

namespace {

// ---- device helpers ------------------------------------------------------------------------------------------

// Nibbles j, j + 1, j + 2, j + 3 of `low` in the low halves of four bytes and of `high` in the high halves.
__device__ __forceinline__ uint32_t interleave_nibbles(uint32_t low, uint32_t high, int j) {
  uint32_t out{0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out |= (low >> (4 * (j + i)) & 15u) << (8 * i) | (high >> (4 * (j + i)) & 15u) << (8 * i + 4);
  }
  return out;
}

// ---- kernels -------------------------------------------------------------------------------------------------

// One thread per 16 bytes of the result; reads beyond the matrix give code 0.
__global__ void pack_kernel(const uint32_t* codes, int64_t words, int n, int bits, int units, int64_t total,
                            uint4* out) {
  dependency_wait();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= total) return;
  const int lane = at % kWarp;
  const int64_t unit = at / kWarp % units, strip = at / kWarp / units;
  const auto read = [&](int half, int64_t word) -> uint32_t {
    const int64_t row = strip * kStripRows + lane / 4 + 8 * half;
    return row < n && word < words ? codes[row * words + word] : 0u;
  };
  uint32_t w[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t first = unit * 8 + (bits == 4 ? 1 : 2) * (lane % 4);
    const uint32_t p = read(half, first), q = read(half, first + (bits == 4 ? 4 : 1));
    w[half] = bits == 4 ? interleave_nibbles(p, q, 0) : p;
    w[2 + half] = bits == 4 ? interleave_nibbles(p, q, 4) : q;
  }
  out[at] = make_uint4(w[0], w[1], w[2], w[3]);
}

struct UnpackArgs {
  const uint4* data;
  const uint8_t* records;
  void* out;
  int first, count, k, bits, units, group_size, groups, record_bytes, minimum_at, default_zero;
  DType scale_dtype;
  bool has_zero, has_minimum, codes_only;
};

// One thread per 16 bytes of fragments: both rows, 8 (int8) or 16 (int4) columns each.
template <typename T>
__global__ void unpack_kernel(const __grid_constant__ UnpackArgs a) {
  dependency_wait();
  dependency_release();
  const int lane = threadIdx.x % kWarp;
  const int unit = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int strip = a.first / kStripRows + blockIdx.y;
  if (unit >= a.units) return;
  const uint4 raw = a.data[(static_cast<int64_t>(strip) * a.units + unit) * kWarp + lane];
  const uint32_t words[4]{raw.x, raw.y, raw.z, raw.w};
  const int r = lane / 4, tiles = a.bits == 4 ? 2 : 1;
  for (int half = 0; half < 2; ++half) {
    const int64_t row = static_cast<int64_t>(strip) * kStripRows + r + 8 * half - a.first;
    if (row < 0 || row >= a.count) continue;
    for (int tile = 0; tile < tiles; ++tile) {
      const int k = (unit * tiles + tile) * 32 + 8 * (lane % 4);
      if (k >= a.k) continue;
      const int group = a.group_size == 0 ? 0 : k / a.group_size;
      const uint8_t* const record = a.records + (static_cast<int64_t>(strip) * a.groups + group) * a.record_bytes;
      float scale{1.0f}, minimum{0.0f};
      if (!a.codes_only) {
        scale = load_as_float(record, 2 * r + half, a.scale_dtype);
        if (a.has_minimum) minimum = load_as_float(record + a.minimum_at, 2 * r + half, a.scale_dtype);
      }
      int zero = a.default_zero;
      if (a.has_zero) {
        const uint8_t* const zeros = record + (a.scale_dtype == DType::f32 ? 64 : 32);
        zero = a.bits == 4 ? zeros[r] >> (4 * half) & 15 : zeros[2 * r + half];
      }
      T* const out = static_cast<T*>(a.out) + row * a.k + k;
      alignas(16) T v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t byte = words[i / 4 * 2 + half] >> (8 * (i % 4));
        const int code = a.bits == 4 ? byte >> (4 * tile) & 15 : byte & 255;
        v[i] = from_float<T>(fmaf(scale, static_cast<float>(code - zero), minimum));
      }
      if (a.k % 8 == 0) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(v)) / 16; ++i) {
          reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(v)[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (k + i < a.k) out[i] = v[i];
        }
      }
    }
  }
}

__global__ void scale_columns_kernel(const float* sums, const uint8_t* records, int record_bytes, DType scale_dtype,
                                     int first, int count, void* y, int64_t y_stride, DType y_dtype,
                                     const float* bias) {
  dependency_wait();
  dependency_release();
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= count) return;
  const int n = first + j;
  const uint8_t* const record = records + static_cast<int64_t>(n / kStripRows) * record_bytes;
  const float scale = load_as_float(record, n % 8 * 2 + n % kStripRows / 8, scale_dtype);
  const float value = sums[static_cast<int64_t>(blockIdx.y) * count + j];
  store_from_float(y, blockIdx.y * y_stride + n, y_dtype, fmaf(value, scale, bias ? bias[n] : 0.0f));
}

std::string shape(const char* op, const LinearWeight& w) {
  return std::string(op) + " weight=(" + std::to_string(w.n) + ", " + std::to_string(w.k) + ") " + name(w.format);
}

}  // namespace

// ---- launchers -----------------------------------------------------------------------------------------------

void linear_pack(const LinearWeight& w, const void* codes, int64_t words, void* data, const Launch& launch) {
  constexpr int kThreads{256};
  const int units = w.steps() * kStepK / (w.bits() == 4 ? 64 : 32);
  const int64_t total = static_cast<int64_t>(w.strips()) * units * kWarp;
  launch_kernel(
      launch, [&] { return shape("pack_linear", w); }, pack_kernel, dim3((total + kThreads - 1) / kThreads),
      dim3(kThreads), 0, static_cast<const uint32_t*>(codes), words, w.n, w.bits(), units, total,
      static_cast<uint4*>(data));
}

void linear_unpack(const LinearWeight& w, int first, int count, void* out, DType out_dtype, bool codes_only,
                   const Launch& launch) {
  constexpr int kThreads{256};
  UnpackArgs a{};
  a.data = static_cast<const uint4*>(w.data);
  a.records = static_cast<const uint8_t*>(w.records);
  a.out = out;
  a.first = first;
  a.count = count;
  a.k = w.k;
  a.bits = w.bits();
  a.units = w.steps() * kStepK / (w.bits() == 4 ? 64 : 32);
  a.group_size = w.group_size;
  a.groups = w.groups();
  a.record_bytes = w.record_bytes();
  a.minimum_at = w.minimum_offset();
  a.default_zero = w.default_zero();
  a.scale_dtype = w.scale_dtype;
  a.has_zero = w.has_zero;
  a.has_minimum = w.has_minimum;
  a.codes_only = codes_only;
  const int strips = (first + count + kStripRows - 1) / kStripRows - first / kStripRows;
  const dim3 grid((a.units * kWarp + kThreads - 1) / kThreads, strips);
  const auto what = [&] { return shape("linear_unpack", w) + " to " + name(out_dtype); };
  if (out_dtype == DType::f32) {
    launch_kernel(launch, what, unpack_kernel<float>, grid, dim3(kThreads), 0, a);
  } else {
    launch_kernel(launch, what, unpack_kernel<bf16>, grid, dim3(kThreads), 0, a);
  }
}

void linear_scale_columns(const LinearWeight& w, int first, int count, const float* sums, int m, void* y,
                          int64_t y_stride, DType y_dtype, const float* bias, const Launch& launch) {
  constexpr int kThreads{256};
  launch_kernel(
      launch, [&] { return shape("linear_scale_columns", w) + " m=" + std::to_string(m); }, scale_columns_kernel,
      dim3((count + kThreads - 1) / kThreads, m), dim3(kThreads), 0, sums, static_cast<const uint8_t*>(w.records),
      w.record_bytes(), w.scale_dtype, first, count, y, y_stride, y_dtype, bias);
}

}  // namespace nibblelm::cuda
