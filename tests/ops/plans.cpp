// Holds the plans of csrc/cuda/tiles.h against what their kernels assume, over shapes, formats, rows and cards; the
// first plan that breaks one is printed. Compiled by test_plans.py, without a card.
#include <cstdio>
#include <cstdlib>

#include "cuda/tiles.h"

using namespace nibblelm::cuda;

namespace {

struct Card {
  int architecture, multiprocessors, shared;  // the most shared memory of a block
};
constexpr Card kCards[]{{80, 108, 163}, {86, 84, 99}, {89, 142, 99}, {90, 132, 227}, {100, 148, 227}, {120, 170, 99}};

LinearWeight weight(WeightFormat format, int n, int k, int group, DType scale, bool zero, bool minimum) {
  return {nullptr, nullptr, format, n, k, (k + 31) / 32 * 32, group, scale, zero, minimum};
}

void require(bool holds, const char* what, const Card& card, const LinearWeight& w, int planes, int m) {
  if (holds) return;
  std::printf("%s: sm_%d, %s, n %d, k %d, group %d, planes %d, m %d\n", what, card.architecture, name(w.format), w.n,
              w.k, w.group_size, planes, m);
  std::exit(1);
}

int check_large(const Card& card, const LinearWeight& w, int planes, int m) {
  const auto holds = [&](bool it, const char* what) { require(it, what, card, w, planes, m); };
  const LargePlan p = plan_large(w, planes, m, card.multiprocessors, card.architecture, card.architecture == 90);
  if (p.rows == 0) return 0;
  const bool grouped = w.integer() && w.group_size != 0;
  holds(large_compiled(p.format, planes, grouped, p.rows), "a tile that is not compiled");
  holds(p.shared_bytes <= card.shared * 1024, "shared memory");
  holds(p.threads <= 1024, "threads");
  holds(p.row_tiles * p.strips >= w.strips() && (p.row_tiles - 1) * p.strips < w.strips(), "strips");
  holds(p.token_tiles * p.rows >= m && (p.token_tiles - 1) * p.rows < m, "rows of x");
  holds(p.blocks >= 1 && p.blocks <= card.multiprocessors, "blocks");
  holds(p.parts() <= p.slices(), "parts");
  holds(p.shared == 0 || p.parts() == 1, "tiles shared out whose K is shared, too");
  // Whole rounds, and one more of which every block has a part.
  holds(p.work == (p.tiles() - p.shared) * p.parts(), "work");
  holds(p.shared == 0 || p.work == p.rounds * p.blocks, "rounds before tiles that are shared out");
  for (int tile = 0; tile < p.tiles() && p.token_tiles > 1; ++tile) {
    holds(static_cast<int>(static_cast<uint64_t>(tile) * p.token_magic >> 32) == tile / p.token_tiles, "division");
  }
  const int padded = (p.tile_bytes + 1023) / 1024 * 1024;
  const LargeLayout layout =
      large_layout(p.format, planes, grouped, p.rows, large_warps(p.format, planes, grouped, p.rows, p.parts() == 1),
                   p.parts() == 1, card.architecture);
  holds(layout.ring >= 2 && layout.tile_bytes >= padded && layout.tile_bytes % 1024 == 0, "a tile of x in the ring");
  holds(layout.weights_at % 512 == 0 && layout.records_at % 8 == 0 && layout.barriers_at % 8 == 0, "alignment");
  return 1;
}

void check_decode(const Card& card, const LinearWeight& w, int planes, int m) {
  const auto holds = [&](bool it, const char* what) { require(it, what, card, w, planes, m); };
  const DecodePlan p =
      plan_decode(w, planes, m, w.k % 8 == 0, card.multiprocessors, card.shared * 1024, card.architecture);
  holds(p.grid > 0 || w.k > kMaxNormColumns, "no plan");
  if (p.grid == 0) return;  // the launcher says that K is too long for the card
  holds(p.m >= 1 && p.m <= m, "rows of x");
  holds(p.shared_bytes <= card.shared * 1024, "shared memory");
  holds(p.slices_log == decode_slices_log(w.steps()), "slices that do not depend on K alone");
  holds(p.block_log + p.parts_log == p.slices_log && p.own_log <= p.block_log, "slices");
  holds(p.grid % p.parts() == 0 && p.block_strips * p.strip_warps() == kDecodeWarps, "warps");
  holds(!p.joined || (joins_blocks(card.architecture) && p.parts() == 2), "clusters");
  holds(p.image_at % 16 == 0 && p.image_bytes % 16 == 0 && p.records_at % 16 == 0, "alignment");
}

}  // namespace

int main() {
  const int shapes[][2]{{28672, 4096}, {4096, 14336},  {6144, 4096}, {4096, 4096}, {57344, 8192}, {8192, 28672},
                        {3072, 2048},  {16384, 2048},  {331, 172},   {63, 4099},   {1, 64},       {35, 331},
                        {16, 65536},   {128256, 4096}, {9216, 3072}, {1040, 1152}, {27640, 700}};
  const int rows[]{1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 31, 32, 33, 64, 65, 96, 128, 129, 256, 300, 512, 1023, 2048};
  int plans = 0;
  for (const Card& card : kCards) {
    for (const auto& [n, k] : shapes) {
      for (const WeightFormat format :
           {WeightFormat::int4, WeightFormat::int8, WeightFormat::f16, WeightFormat::bf16}) {
        for (const int group : {0, 32, 64, 128}) {
          for (int form = 0; form < 4; ++form) {  // symmetric, zero-points, minima, scales in fp32
            const bool integer = is_integer(format);
            if (!integer && (group > 0 || form > 0)) continue;
            const LinearWeight w =
                weight(format, n, k, group, form == 3 ? DType::f32 : DType::bf16, form == 1, form == 2);
            for (const int planes : {1, 2, 3}) {
              if (!integer && planes != activation_planes(format, DType::bf16)) continue;
              for (const int m : rows) {
                if (m <= kMaxDecodeRows) check_decode(card, w, planes, m);
                plans += check_large(card, w, planes, m);
              }
            }
          }
        }
      }
    }
  }
  std::printf("%d plans\n", plans);
}
