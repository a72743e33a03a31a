// Weight matrices in panels of 16 outputs, what they are multiplied with, and the products.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

constexpr int LANES = 16;         // outputs a panel, and rows a tile of inputs
constexpr int BLOCK = 32;         // inputs that share a scale
constexpr int PREFETCHED = 24576; // bytes, into the second cache; scales and the next panel follow without a gap
constexpr int ROWS_AT_ONCE = 256; // of the input in one product

// How a matrix is stored. The quantized kinds hold w = scale * q + minimum, a scale a block of 32 inputs:
//   NIBBLES: q of 4 bits, minimum = -8 scale.      NIBBLES_MIN: with a minimum of its own.
//   BYTES: q of 8 bits, minimum = -128 scale.      BYTES_MIN: with a minimum of its own.
//   PAIRS: bfloat16.
enum Kind : int32_t { NIBBLES = 0, NIBBLES_MIN = 1, BYTES = 2, BYTES_MIN = 3, PAIRS = 4 };

// `outputs` by `inputs`, both padded with zeros to 16 and 32. Panel p, at data + p * stride, holds outputs 16 p ...,
// block after block of its inputs: NIBBLES 4 vectors (lane n, byte i of vector j: low half q[4 j + i], high half q[16 +
// 4 j + i] of output n), BYTES 8 vectors (q[4 j + i]), PAIRS 16 vectors (lane n: w[2 j], w[2 j + 1]). Behind them the
// quantized kinds have float16 scales [blocks][16], and those with minima float16 minima [blocks][16].
struct Matrix {
  int32_t kind, outputs, inputs, panels;
  int64_t stride;
  const uint8_t *data;
  const float *bias; // [panels * 16], or null
};

INLINE bool quantized(const Matrix &w) { return w.kind != PAIRS; }
// Whether so many rows are quantized for products with quantized matrices; with tiles only if they are few.
INLINE bool takes_quants(int rows) { return !TENUTO_AMX || rows < 4; }
constexpr bool of_nibbles(int kind) { return kind == NIBBLES || kind == NIBBLES_MIN; }
constexpr bool with_minima(int kind) { return kind == NIBBLES_MIN || kind == BYTES_MIN; }
// Call `use` with the kind as a constant.
template <class Use> INLINE void by_kind(int kind, Use use) {
  switch (kind) {
  case NIBBLES:
    return use(std::integral_constant<int, NIBBLES>());
  case NIBBLES_MIN:
    return use(std::integral_constant<int, NIBBLES_MIN>());
  case BYTES:
    return use(std::integral_constant<int, BYTES>());
  case BYTES_MIN:
    return use(std::integral_constant<int, BYTES_MIN>());
  default:
    return use(std::integral_constant<int, PAIRS>());
  }
}
constexpr int block_bytes(int kind) { return kind == PAIRS ? 1024 : of_nibbles(kind) ? 256 : 512; }

// Quants of the input of 8 bits, or, where few rows are computed by quants and the memory is slower than that, of 15
// bits: 128 * quants + fine.
constexpr bool FINE = TENUTO_AMX;

// Rows that matrices are multiplied with, in tiles of 16 rows and blocks of 32 columns: `quants` and `fine` int8
// [rows / 16][blocks][16][32] with float `scales` and `sums` (scale times the sum of the block's quants)
// [rows / 16][blocks][16]; or `halves` [rows / 16][blocks][16][32].
struct Input {
  int blocks;
  bool quantized;
  int8_t *quants, *fine;
  float *scales, *sums;
  Half *halves;

  int64_t place(int row, int block) const { return ((int64_t)(row / LANES) * blocks + block) * LANES + row % LANES; }

  // Set columns 32 * block ... of a row, two vectors. Quants are x / scale to the nearest; the highest |x| is 127, or
  // 127 * 128 if they are fine.
  void set(int row, int block, f32x16 a, f32x16 b) const {
    int64_t at = place(row, block);
    if (!quantized) {
      store_halves(halves + at * BLOCK, a);
      store_halves(halves + at * BLOCK + LANES, b);
      return;
    }
    float highest = highest16(max16(max16(a, -a), max16(b, -b)));
    constexpr float most = FINE ? 127.0f * 128.0f : 127.0f;
    float scale = highest / most, inverse = highest > 0.0f ? most / highest : 0.0f;
    const i32x16 qa = nearest(a * inverse), qb = nearest(b * inverse);
    i32x16 coarse_a = qa, coarse_b = qb;
    if (FINE) {
      coarse_a = (qa + 64) >> 7, coarse_b = (qb + 64) >> 7;
      store(fine + at * BLOCK, to_bytes(qa - (coarse_a << 7)));
      store(fine + at * BLOCK + 16, to_bytes(qb - (coarse_b << 7)));
    }
    store(quants + at * BLOCK, to_bytes(coarse_a));
    store(quants + at * BLOCK + 16, to_bytes(coarse_b));
    scales[at] = scale;
    sums[at] = scale * sum16(to_float(qa + qb));
  }
};

struct Scales {
  f32x16 scale, minimum;
};
// For the quants as `Dot` takes them.
template <int KIND> INLINE Scales scales_of(const uint8_t *behind, int blocks, int block) {
  constexpr float offset = of_nibbles(KIND) ? 0 : OFFSET, zero = of_nibbles(KIND) ? 8 : 128;
  const f32x16 scale = half_to_float(behind + (int64_t)block * 32);
  if (with_minima(KIND))
    return {scale, half_to_float(behind + (int64_t)(blocks + block) * 32) + scale * offset};
  return {scale, scale * (offset - zero)};
}

// Quants 4 j, 4 j + 1, ... of a block of each output, in bytes.
template <int KIND> INLINE u32x16 quads(const uint8_t *block, int j) {
  if (!of_nibbles(KIND))
    return load<u32x16>(block + 64 * j);
  const u32x16 both = load<u32x16>(block + 64 * (j % 4));
  return (j < 4 ? both : both >> 4) & 0x0F0F0F0Fu;
}

// acc + the product of a block of a quantized panel with one input row's block. Every kernel below sums in this order,
// so that a row's result does not depend on what it is computed with.
INLINE f32x16 add_block(f32x16 acc, i32x16 sum, Scales w, float scale, float quant_sum) {
  acc += to_float(sum) * (w.scale * scale);
  return acc + w.minimum * quant_sum;
}

// ROWS rows of one tile of the input, from row `from` of it, times a panel.
template <int KIND, int ROWS>
static void quantized_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  constexpr bool SMALL = of_nibbles(KIND);
  const int blocks = x.blocks;
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  int64_t at = (int64_t)tile * blocks * LANES + from;
  f32x16 acc[ROWS] = {};
  const uint8_t *ahead = panel + PREFETCHED;
  for (int b = 0; b < blocks; b++, at += LANES) {
    const uint8_t *block = panel + (int64_t)b * block_bytes(KIND);
    for (int i = 0; i < block_bytes(KIND) + 64; i += 64, ahead += 64)
      __builtin_prefetch(ahead, 0, 2);
    Dot dots[ROWS], fine[ROWS];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const u32x16 w = quads<KIND>(block, j);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        dots[r].template add<SMALL>(w, x.quants + (at + r) * BLOCK + 4 * j);
        if (FINE)
          fine[r].template add<SMALL>(w, x.fine + (at + r) * BLOCK + 4 * j);
      }
    }
    const Scales s = scales_of<KIND>(behind, blocks, b);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const i32x16 sum = dots[r].template total<SMALL>();
      acc[r] = add_block(acc[r], FINE ? (sum << 7) + fine[r].template total<SMALL>() : sum, s, x.scales[at + r],
                         x.sums[at + r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, acc[r]);
}

// The same with bfloat16 weights; two sums, so that one need not wait for the other.
template <int ROWS> static void pair_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  int64_t at = (int64_t)tile * x.blocks * LANES + from;
  f32x16 even[ROWS] = {}, odd[ROWS] = {};
  for (int b = 0; b < x.blocks; b++, at += LANES) {
    for (int j = 0; j < BLOCK / 2; j += 2, panel += 128) {
      __builtin_prefetch(panel + PREFETCHED, 0, 2);
      __builtin_prefetch(panel + PREFETCHED + 64, 0, 2);
      const Pairs first = load_pairs(panel), second = load_pairs(panel + 64);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Half *values = x.halves + (at + r) * BLOCK + 2 * j;
        even[r] = dot_pair(even[r], first, pair_at(values));
        odd[r] = dot_pair(odd[r], second, pair_at(values + 2));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, even[r] + odd[r]);
}

template <int KIND, int ROWS>
INLINE void some_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  if constexpr (KIND == PAIRS)
    pair_rows<ROWS>(panel, x, tile, from, out);
  else
    quantized_rows<KIND, ROWS>(panel, x, tile, from, out);
}

// Rows `first` up to `last` of the input, `first` a multiple of 16, times a panel: float [last - first][16].
template <int KIND> static void panel_product(const uint8_t *panel, const Input &x, int first, int last, float *out) {
  for (int row = first; row < last;) {
    int left = std::min(last - row, LANES - row % LANES), tile = row / LANES, from = row % LANES;
    float *to = out + (int64_t)(row - first) * LANES;
    if (left >= 8 && ROWS_A_PRODUCT >= 8)
      some_rows<KIND, 8>(panel, x, tile, from, to), row += 8;
    else if (left >= 4)
      some_rows<KIND, 4>(panel, x, tile, from, to), row += 4;
    else if (left >= 2)
      some_rows<KIND, 2>(panel, x, tile, from, to), row += 2;
    else
      some_rows<KIND, 1>(panel, x, tile, from, to), row += 1;
  }
}

#if TENUTO_AMX
#include "tiles.h"
#endif

// `count` panels from `panel` on, times rows `first` up to `last` of the input: float [count][last - first][16]. At
// most `ROWS_AT_ONCE` rows; `first` is a multiple of 16; `buffer` has room for two unpacked panels.
static void product(const Matrix &w, int panel, int count, const Input &x, int first, int last, float *out,
                    uint8_t *buffer) {
#if TENUTO_AMX
  if (!x.quantized) {
    tiles::product(w, panel, count, x, first, last, out, buffer);
    return;
  }
#endif
  for (int i = 0; i < count; i++, out += (int64_t)(last - first) * LANES) {
    const uint8_t *data = w.data + (panel + i) * w.stride;
    by_kind(w.kind, [&](auto kind) { panel_product<decltype(kind)::value>(data, x, first, last, out); });
  }
}

INLINE int64_t buffer_bytes(int blocks) { return (int64_t)blocks * 2 * 1024; }

// The weights of one output, float [inputs].
static void weight_row(const Matrix &w, int output, float *to) {
  int lane = output % LANES, blocks = (w.inputs + BLOCK - 1) / BLOCK;
  const uint8_t *panel = w.data + (output / LANES) * w.stride, *behind = panel + (int64_t)blocks * block_bytes(w.kind);
  for (int b = 0; b < blocks; b++) {
    const uint8_t *at = panel + (int64_t)b * block_bytes(w.kind) + lane * 4;
    float scale = 0, minimum = 0;
    if (quantized(w)) {
      scale = lane_of(half_to_float(behind + (int64_t)b * 32), lane);
      minimum = with_minima(w.kind) ? lane_of(half_to_float(behind + (int64_t)(blocks + b) * 32), lane)
                                    : scale * (of_nibbles(w.kind) ? -8.0f : -128.0f);
    }
    for (int k = 0; k < BLOCK && b * BLOCK + k < w.inputs; k++) {
      float value;
      if (w.kind == PAIRS) {
        uint16_t half;
        memcpy(&half, at + (k / 2) * 64 + (k % 2) * 2, 2);
        value = float_of(half);
      } else {
        int q = of_nibbles(w.kind) ? at[(k % 16 / 4) * 64 + k % 4] >> (k < 16 ? 0 : 4) & 15 : at[(k / 4) * 64 + k % 4];
        value = scale * q + minimum;
      }
      to[b * BLOCK + k] = value;
    }
  }
}
