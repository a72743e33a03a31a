// Attention by tiles (AMX): groups of 16 query rows.
namespace tiles {

// Asks for the next chunk while one is attended to, a few lines at a time. For the second cache, so that what is needed
// now stays in the first. FEW rows wait for the memory alone, so it should never wait for them, and they ask as often
// as can be; for many it has time.
template <bool FEW> class Ahead {
public:
  // For the blocks of `span` up to the end of a chunk, or for nothing.
  explicit Ahead(const Span *span) {
    if (!span)
      return;
    blocks_ = &span->blocks, from_ = to_ = span->from, end_of_chunk_ = Blocks::chunk_end(span->from, span->to);
    go_on();
  }
  __attribute__((always_inline)) void ask() {
    if (!at_)
      return;
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) // of bytes, this may go beyond the end
      __builtin_prefetch(at_ + 64 * i, 0, 2);
    at_ += 64 * LINES;
    if (at_ >= end_)
      go_on();
  }
  __attribute__((always_inline)) void ask_often() {
    if (FEW)
      ask();
  }
  void ask_for_the_rest() {
    while (at_)
      ask();
  }

private:
  static constexpr int LINES = FEW ? 8 : 4;

  __attribute__((noinline)) void go_on() { // page by page, as they lie
    const Cache &cache = blocks_->cache;
    values_ = !values_ && from_ < to_ && !cache.bytes;
    if (!values_)
      from_ = to_, to_ = std::min(from_ / cache.blocks * cache.blocks + cache.blocks, end_of_chunk_);
    at_ = from_ < to_ ? blocks_->at(from_) + (values_ ? cache.to_values() : 0) : nullptr;
    end_ = at_ + (to_ - from_) * cache.run_bytes();
  }

  const Blocks *blocks_;
  const char *at_ = nullptr, *end_; // null when all is asked for
  int from_, to_;                   // blocks of one page whose keys, or `values_`, are asked for
  int end_of_chunk_;
  bool values_ = false;
};

// Shares are 2^(score - base) to the nearest 128th of a power of two, as bfloat16: what is behind the point becomes its
// mantissa by a table, and what is before it the exponent, or 0 below -126. That adds to a share as much as rounding to
// bfloat16 does.
struct Mantissas {
  alignas(64) uint8_t of[128]; // 128 (2^(i / 128) - 1)

  Mantissas() {
    for (int i = 0; i < 128; i++)
      of[i] = (uint8_t)lrintf(128.0f * (exp2f((float)i / 128.0f) - 1.0f));
  }
};
static const Mantissas mantissas;

// What is taken off scores in 128ths for their shares' exponents.
INLINE i32x16 offsets(f32x16 base) { return nearest((base - 127.0f) * 128.0f); }
INLINE i32x16 logarithms(const float *scores, float base, int offset) {
  const f32x16 score = load<f32x16>(scores);
  if (fabsf(base) < LARGE)
    return nearest(max16(score * 128.0f, splat(-0x1p30f))) - offset;
  return nearest(max16(-max16(f32x16{}, base - score), splat(-127.0f)) * 128.0f) + 127 * 128; // see `power_below`
}

// 32 shares from two vectors of their logarithms.
INLINE __m512i shares_of(i32x16 first, i32x16 second) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // the next instruction works on quarters
  const __m512i x = _mm512_permutexvar_epi64(order, _mm512_packus_epi32((__m512i)first, (__m512i)second));
  const __m512i low = _mm512_load_si512(mantissas.of), high = _mm512_load_si512(mantissas.of + 64);
  const __m512i mantissa = _mm512_permutex2var_epi8(low, x, high);
  return _mm512_ternarylogic_epi32(x, mantissa, _mm512_set1_epi16(0x7F), 0xD8); // mantissa where the mask has ones
}

// Lane r: what `join` makes of all lanes of vector r.
template <class Join> INLINE f32x16 each(const f32x16 *vectors, Join join) {
  f32x16 eight[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 a = (__m512)vectors[i], b = (__m512)vectors[i + 8];
    eight[i] = join((f32x16)_mm512_shuffle_f32x4(a, b, 0x44), (f32x16)_mm512_shuffle_f32x4(a, b, 0xEE));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 a = (__m512)eight[i], b = (__m512)eight[i + 4];
    four[i] = join((f32x16)_mm512_shuffle_f32x4(a, b, 0x88), (f32x16)_mm512_shuffle_f32x4(a, b, 0xDD));
  }
  auto lanes = [&](f32x16 x, f32x16 y, auto first, auto second) {
    return join((f32x16)_mm512_shuffle_ps((__m512)x, (__m512)y, decltype(first)::value),
                (f32x16)_mm512_shuffle_ps((__m512)x, (__m512)y, decltype(second)::value));
  };
  const std::integral_constant<int, 0x44> low;
  const std::integral_constant<int, 0xEE> high;
  const std::integral_constant<int, 0x88> even;
  const std::integral_constant<int, 0xDD> odd;
  const f32x16 all = lanes(lanes(four[0], four[2], low, high), lanes(four[1], four[3], low, high), even, odd);
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return (f32x16)_mm512_permutexvar_ps(order, (__m512)all);
}

// Up to 16 query rows: what they have attended to so far, apart from the values, and their shares of a chunk's values.
struct Group {
  int first, count, seen; // rows; `seen`: blocks of the chunk, from its first on, that any row sees
  f32x16 highest, sum;
  alignas(64) float shrink[LANES];
  alignas(64) Half shares[CHUNK / 2][LANES][2 * LANES]; // of two blocks
};

typedef float Scores[CHUNK][LANES][LANES]; // of blocks, rows, and slots

// Turn the scores of a group into shares, and bring what its rows have attended to so far up to date, as `weigh` does.
template <bool FEW>
INLINE void weigh_rows(Scores scores, const Chunk &chunk, const QueryRows &rows, float cap, Group &group,
                       Ahead<FEW> &ahead) {
  const int seen = group.seen;
  alignas(64) f32x16 each_row[LANES];
  for (int r = group.count; r < LANES; r++)
    each_row[r] = f32x16{};
  const int last = group.first + group.count - 1;
  const bool whole = chunk.whole && rows.first(last) <= chunk.first[0] && rows.end(group.first) >= chunk.end[seen - 1];
  for (int r = 0; r < group.count; r++) {
    for (int i = 0; i < seen && !whole; i++)
      store(scores[i][r],
            chunk.masked(load<f32x16>(scores[i][r]), i, rows.first(group.first + r), rows.end(group.first + r)));
    if (cap != 0.0f)
      keep_within(cap, scores[0][r], seen, LANES);
    ahead.ask_often();
    f32x16 top = splat(UNSEEN);
    for (int i = 0; i < seen; i++)
      top = max16(load<f32x16>(scores[i][r]), top); // in this order, so that NaN is left out
    each_row[r] = top;
  }
  const f32x16 top = each(each_row, [](f32x16 a, f32x16 b) { return max16(a, b); });
  const __m512 whole_top = _mm512_roundscale_ps((__m512)top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  const f32x16 own = (f32x16)_mm512_min_ps(whole_top, _mm512_set1_ps(3.4028235e38f));
  const f32x16 highest = select(top <= UNSEEN, group.highest, max16(group.highest, own));
  // A row that has seen nothing yet has nothing to shrink, and 0 stands in for its highest score.
  const f32x16 base = select(highest == -INFINITY, f32x16{}, highest);
  const f32x16 shrink = (f32x16)_mm512_scalef_ps((__m512)splat(1.0f), (__m512)(group.highest - base));
  alignas(64) int32_t offset[LANES];
  alignas(64) float bases[LANES];
  store(offset, offsets(base)), store(bases, base), store(group.shrink, shrink);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  for (int r = 0; r < group.count; r++) {
    ahead.ask();
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < seen; i += 2) {
      const i32x16 first = logarithms(scores[i][r], bases[r], offset[r]);
      const i32x16 second = i + 1 < seen ? logarithms(scores[i + 1][r], bases[r], offset[r]) : i32x16{};
      const __m512i shares = shares_of(first, second);
      ahead.ask_often();
      sum = _mm512_dpbf16_ps(sum, (__m512bh)shares, ones);
      _mm512_store_si512(group.shares[i / 2][r], shares);
    }
    each_row[r] = (f32x16)sum;
  }
  group.highest = highest;
  group.sum = group.sum * shrink + each(each_row, [](f32x16 a, f32x16 b) { return a + b; });
}

// The scores of a group with up to 4 blocks.
template <bool FEW>
INLINE void score(const char *const *blocks, int count, const Half *queries, int dim, Scores scores,
                  Ahead<FEW> &ahead) {
  written();
  clear();
  for (int d = 0; d < dim; d += BLOCK) {
    const int64_t at = 2 * d * LANES;
    _tile_loadd(4, queries + d, 2 * dim);
    _tile_loadd(6, blocks[0] + at, 64);
    ahead.ask_often();
    _tile_dpbf16ps(0, 4, 6);
    if (count > 1) {
      _tile_loadd(6, blocks[1] + at, 64);
      ahead.ask_often();
      _tile_dpbf16ps(1, 4, 6);
    }
    if (count > 2) {
      _tile_loadd(6, blocks[2] + at, 64);
      ahead.ask_often();
      _tile_dpbf16ps(2, 4, 6);
    }
    if (count > 3) {
      _tile_loadd(6, blocks[3] + at, 64);
      ahead.ask_often();
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, scores[0], 64);
  if (count > 1)
    _tile_stored(1, scores[1], 64);
  if (count > 2)
    _tile_stored(2, scores[2], 64);
  if (count > 3)
    _tile_stored(3, scores[3], 64);
  written();
}

// Add the values of a chunk, weighed by the shares of a group, to what its rows have attended to, unless it is the
// first.
template <bool FEW>
INLINE void add_values(const Group &group, const Chunk &chunk, const QueryRows &rows, bool first, Ahead<FEW> &ahead) {
  const int dim = rows.head_dim, together = chunk.pairs ? 2 : 1;
  alignas(64) float values[4][LANES][LANES];
  for (int d = 0; d < dim; d += 4 * LANES) {
    const bool all = dim - d >= 4 * LANES; // else two tiles of 16
    written();
    clear();
    for (int i = 0; i < group.seen; i += together) {
      const uint16_t *block = chunk.values(i) + 2 * d;
      ahead.ask();
      _tile_loadd(5, &group.shares[i / 2][0][i % 2 * LANES], 64);
      _tile_loadd(7, block, dim * 4);
      ahead.ask_often();
      _tile_dpbf16ps(0, 5, 7);
      ahead.ask_often();
      _tile_loadd(7, block + 2 * LANES, dim * 4);
      ahead.ask_often();
      _tile_dpbf16ps(1, 5, 7);
      ahead.ask_often();
      if (all) {
        _tile_loadd(7, block + 4 * LANES, dim * 4);
        ahead.ask_often();
        _tile_dpbf16ps(2, 5, 7);
        ahead.ask_often();
        _tile_loadd(7, block + 6 * LANES, dim * 4);
        ahead.ask_often();
        _tile_dpbf16ps(3, 5, 7);
        ahead.ask_often();
      }
    }
    _tile_stored(0, values[0], 64);
    _tile_stored(1, values[1], 64);
    if (all) {
      _tile_stored(2, values[2], 64);
      _tile_stored(3, values[3], 64);
    }
    written();
    for (int r = 0; r < group.count; r++) {
      float *to_row = weighted(rows.result(group.first + r)) + d;
      for (int v = 0; v < (all ? 4 : 2); v++) {
        const f32x16 found = load<f32x16>(values[v][r]);
        store(to_row + v * LANES, first ? found : load<f32x16>(to_row + v * LANES) * group.shrink[r] + found);
      }
    }
  }
}

// A chunk in bytes as it would be in bfloat16.
class Unpacked {
public:
  // Have a chunk refer to what it is here.
  void take(Chunk &chunk, const Cache &cache) {
    const int dim = cache.head_dim;
    chunk.to_values = (int64_t)CHUNK * 2 * LANES * dim;
    if (chunk.count % 2) // a tile may have what follows
      memset(blocks_ + (int64_t)(CHUNK + chunk.count) * LANES * dim, 0, 2 * LANES * dim);
    for (int i = 0; i < chunk.count; i++) {
      const char *from = chunk.at[i];
      uint16_t *to = blocks_ + (int64_t)i * LANES * dim;
      chunk.at[i] = (const char *)to;
      for (int d = 0; d < dim; d += 4, from += 64, to += 4 * LANES) { // keys: two pairs of dimensions
        const f32x16 scale = bf16_to_float(cache.scales(from - d * LANES, d / BLOCK));
        unpack(load<u32x16>(from), scale, scale, scale, scale, to, to + 2 * LANES);
      }
      to = blocks_ + (int64_t)(CHUNK + i) * LANES * dim;
      const uint16_t *const scales = cache.scales(from - LANES * dim, cache.parts());
      for (int slot = 0; slot < LANES; slot += 4, to += 2 * dim) { // values: two pairs of slots
        const f32x16 a = splat(float_of(scales[slot])), b = splat(float_of(scales[slot + 1]));
        const f32x16 c = splat(float_of(scales[slot + 2])), d = splat(float_of(scales[slot + 3]));
        for (int k = 0; k < dim; k += LANES, from += 64, to += 2 * LANES)
          unpack(load<u32x16>(from) ^ 0x80808080u, a, b, c, d, to, to + 2 * dim);
      }
    }
  }

private:
  // Quants, 128 too high, in the bytes of each lane, times what each byte is to be multiplied with.
  static void unpack(u32x16 quants, f32x16 a, f32x16 b, f32x16 c, f32x16 d, uint16_t *first, uint16_t *second) {
    // A byte in the mantissa of 1 is 1 + byte / 256. What cutting takes off is added before.
    auto value = [](u32x16 bits, f32x16 scale) {
      const f32x16 unit = scale * (1 + CUT);
      return (__m512)(as<f32x16>((bits & 0x007F8000u) | 0x3F800000u) * (unit * 256.0f) - unit * 384.0f);
    };
    store(first, cut_pair(value(quants << 15, a), value(quants << 7, b)));
    store(second, cut_pair(value(quants >> 1, c), value(quants >> 9, d)));
  }

  alignas(64) uint16_t blocks_[CHUNK * 2 * LANES * 1024];
};

// As `::attend`, for head dimensions that are multiples of 32. A chunk's keys serve for all rows, and then its values,
// so that they stay in the first cache.
template <bool FEW> static void attend(const Span &span, const QueryRows &rows, float cap, const Span *next) {
  const Blocks &blocks = span.blocks;
  alignas(64) Scores scores;
  Unpacked unpacked;
  Group groups[MOST_GROUPS];
  const int count = (rows.count + LANES - 1) / LANES;
  for (int g = 0; g < count; g++) {
    groups[g].first = g * LANES, groups[g].count = std::min(LANES, rows.count - g * LANES);
    groups[g].highest = splat(-INFINITY), groups[g].sum = f32x16{};
  }
  for (int start = span.from, now; start < span.to; start += now) {
    Chunk chunk = blocks.chunk(start, span.to);
    now = chunk.count;
    const Span left = {blocks, start + now, span.to};
    Ahead<FEW> ahead(left.from < left.to ? &left : next);
    if (blocks.cache.bytes)
      unpacked.take(chunk, blocks.cache);
    configure(chunk.pairs ? ATTENTION_TO_PAIRS : ATTENTION, std::min(rows.count, LANES));
    for (int g = 0; g < count; g++) {
      Group &group = groups[g];
      const int end = rows.end(group.first + group.count - 1);
      for (group.seen = now; group.seen > 1 && chunk.first[group.seen - 1] >= end;)
        group.seen--;
      for (int i = 0; i < group.seen; i += 4)
        score(chunk.at + i, group.seen - i, rows.query(group.first), rows.head_dim, scores + i, ahead);
      weigh_rows(scores, chunk, rows, cap, group, ahead);
    }
    for (int g = 0; g < count; g++)
      add_values(groups[g], chunk, rows, start == span.from, ahead);
    ahead.ask_for_the_rest();
  }
  for (const Group *group = groups; group < groups + count; group++) {
    float highest[LANES], sum[LANES];
    store(highest, group->highest), store(sum, group->sum);
    for (int r = 0; r < group->count; r++)
      *rows.result(group->first + r) = {highest[r], sum[r]};
  }
}

} // namespace tiles
