// Attention by tiles (AMX): up to 16 query rows together.
namespace tiles {

constexpr int TILES_AHEAD = 2; // blocks that are asked for before they are needed

// Ask for a block of a sequence, for the second cache: more lines can be on their way there than to the first.
INLINE void prefetch(const Blocks &blocks, int i) {
  const char *block = blocks.at(i);
  for (int64_t b = 0; b < blocks.cache.block_bytes(); b += 64)
    __builtin_prefetch(block + b, 0, 2);
}

// 2^y for y <= 0, or minus infinity; relative error below 2e-7: the fraction of y by a polynomial on [0, 1] whose
// greatest relative error is the least there is.
INLINE f32x16 power_of_two(f32x16 y) {
  const f32x16 x = (f32x16)_mm512_reduce_ps((__m512)y, 1); // y - floor(y), and 0 of infinity
  f32x16 p = splat(0.00187757658f);
  p = p * x + 0.00898934063f;
  p = p * x + 0.0558263175f;
  p = p * x + 0.240153611f;
  p = p * x + 0.693153083f;
  p = p * x + 0.99999994f;
  return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)y);
}

// The highest score of a row with the blocks of a chunk, [block][16 rows][16 slots], before they are scaled. Where the
// row does not see all of them, minus infinity is put in.
INLINE float highest_score(float (*scores)[LANES][LANES], const Chunk &chunk, const QueryRow *rows, int r) {
  f32x16 top = splat(-INFINITY);
  if (chunk.whole && rows[r].first <= chunk.first[0] && rows[r].end >= chunk.end[chunk.count - 1]) {
    for (int i = 0; i < chunk.count; i++)
      top = max16(top, load<f32x16>(scores[i][r]));
    return highest16(top);
  }
  for (int i = 0; i < chunk.count; i++) {
    const f32x16 score = chunk.masked(load<f32x16>(scores[i][r]), i, rows[r]);
    store(scores[i][r], score);
    top = max16(top, score);
  }
  return highest16(top);
}

// Turn the scores of up to 16 rows with the blocks of a chunk into shares, and bring what the rows have attended to so
// far up to date, as `weigh` does. `shrink`: what their weighted values so far are to be multiplied with.
INLINE void weigh_rows(float (*scores)[LANES][LANES], Half (*shares)[LANES][LANES], const Chunk &chunk,
                       const QueryRow *rows, int count, Scoring scoring, float *shrink) {
  alignas(64) float before[LANES] = {}, highest[LANES] = {}, base[LANES];
  float scale = scoring.scale;
  if (scoring.cap != 0.0f) {
    for (int r = 0; r < count; r++) {
      for (int i = 0; i < chunk.count; i++)
        store(scores[i][r], load<f32x16>(scores[i][r]) * scale);
      keep_within(scoring.cap, scores[0][r], chunk.count, LANES);
    }
    scale = 1.0f;
  }
  for (int r = 0; r < count; r++) {
    before[r] = rows[r].result->highest;
    highest[r] = std::max(before[r], highest_score(scores, chunk, rows, r) * scale);
  }
  // A row that has seen nothing yet has nothing to shrink, and 0 stands in for its highest score.
  const f32x16 highs = load<f32x16>(highest), bases = select(highs == -INFINITY, f32x16{}, highs);
  store(base, bases);
  store(shrink, exp_nonpositive(load<f32x16>(before) - bases));
  constexpr float LOG2_E = 1.44269504f;
  for (int r = 0; r < count; r++) {
    f32x16 sum = {};
    for (int i = 0; i < chunk.count; i++) {
      const f32x16 share = power_of_two(load<f32x16>(scores[i][r]) * (scale * LOG2_E) - base[r] * LOG2_E);
      sum += share;
      store_halves(shares[i][r], share);
    }
    *rows[r].result = {highest[r], rows[r].result->sum * shrink[r] + sum16(sum)};
  }
}

// As `::attend`, for head dimensions that are multiples of 32.
static void attend(const Blocks &blocks, const QueryRow *rows, int count, int from, int to, Scoring scoring) {
  const int dim = blocks.cache.head_dim;
  alignas(64) Half queries[LANES * 1024]; // [dim / 32][16][32]
  alignas(64) float scores[CHUNK][LANES][LANES], values[4][LANES][LANES], shrink[LANES];
  alignas(64) Half shares[CHUNK][LANES][LANES];
  for (int r = 0; r < count; r++) {
    begin(rows[r], dim);
    for (int d = 0; d < dim; d += BLOCK)
      memcpy(queries + d * LANES + r * BLOCK, rows[r].query + d, 2 * BLOCK);
  }
  configure(ATTENTION, count);
  for (int start = from, now; start < to; start += now) {
    const Chunk chunk = blocks.chunk(start, to);
    now = chunk.count;
    for (int i = 0; i < now; i++) {
      if (start + i + TILES_AHEAD < blocks.count)
        prefetch(blocks, start + i + TILES_AHEAD);
      written();
      _tile_zero(0);
      for (int d = 0; d < dim; d += BLOCK) {
        _tile_loadd(4, queries + d * LANES, 64);
        _tile_loadd(6, chunk.at[i] + 2 * d * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, scores[i], 64);
    }
    written();
    weigh_rows(scores, shares, chunk, rows, count, scoring, shrink);
    for (int d = 0; d < dim; d += 4 * LANES) {
      const bool all = dim - d >= 4 * LANES; // else two tiles of 16
      written();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int i = 0; i < now; i++) {
        const uint16_t *block = (const uint16_t *)chunk.at[i] + LANES * dim + 2 * d;
        _tile_loadd(5, shares[i], 32);
        _tile_loadd(7, block, dim * 4);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, block + 2 * LANES, dim * 4);
        _tile_dpbf16ps(1, 5, 7);
        if (all) {
          _tile_loadd(7, block + 4 * LANES, dim * 4);
          _tile_dpbf16ps(2, 5, 7);
          _tile_loadd(7, block + 6 * LANES, dim * 4);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, values[0], 64);
      _tile_stored(1, values[1], 64);
      if (all) {
        _tile_stored(2, values[2], 64);
        _tile_stored(3, values[3], 64);
      }
      written();
      for (int r = 0; r < count; r++) {
        float *to_row = weighted(rows[r].result) + d;
        for (int v = 0; v < (all ? 4 : 2); v++)
          store(to_row + v * LANES, load<f32x16>(to_row + v * LANES) * shrink[r] + load<f32x16>(values[v][r]));
      }
    }
  }
}

} // namespace tiles
