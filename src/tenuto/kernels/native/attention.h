// The paged cache of keys and values, and attention over it.
#pragma once

#include <type_traits>

#include "matrix.h"

// Keys and values in pages of `page_size` token slots: for each layer and head of a page blocks of 16 slots. As
// bfloat16, a block holds the keys of one head as [head_dim / 2][16 slots][2] and its values as [8 pairs of
// slots][head_dim][2], so that a vector has a pair for each of 16 slots, or for each of 16 dimensions. The values of a
// page's blocks follow each other, after the keys of all, so that a tile can have those of two. In `bytes`, a block
// holds quants of keys, plus 128, as uint8 [head_dim / 4][16 slots][4], then of values, int8 [4 fours of
// slots][head_dim][4], and then what quants are multiplied with, bfloat16 [16 slots] for each 32 dimensions of the keys
// and then for the values. All values are finite: what is masked counts as 0 times them. Slots are written one by one,
// perhaps by several threads, and no others with them.
struct Cache {
  char *data = nullptr;
  int page_size, blocks, layers, kv_heads, head_dim; // blocks a page and head
  bool bytes;

  // Where the token at a position has its slot, of the blocks of a sequence's head.
  int block_of(int position) const { return position / page_size * blocks + position % page_size / LANES; }
  // Whether the blocks of a sequence are in pairs, each in one page.
  bool pairs() const { return blocks % 2 == 0; }
  int parts() const { return (head_dim + BLOCK - 1) / BLOCK; } // of a key, with scales of their own
  int64_t block_bytes() const {
    return bytes ? 2 * LANES * head_dim + (parts() + 2) / 2 * 64 : 4 * LANES * head_dim; // whole lines
  }
  int64_t page_bytes() const { return (int64_t)layers * kv_heads * blocks * block_bytes(); }
  // A block, from its keys on, and how far behind them its values are.
  char *block(int layer, int page, int head, int index) const {
    const int64_t first = ((int64_t)layer * kv_heads + head) * blocks * block_bytes();
    return data + page * page_bytes() + first + index * run_bytes();
  }
  int64_t to_values() const { return bytes ? LANES * head_dim : blocks * run_bytes(); }
  // How much of a block lies together: all of it, or its keys, and then its values.
  int64_t run_bytes() const { return bytes ? block_bytes() : block_bytes() / 2; }
  // What the quants of a block are multiplied with: those of a part of its keys, or, as part `parts()`, of its values.
  uint16_t *scales(const char *block, int part) const {
    return (uint16_t *)(block + 2 * LANES * head_dim) + part * LANES;
  }

  void write_key(char *block, int lane, const float *key) const {
    uint32_t *to = (uint32_t *)block + lane;
    if (bytes) {
      float inverse = 0.0f;
      for (int d = 0; d < head_dim; d += LANES, to += LANES * LANES / 4) {
        if (d % BLOCK == 0)
          inverse = set_scale(scales(block, d / BLOCK) + lane, key + d, std::min(BLOCK, head_dim - d));
        uint32_t fours[LANES / 4];
        store(fours, to_bytes(nearest(load<f32x16>(key + d) * inverse)));
        for (int i = 0; i < LANES / 4; i++)
          to[i * LANES] = fours[i] ^ 0x80808080u;
      }
      return;
    }
    for (int d = 0; d < head_dim; d += LANES, to += LANES * LANES / 2) {
      uint32_t pairs[LANES / 2];
      store(pairs, to_bf16(load<f32x16>(key + d)));
#pragma GCC unroll 8
      for (int i = 0; i < LANES / 2; i++)
        to[i * LANES] = pairs[i];
    }
  }
  void write_value(char *block, int lane, const float *value) const {
    if (bytes) {
      const float inverse = set_scale(scales(block, parts()) + lane, value, head_dim);
      uint8_t *to = (uint8_t *)block + to_values() + lane / 4 * 4 * head_dim;
      for (int d = 0; d < head_dim; d += LANES, to += 4 * LANES)
        store_bytes(to, lane % 4, as<u32x16>(nearest(load<f32x16>(value + d) * inverse)));
      return;
    }
    uint16_t *to = (uint16_t *)(block + to_values()) + lane / 2 * 2 * head_dim;
    for (int d = 0; d < head_dim; d += LANES, to += 2 * LANES)
      store_words(to, lane % 2, to_bf16_bits(load<f32x16>(value + d)));
  }

private:
  // Decide what the quants of `count` numbers are multiplied with: the highest |x| / 127, rounded up, or 0 if that is
  // next to nothing. Returns what they are multiplied with to be quants.
  static float set_scale(uint16_t *scale, const float *v, int count) {
    f32x16 most = {};
    for (int d = 0; d < count; d += LANES)
      most = max16(most, max16(load<f32x16>(v + d), -load<f32x16>(v + d)));
    const float highest = highest16(most) / 127.0f;
    uint32_t bits;
    memcpy(&bits, &highest, 4);
    *scale = highest > 1e-30f ? (uint16_t)((bits + 0xFFFFu) >> 16) : 0;
    return *scale ? 1.0f / float_of(*scale) : 0.0f;
  }
};

// What one query row has attended to so far: a whole number that no score is above, or minus infinity, the sum of
// 2^(score - highest), and the values weighted so. `Partial` is followed by head_dim floats.
//
// Scores are taken in chunks of blocks, each from nothing, and added up in the order of the chunks. What a chunk gets
// does not depend on `highest` but for a power of two; so it does not matter who attends to which chunks.
struct Partial {
  float highest, sum;
};
INLINE float *weighted(Partial *p) { return (float *)(p + 8); } // 64 bytes on, for alignment
INLINE int64_t partial_bytes(int head_dim) { return 64 + 4 * (int64_t)head_dim; }

// Groups of 16 rows that attend together: what they keep has room in the second cache, or, without tiles, in the first.
constexpr int MOST_GROUPS = TENUTO_AMX ? 12 : 3;
constexpr int CHUNK = 8; // blocks whose scores are taken together
constexpr int AHEAD = 2; // blocks whose keys are asked for early: one is too short for the CPU to foresee the next
constexpr float UNSEEN = -INFINITY; // the score of what is masked

// Query rows that attend together: of neighbouring tokens, each with the heads that share a key head. A query is
// multiplied with what scores are to be scaled with.
struct QueryRows {
  const Half *queries;        // [rows][head_dim]
  char *results;              // a `Partial` each
  int count, position, a_key; // the first token's position, and heads a token
  int window, head_dim;       // tokens that one sees, or 0 for all
  bool many;                  // whether the step has so many rows of the sequence that tiles attend to bytes, too

  const Half *query(int r) const { return queries + (int64_t)r * head_dim; }
  Partial *result(int r) const { return (Partial *)(results + r * partial_bytes(head_dim)); }
  // The tokens of its sequence that a row sees: from `first` up to `end`.
  int end(int r) const { return position + r / a_key + 1; }
  int first(int r) const { return window ? std::max(0, end(r) - window) : 0; }
};

// Turn the scores of `count` blocks into shares of their values, `step` vectors apart, and bring what a row has
// attended to so far up to date. Returns what its weighted values so far are to be multiplied with.
INLINE float weigh(const float *scores, Half *shares, int count, int step, Partial &row) {
  f32x16 top = splat(UNSEEN);
  for (int i = 0; i < count; i++)
    top = max16(load<f32x16>(scores + i * step * LANES), top); // in this order, so that NaN is left out
  const float highest = highest16(top), base = std::max(row.highest, whole_above(highest));
  if (highest <= UNSEEN) { // nothing to see here
    for (int i = 0; i < count; i++)
      store_halves(shares + i * step * LANES, f32x16{});
    return 1.0f;
  }
  f32x16 sum = {};
  for (int i = 0; i < count; i++) {
    const f32x16 share = power_below(load<f32x16>(scores + i * step * LANES), base);
    sum += share;
    store_halves(shares + i * step * LANES, share);
  }
  const float shrink = power_of_two(row.highest - base);
  row = {base, row.sum * shrink + sum16(sum)};
  return shrink;
}

// Keep the scores of `count` blocks, `step` vectors apart, within `cap` by a hyperbolic tangent, but for those that are
// masked. Apart from where scores are made, and never inlined there: models without a cap are not to wait for it.
static __attribute__((noinline)) void keep_within(float cap, float *scores, int count, int step) {
  for (int i = 0; i < count; i++, scores += step * LANES) {
    const f32x16 score = load<f32x16>(scores);
    store(scores, select(score <= UNSEEN, score, tanh16(score / cap) * cap));
  }
}

// Neighbouring blocks of one sequence, whose scores are taken together: where they are, and the tokens in each.
struct Chunk {
  int count;
  bool whole; // all blocks have 16 slots
  bool pairs; // values of blocks 0 and 1 follow each other, those of 2 and 3, and so on, also of one behind the last
  const char *at[CHUNK];
  int64_t to_values; // from there
  int first[CHUNK], end[CHUNK];

  const uint16_t *values(int i) const { return (const uint16_t *)(at[i] + to_values); }

  // `scores`, of the slots of block i, with those that a row does not see set to `UNSEEN`.
  f32x16 masked(f32x16 scores, int i, int row_first, int row_end) const {
    const int before = first[i], seen = std::min(row_end, end[i]) - before;
    if (seen < LANES)
      scores = select(lane_numbers() < seen, scores, splat(UNSEEN));
    return row_first > before ? select(lane_numbers() < row_first - before, splat(UNSEEN), scores) : scores;
  }
};

// The blocks of one head of one sequence.
struct Blocks {
  const Cache &cache;
  int layer, head;
  const int32_t *pages;
  int count; // of the sequence's

  // Where the chunk of block `from` ends, or `to`, if that is before.
  static int chunk_end(int from, int to) { return std::min(to, from / CHUNK * CHUNK + CHUNK); }
  // Blocks `from` up to `to`, at most to where chunks end: always at the same blocks, also if the first of them have
  // left the window. Pairs are never parted, as sums would be rounded elsewhere.
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

// Those of them, from `from` up to `to`, that query rows attend to.
struct Span {
  Blocks blocks;
  int from, to;
};

// ROWS query rows from `row` on attend to blocks `from` up to `to` of one sequence's cache, a head of it. Their scores
// are kept within `cap`, unless that is 0.
template <int ROWS>
static void attend(const Blocks &blocks, const QueryRows &rows, int row, int from, int to, float cap) {
  const int dim = blocks.cache.head_dim;
  alignas(64) float scores[ROWS][CHUNK * LANES];
  alignas(64) Half shares[ROWS][CHUNK * LANES];
  for (int start = from, count; start < to; start += count) {
    const Chunk chunk = blocks.chunk(start, to);
    count = chunk.count;
    for (int i = 0; i < count; i++) {
      const uint16_t *block = (const uint16_t *)chunk.at[i], *values = chunk.values(i);
      const uint16_t *next = (const uint16_t *)blocks.at(std::min(start + i + AHEAD, blocks.count - 1));
      f32x16 even[ROWS] = {}, odd[ROWS] = {};
      for (int j = 0; j < dim / 2; j += 2) {
        for (int k = j * 2 * LANES; k < (j + 2) * 2 * LANES; k += 2 * LANES) {
          __builtin_prefetch(next + k);
          __builtin_prefetch(values + k);
        }
        const Pairs a = load_pairs(block + j * 2 * LANES), b = load_pairs(block + (j + 1) * 2 * LANES);
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
      keep_within(cap, scores[r], count, 1);
    float shrink[ROWS];
    for (int r = 0; r < ROWS; r++)
      shrink[r] = weigh(scores[r], shares[r], count, 1, *rows.result(row + r));
    for (int d = 0; d < dim; d += VECTORS_OF_VALUES * LANES) {
      const int vectors = std::min(VECTORS_OF_VALUES, (dim - d) / LANES);
      auto add_values = [&](auto width) {
        constexpr int WIDTH = decltype(width)::value;
        f32x16 acc[ROWS][WIDTH] = {};
        for (int i = 0; i < count; i++) {
          const uint16_t *values = chunk.values(i) + 2 * d;
          for (int pair = 0; pair < LANES / 2; pair++, values += 2 * dim) {
            Pairs both[WIDTH];
            for (int v = 0; v < WIDTH; v++)
              both[v] = load_pairs(values + v * 2 * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
              const Pair share = pair_at(&shares[r][i * LANES + 2 * pair]);
              for (int v = 0; v < WIDTH; v++)
                acc[r][v] = dot_pair(acc[r][v], both[v], share);
            }
          }
        }
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < WIDTH; v++) {
            float *to_row = weighted(rows.result(row + r)) + d + v * LANES;
            store(to_row, load<f32x16>(to_row) * shrink[r] + acc[r][v]);
          }
      };
      if (vectors == 4 && VECTORS_OF_VALUES >= 4)
        add_values(std::integral_constant<int, 4>());
      else if (vectors == 2)
        add_values(std::integral_constant<int, 2>());
      else
        for (int left = vectors; left > 0; left--, d += LANES)
          add_values(std::integral_constant<int, 1>());
    }
  }
}

#include "attention_bytes.h"
#if TENUTO_AMX
#include "attention_tiles.h"
#endif

constexpr int STRIP = 2 * CHUNK; // blocks that all rows attend to before the next are read

// Query rows attend to a span. `next`, if it is not null, is what this thread most likely attends to then: tiles ask
// for it early.
static void attend(const Span &span, const QueryRows &rows, float cap, const Span *next) {
  const bool bytes = span.blocks.cache.bytes;
#if TENUTO_AMX
  if (rows.head_dim % BLOCK == 0 && rows.count <= MOST_GROUPS * LANES && (!bytes || rows.many))
    return (rows.count <= LANES ? tiles::attend<true> : tiles::attend<false>)(span, rows, cap, next);
#endif
  for (int r = 0; r < rows.count; r++) {
    *rows.result(r) = {-INFINITY, 0.0f};
    memset(weighted(rows.result(r)), 0, sizeof(float) * rows.head_dim);
  }
  for (int start = span.from, end; start < span.to; start = end) {
    end = std::min(span.to, start / STRIP * STRIP + STRIP);
    for (int r = 0, now, seen; r < rows.count; r += now) {
      auto attend_now = [&](auto so_many) {
        constexpr int ROWS = decltype(so_many)::value;
        (bytes ? attend_bytes<ROWS> : attend<ROWS>)(span.blocks, rows, r, start, seen, cap);
      };
      now = std::min(rows.count - r, ROWS_AN_ATTENTION);
      seen = std::min(end, span.blocks.cache.block_of(rows.end(r + now - 1) - 1) + 1);
      switch (now) {
      case 6:
        attend_now(std::integral_constant<int, 6>());
        break;
      case 5:
        attend_now(std::integral_constant<int, 5>());
        break;
      case 4:
        attend_now(std::integral_constant<int, 4>());
        break;
      case 3:
        attend_now(std::integral_constant<int, 3>());
        break;
      case 2:
        attend_now(std::integral_constant<int, 2>());
        break;
      default:
        attend_now(std::integral_constant<int, 1>());
      }
    }
  }
}

// Add what a query row has attended to in chunks that follow.
static void add_part(Partial *total, const Partial *part, int head_dim) {
  if (part->highest == -INFINITY)
    return;
  const float highest = std::max(total->highest, part->highest);
  const float kept = power_of_two(total->highest - highest), added = power_of_two(part->highest - highest);
  for (int d = 0; d < head_dim; d += LANES)
    store(weighted(total) + d,
          load<f32x16>(weighted(total) + d) * kept + load<f32x16>(weighted((Partial *)part) + d) * added);
  *total = {highest, total->sum * kept + part->sum * added};
}
