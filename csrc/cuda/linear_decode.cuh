// The decode kernel: y = x W^T for 1 to 16 rows of x, limited by the bytes of W.
//
// A warp owns one slice of K for one strip of 16 rows at a time and streams it through a private ring in shared memory.
// The rows of x are the 8 columns of the tensor-core tile, one tile per plane (linear_planes.cuh); integer products are
// exact in int32. The warps of a strip deliver their sums and go on to the next strip; they take turns in adding them.
// Slices are added as a binary tree whose shape depends on K alone: every m, split over blocks and grid gives the same
// bits.
#pragma once

#include "barrier.cuh"
#include "linear_prepare.cuh"
#include "linear_tile.cuh"
#include "silu.cuh"

namespace nibblelm::cuda {

// ---- device helpers ------------------------------------------------------------------------------------------

// Sum as a tree of neighbours; fewer values with zeros behind them give the tree of those values.
__device__ __forceinline__ float tree_sum(float (&v)[kMaxSlices]) {
#pragma unroll
  for (int level = 0; level < 3; ++level) {
#pragma unroll
    for (int i = 0; i < kMaxSlices / 2; ++i) {
      if (i < kMaxSlices / 2 >> level) v[i] = v[2 * i] + v[2 * i + 1];
    }
  }
  static_assert(kMaxSlices == 8);
  return v[0];
}

// Adds value i of a sequence to the tree of the ones before it, those of full subtrees waiting; after 2^n values,
// `value` is their tree_sum.
template <int N>
__device__ __forceinline__ void carry_sum(float (&value)[N], float (&waiting)[3][N], int i) {
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const bool second = (i >> level & 1) != 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if (second) {
        value[n] = waiting[level][n] + value[n];
      } else {
        waiting[level][n] = value[n];
      }
    }
    if (!second) return;
  }
}

// The warp's place in its stream of stages, a ring of kMost or kFew stages ahead of what it computes.
template <WeightFormat F, bool Grouped, int C>
struct Stream {
  using Fmt = Format<F>;
  static constexpr bool kSmall{small_shared_memory(kArchitecture)};
  static constexpr int kMost{ring_bytes(F, C, kSmall) / Fmt::kStageBytes};
  static constexpr int kFew{short_ring_bytes(F, C, kSmall) / Fmt::kStageBytes};
  const DecodeArgs& a;
  int lane, first_stage, slice_stages, strip, strip_step;
  int stages_left, strip_jump;  // from the end of this slice in one strip to its start in the next
  uint32_t source;              // of this lane, in 16 bytes
  int record_jump;
  uint32_t record_source;  // of this lane, in 8 bytes
  uint32_t row_offset[Fmt::kInteger ? 1 : Fmt::kCopies];

  __device__ __forceinline__ void start() {
    stages_left = slice_stages;
    if constexpr (Grouped) {
      const int strip_records = a.groups * (a.record_bytes / 8), slot_records = a.plan.record_slot / 8;
      record_source = static_cast<uint32_t>(strip) * strip_records + first_stage * slot_records + lane;
      record_jump = strip_step * strip_records - slice_stages * slot_records;
    }
    if constexpr (Fmt::kInteger) {
      source = (static_cast<uint32_t>(strip) * a.stages + first_stage) * (Fmt::kStageBytes / 16) + lane;
      strip_jump = (strip_step * a.stages - slice_stages) * (Fmt::kStageBytes / 16);
    } else {  // 8 lanes to the 128 bytes of a row
      const int strip_pitch = static_cast<int>(a.pitch_bytes / 16) * kStripRows;
      source = static_cast<uint32_t>(strip) * strip_pitch + first_stage * 8 + lane % 8;
      strip_jump = strip_step * strip_pitch - slice_stages * 8;
      set_rows();
    }
  }

  __device__ __forceinline__ void set_rows() {  // rows beyond N repeat the last one and are not stored
#pragma unroll
    for (int i = 0; i < Fmt::kCopies; ++i) {
      row_offset[i] = min(4 * i + lane / 8, a.n - 1 - strip * kStripRows) * static_cast<uint32_t>(a.pitch_bytes);
    }
  }

  // `to`, `record_to`: shared addresses of this lane's first bytes and of the records in the slot.
  __device__ __forceinline__ void issue(uint32_t to, uint32_t record_to) {
    if (strip < a.strips) {
      const uint8_t* const from = a.data + static_cast<uint64_t>(source) * 16;
      if constexpr (Fmt::kInteger) {
#pragma unroll
        for (int i = 0; i < Fmt::kCopies; ++i) copy_async_16(to + i * 512, from + i * 512);
      } else {
        const int column = (first_stage + slice_stages - stages_left) * 128 + lane % 8 * 16;
        if (column < a.pitch_bytes) {
#pragma unroll
          for (int i = 0; i < Fmt::kCopies; ++i) copy_async_16(to + i * 512, from + row_offset[i]);
        }
      }
      if constexpr (Grouped) {
        const uint8_t* const record = a.records + static_cast<uint64_t>(record_source) * 8;
        if (8 * lane < a.plan.record_slot) copy_async_8(record_to + 8 * lane, record);
        if (a.plan.record_slot > 8 * kWarp) {
#pragma unroll 1
          for (int at = 8 * kWarp; at + 8 * lane < a.plan.record_slot; at += 8 * kWarp) {
            copy_async_8(record_to + 8 * lane + at, record + at);
          }
        }
        record_source += a.plan.record_slot / 8;
      }
      source += Fmt::kInteger ? Fmt::kStageBytes / 16 : 8;
      if (--stages_left == 0) {
        stages_left = slice_stages;
        strip += strip_step;
        source += strip_jump;
        if constexpr (Grouped) record_source += record_jump;
        if constexpr (!Fmt::kInteger) set_rows();
      }
    }
    copy_async_commit();
  }
};

// Where the warps of a strip leave their sums: [strip in flight][slice][row of x][row of the strip][word].
template <WeightFormat F, bool Grouped, int D, int C>
struct Reduction {
  // One row of x leaves most lanes without a result, so its digit sums are scaled by the warp that adds them.
  static constexpr bool kRaw{Format<F>::kInteger && !Grouped && C == 1};
  static constexpr int kWords{kRaw ? D : 1};
  using Tiles = Tile<F, Grouped, D, C>;
  static constexpr int kValues{Tiles::kTiles * Tiles::kColumns * 2};  // of a lane: [tile][column][row half]
  const DecodeArgs& a;
  const int* sums;
  const float* scales;
  int* red;  // of this strip in flight
  int part, strip, lane;

  // A slice's sums of this lane, scaled.
  __device__ __forceinline__ void scale(const Tiles& tile, const RowTerms (&rows)[2], int slice,
                                        float (&value)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int t = i / 2 / Tiles::kColumns, j = i / 2 % Tiles::kColumns, h = i % 2, m = Tiles::column(t, j, lane);
      const float slice_scale = scales[slice * C + m];  // of columns beyond the rows of x: anything
      if constexpr (Grouped) {
        value[i] = __fmul_rn(tile.sum[t][h][j], slice_scale * (1.0f / Tiles::kTimes));
      } else if constexpr (Format<F>::kInteger) {
        int raws[D], digits[D];
#pragma unroll
        for (int d = 0; d < D; ++d) raws[d] = tile.raw(t, d, h, j), digits[d] = sums[(slice * D + d) * C + m];
        value[i] = scale_sums<D>(raws, digits, rows[h], slice_scale);
      } else {
        float sum{0.0f};  // the smallest terms first
#pragma unroll
        for (int d = D - 1; d >= 0; --d) sum += tile.raw(t, d, h, j);
        value[i] = __fmul_rn(sum, slice_scale);
      }
    }
  }

  // Where this lane's value i goes from warp `from` of the strip; null where it is of no row of x.
  __device__ __forceinline__ int* place(int i, int from) const {
    const int m_count = C == 1 ? 1 : a.plan.m,
              m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
    if (C == 1 ? lane % 4 != 0 : m >= m_count) return nullptr;
    return red + ((from * m_count + m) * kStripRows + i % 2 * 8 + lane / 4) * kWords;
  }

  __device__ __forceinline__ void deliver(const float (&value)[kValues], int from) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (int* const to = place(i, from)) *to = __float_as_int(value[i]);
    }
  }

  __device__ __forceinline__ void deliver_raw(const Tiles& tile, int from) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (int* const to = place(h, from)) {
#pragma unroll
        for (int d = 0; d < D; ++d) to[d] = tile.raw(0, d, h, 0);
      }
    }
  }

  // By all lanes together. In a strip of pairs, lane r has a gate and lane r + 8 its up, rounded as the separate op
  // would find them.
  __device__ __forceinline__ void store(int m, int row, float value, bool wanted) const {
    const int n = strip * kStripRows + row;
    wanted = wanted && n < a.n;
    if (a.bias != nullptr && wanted) value += a.bias[n];
    if (a.swiglu) {
      if (a.y_dtype == DType::bf16) value = to_float(from_float<bf16>(value));
      const float up = __shfl_down_sync(kAllLanes, value, 8);
      if (wanted && row < 8) store_from_float(a.y, m * a.y_stride + strip * 8 + row, a.y_dtype, silu(value) * up);
    } else if (wanted) {
      store_from_float(a.y, m * a.y_stride + n, a.y_dtype, value);
    }
  }

  // Where one warp has taken all of K, this lane's values are the result.
  __device__ __forceinline__ void store_values(const float (&value)[kValues]) const {
    const int r = lane / 4, n = strip * kStripRows + r;
    float bias[2]{};
    if (a.bias != nullptr) bias[0] = n < a.n ? a.bias[n] : 0.0f, bias[1] = n + 8 < a.n ? a.bias[n + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const int m = Tiles::column(i / 2 / Tiles::kColumns, i / 2 % Tiles::kColumns, lane);
      if (m >= a.plan.m) continue;
      float low = value[i] + bias[0], high = value[i + 1] + bias[1];
      if (a.swiglu) {
        if (a.y_dtype == DType::bf16) low = to_float(from_float<bf16>(low)), high = to_float(from_float<bf16>(high));
        store_from_float(a.y, m * a.y_stride + strip * 8 + r, a.y_dtype, silu(low) * high);
      } else {
        if (n < a.n) store_from_float(a.y, m * a.y_stride + n, a.y_dtype, low);
        if (n + 8 < a.n) store_from_float(a.y, m * a.y_stride + n + 8, a.y_dtype, high);
      }
    }
  }

  // The sum over the strip's warps of row `row` and row m of x; with one row of x, two lanes share it.
  __device__ __forceinline__ float add_slices(int m, int row, const RowTerms& terms) const {
    const int count = a.plan.strip_warps();
    if constexpr (C == 1) {
      float v[kMaxSlices / 2];
#pragma unroll
      for (int i = 0; i < kMaxSlices / 2; ++i) {
        const int slice = lane / kStripRows * (kMaxSlices / 2) + i;
        v[i] = 0.0f;
        if (slice < count) {
          const int* const from = red + (slice * kStripRows + row) * kWords;
          if constexpr (kRaw) {
            int raws[D], digits[D];
#pragma unroll
            for (int d = 0; d < D; ++d) raws[d] = from[d], digits[d] = sums[slice * D + d];
            v[i] = scale_sums<D>(raws, digits, terms, scales[slice]);
          } else {
            v[i] = __int_as_float(*from);
          }
        }
      }
      const float half = (v[0] + v[1]) + (v[2] + v[3]);
      return half + __shfl_xor_sync(kAllLanes, half, kStripRows);
    } else {
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        v[s] = s < count ? __int_as_float(red[(s * a.plan.m + m) * kStripRows + row]) : 0.0f;
      }
      return tree_sum(v);
    }
  }

  // Warp `me` of the strip finishes every strip_warps()th round of two rows of x, a half of the warp each; the loops
  // stay rolled, since code that runs once comes from memory. `terms`: of row lane % 16.
  __device__ __forceinline__ void finish(const RowTerms& terms, int me) const {
    const DecodePlan& p = a.plan;
    const int rounds = C == 1 ? 1 : (p.m + 1) / 2;
    const int row = lane % kStripRows, m_count = C == 1 ? 1 : p.m;
    const int m_first = C == 1 ? 0 : lane / kStripRows;
    float* const partials = a.partials + static_cast<int64_t>(strip) * m_count * kStripRows + row;
    const int64_t part_step = static_cast<int64_t>(p.strips) * m_count * kStripRows;
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const bool wanted = m_first + 2 * i < m_count && (C > 1 || lane < kStripRows);
      const int m = min(m_first + 2 * i, m_count - 1);
      const float value = add_slices(m, row, terms);
      if (p.parts_log == 0) {
        store(m, row, value, wanted);
      } else if (wanted) {
        partials[part * part_step + m * kStripRows] = value;
      }
    }
    if (p.parts_log == 0) return;
    // The block that arrives last adds the parts, in their order. Four bits of a counter for every warp of a strip.
    __threadfence();
    __syncwarp();
    int ticket{0};
    if (lane == 0) ticket = atomicAdd(a.arrivals + strip, 1 << 4 * me) >> 4 * me & 15;
    if (__shfl_sync(kAllLanes, ticket, 0) != p.parts() - 1) return;
    __threadfence();
#pragma unroll 1
    for (int i = me; i < rounds; i += p.strip_warps()) {
      const bool wanted = m_first + 2 * i < m_count && (C > 1 || lane < kStripRows);
      const int m = min(m_first + 2 * i, m_count - 1);
      float v[kMaxSlices];
#pragma unroll
      for (int s = 0; s < kMaxSlices; ++s) {
        v[s] = s < p.parts() ? __ldcg(partials + s * part_step + m * kStripRows) : 0.0f;
      }
      store(m, row, tree_sum(v), wanted);
    }
    if (lane == 0) atomicSub(a.arrivals + strip, p.parts() << 4 * me);
  }
};

// A prepared image on its way to shared memory by bulk copies: work starts when its first slice is there.
struct ImageCopy {
  static constexpr bool kBulk{kArchitecture >= 90};  // else the block copies it and waits
  const DecodePlan& p;
  uint32_t barriers;  // of every slice, and of the sums and scales

  __device__ __forceinline__ void init() const {
    const int lane = threadIdx.x % kWarp;
    if (threadIdx.x < kWarp && lane <= p.block_slices()) {
      barrier_init(barriers + lane * 8, 1);
      barrier_init_fence();
    }
  }

  // By the first warp, a lane for every slice and one for the rest. begin_of(slice): its start in the image.
  template <class BeginOf>
  __device__ __forceinline__ void start(const uint8_t* from, uint32_t to, BeginOf begin_of) const {
    const int lane = threadIdx.x % kWarp, slices = p.block_slices();
    if (lane > slices) return;
    const int begin = lane == slices ? p.sums_at : begin_of(lane);
    const int end = lane == slices ? p.image_bytes : begin_of(lane + 1);
    barrier_arrive_expect(barriers + lane * 8, end - begin);
    copy_bulk(to + begin, from + begin, end - begin, barriers + lane * 8);
  }
};

// ---- kernel --------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
__global__ void __launch_bounds__(kDecodeThreads, C <= 4 ? 2 : 1)
    linear_decode_kernel(const __grid_constant__ DecodeArgs a) {
  using Fmt = Format<F>;
  using Tiles = Tile<F, Grouped, D, C>;
  using Reduce = Reduction<F, Grouped, D, C>;
  constexpr bool kBeside{Grouped && !Tiles::kFours};  // records beside the stages
  using Ring = Stream<F, kBeside, C>;
  extern __shared__ __align__(16) uint8_t shared[];
  const DecodePlan& p = a.plan;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int part = blockIdx.x & (p.parts() - 1), part_blocks = gridDim.x >> p.parts_log;
  const int me = warp & (p.strip_warps() - 1), sub = warp >> (p.block_log - p.own_log);
  const int own = C == 1 ? 1 : 1 << p.own_log, first_slice = me * own;  // of the block's
  constexpr int kStepStages{kStepK / Fmt::kStageK};
  const auto step_at = [&](int slice) { return slice_begin((part << p.block_log) + slice, p.slices_log, a.steps); };
  const auto stage_at = [&](int slice) { return min(step_at(slice) * kStepStages, a.stages); };
  const int begin = step_at(first_slice);
  const int slice_k = (begin - step_at(0)) * kStepK;  // in the image
  const int first_strip = (blockIdx.x >> p.parts_log) + sub * part_blocks, strip_step = part_blocks * p.block_strips;

  const int record_ring_at = keep(p.records_at + warp * p.record_slots * p.record_slot);
  // In a stage of a full format, odd rows swap their halves: the 8 lanes that read two rows together meet all banks.
  const int lane_at = Fmt::kInteger ? lane * 16 : lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16;
  const int ring_at = keep(warp * p.ring_stages * Fmt::kStageBytes + (Fmt::kInteger ? lane_at : 0));
  const int own_stages = keep(stage_at(first_slice + own) - begin * kStepStages);
  Ring stream{a, lane, begin * kStepStages, own_stages, first_strip, keep(strip_step)};
  const auto refill = [&](int slot) {
    stream.issue(shared_address(shared) + ring_at + (Fmt::kInteger ? 0 : lane_at) + slot * Fmt::kStageBytes,
                 shared_address(shared) + record_ring_at + slot * p.record_slot);
  };
  if constexpr (Grouped) {
    // Records come in pieces so small that memory serves them last while weights stream: all blocks together bring all
    // of them to L2 first.
    const int64_t bytes = static_cast<int64_t>(a.strips) * a.groups * a.record_bytes;
#pragma unroll 1
    for (int64_t at = (blockIdx.x * kDecodeThreads + threadIdx.x) * 32LL; at < bytes;
         at += gridDim.x * kDecodeThreads * 32LL) {
      prefetch_l2(a.records + at);
    }
  }
  LaneRecords<F> records{a, lane, own_stages * kStepK >> a.group_shift, strip_step, first_strip};
  if constexpr (Tiles::kFours) {
    records.start(begin * kStepK >> a.group_shift);
#pragma unroll 1
    for (int i = 0; i < p.record_slots; ++i) {
      records.copy(shared_address(shared) + record_ring_at + i * p.record_slot);
    }
  }
  stream.start();
#pragma unroll 1
  for (int i = 0; i < p.ring_stages; ++i) refill(i);  // weights: the step does not change them
  // Per strip in flight: `full` counts the warps whose sums have arrived, `empty` those that have added them: with one
  // row of x a warp adds a whole strip, in turn, else every warp adds some rows of x.
  const uint32_t full = shared_address(shared + p.barriers_at) + sub * 2 * p.depth * 8, empty = full + p.depth * 8;
  if (me == 0 && lane < 2 * p.depth) {
    barrier_init(full + lane * 8, kWarp * (lane < p.depth || C > 1 ? p.strip_warps() : 1));
  }

  uint8_t* const image = shared + p.image_at;
  const bool copied = ImageCopy::kBulk && C > 1;
  const ImageCopy copy{p, shared_address(shared + p.image_barriers_at)};
  if (copied) {
    copy.init();
    dependency_wait();
    dependency_release();
    if (warp == 0) {
      copy.start(a.images + part * p.image_bytes, shared_address(image),
                 [&](int slice) { return p.planes_at + p.planes_of(slice, 0, step_at(slice) - step_at(0), 0); });
    }
  } else {
    prepare_image<F, Grouped, D, C>(a, image, shared + p.red_at, part);
  }
  __syncthreads();
  if (copied) barrier_wait(copy.barriers + p.block_slices() * 8, 0);

  constexpr int kChunk{8 * D * Fmt::kPlaneBytes};
  const auto planes_of = [&](int slice) {
    PlaneAt<Tiles::kTiles> at{shared, {}};
#pragma unroll
    for (int t = 0; t < Tiles::kTiles; ++t) {
      const int row = min(Tiles::kDigits ? t * 4 + lane / 8 : t * 8 + lane / 4, p.m - 1);
      const int lane_bytes = Tiles::kDigits           ? lane % 4 * 32 + lane / 4 % 2 * 16
                             : F == WeightFormat::f32 ? lane % 4 / 2 * kChunk + lane % 2 * 8
                                                      : lane % 4 * kChunk;
      at.row[t] = keep(p.image_at + p.planes_at + lane_bytes +
                       p.planes_of(slice, row, step_at(slice) - step_at(0), step_at(slice + 1) - step_at(0)));
    }
    return at;
  };
  const PlaneAt<Tiles::kTiles> planes = planes_of(first_slice);  // of one row: a warp has one slice
  const int group_mask = keep((1 << a.group_shift >> 5) - 1);
  const int first_sum = keep(Grouped ? (slice_k >> a.group_shift) * kGroupWords<D> * C : 0);
  const int* const sums = reinterpret_cast<const int*>(image + p.sums_at);
  const float* const scales = reinterpret_cast<const float*>(image + p.scales_at);
  const int strip_words = p.m * p.strip_warps() * kStripRows * Reduce::kWords;
  int* const red = reinterpret_cast<int*>(shared + p.red_at) + sub * p.depth * strip_words;

  int slot{0}, four{0}, turn{0};  // stages and fours of groups in their rings; strips this warp has delivered
  for (int strip = first_strip; strip < a.strips; strip += strip_step, ++turn) {
    const int in_flight = turn & (p.depth - 1), lap = turn >> p.depth_log;
    const bool finishes = C == 1 ? (turn & (p.strip_warps() - 1)) == me : 2 * me < p.m;
    RowTerms rows[2]{};
    if constexpr (Fmt::kInteger && !Grouped) {
      const uint8_t* const record = a.records + static_cast<int64_t>(strip) * a.record_bytes;
      if constexpr (Reduce::kRaw) {
        if (finishes) read_record<F>(a, record, lane % 8, rows);
      } else {
        read_record<F>(a, record, lane / 4, rows);
      }
    }
    Reduce reduce{a, sums, scales, red + in_flight * strip_words, part, strip, lane};
    GroupAt group{nullptr, sums + first_sum};
    const auto multiply_slice = [&](Tiles& tile, PlaneAt<Tiles::kTiles> here, int stages, int k) {
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        if (Ring::kFew == Ring::kMost || p.ring_stages == Ring::kMost) {
          copy_async_wait<Ring::kMost - 1>();
        } else {
          copy_async_wait<Ring::kFew - 1>();
        }
        if constexpr (kBeside || !Fmt::kInteger) __syncwarp();  // other lanes copied part of what this one reads
        if constexpr (kBeside) group.record = shared + record_ring_at + slot * p.record_slot;
        multiply_stage<F, Grouped, D, C>(a, tile, shared + ring_at + slot * Fmt::kStageBytes, here, group, group_mask,
                                         k + stage * Fmt::kStageK, lane);
#pragma unroll
        for (int t = 0; t < Tiles::kTiles; ++t) here.row[t] += Fmt::kStageK / 8 * kChunk;
        if constexpr (kBeside || !Fmt::kInteger) __syncwarp();  // all have read the slot
        const bool full_four = Tiles::kFours && (stage == stages - 1 || tile.groups == 4);
        RowTerms terms[2]{};
        if (full_four) {
          const int at = record_ring_at + four * p.record_slot;
          records.read(shared + at, terms);
          records.copy(shared_address(shared) + at);
          four = four == p.record_slots - 1 ? 0 : four + 1;
        }
        refill(slot);
        slot = slot == p.ring_stages - 1 ? 0 : slot + 1;
        if constexpr (Tiles::kFours) {
          if (full_four) tile.add_groups(a, terms, group.sums, lane), group.sums += 4;
        }
      }
    };
    if constexpr (C == 1) {
      Tiles tile;
      multiply_slice(tile, planes, own_stages, begin * kStepK);
      if (lap > 0) barrier_wait(empty + in_flight * 8, (lap - 1) & 1);
      if constexpr (Reduce::kRaw) {
        reduce.deliver_raw(tile, me);
      } else {
        float value[Reduce::kValues];
        reduce.scale(tile, rows, me, value);
        reduce.deliver(value, me);
      }
    } else {
      float value[Reduce::kValues], waiting[3][Reduce::kValues];  // sums of 1, 2 and 4 slices: the tree, as they come
#pragma unroll 1
      for (int i = 0; i < own; ++i) {
        const int slice = first_slice + i, stage = stage_at(slice);
        if (copied && turn == 0) barrier_wait(copy.barriers + slice * 8, 0);
        Tiles tile;
        multiply_slice(tile, planes_of(slice), stage_at(slice + 1) - stage, stage * Fmt::kStageK);
        reduce.scale(tile, rows, slice, value);
        carry_sum(value, waiting, i);
      }
      if (p.strip_warps() == 1 && p.parts_log == 0) {
        reduce.store_values(value);
        continue;
      }
      if (lap > 0) barrier_wait(empty + in_flight * 8, (lap - 1) & 1);
      reduce.deliver(value, me);
    }
    barrier_arrive(full + in_flight * 8);
    if (finishes) {
      barrier_wait(full + in_flight * 8, lap & 1);
      const bool upper = (lane & 8) != 0;
      reduce.finish({upper ? rows[1].scale : rows[0].scale, upper ? rows[1].minimum : rows[0].minimum,
                     upper ? rows[1].zero : rows[0].zero},
                    C == 1 ? 0 : me);
    }
    if (finishes || C > 1) barrier_arrive(empty + in_flight * 8);
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  const auto text = [&] { return what; };
  if (a.images != nullptr) {
    launch_kernel(launch, text, linear_planes_kernel<F, Grouped, D, C>, dim3(a.plan.m), dim3(kDecodeThreads),
                  kFloatActivations<F, D> ? 0 : 2 * kStepK * a.steps, a);
  }
  launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, C>, dim3(a.plan.grid), dim3(kDecodeThreads),
                a.plan.shared_bytes, a);
}

template <WeightFormat F, bool Grouped, int D>
void launch_decode(const DecodeArgs& a, const Launch& launch, const std::string& what) {
  const int columns = decode_columns(a.plan.m, kDigitColumns<F, D>);
  if (columns == 1) {
    launch_decode<F, Grouped, D, 1>(a, launch, what);
  } else if (columns == 4) {
    if constexpr (kDigitColumns<F, D>) launch_decode<F, Grouped, D, 4>(a, launch, what);
  } else if (columns == 8) {
    launch_decode<F, Grouped, D, 8>(a, launch, what);
  } else {
    launch_decode<F, Grouped, D, 16>(a, launch, what);
  }
}

// Over the dtypes of x and the presence of groups; one file per format instantiates it.
template <WeightFormat F>
void launch_format(const DecodeArgs& a, bool float_activations, const Launch& launch, const std::string& what) {
  constexpr int kFewest{decode_planes(F, DType::bf16)}, kMost{decode_planes(F, DType::f32)};
  if constexpr (Format<F>::kInteger) {
    if (a.group_shift > 0) {
      float_activations ? launch_decode<F, true, kMost>(a, launch, what)
                        : launch_decode<F, true, kFewest>(a, launch, what);
      return;
    }
  }
  float_activations ? launch_decode<F, false, kMost>(a, launch, what)
                    : launch_decode<F, false, kFewest>(a, launch, what);
}

}  // namespace nibblelm::cuda
