// Attention with instructions of 64-bit Arm that multiply two rows and two lanes at once.
#pragma once

#include "attention_blocks.h"

// Computes the scores of ROWS query rows with block `number` of a chunk. They are those of `score_pairs`, bit by bit.
template <int ROWS>
INLINE void score_by_two(const Chunk &chunk, int number, const QueryRows &rows, int row, const Chunk *ahead,
                         float (*scores)[CHUNK * LANES]) {
  const uint16_t *keys = (const uint16_t *)chunk.at[number], *queries[ROWS];
  const uint16_t *const then = ahead ? (const uint16_t *)ahead->at[number] : nullptr;
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    queries[r] = rows.query(row + r);
  PairedSums<ROWS> sums;
  for (int d = 0; d < rows.head_dim; d += 4) {
    if (then)
      __builtin_prefetch(then + d * LANES, 0, 2), __builtin_prefetch(then + (d + 2) * LANES, 0, 2);
    sums.add(keys + d * LANES, keys + (d + 2) * LANES, queries, d);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    store(&scores[r][number * LANES], sums.row(r));
}

// Adds the values of a chunk, times softmax weights, to dimensions d to d + 15 of the results of ROWS rows. The results
// are those of `add_value_pairs`, bit by bit.
template <int ROWS>
INLINE void add_values_by_two(const Chunk &chunk, const QueryRows &rows, int row, int d, const Chunk *ahead,
                              const uint16_t (*weights)[CHUNK * LANES], const float *correction) {
  const uint16_t *of[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
    of[r] = weights[r];
  PairedSums<ROWS> sums;
  for (int i = 0; i < chunk.count; i++) {
    const uint16_t *values = (const uint16_t *)chunk.values(i) + 2 * d;
    const int64_t to_then = ahead ? ahead->values(i) - chunk.values(i) : 0;
    for (int slot = i * LANES; slot < (i + 1) * LANES; slot += 4, values += 4 * rows.head_dim) {
      const uint16_t *const next = values + 2 * rows.head_dim;
      if (ahead)
        __builtin_prefetch((const char *)values + to_then, 0, 2),
            __builtin_prefetch((const char *)next + to_then, 0, 2);
      sums.add(values, next, of, slot);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    float *const to = weighted_values(rows.result(row + r)) + d;
    store(to, fused(load<f32x16>(to), splat(correction[r]), sums.row(r)));
  }
}

// As in `attention_quants.h`, with an instruction that takes eight bytes of two lanes, and coarse quants as one row and
// fine ones as the other: for lanes 2 k and 2 k + 1, {lane, coarse or fine}. Bytes of keys are unsigned and quants
// signed; bytes of values are signed, and quants below 128.
template <bool KEYS> class SplitSums {
public:
  static constexpr int OFFSET = 0, VECTORS = 2, SUMS = 2;

  template <class Quants> void add(const u32x16 (&lanes)[VECTORS], const Quants &of, int at) {
    const int8x16_t quants = vcombine_s8(load<int8x8_t>(of.coarse + at), load<int8x8_t>(of.fine + at));
    const u32x16 low = interleaved<0>(lanes[0], lanes[1]), high = interleaved<1>(lanes[0], lanes[1]);
    add(low_, low, quants), add(high_, high, quants);
  }
  u32x16 total() const {
    return (separated(as<u32x16>(low_), as<u32x16>(high_), false) << 7) +
           separated(as<u32x16>(low_), as<u32x16>(high_), true);
  }

private:
  static void add(i32x16 &to, u32x16 lanes, int8x16_t quants) {
    to = {product(to.a, lanes.a, quants), product(to.b, lanes.b, quants), product(to.c, lanes.c, quants),
          product(to.d, lanes.d, quants)};
  }
  static i32x4 product(i32x4 sum, u32x4 lanes, int8x16_t quants) {
    return (i32x4)(KEYS ? vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)lanes, quants)
                        : vmmlaq_s32((int32x4_t)sum, (int8x16_t)lanes, quants));
  }

  i32x16 low_ = {}, high_ = {};
};
typedef SplitSums<true> KeySums;
typedef SplitSums<false> ValueSums;
