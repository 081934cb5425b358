// Tile and split choices as pure functions: no device state, no side effects.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear.h"

namespace nibblelm::cuda {

constexpr int kDecodeWarps{16};  // one block a multiprocessor; a second one (the next kernel's) fits beside it
constexpr int kDecodeThreads{kDecodeWarps * 32};
constexpr int kMaxSlices{8};  // K is cut into at most this many slices, whose sums are added from left to right
constexpr int kMaxLinks{4};   // linears of one row of x that one kernel computes one after another
constexpr int kMaxDepth{4};   // strips whose sums may wait for their reduction
constexpr int kLinkBarriers{2 * kDecodeWarps * kMaxDepth};

// Cards of these architectures give a block 99 KB of shared memory, not 163 or more.
constexpr bool small_shared_memory(int architecture) {
  return architecture == 86 || architecture == 89 || architecture >= 120;
}

// Bytes of weights in flight per warp; 4.35 TB/s x 1 us / 132 SMs is 33 KB an SM (H200). With one row of x, the rings
// of 16 warps go on filling while the links of a chain wait for each other; at int4 they leave room for a block of
// attention (66 KB) beside them, which costs int8 more than it gains. 16 rows of x need the room themselves, and up to
// 4 leave it to the next kernel's block.
constexpr int ring_bytes(WeightFormat format, int columns, bool small_shared) {
  if (columns == 16 || small_shared) return 4096;
  if (format != WeightFormat::int4) return 8192;
  return columns == 1 ? 7168 : columns == 4 ? 4096 : 6144;
}
constexpr int kMostRounds{4};  // of a row that stays in registers while it is prepared: the longest that is normed
constexpr int kPreparedElements{32768};  // columns of one row from which one kernel prepares it for all blocks

// Bytes of weights per warp that one wait and one refill handle: a step of codes, or 128 bytes of 16 rows.
constexpr int stage_bytes(WeightFormat format) { return format == WeightFormat::int4 ? 1024 : 2048; }

// Slices of K: a function of K alone, so that the order of every floating-point sum is too. A slice has work for four
// stages, or what a warp does once a strip would outweigh it (2048 x 16384 takes 8.7 us in slices of two).
inline int decode_slices_log(int steps) {
  const int most = steps >= 4 * kMaxSlices ? kMaxSlices : kMaxSlices / 2;
  int log = 0;
  while (2 << log <= std::min(steps, most)) ++log;
  return log;
}

#ifdef __CUDACC__
#define NIBBLELM_HOST_DEVICE __host__ __device__
#else
#define NIBBLELM_HOST_DEVICE
#endif

// First step of a slice; there are 1 << slices_log of them.
NIBBLELM_HOST_DEVICE inline int slice_begin(int slice, int slices_log, int steps) {
  return slice * steps >> slices_log;
}

// Whether the digits of a row of x are neighbouring columns of the tensor-core tile: two bf16 digits, integer weights.
constexpr bool digit_columns(bool integer, int planes) { return integer && planes == 2; }

// Rows of x the kernel is compiled for that takes m.
constexpr int decode_columns(int m, bool digits) { return m == 1 ? 1 : digits && m <= 4 ? 4 : m <= 8 ? 8 : 16; }

// Activation planes: int8 digits (bf16: 2, or 1 for 8-bit activations; fp32: 3) or floating-point terms whose sum is the
// activation.
constexpr int activation_planes(WeightFormat format, DType x, bool eight_bits = false) {
  if (x == DType::f32) return format == WeightFormat::f16 ? 2 : 3;
  return (format == WeightFormat::int4 || format == WeightFormat::int8) && !eight_bits ? 2 : 1;
}

// Rounds of 8 activations that a thread of the block that prepares a row takes of its slice.
inline int row_rounds(int slices_log, int steps) {
  int widest = 0;
  for (int slice = 0; slice < 1 << slices_log; ++slice) {
    widest = std::max(widest, slice_begin(slice + 1, slices_log, steps) - slice_begin(slice, slices_log, steps));
  }
  const int round = (kDecodeWarps >> slices_log) * 8 * 32;  // of the warps that share a slice
  return (widest * kStepK + round - 1) / round;
}

struct DecodePlan {
  int m;             // rows of x a launch takes; more rows take several launches
  int slices_log;    // K is cut into 1 << slices_log slices
  int block_log;     // of these, a block takes 1 << block_log
  int parts_log;     // slices_log - block_log: 1 << parts_log blocks share a strip
  int own_log;       // of these, a warp takes 1 << own_log, one after another, and adds them itself
  int block_strips;  // strips a block works on at a time: kDecodeWarps / strip_warps()
  int grid;
  int strips;
  int depth;  // strips whose sums may wait for their reduction, a power of two
  int depth_log;
  int ring_stages;  // of a warp

  bool prepared;   // the planes come from linear_planes_kernel
  int row_rounds;  // of 8 activations for a thread of the block that prepares a row

  int column_bytes;                   // of a row's planes
  int plane_pad;                      // behind a slice of a row
  int planes_at, sums_at, scales_at;  // in the image of a part
  int image_bytes;                    // a multiple of 16
  int record_slot;                    // bytes of records beside a stage of weights with groups
  int records_at, barriers_at, image_at, red_at, image_barriers_at,
      shared_bytes;  // in shared memory, behind the ring of weights

  NIBBLELM_HOST_DEVICE int slices() const { return 1 << slices_log; }
  NIBBLELM_HOST_DEVICE int block_slices() const { return 1 << block_log; }
  NIBBLELM_HOST_DEVICE int parts() const { return 1 << parts_log; }
  NIBBLELM_HOST_DEVICE int strip_warps() const { return 1 << (block_log - own_log); }
  // Whether every slice's sums are delivered: with more rows than one, a warp that takes all of K has the result.
  NIBBLELM_HOST_DEVICE bool delivers() const { return m == 1 || parts_log > 0 || own_log < block_log; }
  // Where slice `slice` of row `row` starts in the planes, `begin` to `end` being its steps, counted in the part: the
  // rows of a slice lie together, so that it is copied as a whole.
  NIBBLELM_HOST_DEVICE int planes_of(int slice, int row, int begin, int end) const {
    return m * (begin * kStepK * column_bytes + slice * plane_pad) +
           row * ((end - begin) * kStepK * column_bytes + plane_pad);
  }
  int64_t partial_floats() const {
    return parts_log == 0 ? 0 : static_cast<int64_t>(slices()) * strips * kStripRows * m;
  }
  int64_t workspace_bytes() const {
    return partial_floats() * 4 + (prepared ? static_cast<int64_t>(parts()) * image_bytes : 0);
  }
};

// The shared memory of one choice of (m, block_slices); the offsets are where the kernel finds its parts.
inline DecodePlan decode_layout(const LinearWeight& w, int planes, int m, int slices_log, int block_log, int own_log,
                                int depth, int ring) {
  DecodePlan p{};
  p.m = m;
  p.slices_log = slices_log;
  p.block_log = block_log;
  p.parts_log = slices_log - block_log;
  p.own_log = own_log;
  p.block_strips = kDecodeWarps >> (block_log - own_log);
  p.strips = w.strips();
  p.depth = depth;
  while (1 << p.depth_log < depth) ++p.depth_log;
  int steps = 0;
  for (int part = 0; part < p.parts(); ++part) {
    steps = std::max(steps, slice_begin((part + 1) << block_log, slices_log, w.steps()) -
                                slice_begin(part << block_log, slices_log, w.steps()));
  }
  const bool digits = digit_columns(w.integer(), planes);
  const int columns = decode_columns(m, digits);
  const bool grouped = w.integer() && w.group_size != 0;
  const int sums = !w.integer() ? 0 : grouped ? steps * kStepK / w.group_size : p.block_slices();
  p.column_bytes = planes * (w.integer() ? 1 : 2);
  p.plane_pad = digits ? 0 : 64;  // rows on different banks
  p.planes_at = 0;
  p.sums_at = m * (steps * kStepK * p.column_bytes + (p.plane_pad << block_log));
  p.scales_at = p.sums_at + sums * planes * columns * 4;
  p.image_bytes = (p.scales_at + p.block_slices() * columns * 4 + 15) / 16 * 16;

  p.row_rounds = row_rounds(slices_log, w.steps());
  // A long row waits in bf16 where its planes will be, for which one digit has no room.
  const bool waits = p.row_rounds > kMostRounds;
  p.prepared = m > 1 || steps * kStepK >= kPreparedElements || (waits && w.integer() && planes == 1);

  p.ring_stages = ring / stage_bytes(w.format);
  p.records_at = kDecodeWarps * ring;
  if (grouped) p.record_slot = kStepK / w.group_size * w.record_bytes();
  p.barriers_at = p.records_at + kDecodeWarps * p.ring_stages * p.record_slot;
  p.image_at = p.barriers_at + (m == 1 ? kMaxLinks : 1) * kLinkBarriers * 8;
  p.red_at = p.image_at + p.image_bytes;
  const int words = w.integer() && !grouped && m == 1 ? planes : 1;  // raw sums of every digit, or one float
  p.image_barriers_at = p.red_at + (p.delivers() ? (kDecodeWarps << own_log) * depth * m * kStripRows * words * 4 : 0);
  p.shared_bytes = p.image_barriers_at + (p.block_slices() + 1) * 8;
  return p;
}

// Slices (log2) of a strip that one warp takes: as many as leave work for every warp of a block with `strips` strips.
// Each halves the exchange of sums, which one row of x does not notice.
constexpr int decode_own_log(int m, int block_log, int strips) {
  int own = 0;
  while (m > 1 && own < block_log && kDecodeWarps >> (block_log - own) < strips) ++own;
  return own;
}

// Takes as many slices into one block as shared memory holds (no sum across blocks when it holds all), and fewer rows
// only where even one slice does not fit. `shared_limit`: bytes of a block;
// `architecture`: what the kernels are compiled for, as 80 or 90.
inline DecodePlan plan_decode(const LinearWeight& w, int planes, int m, bool aligned, int multiprocessors,
                              int shared_limit, int architecture) {
  const bool small = small_shared_memory(architecture);
  const int slices_log = decode_slices_log(w.steps());
  for (int rows = m; rows >= 1; rows = rows > 1 ? (rows + 1) / 2 : 0) {
    for (int block_log = slices_log; block_log >= 0; --block_log) {
      const int most_blocks = std::max(multiprocessors >> (slices_log - block_log), 1);
      const int block_strips = (w.strips() + most_blocks - 1) / most_blocks;
      for (int own_log = decode_own_log(rows, block_log, block_strips); own_log >= 0; --own_log) {
        for (int depth = rows == 1 ? kMaxDepth : 2; depth >= 1; depth /= 2) {
          const int columns = decode_columns(rows, digit_columns(w.integer(), planes));
          const int ring = ring_bytes(w.format, columns, small);
          DecodePlan p = decode_layout(w, planes, rows, slices_log, block_log, own_log, depth, ring);
          if (p.shared_bytes > shared_limit) continue;
          // Only that kernel reads x element by element, or sees a whole row where blocks do not.
          p.prepared = p.prepared || !aligned || p.parts_log > 0;
          const int at_once = std::min(p.block_strips, block_strips);
          p.grid = std::min(most_blocks, (p.strips + at_once - 1) / at_once) << p.parts_log;
          return p;
        }
      }
    }
  }
  return DecodePlan{};  // grid 0: K is too long for this card; the launcher says so
}

// ---- more rows than the decode kernel takes ----------------------------------------------------------------------

constexpr int kLargeChunk{2048};  // rows of x a launch takes: their digits stay in L2

// Rows of x in a tile of the large kernel, which is compiled for the values that 1 and very many rows give; 0: none.
// Two planes of 64 rows are 128 columns, the width at which the tensor cores of sm_90 run at their rate.
constexpr int large_rows(WeightFormat format, int planes, bool grouped, int m) {
  if (format == WeightFormat::int4 || format == WeightFormat::int8) {
    return planes == 3 || (planes == 2 && m <= 32) ? 32 : planes == 2 || grouped || m <= 64 ? 64 : 128;
  }
  return format == WeightFormat::f32 || planes > 1 ? 0 : m <= 64 ? 64 : 128;
}

// Strips of W in a tile, one a warp. Two digits in groups take 96 registers of sums: half as many warps have them.
constexpr int large_strips(WeightFormat format, int planes, bool grouped, int rows) {
  return grouped && planes == 2 && rows == 64 ? 8 : 16;
}

struct LargePlan {
  int rows;    // of x in a tile
  int strips;  // of W
  int row_tiles, token_tiles;
  int parts;  // that share a tile's K, by whole slices
  int slices;
  bool wgmma;  // else mma.sync
  bool paired_stores;
  int stages;      // of K: 128 bytes of every column
  int tile_bytes;  // a stage of a tile of x: its columns, then the digit sums of its groups
  int slot_bytes, weights_at;
  int ring_stages, totals_at, barriers_at, shared_bytes;
  int most_blocks;

  NIBBLELM_HOST_DEVICE int threads() const { return strips * 32; }  // that multiply
  NIBBLELM_HOST_DEVICE int work() const { return row_tiles * token_tiles * parts; }
  NIBBLELM_HOST_DEVICE int padded_rows() const { return token_tiles * rows; }
  // Sums of a tile that another kernel adds: those of the first part's slices together, and of every other slice.
  NIBBLELM_HOST_DEVICE int slots() const { return parts == 1 ? 1 : slices - slices / parts + 1; }
  NIBBLELM_HOST_DEVICE int slot_of(int slice) const { return slice < slices / parts ? 0 : slice - slices / parts + 1; }
  int64_t tiles_bytes() const { return static_cast<int64_t>(token_tiles) * stages * tile_bytes; }
  int64_t partial_bytes() const {
    return slots() == 1 ? 0 : static_cast<int64_t>(row_tiles) * token_tiles * slots() * rows * threads() * 2;
  }
};

// How many blocks should share a tile's K: microseconds of a wave, as measured on an H200, against those of adding.
inline int large_parts(const LinearWeight& w, const LargePlan& p, int planes) {
  const double rows = 16.0 * p.strips, products = rows * planes * p.rows * w.k / (w.integer() ? 7e6 : 3e6);
  const double bytes = rows * w.k * w.bits() / 8 / 40e3, tile = std::max(products, bytes);
  int best = 1;
  double least = 1e30;
  for (int parts = 1; parts <= p.slices; parts *= 2) {
    const int waves = (p.row_tiles * p.token_tiles * parts + p.most_blocks - 1) / p.most_blocks;
    double time = waves * tile / parts;
    if (parts > 1) time += 2 + (p.slices - p.slices / parts + 1) * 2.0 * p.row_tiles * rows * p.padded_rows() * 4 / 3e6;
    if (time < least) least = time, best = parts;
  }
  return best;
}

// For m rows of x, at most kLargeChunk; ring_stages is 0 where shared memory does not hold a tile.
inline LargePlan plan_large(const LinearWeight& w, int planes, int m, int multiprocessors, int shared_limit,
                            bool wgmma) {
  LargePlan p{};
  const bool grouped = w.integer() && w.group_size != 0;
  for (const int most : {m, 1}) {
    p.rows = large_rows(w.format, planes, grouped, most);
    if (p.rows == 0) return p;
    p.strips = large_strips(w.format, planes, grouped, p.rows);
    p.stages = w.steps() * (w.integer() ? 1 : 2);
    p.tile_bytes = planes * p.rows * 128;
    if (grouped) p.tile_bytes += kStepK / w.group_size * (planes == 2 ? 1 : planes) * p.rows * 4;
    p.weights_at = (p.tile_bytes + 1023) / 1024 * 1024;
    p.slot_bytes = p.weights_at + p.strips * (w.format == WeightFormat::int4 ? 1024 : 2048);
    constexpr int kMostStages{8};
    const int totals = p.rows * p.threads() * 2, barriers = kMostStages * 2 * 8;
    p.ring_stages = std::min((shared_limit - totals - barriers) / p.slot_bytes, kMostStages);
    p.totals_at = p.ring_stages * p.slot_bytes;
    p.barriers_at = p.totals_at + totals;
    p.shared_bytes = p.barriers_at + barriers;
    if (p.ring_stages >= 2) break;
  }
  if (p.ring_stages < 2) return LargePlan{};
  p.row_tiles = (w.strips() + p.strips - 1) / p.strips;
  p.token_tiles = (m + p.rows - 1) / p.rows;
  p.slices = 1 << decode_slices_log(w.steps());
  p.wgmma = wgmma;
  p.most_blocks = multiprocessors;
  p.parts = large_parts(w, p, planes);
  return p;
}

}  // namespace nibblelm::cuda
