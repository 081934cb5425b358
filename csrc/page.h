// The KV cache is pages of this many positions, on both devices and in Python (`_cpu.PAGE`).
#pragma once

namespace nibblelm {

// A power of two that the blocks of keys of every kernel divide: none that starts at a multiple of its own size
// straddles two pages.
constexpr int kPage{64};

}  // namespace nibblelm
