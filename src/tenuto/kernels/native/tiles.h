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

// The halves of 32-bit lanes: two floats rounded to bfloat16, the first in the low half.
INLINE __m512i rounded_pair(__m512 first, __m512 second) {
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32((int)0xFFFF0000u);
  __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(first), half), 16);
  return _mm512_ternarylogic_epi32(_mm512_add_epi32(_mm512_castps_si512(second), half), high, low, 0xEA); // a & b | c
}

// Unpack blocks `from` up to `to` of a quantized panel to bfloat16, in the layout of PAIRS, and prefetch as many from
// `next` on. A quant becomes the float 1 + q / 128 (or 256) by putting its bits into a mantissa; scale and minimum are
// changed to fit.
template <int KIND>
static void unpack_panel(const uint8_t *panel, int blocks, int from, int to, uint8_t *out, const uint8_t *next) {
  constexpr float unit = of_nibbles(KIND) ? 128.0f : 256.0f;
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  const __m512i one = _mm512_set1_epi32(0x3F800000);
  for (int b = from; b < to; b++, out += 1024) {
    for (int i = 0; i < block_bytes(KIND); i += 64, next += 64)
      __builtin_prefetch(next);
    __m512 scale, minimum;
    const __m512i mask = _mm512_set1_epi32(of_nibbles(KIND) ? 0x000F0000 : 0x007F8000);
    auto value = [&](__m512i bits) __attribute__((always_inline)) {
      return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, one, 0xEA)), scale, minimum);
    };
    auto put = [&](int row, __m512 first, __m512 second)
                   __attribute__((always_inline)) { _mm512_store_si512(out + row * 64, rounded_pair(first, second)); };
    const uint8_t *from = panel + (int64_t)b * block_bytes(KIND);
#pragma GCC unroll 8
    for (int j = 0; j < (of_nibbles(KIND) ? 4 : 8); j++) {
      if (j % (8 / scales_a_block(KIND)) == 0) {
        const Scales s = scales_of<KIND>(behind, blocks, b, j / 4);
        scale = (__m512)(s.scale * unit), minimum = (__m512)(s.minimum - s.scale * unit);
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
static void unpack_halves(const uint8_t *panel, int from, int to, uint8_t *out, const uint8_t *next) {
  for (const uint8_t *p = panel + from * 1024; p < panel + to * 1024; p += 64, out += 64, next += 64) {
    __builtin_prefetch(next);
    _mm512_store_si512(out, rounded_pair((__m512)half_to_float(p), (__m512)half_to_float(p + 32)));
  }
}

// Where blocks `from` up to `to` of a panel are as PAIRS: in `out`, unless they are stored so.
static const uint8_t *unpack(const Matrix &w, const uint8_t *panel, int blocks, int from, int to, uint8_t *out,
                             const uint8_t *next) {
  if (w.kind == PAIRS)
    return panel + (int64_t)from * 1024;
  by_kind(w.kind, [&](auto kind) {
    if constexpr (kind == FLOAT16)
      unpack_halves(panel, from, to, out, next);
    else if constexpr (kind != PAIRS && kind != FLOAT32)
      unpack_panel<decltype(kind)::value>(panel, blocks, from, to, out, next);
  });
  return out;
}

// Add the products of up to two tiles of the input, blocks `from` up to `to`, and two panels, unpacked from there on,
// to tiles 0 to 3.
INLINE void multiply(const uint8_t *a, const uint8_t *b, const Input &x, int tile, bool two, int from, int to) {
  const Half *first = x.halves + (int64_t)tile * x.blocks * LANES * BLOCK,
             *second = first + (int64_t)x.blocks * LANES * BLOCK;
  written();
  for (int k = from; k < to; k++, a += 1024, b += 1024) {
    _tile_loadd(4, first + (int64_t)k * LANES * BLOCK, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, second + (int64_t)k * LANES * BLOCK, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  written();
}

INLINE void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Tiles 0 to 3 are the products of `rows` rows and two panels, of which `panels` are wanted, `step` floats apart.
INLINE void put(float *out, int64_t step, int rows, int panels) {
  alignas(64) float whole[2][2 * LANES * LANES];
  _tile_stored(0, whole[0], 64);
  _tile_stored(1, whole[1], 64);
  if (rows > LANES) {
    _tile_stored(2, whole[0] + LANES * LANES, 64);
    _tile_stored(3, whole[1] + LANES * LANES, 64);
  }
  for (int p = 0; p < panels; p++)
    memcpy(out + p * step, whole[p], (size_t)rows * LANES * 4);
}

// As `product`. For a few rows panels are unpacked piece by piece, so that the pieces stay in the first cache; for more
// as a whole, once for all rows.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, float *out,
                    uint8_t *buffer) {
  constexpr int PIECE = 8; // blocks
  const int64_t bytes = block_bytes(w.kind);
  configure(HALVES);
  const int blocks = x.blocks, piece = last - first <= 2 * LANES ? std::min(PIECE, blocks) : blocks;
  const int64_t step = (int64_t)(last - first) * LANES;
  uint8_t *const other = buffer + (int64_t)piece * 1024;
  for (int i = 0; i < count; i += 2, out += 2 * step) {
    const int panels = std::min(2, count - i);
    const uint8_t *a = w.data + (panel + i) * w.stride, *b = panels > 1 ? a + w.stride : a;
    for (int row = first; row < last;) {
      const int rows = std::min(2 * LANES, last - row);
      clear();
      const uint8_t *pair[2];
      for (int from = 0; from < blocks; from += piece) {
        const int to = std::min(blocks, from + piece);
        if (row == first) {
          pair[0] = unpack(w, a, blocks, from, to, buffer, b + from * bytes);
          pair[1] = b == a
                        ? pair[0]
                        : unpack(w, b, blocks, from, to, other, (to < blocks ? a : b + w.stride) + to % blocks * bytes);
        }
        multiply(pair[0], pair[1], x, row / LANES, rows > LANES, from, to);
      }
      put(out + (int64_t)(row - first) * LANES, step, rows, panels);
      row += rows;
    }
  }
}

} // namespace tiles
