// Vectors of 16 lanes on x86-64 with AVX2, and on 64-bit Arm: bfloat16, and functions of floats.
#pragma once

#include "target.h"
#if TENUTO_AVX512
#include "vectors_avx512.h"
#elif TENUTO_NEON
#include "vectors_neon.h"
#else
#include "vectors_avx2.h"
#endif

#if TENUTO_WORDS
#include "plain_dots.h"
#else
// As in `plain_dots.h`.
constexpr int quads_at_once(int) { return 1; }
template <int BITS> INLINE void add_quads(Dot &dot, const u32x16 (&w)[1], const int8_t *x) { dot.add<BITS>(w[0], x); }
#endif

#if !TENUTO_NEON
// Returns the higher four bits of each byte.
INLINE u32x16 high_nibbles(u32x16 v) { return v >> 4 & 0x0F0F0F0Fu; }
#endif

#if !TENUTO_AVX512
// Stores the low word of each lane as word `index` of the lane's pair at `to`, or the low byte as byte `index` of its
// four. The other words and bytes are not written: another thread may be writing them.
INLINE void store_words(uint16_t *to, int index, u32x16 v) {
  uint32_t lanes[16];
  store(lanes, v);
  for (int i = 0; i < 16; i++)
    to[2 * i + index] = (uint16_t)lanes[i];
}
INLINE void store_bytes(uint8_t *to, int index, u32x16 v) {
  uint32_t lanes[16];
  store(lanes, v);
  for (int i = 0; i < 16; i++)
    to[4 * i + index] = (uint8_t)lanes[i];
}
// Stores bits 7 to 14 of 64 nonnegative numbers below 2^15 as bytes at `high`, and their lower bits at `low`.
INLINE void store_split(uint8_t *high, uint8_t *low, const i32x16 (&v)[4]) {
  for (int i = 0; i < 4; i++)
    store(high + 16 * i, to_bytes(v[i] >> 7)), store(low + 16 * i, to_bytes(v[i] & 127));
}
#endif

INLINE f32x16 splat(float x) { return x - f32x16{}; } // compilers remove a subtraction of 0, but not an addition
INLINE float lane_of(f32x16 v, int lane) {
  float lanes[16];
  store(lanes, v);
  return lanes[lane];
}

// Returns columns `at` to `at + 15` of a row, whose column j is `row[order[j]]`, or `row[j]` if `order` is null.
INLINE f32x16 columns(const float *row, const int32_t *order, int at) {
  if (!order)
    return load<f32x16>(row + at);
  float found[16];
  for (int i = 0; i < 16; i++)
    found[i] = row[order[at + i]];
  return load<f32x16>(found);
}

// Rounds to bfloat16, to the nearest and to even between two, in the low 16 bits of each lane. `v` must not be NaN.
INLINE u32x16 to_bf16_bits(f32x16 v) {
  u32x16 bits = as<u32x16>(v);
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
INLINE u16x16 to_bf16(f32x16 v) {
#if TENUTO_BF16
  return rounded_to_bf16(v);
#else
  return to_words(to_bf16_bits(v));
#endif
}
INLINE uint16_t bf16_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
INLINE float float_of(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Dot products of pairs of bfloat16. A `Pairs` has 16 pairs; in memory the first of a pair is in the low half of its
// lane. `dot_pair` adds a[n][0] b[0] + a[n][1] b[1] to lane n of `acc`. `b` is a pair of `PairElement`: bfloat16, or
// float on CPUs without an instruction for bfloat16.
INLINE f32x16 bf16_to_float(const uint16_t *p) { return as<f32x16>(widened(load<u16x16>(p)) << 16); }
#if TENUTO_BF16
typedef uint16_t PairElement;
typedef u32x16 Pairs;
typedef uint32_t Pair;
INLINE void store_elements(PairElement *to, f32x16 v) { store(to, to_bf16(v)); }
INLINE f32x16 load_elements(const PairElement *p) { return bf16_to_float(p); }
INLINE Pairs load_pairs(const void *p) { return load<u32x16>(p); }
INLINE Pair pair_at(const PairElement *p) { return load<Pair>(p); }
INLINE f32x16 dot_pair(f32x16 acc, Pairs a, Pair b) { return dot_bf16(acc, a, b); }
#else
typedef float PairElement;
struct Pairs {
  f32x16 first, second;
};
struct Pair {
  float first, second;
};
INLINE void store_elements(PairElement *to, f32x16 v) { store(to, v); }
INLINE f32x16 load_elements(const PairElement *p) { return load<f32x16>(p); }
INLINE Pairs load_pairs(const void *p) {
  u32x16 v = load<u32x16>(p);
  return {as<f32x16>(v << 16), as<f32x16>(v & 0xFFFF0000u)};
}
INLINE Pair pair_at(const PairElement *p) { return {p[0], p[1]}; }
INLINE f32x16 dot_pair(f32x16 acc, Pairs a, Pair b) { return acc + a.first * b.first + a.second * b.second; }
#endif
#if !(TENUTO_AVX512 && TENUTO_BF16)
// Returns 16 pairs of floats of 8 bits (E4M3, arXiv:2209.05433). Their bits become those of a float32 that is 2^120
// times too small.
INLINE Pairs e4m3_pairs(const void *p) {
  const u32x16 v = widened(load<u16x16>(p));
  const f32x16 first = as<f32x16>((v & 0x80u) << 24 | (v & 0x7Fu) << 20) * 0x1p120f,
               second = as<f32x16>((v & 0x8000u) << 16 | (v & 0x7F00u) << 12) * 0x1p120f;
#if TENUTO_BF16
  return as<u32x16>(first) >> 16 | as<u32x16>(second);
#else
  return {first, second};
#endif
}
#endif

// Returns 2^(y - base) for y <= base with a relative error of about 1e-7, and 0 below 2^-126. The fraction's power, on
// [-1/2, 1/2], is the polynomial of degree 5 that is 1 at 0 and otherwise has the least relative error, 9e-8. Changing
// `base` scales the result by a power of two, exactly.
INLINE f32x16 power_of_two(f32x16 y, int base) {
  y = max16(y, splat((float)base - 127.0f));
  const i32x16 whole = nearest(y);
  const f32x16 f = y - to_float(whole);
  f32x16 p = splat(1.32647273e-3f);
  p = p * f + 9.67151275e-3f;
  p = p * f + 5.55073374e-2f;
  p = p * f + 2.40222421e-1f;
  p = p * f + 6.93146978e-1f;
  p = p * f + 1.0f;
  return p * as<f32x16>((whole + (127 - base)) << 23);
}
// `power_of_two` cannot represent bases of at least this size.
constexpr float LARGE = 0x1p22f;
// Returns the same for any whole `base`. With a large base, y - base is exact wherever the power is not 0. The power of
// NaN is 0.
INLINE f32x16 power_below(f32x16 y, float base) {
  if (fabsf(base) < LARGE)
    return power_of_two(y, (int)base);
  return power_of_two(-max16(f32x16{}, base - y), 0);
}
// Rounds up to a whole number; infinity becomes the largest float.
INLINE float whole_above(float highest) {
  const float whole = ceilf(highest);
  return whole < 3.4028235e38f ? whole : 3.4028235e38f; // std::fmin would be a call
}
// Returns 2^whole for a whole number of at most 0, and 0 below 2^-126.
INLINE float power_of_two(float whole) {
  const uint32_t bits = whole < -126.0f ? 0 : (uint32_t)(127 + (int)whole) << 23;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

constexpr float LOG2_E = 1.44269504f;

// Returns exp(x) for x <= 0, and 0 below -87. The relative error is about 1e-7, and more for very negative x.
INLINE f32x16 exp_nonpositive(f32x16 x) { return power_of_two(x * LOG2_E, 0); }

// Returns 1 / (1 + exp(-x)), for any x.
INLINE f32x16 sigmoid16(f32x16 x) {
#if TENUTO_AVX512
  // Computes 2^y; the fraction's power is a polynomial as in `exp_nonpositive`, but on [0, 1]. Then takes a Newton step
  // for 1 / (1 + 2^y).
  const __m512 y = _mm512_min_ps((__m512)(x * -1.44269504f), _mm512_set1_ps(126.0f));
  const f32x16 f = (f32x16)_mm512_reduce_ps(y, 1);
  f32x16 p = splat(0.00187757658f);
  p = p * f + 0.00898934063f;
  p = p * f + 0.0558263175f;
  p = p * f + 0.240153611f;
  p = p * f + 0.693153083f;
  p = p * f + 0.99999994f;
  const f32x16 sum = 1.0f + (f32x16)_mm512_scalef_ps((__m512)p, y), about = (f32x16)_mm512_rcp14_ps((__m512)sum);
  return about * (2.0f - sum * about);
#else
  f32x16 e = exp_nonpositive(select(x < 0.0f, x, -x));
  return select(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
#endif
}
// Returns x / (1 + exp(-x)), for any x.
INLINE f32x16 silu16(f32x16 x) { return x * sigmoid16(x); }

// Returns the hyperbolic tangent of any x with an absolute error of about 1e-7.
INLINE f32x16 tanh16(f32x16 x) {
  f32x16 e = exp_nonpositive(select(x < 0.0f, x, -x) * 2.0f); // exp(-2 |x|)
  f32x16 size = (splat(1.0f) - e) / (1.0f + e);
  return select(x < 0.0f, -size, size);
}

// Replaces infinity and NaN with 0, and clamps other values to the range of bfloat16.
INLINE f32x16 storable(f32x16 x) {
  const float most = 3.3895314e38f;
  x = select((as<i32x16>(x) & 0x7F800000) != 0x7F800000, x, f32x16{});
  x = select(x > most, splat(most), x);
  return select(x < -most, splat(-most), x);
}
