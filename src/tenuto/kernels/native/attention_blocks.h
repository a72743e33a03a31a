// Parts of attention that all kernels share: query rows, their running results, and blocks of the KV cache.
#pragma once

#include <type_traits>

#include "kv_cache.h"

// The running result of a query row (online softmax). Scores are multiplied by log2(e), so that weights are powers of
// 2. `max_score` is an integer not below the highest score so far, or minus infinity. `sum` is that of the softmax
// weights 2^(score - max_score). The sum of the values times their weights, float [head_dim], follows in memory.
//
// Scores are computed for a chunk of blocks at a time, and the results of chunks are added in their order. A chunk's
// result depends on `max_score` only by a power of two, so results do not depend on which thread computes which chunks.
struct PartialAttention {
  float max_score, sum;
};
INLINE float *weighted_values(PartialAttention *p) { return (float *)(p + 8); } // 64 bytes on, for alignment
INLINE int64_t partial_bytes(int head_dim) { return 64 + 4 * (int64_t)head_dim; }

// The number of groups of 16 query rows that attend together: with tiles their results fit into the L2 cache, and
// otherwise into L1.
constexpr int MAX_GROUPS = TENUTO_AMX ? 12 : 3;
constexpr int CHUNK = 8;            // blocks whose scores are computed together
constexpr float MASKED = -INFINITY; // the score of a masked key

// Query rows that attend together: of neighbouring tokens, each with the query heads that share a KV head. Queries are
// already multiplied by the scale of the scores and by log2(e).
struct QueryRows {
  const PairElement *queries;          // [rows][head_dim]
  char *results;                       // a `PartialAttention` each
  int count, position, queries_per_kv; // `position`: of the first token
  int window, head_dim;                // `window`: tokens that a query attends to, or 0 for all
  bool many; // whether the step has enough rows of the sequence to unpack keys and values for tiles

  const PairElement *query(int r) const { return queries + (int64_t)r * head_dim; }
  PartialAttention *result(int r) const { return (PartialAttention *)(results + r * partial_bytes(head_dim)); }
  // A row attends to tokens `first` to `end` of its sequence.
  int end(int r) const { return position + r / queries_per_kv + 1; }
  int first(int r) const { return window ? std::max(0, end(r) - window) : 0; }
};

// Computes softmax weights from the scores of `count` blocks, `step` vectors apart, and updates the row's `max_score`
// and `sum`. Returns the factor by which the row's values so far have to be multiplied.
INLINE float softmax_chunk(const float *scores, PairElement *weights, int count, int step, PartialAttention &row) {
  f32x16 top = splat(MASKED);
  for (int i = 0; i < count; i++)
    top = max16(load<f32x16>(scores + i * step * LANES), top); // in this order, so that NaN is ignored
  const float max_score = highest16(top), base = std::max(row.max_score, whole_above(max_score));
  if (max_score <= MASKED) { // all are masked
    for (int i = 0; i < count; i++)
      store_elements(weights + i * step * LANES, f32x16{});
    return 1.0f;
  }
  f32x16 sum = {};
  for (int i = 0; i < count; i++) {
    const f32x16 weight = power_below(load<f32x16>(scores + i * step * LANES), base);
    sum += weight;
    store_elements(weights + i * step * LANES, weight);
  }
  const float correction = power_of_two(row.max_score - base);
  row = {base, row.sum * correction + sum16(sum)};
  return correction;
}

// Limits the scores of `count` blocks, `step` vectors apart, to `cap` by a hyperbolic tangent, except masked ones. It
// is never inlined, so that it costs nothing in models without a cap.
static __attribute__((noinline)) void soft_cap(float cap, float *scores, int count, int step) {
  for (int i = 0; i < count; i++, scores += step * LANES) {
    const f32x16 score = load<f32x16>(scores);
    store(scores, select(score <= MASKED, score, tanh16(score / cap) * cap));
  }
}

// Consecutive blocks of one sequence whose scores are computed together: their addresses, and the tokens in each.
struct Chunk {
  int count;
  bool whole; // all blocks have 16 slots
  bool pairs; // the values of blocks 0 and 1 are adjacent, those of 2 and 3, and so on; the last has a neighbour, too
  const char *at[CHUNK];
  int64_t to_values; // from a block in `at`
  int first[CHUNK], end[CHUNK];

  const char *values(int i) const { return at[i] + to_values; }

  // Returns the scores of the slots of block i, `MASKED` for tokens before `row_first` and from `row_end` on.
  f32x16 masked(f32x16 scores, int i, int row_first, int row_end) const {
    const int before = first[i], seen = std::min(row_end, end[i]) - before;
    if (seen < LANES)
      scores = select(lane_numbers() < seen, scores, splat(MASKED));
    return row_first > before ? select(lane_numbers() < row_first - before, splat(MASKED), scores) : scores;
  }
};

// The tokens that each of ROWS query rows, from `row` on, attends to.
template <int ROWS> struct RowEnds {
  int first[ROWS], end[ROWS];

  RowEnds(const QueryRows &rows, int row) {
    for (int r = 0; r < ROWS; r++)
      first[r] = rows.first(row + r), end[r] = rows.end(row + r);
  }
  // Masks the scores of row r with a chunk, [CHUNK * LANES], for tokens that it does not attend to. Returns false if
  // there are none.
  bool mask(const Chunk &chunk, int r, float *scores) const {
    if (chunk.whole && first[r] <= chunk.first[0] && end[r] >= chunk.end[chunk.count - 1])
      return false;
    for (int i = 0; i < chunk.count; i++)
      store(scores + i * LANES, chunk.masked(load<f32x16>(scores + i * LANES), i, first[r], end[r]));
    return true;
  }
  // Returns the highest of nonnegative numbers of a chunk's tokens, [CHUNK * LANES], for those that row r attends to.
  float highest(const Chunk &chunk, int r, const float *numbers) const {
    f32x16 most = {};
    for (int i = 0; i < chunk.count; i++)
      most = max16(most, chunk.masked(load<f32x16>(numbers + i * LANES), i, first[r], end[r]));
    return highest16(most);
  }
};

// Calls `use(at, size)` for consecutive parts of `count`, with the constant sizes MOST, MOST / 2, ..., 1: as many parts
// of each size as there is room for.
template <int MOST, class Use> INLINE void for_parts(int count, Use use, int at = 0) {
  for (; at + MOST <= count; at += MOST)
    use(at, std::integral_constant<int, MOST>());
  if constexpr (MOST > 1)
    if (at < count)
      for_parts<MOST / 2>(count, use, at);
}

// The blocks of one KV head of one sequence.
struct Blocks {
  const Cache &cache;
  int layer, head;
  const int32_t *pages;
  int count; // of the sequence

  // Returns the end of the chunk that has block `from`, or `to` if that comes first.
  static int chunk_end(int from, int to) { return std::min(to, from / CHUNK * CHUNK + CHUNK); }
  // Returns blocks `from` to `to`, or to the end of the chunk. Chunks always end at the same blocks, also when their
  // first blocks have left the window, and never separate pairs: otherwise sums would be rounded differently.
  Chunk chunk(int from, int to) const {
    Chunk chunk = {chunk_end(from, to) - from, cache.page_size % LANES == 0, cache.pairs()};
    chunk.to_values = cache.to_values();
    int page = from / cache.blocks, index = from % cache.blocks;
    for (int i = 0; i < chunk.count; i++) {
      chunk.at[i] = cache.block(layer, pages[page], head, index);
      chunk.first[i] = page * cache.page_size + index * LANES;
      chunk.end[i] = page * cache.page_size + std::min(cache.page_size, (index + 1) * LANES);
      if (++index == cache.blocks)
        page++, index = 0;
    }
    return chunk;
  }
  const char *at(int i) const { return cache.block(layer, pages[i / cache.blocks], head, i % cache.blocks); }
};

// Blocks `from` to `to` of a sequence, which query rows attend to.
struct Span {
  Blocks blocks;
  int from, to;
};
