// Attention over keys and values in bytes (see `Cache`), by products of whole numbers, without unpacking them. Queries
// and shares become quants of 15 and 14 bits, 128 * coarse + fine, so that nothing is rounded as much as keys and
// values were. Tiles would be no faster: what is done to scores takes longer than products.

constexpr float MOST_ASKED = 127.0f * 128.0f, MOST_SHARED = 127.0f * 129.0f; // the highest quants
constexpr int BYTES_OFF = 128 - OFFSET; // what products of keys have to be rid of: so much times the sum of the quants

// Products of what is coarse and of what is fine, together, without `offset`.
INLINE f32x16 joined(i32x16 coarse, i32x16 fine, uint32_t offset = 0) {
  return to_float(as<i32x16>((as<u32x16>(coarse) << 7) + as<u32x16>(fine) - offset));
}

// Queries: what is coarse and what is fine of each, and the `offsets` of their parts, as keys have them.
template <int ROWS> struct Asked {
  alignas(64) int8_t coarse[ROWS][1024], fine[ROWS][1024];
  float scales[ROWS];
  uint32_t offsets[ROWS][1024 / BLOCK];

  Asked(const QueryRows &rows, int row, int dim) {
    for (int r = 0; r < ROWS; r++) {
      const Half *query = rows.query(row + r);
      f32x16 most = {};
      for (int d = 0; d < dim; d += LANES)
        most = max16(most, max16(load_halves(query + d), -load_halves(query + d)));
      const float highest = highest16(most), inverse = highest > 1e-30f ? MOST_ASKED / highest : 0.0f;
      for (int part = 0; part * BLOCK < dim; part++) {
        i32x16 sum = {};
        for (int d = part * BLOCK; d < std::min(dim, (part + 1) * BLOCK); d += LANES) {
          const i32x16 quants = nearest(load_halves(query + d) * inverse), high = (quants + 64) >> 7;
          store(coarse[r] + d, to_bytes(high));
          store(fine[r] + d, to_bytes(quants - (high << 7)));
          sum += quants;
        }
        offsets[r][part] = (uint32_t)BYTES_OFF * (uint32_t)(int32_t)sum16(to_float(sum));
      }
      scales[r] = highest / MOST_ASKED;
    }
  }
};

// How a row weighs the values of a chunk: what its weighted values so far shrink by, and what its quants stand for.
struct Weighed {
  float shrink, scale;

  void add(float *to, i32x16 coarse, i32x16 fine) const {
    store(to, fused(load<f32x16>(to), splat(shrink), joined(coarse, fine) * scale));
  }
};

// As `weigh`, but shares are of the chunk's highest, times the scales of their values; the highest quant stands for the
// highest scale that the row sees, so that it does not depend on others. Not inlined, and with `fused` elsewhere, so
// that what a row gets does not depend on how many are computed with it.
static __attribute__((noinline)) Weighed weigh_bytes(const float *scores, const float *value_scales, uint8_t *coarse,
                                                     uint8_t *fine, int count, Partial &row) {
  f32x16 top = splat(UNSEEN), most = {};
  for (int i = 0; i < count; i++) {
    const f32x16 score = load<f32x16>(scores + i * LANES);
    top = max16(score, top); // in this order, so that NaN is left out
    most = max16(most, select(score > UNSEEN, load<f32x16>(value_scales + i * LANES), f32x16{}));
  }
  const float scale = highest16(most) / MOST_SHARED, own = whole_above(highest16(top));
  if (own <= UNSEEN) { // nothing to see here
    memset(coarse, 0, count * LANES);
    memset(fine, 0, count * LANES);
    return {1.0f, 0.0f};
  }
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  f32x16 sum = {};
  for (int i = 0; i < count; i++) {
    const f32x16 share = power_below(load<f32x16>(scores + i * LANES), own);
    const i32x16 quants = nearest(share * load<f32x16>(value_scales + i * LANES) * inverse); // in this order: finite
    sum += share;
    store(coarse + i * LANES, to_bytes(quants >> 7));
    store(fine + i * LANES, to_bytes(quants & 127));
  }
  const float highest = std::max(row.highest, own);
  const float shrink = power_of_two(row.highest - highest), kept = power_of_two(own - highest);
  row = {highest, row.sum * shrink + sum16(sum) * kept};
  return {shrink, kept * scale};
}

// As `attend`, over a cache in bytes.
template <int ROWS>
static void attend_bytes(const Blocks &blocks, const QueryRows &rows, int row, int from, int to, float cap) {
  const Cache &cache = blocks.cache;
  const int dim = cache.head_dim;
  const Asked<ROWS> asked(rows, row, dim);
  alignas(64) float scores[ROWS][CHUNK * LANES], value_scales[CHUNK * LANES];
  alignas(64) uint8_t coarse_shares[ROWS][CHUNK * LANES], fine_shares[ROWS][CHUNK * LANES];
  Weighed weighed[ROWS];
  for (int start = from, count; start < to; start += count) {
    const Chunk chunk = blocks.chunk(start, to);
    count = chunk.count;
    for (int i = 0; i < count; i++) {
      const char *keys = chunk.at[i], *values = keys + LANES * dim;
      const char *next = blocks.at(std::min(start + i + AHEAD, blocks.count - 1));
      f32x16 sums[ROWS] = {};
      __builtin_prefetch(cache.scales(next, 0));
      for (int part = 0; part < cache.parts(); part++) {
        Dot coarse[ROWS], fine[ROWS];
        for (int d = part * BLOCK; d < std::min(dim, (part + 1) * BLOCK); d += 4) {
          __builtin_prefetch(next + d * LANES);
          __builtin_prefetch(values + d * LANES);
          const u32x16 key = load<u32x16>(keys + d * LANES);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            coarse[r].template add<8>(key, asked.coarse[r] + d);
            fine[r].template add<8>(key, asked.fine[r] + d);
          }
        }
        const f32x16 key_scales = bf16_to_float(cache.scales(keys, part));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          sums[r] = fused(joined(coarse[r].template total<8>(), fine[r].template total<8>(), asked.offsets[r][part]),
                          key_scales, sums[r]);
      }
      store(value_scales + i * LANES, bf16_to_float(cache.scales(keys, cache.parts())));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        store(&scores[r][i * LANES],
              chunk.masked(sums[r] * asked.scales[r], i, rows.first(row + r), rows.end(row + r)));
    }
    for (int r = 0; r < ROWS; r++) {
      if (cap != 0.0f)
        keep_within(cap, scores[r], count, 1);
      weighed[r] = weigh_bytes(scores[r], value_scales, coarse_shares[r], fine_shares[r], count, *rows.result(row + r));
    }
    auto add_values = [&](int d, auto width) {
      constexpr int WIDTH = decltype(width)::value;
      UnsignedDot coarse[ROWS][WIDTH], fine[ROWS][WIDTH];
      for (int i = 0; i < count; i++) {
        const char *values = chunk.at[i] + LANES * dim + 4 * d;
        for (int slot = i * LANES; slot < (i + 1) * LANES; slot += 4, values += 4 * dim) {
          u32x16 four[WIDTH];
          for (int v = 0; v < WIDTH; v++)
            four[v] = load<u32x16>(values + v * 4 * LANES);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < WIDTH; v++) {
              coarse[r][v].add(four[v], &coarse_shares[r][slot]);
              fine[r][v].add(four[v], &fine_shares[r][slot]);
            }
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++)
          weighed[r].add(weighted(rows.result(row + r)) + d + v * LANES, coarse[r][v].total(), fine[r][v].total());
    };
    constexpr int WIDTH = VECTORS_OF_VALUES < 4 ? 1 : ROWS <= 3 ? 4 : 2; // twice as many sums have to fit
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
      add_values(d, std::integral_constant<int, WIDTH>());
    for (; d < dim; d += LANES)
      add_values(d, std::integral_constant<int, 1>());
  }
}
