// A warp's share of the weights of a chain of linears, and how it comes to shared memory.
#pragma once

#include "linear_planes.cuh"

namespace nibblelm::cuda {

// What a warp does in a link: one slice of K (C > 1: `own` neighbouring slices) in every strip_step-th strip.
struct WarpPart {
  int me, sub;  // warp of the strip, strip of the block
  int first_slice, own;
  int begin;                // step of K
  int first_stage, stages;  // of a strip
  int first_strip, strip_step;

  template <WeightFormat F, int C>
  __device__ __forceinline__ static WarpPart of(const DecodeArgs& a) {
    return of<F, C>(a, blockIdx.x, gridDim.x);
  }
  template <WeightFormat F, int C>
  __device__ __forceinline__ static WarpPart of(const DecodeArgs& a, uint32_t block, uint32_t blocks) {
    constexpr int kStepStages{kStepK / Format<F>::kStageK};
    const DecodePlan& p = a.plan;
    const int warp = threadIdx.x / kWarp, part = block & (p.parts() - 1), part_blocks = blocks >> p.parts_log;
    WarpPart w;
    w.me = warp & (p.strip_warps() - 1), w.sub = warp >> (p.block_log - p.own_log);
    w.own = C == 1 ? 1 : 1 << p.own_log, w.first_slice = w.me * w.own;
    const int slice = (part << p.block_log) + w.first_slice;
    w.begin = slice_begin(slice, p.slices_log, a.steps), w.first_stage = w.begin * kStepStages;
    w.stages = min(slice_begin(slice + w.own, p.slices_log, a.steps) * kStepStages, a.stages) - w.first_stage;
    w.first_strip = (block >> p.parts_log) + w.sub * part_blocks, w.strip_step = part_blocks * p.block_strips;
    return w;
  }
  __device__ __forceinline__ int strips(const DecodeArgs& a) const {  // how many it takes
    return first_strip < a.strips ? (a.strips - first_strip + strip_step - 1) / strip_step : 0;
  }
};

// The warp's place in its stream of stages, a ring ahead of what it computes; it goes on from link to link.
template <WeightFormat F, bool Grouped, int C>
struct Stream {
  using Fmt = Format<F>;
  static constexpr int kStages{ring_bytes(F, C, small_shared_memory(kArchitecture)) / Fmt::kStageBytes};
  // Under way at a time in a ring that is filled bit by bit: 32 KB of a multiprocessor, which memory takes a
  // microsecond for. With two to four rows it has two blocks, if their rings are of int4.
  static constexpr int kPaced{std::max((C == 4 ? 1024 : 2048) / Fmt::kStageBytes, 1)};
  static_assert(kPaced <= kStages);
  const DecodeChain& chain;
  int lane;
  int link{-1}, strips_left{0};
  int stages_left, slice_stages;
  const uint8_t* from;  // of this lane
  int strip_jump;       // from the end of this slice in one strip to its start in the next; beyond the records, 8 bytes
  const uint8_t* record;
  int record_jump;
  int strip, strip_step, first_stage;  // of full formats
  uint32_t row_offset[Fmt::kInteger ? 1 : Fmt::kCopies];

  // To the next link that has work for this warp.
  __device__ __forceinline__ void next_link() {
    while (++link < chain.count) {
      const DecodeArgs& a = chain.links[link];
      const WarpPart w = WarpPart::of<F, C>(a);
      strips_left = w.strips(a);
      if (strips_left == 0) continue;
      stages_left = slice_stages = w.stages;
      if constexpr (Grouped) {
        const int strip_records = a.groups * a.record_bytes;
        record = a.records + static_cast<int64_t>(w.first_strip) * strip_records + w.first_stage * a.plan.record_slot +
                 8 * lane;
        record_jump = w.strip_step * strip_records - slice_stages * a.plan.record_slot;
      }
      if constexpr (Fmt::kInteger) {
        from = a.data + (static_cast<int64_t>(w.first_strip) * a.stages + w.first_stage) * Fmt::kStageBytes + 16 * lane;
        strip_jump = (w.strip_step * a.stages - slice_stages) * Fmt::kStageBytes;
      } else {  // 8 lanes to the 128 bytes of a row
        strip = w.first_strip, strip_step = w.strip_step, first_stage = w.first_stage;
        set_rows(a);
      }
      return;
    }
  }

  __device__ __forceinline__ void set_rows(const DecodeArgs& a) {  // rows beyond N repeat the last one, not stored
    from = a.data + static_cast<int64_t>(strip) * kStripRows * a.pitch_bytes + first_stage * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < Fmt::kCopies; ++i) {
      row_offset[i] = min(4 * i + lane / 8, a.n - 1 - strip * kStripRows) * static_cast<uint32_t>(a.pitch_bytes);
    }
  }

  // `to`, `record_to`: shared addresses of this lane's first bytes and of the records in the slot.
  __device__ __forceinline__ void issue(uint32_t to, uint32_t record_to) {
    if (strips_left > 0) {
      if constexpr (Fmt::kInteger) {
#pragma unroll
        for (int i = 0; i < Fmt::kCopies; ++i) copy_async_16(to + i * 512, from + i * 512, kEvictFirst);
      } else {
        const DecodeArgs& a = chain.links[C == 1 ? link : 0];
        const int column = (first_stage + slice_stages - stages_left) * 128 + lane % 8 * 16;
        if (column < a.pitch_bytes) {
#pragma unroll
          for (int i = 0; i < Fmt::kCopies; ++i) copy_async_16(to + i * 512, from + row_offset[i], kEvictFirst);
        }
      }
      if constexpr (Grouped) {
        const int slot = chain.links[0].plan.record_slot;
        if (8 * lane < slot) copy_async_8(record_to + 8 * lane, record);
        if (slot > 8 * kWarp) {
#pragma unroll 1
          for (int at = 8 * kWarp; at + 8 * lane < slot; at += 8 * kWarp) {
            copy_async_8(record_to + 8 * lane + at, record + at);
          }
        }
        record += slot;
      }
      from += Fmt::kInteger ? Fmt::kStageBytes : 128;
      if (--stages_left == 0) {
        if (--strips_left == 0) {
          next_link();
        } else {
          stages_left = slice_stages;
          if constexpr (Grouped) record += record_jump;
          if constexpr (Fmt::kInteger) {
            from += strip_jump;
          } else {
            strip += strip_step;
            set_rows(chain.links[C == 1 ? link : 0]);
          }
        }
      }
    }
    copy_async_commit();
  }
};

}  // namespace nibblelm::cuda
