// Attention to keys and values in pairs of bfloat16, with vector instructions.
#pragma once

#include <type_traits>

#include "attention_blocks.h"

// Computes attention of ROWS query rows, from `row` on, to blocks `from` to `to`. Scores are limited to `cap`, unless
// that is 0. `Kv` unpacks pairs of dimensions of 16 keys, and pairs of values of 16 dimensions.
template <class Kv, int ROWS>
static __attribute__((noinline)) void attend_pairs(const Blocks &blocks, const QueryRows &rows, int row, int from,
                                                   int to, float cap) {
  using Element = typename Kv::Element;
  const int dim = blocks.cache.head_dim;
  alignas(64) float scores[ROWS][CHUNK * LANES];
  alignas(64) PairElement weights[ROWS][CHUNK * LANES];
  for (int start = from, count; start < to; start += count) {
    const Chunk chunk = blocks.chunk(start, to);
    count = chunk.count;
    for (int i = 0; i < count; i++) {
      const Element *block = (const Element *)chunk.at[i], *values = (const Element *)chunk.values(i);
      const Element *next = (const Element *)blocks.at(std::min(start + i + PREFETCH_BLOCKS, blocks.count - 1));
      f32x16 even[ROWS] = {}, odd[ROWS] = {};
      for (int j = 0; j < dim / 2; j += 2) {
        for (int k = j * 2 * LANES; k < (j + 2) * 2 * LANES; k += 2 * LANES) {
          __builtin_prefetch(next + k);
          __builtin_prefetch(values + k);
        }
        const Pairs a = Kv::pairs(block + j * 2 * LANES), b = Kv::pairs(block + (j + 1) * 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          even[r] = dot_pair(even[r], a, pair_at(rows.query(row + r) + 2 * j));
          odd[r] = dot_pair(odd[r], b, pair_at(rows.query(row + r) + 2 * j + 2));
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        store(&scores[r][i * LANES], chunk.masked(even[r] + odd[r], i, rows.first(row + r), rows.end(row + r)));
    }
    for (int r = 0; r < ROWS && cap != 0.0f; r++)
      soft_cap(cap, scores[r], count, 1);
    float correction[ROWS];
    for (int r = 0; r < ROWS; r++)
      correction[r] = softmax_chunk(scores[r], weights[r], count, 1, *rows.result(row + r));
    for (int d = 0; d < dim; d += VALUE_VECTORS * LANES) {
      const int vectors = std::min(VALUE_VECTORS, (dim - d) / LANES);
      auto add_values = [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        f32x16 acc[ROWS][WIDTH] = {};
        for (int i = 0; i < count; i++) {
          const Element *values = (const Element *)chunk.values(i) + 2 * d;
          for (int pair = 0; pair < LANES / 2; pair++, values += 2 * dim) {
            Pairs both[WIDTH];
            for (int v = 0; v < WIDTH; v++)
              both[v] = Kv::pairs(values + v * 2 * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const Pair weight = pair_at(&weights[r][i * LANES + 2 * pair]);
              for (int v = 0; v < WIDTH; v++)
                acc[r][v] = dot_pair(acc[r][v], both[v], weight);
            }
          }
        }
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < WIDTH; v++) {
            float *to_row = weighted_values(rows.result(row + r)) + d + v * LANES;
            store(to_row, load<f32x16>(to_row) * correction[r] + acc[r][v]);
          }
      };
      if (vectors == 4 && VALUE_VECTORS >= 4)
        add_values(std::integral_constant<int, 4>());
      else if (vectors == 2)
        add_values(std::integral_constant<int, 2>());
      else
        for (int left = vectors; left > 0; left--, d += LANES)
          add_values(std::integral_constant<int, 1>());
    }
  }
}
