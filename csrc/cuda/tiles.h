// Tile and split choices as pure functions: no device state, no side effects.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"

namespace nibblelm::cuda {

constexpr int kDecodeWarps{16};
constexpr int kDecodeThreads{kDecodeWarps * 32};
constexpr int kMaxSlices{16};           // K is summed as a binary tree of at most this many slices
constexpr int kRingBytesPerWarp{4096};  // weights in flight: 64 KB an SM; 4.35 TB/s x 0.8 us / 132 SMs is 26 KB (H200)

// Slices of K: a function of K alone, so that the order of every floating-point sum is too.
inline int decode_slices(int steps) {
  int slices = 1;
  while (slices * 2 <= std::min(steps, kMaxSlices)) slices *= 2;
  return slices;
}

// First step of a slice.
#ifdef __CUDACC__
__host__ __device__
#endif
    inline int slice_begin(int slice, int slices, int steps) {
  return static_cast<int>(static_cast<int64_t>(slice) * steps / slices);
}

// Activation planes: int8 digits (bf16: 2, fp32: 3) or floating-point terms whose sum is the activation.
inline int decode_planes(WeightFormat format, DType x) {
  if (x == DType::f32) return format == WeightFormat::f16 ? 2 : 3;
  return format == WeightFormat::int4 || format == WeightFormat::int8 ? 2 : 1;
}

struct DecodePlan {
  int m;             // rows of x a launch takes; more rows take several launches
  int slices;        // of K, a power of two
  int block_slices;  // of these, the ones a block takes
  int parts;         // slices / block_slices: blocks that share a strip
  int block_strips;  // strips a block works on at a time: kDecodeWarps / block_slices
  int strip_groups;
  int grid;
  int plane_pitch;  // bytes between rows of the planes
  int record_slot;  // bytes of records beside one unit in the ring
  int records_at, planes_at, sums_at, scales_at, red_at, shared_bytes;
};

// The shared memory of one choice of (m, block_slices); the offsets are where the kernel finds its parts.
inline DecodePlan decode_layout(const LinearWeight& w, int planes, int m, int slices, int block_slices) {
  DecodePlan p{};
  p.m = m;
  p.slices = slices;
  p.block_slices = block_slices;
  p.parts = slices / block_slices;
  p.block_strips = kDecodeWarps / block_slices;
  p.strip_groups = (w.strips() + p.block_strips - 1) / p.block_strips;
  int steps = 0;
  for (int part = 0; part < p.parts; ++part) {
    steps = std::max(steps, slice_begin((part + 1) * block_slices, slices, w.steps()) -
                                slice_begin(part * block_slices, slices, w.steps()));
  }
  const int columns = m == 1 ? 1 : m <= 8 ? 8 : 16;
  const int unit_k = w.format == WeightFormat::int4 ? 64 : 32;
  const bool grouped = w.integer() && w.group_size != 0;
  p.record_slot = grouped ? w.record_bytes() * std::max(1, unit_k / w.group_size) : 0;
  p.plane_pitch = steps * kStepK * planes * (w.integer() ? 1 : 2) + 64;  // + 64: rows fall on different banks
  const int sums = !w.integer() ? 0 : grouped ? steps * kStepK / w.group_size : block_slices;
  const int ring_units = kRingBytesPerWarp / 512;
  p.records_at = kDecodeWarps * kRingBytesPerWarp;
  p.planes_at = p.records_at + kDecodeWarps * ring_units * p.record_slot;
  p.sums_at = p.planes_at + m * p.plane_pitch;
  p.scales_at = p.sums_at + sums * planes * columns * 4;
  p.red_at = p.scales_at + block_slices * columns * 4;
  p.shared_bytes = p.red_at + 2 * kDecodeWarps * m * kStripRows * 4;
  return p;
}

// Takes as many slices into one block as its shared memory holds (no sum across blocks when it holds all), and fewer
// rows only where even one slice does not fit.
inline DecodePlan plan_decode(const LinearWeight& w, DType x_dtype, int m, int multiprocessors, int shared_limit) {
  const int planes = decode_planes(w.format, x_dtype);
  const int slices = decode_slices(w.steps());
  DecodePlan p{};
  for (int rows = m; rows >= 1; rows = rows > 1 ? (rows + 1) / 2 : 0) {
    for (int block_slices = slices; block_slices >= 1; block_slices /= 2) {
      p = decode_layout(w, planes, rows, slices, block_slices);
      if (p.shared_bytes > shared_limit) continue;
      p.grid = std::min(std::max(multiprocessors / p.parts, 1), p.strip_groups) * p.parts;
      return p;
    }
  }
  p.grid = 0;  // K too long for this card: the launcher says so
  return p;
}

}  // namespace nibblelm::cuda
