// Weight formats: how a matrix is stored in panels, with one struct for each format. `formats.py` has the same formats
// and fills the panels.
#pragma once

#include "simd.h"

constexpr int LANES = 16; // outputs of a panel, and rows of a tile of inputs
constexpr int BLOCK = 32; // inputs that share a scale

// Formats are named after the type of ggml whose weights they hold without loss. Other types of files are converted to
// them. The values are those of `PanelFormat` in `formats.py`.
enum class PanelFormat : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, Q5_1 = 3, BF16 = 4, Q6_K = 5, F32 = 6, F16 = 7 };

// A weight matrix of `outputs` by `inputs`, both padded with zeros to multiples of 16 and 32. Panel p, at data + p *
// stride, holds outputs 16 p to 16 p + 15: the blocks of 32 inputs, one after the other, each as its format says. Lane
// n of a vector belongs to output n of the panel.
//
// In quantized formats w = scale * q + minimum, where q is an unsigned number of `BITS` bits. Behind all blocks a panel
// has float16 scales [PARTS][blocks][16], and then, in formats with `MINIMA`, float16 minima [PARTS][blocks][16].
struct Matrix {
  PanelFormat format;
  int32_t outputs, inputs, panels;
  int64_t stride;
  const uint8_t *data;
  const float *bias; // [panels * 16], or null
};

// The quants of 4 bits in a block: 4 vectors, which have q[4 j + i] in the low half of byte i of vector j, and q[16 + 4
// j + i] in the high half. Returns quants 4 j to 4 j + 3 of each output, in bytes.
INLINE u32x16 nibbles(const uint8_t *block, int j) {
  const u32x16 both = load<u32x16>(block + 64 * (j % 4));
  return (j < 4 ? both : both >> 4) & 0x0F0F0F0Fu;
}

// A quantized format has these constants and `quads(block, j)`, which returns quants 4 j to 4 j + 3 of each output, in
// bytes. `PARTS` is the number of scales of a block, each for an equal part of its inputs. Without `MINIMA` the minimum
// is -2^(BITS - 1) scale.
template <int bits, int bytes_a_weight_vector, int parts, bool minima> struct Quantized {
  static constexpr bool QUANTIZED = true, MINIMA = minima;
  static constexpr int BITS = bits, PARTS = parts, BLOCK_BYTES = bytes_a_weight_vector;
};

struct Q4_0 : Quantized<4, 4 * 64, 1, false> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j); }
};

struct Q4_1 : Quantized<4, 4 * 64, 1, true> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j); }
};

// Nibbles, and then a vector of the fifth bits: bit j of byte i belongs to q[4 j + i].
struct Q5_1 : Quantized<5, 5 * 64, 1, true> {
  INLINE u32x16 quads(const uint8_t *block, int j) {
    const u32x16 low = nibbles(block, j);
    return low | (load<u32x16>(block + 256) >> j & 0x01010101u) << 4;
  }
};

// Nibbles, and then two vectors of the two higher bits: those of weight 16 h + 4 j + i are bits 2 j and 2 j + 1 of byte
// i of vector h.
struct Q6_K : Quantized<6, 6 * 64, 2, false> {
  INLINE u32x16 quads(const uint8_t *block, int j) {
    const u32x16 low = nibbles(block, j);
    return low | (load<u32x16>(block + 256 + 64 * (j / 4)) >> 2 * (j % 4) & 0x03030303u) << 4;
  }
};

// Byte i of vector j is q[4 j + i].
struct Q8_0 : Quantized<8, 8 * 64, 1, false> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return load<u32x16>(block + 64 * j); }
};

// Lane n of vector j has the pair w[2 j], w[2 j + 1].
struct BF16 {
  static constexpr bool QUANTIZED = false;
  static constexpr int BLOCK_BYTES = 16 * 64;
  INLINE float weight(const uint8_t *block, int k, int lane) {
    return float_of(load<uint16_t>(block + (k / 2) * 64 + lane * 4 + (k % 2) * 2));
  }
};

// Vector j has w[j].
struct F16 {
  static constexpr bool QUANTIZED = false;
  static constexpr int BLOCK_BYTES = 32 * 32;
  INLINE f32x16 weights(const uint8_t *vector) { return float16_to_float(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) { return lane_of(weights(block + k * 32), lane); }
};

// Vector j has w[j].
struct F32 {
  static constexpr bool QUANTIZED = false;
  static constexpr int BLOCK_BYTES = 32 * 64;
  INLINE f32x16 weights(const uint8_t *vector) { return load<f32x16>(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) { return load<float>(block + k * 64 + lane * 4); }
};

// Calls `use` with an object of the struct for `format`, so that `use` is compiled for each.
template <class Use> INLINE void with_format(PanelFormat format, Use use) {
  switch (format) {
  case PanelFormat::Q4_0:
    return use(Q4_0());
  case PanelFormat::Q4_1:
    return use(Q4_1());
  case PanelFormat::Q8_0:
    return use(Q8_0());
  case PanelFormat::Q5_1:
    return use(Q5_1());
  case PanelFormat::Q6_K:
    return use(Q6_K());
  case PanelFormat::F32:
    return use(F32());
  case PanelFormat::F16:
    return use(F16());
  default:
    return use(BF16());
  }
}

struct Scales {
  f32x16 scale, minimum;
};
// Returns the scale and the minimum of part `part` of a block, for quants as `Dot` reads them. `behind` is the end of
// the panel's blocks.
template <class Format> INLINE Scales scales_of(const uint8_t *behind, int blocks, int block, int part = 0) {
  constexpr float offset = Format::BITS == 8 ? OFFSET : 0, zero = 1 << (Format::BITS - 1);
  const f32x16 scale = float16_to_float(behind + (int64_t)(part * blocks + block) * 32);
  if (Format::MINIMA)
    return {scale, float16_to_float(behind + (int64_t)((Format::PARTS + part) * blocks + block) * 32)};
  return {scale, scale * (offset - zero)};
}

// Copies the weights of one output, float [inputs], to `to`.
template <class Format> static void weight_row(const uint8_t *panel, int lane, int inputs, float *to) {
  const int blocks = (inputs + BLOCK - 1) / BLOCK;
  const uint8_t *behind = panel + (int64_t)blocks * Format::BLOCK_BYTES;
  for (int b = 0; b < blocks; b++, panel += Format::BLOCK_BYTES) {
    float scale = 0, minimum = 0;
    for (int k = 0; k < BLOCK && b * BLOCK + k < inputs; k++, to++) {
      if constexpr (!Format::QUANTIZED) {
        *to = Format::weight(panel, k, lane);
      } else {
        constexpr int SIZE = BLOCK / Format::PARTS;
        if (k % SIZE == 0) {
          scale = lane_of(float16_to_float(behind + (int64_t)(k / SIZE * blocks + b) * 32), lane);
          minimum =
              Format::MINIMA
                  ? lane_of(float16_to_float(behind + (int64_t)((Format::PARTS + k / SIZE) * blocks + b) * 32), lane)
                  : scale * -(1 << (Format::BITS - 1));
        }
        uint8_t quants[64];
        store(quants, Format::quads(panel, k / 4));
        *to = scale * quants[lane * 4 + k % 4] + minimum;
      }
    }
  }
}

static void weight_row(const Matrix &w, int output, float *to) {
  const uint8_t *panel = w.data + (output / LANES) * w.stride;
  with_format(w.format, [&](auto format) { weight_row<decltype(format)>(panel, output % LANES, w.inputs, to); });
}
