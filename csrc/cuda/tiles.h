// Tile and split choices as pure functions: no device state, no side effects.
#pragma once

#include <algorithm>
#include <cmath>
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

// Whether two blocks that share K can be a cluster and give each other their sums: on these, clusters of two run on all
// multiprocessors, and of four on 120 of 132 (H200).
constexpr bool joins_blocks(int architecture) { return architecture >= 90 && !small_shared_memory(architecture); }

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
constexpr int kMostNormedRounds{2};      // of a normed row that a block of the decode kernel prepares itself
constexpr int kPreparedElements{32768};  // columns of one row from which one kernel prepares it for all blocks

// Bytes of weights per warp that one wait and one refill handle: a step of codes, or 128 bytes of 16 rows.
constexpr int stage_bytes(WeightFormat format) { return is_int4(format) ? 1024 : 2048; }

// Slices of K: a function of K alone, so that the order of every floating-point sum is too. A slice has work for three
// stages, or what a warp does once a strip would outweigh it (2048 x 16384 takes 8.7 us in slices of two).
inline int decode_slices_log(int steps) {
  const int most = steps >= 3 * kMaxSlices ? kMaxSlices : kMaxSlices / 2;
  int log = 0;
  while (2 << log <= std::min(steps, most)) ++log;
  return log;
}

// First step of a slice; there are 1 << slices_log of them.
NIBBLELM_HOST_DEVICE inline int slice_begin(int slice, int slices_log, int steps) {
  return slice * steps >> slices_log;
}

// Whether the digits of a row of x are neighbouring columns of the tensor-core tile: two bf16 digits, integer weights.
constexpr bool digit_columns(bool integer, int planes) { return integer && planes == 2; }

// Whether the sums of all slices stay integers; see kOneSum.
constexpr bool one_sum(WeightFormat format, int planes, bool grouped) {
  return format == WeightFormat::int4 && planes == 1 && !grouped;
}

// Rows of x the kernel is compiled for that takes m.
constexpr int decode_columns(int m, bool digits) { return m == 1 ? 1 : digits && m <= 4 ? 4 : m <= 8 ? 8 : 16; }

// Activation planes: int8 digits (bf16: 2, or 1 for 8-bit activations; fp32: 3) or floating-point terms whose sum is
// the activation.
constexpr int activation_planes(WeightFormat format, DType x, bool eight_bits = false) {
  if (x == DType::f32) return format == WeightFormat::f16 ? 2 : 3;
  return is_integer(format) && !eight_bits ? 2 : 1;
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

  bool joined;     // the two blocks of a strip are a cluster, and each adds up every other strip of the two
  bool prepared;   // the planes come from linear_planes_kernel
  int row_rounds;  // of 8 activations for a thread of the block that prepares a row

  int column_bytes;                              // of a row's planes
  int plane_pad;                                 // behind a slice of a row
  int planes_at, sums_at, scales_at, totals_at;  // in the image of a part; behind the totals units of integer sums
  int image_bytes;                               // a multiple of 16
  int record_slot;                               // bytes of records beside a stage of weights with groups
  int records_at, barriers_at, image_at, red_at, joined_scales_at,
      shared_bytes;  // in shared memory, behind the ring of weights

  NIBBLELM_HOST_DEVICE int slices() const { return 1 << slices_log; }
  NIBBLELM_HOST_DEVICE int block_slices() const { return 1 << block_log; }
  NIBBLELM_HOST_DEVICE int parts() const { return 1 << parts_log; }
  NIBBLELM_HOST_DEVICE int strip_warps() const { return 1 << (block_log - own_log); }
  // Whether every slice's sums are delivered: with more rows than one, a warp that takes all of K has the result.
  NIBBLELM_HOST_DEVICE bool delivers() const { return m == 1 || parts_log > 0 || own_log < block_log; }
  // Where slice `slice` of row `row` starts in the planes, `begin` to `end` being its steps, counted in the part: the
  // rows of a slice lie together.
  NIBBLELM_HOST_DEVICE int planes_of(int slice, int row, int begin, int end) const {
    return m * (begin * kStepK * column_bytes + slice * plane_pad) +
           row * ((end - begin) * kStepK * column_bytes + plane_pad);
  }
  int64_t partial_floats() const {
    return parts_log == 0 ? 0 : static_cast<int64_t>(slices()) * strips * kStripRows * m;
  }
  int64_t workspace_bytes() const {
    const bool images = prepared || row_rounds > kMostNormedRounds;  // the latter where the row is normed
    return partial_floats() * 4 + (images ? static_cast<int64_t>(parts()) * image_bytes : 0);
  }
};

// The shared memory of one choice of (m, block_slices); the offsets are where the kernel finds its parts.
inline DecodePlan decode_layout(const LinearWeight& w, int planes, int m, int slices_log, int block_log, int own_log,
                                int depth, int ring, bool clusters) {
  DecodePlan p{};
  p.m = m;
  p.slices_log = slices_log;
  p.block_log = block_log;
  p.parts_log = slices_log - block_log;
  p.joined = clusters && m > 1 && p.parts() == 2;
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
  const bool sums_row = w.integer() && !grouped && m == 1;      // x's sum, of a block's own image
  const int slices = sums_row ? kMaxSlices : p.block_slices();  // with those not there
  const int sums = grouped ? steps * kStepK / w.group_size : sums_row ? kMaxSlices : 0;
  p.column_bytes = planes * (w.integer() ? 1 : 2);
  p.plane_pad = digits ? 0 : 64;  // rows on different banks
  p.planes_at = 0;
  p.sums_at = m * (steps * kStepK * p.column_bytes + (p.plane_pad << block_log));
  p.scales_at = p.sums_at + sums * (planes == 2 ? 1 : planes) * columns * 4;
  p.totals_at = p.scales_at + slices * columns * 4;
  const int units = one_sum(w.format, planes, grouped) ? columns : 0;  // of sums that stay integers
  p.image_bytes = (p.totals_at + (columns + units) * 4 + 15) / 16 * 16;

  p.row_rounds = row_rounds(slices_log, w.steps());
  // A long row waits in bf16 where its planes will be, for which one digit has no room; so `prepare_image` has no code.
  const bool waits = p.row_rounds > kMostRounds;
  p.prepared = m > 1 || steps * kStepK >= kPreparedElements || (waits && w.integer() && planes == 1);

  p.ring_stages = ring / stage_bytes(w.format);
  p.records_at = kDecodeWarps * ring;
  if (grouped) p.record_slot = kStepK / w.group_size * w.record_bytes();
  p.barriers_at = p.records_at + kDecodeWarps * p.ring_stages * p.record_slot;
  p.image_at = p.barriers_at + (m == 1 ? kMaxLinks : 1) * kLinkBarriers * 8;
  p.red_at = p.image_at + p.image_bytes;
  const int words = sums_row ? planes : 1;  // raw sums of every digit, or one float
  p.joined_scales_at = p.red_at + (p.delivers() ? (kDecodeWarps << own_log) * depth * m * kStripRows * words * 4 : 0);
  p.shared_bytes = p.joined_scales_at + (p.joined ? p.slices() * columns * 4 : 0);
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
          DecodePlan p =
              decode_layout(w, planes, rows, slices_log, block_log, own_log, depth, ring, joins_blocks(architecture));
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

// Whether the large kernel multiplies codes in fp16, less their zero-points: a sum of two digits takes it three
// instructions, one in fp32 takes it one. The sums are the same, since both are exact (kBounded).
constexpr bool multiplies_in_half(const LinearWeight& w, int planes) {
  return w.format == WeightFormat::int4 && planes == 2 && w.group_size == kStepK && w.scale_dtype != DType::f32 &&
         !w.has_minimum;
}

// Rows of x that a tile of the large kernel may have, and those it is compiled for: sums of more do not fit registers.
constexpr int kLargeRows[]{16, 32, 64, 128};
constexpr bool large_compiled(WeightFormat format, int planes, bool grouped, int rows) {
  if (format == WeightFormat::int4_half) return true;
  if (rows == 16) return is_integer(format) && planes == 2;  // else the decode kernel is as fast
  if (format == WeightFormat::f32) return false;
  if (!is_integer(format)) return planes == 1 && (rows == 64 || rows == 128);
  if (planes == 3) return rows == 32;
  if (planes == 2) return rows <= (grouped ? 64 : 128);
  return rows == 64 || (rows == 128 && !grouped);
}

// Warps of a block, each with a strip of W: sixteen hide each other's latencies and halve the traffic of x, if the sums
// of their tiles fit the registers (two digits of a group take one sum), with the totals of slices if it keeps those;
// eight leave shared memory for the stages of halves.
constexpr int large_warps(WeightFormat format, int planes, bool grouped, int rows, bool keeps_totals) {
  if (format == WeightFormat::int4_half) return rows <= 32 || (rows == 64 && !keeps_totals) ? 16 : rows == 64 ? 12 : 8;
  if (!is_integer(format)) return 8;
  if (one_sum(format, planes, grouped)) keeps_totals = false;
  const int sums = ((grouped && planes == 2 ? 1 : planes) + grouped + keeps_totals) * rows / 2;
  return sums <= 80 ? 16 : sums <= 112 ? 12 : 8;
}

// Whether a kernel whose blocks share out a tile's K has a form of its own, which adds no slices.
constexpr bool large_two_forms(WeightFormat format, int planes, bool grouped, int rows) {
  return one_sum(format, planes, grouped) ||
         large_warps(format, planes, grouped, rows, true) != large_warps(format, planes, grouped, rows, false);
}

// Whether tiles of half the usual strips are compiled, too: for so few tiles that more, smaller ones are faster.
constexpr bool large_halves(WeightFormat format, int planes, bool grouped, int rows) {
  return one_sum(format, planes, grouped) && rows == 128;
}

// Whether tiles may have fewer strips than a block has warps for them.
constexpr bool large_spares(int rows, bool grouped) { return rows == 16 && !grouped; }

// Bytes of a record at most, which is 8-byte pieces, where records come through the ring.
constexpr int large_record_bytes(WeightFormat format) { return format == WeightFormat::int4_half ? 40 : 0; }

// Whether codes come as rectangles of all strips, which one lane asks for, and not by copies of every lane: where the
// copies' instructions count, and not memory, which 16 bytes a lane keep busier.
constexpr bool large_mapped(WeightFormat format, int planes, int rows) {
  return format == WeightFormat::int4_half || (is_integer(format) && rows == 128) ||
         (format == WeightFormat::int4 && planes * rows == 128);
}

// Whether one lane says for its warp that it has left a chunk: two warpgroups of products in fp16 were 5 % faster so,
// though not in every program. Else every lane does, which needs nothing before it.
constexpr bool large_one_releases(WeightFormat format, int rows) {
  return format == WeightFormat::int4_half && rows == 128;
}

// Warps behind them, which copy: a warpgroup, where it can hand registers to the others.
constexpr int large_copy_warps(int architecture) { return architecture == 90 ? 4 : 1; }

// Pieces of 128 bytes that a stage of a row of x takes: a digit each, or a half of the stage's columns.
constexpr int large_pieces(WeightFormat format, int planes) { return format == WeightFormat::int4_half ? 2 : planes; }

// Bytes of weights a stage of a strip takes, and of a tile of x: its columns and, where a group size says so, the digit
// sums of its groups.
constexpr int large_strip_bytes(WeightFormat format) { return is_int4(format) ? 1024 : 2048; }
constexpr int large_tile_bytes(WeightFormat format, int planes, int rows, int group_size) {
  const bool sums = is_integer(format) && group_size != 0;
  return large_pieces(format, planes) * rows * 128 +
         (sums ? kStepK / group_size * (planes == 2 ? 1 : planes) * rows * 4 : 0);
}

// Stages of one slice that are waited for, left and asked for together: two where they leave room for others.
constexpr int large_chunk(WeightFormat format, int planes, bool grouped, int rows) {
  return format == WeightFormat::int8 || grouped || planes * rows > 64 ? 1 : 2;
}

// Bytes beside a chunk for a number of each of a tile's rows of x: the scales of a slice where totals of slices are
// kept, or the shifts of sums that stay integers.
constexpr int large_scale_bytes(WeightFormat format, int rows, bool keeps_totals) {
  const bool scaled = is_codes(format) || format == WeightFormat::f16;
  return scaled && keeps_totals ? rows * 4 : 0;
}

// Where things are in the shared memory of the kernel, which has as many chunks as fit on cards for which the code is
// compiled.
struct LargeLayout {
  int ring, tile_bytes, weights_at, records_at, scales_at, barriers_at, bytes;
};
constexpr LargeLayout large_layout(WeightFormat format, int planes, bool grouped, int rows, int warps,
                                   bool keeps_totals, int architecture) {
  const int capacity = (small_shared_memory(architecture) ? 99 : architecture < 90 ? 163 : 227) * 1024, most = 8;
  LargeLayout p{};
  p.tile_bytes = (large_tile_bytes(format, planes, rows, grouped ? 32 : 0) + 1023) / 1024 * 1024;
  const int scales = large_scale_bytes(format, rows, keeps_totals), record_bytes = large_record_bytes(format);
  const int chunk =
      large_chunk(format, planes, grouped, rows) * (p.tile_bytes + warps * (large_strip_bytes(format) + record_bytes)) +
      scales;
  p.ring = (capacity - most * 16 - 8) / chunk;
  if (p.ring > most) p.ring = most;
  p.weights_at = p.ring * large_chunk(format, planes, grouped, rows) * p.tile_bytes;
  p.barriers_at = p.ring * chunk;
  p.scales_at = p.barriers_at - p.ring * scales;
  p.records_at = p.scales_at - p.ring * warps * record_bytes;
  p.bytes = p.barriers_at + p.ring * 16 + 8;
  return p;
}

struct LargePlan {
  WeightFormat format;  // that the kernel is compiled for
  int rows;             // of x in a tile
  int strips;           // of W, one a warp; some warps may have none
  int threads;
  int row_tiles, token_tiles;
  uint32_t token_magic;       // n * token_magic >> 32 is n / token_tiles where there are several
  int slices_log, parts_log;  // parts share a tile's K, by whole slices; with several every slice's sums are kept apart
  int shared;                 // the first tiles, whose slices are shared out evenly over the blocks; 0 where none are
  int work;                   // tiles beyond those, x parts
  int rounds;                 // of all blocks together, where tiles are shared
  bool wgmma;                 // else mma.sync
  bool paired_stores;
  int releasing;   // of a warp's lanes, where one is enough (large_one_releases): 1, or all for racecheck
  int stages;      // of K: 128 bytes of every column
  int tile_bytes;  // a stage of a tile of x
  int shared_bytes;
  int blocks;

  NIBBLELM_HOST_DEVICE int padded_rows() const { return token_tiles * rows; }
  NIBBLELM_HOST_DEVICE int slices() const { return 1 << slices_log; }
  NIBBLELM_HOST_DEVICE int parts() const { return 1 << parts_log; }
  NIBBLELM_HOST_DEVICE int tiles() const { return row_tiles * token_tiles; }
  int64_t tiles_bytes() const { return static_cast<int64_t>(token_tiles) * stages * tile_bytes; }
  // Sums that wait: of every slice of every tile, or of what the blocks have begun and others go on with.
  int64_t partial_bytes() const {
    const int64_t tile = static_cast<int64_t>(rows) * strips * 64;
    return parts() > 1 ? tiles() * slices() * tile : shared > 0 ? blocks * (tile + strips * 4) : 0;
  }
};

// Microseconds a kernel takes beside other choices of its tiles, after what an H200 takes for int4 per row, or in fp16:
// a stage that the tensor cores or their waits limit, the store of a tile, and where K is shared out the sums that
// wait.
inline double large_time(const LargePlan& p, int pieces, int multiprocessors) {
  const double area = 16.0 * p.strips * pieces * p.rows, turns = double(p.tiles() << p.parts_log) / multiprocessors;
  const bool half = p.format == WeightFormat::int4_half;
  const double stage = !half           ? std::max(0.56, 0.06 + 2.35e-5 * area)
                       : p.rows == 128 ? 0.97  // narrower products take more of the register file
                                       : 0.34 + 2.15e-5 * area;
  const double whole = stage * p.stages / p.parts(), store = half ? 1e-4 * area : 4e-4 * area;
  if (p.shared > 0) return whole * turns + store + (half ? 0.5e-4 : 2.6e-4) * area;  // for sums that are handed on
  const double time = whole * std::ceil(turns) + store;
  const double waiting = 8.0 * p.slices() * p.row_tiles * p.strips * 16 * p.padded_rows();
  return p.parts_log == 0 ? time : time + 2 + waiting / (half ? 6.5e6 : 12e6);
}

// Whether the large kernel takes fewer rows than it is made for. Where the decode kernel would share out K over four
// blocks or more, adding up their sums costs more (14336 x 4096 at 16 rows, int4, 14.4 us for 21.1 on an H200; at 8
// rows and four blocks, 28672 x 8192, 44.9 for 43.4). And where a round of its tiles takes all multiprocessors, as
// those of the 8B's gate and up: there it is as fast alone, and a layer of 2 to 4 rows takes 2 to 3 us less, of 9 to 16
// 1 to 5, of 5 to 8 1 more. With two digits, as measured.
inline bool large_is_faster(const LinearWeight& w, const DecodePlan& p, int multiprocessors) {
  if (!w.integer() || p.column_bytes != 2) return false;
  const int rows = p.m, strips = (w.strips() + multiprocessors - 1) / multiprocessors;
  const bool many = rows > kMaxDecodeRows / 2;
  if (many && p.parts() >= 4) return true;
  const bool one_round = strips >= 12 && strips <= 16;  // the strips of a block
  const bool measured = w.format == WeightFormat::int4 && (w.group_size == 0 || multiplies_in_half(w, 2));
  return measured && one_round && (many || (rows > 1 && rows < 5));
}

// For m rows of x, at most kLargeChunk; `rows` is 0 where shared memory does not hold a tile.
inline LargePlan plan_large(const LinearWeight& w, int planes, int m, int multiprocessors, int architecture,
                            bool wgmma) {
  const WeightFormat format = multiplies_in_half(w, planes) ? WeightFormat::int4_half : w.format;
  const bool grouped = w.integer() && w.group_size != 0;
  const int pieces = large_pieces(format, planes);
  const int slices_log = decode_slices_log(w.steps()), n = multiprocessors;
  LargePlan best{};
  double least = 1e30;
  const auto consider = [&](int rows, int parts_log, int warps, bool keeps) {
    const LargeLayout layout = large_layout(format, planes, grouped, rows, warps, keeps, architecture);
    if (layout.ring < 2) return;
    LargePlan p{};
    p.rows = rows;
    p.strips = warps;
    p.threads = (warps + large_copy_warps(architecture)) * 32;
    p.parts_log = parts_log;
    p.slices_log = slices_log;
    p.format = format;
    p.wgmma = wgmma;
    p.releasing = 1;
    p.stages = w.steps() * (w.integer() ? 1 : 2);
    p.tile_bytes = large_tile_bytes(format, planes, rows, grouped ? w.group_size : 0);
    p.shared_bytes = layout.bytes;
    p.token_tiles = (m + rows - 1) / rows;
    // Where the tiles are fewer than the multiprocessors, with less for each and more of them busy.
    const int least_strips = (w.strips() + n - 1) / n;
    if (large_spares(rows, grouped) && parts_log == 0 && p.token_tiles == 1 && least_strips < warps &&
        4 * least_strips >= 3 * warps) {
      p.strips = least_strips;
    }
    p.row_tiles = (w.strips() + p.strips - 1) / p.strips;
    p.token_magic = static_cast<uint32_t>((int64_t{1} << 32) / p.token_tiles + 1);
    const int tiles = p.tiles();
    if (parts_log > 0 && tiles >= n) return;
    p.blocks = std::min(tiles << parts_log, n);
    for (const bool share : {true, false}) {
      if (share && (parts_log > 0 || tiles <= n || tiles % n == 0)) continue;
      // Whole rounds of tiles come in between: what is left, with one of the rounds, is shared out.
      p.rounds = share ? tiles / n - 1 : 0, p.shared = share ? tiles - p.rounds * n : 0;
      p.work = (tiles - p.shared) << parts_log;
      const double time = large_time(p, pieces, n);
      if (time < least) least = time, best = p;
    }
  };
  for (const int rows : kLargeRows) {
    if (!large_compiled(format, planes, grouped, rows)) continue;
    if (m <= best.rows) break;                   // which hold them all
    if (pieces * best.rows < 128) least = 1e30;  // narrower than the tensor cores like
    const bool two_forms = large_two_forms(format, planes, grouped, rows);
    for (int parts_log = 0; parts_log <= slices_log; ++parts_log) {
      const bool whole = parts_log == 0, keeps = whole || !two_forms;
      const int warps = large_warps(format, planes, grouped, rows, whole);
      consider(rows, parts_log, warps, keeps);
      if (whole && large_halves(format, planes, grouped, rows)) consider(rows, parts_log, warps / 2, keeps);
    }
  }
  return best;
}

}  // namespace nibblelm::cuda
