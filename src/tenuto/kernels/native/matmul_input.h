// The rows that weight matrices are multiplied with: their number formats, and the order in which products take them.
#pragma once

#include <algorithm>
#include <climits>
#include <vector>

#include "weight_formats.h"

constexpr int ROWS_AT_ONCE = 256; // input rows of one product
static_assert(ROWS_AT_ONCE % LANES == 0, "products write whole tiles");

// The number format of input rows: pairs of bfloat16 (see `PairElement`), quants, or float.
enum class InputType { BF16, INT8, F32 };
// The number of rows from which tiles are faster, although weights have to be unpacked for them; measured with one core
// of a Xeon with AMX.
constexpr int rows_for_tiles(PanelFormat format) { return format == PanelFormat::F16 ? 4 : 5; }
// Returns the type of `rows` input rows for products with a matrix of `format`. Tiles multiply bfloat16, except with
// float32 weights.
constexpr InputType input_type(PanelFormat format, int rows) {
  if (format == PanelFormat::BF16 || format == PanelFormat::FP8 ||
      (TENUTO_AMX && format != PanelFormat::F32 && rows >= rows_for_tiles(format)))
    return InputType::BF16;
  return format == PanelFormat::F32 || format == PanelFormat::F16 ? InputType::F32 : InputType::INT8;
}

// Quants of the input have 8 bits, or 15 bits as 128 * quants + fine. Blocks have 15 bits if their highest square is
// more than `OUTLIER_RATIO` times their mean square, so that 8 bits would leave few steps to the other values. Up to a
// tenth of the blocks are such outliers, and most of the error of 8 bits is in them. With AMX all blocks have 15 bits:
// only few rows are then multiplied as quants, and memory is slower than the additional products.
constexpr bool ALWAYS_15_BITS = TENUTO_AMX;
constexpr float OUTLIER_RATIO = 23.0f;
constexpr float FINE_STEP = 1.0f / 128.0f; // of a quant

// Input rows in tiles of 16 rows and blocks of 32 columns. `type` says which arrays are used.
//   INT8: `quants` and `fine`, int8 [rows / 16][blocks][16][32]. With i8mm the quants of two rows take turns, eight
//         each: `quants` is [rows / 16][blocks][8][4][2][8] then. For each block of a row, [rows / 8][blocks][8]: float
//         `scales` of `quants`, the sums of the values that the quants stand for, of all 32 (`sums`) and of the first
//         half (`first_half_sums`), and `has_fine`, whether the block has 15 bits. Thus two threads with eight rows
//         each write to no common cache line.
//   BF16: `pairs`, and F32: `floats`, [rows / 16][blocks][16][32].
struct Input {
  int blocks;
  InputType type;
  int8_t *quants, *fine;
  float *scales, *sums, *first_half_sums;
  uint8_t *has_fine;
  PairElement *pairs;
  float *floats;

  // Returns the index of a block of a row.
  int64_t index(int row, int block) const { return ((int64_t)(row / LANES) * blocks + block) * LANES + row % LANES; }
  // Does the same for `scales`, `sums`, `first_half_sums` and `has_fine`.
  int64_t scale_index(int row, int block) const { return ((int64_t)(row / 8) * blocks + block) * 8 + row % 8; }

  // Return where `quants` has a block of the row with index `at`, and from there on its columns 4 j to 4 j + 3.
  static int64_t quants_of(int64_t at) { return TENUTO_I8MM ? (at & ~1) * BLOCK + (at & 1) * 8 : at * BLOCK; }
  static constexpr int quad(int j) { return TENUTO_I8MM ? j / 2 * 16 + j % 2 * 4 : 4 * j; }

  // Sets columns 32 * block to 32 * block + 31 of a row. Quants are x / scale, rounded to the nearest; the highest |x|
  // becomes 127, or 127 * 128 with 15 bits.
  void set(int row, int block, f32x16 a, f32x16 b) const {
    int64_t at = index(row, block);
    if (type == InputType::BF16) {
      store_elements(pairs + at * BLOCK, a);
      store_elements(pairs + at * BLOCK + LANES, b);
      return;
    }
    if (type == InputType::F32) {
      store(floats + at * BLOCK, a);
      store(floats + at * BLOCK + LANES, b);
      return;
    }
    float highest = highest16(max16(max16(a, -a), max16(b, -b)));
    const bool fifteen_bits = ALWAYS_15_BITS || highest * highest * BLOCK > OUTLIER_RATIO * sum16(a * a + b * b);
    const float most = fifteen_bits ? 127.0f * 128.0f : 127.0f;
    float scale = highest / most, inverse = highest > 0.0f ? most / highest : 0.0f;
    const i32x16 qa = nearest(a * inverse), qb = nearest(b * inverse);
    i32x16 coarse_a = qa, coarse_b = qb;
    if (fifteen_bits) {
      coarse_a = (qa + 64) >> 7, coarse_b = (qb + 64) >> 7;
      store(fine + at * BLOCK, to_bytes(qa - (coarse_a << 7)));
      store(fine + at * BLOCK + 16, to_bytes(qb - (coarse_b << 7)));
    }
    set_quants(at, to_bytes(coarse_a), to_bytes(coarse_b));
    const int64_t one = scale_index(row, block);
    has_fine[one] = fifteen_bits;
    scales[one] = fifteen_bits ? scale / FINE_STEP : scale;
    sums[one] = scale * sum16(to_float(qa + qb));
    first_half_sums[one] = scale * sum16(to_float(qa));
  }

  // Returns these columns, as products read them.
  void get(int row, int block, float *to) const {
    const int64_t at = index(row, block);
    if (type == InputType::INT8) {
      const int64_t one = scale_index(row, block);
      const float scale = scales[one], fine_scale = has_fine[one] ? scale * FINE_STEP : 0.0f;
      for (int k = 0; k < BLOCK; k++)
        to[k] = quants[quants_of(at) + quad(k / 4) + k % 4] * scale + fine[at * BLOCK + k] * fine_scale;
      return;
    }
    for (int k = 0; k < BLOCK; k += LANES)
      store(to + k,
            type == InputType::BF16 ? load_elements(pairs + at * BLOCK + k) : load<f32x16>(floats + at * BLOCK + k));
  }

  // Copies row `from_row` of another input of the same type to `row`.
  void copy_row(int row, const Input &other, int from_row) const {
    for (int block = 0; block < blocks; block++) {
      const int64_t to = index(row, block), from = other.index(from_row, block);
      if (type == InputType::BF16) {
        memcpy(pairs + to * BLOCK, other.pairs + from * BLOCK, sizeof(PairElement) * BLOCK);
      } else if (type == InputType::F32) {
        memcpy(floats + to * BLOCK, other.floats + from * BLOCK, sizeof(float) * BLOCK);
      } else {
        int32_t quads[BLOCK / 4]; // so that the compiler need not copy one after the other
        for (int j = 0; j < BLOCK / 4; j++)
          memcpy(&quads[j], other.quants + quants_of(from) + quad(j), 4);
        for (int j = 0; j < BLOCK / 4; j++)
          memcpy(quants + quants_of(to) + quad(j), &quads[j], 4);
        memcpy(fine + to * BLOCK, other.fine + from * BLOCK, BLOCK);
        const int64_t one = scale_index(row, block), its = other.scale_index(from_row, block);
        scales[one] = other.scales[its], sums[one] = other.sums[its];
        first_half_sums[one] = other.first_half_sums[its], has_fine[one] = other.has_fine[its];
      }
    }
  }

private:
  void set_quants(int64_t at, i8x16 a, i8x16 b) const {
#if TENUTO_I8MM
    int8_t *const to = quants + quants_of(at);
    vst1_s8(to, vget_low_s8((int8x16_t)a)), vst1_s8(to + 16, vget_high_s8((int8x16_t)a));
    vst1_s8(to + 32, vget_low_s8((int8x16_t)b)), vst1_s8(to + 48, vget_high_s8((int8x16_t)b));
#else
    store(quants + at * BLOCK, a), store(quants + at * BLOCK + 16, b);
#endif
  }
};

// The runs of rows that products take at once: `count` runs of about equal length, by default as few as possible.
struct Runs {
  int rows, count;

  explicit Runs(int rows) : Runs(rows, (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE) {}
  Runs(int rows, int count) : rows(rows), count(count) {}
  // Returns the first row of a run, a multiple of 16; with `run` equal to `count`, the end of the last run.
  int begin(int run) const {
    const int64_t tiles = (rows + LANES - 1) / LANES;
    return std::min(rows, (int)(tiles * run / count) * LANES);
  }
};

// The blocks of an input's rows that have outliers, so 15 bits. Within a run of rows they are sorted by block, so that
// a block of weights is loaded once for several rows, and their `fine` quants are copied, so that products read them in
// the order of memory.
class OutlierBlocks {
public:
  struct Entry {
    int32_t row, block;
    float scale; // of `fine`
    alignas(16) int8_t fine[BLOCK];
  };

  // Reserves room for inputs of `rows` rows and `blocks` blocks.
  void reserve(int rows, int blocks) {
    entries_.reserve((int64_t)rows * blocks);
    runs_.reserve(rows / LANES + 2);
  }

  // Finds those of the rows from `from` on, a multiple of 16, which products take in `runs`.
  void find(const Input &x, int from, const Runs &runs) {
    entries_.clear(), runs_.clear();
    for (int run = 0; run < runs.count && x.type == InputType::INT8 && !ALWAYS_15_BITS; run++) {
      const int first = from + runs.begin(run), last = from + runs.begin(run + 1);
      runs_.push_back({first, (int)entries_.size()});
      for (int block = 0; block < x.blocks; block++)
        for (int eight = first; eight < last; eight += 8) {
          uint64_t flags = load<uint64_t>(x.has_fine + x.scale_index(eight, block));
          for (; flags; flags &= flags - 1)
            if (const int row = eight + __builtin_ctzll(flags) / 8; row < last)
              add(x, row, block);
        }
    }
    runs_.push_back({INT_MAX, (int)entries_.size()});
  }

  // Return the entries of the run that begins with row `first`.
  const Entry *begin(int first) const { return entries_.data() + run_at(first)[0].entries; }
  const Entry *end(int first) const { return entries_.data() + run_at(first)[1].entries; }

private:
  struct Run {
    int first, entries; // the first row, and the first entry
  };

  void add(const Input &x, int row, int block) {
    Entry &entry = entries_.emplace_back();
    entry.row = row, entry.block = block, entry.scale = x.scales[x.scale_index(row, block)] * FINE_STEP;
    memcpy(entry.fine, x.fine + x.index(row, block) * BLOCK, BLOCK);
  }

  const Run *run_at(int first) const {
    const Run *found = runs_.data();
    while (found->first < first)
      found++;
    return found;
  }

  std::vector<Entry> entries_;
  std::vector<Run> runs_;
};
