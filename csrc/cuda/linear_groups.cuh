// The kernel for many rows of x and int4 codes in groups of 128, which it multiplies in fp16: as linear_large.cuh, but
// a group's sum has one instruction, where a sum of digits has three.
#pragma once

#include "linear_half.cuh"
#include "linear_large.cuh"

namespace nibblelm::cuda {

template <int Rows, bool Keeps>
using GroupsShape = LargeShape<WeightFormat::int4_half, true, 1, Rows, Keeps>;

// Two warpgroups take turns at the tensor cores, so that one unpacks while the other's products run. Left alone they
// may fall into step, for as long as a kernel runs: then 128 rows take 64 us and not 57.
struct Turns {
  static constexpr int kThreads{8 * kWarp}, kFirstBarrier{2};  // a barrier for each warpgroup's turn

  int group;  // warpgroup of this thread

  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(kFirstBarrier + group), "n"(kThreads) : "memory");
  }
  __device__ __forceinline__ void pass_on() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(kFirstBarrier + 1 - group), "n"(kThreads) : "memory");
  }
};

template <int Rows, bool Keeps, bool Wgmma>
__global__ void __launch_bounds__(GroupsShape<Rows, Keeps>::kThreads, 1)
    linear_groups_kernel(const __grid_constant__ LargeArgs g) {
  constexpr WeightFormat F{WeightFormat::int4_half};
  constexpr int kTiles{Rows / 8};
  using Shape = GroupsShape<Rows, Keeps>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LargePlan& p = g.p;
  const DecodeArgs& a = g.a;
  LargeRing<F, Shape> ring(g, shared);
  ring.share_out(g, [&] {
    const int lane = ring.lane, warp = ring.warp;
    constexpr bool kTurns{Wgmma && Shape::kWarps == 8};
    const Turns turns{warp / 4};
    if (kTurns && turns.group == 1) turns.pass_on();
    const RecordForm<F> form(a);
    const bool apart = !Keeps || p.parts() > 1;  // the sums of every slice wait for those of other blocks
#pragma unroll 1
    for (int i_work = 0;; ++i_work) {
      const LargeWork w(p, ring.share, i_work);
      if (!w.valid) break;
      const auto first_stage = [&](int slice) { return slice_begin(slice, a.plan.slices_log, a.steps); };
      float sum[kTiles][4], total[Keeps ? kTiles : 1][4];  // of the slice's groups; of the slices before
      if constexpr (Keeps) begin_totals(g, w, total, !apart, warp, lane);
#pragma unroll 1
      for (int slice = w.first_slice; slice < w.last_slice; ++slice) {
        const int of_slice = first_stage(slice + 1) - first_stage(slice);
        const auto multiply_group = [&]<bool First, bool Zeros>(bool last) {
          const uint32_t x = ring.tiles();
          ring.wait();
          const HalfGroup group = HalfGroup::read<Zeros>(ring.record(ring.slot, warp), lane);
          uint32_t words[2][4][4];
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            WeightPieces<F> pieces;
            pieces.read(ring.codes(), u, lane);
            unpack_half(pieces.piece[0], group, words[u]);
          }
          float acc[kTiles][4];
          if constexpr (kTurns) turns.wait();
          if constexpr (Wgmma) wgmma_fence();
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int piece = i / 4 * Rows * 128;
            if constexpr (Wgmma) {
              wgmma<true>(acc, words[i / 4][i % 4], wgmma_advance(wgmma_descriptor(x), piece + i % 4 * 32), i > 0);
            } else {
              multiply_sync<F>(acc, words[i / 4][i % 4], x + piece, i % 4, i > 0, lane);
            }
          }
          if constexpr (Wgmma) wgmma_commit();
          if constexpr (kTurns) turns.pass_on();
          if constexpr (Wgmma) wgmma_wait<0>();
          ring.next();
          if (!last || apart) ring.release();
          float scale[2];
          unpack_pair(group.scales, form.brain(), scale[0], scale[1]);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[t][e] = fmaf(scale[e / 2], acc[t][e], First ? 0.0f : sum[t][e]);
          }
        };
        const auto multiply_groups = [&]<bool Zeros>() {
          multiply_group.template operator()<true, Zeros>(of_slice == 1);
#pragma unroll 1
          for (int i = 1; i < of_slice; ++i) multiply_group.template operator()<false, Zeros>(i + 1 == of_slice);
        };
        form.has_zero() ? multiply_groups.template operator()<true>() : multiply_groups.template operator()<false>();
        if (Keeps && !apart) {
#pragma unroll
          for (int t = 0; t < (Keeps ? kTiles : 0); ++t) {
            const float2 x = ring.scale(t);
            total[t][0] = fmaf(sum[t][0], x.x, total[t][0]), total[t][1] = fmaf(sum[t][1], x.y, total[t][1]);
            total[t][2] = fmaf(sum[t][2], x.x, total[t][2]), total[t][3] = fmaf(sum[t][3], x.y, total[t][3]);
          }
        } else if (w.first_strip + warp < a.strips) {
          float4* const to = partial_at(g, w.tile * p.slices() + slice, 0, warp, lane);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            to[t * p.strips * kWarp] = make_float4(sum[t][0], sum[t][1], sum[t][2], sum[t][3]);
          }
        }
        ring.release();
      }
      if constexpr (Keeps) {
        if (!apart) end_totals<F, true, Rows>(g, w, total, warp, lane);
      }
    }
    if (kTurns && turns.group == 0) turns.wait();  // no barrier is left half full
    if (apart) merge_slices<F, true, 1, Shape::kWarps>(g, warp, lane);
  });
}

template <int Rows>
void launch_groups(const LargeArgs& g, const Launch& launch, const std::string& what) {
  const auto launch_form = [&]<bool Keeps>() {
    const auto kernel = g.p.wgmma ? linear_groups_kernel<Rows, Keeps, true> : linear_groups_kernel<Rows, Keeps, false>;
    launch_kernel(launch, [&] { return what; }, kernel, dim3(g.p.blocks), dim3(g.p.threads), g.p.shared_bytes, g);
  };
  if constexpr (large_two_forms(WeightFormat::int4_half, 1, true, Rows)) {
    if (g.p.parts() > 1) return launch_form.template operator()<false>();
  }
  launch_form.template operator()<true>();
}

}  // namespace nibblelm::cuda
