// Where rows are in the paged cache: the only place of the CUDA kernels that knows.
#pragma once

#include "common.cuh"
#include "paged_cache.h"

namespace nibblelm::cuda {

// The slot's table entry for a position of it.
__device__ __forceinline__ const int32_t* table_entry(const PagedCache& c, int slot, int position) {
  return c.tables + static_cast<int64_t>(slot) * c.table_stride + static_cast<unsigned>(position) / kPage;
}

// The page to read a position from. kEarly: before dependency_wait(), around L1, which would keep what lies beside the
// entry. Then the position may be one that the row has left behind with its page: for an entry without a page this
// gives another, so that nothing outside the cache is read.
template <bool kEarly = false>
__device__ __forceinline__ int page_of(const PagedCache& c, int slot, int position) {
  const int32_t* const entry = table_entry(c, slot, position);
  return static_cast<int>(min(static_cast<unsigned>(kEarly ? __ldcg(entry) : *entry), c.pages - 1u));
}

// The row of k and v that a KV head has for `position`, if the position is on `page`. Further rows of the page follow.
__device__ __forceinline__ int64_t scale_row(const PagedCache& c, int page, int kv_head, int position) {
  return static_cast<int64_t>(page * c.kv_heads + kv_head) * kPage + static_cast<unsigned>(position) % kPage;
}

// The element at which that row starts. D is head_dim where it is known.
template <int D = 0>
__device__ __forceinline__ int64_t cache_row(const PagedCache& c, int page, int kv_head, int position) {
  const int width = D == 0 ? c.head_dim : D;
  return static_cast<int64_t>(page * c.kv_heads + kv_head) * (kPage * width) +
         static_cast<unsigned>(position) % kPage * width;
}

// The row of k and v that is written, or -1 where the slot, the position or its page is outside the cache.
__device__ __forceinline__ int64_t written_row(const PagedCache& c, int slot, int position, int kv_head) {
  if (slot < 0 || slot >= c.slot_count || position < 0 || position >= c.capacity()) return -1;
  const int page = *table_entry(c, slot, position);
  return page < 0 || page >= c.pages ? -1 : scale_row(c, page, kv_head, position);
}

// ---- int8: as the CPU's kv_append, to the bit ----

// How a row of values becomes codes.
struct Int8Scale {
  float scale;    // times a code: the value
  float inverse;  // times a value: the code

  // `top`: bits of the largest magnitude, which are ordered as magnitudes are, with NaN above all. Where it is not
  // finite the codes are 0 and the scale is not finite.
  __device__ __forceinline__ explicit Int8Scale(unsigned top) {
    const float x = __uint_as_float(max(top, 0x0d800000u));  // 2^-100: below, the inverse would overflow
    scale = __fdiv_rn(x, 127.0f), inverse = __fdiv_rn(127.0f, x);
  }
  __device__ __forceinline__ int8_t code(float x) const {
    return static_cast<int8_t>(__float2int_rn(__fmul_rn(x, inverse)));
  }
};

__device__ __forceinline__ unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// By a warp: row `row` of k or v becomes value(d), converted to the cache's dtype.
template <class Value>
__device__ __forceinline__ void store_row(const PagedCache& c, bool is_v, int64_t row, Value value) {
  void* const pool = is_v ? c.v : c.k;
  const int64_t target = row * c.head_dim;
  const int lane = threadIdx.x % kWarp;
  if (c.dtype != DType::i8) {
    for (int d = lane; d < c.head_dim; d += kWarp) store_from_float(pool, target + d, c.dtype, value(d));
    return;
  }
  unsigned top{0};
  for (int d = lane; d < c.head_dim; d += kWarp) top = max(top, magnitude_bits(value(d)));
  const Int8Scale scale(__reduce_max_sync(kAllLanes, top));
  for (int d = lane; d < c.head_dim; d += kWarp) static_cast<int8_t*>(pool)[target + d] = scale.code(value(d));
  if (lane == 0) (is_v ? c.v_scales : c.k_scales)[row] = scale.scale;
}

}  // namespace nibblelm::cuda
