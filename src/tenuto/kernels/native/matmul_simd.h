// Products of a panel of weights and a few input rows, with vector instructions.
#pragma once

#include <type_traits>

#include "matmul_input.h"
#include "memory.h"
#include "upcoming.h"
#if TENUTO_I8MM
#include "matmul_neon.h"
#endif

// The number of rows from which products take longer than reading their weights, so that two panels at once are faster
// than one, where the CPU takes two, and time is left to fetch what is upcoming.
constexpr int ROWS_FOR_TWO_PANELS = 12;
// The size of two panels that stay in the L1 cache, since products take them once for every 8 rows.
constexpr int64_t TWO_PANELS_BYTES = 32768;
// Returns whether products of `rows` rows take two panels of `w` at once, if its weights are quantized.
INLINE bool takes_two_panels(const Matrix &w, int rows) {
  return PANELS_AT_ONCE > 1 && rows >= ROWS_FOR_TWO_PANELS && 2 * w.stride <= TWO_PANELS_BYTES;
}

// The state of a thread's products.
struct ProductState {
  OutlierBlocks outliers; // of the operation's input
  Upcoming upcoming;      // what the thread reads after the operation
  Memory buffer;          // room for two unpacked panels
};

// Adds the product of a block of a quantized panel and a block of an input row to `acc`. All kernels below add in this
// order, so a row's result does not depend on the rows that it is computed with.
INLINE f32x16 add_block(f32x16 acc, i32x16 sum, Scales w, float scale, float quant_sum) {
  acc += to_float(sum) * (w.scale * scale);
  return acc + w.minimum * quant_sum;
}

// Multiplies ROWS rows of an input tile, from row `from` of the tile on, by PANELS panels, and stores the products of
// the first `valid` rows; those of the panels are `apart` floats apart. Two panels fetch what is `upcoming`. The `fine`
// quants of outlier blocks are left to `add_fine`.
template <class Format, int ROWS, int PANELS>
static __attribute__((noinline)) void quantized_rows(const Panel *panels, const Input &x, int tile, int from, int valid,
                                                     float *out, int64_t apart, Upcoming *upcoming) {
  constexpr int BITS = Format::BITS, PARTS = Format::PARTS, QUADS = quads_at_once(BITS);
  const int blocks = x.blocks;
  static_assert(ROWS == 1 || !TENUTO_I8MM, "see `Input::quants_of`");
  int64_t at = (int64_t)tile * blocks * LANES + from;
  f32x16 acc[PANELS][ROWS] = {};
  int64_t ahead = 0;
  const bool fetches = !Format::UNPACKED || panels[0].ahead;
  Upcoming also; // in registers
  if (PANELS > 1)
    also = *upcoming;
  const int8_t *quants = x.quants + Input::quants_of(at);
  for (int b = 0; b < blocks; b++, at += LANES, quants += LANES * BLOCK) {
    const int64_t ones[] = {x.scale_index(tile * LANES + from, b), x.scale_index(tile * LANES + 8, b)}; // of eight rows
    for (int i = 0; fetches && i < Format::AHEAD_BYTES; i += 64, ahead += 64)
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; p++)
        __builtin_prefetch(panels[p].ahead + ahead, 0, 2);
    if (PANELS > 1)
      also.fetch_some();
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      Dot dots[PANELS][ROWS], fine[PANELS][ROWS];
#pragma GCC unroll 8
      for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j += QUADS) {
        u32x16 w[PANELS][QUADS];
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
          for (int q = 0; q < QUADS; q++)
            w[p][q] = Format::quads(panels[p].block<Format>(b), j + q);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int p = 0; p < PANELS; p++) {
            add_quads<BITS>(dots[p][r], w[p], quants + r * BLOCK + Input::quad(j));
            if (ALWAYS_15_BITS)
              add_quads<BITS>(fine[p][r], w[p], x.fine + (at + r) * BLOCK + 4 * j);
          }
      }
      Scales s[PANELS];
#pragma GCC unroll 2
      for (int p = 0; p < PANELS; p++)
        s[p] = scales_of<Format>(panels[p].behind<Format>(), b, part);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
          i32x16 sum = dots[p][r].template total<BITS>();
          const int64_t one = ones[r / 8] + r % 8;
          float scale = x.scales[one];
          if (ALWAYS_15_BITS)
            sum = (sum << 7) + fine[p][r].template total<BITS>(), scale *= FINE_STEP;
          const float first = PARTS > 1 ? x.first_half_sums[one] : x.sums[one];
          acc[p][r] = add_block(acc[p][r], sum, s[p], scale, part ? x.sums[one] - first : first);
        }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
      if (r < valid)
        store(out + p * apart + r * LANES, acc[p][r]);
  if (PANELS > 1)
    *upcoming = also;
}

// Unpacks a quantized panel to `out`, so that products with many rows need not do it for every few of them.
template <class Format> static Panel unpack(const Panel &panel, uint8_t *out) {
  typedef Unpacked<Format> To;
  const Behind behind = panel.behind<Format>();
  const Panel to(panel, out);
  float *const scales = (float *)(out + (int64_t)to.blocks * To::BLOCK_BYTES);
  for (int b = 0; b < to.blocks; b++) {
    const uint8_t *block = panel.block<Format>(b);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++, out += 64)
      store(out, To::vector(block, j));
    for (int part = 0; part < To::PARTS; part++) {
      const f32x16 scale = Format::Layout::scale(behind, b, part);
      store(scales + ((int64_t)part * to.blocks + b) * LANES, scale);
      store(scales + ((int64_t)(To::PARTS + part) * to.blocks + b) * LANES, minimum_of<Format>(behind, b, part, scale));
    }
  }
  return to;
}

// Adds the products of the `fine` quants of outlier blocks; row 0 of `out` is row `first` of the input.
template <class Format>
static void add_fine(const Panel &panel, const OutlierBlocks::Entry *entry, const OutlierBlocks::Entry *end, int first,
                     float *out) {
  constexpr int BITS = Format::BITS, PARTS = Format::PARTS;
  const Behind behind = panel.behind<Format>();
  while (entry < end) {
    const int block = entry->block;
    u32x16 weights[8];
    f32x16 scales[PARTS];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      weights[j] = Format::quads(panel.block<Format>(block), j);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++)
      scales[part] = scales_of<Format>(behind, block, part).scale;
    for (; entry < end && entry->block == block; entry++) {
      float *to = out + (int64_t)(entry->row - first) * LANES;
      f32x16 acc = load<f32x16>(to);
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        Dot even, odd; // two sums, so that an addition need not wait for the one before
#pragma GCC unroll 8
        for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j += 2) {
          even.template add<BITS>(weights[j], entry->fine + 4 * j);
          odd.template add<BITS>(weights[j + 1], entry->fine + 4 * j + 4);
        }
        acc += to_float(even.template total<BITS>() + odd.template total<BITS>()) * (scales[part] * entry->scale);
      }
      store(to, acc);
    }
  }
}

// Does the same with pairs of bfloat16 or FP8 weights, in two sums, so that an addition need not wait for the one
// before; `bf16_pairs` adds in one. The sums of scaled weights are scaled after each block.
template <class Format, int ROWS>
static void pair_rows(const Panel &panel, const Input &x, int tile, int from, float *out) {
  constexpr int64_t VECTOR_BYTES = Format::BLOCK_BYTES / (BLOCK / 2);
  constexpr bool ONE_SUM = TENUTO_I8MM && !Format::SCALED;
  int64_t at = (int64_t)tile * x.blocks * LANES + from;
  const uint8_t *vector = panel.data;
  f32x16 even[ROWS] = {}, odd[ROWS] = {}, acc[ROWS] = {};
  for (int b = 0; b < x.blocks; b++, at += LANES) {
    for (int j = 0; j < BLOCK / 2; j += 2, vector += 2 * VECTOR_BYTES) {
      for (int i = 0; i < 2 * VECTOR_BYTES; i += 64)
        __builtin_prefetch(vector + PREFETCH_DISTANCE + i, 0, 2);
      const Pairs first = Format::pairs(vector), second = Format::pairs(vector + VECTOR_BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const PairElement *values = x.pairs + (at + r) * BLOCK + 2 * j;
        even[r] = dot_pair(even[r], first, pair_at(values));
        f32x16 &sum = ONE_SUM ? even[r] : odd[r];
        sum = dot_pair(sum, second, pair_at(values + 2));
      }
    }
    if constexpr (Format::SCALED) {
      const f32x16 scale = Format::Layout::scale(panel.behind<Format>(), b, 0);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
        acc[r] += (even[r] + odd[r]) * scale, even[r] = odd[r] = f32x16{};
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, Format::SCALED ? acc[r] : ONE_SUM ? even[r] : even[r] + odd[r]);
}

// Does the same with weights of float32 or float16.
template <class Format, int ROWS>
static void float_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  constexpr int64_t VECTOR_BYTES = Format::BLOCK_BYTES / BLOCK;
  int64_t at = (int64_t)tile * x.blocks * LANES + from;
  f32x16 even[ROWS] = {}, odd[ROWS] = {};
  for (int b = 0; b < x.blocks; b++, at += LANES) {
    for (int j = 0; j < BLOCK; j += 2, panel += 2 * VECTOR_BYTES) {
      for (int i = 0; i < 2 * VECTOR_BYTES; i += 64)
        __builtin_prefetch(panel + PREFETCH_DISTANCE + i, 0, 2);
      const f32x16 first = Format::weights(panel), second = Format::weights(panel + VECTOR_BYTES);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const float *values = x.floats + (at + r) * BLOCK + j;
        even[r] += first * values[0];
        odd[r] += second * values[1];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, even[r] + odd[r]);
}

// Does the same with weights of any format.
template <class Format, int ROWS>
INLINE void multiply_rows(const Panel &panel, const Input &x, int tile, int from, float *out) {
#if TENUTO_I8MM
  if constexpr (Format::QUANTIZED && ROWS > 1)
    quantized_pairs<Format, ROWS>(panel, x, tile, from, out);
  else if constexpr (std::is_same_v<Format, BF16> && ROWS > 1)
    bf16_pairs<ROWS>(panel, x, tile, from, out);
  else
#endif
      if constexpr (Format::QUANTIZED)
    quantized_rows<Format, ROWS, 1>(&panel, x, tile, from, ROWS, out, 0, nullptr);
  else if constexpr (std::is_same_v<Format, F32> || std::is_same_v<Format, F16>)
    float_rows<Format, ROWS>(panel.data, x, tile, from, out);
  else
    pair_rows<Format, ROWS>(panel, x, tile, from, out);
}

// Multiplies rows `first` to `last` of the input, `first` a multiple of 16, by a panel: float [last - first][16]. Rows
// that would be left for two or three smaller kernels are rounded up to one where that is faster, so rows up to the
// next multiple of 4 may be written.
template <class Format>
static void multiply_panel(Panel panel, const Input &x, ProductState &state, int first, int last, float *out) {
  for (int row = first; row < last;) {
    int left = std::min(last - row, LANES - row % LANES), tile = row / LANES, from = row % LANES;
    float *to = out + (int64_t)(row - first) * LANES;
    if (left > 12 && MATMUL_ROWS >= 16)
      multiply_rows<Format, 16>(panel, x, tile, from, to), row += 16;
    else if (left > 6 && MATMUL_ROWS >= 8)
      multiply_rows<Format, 8>(panel, x, tile, from, to), row += 8;
    else if (left > 2)
      multiply_rows<Format, 4>(panel, x, tile, from, to), row += 4;
    else if (left == 2)
      multiply_rows<Format, 2>(panel, x, tile, from, to), row += 2;
    else
      multiply_rows<Format, 1>(panel, x, tile, from, to), row += 1;
    if constexpr (Format::UNPACKED)
      panel.ahead = nullptr; // its first rows have prefetched
  }
  if constexpr (Format::QUANTIZED && !ALWAYS_15_BITS)
    add_fine<Format>(panel, state.outliers.begin(first), state.outliers.end(first), first, out);
}

// Multiplies rows by two quantized panels at once, whose products follow each other, so that an input is loaded for
// both.
template <class Format>
static void multiply_two(const Panel (&panels)[2], const Input &x, ProductState &state, int first, int last,
                         float *out) {
  const int64_t apart = (int64_t)(last - first) * LANES;
  for (int row = first; row < last;) {
    const int left = std::min(last - row, LANES - row % LANES), tile = row / LANES, from = row % LANES;
    float *to = out + (int64_t)(row - first) * LANES;
    if (left > 4)
      quantized_rows<Format, 8, 2>(panels, x, tile, from, left, to, apart, &state.upcoming), row += 8;
    else
      quantized_rows<Format, 4, 2>(panels, x, tile, from, left, to, apart, &state.upcoming), row += 4;
  }
  for (int p = 0; p < 2; p++)
    add_fine<Format>(panels[p], state.outliers.begin(first), state.outliers.end(first), first, out + p * apart);
}

// Multiplies rows as above by `count` panels from `panel` on: float [count][last - first][16]. If there are many rows,
// quantized panels are unpacked first; not with AMX, whose tiles multiply most of those.
template <class Format>
static void multiply(const Matrix &w, int panel, int count, const Input &x, ProductState &state, int first, int last,
                     float *out) {
  const int64_t apart = (int64_t)(last - first) * LANES;
  if constexpr (Format::QUANTIZED && MOST_PANELS > 1)
    if (takes_two_panels(w, last - first))
      for (; count >= 2; count -= 2, panel += 2, out += 2 * apart)
        multiply_two<Format>({{w, panel}, {w, panel + 1}}, x, state, first, last, out);
  for (; count > 0; count--, panel++, out += apart) {
    if constexpr (Format::QUANTIZED && !TENUTO_AMX)
      if (last - first >= UNPACKED_ROWS) {
        const Panel unpacked = unpack<Format>({w, panel}, state.buffer.as<uint8_t>());
        multiply_panel<Unpacked<Format>>(unpacked, x, state, first, last, out);
        continue;
      }
    multiply_panel<Format>({w, panel}, x, state, first, last, out);
  }
}
