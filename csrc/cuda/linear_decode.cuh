// The decode kernel: y = x W^T for 1 to 16 rows of x, limited by the bytes of W. With one row, several linears one
// after another: blocks wait for each other between them, and their rings go on filling with the next one's weights
// meanwhile.
//
// A warp owns one slice of K for one strip of 16 rows at a time and streams it through a private ring in shared memory.
// The rows of x are the 8 columns of the tensor-core tile, one tile per plane (linear_planes.cuh); integer products are
// exact in int32. The warps of a strip deliver their sums and go on to the next strip; they take turns in adding them.
// Slices, which depend on K alone, are added from left to right: every m, split over blocks and grid gives the same
// bits. Blocks that share a strip's K leave sums in memory, where the last to arrive adds them; two of them, where
// there are clusters, store them in each other's shared memory instead (Joined).
#pragma once

#include "barrier.cuh"
#include "cluster.cuh"
#include "grid_barrier.cuh"
#include "linear_prepare.cuh"
#include "linear_reduction.cuh"
#include "linear_stream.cuh"

namespace nibblelm::cuda {

constexpr bool kJoins{joins_blocks(kArchitecture)};

// Asks for the image of the block's part that others have prepared, where blocks are joined with the scales of both: a
// group of copies. Bulk copies, a slice each with a barrier of its own, arrived later (1 us a layer of 5 to 16 rows).
template <bool Joined>
__device__ __forceinline__ void copy_image(const DecodeArgs& a, uint8_t* shared, int scale_bytes) {
  const DecodePlan& p = a.plan;
  const uint8_t* const from = a.images + (blockIdx.x & (p.parts() - 1)) * p.image_bytes;
  const uint32_t to = shared_address(shared + p.image_at);
#pragma unroll 4
  for (int i = threadIdx.x * 16; i < p.image_bytes; i += kDecodeThreads * 16) copy_async_16(to + i, from + i);
  if constexpr (Joined) {
    const int i = threadIdx.x * 16, second = i >= scale_bytes ? scale_bytes : 0;
    if (i < 2 * scale_bytes) {
      copy_async_16(shared_address(shared + p.joined_scales_at) + i,
                    a.images + (second > 0) * p.image_bytes + p.scales_at + i - second);
    }
  }
  copy_async_commit();
}

// ---- kernel --------------------------------------------------------------------------------------------------

// Where a warp's rings are in shared memory, and the stage it takes next.
struct RingAt {
  uint32_t data, records;  // shared addresses
  int slot{0};
};

// What a warp needs of a link beside its image, made before it waits for the link's x.
template <WeightFormat F, bool Grouped, int D, int C, bool Joined, Extras E>
struct LinkAt {
  using Tiles = Tile<F, Grouped, D, C>;
  using Reduce = Reduction<F, Grouped, D, C, Joined, E == Extras::layer>;
  static constexpr int kChunk{8 * D * Format<F>::kPlaneBytes};
  const DecodeArgs& a;
  const WarpPart w;
  uint8_t* const shared;
  int part;
  RecordForm<F> form;
  int group_mask;
  uint32_t sums;         // of digits in the slice's groups, a shared address
  int red, strip_words;  // sums of this strip of the block
  // For every strip in flight, `full` counts the warps whose sums have arrived, `empty` those that have added them:
  // with one row of x a warp adds a whole strip, in turn, else every warp adds some rows of x.
  uint32_t full, empty;
  PlaneAt<Tiles::kTiles> planes;  // of the first slice
  RowBits<F> bits;                // of the strip that this warp adds next

  __device__ __forceinline__ LinkAt(const DecodeArgs& args, int link, uint8_t* shared_memory)
      : a(args), w(WarpPart::of<F, C>(args)), shared(shared_memory) {
    const DecodePlan& p = a.plan;
    part = blockIdx.x & (p.parts() - 1);
    form = RecordForm<F>(a);
    group_mask = (1 << a.group_shift >> 5) - 1;
    if (C == 1 && D == 2 && group_mask == 3 && !form.wide() && !form.has_minimum()) group_mask = GroupAt<F>::kSimple;
    group_mask = keep(group_mask);
    const int first_group = (w.begin - step_at(0)) * kStepK >> a.group_shift;  // in the image
    if constexpr (Grouped) {
      sums = keep(shared_address(shared + p.image_at + p.sums_at) + first_group * kGroupWords<D> * C * 4);
    }
    strip_words = keep(p.m * (Joined ? p.slices() : p.block_slices()) * kStripRows * Reduce::kWords);
    red = keep(p.red_at + (Joined ? w.sub / 2 : w.sub) * p.depth * strip_words * 4);
    full = keep(shared_address(shared + p.barriers_at) + (link * kLinkBarriers + w.sub * 2 * p.depth) * 8);
    empty = full + p.depth * 8;
    planes = planes_of(w.first_slice);
    if constexpr (C == 1) bits = read_bits(w.first_strip + w.me * w.strip_step);
  }

  __device__ __forceinline__ int step_at(int slice) const {  // slices of the block
    return slice_begin((part << a.plan.block_log) + slice, a.plan.slices_log, a.steps);
  }
  __device__ __forceinline__ int stage_at(int slice) const {
    return min(step_at(slice) * (kStepK / Format<F>::kStageK), a.stages);
  }
  __device__ __forceinline__ PlaneAt<Tiles::kTiles> planes_of(int slice) const {
    const DecodePlan& p = a.plan;
    const int lane = threadIdx.x % kWarp;
    PlaneAt<Tiles::kTiles> at;
#pragma unroll
    for (int t = 0; t < Tiles::kTiles; ++t) {
      const int row = min(Tiles::kDigits ? t * 4 + lane / 8 : t * 8 + lane / 4, p.m - 1);
      const int lane_bytes = Tiles::kDigits           ? lane % 4 * 32 + lane / 4 % 2 * 16
                             : F == WeightFormat::f32 ? lane % 4 / 2 * kChunk + lane % 2 * 8
                                                      : lane % 4 * kChunk;
      at.row[t] = keep(shared_address(shared) + p.image_at + p.planes_at + lane_bytes +
                       p.planes_of(slice, row, step_at(slice) - step_at(0), step_at(slice + 1) - step_at(0)));
    }
    return at;
  }
  // Of row lane % 16 of a strip.
  __device__ __forceinline__ RowBits<F> read_bits(int strip) const {
    const int row = threadIdx.x % kStripRows, n = strip * kStripRows + row;
    RowBits<F> out{};
    if (strip >= a.strips) return out;
    if constexpr (Format<F>::kInteger && !Grouped) {
      out = RowBits<F>::read(form, a.records + static_cast<int64_t>(strip) * a.record_bytes, row);
    }
    if (a.bias != nullptr && n < a.n) out.bias = a.bias[n];
    return out;
  }
};

// The strips of one link, its image being in shared memory. refill(slot) asks for the next stage of the stream.
template <WeightFormat F, bool Grouped, int D, int C, bool Joined, Extras E, class Refill>
__device__ __forceinline__ void compute_link(LinkAt<F, Grouped, D, C, Joined, E>& at, RingAt& ring, Refill refill) {
  using Fmt = Format<F>;
  using Tiles = Tile<F, Grouped, D, C>;
  using Reduce = LinkAt<F, Grouped, D, C, Joined, E>::Reduce;
  constexpr int kStages{Stream<F, Grouped, C>::kStages};
  const DecodeArgs& a = at.a;
  const DecodePlan& p = a.plan;
  const WarpPart& w = at.w;
  const int lane = threadIdx.x % kWarp, me = w.me;
  uint8_t* const shared = at.shared;
  const int* const sums = reinterpret_cast<const int*>(shared + p.image_at + p.sums_at);
  const float* const scales =
      reinterpret_cast<const float*>(shared + (Joined ? p.joined_scales_at : p.image_at + p.scales_at));

  const float* const x_totals = reinterpret_cast<const float*>(shared + p.image_at + p.totals_at);
  float x_total{__uint_as_float(0x7fc00000u)};  // of the one row of x that the block has prepared itself
  int turn{0};                                  // strips this warp has delivered
  const int owner = w.sub % 2;
  const bool owns = !Joined || owner == at.part;
  const auto wait_at = [](uint32_t barrier, int phase) {
    Joined ? cluster_barrier_wait(barrier, phase & 1) : barrier_wait(barrier, phase & 1);
  };
  if constexpr (Joined) cluster_wait();  // the other block's barriers are made
#pragma unroll 1
  for (int strip = w.first_strip; strip < a.strips; strip += w.strip_step, ++turn) {
    const int in_flight = turn & (p.depth - 1), lap = turn >> p.depth_log;
    const bool finishes = C == 1 ? (turn & (p.strip_warps() - 1)) == me : owns && 2 * me < p.m;
    RowTerms rows[2]{};
    if (C > 1 && p.delivers() && finishes) at.bits = at.read_bits(strip);
    if (Fmt::kInteger && !Grouped && C > 1 && !p.delivers()) {
      const uint8_t* const record = a.records + static_cast<int64_t>(strip) * a.record_bytes;
      read_record<F>(at.form, lane / 4, rows,
                     [&]<class T>(int from) { return *reinterpret_cast<const T*>(record + from); });
    }
    int* const red = reinterpret_cast<int*>(shared + at.red) + in_flight * at.strip_words;
    const Reduce reduce{a, sums, scales, red, at.part, strip, lane, owner};
    GroupAt<F> group{at.form, at.group_mask, at.sums, 0};
    const auto multiply_slice = [&](Tiles& tile, PlaneAt<Tiles::kTiles> here, int stages, int k) {
#pragma unroll 1
      for (int stage = 0; stage < stages; ++stage) {
        copy_async_wait<kStages - 1>();
        if constexpr (Grouped || !Fmt::kInteger) __syncwarp();  // other lanes copied part of what this one reads
        group.record = ring.records + ring.slot * p.record_slot;
        const uint32_t data = ring.data + ring.slot * Fmt::kStageBytes;
        const int stage_k = k + stage * Fmt::kStageK;
        if constexpr (Grouped && C == 1 && D == 2) {
          at.group_mask == GroupAt<F>::kSimple
              ? multiply_stage<F, Grouped, D, C, true>(a, tile, data, here, group, stage_k, lane)
              : multiply_stage<F, Grouped, D, C, false>(a, tile, data, here, group, stage_k, lane);
        } else {
          multiply_stage<F, Grouped, D, C, false>(a, tile, data, here, group, stage_k, lane);
        }
#pragma unroll
        for (int t = 0; t < Tiles::kTiles; ++t) here.row[t] += Fmt::kStageK / 8 * at.kChunk;
        if constexpr (Grouped || !Fmt::kInteger) __syncwarp();  // all have read the slot
        refill(ring.slot);
        ring.slot = ring.slot == kStages - 1 ? 0 : ring.slot + 1;
      }
    };
    if constexpr (C == 1) {
      Tiles tile;
      multiply_slice(tile, at.planes, w.stages, w.begin * kStepK);
      if (lap > 0) barrier_wait(at.empty + in_flight * 8, (lap - 1) & 1);
      if constexpr (Reduce::kRaw) {
        reduce.deliver_raw(tile, me);
      } else {
        float value[Reduce::kValues];
        reduce.read(tile, value);
        reduce.deliver(value, me);
      }
    } else {
      float value[Reduce::kValues], total[Reduce::kValues]{};
#pragma unroll 1
      for (int i = 0; i < w.own; ++i) {
        const int slice = w.first_slice + i, stage = at.stage_at(slice);
        Tiles tile;
        multiply_slice(tile, at.planes_of(slice), at.stage_at(slice + 1) - stage, stage * Fmt::kStageK);
        reduce.read(tile, value);
        if (p.delivers()) {
          if (i == 0 && lap > 0) wait_at(at.empty + in_flight * 8, lap - 1);
          reduce.deliver(value, Joined ? (at.part << p.block_log) + slice : slice);
        } else {
          reduce.add(total, value, slice);
        }
      }
      if (!p.delivers()) {
        reduce.store_values(total, rows, x_totals);
        continue;
      }
    }
    const uint32_t full = at.full + in_flight * 8;
    Joined ? cluster_barrier_arrive(cluster_address(full, owner)) : barrier_arrive(full);
    if (finishes) {
      const RowTerms terms = Fmt::kInteger && !Grouped ? at.bits.terms(at.form, lane % kStripRows) : RowTerms{};
      const float bias = at.bits.bias;
      if constexpr (C == 1) {
        at.bits = at.read_bits(strip + p.strip_warps() * w.strip_step);
        if (Reduce::kRaw && a.images == nullptr && x_total != x_total) {  // not needed before now
          x_total = row_total<kGroupWords<D>>(sums, scales);
        }
      }
      if constexpr (Reduce::kRaw) {
        if (a.images == nullptr) {  // and no other block has any of K
          reduce.finish_raw(terms, bias, x_total, [&] { wait_at(full, lap); });
          barrier_arrive(at.empty + in_flight * 8);
          continue;
        }
      }
      wait_at(full, lap);
      reduce.finish(terms, bias, x_totals, C == 1 ? 0 : me);
    }
    if constexpr (Joined) {  // only where a block will wait for it: it might have ended before
      if (owns && strip + p.depth * w.strip_step < a.strips) {
        const uint32_t empty = at.empty + in_flight * 8;
        cluster_barrier_arrive(cluster_address(empty, 0)), cluster_barrier_arrive(cluster_address(empty, 1));
      }
    } else if (finishes || C > 1) {
      barrier_arrive(at.empty + in_flight * 8);
    }
  }
}

// All blocks together ask L2 for a link's records: pieces so small that memory serves them last while weights stream.
__device__ __forceinline__ void ask_for_records(const DecodeArgs& a) {
  const int64_t bytes = static_cast<int64_t>(a.strips) * a.groups * a.record_bytes;
#pragma unroll 1
  for (int64_t at = (blockIdx.x * kDecodeThreads + threadIdx.x) * 32LL; at < bytes;
       at += gridDim.x * kDecodeThreads * 32LL) {
    prefetch_l2(a.records + at);
  }
}

// With one row of x at most 96 registers a thread, so that a block of attention fits beside; up to 4 rows, two blocks.
template <WeightFormat F, bool Grouped, int D, int C, bool Joined, Extras E>
__global__ void __launch_bounds__(C == 1 ? 640 : kDecodeThreads, C == 4 ? 2 : 1)
    linear_decode_kernel(const __grid_constant__ DecodeChain chain) {
  if constexpr (Joined && !kJoins) return;  // never launched
  using Fmt = Format<F>;
  using Ring = Stream<F, Grouped, C>;
  extern __shared__ __align__(16) uint8_t shared[];
  const DecodePlan& places = chain.links[0].plan;  // of rings and records
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // In a stage of a full format, odd rows swap their halves: the 8 lanes that read two rows together meet all banks.
  const int lane_at = Fmt::kInteger ? lane * 16 : lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16;
  RingAt ring{keep(shared_address(shared) + warp * Ring::kStages * Fmt::kStageBytes + (Fmt::kInteger ? lane_at : 0)),
              keep(shared_address(shared) + places.records_at + warp * Ring::kStages * places.record_slot)};
  Ring stream{chain, lane};
  const auto refill = [&](int slot) {
    stream.issue(ring.data + (Fmt::kInteger ? 0 : lane_at) + slot * Fmt::kStageBytes,
                 ring.records + slot * places.record_slot);
  };
  if constexpr (Grouped) ask_for_records(chain.links[0]);
  stream.next_link();
  constexpr bool kPaces{Fmt::kInteger || E != Extras::layer};  // else no registers for it
  const int at_once = !kPaces || !chain.paced ? Ring::kStages : chain.slowly ? 1 : Ring::kPaced;
#pragma unroll 1
  for (int i = 0; i < at_once; ++i) refill(i);  // weights: the step does not change them
  if constexpr (Fmt::kInteger && !Grouped) {
#pragma unroll 1
    for (int i = 0; i < chain.count; ++i) ask_for_records(chain.links[i]);
  }

  const int links = C == 1 ? chain.count : 1;
  static_assert(kDecodeThreads == kMaxLinks * kLinkBarriers);
  if (const int link = threadIdx.x / kLinkBarriers, i = threadIdx.x % kLinkBarriers; link < links) {
    const DecodePlan& p = chain.links[C == 1 ? link : 0].plan;
    if (i < 2 * p.depth * p.block_strips) {
      const bool full = i % (2 * p.depth) < p.depth;
      barrier_init(shared_address(shared + p.barriers_at) + threadIdx.x * 8,
                   kWarp * (full || C > 1 ? p.strip_warps() : 1) << (Joined && full));
    }
  }
#pragma unroll 1
  for (int i = at_once; i < Ring::kStages; ++i) {
    at_once == 1 ? copy_async_wait<0>() : copy_async_wait<Ring::kPaced - 1>();
    refill(i);
  }
  GridBarrier<> grid{reinterpret_cast<uint32_t*>(chain.barrier)};
  // Only where attention and feed-forward are side by side do links read nothing of each other.
  const auto waits_for = [](const DecodeArgs& next) { return E != Extras::layer || !next.apart; };
#pragma unroll 1
  for (int link = 0; link < links; ++link) {
    const DecodeArgs& a = chain.links[C == 1 ? link : 0];
    const DecodePlan& p = a.plan;
    LinkAt<F, Grouped, D, C, Joined, E> at(a, link, shared);
    if constexpr (C > 1) {
      if constexpr (Joined) barrier_init_fence(), cluster_arrive();
      dependency_wait();
      dependency_release();
      copy_image<Joined>(a, shared, p.block_slices() * C * 4);
      copy_async_wait<0>();
    } else {
      prepare_image<F, Grouped, D, E>(a, shared + p.image_at, shared + p.red_at, at.part, [&] {
        if (link == 0) {
          dependency_wait();
        } else if (waits_for(a)) {
          grid.wait();
        }
        if (link == links - 1) dependency_release();
      });
    }
    __syncthreads();
    if (Grouped && link + 1 < links) ask_for_records(chain.links[link + 1]);
    compute_link<F, Grouped, D, C, Joined, E>(at, ring, refill);
    if (Joined && chain.ends_together) cluster_arrive(), cluster_wait();
    if (link + 1 < links) waits_for(chain.links[link + 1]) ? grid.arrive() : __syncthreads();
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------

template <WeightFormat F, bool Grouped, int D, int C>
void launch_decode(DecodeChain chain, const Launch& launch, const std::string& what) {
  const auto text = [&] { return what; };
  const DecodeArgs& a = chain.links[0];
  if (a.images != nullptr) {
    with_extras<kFloatActivations<F, D>>(extras_of(a), [&]<Extras E>() {
      launch_kernel(launch, text, linear_planes_kernel<F, Grouped, D, C, E>, dim3(a.plan.m), dim3(kDecodeThreads),
                    stage_row_bytes<F, D>(a), a);
    });
    last_launch.starts_next = overlaps(launch);
  }
  chain.paced = last_launch.starts_next, chain.slowly = last_launch.slowly, chain.ends_together = for_racecheck();
  int grid = 0, shared_bytes = 0;
  Extras extras = Extras::none;
  for (int i = 0; i < chain.count; ++i) {
    grid = std::max(grid, chain.links[i].plan.grid);
    shared_bytes = std::max(shared_bytes, chain.links[i].plan.shared_bytes);
    extras = std::max(extras, extras_of(chain.links[i]));  // links go on with no other kind
  }
  if constexpr (C > 1) {
    if (a.plan.joined) {
      launch_cluster(launch, text, linear_decode_kernel<F, Grouped, D, C, true, Extras::none>, 2, dim3(grid),
                     dim3(kDecodeThreads), shared_bytes, chain);
      return;
    }
  }
  with_extras<kFloatActivations<F, D> || (C > 1)>(extras, [&]<Extras E>() {
    launch_kernel(launch, text, linear_decode_kernel<F, Grouped, D, C, false, E>, dim3(grid), dim3(kDecodeThreads),
                  shared_bytes, chain);
  });
}

template <WeightFormat F, bool Grouped, int D>
void launch_decode(const DecodeChain& chain, const Launch& launch, const std::string& what) {
  const int columns = decode_columns(chain.links[0].plan.m, kDigitColumns<F, D>);
  if (columns == 1) {
    launch_decode<F, Grouped, D, 1>(chain, launch, what);
  } else if (columns == 4) {
    if constexpr (kDigitColumns<F, D>) launch_decode<F, Grouped, D, 4>(chain, launch, what);
  } else if (columns == 8) {
    launch_decode<F, Grouped, D, 8>(chain, launch, what);
  } else {
    launch_decode<F, Grouped, D, 16>(chain, launch, what);
  }
}

// Over the planes of x and the presence of groups; one file per format instantiates it.
template <WeightFormat F>
void launch_decode_format(const DecodeChain& chain, int planes, const Launch& launch, const std::string& what) {
  with_planes<F>(planes, chain.links[0].group_shift > 0,
                 [&]<bool Grouped, int D>() { launch_decode<F, Grouped, D>(chain, launch, what); });
}

}  // namespace nibblelm::cuda
