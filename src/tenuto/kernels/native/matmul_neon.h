// Products of a panel and pairs of input rows, with instructions of 64-bit Arm for two rows and two outputs at once: of
// eight inputs with quantized weights (i8mm), and of four with bfloat16.
#pragma once

#include "matmul_input.h"

// Does what `quantized_rows` does, bit by bit, for ROWS rows, 2 or 4, and outputs 8 HALF to 8 HALF + 7 of a panel.
template <class Format, int ROWS, int HALF>
INLINE void multiply_half(const Panel &panel, const Input &x, int tile, int from, float *out) {
  constexpr int PAIRS = ROWS / 2, PARTS = Format::PARTS, OCTETS = 4 / PARTS; // of a part
  const int blocks = x.blocks;
  const bool fetches = HALF == 0 && (!Format::UNPACKED || panel.ahead);
  const int8_t *quants = x.quants + Input::quants_of((int64_t)tile * blocks * LANES + from);
  const int64_t one = x.scale_index(tile * LANES + from, 0);
  const float *scales = x.scales + one, *sums = x.sums + one, *first_half_sums = x.first_half_sums + one;
  const uint8_t *block = panel.data, *ahead = panel.ahead;
  float32x4_t acc[ROWS][2];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
    acc[r][0] = acc[r][1] = vdupq_n_f32(0.0f);
  for (int b = 0; b < blocks; b++) {
    // Otherwise the compiler would keep a register for each address, instead of offsets from these two.
    asm volatile("" : "+r"(quants), "+r"(block));
    for (int i = 0; fetches && i < Format::AHEAD_BYTES; i += 64)
      __builtin_prefetch(ahead + i, 0, 2);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      int32x4_t dots[PAIRS][4]; // {output, row}: {0, 0}, {0, 1}, {1, 0}, {1, 1}
#pragma GCC unroll 4
      for (int octet = part * OCTETS; octet < (part + 1) * OCTETS; octet++) {
        const u32x16 both = octets<Format, HALF>(block, octet);
        const u32x4 w[] = {both.a, both.b, both.c, both.d};
#pragma GCC unroll 2
        for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 4
          for (int k = 0; k < 4; k++)
            dots[p][k] = vusmmlaq_s32(octet % OCTETS ? dots[p][k] : vdupq_n_s32(0), (uint8x16_t)w[k],
                                      load<int8x16_t>(quants + 2 * p * BLOCK + 16 * octet));
      }
      const Scales s = scales_of<Format>(panel.behind<Format>(), b, part);
      const f32x4 w_scales[] = {HALF ? s.scale.c : s.scale.a, HALF ? s.scale.d : s.scale.b};
      const f32x4 minima[] = {HALF ? s.minimum.c : s.minimum.a, HALF ? s.minimum.d : s.minimum.b};
#pragma GCC unroll 2
      for (int p = 0; p < PAIRS; p++) {
        const float32x2_t scale = vld1_f32(scales + 2 * p), all = vld1_f32(sums + 2 * p);
        const float32x2_t first = PARTS > 1 ? vld1_f32(first_half_sums + 2 * p) : all;
        const float32x2_t sum = part ? vsub_f32(all, first) : first;
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
          const int32x4_t low = dots[p][2 * k], high = dots[p][2 * k + 1];
          const float32x4_t w_scale = (float32x4_t)w_scales[k], minimum = (float32x4_t)minima[k];
          const float32x4_t even = vcvtq_f32_s32(vuzp1q_s32(low, high)), odd = vcvtq_f32_s32(vuzp2q_s32(low, high));
          float32x4_t &at = acc[2 * p][k], &then = acc[2 * p + 1][k];
          at = vfmaq_lane_f32(vfmaq_f32(at, even, vmulq_lane_f32(w_scale, scale, 0)), minimum, sum, 0);
          then = vfmaq_lane_f32(vfmaq_f32(then, odd, vmulq_lane_f32(w_scale, scale, 1)), minimum, sum, 1);
        }
      }
    }
    quants += LANES * BLOCK, block += Format::BLOCK_BYTES, ahead += Format::AHEAD_BYTES;
    scales += 8, sums += 8, first_half_sums += 8;
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++)
      vst1q_f32(out + r * LANES + 8 * HALF + 4 * k, acc[r][k]);
}

// Does it for all outputs.
template <class Format, int ROWS>
static __attribute__((noinline)) void quantized_pairs(const Panel &panel, const Input &x, int tile, int from,
                                                      float *out) {
  multiply_half<Format, ROWS, 0>(panel, x, tile, from, out);
  multiply_half<Format, ROWS, 1>(panel, x, tile, from, out);
}

// Does what `pair_rows` does, bit by bit, for ROWS rows and bfloat16 weights.
template <int ROWS>
static __attribute__((noinline)) void bf16_pairs(const Panel &panel, const Input &x, int tile, int from, float *out) {
  const int64_t at = (int64_t)tile * x.blocks * LANES + from;
  const uint16_t *vector = (const uint16_t *)panel.data, *rows[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
    rows[r] = x.pairs + (at + r) * BLOCK;
  PairedSums<ROWS> sums;
  for (int b = 0; b < x.blocks; b++) {
    for (int k = 0; k < BLOCK; k += 4, vector += 4 * LANES) {
      const char *const ahead = (const char *)vector + PREFETCH_DISTANCE;
      __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + 64, 0, 2);
      sums.add(vector, vector + 2 * LANES, rows, k);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
      rows[r] += LANES * BLOCK;
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
    store(out + r * LANES, sums.row(r));
}
