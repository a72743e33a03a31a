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

// What the tiles are for: products, or attention of some query rows, to the values of blocks or of pairs of blocks.
enum Layout { NONE, HALVES, ATTENTION, ATTENTION_TO_PAIRS };
static thread_local Layout configured = NONE;
static thread_local int configured_rows = 0;

static void configure(Layout layout, int query_rows = 0) {
  if (configured == layout && configured_rows == query_rows)
    return;
  Config config;
  for (int t = 0; t < 8; t++)
    config.rows[t] = 16, config.row_bytes[t] = 64;
  if (layout >= ATTENTION)
    for (int t = 0; t < 6; t++)
      config.rows[t] = query_rows; // results, queries, shares
  if (layout == ATTENTION) {
    config.row_bytes[5] = 32; // shares of 16 token slots
    config.rows[7] = 8;       // values: 8 pairs of slots
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

// Two floats of each lane cut to bfloat16, the first in the low half.
INLINE __m512i cut_pair(__m512 first, __m512 second) {
  const __m512i low = _mm512_castps_si512(first);
  return _mm512_mask_alignr_epi8(_mm512_castps_si512(second), 0x3333333333333333u, low, low, 2);
}

// Unpack block `b` of a quantized panel to bfloat16, in the layout of PAIRS, and prefetch as much of what follows. A
// quant becomes the float 1 + q / 2^n by masking its bits where they are, if that is in a mantissa; scale and minimum
// are changed to fit. For a while after a tile instruction multiplications, as shifts always, have but one port, and so
// there are few shifts. `between` is called with 0, 1, 2 and 3 as a quarter is done.
template <int KIND, class Use>
INLINE void unpack_quants(const uint8_t *panel, int blocks, int b, uint8_t *out, Use between) {
  constexpr int BYTES_A_BLOCK = block_bytes(KIND);
  const uint8_t *block = panel + (int64_t)b * BYTES_A_BLOCK, *behind = panel + (int64_t)blocks * BYTES_A_BLOCK;
  const uint8_t *ahead = panel + PREFETCHED + (int64_t)b * (BYTES_A_BLOCK + 64);
#pragma GCC unroll 16
  for (int i = 0; i < BYTES_A_BLOCK + 64; i += 64)
    __builtin_prefetch(ahead + i, 0, 2);
  struct Line { // of quants whose lowest bit has some number
    f32x16 scale, minimum;
  };
  auto line = [](Scales s, int bit) __attribute__((always_inline)) {
    const f32x16 scale = s.scale * (1 + CUT) * (float)(1 << (23 - bit));
    return Line{scale, s.minimum * (1 + CUT) - scale};
  };
  auto value = [](__m512i bits, int bit, const Line &line) __attribute__((always_inline)) {
    const __m512i one = _mm512_set1_epi32(0x3F800000), mask = _mm512_set1_epi32(((1 << bits_of(KIND)) - 1) << bit);
    const __m512 x = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, one, 0xEA)); // bits & mask | one
    return _mm512_fmadd_ps(x, (__m512)line.scale, (__m512)line.minimum);
  };
  auto put = [&](int row, __m512 first, __m512 second)
                 __attribute__((always_inline)) { _mm512_store_si512(out + row * 64, cut_pair(first, second)); };
  if constexpr (of_nibbles(KIND)) {
    const Scales s = scales_of<KIND>(behind, blocks, b);
    const Line at8 = line(s, 8), at12 = line(s, 12), at16 = line(s, 16);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512i x = _mm512_loadu_si512(block + 64 * j), up = _mm512_slli_epi32(x, 12),
                    down = _mm512_srli_epi32(x, 12);
      put(2 * j, value(up, 12, at12), value(x, 8, at8));
      put(2 * j + 1, value(x, 16, at16), value(down, 12, at12));
      put(2 * j + 8, value(up, 16, at16), value(x, 12, at12));
      put(2 * j + 9, value(down, 8, at8), value(down, 16, at16));
      between(j);
    }
  } else {
    constexpr int PARTS = scales_a_block(KIND);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      const Scales s = scales_of<KIND>(behind, blocks, b, part);
      const Line at7 = line(s, 7), at15 = line(s, 15);
#pragma GCC unroll 8
      for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j++) {
        const __m512i x = (__m512i)quads<KIND>(block, j), up = _mm512_slli_epi32(x, 7), down = _mm512_srli_epi32(x, 9);
        put(2 * j, value(up, 7, at7), value(up, 15, at15));
        put(2 * j + 1, value(down, 7, at7), value(down, 15, at15));
        if (j % 2)
          between(j / 2);
      }
    }
  }
}

// Where block `b` of a panel is as PAIRS: in `out`, unless it is stored so. `between` as above.
template <int KIND, class Use>
INLINE const uint8_t *unpack(const uint8_t *panel, int blocks, int b, uint8_t *out, Use between) {
  const uint8_t *block = panel + (int64_t)b * block_bytes(KIND);
  if constexpr (KIND == PAIRS || KIND == FLOAT16) {
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
      for (int i = 256 * quarter; i < 256 * (quarter + 1); i += 64) {
        __builtin_prefetch(block + PREFETCHED + i, 0, 2);
        if (KIND == FLOAT16)
          _mm512_store_si512(out + i, cut_pair((__m512)(half_to_float(block + i) * (1 + CUT)),
                                               (__m512)(half_to_float(block + i + 32) * (1 + CUT))));
      }
      between(quarter);
    }
  } else if constexpr (KIND != FLOAT32) {
    unpack_quants<KIND>(panel, blocks, b, out, between);
  }
  return KIND == PAIRS ? block : out;
}

// Tiles 0 to 3 are the products of two tiles of the input, one after the other, and the panels `a` and `b`.
enum Tile { FIRST_A = 0, FIRST_B = 1, SECOND_A = 2, SECOND_B = 3 };

INLINE void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Add to them block `k` of two tiles of `x` from `tile` on, or with not `two` one, times unpacked blocks. Of the eight
// parts this has, those `from` up to `to`. With many rows, those are not to push the panels out of the first cache.
template <bool MANY>
INLINE void multiply(const uint8_t *a, const uint8_t *b, const Input &x, int tile, bool two, int k, int from, int to) {
  const Half *first = x.halves + ((int64_t)tile * x.blocks + k) * LANES * BLOCK,
             *second = first + (int64_t)x.blocks * LANES * BLOCK;
#pragma GCC unroll 8
  for (int part = from; part < to; part++) {
    if (part == 0 && MANY)
      _tile_stream_loadd(4, first, 64);
    if (part == 0 && !MANY)
      _tile_loadd(4, first, 64);
    if (part == 1)
      _tile_loadd(6, a, 64);
    if (part == 2)
      _tile_dpbf16ps(0, 4, 6);
    if (part == 3 && two && MANY)
      _tile_stream_loadd(5, second, 64);
    if (part == 3 && two && !MANY)
      _tile_loadd(5, second, 64);
    if (part == 4 && two)
      _tile_dpbf16ps(2, 5, 6);
    if (part == 5)
      _tile_loadd(7, b, 64);
    if (part == 6)
      _tile_dpbf16ps(1, 4, 7);
    if (part == 7 && two)
      _tile_dpbf16ps(3, 5, 7);
  }
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

// The products of two tiles of rows and two panels, or fewer: `rows`, and with `both` the second panel.
struct Corner {
  float *data; // of the first row and panel
  int64_t row, panel;
  int rows;
  bool both;

  void begin() const {
    take<FIRST_A>(data, row, rows);
    if (both)
      take<FIRST_B>(data + panel, row, rows);
    if (rows > LANES)
      take<SECOND_A>(data + LANES * row, row, rows - LANES);
    if (rows > LANES && both)
      take<SECOND_B>(data + LANES * row + panel, row, rows - LANES);
  }
  void end() const {
    put<FIRST_A>(data, row, rows);
    if (both)
      put<FIRST_B>(data + panel, row, rows);
    if (rows > LANES)
      put<SECOND_A>(data + LANES * row, row, rows - LANES);
    if (rows > LANES && both)
      put<SECOND_B>(data + LANES * row + panel, row, rows - LANES);
  }
};

// The products of up to two panels, of which `b` is null if there is no second, and up to 32 rows. A block is
// multiplied while the next one is unpacked, whose vector instructions run beside those of tiles if the two are well
// mixed.
template <int KIND>
static void few_rows(const uint8_t *a, const uint8_t *b, const Input &x, int first, int last, const Target &target,
                     bool added, uint8_t *buffer) {
  const Corner corner = {target.data, target.row, target.panel, last - first, b != nullptr};
  const bool two = last - first > LANES;
  const int tile = first / LANES;
  if (added)
    corner.begin();
  else
    clear();
  const uint8_t *done_a = nullptr, *done_b = nullptr; // the block before
  for (int k = 0; k < x.blocks; k++) {
    auto half = [&](const uint8_t *panel, int slot, int part) __attribute__((always_inline)) {
      return unpack<KIND>(panel, x.blocks, k, buffer + (k % 2 * 2 + slot) * 1024,
                          [&](int quarter) __attribute__((always_inline)) {
                            if (k > 0)
                              multiply<false>(done_a, done_b, x, tile, two, k - 1, part + quarter, part + quarter + 1);
                          });
    };
    const uint8_t *now_a = half(a, 0, 0), *now_b = now_a;
    if (b)
      now_b = half(b, 1, 4);
    else if (k > 0)
      multiply<false>(done_a, done_b, x, tile, two, k - 1, 4, 8);
    done_a = now_a, done_b = now_b;
    written();
  }
  multiply<false>(done_a, done_b, x, tile, two, x.blocks - 1, 0, 8);
  corner.end();
}

// The same for many rows, piece by piece, so that what is unpacked stays in the first cache.
template <int KIND>
static void many_rows(const uint8_t *a, const uint8_t *b, const Input &x, int first, int last, const Target &target,
                      bool added, uint8_t *buffer) {
  const int blocks = x.blocks, pieces = (blocks + 19) / 20, piece = (blocks + pieces - 1) / pieces;
  for (int from = 0; from < blocks; from += piece) {
    const int to = std::min(blocks, from + piece);
    const uint8_t *of_a = KIND == PAIRS ? a + (int64_t)from * 1024 : buffer, *of_b = of_a;
    for (int k = from; k < to && KIND != PAIRS; k++)
      unpack<KIND>(a, blocks, k, buffer + (k - from) * 1024, [](int) {});
    if (b)
      of_b = KIND == PAIRS ? b + (int64_t)from * 1024 : buffer + piece * 1024;
    for (int k = from; k < to && b && KIND != PAIRS; k++)
      unpack<KIND>(b, blocks, k, buffer + (piece + k - from) * 1024, [](int) {});
    written();
    for (int row = first; row < last; row += 2 * LANES) {
      const Corner corner = {target.data + (row - first) * target.row, target.row, target.panel, last - row,
                             b != nullptr};
      if (from > 0 || added)
        corner.begin();
      else
        clear();
      for (int k = from; k < to; k++)
        multiply<true>(of_a + (k - from) * 1024, of_b + (k - from) * 1024, x, row / LANES, last - row > LANES, k, 0, 8);
      corner.end();
      written();
    }
  }
}

// As `::product`, to `target`, or added to what is there.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, Target target,
                    bool added, uint8_t *buffer) {
  configure(HALVES);
  by_kind(w.kind, [&](auto kind) {
    for (int i = 0; i < count; i += 2, target.data += 2 * target.panel) {
      const uint8_t *a = w.data + (panel + i) * w.stride, *b = count - i > 1 ? a + w.stride : nullptr;
      if (last - first > 2 * LANES)
        many_rows<decltype(kind)::value>(a, b, x, first, last, target, added, buffer);
      else
        few_rows<decltype(kind)::value>(a, b, x, first, last, target, added, buffer);
    }
  });
}

} // namespace tiles
