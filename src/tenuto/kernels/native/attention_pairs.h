// Attention to keys and values in pairs of bfloat16, with vector instructions.
#pragma once

#include <type_traits>

#include "attention_blocks.h"
#if TENUTO_I8MM
#include "attention_neon.h"
#endif

// Computes the scores of ROWS query rows, [ROWS][CHUNK * LANES], with blocks `first` to `first + BLOCKS` of a chunk. A
// score is one sum over the dimensions in their order, so it does not depend on ROWS and BLOCKS. `ahead`, unless it is
// null, has blocks whose keys to prefetch.
template <class Kv, int ROWS, int BLOCKS>
INLINE void score_pairs(const Chunk &chunk, int first, const QueryRows &rows, int row, const Chunk *ahead,
                        float (*scores)[CHUNK * LANES]) {
  using Element = typename Kv::Element;
  constexpr int STEP = 8; // dimensions; heads have a multiple of 16
  const Element *keys[BLOCKS], *then[BLOCKS];
  for (int b = 0; b < BLOCKS; b++)
    keys[b] = (const Element *)chunk.at[first + b], then[b] = ahead ? (const Element *)ahead->at[first + b] : keys[b];
  const PairElement *queries[ROWS];
  for (int r = 0; r < ROWS; r++)
    queries[r] = rows.query(row + r);
  f32x16 sums[ROWS][BLOCKS] = {};
  for (int from = 0; from < rows.head_dim; from += STEP) {
#pragma GCC unroll 4
    for (int d = from; d < from + STEP; d += 2) {
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++) {
        if (ahead)
          __builtin_prefetch(then[b] + d * LANES, 0, 2);
      }
      Pairs pairs[BLOCKS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++)
        pairs[b] = Kv::pairs(keys[b] + d * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const Pair query = pair_at(queries[r] + d);
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++)
          sums[r][b] = dot_pair(sums[r][b], pairs[b], query);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
      store(&scores[r][(first + b) * LANES], sums[r][b]);
}

// Adds the values of a chunk, times softmax weights, to dimensions `d` to `d + 16 WIDTH` of the results of ROWS rows.
// `ahead`, unless it is null, has blocks whose values to prefetch.
template <class Kv, int ROWS, int WIDTH>
INLINE void add_value_pairs(const Chunk &chunk, const QueryRows &rows, int row, int d, const Chunk *ahead,
                            const PairElement (*weights)[CHUNK * LANES], const float *correction) {
  using Element = typename Kv::Element;
  f32x16 acc[ROWS][WIDTH] = {};
  for (int i = 0; i < chunk.count; i++) {
    const Element *values = (const Element *)chunk.values(i) + 2 * d;
    const int64_t to_then = ahead ? ahead->values(i) - chunk.values(i) : 0;
#pragma GCC unroll 4
    for (int slot = i * LANES; slot < (i + 1) * LANES; slot += 2, values += 2 * rows.head_dim) {
      if (ahead)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++)
          __builtin_prefetch((const char *)(values + v * 2 * LANES) + to_then, 0, 2);
      Pairs both[WIDTH];
#pragma GCC unroll 4
      for (int v = 0; v < WIDTH; v++)
        both[v] = Kv::pairs(values + v * 2 * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        const Pair weight = pair_at(&weights[r][slot]);
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++)
          acc[r][v] = dot_pair(acc[r][v], both[v], weight);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < WIDTH; v++) {
      float *to = weighted_values(rows.result(row + r)) + d + v * LANES;
      store(to, fused(load<f32x16>(to), splat(correction[r]), acc[r][v]));
    }
}

// Computes attention of ROWS query rows, from `row` on, to blocks `from` to `to`. Scores are limited to `cap`, unless
// that is 0. `Kv` unpacks pairs of dimensions of 16 keys, and pairs of values of 16 dimensions.
template <class Kv, int ROWS>
static __attribute__((noinline)) void attend_pairs(const Blocks &blocks, const QueryRows &rows, int row, int from,
                                                   int to, const Chunk *ahead, float cap) {
  alignas(64) float scores[ROWS][CHUNK * LANES];
  alignas(64) PairElement weights[ROWS][CHUNK * LANES];
  const RowEnds<ROWS> ends(rows, row);
  for (int start = from, count; start < to; start += count) {
    const Chunk chunk = blocks.chunk(start, to);
    count = chunk.count;
#if TENUTO_I8MM
    if constexpr (ROWS > 1)
      for (int i = 0; i < count; i++)
        score_by_two<ROWS>(chunk, i, rows, row, ahead, scores);
    else
#endif
      for_parts<blocks_at_once(ROWS)>(count, [&](int i, auto so_many) {
        score_pairs<Kv, ROWS, decltype(so_many)::value>(chunk, i, rows, row, ahead, scores);
      });
    float correction[ROWS];
    for (int r = 0; r < ROWS; r++) {
      ends.mask(chunk, r, scores[r]);
      if (cap != 0.0f)
        soft_cap(cap, scores[r], count, 1);
      correction[r] = softmax_chunk(scores[r], weights[r], count, 1, *rows.result(row + r));
    }
#if TENUTO_I8MM
    if constexpr (ROWS > 1)
      for (int d = 0; d < rows.head_dim; d += LANES)
        add_values_by_two<ROWS>(chunk, rows, row, d, ahead, weights, correction);
    else
#endif
      for_parts<values_at_once(ROWS)>(rows.head_dim / LANES, [&](int vector, auto so_many) {
        add_value_pairs<Kv, ROWS, decltype(so_many)::value>(chunk, rows, row, vector * LANES, ahead, weights,
                                                            correction);
      });
  }
}
