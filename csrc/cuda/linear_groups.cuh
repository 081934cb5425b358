// The kernel for many rows of x and int4 weights in groups of 128 with scales of 16 bits, activations in two digits: as
// linear_large.cuh, but zero-points are taken from the codes as they are unpacked and not from the sums, of which there
// are eight times as many as in a tile of two digits. Where none are stored all are 8, and unpacking takes half as
// much.
#pragma once

#include "linear_large.cuh"

namespace nibblelm::cuda {

template <int Rows, bool Keeps>
using GroupsShape = LargeShape<WeightFormat::int4, true, 2, Rows, Keeps, centred_warps(Rows, Keeps), kCentredRecord>;

template <int Rows, bool Keeps, bool Wgmma>
__global__ void __launch_bounds__(GroupsShape<Rows, Keeps>::kThreads, 1)
    linear_groups_kernel(const __grid_constant__ LargeArgs g) {
  constexpr WeightFormat F{WeightFormat::int4};
  constexpr int D{2}, kTiles{Rows / 8}, kPasses{Rows > 64 || (Rows == 64 && !Keeps) ? 2 : 1},
      kSums{D / kPasses * kTiles};
  using Shape = GroupsShape<Rows, Keeps>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const LargePlan& p = g.p;
  const DecodeArgs& a = g.a;
  LargeRing<F, Shape> ring(g, shared);
  ring.share_out(g, [&] {
    const int lane = ring.lane, warp = ring.warp;
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
        // Zeros: zero-points are there; else all are 8, words are sixteen times the codes less that, and the scale a
        // sixteenth: exact, as all of it.
        const auto multiply_group = [&]<bool First, bool Zeros>(bool last) {
          const uint32_t x = ring.tiles();
          ring.wait();
          const uint32_t record = ring.record(ring.slot, warp);
          const uint32_t scales_of_rows = load_shared<uint32_t>(record + lane / 4 * 4);
          uint32_t words[4][4];
          uint32_t bias[2];
          if constexpr (Zeros) {
            const int zeros = load_shared<ZeroPair<F>>(record + 2 * kStripRows + lane / 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) bias[i] = 0x80808080u - zero_of<F>(zeros, i) * 0x01010101u;
          }
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            WeightPieces<F> pieces;
            pieces.read(ring.codes(), u, lane);
            const uint32_t raw[4]{pieces.piece[0].x, pieces.piece[0].y, pieces.piece[0].z, pieces.piece[0].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t &low = words[2 * u][i], &high = words[2 * u + 1][i];
              if constexpr (Zeros) {
                low = ((raw[i] & 0x0f0f0f0fu) + bias[i % 2]) ^ 0x80808080u;
                high = (((raw[i] & 0xf0f0f0f0u) >> 4) + bias[i % 2]) ^ 0x80808080u;
              } else {
                low = (raw[i] << 4 & 0xf0f0f0f0u) ^ 0x80808080u, high = (raw[i] & 0xf0f0f0f0u) ^ 0x80808080u;
              }
            }
          }
          int acc[kSums][4];
          [[maybe_unused]] const uint64_t descriptor = Wgmma ? wgmma_descriptor(x) : 0;
#pragma unroll
          for (int pass = 0; pass < kPasses; ++pass) {
            constexpr int kPassBytes{D / kPasses * Rows * 128};
            if constexpr (Wgmma) wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if constexpr (Wgmma) {
                wgmma<true>(acc, words[i], wgmma_advance(descriptor, i * 32 + pass * kPassBytes), pass + i > 0);
              } else {
                multiply_sync<F, true>(acc, words[i], x + pass * kPassBytes, i, pass + i > 0, lane);
              }
            }
            if constexpr (Wgmma) wgmma_commit();
            if constexpr (Wgmma) wgmma_wait<0>();
            if (pass + 1 < kPasses) {  // high digits, then on top of them low ones
#pragma unroll
              for (int t = 0; t < kSums; ++t) {
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[t][e] *= 256;
              }
            }
          }
          ring.next();
          if (!last || apart) ring.release();
          float scale[2];
          unpack_pair(scales_of_rows, form.brain(), scale[0], scale[1]);
          if constexpr (!Zeros) scale[0] *= 0.0625f, scale[1] *= 0.0625f;
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int raw = kPasses == 2 ? acc[t][e] : acc[t][e] * 256 + acc[kSums - kTiles + t][e];
              sum[t][e] = fmaf(scale[e / 2], static_cast<float>(raw), First ? 0.0f : sum[t][e]);
            }
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
    if (apart) merge_slices<F, true, D, Shape::kWarps>(g, warp, lane);
  });
}

template <int Rows>
void launch_groups(const LargeArgs& g, const Launch& launch, const std::string& what) {
  const auto launch_form = [&]<bool Keeps>() {
    const auto kernel = g.p.wgmma ? linear_groups_kernel<Rows, Keeps, true> : linear_groups_kernel<Rows, Keeps, false>;
    launch_kernel(launch, [&] { return what; }, kernel, dim3(g.p.blocks), dim3(g.p.threads), g.p.shared_bytes, g);
  };
  if constexpr (centred_warps(Rows, true) != centred_warps(Rows, false)) {
    if (g.p.parts() > 1) return launch_form.template operator()<false>();
  }
  launch_form.template operator()<true>();
}

}  // namespace nibblelm::cuda
