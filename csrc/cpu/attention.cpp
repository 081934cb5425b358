// Causal attention of new tokens against the cache by online softmax, for prefill and decode alike.
//
// Positions are taken in blocks of 64 counted from position 0 and in splits of 512: within a split a running
// (maximum, sum, output) triple is updated block by block, and the splits' triples are merged in order. So a query
// row's arithmetic depends on nothing but its own position: not on the rows beside it, nor on the threads, nor on
// where in the cache its pages are. A block is a page.
//
// Each block's keys are transposed into scratch memory (lanes are positions, no horizontal sums) and met by all
// query rows and heads that share them. Values are read as they lie (lanes are the head's width).
#include "cpu/kv_cache.h"
#include "cpu/team.h"

namespace nibblelm::NIBBLE_ISA {
namespace {

constexpr int64_t kBlock{kPage};   // positions
constexpr int64_t kSplit{512};     // positions
constexpr int64_t kQueries{16};    // tokens per work item
constexpr int64_t kMostHeads{64};  // query heads taken together; if more share a kv head, in turns
constexpr float kInfinity{__builtin_inff()};

// One query head of one token, with the running triple of the current split and of all splits before it.
struct Row {
  const float* q;
  float* out;          // (padded width): weighted sum of values, not yet divided by `sum`
  float* merged;       // the same over finished splits
  int64_t first, end;  // positions it may see
  const float* mask;   // added at each position, or null
  int64_t position;    // from which `slope` counts
  float slope;         // of ALiBi; 0: none
  float top, sum, merged_top, merged_sum;
  bool any;  // finished splits exist
};

// Of a score: times `scale`, then, with a softcap, softcap * tanh(score / softcap).
struct Scaling {
  float scale, softcap;
};

struct Scratch {
  float* keys;    // (width, 64): transposed
  float* values;  // (64, padded width)
  float* scores;  // (kBlockRows, 64)
};

NIBBLE_INLINE int64_t pad(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// What the cache holds of a row, which has a scale if it is int8.
NIBBLE_INLINE F32 load_cached(const float* p, const float*, int64_t) { return load(p); }
NIBBLE_INLINE F32 load_cached(const uint16_t* p, const float*, int64_t) { return load_bf16(p); }
NIBBLE_INLINE F32 load_cached(const int8_t* p, const float* scales, int64_t row) {
  return to_float(load_i8(p)) * set1(scales[row]);
}
NIBBLE_INLINE float cached(float x, const float*, int64_t) { return x; }
NIBBLE_INLINE float cached(int8_t x, const float* scales, int64_t row) { return static_cast<float>(x) * scales[row]; }
NIBBLE_INLINE float cached(uint16_t x, const float*, int64_t) {
  const uint32_t word = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}

template <typename T>
const float* scales_of(const float* scales, int64_t row) {
  return sizeof(T) == 1 ? scales + row : nullptr;
}

// ------------------------------------------------------------------------------------------- staging

#if defined(__AVX512F__)
// 16 x 16 in registers: pairs, quadruples, then 128-bit lanes twice.
NIBBLE_INLINE void transpose16(F32 (&r)[kLanes]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 even0 = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88);
    const __m512 odd0 = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xdd);
    const __m512 even1 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88);
    const __m512 odd1 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xdd);
    r[i].v = _mm512_shuffle_f32x4(even0, even1, 0x88);
    r[i + 8].v = _mm512_shuffle_f32x4(even0, even1, 0xdd);
    r[i + 4].v = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
    r[i + 12].v = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
  }
}
#else
NIBBLE_INLINE void transpose16(F32 (&r)[kLanes]) {
  float in[kLanes][kLanes], out[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(in[i], r[i]);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) out[j][i] = in[i][j];
  }
  for (int i = 0; i < kLanes; ++i) r[i] = load(out[i]);
}
#endif

// keys[d][p] = k[p][d] for p < count; other positions are left as they are, and masked later.
template <typename T>
void stage_keys(const T* k, const float* scales, int64_t count, int64_t width, float* keys) {
  int64_t p = 0;
  for (; p + kLanes <= count; p += kLanes) {
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) {
      F32 tile[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) tile[i] = load_cached(k + (p + i) * width + d, scales, p + i);
      transpose16(tile);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(keys + (d + i) * kBlock + p, tile[i]);
    }
    for (; d < width; ++d) {
      for (int i = 0; i < kLanes; ++i) keys[d * kBlock + p + i] = cached(k[(p + i) * width + d], scales, p + i);
    }
  }
  for (; p < count; ++p) {
    for (int64_t d = 0; d < width; ++d) keys[d * kBlock + p] = cached(k[p * width + d], scales, p);
  }
}

// Values as fp32 rows of whole vectors: where they lie if they are that already.
template <typename T>
const float* stage_values(const T* v, const float* scales, int64_t count, int64_t width, float* values) {
  const int64_t padded = pad(width);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (width == padded) return v;
  }
  for (int64_t p = 0; p < count; ++p) {
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(values + p * padded + d, load_cached(v + p * width + d, scales, p));
    for (; d < padded; ++d) values[p * padded + d] = d < width ? cached(v[p * width + d], scales, p) : 0.0f;
  }
  return values;
}

// ------------------------------------------------------------------------------------------- kernels

// scores[r][p] = q_r . k_p over ascending width, one chain per pair.
template <int kRows>
__attribute__((noinline)) void score_rows(Row* const* rows, const float* keys, int64_t width, float* scores) {
  constexpr int kVectors = kBlock / kLanes, kAtOnce = kBlockVectors < kVectors ? kBlockVectors : kVectors;
  const float* q[kRows];
  for (int r = 0; r < kRows; ++r) q[r] = rows[r]->q;
#pragma GCC unroll 1
  for (int first = 0; first < kVectors; first += kAtOnce) {
    F32 acc[kRows * kAtOnce];
    unroll<kRows * kAtOnce>([&](auto i) NIBBLE_LAMBDA { acc[i] = set1(0.0f); });
    for (int64_t d = 0; d < width; ++d) {
      F32 k[kAtOnce];
      unroll<kAtOnce>([&](auto c) NIBBLE_LAMBDA { k[c] = load(keys + d * kBlock + (first + c) * kLanes); });
      unroll<kRows>([&](auto r) NIBBLE_LAMBDA {
        const F32 x = set1(q[r][d]);
        unroll<kAtOnce>([&](auto c) NIBBLE_LAMBDA { acc[r * kAtOnce + c] = fma(x, k[c], acc[r * kAtOnce + c]); });
      });
    }
    unroll<kRows * kAtOnce>(
        [&](auto i) NIBBLE_LAMBDA { store(scores + i / kAtOnce * kBlock + (first + i % kAtOnce) * kLanes, acc[i]); });
  }
}

// scores -> weights e^(score - maximum) of positions [from, to) of the block that starts at `start`; updates maximum
// and sum and rescales what was summed before. Every position outside, or masked with -infinity, gets weight 0.
NIBBLE_INLINE void weigh(Row& row, float* scores, int64_t start, int64_t from, int64_t to, Scaling scaling,
                         int64_t padded) {
  constexpr int kVectors = kBlock / kLanes;
  F32 s[kVectors];
  F32 top = set1(row.top);
  for (int c = 0; c < kVectors; ++c) {
    float lanes[kLanes];
    s[c] = load(scores + c * kLanes) * set1(scaling.scale);
    if (scaling.softcap > 0.0f) s[c] = set1(scaling.softcap) * tanh(s[c] / set1(scaling.softcap));
    if (row.slope != 0.0f) {
      for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(start + c * kLanes + i - row.position);
      s[c] = fma(set1(row.slope), load(lanes), s[c]);
    }
    if (row.mask != nullptr) {
      for (int i = 0; i < kLanes; ++i) {
        const int64_t p = c * kLanes + i;
        lanes[i] = p >= from && p < to ? row.mask[start + p] : 0.0f;
      }
      s[c] = s[c] + load(lanes);
    }
    if (from > c * kLanes || to < (c + 1) * kLanes) {
      store(lanes, s[c]);
      for (int i = 0; i < kLanes; ++i) {
        if (c * kLanes + i < from || c * kLanes + i >= to) lanes[i] = -kInfinity;
      }
      s[c] = load(lanes);
    }
    top = max(s[c], top);
  }
  const float highest = max_lanes(top);
  if (highest == -kInfinity) {  // all masked: no maximum to subtract
    for (int c = 0; c < kVectors; ++c) store(scores + c * kLanes, set1(0.0f));
    return;
  }
  if (highest != row.top) {
    // From -infinity (the first block) the factor is 0 and there is nothing to rescale: out is still zero.
    const F32 factor = exp_nonpositive(set1(row.top - highest));
    float lanes[kLanes];
    store(lanes, factor);
    row.sum *= lanes[0];
    for (int64_t d = 0; d < padded; d += kLanes) store(row.out + d, load(row.out + d) * factor);
    row.top = highest;
  }
  F32 sum = set1(0.0f);
  for (int c = 0; c < kVectors; ++c) {
    const F32 weight = exp_nonpositive(s[c] - set1(highest));
    store(scores + c * kLanes, weight);
    sum = sum + weight;
  }
  row.sum += sum_lanes(sum);
}

// kVectors vectors of out_r += sum over p in [from, to) of scores[r][p] * v_p, ascending.
template <int kRows, int kVectors>
__attribute__((noinline)) void add_columns(Row* const* rows, const float* scores, const float* values, int64_t from,
                                           int64_t to, int64_t padded, int64_t first) {
  F32 acc[kRows * kVectors];
  unroll<kRows * kVectors>(
      [&](auto i) NIBBLE_LAMBDA { acc[i] = load(rows[i / kVectors]->out + first + i % kVectors * kLanes); });
  for (int64_t p = from; p < to; ++p) {
    F32 v[kVectors];
    unroll<kVectors>([&](auto c) NIBBLE_LAMBDA { v[c] = load(values + p * padded + first + c * kLanes); });
    unroll<kRows>([&](auto r) NIBBLE_LAMBDA {
      const F32 weight = set1(scores[r * kBlock + p]);
      unroll<kVectors>([&](auto c) NIBBLE_LAMBDA { acc[r * kVectors + c] = fma(weight, v[c], acc[r * kVectors + c]); });
    });
  }
  unroll<kRows * kVectors>(
      [&](auto i) NIBBLE_LAMBDA { store(rows[i / kVectors]->out + first + i % kVectors * kLanes, acc[i]); });
}

template <int kRows>
void add_values(Row* const* rows, const float* scores, const float* values, int64_t from, int64_t to, int64_t padded) {
  if (from >= to) return;
  int64_t d = 0;
  for (; d + kBlockVectors * kLanes <= padded; d += kBlockVectors * kLanes) {
    add_columns<kRows, kBlockVectors>(rows, scores, values, from, to, padded, d);
  }
  for (; d < padded; d += kLanes) add_columns<kRows, 1>(rows, scores, values, from, to, padded, d);
}

// kRows rows that all see something of the block that starts at position `start`.
template <int kRows>
void attend_block(Row* const* rows, const Scratch& scratch, const float* values, int64_t start, int64_t width,
                  Scaling scaling) {
  const int64_t padded = pad(width);
  score_rows<kRows>(rows, scratch.keys, width, scratch.scores);
  int64_t from[kRows], to[kRows], common_from = 0, common_to = kBlock;
  for (int r = 0; r < kRows; ++r) {
    from[r] = max(rows[r]->first - start, int64_t{0});
    to[r] = min(rows[r]->end - start, kBlock);
    common_from = max(common_from, from[r]);
    common_to = min(common_to, to[r]);
    weigh(*rows[r], scratch.scores + r * kBlock, start, from[r], to[r], scaling, padded);
  }
  // Positions that not all rows see are added row by row: what lies beyond may be anything, NaN included.
  common_to = max(common_from, common_to);
  for (int r = 0; r < kRows; ++r) {
    add_values<1>(rows + r, scratch.scores + r * kBlock, values, from[r], min(to[r], common_from), padded);
  }
  add_values<kRows>(rows, scratch.scores, values, common_from, common_to, padded);
  for (int r = 0; r < kRows; ++r) {
    add_values<1>(rows + r, scratch.scores + r * kBlock, values, max(from[r], common_to), to[r], padded);
  }
}

template <int kRows>
void attend_rows(Row* const* rows, int64_t count, const Scratch& scratch, const float* values, int64_t start,
                 int64_t width, Scaling scaling) {
  for (; count >= kRows; count -= kRows, rows += kRows) {
    attend_block<kRows>(rows, scratch, values, start, width, scaling);
  }
  if constexpr (kRows > 1) {
    if (count > 0) attend_rows<kRows - 1>(rows, count, scratch, values, start, width, scaling);
  }
}

// (top, sum, out) of the earlier splits with those of the next one.
NIBBLE_INLINE void merge_split(Row& row, int64_t padded) {
  if (row.sum == 0.0f) return;  // nothing seen in this split
  if (!row.any) {
    row.merged_top = row.top;
    row.merged_sum = row.sum;
    for (int64_t d = 0; d < padded; d += kLanes) store(row.merged + d, load(row.out + d));
    row.any = true;
    return;
  }
  const float top = row.merged_top > row.top ? row.merged_top : row.top;
  float lanes[kLanes];
  const F32 before = exp_nonpositive(set1(row.merged_top - top)), now = exp_nonpositive(set1(row.top - top));
  store(lanes, before);
  row.merged_sum *= lanes[0];
  store(lanes, now);
  row.merged_sum = __builtin_fmaf(row.sum, lanes[0], row.merged_sum);
  row.merged_top = top;
  for (int64_t d = 0; d < padded; d += kLanes) {
    store(row.merged + d, fma(load(row.out + d), now, load(row.merged + d) * before));
  }
}

NIBBLE_INLINE void finish(const Row& row, int64_t width, float* out) {
  if (!row.any) {
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(width));
    return;
  }
  const F32 inverse = set1(1.0f / row.merged_sum);
  for (int64_t d = 0; d < width; d += kLanes) {
    const int n = static_cast<int>(min(kLanes, width - d));
    store_first(out + d, load(row.merged + d) * inverse, n);
  }
}

// ------------------------------------------------------------------------------------------- launcher

// The rows of tokens [token, token + count), which share a slot, over splits [from, to). Results stay in `rows`.
template <typename T>
void attend(const AttentionArgs& a, int64_t token, int64_t kv_head, int64_t from, int64_t to, Row* rows, int64_t count,
            const Scratch& scratch) {
  const KvCache& c = a.cache;
  const int64_t padded = pad(c.width);
  int64_t first = INT64_MAX, end = 0;
  for (int64_t r = 0; r < count; ++r) {
    first = min(first, rows[r].first);
    end = max(end, rows[r].end);
  }
  for (int64_t split = max(from, first / kSplit); split < to && split * kSplit < end; ++split) {
    for (int64_t r = 0; r < count; ++r) {
      rows[r].top = -kInfinity;
      rows[r].sum = 0.0f;
      std::memset(rows[r].out, 0, sizeof(float) * static_cast<size_t>(padded));
    }
    const int64_t split_end = min(end, (split + 1) * kSplit);
    for (int64_t p = max(split * kSplit, first / kBlock * kBlock); p < split_end; p += kBlock) {
      Row* seeing[kQueries * kMostHeads];
      int64_t n = 0;
      for (int64_t r = 0; r < count; ++r) {
        if (rows[r].first < p + kBlock && rows[r].end > p) seeing[n++] = rows + r;
      }
      if (n == 0) continue;
      const int64_t present = min(kBlock, end - p);
      const int64_t at = cache_row(c, a.slots[token], kv_head, p);
      stage_keys(static_cast<const T*>(c.k) + at * c.width, scales_of<T>(c.k_scales, at), present, c.width,
                 scratch.keys);
      const float* staged = stage_values(static_cast<const T*>(c.v) + at * c.width, scales_of<T>(c.v_scales, at),
                                         present, c.width, scratch.values);
      attend_rows<kBlockRows>(seeing, n, scratch, staged, p, c.width, {a.scale, a.softcap});
    }
    for (int64_t r = 0; r < count; ++r) merge_split(rows[r], padded);
  }
}

struct Seen {
  int64_t first, end;  // positions; none: both 0
};

Seen seen_by(const AttentionArgs& a, int64_t token) {
  const int64_t after = a.positions[token] + 1;
  int64_t first = a.window > 0 ? max(after - a.window, int64_t{0}) : 0, end = after;
  if (a.prefix != nullptr) end = max(end, int64_t{a.prefix[token]});
  if (a.mask != nullptr) end = min(end, a.mask_columns);
  if (a.starts != nullptr) first = max(first, int64_t{a.starts[a.slots[token]]});
  return first < end ? Seen{first, end} : Seen{0, 0};
}

Row make_row(const AttentionArgs& a, int64_t token, int64_t head, float* memory, int64_t padded) {
  Row row{};
  row.q = a.q + token * a.q_stride + head * a.cache.width;
  row.out = memory;
  row.merged = memory + padded;
  const Seen seen = seen_by(a, token);
  row.first = seen.first;
  row.end = seen.end;
  row.position = a.positions[token];
  row.slope = a.slopes == nullptr ? 0.0f : a.slopes[head];
  row.mask = a.mask == nullptr ? nullptr : a.mask + token * a.mask_stride;
  return row;
}

struct Plan {
  int64_t shared;        // query heads per kv head
  int64_t token_blocks;  // of kQueries
  int64_t splits;        // along positions, in work items of their own; 1: all in one item
};

Plan plan_for(const AttentionArgs& a, int64_t last_position) {
  Plan plan{a.heads / a.cache.heads, (a.m + kQueries - 1) / kQueries, 1};
  const int64_t splits = last_position / kSplit + 1;
  if (plan.token_blocks * a.cache.heads < 4 * threads() && a.m * splits <= 4096) plan.splits = splits;
  return plan;
}

template <typename T>
void run(const AttentionArgs& a, const Plan& plan) {
  const int64_t width = a.cache.width, padded = pad(width);
  const int64_t rows_total = a.m * a.heads * plan.splits;
  // Triples of every row and split; one item per (token block, kv head, split) fills its own.
  const bool parts = plan.splits > 1;
  auto* saved = parts ? static_cast<Row*>(shared_scratch(static_cast<size_t>(rows_total) *
                                                         (sizeof(Row) + 2 * sizeof(float) * padded)))
                      : nullptr;
  auto* saved_memory = reinterpret_cast<float*>(saved + (parts ? rows_total : 0));
  parallel_for(plan.token_blocks * a.cache.heads * plan.splits, 1, [&](int64_t begin, int64_t end) {
    const int64_t most_rows = kQueries * (plan.shared < kMostHeads ? plan.shared : kMostHeads);
    auto* memory = static_cast<float*>(
        local_scratch(sizeof(float) * static_cast<size_t>(kBlock * width + kBlock * padded + kBlockRows * kBlock +
                                                          most_rows * 2 * padded)));
    const Scratch scratch{memory, memory + kBlock * width, memory + kBlock * (width + padded)};
    float* row_memory = scratch.scores + kBlockRows * kBlock;
    Row local[kQueries * kMostHeads];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t split = item % plan.splits, kv_head = item / plan.splits % a.cache.heads;
      const int64_t block = plan.token_blocks - 1 - item / plan.splits / a.cache.heads;  // the longest first
      const int64_t block_end = min(a.m, (block + 1) * kQueries);
      for (int64_t token = block * kQueries; token < block_end;) {
        int64_t same = token + 1;
        while (same < block_end && a.slots[same] == a.slots[token]) ++same;
        for (int64_t first_head = 0; first_head < plan.shared; first_head += kMostHeads) {
          const int64_t heads = min(kMostHeads, plan.shared - first_head), count = (same - token) * heads;
          for (int64_t r = 0; r < count; ++r) {
            local[r] = make_row(a, token + r / heads, kv_head * plan.shared + first_head + r % heads,
                                row_memory + r * 2 * padded, padded);
          }
          attend<T>(a, token, kv_head, parts ? split : 0, parts ? split + 1 : INT64_MAX, local, count, scratch);
          for (int64_t r = 0; r < count; ++r) {
            const int64_t head = kv_head * plan.shared + first_head + r % heads;
            const int64_t row = (token + r / heads) * a.heads + head;
            if (!parts) {
              finish(local[r], width, a.out + row * width);
              continue;
            }
            const int64_t at = row * plan.splits + split;
            saved[at] = local[r];
            std::memcpy(saved_memory + at * padded, local[r].merged, sizeof(float) * static_cast<size_t>(padded));
          }
        }
        token = same;
      }
    }
  });
  if (!parts) return;
  // Fold the splits of each row in order, exactly as one item would have done.
  float* merged = saved_memory + rows_total * padded;
  parallel_for(a.m * a.heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Row total{};  // of which only the triples count
      total.merged = merged + row * padded;
      for (int64_t split = 0; split < plan.splits; ++split) {
        const Row& part = saved[row * plan.splits + split];
        if (!part.any) continue;
        total.top = part.merged_top;
        total.sum = part.merged_sum;
        total.out = saved_memory + (row * plan.splits + split) * padded;
        merge_split(total, padded);
      }
      finish(total, width, a.out + row * width);
    }
  });
}

}  // namespace

void attention(const AttentionArgs& args) {
  int64_t last = 0;
  for (int64_t m = 0; m < args.m; ++m) {
    require_rows(args.cache, args.slots[m], args.positions[m], args.positions[m]);
    const Seen seen = seen_by(args, m);
    if (seen.end > 0) require_rows(args.cache, args.slots[m], seen.first, seen.end - 1);
    last = max(last, seen.end - 1);
  }
  const Plan plan = plan_for(args, last);
  switch (args.cache.bytes) {
    case 1:
      return run<int8_t>(args, plan);
    case 2:
      return run<uint16_t>(args, plan);
    default:
      return run<float>(args, plan);
  }
}

}  // namespace nibblelm::NIBBLE_ISA
