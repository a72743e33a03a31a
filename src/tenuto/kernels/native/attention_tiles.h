// Attention by tiles (AMX): up to 16 query rows together.
namespace tiles {

// As `::attend`, for head dimensions that are multiples of 32.
static void attend(const Blocks &blocks, const QueryRow *rows, int count, int from, int to, Scoring scoring) {
  const int dim = blocks.cache.head_dim;
  alignas(64) Half queries[LANES * 1024]; // [dim / 32][16][32]
  alignas(64) float scores[CHUNK][LANES][LANES], values[4][LANES][LANES];
  alignas(64) Half shares[CHUNK][LANES][LANES];
  float shrink[LANES];
  for (int r = 0; r < count; r++) {
    begin(rows[r], dim);
    for (int d = 0; d < dim; d += BLOCK)
      memcpy(queries + d * LANES + r * BLOCK, rows[r].query + d, 2 * BLOCK);
  }
  configure(ATTENTION, count);
  for (int start = from, now; start < to; start += now) {
    now = chunk_end(start, to) - start;
    for (int i = 0; i < now; i++) {
      const uint16_t *block = blocks.at(start + i);
      if (start + i + 1 < to)
        blocks.prefetch(start + i + 1);
      written();
      _tile_zero(0);
      for (int d = 0; d < dim; d += BLOCK) {
        _tile_loadd(4, queries + d * LANES, 64);
        _tile_loadd(6, block + d * LANES, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, scores[i], 64);
    }
    for (int r = 0; r < count; r++) {
      for (int i = 0; i < now; i++)
        store(scores[i][r], blocks.masked(load<f32x16>(scores[i][r]) * scoring.scale, start + i, rows[r]));
      if (scoring.cap != 0.0f)
        keep_within(scoring.cap, scores[0][r], now, LANES);
      shrink[r] = weigh(scores[0][r], shares[0][r], now, LANES, *rows[r].result);
    }
    for (int d = 0; d < dim; d += 4 * LANES) {
      const bool all = dim - d >= 4 * LANES; // else two tiles of 16
      written();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int i = 0; i < now; i++) {
        const uint16_t *block = blocks.at(start + i) + LANES * dim + 2 * d;
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
      for (int r = 0; r < count; r++) {
        float *to_row = weighted(rows[r].result) + d;
        for (int v = 0; v < (all ? 4 : 2); v++)
          store(to_row + v * LANES, load<f32x16>(to_row + v * LANES) * shrink[r] + load<f32x16>(values[v][r]));
      }
    }
  }
}

} // namespace tiles
