// Products by tiles (AMX). A tile of inputs is 16 rows, one of weights 16 outputs.
namespace tiles {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// What the tiles are for: the products of quants, the products of bfloat16, or attention of some query rows.
enum Layout { NONE, QUANTS, HALVES, ATTENTION };
static thread_local Layout configured = NONE;
static thread_local int configured_rows = 0;

static void configure(Layout layout, int query_rows = 0) {
  if (configured == layout && configured_rows == query_rows) return;
  Config config;
  for (int t = 0; t < 8; t++) config.rows[t] = 16, config.row_bytes[t] = 64;
  if (layout == QUANTS) {
    config.row_bytes[4] = config.row_bytes[6] = 32; // inputs: 16 rows of 32 quants
    config.rows[5] = config.rows[7] = 8;            // weights: 8 rows of 16 quads
  }
  if (layout == ATTENTION) {
    for (int t = 0; t < 6; t++) config.rows[t] = query_rows; // results, queries, shares
    config.row_bytes[5] = 32;                                // shares of 16 token slots
    config.rows[7] = 8;                                      // values: 8 pairs of slots
  }
  // The intrinsic is declared as reading 8 bytes; without this the stores above may be dropped.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  configured = layout, configured_rows = query_rows;
}

static void release() {
  if (configured != NONE) _tile_release();
  configured = NONE;
}

// Quants give the same sums either way. Sums of bfloat16 do not, and results must not depend on how many rows there are.
static bool worthwhile(const Matrix &w, int rows) { return rows >= 8 || w.kind == PAIRS; }

template <int KIND> static void unpack_panel(const uint8_t *panel, int blocks, uint8_t *buffer) {
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  float *scales = (float *)(buffer + (int64_t)blocks * 512), *minima = scales + (int64_t)blocks * LANES;
  for (int b = 0; b < blocks; b++) {
    u8x64 quads[8];
    unpack<KIND>(panel + (int64_t)b * block_bytes(KIND), quads);
    for (int j = 0; j < 8; j++) store(buffer + (int64_t)b * 512 + 64 * j, quads[j]);
    Scales s = scales_of<KIND>(behind, blocks, b);
    store(scales + (int64_t)b * LANES, s.scale);
    store(minima + (int64_t)b * LANES, s.minimum);
  }
}

// The products of one block, through tile C to `sums`, with A and B as tiles for what is multiplied. Tiles are named by
// literals in the intrinsics.
#define MULTIPLY_BLOCK(C, A, B, block)                                                                                 \
  _tile_zero(C);                                                                                                       \
  _tile_loadd(A, q + (int64_t)(block) * LANES * BLOCK, BLOCK);                                                         \
  _tile_loadd(B, buffer + (int64_t)(block) * 512, 64);                                                                 \
  _tile_dpbsud(C, A, B);

// One tile of the input times an unpacked panel. The products of two blocks leave their tiles before those of the two
// before are scaled, so that both units work; four at a time would be 4096 bytes apart, and loads would wait for stores.
template <int ROWS>
static void quantized_tile(const uint8_t *buffer, const Input &x, int tile, float *out) {
  const int blocks = x.blocks;
  const float *scales = (const float *)(buffer + (int64_t)blocks * 512), *minima = scales + (int64_t)blocks * LANES;
  const int64_t at = (int64_t)tile * blocks * LANES;
  const int8_t *q = x.quants + at * BLOCK;
  alignas(4096) int32_t sums[4][LANES][LANES];
  f32x16 acc[ROWS] = {};
  auto scale = [&](int b) __attribute__((always_inline)) {
    const Scales s = {load<f32x16>(scales + (int64_t)b * LANES), load<f32x16>(minima + (int64_t)b * LANES)};
    const float *row_scales = x.scales + at + (int64_t)b * LANES, *row_sums = x.sums + at + (int64_t)b * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
      acc[r] = add_block(acc[r], load<i32x16>(sums[b % 4][r]), s, row_scales[r], row_sums[r]);
  };
  int b = 0;
  for (; b + 4 <= blocks; b += 4) {
    MULTIPLY_BLOCK(0, 4, 5, b)
    MULTIPLY_BLOCK(1, 6, 7, b + 1)
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (b) scale(b - 2), scale(b - 1);
    MULTIPLY_BLOCK(2, 4, 5, b + 2)
    MULTIPLY_BLOCK(3, 6, 7, b + 3)
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    scale(b), scale(b + 1);
  }
  if (b) scale(b - 2), scale(b - 1);
  for (; b < blocks; b++) {
    MULTIPLY_BLOCK(0, 4, 5, b)
    _tile_stored(0, sums[b % 4], 64);
    scale(b);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) store(out + r * LANES, acc[r]);
}
#undef MULTIPLY_BLOCK

// Up to two tiles of the input times two panels of bfloat16; `b` may equal `a`, and then its result is not stored.
static void pair_tiles(const uint8_t *a, const uint8_t *b, const Input &x, int tile, int tiles, float *out_a, float *out_b) {
  const uint16_t *first = x.halves + (int64_t)tile * x.blocks * LANES * BLOCK;
  const uint16_t *second = tiles > 1 ? first + (int64_t)x.blocks * LANES * BLOCK : first;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < x.blocks; k++) {
    _tile_loadd(4, first + (int64_t)k * LANES * BLOCK, 64);
    _tile_loadd(6, a + (int64_t)k * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + (int64_t)k * 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles > 1) {
      _tile_loadd(5, second + (int64_t)k * LANES * BLOCK, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out_a, 64);
  if (b != a) _tile_stored(1, out_b, 64);
  if (tiles > 1) {
    _tile_stored(2, out_a + LANES * LANES, 64);
    if (b != a) _tile_stored(3, out_b + LANES * LANES, 64);
  }
}

template <int KIND>
static void quantized_panel(const uint8_t *panel, const Input &x, int first, int last, float *out, uint8_t *buffer) {
  unpack_panel<KIND>(panel, x.blocks, buffer);
  for (int row = first; row < last; row += LANES) {
    int rows = std::min(LANES, last - row);
    float *to = out + (int64_t)(row - first) * LANES;
    if (rows > 8) quantized_tile<16>(buffer, x, row / LANES, to);
    else if (rows > 4) quantized_tile<8>(buffer, x, row / LANES, to);
    else quantized_tile<4>(buffer, x, row / LANES, to);
  }
}

// As `product`. A quantized tile may write up to 15 rows too many: the next panel's, which follow, or, after the last,
// spare room in `out`.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, float *out, uint8_t *buffer) {
  int64_t step = (int64_t)(last - first) * LANES;
  const uint8_t *data = w.data + panel * w.stride;
  if (w.kind == PAIRS) {
    configure(HALVES);
    alignas(64) float whole[2][2 * LANES * LANES];
    for (int i = 0; i < count; i += 2) {
      const uint8_t *a = data + i * w.stride, *b = i + 1 < count ? a + w.stride : a;
      for (int row = first; row < last; row += 2 * LANES) {
        int rows = std::min(2 * LANES, last - row);
        pair_tiles(a, b, x, row / LANES, (rows + LANES - 1) / LANES, whole[0], whole[1]);
        for (int p = 0; p < 2 && i + p < count; p++)
          memcpy(out + (i + p) * step + (int64_t)(row - first) * LANES, whole[p], (size_t)rows * LANES * 4);
      }
    }
    return;
  }
  configure(QUANTS);
  for (int i = 0; i < count; i++, out += step, data += w.stride) {
    switch (w.kind) {
    case NIBBLES: quantized_panel<NIBBLES>(data, x, first, last, out, buffer); break;
    case NIBBLES_MIN: quantized_panel<NIBBLES_MIN>(data, x, first, last, out, buffer); break;
    case BYTES: quantized_panel<BYTES>(data, x, first, last, out, buffer); break;
    default: quantized_panel<BYTES_MIN>(data, x, first, last, out, buffer);
    }
  }
}

} // namespace tiles
