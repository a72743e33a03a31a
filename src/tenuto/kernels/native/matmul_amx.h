// Products with AMX tiles, of bfloat16: quantized weights are unpacked first. For a few rows unpacking takes longer
// than tiles save, so `input_type` leaves those to the other kernels. A tile of inputs has 16 rows, one of weights 16
// outputs.
#pragma once

#include <type_traits>

#include "amx.h"
#include "matmul_simd.h"

namespace amx {

// Unpacks block `b` of a quantized panel to bfloat16, in the layout of `BF16`, and prefetches as many bytes further on.
// Masking the bits of a quant where they lie within a mantissa gives the float 1 + q / 2^n; scale and minimum are
// adjusted to that. For a while after a tile instruction multiplications have only one port, as shifts always have, so
// there are few shifts. `between(q)` is called after quarter q, 0 to 3, so that the caller can mix in tile
// instructions.
template <class Format, class Use> INLINE void unpack_quants(const Panel &panel, int b, uint8_t *out, Use between) {
  constexpr int BYTES_A_BLOCK = Format::BLOCK_BYTES;
  const uint8_t *block = panel.block<Format>(b);
  const Behind behind = panel.behind<Format>();
  const uint8_t *ahead = panel.data + PREFETCH_DISTANCE + (int64_t)b * (BYTES_A_BLOCK + 64);
#pragma GCC unroll 16
  for (int i = 0; i < BYTES_A_BLOCK + 64; i += 64)
    __builtin_prefetch(ahead + i, 0, 2);
  struct Line { // adjusted to quants at one position of their lowest bit
    f32x16 scale, minimum;
  };
  auto line = [](Scales s, int bit) __attribute__((always_inline)) {
    const f32x16 scale = s.scale * (1 + TRUNCATION) * (float)(1 << (23 - bit));
    return Line{scale, s.minimum * (1 + TRUNCATION) - scale};
  };
  auto value = [](__m512i bits, int bit, const Line &line) __attribute__((always_inline)) {
    const __m512i one = _mm512_set1_epi32(0x3F800000), mask = _mm512_set1_epi32(((1 << Format::BITS) - 1) << bit);
    const __m512 x = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, one, 0xEA)); // bits & mask | one
    return _mm512_fmadd_ps(x, (__m512)line.scale, (__m512)line.minimum);
  };
  auto put = [&](int row, __m512 first, __m512 second)
                 __attribute__((always_inline)) { _mm512_store_si512(out + row * 64, truncated_pair(first, second)); };
  if constexpr (Format::BITS == 4) {
    const Scales s = scales_of<Format>(behind, b);
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
    // The highest position at which the second of two quants still lies within the mantissa: most digits are left.
    constexpr int PARTS = Format::PARTS, LOW = 15 - Format::BITS, HIGH = LOW + 8;
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      const Scales s = scales_of<Format>(behind, b, part);
      const Line low = line(s, LOW), high = line(s, HIGH);
#pragma GCC unroll 8
      for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j++) {
        const __m512i x = (__m512i)Format::quads(block, j), up = _mm512_slli_epi32(x, LOW),
                      down = _mm512_srli_epi32(x, 16 - LOW);
        put(2 * j, value(up, LOW, low), value(up, HIGH, high));
        put(2 * j + 1, value(down, LOW, low), value(down, HIGH, high));
        if (j % 2)
          between(j / 2);
      }
    }
  }
}

// Returns where block `b` of a panel is in the layout of `BF16`: in `out`, unless the panel itself has it. `between` as
// above.
template <class Format, class Use> INLINE const uint8_t *unpack(const Panel &panel, int b, uint8_t *out, Use between) {
  const uint8_t *block = panel.block<Format>(b);
  if constexpr (Format::QUANTIZED) {
    unpack_quants<Format>(panel, b, out, between);
  } else {
    constexpr int PAIR_BYTES = Format::BLOCK_BYTES / (BLOCK / 2);
    f32x16 factor = splat(1 + TRUNCATION);
    if constexpr (Format::SCALED)
      factor = factor * Format::Layout::scale(panel.behind<Format>(), b, 0);
    auto put = [&](int row, f32x16 first, f32x16 second) __attribute__((always_inline)) {
      _mm512_store_si512(out + row * 64, truncated_pair((__m512)(first * factor), (__m512)(second * factor)));
    };
#pragma GCC unroll 4
    for (int quarter = 0; quarter < 4; quarter++) {
      for (int row = 4 * quarter; row < 4 * (quarter + 1); row++) {
        const uint8_t *pair = block + row * PAIR_BYTES;
        __builtin_prefetch(pair + PREFETCH_DISTANCE, 0, 2);
        if constexpr (std::is_same_v<Format, F16>) {
          put(row, float16_to_float(pair), float16_to_float(pair + 32));
        } else if constexpr (std::is_same_v<Format, FP8>) {
          const u32x16 both = e4m3_pairs(pair);
          put(row, as<f32x16>(both << 16), as<f32x16>(both & 0xFFFF0000u));
        }
      }
      between(quarter);
    }
  }
  return std::is_same_v<Format, BF16> ? block : out;
}

// Tiles 0 to 3 hold the products of two neighbouring tiles of input rows and the panels `a` and `b`.
enum Tile { FIRST_A = 0, FIRST_B = 1, SECOND_A = 2, SECOND_B = 3 };

// Adds to these tiles the products of block `k` of tiles `tile` and, with `two`, `tile + 1` of `x` and the unpacked
// blocks `a` and `b`. This has eight parts; parts `from` to `to` are done. With MANY rows, these are loaded so that
// they do not push the panels out of the L1 cache.
template <bool MANY>
INLINE void multiply(const uint8_t *a, const uint8_t *b, const Input &x, int tile, bool two, int k, int from, int to) {
  const PairElement *first = x.pairs + ((int64_t)tile * x.blocks + k) * LANES * BLOCK,
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

// The destination of products: row r of the nth panel is 16 floats at data + r * row + n * panel.
struct Target {
  float *data;
  int64_t row, panel;
};

// Store and load the first `rows` rows of a tile, at most 16.
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
  compiler_barrier();
  load_tile<TILE>(whole, LANES);
}

// The products of up to two tiles of input rows and up to two panels.
struct Corner {
  float *data; // of the first row and panel
  int64_t row, panel;
  int rows;
  bool both; // panels

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

// Multiplies up to 32 rows by panel `a` and, unless it is null, panel `b`. A block is multiplied while the next one is
// unpacked: vector instructions run beside tile instructions if the two are well mixed.
template <class Format>
static void few_rows(const Panel &a, const Panel *b, const Input &x, int first, int last, const Target &target,
                     bool added, uint8_t *buffer) {
  const Corner corner = {target.data, target.row, target.panel, last - first, b != nullptr};
  const bool two = last - first > LANES;
  const int tile = first / LANES;
  if (added)
    corner.begin();
  else
    clear();
  const uint8_t *done_a = nullptr, *done_b = nullptr; // the preceding block, unpacked
  for (int k = 0; k < x.blocks; k++) {
    auto half = [&](const Panel &panel, int slot, int part) __attribute__((always_inline)) {
      return unpack<Format>(
          panel, k, buffer + (k % 2 * 2 + slot) * 1024, [&](int quarter) __attribute__((always_inline)) {
            if (k > 0)
              multiply<false>(done_a, done_b, x, tile, two, k - 1, part + quarter, part + quarter + 1);
          });
    };
    const uint8_t *now_a = half(a, 0, 0), *now_b = now_a;
    if (b)
      now_b = half(*b, 1, 4);
    else if (k > 0)
      multiply<false>(done_a, done_b, x, tile, two, k - 1, 4, 8);
    done_a = now_a, done_b = now_b;
    compiler_barrier();
  }
  multiply<false>(done_a, done_b, x, tile, two, x.blocks - 1, 0, 8);
  corner.end();
}

// Does the same for many rows, in pieces of the panels that stay in the L1 cache when unpacked.
template <class Format>
static void many_rows(const Panel &a, const Panel *b, const Input &x, int first, int last, const Target &target,
                      bool added, uint8_t *buffer) {
  constexpr bool PACKED = std::is_same_v<Format, BF16>; // panels need no unpacking
  const int blocks = x.blocks, pieces = (blocks + 19) / 20, piece = (blocks + pieces - 1) / pieces;
  for (int from = 0; from < blocks; from += piece) {
    const int to = std::min(blocks, from + piece);
    const uint8_t *of_a = PACKED ? a.block<Format>(from) : buffer, *of_b = of_a;
    for (int k = from; k < to && !PACKED; k++)
      unpack<Format>(a, k, buffer + (k - from) * 1024, [](int) {});
    if (b)
      of_b = PACKED ? b->block<Format>(from) : buffer + piece * 1024;
    for (int k = from; k < to && b && !PACKED; k++)
      unpack<Format>(*b, k, buffer + (piece + k - from) * 1024, [](int) {});
    compiler_barrier();
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
      compiler_barrier();
    }
  }
}

// Does what `::product` does, but stores the products to `target`, or with `added` adds them to its values.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, Target target,
                    bool added, uint8_t *buffer) {
  configure(MATMUL);
  with_format(w.format, [&](auto format) {
    for (int i = 0; i < count; i += 2, target.data += 2 * target.panel) {
      const Panel a(w, panel + i), next(w, panel + i + 1), *b = count - i > 1 ? &next : nullptr;
      if (last - first > 2 * LANES)
        many_rows<decltype(format)>(a, b, x, first, last, target, added, buffer);
      else
        few_rows<decltype(format)>(a, b, x, first, last, target, added, buffer);
    }
  });
}

} // namespace amx
