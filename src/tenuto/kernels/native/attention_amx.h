// Attention with AMX tiles: groups of 16 query rows.
#pragma once

#include <type_traits>

#include "amx.h"
#include "attention_blocks.h"

namespace amx {

// Prefetches the next chunk, a few cache lines at a time, while the kernel computes attention to this one. It
// prefetches into the L2 cache, so that this chunk stays in L1. With FEW rows memory is the only limit, so it
// prefetches as often as possible.
template <bool FEW> class Prefetcher {
public:
  // Prefetches the blocks of `span` up to the end of a chunk, or nothing if it is null.
  explicit Prefetcher(const Span *span) {
    if (!span)
      return;
    blocks_ = &span->blocks, from_ = to_ = span->from, end_of_chunk_ = Blocks::chunk_end(span->from, span->to);
    next_run();
  }
  __attribute__((always_inline)) void prefetch() {
    if (!at_)
      return;
#pragma GCC unroll 8
    for (int i = 0; i < LINES; i++) // in an INT8 cache this may go beyond the end
      __builtin_prefetch(at_ + 64 * i, 0, 2);
    at_ += 64 * LINES;
    if (at_ >= end_)
      next_run();
  }
  __attribute__((always_inline)) void prefetch_if_few() {
    if (FEW)
      prefetch();
  }
  void finish() {
    while (at_)
      prefetch();
  }

private:
  static constexpr int LINES = FEW ? 8 : 4;

  // Continues with the next contiguous range of memory: blocks of one page.
  __attribute__((noinline)) void next_run() {
    const Cache &cache = blocks_->cache;
    values_ = !values_ && from_ < to_ && cache.values_apart();
    if (!values_)
      from_ = to_, to_ = std::min(from_ / cache.blocks * cache.blocks + cache.blocks, end_of_chunk_);
    at_ = from_ < to_ ? blocks_->at(from_) + (values_ ? cache.to_values() : 0) : nullptr;
    end_ = at_ + (to_ - from_) * cache.run_bytes();
  }

  const Blocks *blocks_;
  const char *at_ = nullptr, *end_; // null when all is prefetched
  int from_, to_;                   // blocks of one page: their keys, or `values_`, are next
  int end_of_chunk_;
  bool values_ = false;
};

// Softmax weights are 2^(score - base), with score - base rounded to 128ths, as bfloat16: a table gives the mantissa
// for the fraction, and the whole part is the exponent, or the weight is 0 below -126. The error is as large as that of
// rounding to bfloat16.
struct Mantissas {
  alignas(64) uint8_t of[128]; // 128 (2^(i / 128) - 1)

  Mantissas() {
    for (int i = 0; i < 128; i++)
      of[i] = (uint8_t)lrintf(128.0f * (exp2f((float)i / 128.0f) - 1.0f));
  }
};
static const Mantissas mantissas;

// Returns the number to subtract from scores in 128ths, so that their integer parts are the exponents of floats.
INLINE i32x16 offsets(f32x16 base) { return nearest((base - 127.0f) * 128.0f); }
// Returns the logarithms of softmax weights in 128ths, plus 127 * 128.
INLINE i32x16 logarithms(const float *scores, float base, int offset) {
  const f32x16 score = load<f32x16>(scores);
  if (fabsf(base) < LARGE)
    return nearest(max16(score * 128.0f, splat(-0x1p30f))) - offset;
  return nearest(max16(-max16(f32x16{}, base - score), splat(-127.0f)) * 128.0f) + 127 * 128; // see `power_below`
}

// Returns 32 softmax weights for two vectors of their logarithms.
INLINE __m512i weights_of(i32x16 first, i32x16 second) {
  const __m512i order =
      _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); // the pack instruction works on each quarter by itself
  const __m512i x = _mm512_permutexvar_epi64(order, _mm512_packus_epi32((__m512i)first, (__m512i)second));
  const __m512i low = _mm512_load_si512(mantissas.of), high = _mm512_load_si512(mantissas.of + 64);
  const __m512i mantissa = _mm512_permutex2var_epi8(low, x, high);
  return _mm512_ternarylogic_epi32(x, mantissa, _mm512_set1_epi16(0x7F), 0xD8); // mantissa where the mask has ones
}

// Reduces each of 16 vectors by `join`: lane r is the result for vector r.
template <class Join> INLINE f32x16 reduce_each(const f32x16 *vectors, Join join) {
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

// Up to 16 query rows: their running results, except the values, and their softmax weights for a chunk.
struct Group {
  int first, count, seen; // the rows; `seen`: the number of leading blocks of the chunk that any row attends to
  f32x16 max_score, sum;
  alignas(64) float correction[LANES];
  alignas(64) PairElement weights[CHUNK / 2][LANES][2 * LANES]; // of two blocks
};

typedef float Scores[CHUNK][LANES][LANES]; // of blocks, rows, and slots

// Computes a group's softmax weights from its scores, and updates its running results, as `softmax_chunk` does.
template <bool FEW>
INLINE void softmax_rows(Scores scores, const Chunk &chunk, const QueryRows &rows, float cap, Group &group,
                         Prefetcher<FEW> &prefetcher) {
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
      soft_cap(cap, scores[0][r], seen, LANES);
    prefetcher.prefetch_if_few();
    f32x16 top = splat(MASKED);
    for (int i = 0; i < seen; i++)
      top = max16(load<f32x16>(scores[i][r]), top); // in this order, so that NaN is ignored
    each_row[r] = top;
  }
  const f32x16 top = reduce_each(each_row, [](f32x16 a, f32x16 b) { return max16(a, b); });
  const __m512 whole_top = _mm512_roundscale_ps((__m512)top, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  const f32x16 own = (f32x16)_mm512_min_ps(whole_top, _mm512_set1_ps(3.4028235e38f));
  const f32x16 max_score = select(top <= MASKED, group.max_score, max16(group.max_score, own));
  // 0 stands in for the highest score of a row whose keys have all been masked: it has no values to correct.
  const f32x16 base = select(max_score == -INFINITY, f32x16{}, max_score);
  const f32x16 correction = (f32x16)_mm512_scalef_ps((__m512)splat(1.0f), (__m512)(group.max_score - base));
  alignas(64) int32_t offset[LANES];
  alignas(64) float bases[LANES];
  store(offset, offsets(base)), store(bases, base), store(group.correction, correction);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
  for (int r = 0; r < group.count; r++) {
    prefetcher.prefetch();
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < seen; i += 2) {
      const i32x16 first = logarithms(scores[i][r], bases[r], offset[r]);
      const i32x16 second = i + 1 < seen ? logarithms(scores[i + 1][r], bases[r], offset[r]) : i32x16{};
      const __m512i weights = weights_of(first, second);
      prefetcher.prefetch_if_few();
      sum = _mm512_dpbf16_ps(sum, (__m512bh)weights, ones);
      _mm512_store_si512(group.weights[i / 2][r], weights);
    }
    each_row[r] = (f32x16)sum;
  }
  group.max_score = max_score;
  group.sum = group.sum * correction + reduce_each(each_row, [](f32x16 a, f32x16 b) { return a + b; });
}

// Computes the scores of a group with up to 4 blocks.
template <bool FEW>
INLINE void score(const char *const *blocks, int count, const PairElement *queries, int dim, Scores scores,
                  Prefetcher<FEW> &prefetcher) {
  compiler_barrier();
  clear();
  for (int d = 0; d < dim; d += BLOCK) {
    const int64_t at = 2 * d * LANES;
    _tile_loadd(4, queries + d, 2 * dim);
    _tile_loadd(6, blocks[0] + at, 64);
    prefetcher.prefetch_if_few();
    _tile_dpbf16ps(0, 4, 6);
    if (count > 1) {
      _tile_loadd(6, blocks[1] + at, 64);
      prefetcher.prefetch_if_few();
      _tile_dpbf16ps(1, 4, 6);
    }
    if (count > 2) {
      _tile_loadd(6, blocks[2] + at, 64);
      prefetcher.prefetch_if_few();
      _tile_dpbf16ps(2, 4, 6);
    }
    if (count > 3) {
      _tile_loadd(6, blocks[3] + at, 64);
      prefetcher.prefetch_if_few();
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
  compiler_barrier();
}

// Adds the values of a chunk, times a group's softmax weights, to the results of its rows; the first chunk replaces
// them.
template <bool FEW>
INLINE void add_values(const Group &group, const Chunk &chunk, const QueryRows &rows, bool first,
                       Prefetcher<FEW> &prefetcher) {
  const int dim = rows.head_dim, together = chunk.pairs ? 2 : 1;
  alignas(64) float values[4][LANES][LANES];
  for (int d = 0; d < dim; d += 4 * LANES) {
    const bool all = dim - d >= 4 * LANES; // four tiles of 16 dimensions, or else two
    compiler_barrier();
    clear();
    for (int i = 0; i < group.seen; i += together) {
      const uint16_t *block = (const uint16_t *)chunk.values(i) + 2 * d;
      prefetcher.prefetch();
      _tile_loadd(5, &group.weights[i / 2][0][i % 2 * LANES], 64);
      _tile_loadd(7, block, dim * 4);
      prefetcher.prefetch_if_few();
      _tile_dpbf16ps(0, 5, 7);
      prefetcher.prefetch_if_few();
      _tile_loadd(7, block + 2 * LANES, dim * 4);
      prefetcher.prefetch_if_few();
      _tile_dpbf16ps(1, 5, 7);
      prefetcher.prefetch_if_few();
      if (all) {
        _tile_loadd(7, block + 4 * LANES, dim * 4);
        prefetcher.prefetch_if_few();
        _tile_dpbf16ps(2, 5, 7);
        prefetcher.prefetch_if_few();
        _tile_loadd(7, block + 6 * LANES, dim * 4);
        prefetcher.prefetch_if_few();
        _tile_dpbf16ps(3, 5, 7);
        prefetcher.prefetch_if_few();
      }
    }
    _tile_stored(0, values[0], 64);
    _tile_stored(1, values[1], 64);
    if (all) {
      _tile_stored(2, values[2], 64);
      _tile_stored(3, values[3], 64);
    }
    compiler_barrier();
    for (int r = 0; r < group.count; r++) {
      float *to_row = weighted_values(rows.result(group.first + r)) + d;
      for (int v = 0; v < (all ? 4 : 2); v++) {
        const f32x16 found = load<f32x16>(values[v][r]);
        store(to_row + v * LANES, first ? found : load<f32x16>(to_row + v * LANES) * group.correction[r] + found);
      }
    }
  }
}

// A chunk of an INT8 cache, unpacked to the layout of `KvBf16`.
class Unpacked {
public:
  // Unpacks a chunk, and makes it point here.
  void unpack_chunk(Chunk &chunk, const Cache &cache) {
    const int dim = cache.head_dim;
    chunk.to_values = (int64_t)CHUNK * 2 * LANES * dim;
    if (chunk.count % 2) // a tile may also load the next block
      memset(blocks_ + (int64_t)(CHUNK + chunk.count) * LANES * dim, 0, 2 * LANES * dim);
    for (int i = 0; i < chunk.count; i++) {
      const char *from = chunk.at[i];
      uint16_t *to = blocks_ + (int64_t)i * LANES * dim;
      chunk.at[i] = (const char *)to;
      for (int d = 0; d < dim; d += 4, from += 64, to += 4 * LANES) { // keys: two pairs of dimensions
        const f32x16 scale = bf16_to_float(KvInt8::scales(cache, from - d * LANES, d / BLOCK));
        unpack(load<u32x16>(from), scale, scale, scale, scale, to, to + 2 * LANES);
      }
      to = blocks_ + (int64_t)(CHUNK + i) * LANES * dim;
      const uint16_t *const scales = KvInt8::scales(cache, from - LANES * dim, KvInt8::parts(cache));
      for (int slot = 0; slot < LANES; slot += 4, to += 2 * dim) { // values: two pairs of slots
        const f32x16 a = splat(float_of(scales[slot])), b = splat(float_of(scales[slot + 1]));
        const f32x16 c = splat(float_of(scales[slot + 2])), d = splat(float_of(scales[slot + 3]));
        for (int k = 0; k < dim; k += LANES, from += 64, to += 2 * LANES)
          unpack(load<u32x16>(from) ^ 0x80808080u, a, b, c, d, to, to + 2 * dim);
      }
    }
  }

private:
  // Unpacks quants plus 128, in the bytes of each lane, with a scale for each byte.
  static void unpack(u32x16 quants, f32x16 a, f32x16 b, f32x16 c, f32x16 d, uint16_t *first, uint16_t *second) {
    // A byte in the mantissa of 1 is 1 + byte / 256. The average error of truncation is added before it.
    auto value = [](u32x16 bits, f32x16 scale) {
      const f32x16 unit = scale * (1 + TRUNCATION);
      return (__m512)(as<f32x16>((bits & 0x007F8000u) | 0x3F800000u) * (unit * 256.0f) - unit * 384.0f);
    };
    store(first, truncated_pair(value(quants << 15, a), value(quants << 7, b)));
    store(second, truncated_pair(value(quants >> 1, c), value(quants >> 9, d)));
  }

  alignas(64) uint16_t blocks_[CHUNK * 2 * LANES * 1024];
};

// Does what `::attend` does, for head dimensions that are multiples of 32. All rows use a chunk's keys, and then its
// values, so that these stay in the L1 cache.
template <bool FEW> static void attend(const Span &span, const QueryRows &rows, float cap, const Span *next) {
  const Blocks &blocks = span.blocks;
  alignas(64) Scores scores;
  Unpacked unpacked;
  Group groups[MAX_GROUPS];
  const int count = (rows.count + LANES - 1) / LANES;
  for (int g = 0; g < count; g++) {
    groups[g].first = g * LANES, groups[g].count = std::min(LANES, rows.count - g * LANES);
    groups[g].max_score = splat(-INFINITY), groups[g].sum = f32x16{};
  }
  for (int start = span.from, now; start < span.to; start += now) {
    Chunk chunk = blocks.chunk(start, span.to);
    now = chunk.count;
    const Span left = {blocks, start + now, span.to};
    Prefetcher<FEW> prefetcher(left.from < left.to ? &left : next);
    if (blocks.cache.type != KvType::BF16)
      unpacked.unpack_chunk(chunk, blocks.cache);
    configure(chunk.pairs ? ATTENTION_TO_PAIRS : ATTENTION, std::min(rows.count, LANES));
    for (int g = 0; g < count; g++) {
      Group &group = groups[g];
      const int end = rows.end(group.first + group.count - 1);
      for (group.seen = now; group.seen > 1 && chunk.first[group.seen - 1] >= end;)
        group.seen--;
      for (int i = 0; i < group.seen; i += 4)
        score(chunk.at + i, group.seen - i, rows.query(group.first), rows.head_dim, scores + i, prefetcher);
      softmax_rows(scores, chunk, rows, cap, group, prefetcher);
    }
    for (int g = 0; g < count; g++)
      add_values(groups[g], chunk, rows, start == span.from, prefetcher);
    prefetcher.finish();
  }
  for (const Group *group = groups; group < groups + count; group++) {
    float max_score[LANES], sum[LANES];
    store(max_score, group->max_score), store(sum, group->sum);
    for (int r = 0; r < group->count; r++)
      *rows.result(group->first + r) = {max_score[r], sum[r]};
  }
}

} // namespace amx
