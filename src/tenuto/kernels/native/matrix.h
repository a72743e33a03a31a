// Weight matrices in panels of 16 outputs, what they are multiplied with, and the products.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>
#include <vector>

#include "simd.h"

constexpr int LANES = 16;         // outputs a panel, and rows a tile of inputs
constexpr int BLOCK = 32;         // inputs that share a scale
constexpr int PREFETCHED = 24576; // bytes, into the second cache; scales and the next panel follow without a gap
constexpr int ROWS_AT_ONCE = 256; // of the input in one product

// How a matrix is stored. The quantized kinds hold w = scale * q + minimum, a scale a block of 32 inputs:
//   NIBBLES: q of 4 bits, minimum = -8 scale.      NIBBLES_MIN: q of 4 bits, with a minimum of its own.
//   BYTES: q of 8 bits, minimum = -128 scale.      FIVES_MIN: q of 5 bits, with a minimum of its own.
//   SIXES: q of 6 bits, minimum = -32 scale, a scale for each half of a block.
// The others: PAIRS, bfloat16; FLOAT32; FLOAT16.
enum Kind : int32_t {
  NIBBLES = 0,
  NIBBLES_MIN = 1,
  BYTES = 2,
  FIVES_MIN = 3,
  PAIRS = 4,
  SIXES = 5,
  FLOAT32 = 6,
  FLOAT16 = 7
};

// `outputs` by `inputs`, both padded with zeros to 16 and 32. Panel p, at data + p * stride, holds outputs 16 p ...,
// block after block of its inputs: NIBBLES 4 vectors (lane n, byte i of vector j: low half q[4 j + i], high half q[16 +
// 4 j + i] of output n), BYTES 8 vectors (q[4 j + i]), PAIRS 16 vectors (lane n: w[2 j], w[2 j + 1]), FLOAT32 and
// FLOAT16 32 vectors (w[j]). FIVES_MIN and SIXES are NIBBLES and then what is above four bits: one vector (lane n, byte
// i, bit j: of q[4 j + i]), or two (vector h, bits 2 j and 2 j + 1: of q[16 h + 4 j + i]). Behind all blocks the
// quantized kinds have float16 scales [blocks][16], of SIXES those of first halves, and then float16 minima, or scales
// of second halves, [blocks][16].
struct Matrix {
  int32_t kind, outputs, inputs, panels;
  int64_t stride;
  const uint8_t *data;
  const float *bias; // [panels * 16], or null
};

constexpr bool of_floats(int kind) { return kind == FLOAT32 || kind == FLOAT16; }
constexpr bool of_nibbles(int kind) { return kind == NIBBLES || kind == NIBBLES_MIN; }
constexpr bool with_minima(int kind) { return kind == NIBBLES_MIN || kind == FIVES_MIN; }
constexpr int bits_of(int kind) { return of_nibbles(kind) ? 4 : kind == FIVES_MIN ? 5 : kind == SIXES ? 6 : 8; }
constexpr int scales_a_block(int kind) { return kind == SIXES ? 2 : 1; }
// Call `use` with the kind as a constant.
template <class Use> INLINE void by_kind(int kind, Use use) {
  switch (kind) {
  case NIBBLES:
    return use(std::integral_constant<int, NIBBLES>());
  case NIBBLES_MIN:
    return use(std::integral_constant<int, NIBBLES_MIN>());
  case BYTES:
    return use(std::integral_constant<int, BYTES>());
  case FIVES_MIN:
    return use(std::integral_constant<int, FIVES_MIN>());
  case SIXES:
    return use(std::integral_constant<int, SIXES>());
  case FLOAT32:
    return use(std::integral_constant<int, FLOAT32>());
  case FLOAT16:
    return use(std::integral_constant<int, FLOAT16>());
  default:
    return use(std::integral_constant<int, PAIRS>());
  }
}
constexpr int block_bytes(int kind) {
  return kind == FLOAT32 ? 2048 : kind == PAIRS || kind == FLOAT16 ? 1024 : 64 * bits_of(kind);
}

// What rows are for a product: bfloat16 (or `Half`), quants, or float.
enum class Form { HALVES, QUANTS, FLOATS };
// From so many rows on tiles are faster, though weights have to be unpacked for them: as measured with one core of a
// Xeon with AMX.
constexpr int rows_for_tiles(int kind) { return kind == FLOAT16 ? 4 : 5; }
// For a matrix of such a kind. With tiles many rows are multiplied as bfloat16, except with float.
constexpr Form form_for(int kind, int rows) {
  if (kind == PAIRS || (TENUTO_AMX && kind != FLOAT32 && rows >= rows_for_tiles(kind)))
    return Form::HALVES;
  return of_floats(kind) ? Form::FLOATS : Form::QUANTS;
}

// Quants of the input are of 8 bits, or of 15 bits, 128 * quants + fine: where a block's highest value is so far above
// the others (`UNEVEN` times their mean square, with its own) that these would get few of 8 bits; and everywhere, where
// few rows are computed by quants and the memory is slower than that. Up to a tenth of the blocks are uneven, and most
// of the error that quants cause is in those.
constexpr bool ALL_FINE = TENUTO_AMX;
constexpr float UNEVEN = 23.0f;
constexpr float FINE = 1.0f / 128.0f; // of a quant

// Rows that matrices are multiplied with, in tiles of 16 rows and blocks of 32 columns: `quants` and `fine` int8
// [rows / 16][blocks][16][32] with float `scales` of `quants`, `sums` of what a block's quants stand for and `low_sums`
// of its first 16, and whether they are `fine_too` [rows / 16][blocks][16]; or `halves` or `floats` [rows /
// 16][blocks][16][32].
struct Input {
  int blocks;
  Form form;
  int8_t *quants, *fine;
  float *scales, *sums, *low_sums;
  uint8_t *fine_too;
  Half *halves;
  float *floats;

  int64_t place(int row, int block) const { return ((int64_t)(row / LANES) * blocks + block) * LANES + row % LANES; }

  // Set columns 32 * block ... of a row, two vectors. Quants are x / scale to the nearest; the highest |x| is 127, or
  // 127 * 128 if they are fine.
  void set(int row, int block, f32x16 a, f32x16 b) const {
    int64_t at = place(row, block);
    if (form == Form::HALVES) {
      store_halves(halves + at * BLOCK, a);
      store_halves(halves + at * BLOCK + LANES, b);
      return;
    }
    if (form == Form::FLOATS) {
      store(floats + at * BLOCK, a);
      store(floats + at * BLOCK + LANES, b);
      return;
    }
    float highest = highest16(max16(max16(a, -a), max16(b, -b)));
    const bool finely = ALL_FINE || highest * highest * BLOCK > UNEVEN * sum16(a * a + b * b);
    const float most = finely ? 127.0f * 128.0f : 127.0f;
    float scale = highest / most, inverse = highest > 0.0f ? most / highest : 0.0f;
    const i32x16 qa = nearest(a * inverse), qb = nearest(b * inverse);
    i32x16 coarse_a = qa, coarse_b = qb;
    if (finely) {
      coarse_a = (qa + 64) >> 7, coarse_b = (qb + 64) >> 7;
      store(fine + at * BLOCK, to_bytes(qa - (coarse_a << 7)));
      store(fine + at * BLOCK + 16, to_bytes(qb - (coarse_b << 7)));
    }
    store(quants + at * BLOCK, to_bytes(coarse_a));
    store(quants + at * BLOCK + 16, to_bytes(coarse_b));
    fine_too[at] = finely;
    scales[at] = finely ? scale / FINE : scale;
    sums[at] = scale * sum16(to_float(qa + qb));
    low_sums[at] = scale * sum16(to_float(qa));
  }

  // Copy row `own` of another input of the same form to a row.
  void take(int row, const Input &other, int own) const {
    for (int block = 0; block < blocks; block++) {
      const int64_t to = place(row, block), from = other.place(own, block);
      if (form == Form::HALVES) {
        memcpy(halves + to * BLOCK, other.halves + from * BLOCK, sizeof(Half) * BLOCK);
      } else if (form == Form::FLOATS) {
        memcpy(floats + to * BLOCK, other.floats + from * BLOCK, sizeof(float) * BLOCK);
      } else {
        memcpy(quants + to * BLOCK, other.quants + from * BLOCK, BLOCK);
        memcpy(fine + to * BLOCK, other.fine + from * BLOCK, BLOCK);
        scales[to] = other.scales[from], sums[to] = other.sums[from], low_sums[to] = other.low_sums[from];
        fine_too[to] = other.fine_too[from];
      }
    }
  }
};

// The runs in which products take `rows` rows: `count` of them, by default as few as there can be, about equal.
struct Runs {
  int rows, count;

  explicit Runs(int rows) : Runs(rows, (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE) {}
  Runs(int rows, int count) : rows(rows), count(count) {}
  // Where one begins, a multiple of 16, or with number `count` the last ends.
  int begin(int run) const {
    const int64_t tiles = (rows + LANES - 1) / LANES;
    return std::min(rows, (int)(tiles * run / count) * LANES);
  }
};

// The uneven blocks of rows of an input, as products take them: of a run of rows block after block, so that a block of
// weights serves for several rows.
class UnevenBlocks {
public:
  struct Place {
    int32_t row, block, at; // `at` in the input
  };

  // Room for inputs of so many rows and blocks.
  void reserve(int rows, int blocks) {
    places_.reserve((int64_t)rows * blocks);
    pieces_.reserve(rows / LANES + 2);
  }

  // Of the rows from `from` on, a multiple of 16, that are taken in such runs.
  void find(const Input &x, int from, const Runs &runs) {
    places_.clear(), pieces_.clear();
    for (int run = 0; run < runs.count && x.form == Form::QUANTS && !ALL_FINE; run++) {
      const int first = from + runs.begin(run), last = from + runs.begin(run + 1);
      pieces_.push_back({first, (int)places_.size()});
      for (int block = 0; block < x.blocks; block++)
        for (int eight = first; eight < last; eight += 8) {
          uint64_t flags = load<uint64_t>(x.fine_too + x.place(eight, block));
          for (; flags; flags &= flags - 1)
            if (const int row = eight + __builtin_ctzll(flags) / 8; row < last)
              places_.push_back({row, block, (int32_t)x.place(row, block)});
        }
    }
    pieces_.push_back({INT_MAX, (int)places_.size()});
  }

  // Those of the rows of a product that begins with row `first`.
  const Place *begin(int first) const { return places_.data() + piece(first)[0].places; }
  const Place *end(int first) const { return places_.data() + piece(first)[1].places; }

private:
  struct Piece {
    int first, places; // the row and the place that a run begins with
  };
  const Piece *piece(int first) const {
    const Piece *found = pieces_.data();
    while (found->first < first)
      found++;
    return found;
  }

  std::vector<Place> places_;
  std::vector<Piece> pieces_;
};

struct Scales {
  f32x16 scale, minimum;
};
// Of a block, or of one half of it, for the quants as `Dot` takes them.
template <int KIND> INLINE Scales scales_of(const uint8_t *behind, int blocks, int block, int half = 0) {
  constexpr float offset = KIND == BYTES ? OFFSET : 0, zero = 1 << (bits_of(KIND) - 1);
  const f32x16 scale = half_to_float(behind + (int64_t)(half * blocks + block) * 32);
  if (with_minima(KIND))
    return {scale, half_to_float(behind + (int64_t)(blocks + block) * 32)};
  return {scale, scale * (offset - zero)};
}

// Quants 4 j, 4 j + 1, ... of a block of each output, in bytes.
template <int KIND> INLINE u32x16 quads(const uint8_t *block, int j) {
  if (KIND == BYTES)
    return load<u32x16>(block + 64 * j);
  const u32x16 both = load<u32x16>(block + 64 * (j % 4)), low = (j < 4 ? both : both >> 4) & 0x0F0F0F0Fu;
  if (KIND == FIVES_MIN)
    return low | (load<u32x16>(block + 256) >> j & 0x01010101u) << 4;
  if (KIND == SIXES)
    return low | (load<u32x16>(block + 256 + 64 * (j / 4)) >> 2 * (j % 4) & 0x03030303u) << 4;
  return low;
}

// acc + the product of a block of a quantized panel with one input row's block. Every kernel below sums in this order,
// so that a row's result does not depend on what it is computed with.
INLINE f32x16 add_block(f32x16 acc, i32x16 sum, Scales w, float scale, float quant_sum) {
  acc += to_float(sum) * (w.scale * scale);
  return acc + w.minimum * quant_sum;
}

// ROWS rows of one tile of the input, from row `from` of it, times a panel; without what is `fine`, unless all is.
template <int KIND, int ROWS>
static void quantized_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  constexpr int BITS = bits_of(KIND), PARTS = scales_a_block(KIND);
  const int blocks = x.blocks;
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  int64_t at = (int64_t)tile * blocks * LANES + from;
  f32x16 acc[ROWS] = {};
  const uint8_t *ahead = panel + PREFETCHED;
  for (int b = 0; b < blocks; b++, at += LANES) {
    const uint8_t *block = panel + (int64_t)b * block_bytes(KIND);
    for (int i = 0; i < block_bytes(KIND) + 64; i += 64, ahead += 64)
      __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      Dot dots[ROWS], fine[ROWS];
#pragma GCC unroll 8
      for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j++) {
        const u32x16 w = quads<KIND>(block, j);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
          dots[r].template add<BITS>(w, x.quants + (at + r) * BLOCK + 4 * j);
          if (ALL_FINE)
            fine[r].template add<BITS>(w, x.fine + (at + r) * BLOCK + 4 * j);
        }
      }
      const Scales s = scales_of<KIND>(behind, blocks, b, part);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        i32x16 sum = dots[r].template total<BITS>();
        float scale = x.scales[at + r];
        if (ALL_FINE)
          sum = (sum << 7) + fine[r].template total<BITS>(), scale *= FINE;
        const float first = PARTS > 1 ? x.low_sums[at + r] : x.sums[at + r];
        acc[r] = add_block(acc[r], sum, s, scale, part ? x.sums[at + r] - first : first);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, acc[r]);
}

// Add what is `fine` in uneven blocks of rows from `first` on, times a panel.
template <int KIND>
static void add_fine(const uint8_t *panel, const Input &x, const UnevenBlocks::Place *place,
                     const UnevenBlocks::Place *end, int first, float *out) {
  constexpr int BITS = bits_of(KIND), PARTS = scales_a_block(KIND);
  const uint8_t *behind = panel + (int64_t)x.blocks * block_bytes(KIND);
  u32x16 weights[8];
  f32x16 scales[PARTS];
  for (int there = -1; place < end; place++) {
    if (place->block != there) {
      there = place->block;
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++)
        weights[j] = quads<KIND>(panel + (int64_t)there * block_bytes(KIND), j);
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++)
        scales[part] = scales_of<KIND>(behind, x.blocks, there, part).scale;
    }
    const int64_t at = place->at;
    const float scale = x.scales[at] * FINE;
    float *to = out + (int64_t)(place->row - first) * LANES;
    f32x16 acc = load<f32x16>(to);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      Dot even, odd; // so that one need not wait for the other
#pragma GCC unroll 8
      for (int j = part * (8 / PARTS); j < (part + 1) * (8 / PARTS); j += 2) {
        even.template add<BITS>(weights[j], x.fine + at * BLOCK + 4 * j);
        odd.template add<BITS>(weights[j + 1], x.fine + at * BLOCK + 4 * j + 4);
      }
      acc += to_float(even.template total<BITS>() + odd.template total<BITS>()) * (scales[part] * scale);
    }
    store(to, acc);
  }
}

// The same as `quantized_rows` with bfloat16 weights; two sums, so that one need not wait for the other.
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

// The same with weights of 32 or 16 bits, each of which becomes a float.
template <int KIND, int ROWS>
static void float_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  constexpr int64_t BYTES_A_VECTOR = block_bytes(KIND) / BLOCK;
  auto weights = [](const uint8_t *p) { return KIND == FLOAT32 ? load<f32x16>(p) : half_to_float(p); };
  int64_t at = (int64_t)tile * x.blocks * LANES + from;
  f32x16 even[ROWS] = {}, odd[ROWS] = {};
  for (int b = 0; b < x.blocks; b++, at += LANES) {
    for (int j = 0; j < BLOCK; j += 2, panel += 2 * BYTES_A_VECTOR) {
      for (int i = 0; i < 2 * BYTES_A_VECTOR; i += 64)
        __builtin_prefetch(panel + PREFETCHED + i, 0, 2);
      const f32x16 first = weights(panel), second = weights(panel + BYTES_A_VECTOR);
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

template <int KIND, int ROWS>
INLINE void some_rows(const uint8_t *panel, const Input &x, int tile, int from, float *out) {
  if constexpr (KIND == PAIRS)
    pair_rows<ROWS>(panel, x, tile, from, out);
  else if constexpr (of_floats(KIND))
    float_rows<KIND, ROWS>(panel, x, tile, from, out);
  else
    quantized_rows<KIND, ROWS>(panel, x, tile, from, out);
}

// Rows `first` up to `last` of the input, `first` a multiple of 16, times a panel: float [last - first][16].
template <int KIND>
static void panel_product(const uint8_t *panel, const Input &x, const UnevenBlocks &uneven, int first, int last,
                          float *out) {
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
  if constexpr (KIND != PAIRS && !of_floats(KIND) && !ALL_FINE)
    add_fine<KIND>(panel, x, uneven.begin(first), uneven.end(first), first, out);
}

#if TENUTO_AMX
#include "tiles.h"
#endif

// `count` panels from `panel` on, times rows `first` up to `last` of the input: float [count][last - first][16]. At
// most `ROWS_AT_ONCE` rows; `first` is a multiple of 16; `uneven` are the input's; `buffer` has room for two unpacked
// panels.
static void product(const Matrix &w, int panel, int count, const Input &x, const UnevenBlocks &uneven, int first,
                    int last, float *out, uint8_t *buffer) {
#if TENUTO_AMX
  if (x.form == Form::HALVES) {
    tiles::product(w, panel, count, x, first, last, {out, LANES, (int64_t)(last - first) * LANES}, false, buffer);
    return;
  }
#endif
  for (int i = 0; i < count; i++, out += (int64_t)(last - first) * LANES) {
    const uint8_t *data = w.data + (panel + i) * w.stride;
    by_kind(w.kind, [&](auto kind) { panel_product<decltype(kind)::value>(data, x, uneven, first, last, out); });
  }
}

INLINE int64_t buffer_bytes(int blocks) { return (int64_t)blocks * 2 * 1024; }

// The weights of one output, float [inputs].
template <int KIND> static void weight_row(const uint8_t *panel, int lane, int inputs, float *to) {
  const int blocks = (inputs + BLOCK - 1) / BLOCK;
  const uint8_t *behind = panel + (int64_t)blocks * block_bytes(KIND);
  for (int b = 0; b < blocks; b++, panel += block_bytes(KIND)) {
    float scale = 0, minimum = 0;
    for (int k = 0; k < BLOCK && b * BLOCK + k < inputs; k++, to++) {
      if (KIND == PAIRS) {
        *to = float_of(load<uint16_t>(panel + (k / 2) * 64 + lane * 4 + (k % 2) * 2));
      } else if (KIND == FLOAT32) {
        *to = load<float>(panel + k * 64 + lane * 4);
      } else if (KIND == FLOAT16) {
        *to = lane_of(half_to_float(panel + k * 32), lane);
      } else {
        if (k % (BLOCK / scales_a_block(KIND)) == 0) {
          scale = lane_of(half_to_float(behind + (int64_t)(k / 16 * blocks + b) * 32), lane);
          minimum = with_minima(KIND) ? lane_of(half_to_float(behind + (int64_t)(blocks + b) * 32), lane)
                                      : scale * -(1 << (bits_of(KIND) - 1));
        }
        uint8_t quants[64];
        store(quants, quads<KIND>(panel, k / 4));
        *to = scale * quants[lane * 4 + k % 4] + minimum;
      }
    }
  }
}

static void weight_row(const Matrix &w, int output, float *to) {
  const uint8_t *panel = w.data + (output / LANES) * w.stride;
  by_kind(w.kind, [&](auto kind) { weight_row<decltype(kind)::value>(panel, output % LANES, w.inputs, to); });
}
