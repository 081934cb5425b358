// Layout change of integer weights at load: packed rows to tensor-core fragments.
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

}  // namespace nibblelm::cuda
