// Products by tiles (AMX), of bfloat16: quantized weights are unpacked first. For a few rows that takes longer than
// it saves, and `form_for` leaves those to the other products. A tile of inputs is 16 rows, one of weights 16
// outputs.
namespace tiles {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tile loads are not declared as reading memory: stores before this are done, and those after it are not.
INLINE void written() { asm volatile("" : : : "memory"); }

// What the tiles are for: products, or attention of some query rows.
enum Layout { NONE, HALVES, ATTENTION };
static thread_local Layout configured = NONE;
static thread_local int configured_rows = 0;

static void configure(Layout layout, int query_rows = 0) {
  if (configured == layout && configured_rows == query_rows)
    return;
  Config config;
  for (int t = 0; t < 8; t++)
    config.rows[t] = 16, config.row_bytes[t] = 64;
  if (layout == ATTENTION) {
    for (int t = 0; t < 6; t++)
      config.rows[t] = query_rows; // results, queries, shares
    config.row_bytes[5] = 32;      // shares of 16 token slots
    config.rows[7] = 8;            // values: 8 pairs of slots
  }
  // The intrinsic is declared as reading 8 bytes; without this the stores above may be dropped.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  configured = layout, configured_rows = query_rows;
}

static void release() {
  if (configured != NONE)
    _tile_release();
  configured = NONE;
}

// What cutting a float to bfloat16 takes off on average: half of the last place, 2^-8 / m of 1 <= m < 2 times a power
// of two, with m spread evenly on a logarithmic scale.
constexpr float CUT = 0.7213475f / 256.0f;

// The halves of 32-bit lanes: two floats cut to bfloat16, the first in the low half.
INLINE __m512i cut_pair(__m512 first, __m512 second) {
  const __m512i high = _mm512_set1_epi32((int)0xFFFF0000u), low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  return _mm512_ternarylogic_epi32(_mm512_castps_si512(second), high, low, 0xEA); // a & b | c
}

// Unpack blocks `from` up to `to` of a quantized panel to bfloat16, in the layout of PAIRS, and prefetch as many of
// what follows. A quant becomes the float 1 + q / 128 (or 256) by putting its bits into a mantissa; scale and minimum
// are changed to fit.
template <int KIND> static void unpack_panel(const uint8_t *panel, int blocks, int from, int to, uint8_t *out) {
  constexpr float unit = of_nibbles(KIND) ? 128.0f : 256.0f;
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  const uint8_t *ahead = panel + PREFETCHED + (int64_t)from * (block_bytes(KIND) + 64);
  const __m512i one = _mm512_set1_epi32(0x3F800000);
  for (int b = from; b < to; b++, out += 1024) {
    for (int i = 0; i < block_bytes(KIND) + 64; i += 64, ahead += 64)
      __builtin_prefetch(ahead, 0, 2);
    __m512 scale, minimum;
    const __m512i mask = _mm512_set1_epi32(of_nibbles(KIND) ? 0x000F0000 : 0x007F8000);
    auto value = [&](__m512i bits) __attribute__((always_inline)) {
      return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, one, 0xEA)), scale, minimum);
    };
    auto put = [&](int row, __m512 first, __m512 second)
                   __attribute__((always_inline)) { _mm512_store_si512(out + row * 64, cut_pair(first, second)); };
    const uint8_t *from = panel + (int64_t)b * block_bytes(KIND);
#pragma GCC unroll 8
    for (int j = 0; j < (of_nibbles(KIND) ? 4 : 8); j++) {
      if (j % (8 / scales_a_block(KIND)) == 0) {
        const Scales s = scales_of<KIND>(behind, blocks, b, j / 4);
        scale = (__m512)(s.scale * (unit * (1 + CUT)));
        minimum = (__m512)((s.minimum - s.scale * unit) * (1 + CUT));
      }
      const __m512i x = of_nibbles(KIND) ? _mm512_loadu_si512(from + 64 * j) : (__m512i)quads<KIND>(from, j);
      if (of_nibbles(KIND)) {
        put(2 * j, value(_mm512_slli_epi32(x, 16)), value(_mm512_slli_epi32(x, 8)));
        put(2 * j + 1, value(x), value(_mm512_srli_epi32(x, 8)));
        put(2 * j + 8, value(_mm512_slli_epi32(x, 12)), value(_mm512_slli_epi32(x, 4)));
        put(2 * j + 9, value(_mm512_srli_epi32(x, 4)), value(_mm512_srli_epi32(x, 12)));
      } else {
        put(2 * j, value(_mm512_slli_epi32(x, 15)), value(_mm512_slli_epi32(x, 7)));
        put(2 * j + 1, value(_mm512_srli_epi32(x, 1)), value(_mm512_srli_epi32(x, 9)));
      }
    }
  }
}

// The same with a panel of FLOAT16.
static void unpack_halves(const uint8_t *panel, int from, int to, uint8_t *out) {
  for (const uint8_t *p = panel + from * 1024; p < panel + to * 1024; p += 64, out += 64) {
    __builtin_prefetch(p + PREFETCHED, 0, 2);
    _mm512_store_si512(out,
                       cut_pair((__m512)(half_to_float(p) * (1 + CUT)), (__m512)(half_to_float(p + 32) * (1 + CUT))));
  }
}

// Where blocks `from` up to `to` of a panel are as PAIRS: in `out`, unless they are stored so.
static const uint8_t *unpack(const Matrix &w, const uint8_t *panel, int blocks, int from, int to, uint8_t *out) {
  if (w.kind == PAIRS)
    return panel + (int64_t)from * 1024;
  by_kind(w.kind, [&](auto kind) {
    if constexpr (kind == FLOAT16)
      unpack_halves(panel, from, to, out);
    else if constexpr (kind != PAIRS && kind != FLOAT32)
      unpack_panel<decltype(kind)::value>(panel, blocks, from, to, out);
  });
  return out;
}

// Tiles 0 to 3 are the products of two tiles of the input, one after the other, and the panels `a` and `b`.
enum Tile { FIRST_A = 0, FIRST_B = 1, SECOND_A = 2, SECOND_B = 3 };

INLINE void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Add to them blocks `from` up to `to`; `a` and `b` are unpacked from there on. With many rows, those are not to push
// the panels out of the first cache.
template <bool MANY>
INLINE void multiply(const uint8_t *a, const uint8_t *b, const Input &x, int tile, bool two, int from, int to) {
  const Half *first = x.halves + (int64_t)tile * x.blocks * LANES * BLOCK,
             *second = first + (int64_t)x.blocks * LANES * BLOCK;
  written();
  for (int k = from; k < to; k++, a += 1024, b += 1024) {
    if (MANY)
      _tile_stream_loadd(4, first + (int64_t)k * LANES * BLOCK, 64);
    else
      _tile_loadd(4, first + (int64_t)k * LANES * BLOCK, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      if (MANY)
        _tile_stream_loadd(5, second + (int64_t)k * LANES * BLOCK, 64);
      else
        _tile_loadd(5, second + (int64_t)k * LANES * BLOCK, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  written();
}

template <int TILE> INLINE void load_tile(const float *from, int64_t step) {
  if constexpr (TILE == FIRST_A)
    _tile_loadd(0, from, 4 * step);
  else if constexpr (TILE == FIRST_B)
    _tile_loadd(1, from, 4 * step);
  else if constexpr (TILE == SECOND_A)
    _tile_loadd(2, from, 4 * step);
  else
    _tile_loadd(3, from, 4 * step);
}
template <int TILE> INLINE void store_tile(float *to, int64_t step) {
  if constexpr (TILE == FIRST_A)
    _tile_stored(0, to, 4 * step);
  else if constexpr (TILE == FIRST_B)
    _tile_stored(1, to, 4 * step);
  else if constexpr (TILE == SECOND_A)
    _tile_stored(2, to, 4 * step);
  else
    _tile_stored(3, to, 4 * step);
}

// Where products go: of row r and the nth of the panels, 16 floats at data + r * row + n * panel.
struct Target {
  float *data;
  int64_t row, panel;
};

// The products of `rows` rows, if it is not more than 16, that `TILE` holds.
template <int TILE> INLINE void put(float *out, int64_t step, int rows) {
  if (rows >= LANES)
    return store_tile<TILE>(out, step);
  alignas(64) float whole[LANES * LANES];
  store_tile<TILE>(whole, LANES);
  for (int r = 0; r < rows; r++)
    memcpy(out + r * step, whole + r * LANES, 4 * LANES);
}
template <int TILE> INLINE void take(const float *out, int64_t step, int rows) {
  if (rows >= LANES)
    return load_tile<TILE>(out, step);
  alignas(64) float whole[LANES * LANES] = {};
  for (int r = 0; r < rows; r++)
    memcpy(whole + r * LANES, out + r * step, 4 * LANES);
  written();
  load_tile<TILE>(whole, LANES);
}

// Up to two panels from `panel` on, as `::product`, piece by piece, so that what is unpacked stays in the first cache.
// Unless there are `MANY` rows, all are computed together. They may be `added` to what is there.
template <bool MANY>
static void two_panels(const Matrix &w, int panel, bool both, const Input &x, int first, int last, const Target &target,
                       bool added, uint8_t *buffer) {
  const int blocks = x.blocks, most = MANY ? 20 : 8, pieces = (blocks + most - 1) / most;
  const int piece = (blocks + pieces - 1) / pieces;
  const uint8_t *a = w.data + panel * w.stride, *b = a + w.stride;
  const int64_t step = target.row;
  for (int from = 0; from < blocks; from += piece) {
    const int to = std::min(blocks, from + piece);
    const uint8_t *piece_a = unpack(w, a, blocks, from, to, buffer);
    const uint8_t *piece_b = both ? unpack(w, b, blocks, from, to, buffer + piece * 1024) : piece_a;
    for (int row = first; row < last; row += 2 * LANES) {
      const int rows = last - row, behind = rows - LANES;
      float *const to_a = target.data + (row - first) * step, *const to_b = to_a + target.panel;
      if (from == 0 && !added) {
        clear();
      } else if (from == 0 || MANY) {
        take<FIRST_A>(to_a, step, rows);
        if (both)
          take<FIRST_B>(to_b, step, rows);
        if (behind > 0)
          take<SECOND_A>(to_a + LANES * step, step, behind);
        if (behind > 0 && both)
          take<SECOND_B>(to_b + LANES * step, step, behind);
      }
      multiply<MANY>(piece_a, piece_b, x, row / LANES, behind > 0, from, to);
      if (to < blocks && !MANY)
        continue;
      put<FIRST_A>(to_a, step, rows);
      if (both)
        put<FIRST_B>(to_b, step, rows);
      if (behind > 0)
        put<SECOND_A>(to_a + LANES * step, step, behind);
      if (behind > 0 && both)
        put<SECOND_B>(to_b + LANES * step, step, behind);
    }
  }
}

// As `::product`, to `target`, or added to what is there.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, Target target,
                    bool added, uint8_t *buffer) {
  configure(HALVES);
  for (int i = 0; i < count; i += 2, target.data += 2 * target.panel) {
    if (last - first > 2 * LANES)
      two_panels<true>(w, panel + i, count - i > 1, x, first, last, target, added, buffer);
    else
      two_panels<false>(w, panel + i, count - i > 1, x, first, last, target, added, buffer);
  }
}

} // namespace tiles
