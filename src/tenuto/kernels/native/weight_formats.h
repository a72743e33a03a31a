// Weight formats: how a matrix is stored in panels, with one struct for each format. `formats.py` has the same formats
// and fills the panels.
#pragma once

#include "simd.h"

constexpr int LANES = 16; // outputs of a panel, and rows of a tile of inputs
constexpr int BLOCK = 32; // inputs that share a scale

// Number of bytes that weights are prefetched ahead, into the L2 cache, across panels: a panel's scales and the next
// panel follow without a gap.
constexpr int PREFETCH_DISTANCE = 24576;

// Formats are named after the type of ggml whose weights they hold without loss, and INT4, INT8 and FP8 after what
// safetensors files hold. Other types of files are converted to them. The values are those of `PanelFormat` in
// `formats.py`.
enum class PanelFormat : int32_t {
  Q4_0 = 0,
  Q4_1 = 1,
  Q8_0 = 2,
  Q5_1 = 3,
  BF16 = 4,
  Q6_K = 5,
  F32 = 6,
  F16 = 7,
  Q2_K = 8,
  Q3_K = 9,
  IQ4_NL = 10,
  IQ4_XS = 11,
  MXFP4 = 12,
  INT4 = 13,
  INT8 = 14,
  FP8 = 15
};

// A weight matrix of `outputs` by `inputs`, both padded with zeros to multiples of 16 and 32. Panel p, at data + p *
// stride, holds outputs 16 p to 16 p + 15: the blocks of 32 inputs, one after the other, each as its format says. Lane
// n of a vector belongs to output n of the panel.
//
// In quantized formats w = scale * q + minimum, where q is an unsigned number of `BITS` bits. Scales and minima are
// behind all blocks, as the format's `Layout` says; 2^group neighbouring blocks share one, unless the layout itself
// says how many do. In other formats with `SCALED` w = scale * (the stored float).
struct Matrix {
  PanelFormat format;
  int32_t outputs, inputs, panels, group;
  int64_t stride;
  const uint8_t *data;
  const float *bias; // [panels * 16], or null
};

// The scales of a panel.
struct Behind {
  const uint8_t *data; // the end of the panel's blocks
  int blocks, group;
  int groups() const { return ((blocks - 1) >> group) + 1; }
};

// A panel of a matrix. While it is multiplied, what is at `ahead` is prefetched.
struct Panel {
  const uint8_t *data, *ahead;
  int blocks, group;
  Panel(const Matrix &w, int number)
      : data(w.data + (int64_t)number * w.stride), ahead(data + PREFETCH_DISTANCE),
        blocks((w.inputs + BLOCK - 1) / BLOCK), group(w.group) {}
  // Panel `of`, with other blocks, each with its own scales.
  Panel(const Panel &of, const uint8_t *data) : data(data), ahead(of.ahead), blocks(of.blocks), group(0) {}
  template <class Format> const uint8_t *block(int b) const { return data + (int64_t)b * Format::BLOCK_BYTES; }
  template <class Format> Behind behind() const { return {block<Format>(blocks), blocks, group}; }
};

// Layouts of scales and minima. `scale(at, block, part)` and, with `MINIMA`, `minimum(at, block, part)` return those of
// part `part` of a block: a block has `PARTS` scales, each for an equal part of its inputs.

// float16 scales [PARTS][groups][16], and then minima [PARTS][groups][16].
template <int parts, bool minima> struct Halves {
  static constexpr int PARTS = parts;
  static constexpr bool MINIMA = minima;
  INLINE f32x16 scale(const Behind &at, int block, int part) {
    return float16_to_float(at.data + ((int64_t)part * at.groups() + (block >> at.group)) * 32);
  }
  INLINE f32x16 minimum(const Behind &at, int block, int part) { return scale(at, block, parts + part); }
};

// float32 scales [PARTS][groups][16], and then minima [PARTS][groups][16].
template <int parts, bool minima> struct Floats {
  static constexpr int PARTS = parts;
  static constexpr bool MINIMA = minima;
  INLINE f32x16 scale(const Behind &at, int block, int part) {
    return load<f32x16>(at.data + ((int64_t)part * at.groups() + (block >> at.group)) * 64);
  }
  INLINE f32x16 minimum(const Behind &at, int block, int part) { return scale(at, block, parts + part); }
};

constexpr int TOGETHER = 8; // blocks that share the unit of their codes

// Codes c, uint8 [PARTS][blocks][16], and float16 units [blocks / 8][16]: a scale is unit * (c - 128).
template <int parts> struct Codes {
  static constexpr int PARTS = parts;
  static constexpr bool MINIMA = false;
  INLINE f32x16 scale(const Behind &at, int block, int part) {
    const i32x16 code = as<i32x16>(load_bytes(at.data + ((int64_t)part * at.blocks + block) * 16)) - 128;
    return to_float(code) * float16_to_float(at.data + (int64_t)parts * at.blocks * 16 + block / TOGETHER * 32);
  }
};

// Codes c, uint8 [PARTS][blocks][16], and float16 units [2][blocks / 8][16]: a scale is the first unit times the lower
// four bits of c, and a minimum minus the second unit times the higher four.
template <int parts> struct PairedCodes {
  static constexpr int PARTS = parts;
  static constexpr bool MINIMA = true;
  INLINE u32x16 code(const Behind &at, int block, int part) {
    return load_bytes(at.data + ((int64_t)part * at.blocks + block) * 16);
  }
  INLINE f32x16 unit(const Behind &at, int block, int which) {
    const int64_t units = at.blocks / TOGETHER, first = (int64_t)parts * at.blocks * 16;
    return float16_to_float(at.data + first + (which * units + block / TOGETHER) * 32);
  }
  INLINE f32x16 scale(const Behind &at, int block, int part) {
    return to_float(as<i32x16>(code(at, block, part) & 15u)) * unit(at, block, 0);
  }
  INLINE f32x16 minimum(const Behind &at, int block, int part) {
    return to_float(as<i32x16>(code(at, block, part) >> 4)) * -unit(at, block, 1);
  }
};

// Exponents e, uint8 [blocks][16]: a scale is 2^(e - 128).
struct Exponents {
  static constexpr int PARTS = 1;
  static constexpr bool MINIMA = false;
  INLINE f32x16 scale(const Behind &at, int block, int) {
    const u32x16 bits = load_bytes(at.data + (int64_t)block * 16) << 23; // of 2^(e - 127), unless e is 0
    return as<f32x16>(select(bits != 0u, bits, bits + 0x00400000u)) * 0.5f;
  }
};

// The quants of 4 bits in a block: 4 vectors, which have q[4 j + i] in the low half of byte i of vector j, and q[16 + 4
// j + i] in the high half. Returns quants 4 j to 4 j + 3 of each output, in bytes.
INLINE u32x16 nibbles(const uint8_t *block, int j) {
  const u32x16 both = load<u32x16>(block + 64 * (j % 4));
  return j < 4 ? both & 0x0F0F0F0Fu : high_nibbles(both);
}
// Two bits of each weight: 2 vectors; those of weight 16 h + 4 j + i are bits 2 j and 2 j + 1 of byte i of vector h.
INLINE u32x16 crumbs(const uint8_t *block, int j) {
  return load<u32x16>(block + 64 * (j / 4)) >> 2 * (j % 4) & 0x03030303u;
}
// One bit of each weight: bit j of byte i of the vector belongs to weight 4 j + i.
INLINE u32x16 single_bits(const uint8_t *block, int j) { return load<u32x16>(block) >> j & 0x01010101u; }

// A quantized format has these constants and `quads(block, j)`, which returns quants 4 j to 4 j + 3 of each output, in
// bytes. Where the layout has no minima, the minimum is -2^(BITS - 1) scale.
template <int bits, int vectors, class Scaling> struct Quantized {
  static constexpr bool QUANTIZED = true, SCALED = true, MINIMA = Scaling::MINIMA;
  static constexpr bool UNPACKED = false;
  static constexpr int BITS = bits, PARTS = Scaling::PARTS, BLOCK_BYTES = vectors * 64;
  static constexpr int AHEAD_BYTES = BLOCK_BYTES + 64; // prefetched with a block: as many as it has, and its scales
  typedef Scaling Layout;
};

struct Q4_0 : Quantized<4, 4, Halves<1, false>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j); }
};

struct Q4_1 : Quantized<4, 4, Halves<1, true>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j); }
};

struct INT4 : Quantized<4, 4, Floats<1, true>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j); }
};

// Nibbles, and then the fifth bits.
struct Q5_1 : Quantized<5, 5, Halves<1, true>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j) | single_bits(block + 256, j) << 4; }
};

// Nibbles, and then the two higher bits.
struct Q6_K : Quantized<6, 6, Halves<2, false>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return nibbles(block, j) | crumbs(block + 256, j) << 4; }
};

struct Q2_K : Quantized<2, 2, PairedCodes<2>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return crumbs(block, j); }
};

// The two lower bits, and then the third ones.
struct Q3_K : Quantized<3, 3, Codes<2>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return crumbs(block, j) | single_bits(block + 128, j) << 2; }
};

// Byte i of vector j is q[4 j + i].
struct Q8_0 : Quantized<8, 8, Halves<1, false>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return load<u32x16>(block + 64 * j); }
};

struct INT8 : Quantized<8, 8, Floats<1, true>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return load<u32x16>(block + 64 * j); }
};

// Nibbles that number the values of a code book. Values are stored with the offset of quants, 2^(BITS - 1).
constexpr uint8_t IQ4_BOOK[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t MXFP4_BOOK[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

struct IQ4_NL : Quantized<8, 4, Halves<1, false>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return looked_up(IQ4_BOOK, nibbles(block, j)); }
};

struct IQ4_XS : Quantized<8, 4, Codes<1>> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return looked_up(IQ4_BOOK, nibbles(block, j)); }
};

// Floats of 4 bits (E2M1), doubled.
struct MXFP4 : Quantized<5, 4, Exponents> {
  INLINE u32x16 quads(const uint8_t *block, int j) { return looked_up(MXFP4_BOOK, nibbles(block, j)); }
};

#if TENUTO_I8MM
// Returns quants 8 i to 8 i + 7 of outputs 8 HALF to 8 HALF + 7, in bytes.
template <class Format, int HALF> INLINE u32x16 octets(const uint8_t *block, int i) {
  if constexpr (Format::UNPACKED)
    return load<u32x16>(block + 128 * i + 64 * HALF);
  else
    return interleaved<HALF>(Format::quads(block, 2 * i), Format::quads(block, 2 * i + 1));
}
#endif

// A panel of `Format` whose quants are bytes and whose scales are float32; see `unpack` in `matmul_simd.h`. The vectors
// of a block are `quads`, or with i8mm `octets`.
template <class Format> struct Unpacked : Quantized<Format::BITS, 8, Floats<Format::PARTS, true>> {
  static constexpr bool UNPACKED = true;
  static constexpr int AHEAD_BYTES = Format::AHEAD_BYTES;
#if TENUTO_I8MM
  INLINE u32x16 quads(const uint8_t *block, int j) {
    return separated(octets<Unpacked, 0>(block, j / 2), octets<Unpacked, 1>(block, j / 2), j % 2);
  }
#else
  INLINE u32x16 quads(const uint8_t *block, int j) { return load<u32x16>(block + 64 * j); }
#endif
  // Returns vector j of a block that is not unpacked yet.
  INLINE u32x16 vector(const uint8_t *block, int j) {
#if TENUTO_I8MM
    return j % 2 ? octets<Format, 1>(block, j / 2) : octets<Format, 0>(block, j / 2);
#else
    return Format::quads(block, j);
#endif
  }
};

template <int block_bytes, bool scaled = false> struct Unquantized {
  static constexpr bool QUANTIZED = false, SCALED = scaled, UNPACKED = false;
  static constexpr int BLOCK_BYTES = block_bytes;
};

// Lane n of vector j has the pair w[2 j], w[2 j + 1].
struct BF16 : Unquantized<16 * 64> {
  INLINE Pairs pairs(const uint8_t *vector) { return load_pairs(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) {
    return float_of(load<uint16_t>(block + (k / 2) * 64 + lane * 4 + (k % 2) * 2));
  }
};

// Vector j has w[j].
struct F16 : Unquantized<32 * 32> {
  INLINE f32x16 weights(const uint8_t *vector) { return float16_to_float(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) { return lane_of(weights(block + k * 32), lane); }
};

// Vector j has w[j].
struct F32 : Unquantized<32 * 64> {
  INLINE f32x16 weights(const uint8_t *vector) { return load<f32x16>(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) { return load<float>(block + k * 64 + lane * 4); }
};

// Lane n of vector j has the pair w[2 j], w[2 j + 1] of floats of 8 bits (E4M3).
struct FP8 : Unquantized<32 * 16, true> {
  typedef Floats<1, false> Layout;
  INLINE Pairs pairs(const uint8_t *vector) { return e4m3_pairs(vector); }
  INLINE float weight(const uint8_t *block, int k, int lane) {
    const uint32_t bits = block[k / 2 * 32 + lane * 2 + k % 2];
    return float_of((uint16_t)((bits & 0x80) << 8 | (bits & 0x7F) << 4)) * 0x1p120f;
  }
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
  case PanelFormat::Q2_K:
    return use(Q2_K());
  case PanelFormat::Q3_K:
    return use(Q3_K());
  case PanelFormat::IQ4_NL:
    return use(IQ4_NL());
  case PanelFormat::IQ4_XS:
    return use(IQ4_XS());
  case PanelFormat::MXFP4:
    return use(MXFP4());
  case PanelFormat::INT4:
    return use(INT4());
  case PanelFormat::INT8:
    return use(INT8());
  case PanelFormat::F32:
    return use(F32());
  case PanelFormat::F16:
    return use(F16());
  case PanelFormat::FP8:
    return use(FP8());
  default:
    return use(BF16());
  }
}

// Returns the minimum of part `part` of a block, whose scale is `scale`.
template <class Format> INLINE f32x16 minimum_of(const Behind &at, int block, int part, f32x16 scale) {
  if constexpr (Format::MINIMA)
    return Format::Layout::minimum(at, block, part);
  else
    return scale * (float)-(1 << (Format::BITS - 1));
}

struct Scales {
  f32x16 scale, minimum;
};
// Returns the scale and the minimum of part `part` of a block, for quants as `Dot` reads them.
template <class Format> INLINE Scales scales_of(const Behind &at, int block, int part = 0) {
  constexpr float offset = Format::BITS == 8 ? Dot::OFFSET : 0;
  const f32x16 scale = Format::Layout::scale(at, block, part);
  const f32x16 minimum = minimum_of<Format>(at, block, part, scale);
  return {scale, offset != 0 ? minimum + scale * offset : minimum};
}

// Copies the weights of one output, float [inputs], to `to`.
template <class Format> static void weight_row(const Panel &panel, int lane, int inputs, float *to) {
  const Behind behind = panel.behind<Format>();
  for (int k = 0; k < inputs; k++) {
    const uint8_t *block = panel.block<Format>(k / BLOCK);
    if constexpr (!Format::QUANTIZED) {
      to[k] = Format::weight(block, k % BLOCK, lane);
      if constexpr (Format::SCALED)
        to[k] *= lane_of(Format::Layout::scale(behind, k / BLOCK, 0), lane);
    } else {
      const int part = k % BLOCK / (BLOCK / Format::PARTS);
      const f32x16 scale = Format::Layout::scale(behind, k / BLOCK, part);
      const f32x16 minimum = minimum_of<Format>(behind, k / BLOCK, part, scale);
      uint8_t quants[64];
      store(quants, Format::quads(block, k % BLOCK / 4));
      to[k] = lane_of(scale, lane) * quants[lane * 4 + k % 4] + lane_of(minimum, lane);
    }
  }
}

static void weight_row(const Matrix &w, int output, float *to) {
  const Panel panel(w, output / LANES);
  with_format(w.format, [&](auto format) { weight_row<decltype(format)>(panel, output % LANES, w.inputs, to); });
}
