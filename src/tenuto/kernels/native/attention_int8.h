// Attention to the quants of an INT8 cache with integer products. Queries and softmax weights are rounded to quants of
// 15 and 14 bits, so that they lose much less than keys and values have lost.
// Tiles would be no faster: computing softmax weights takes longer than the products.
#pragma once

#include <type_traits>

#include "attention_quants.h"
#include "matmul_input.h"

// The highest quants of queries and of softmax weights.
constexpr float MAX_QUERY_QUANT = 127.0f * 128.0f, MAX_WEIGHT_QUANT = 127.0f * 129.0f;
// Keys are stored plus 128, of which `KeySums` subtract `OFFSET`. The rest, times the sum of the query's quants, has to
// be subtracted from products.
constexpr int KEY_OFFSET = 128 - KeySums::OFFSET;

// Query rows as quants, [rows][head_dim], and for each part of 32 dimensions the offset to subtract from its products
// with keys.
struct QuantizedQueries {
  Quants<MAX_GROUPS * LANES * 1024> quants;
  float scales[MAX_GROUPS * LANES];
  uint32_t offsets[MAX_GROUPS * LANES][1024 / BLOCK];

  explicit QuantizedQueries(const QueryRows &rows) {
    const int dim = rows.head_dim;
    for (int r = 0; r < rows.count; r++) {
      const PairElement *query = rows.query(r);
      f32x16 most = {};
      for (int d = 0; d < dim; d += LANES)
        most = max16(most, max16(load_elements(query + d), -load_elements(query + d)));
      const float highest = highest16(most), inverse = highest > 1e-30f ? MAX_QUERY_QUANT / highest : 0.0f;
      for (int part = 0; part * BLOCK < dim; part++) {
        i32x16 sum = {};
        for (int d = part * BLOCK; d < std::min(dim, (part + 1) * BLOCK); d += LANES) {
          const i32x16 found = nearest(load_elements(query + d) * inverse);
          quants.set_signed(r * dim + d, found);
          sum += found;
        }
        offsets[r][part] = (uint32_t)KEY_OFFSET * (uint32_t)(int32_t)sum16(to_float(sum));
      }
      scales[r] = highest / MAX_QUERY_QUANT;
    }
  }
};

typedef Quants<CHUNK * LANES> WeightQuants; // of the softmax weights of a row for a chunk

// The factors for the values of a row: `correction` for those so far, and `scale` for the quants of a chunk's weights.
struct ChunkWeights {
  float correction, scale;

  void add(float *to, i32x16 sum) const {
    store(to, fused(load<f32x16>(to), splat(correction), to_float(sum) * scale));
  }
};

// Does what `softmax_chunk` does, but the weights are relative to the chunk's highest score, and multiplied by the
// scales of their values. The highest quant stands for `highest`, the highest of those scales among the keys that the
// row attends to.
// A row's result must not depend on the other rows: so this is not inlined (the compiler could round differently), and
// other places use `fused`.
static __attribute__((noinline)) ChunkWeights softmax_chunk_int8(const float *scores, const float *value_scales,
                                                                 float highest, WeightQuants &weights, int count,
                                                                 PartialAttention &row) {
  f32x16 top = splat(MASKED);
  for (int i = 0; i < count; i++)
    top = max16(load<f32x16>(scores + i * LANES), top); // in this order, so that NaN is ignored
  const float scale = highest / MAX_WEIGHT_QUANT, own = whole_above(highest16(top));
  if (own <= MASKED) { // all are masked
    weights.clear(count * LANES);
    return {1.0f, 0.0f};
  }
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  f32x16 sum = {};
  const auto quants_of = [&](int i) __attribute__((always_inline)) {
    const f32x16 weight = power_below(load<f32x16>(scores + i * LANES), own);
    sum += weight;
    return nearest(weight * load<f32x16>(value_scales + i * LANES) * inverse); // in this order, to stay finite
  };
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    i32x16 quants[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
      quants[k] = quants_of(i + k);
    weights.set_unsigned(i * LANES, quants);
  }
  for (; i < count; i++)
    weights.set_unsigned(i * LANES, quants_of(i));
  const float max_score = std::max(row.max_score, own);
  const float correction = power_of_two(row.max_score - max_score), kept = power_of_two(own - max_score);
  row = {max_score, row.sum * correction + sum16(sum) * kept};
  return {correction, kept * scale};
}

// Does what `score_pairs` does, for an INT8 cache.
template <int ROWS, int BLOCKS>
INLINE void score_int8(const Cache &cache, const Chunk &chunk, int first, const QuantizedQueries &queries, int row,
                       const Chunk *ahead, float (*scores)[CHUNK * LANES]) {
  constexpr int VECTORS = KeySums::VECTORS;
  const int dim = cache.head_dim;
  f32x16 sums[ROWS][BLOCKS] = {};
  for (int b = 0; b < BLOCKS && ahead; b++)
    __builtin_prefetch(KvInt8::scales(cache, ahead->at[first + b], 0), 0, 2);
  for (int part = 0; part < KvInt8::parts(cache); part++) {
    KeySums products[ROWS][BLOCKS];
    for (int d = part * BLOCK; d < std::min(dim, (part + 1) * BLOCK); d += 4 * VECTORS) {
      if (ahead)
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 2
          for (int v = 0; v < VECTORS; v++)
            __builtin_prefetch(ahead->at[first + b] + (d + 4 * v) * LANES, 0, 2);
      u32x16 keys[BLOCKS][VECTORS];
#pragma GCC unroll 8
      for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++)
          keys[b][v] = load<u32x16>(chunk.at[first + b] + (d + 4 * v) * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const int at = (row + r) * dim + d;
#pragma GCC unroll 8
        for (int b = 0; b < BLOCKS; b++)
          products[r][b].add(keys[b], queries.quants, at);
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) {
      const f32x16 key_scales = bf16_to_float(KvInt8::scales(cache, chunk.at[first + b], part));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[r][b] = fused(to_float(as<i32x16>(products[r][b].total() - queries.offsets[row + r][part])), key_scales,
                           sums[r][b]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++)
      store(&scores[r][(first + b) * LANES], sums[r][b] * queries.scales[row + r]);
}

// Does what `add_value_pairs` does, for an INT8 cache.
template <int ROWS, int WIDTH>
INLINE void add_values_int8(const Chunk &chunk, const QueryRows &rows, int row, int d, const Chunk *ahead,
                            const WeightQuants *weights, const ChunkWeights *chunk_weights) {
  constexpr int VECTORS = ValueSums::VECTORS;
  ValueSums products[ROWS][WIDTH];
  for (int i = 0; i < chunk.count; i++) {
    const char *values = chunk.values(i) + 4 * d;
    const int64_t to_then = ahead ? ahead->values(i) - chunk.values(i) : 0;
    for (int slot = i * LANES; slot < (i + 1) * LANES; slot += 4 * VECTORS) {
      u32x16 lanes[WIDTH][VECTORS];
#pragma GCC unroll 2
      for (int n = 0; n < VECTORS; n++, values += 4 * rows.head_dim)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) {
          if (ahead)
            __builtin_prefetch(values + v * 4 * LANES + to_then, 0, 2);
          lanes[v][n] = load<u32x16>(values + v * 4 * LANES);
        }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++)
          products[r][v].add(lanes[v], weights[r], slot);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < WIDTH; v++)
      chunk_weights[r].add(weighted_values(rows.result(row + r)) + d + v * LANES, as<i32x16>(products[r][v].total()));
}

// Does what `attend_pairs` does, for an INT8 cache.
template <int ROWS>
static __attribute__((noinline)) void attend_int8(const Blocks &blocks, const QueryRows &rows,
                                                  const QuantizedQueries &queries, int row, int from, int to,
                                                  const Chunk *ahead, float cap) {
  const Cache &cache = blocks.cache;
  alignas(64) float scores[ROWS][CHUNK * LANES], value_scales[CHUNK * LANES];
  WeightQuants weights[ROWS];
  const RowEnds<ROWS> ends(rows, row);
  ChunkWeights chunk_weights[ROWS];
  for (int start = from, count; start < to; start += count) {
    const Chunk chunk = blocks.chunk(start, to);
    count = chunk.count;
    f32x16 most = {};
    for (int i = 0; i < count; i++) {
      const f32x16 scales = bf16_to_float(KvInt8::scales(cache, chunk.at[i], KvInt8::parts(cache)));
      store(value_scales + i * LANES, scales), most = max16(most, scales);
    }
    const float highest = highest16(most);
    for_parts<blocks_at_once(KeySums::SUMS * ROWS)>(count, [&](int i, auto so_many) {
      score_int8<ROWS, decltype(so_many)::value>(cache, chunk, i, queries, row, ahead, scores);
    });
    for (int r = 0; r < ROWS; r++) {
      const bool masked = ends.mask(chunk, r, scores[r]);
      if (cap != 0.0f)
        soft_cap(cap, scores[r], count, 1);
      chunk_weights[r] =
          softmax_chunk_int8(scores[r], value_scales, masked ? ends.highest(chunk, r, value_scales) : highest,
                             weights[r], count, *rows.result(row + r));
    }
    for_parts<values_at_once(ValueSums::SUMS * ROWS)>(rows.head_dim / LANES, [&](int vector, auto so_many) {
      add_values_int8<ROWS, decltype(so_many)::value>(chunk, rows, row, vector * LANES, ahead, weights, chunk_weights);
    });
  }
}
