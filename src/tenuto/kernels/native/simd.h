// Vectors of 16 lanes on any x86-64 with AVX2. What a variant lacks is written with what it has; the compiler splits
// 64-byte vectors in two where registers are 32 bytes wide.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TENUTO_AVX512 1
#endif
#if defined(__AVX512BF16__)
#define TENUTO_BF16 1
#endif
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TENUTO_AMX 1
#else
#define TENUTO_AMX 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(32)));
typedef uint8_t u8x64 __attribute__((vector_size(64), aligned(64)));

template <class V> INLINE V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void store(void *p, V v) { memcpy(p, &v, sizeof v); }

INLINE f32x16 splat(float x) { return f32x16{} + x; }
INLINE i32x16 splat_int(int32_t x) { return i32x16{} + x; }
INLINE i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if TENUTO_AVX512
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }

INLINE i32x16 nearest(f32x16 x) { // within +-2^22
#if TENUTO_AVX512
  return (i32x16)_mm512_cvtps_epi32((__m512)x);
#else
  return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, i32x16); // adding 1.5 * 2^23 rounds
#endif
}

INLINE f32x16 half_to_float(const void *p) { // 16 float16
#if TENUTO_AVX512
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
  f32x16 v;
  __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1));
  memcpy(&v, &low, 32);
  memcpy((char *)&v + 32, &high, 32);
  return v;
#endif
}

INLINE float sum16(f32x16 v) {
#if TENUTO_AVX512
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < 16; i++)
    s += v[i];
  return s;
#endif
}

INLINE float highest16(f32x16 v) {
#if TENUTO_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < 16; i++)
    m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// bfloat16, rounded to the nearest even; in the low 16 bits of each lane. Not for NaN.
INLINE u32x16 to_bf16_bits(f32x16 v) {
  u32x16 bits = (u32x16)v;
  return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
INLINE u16x16 to_bf16(f32x16 v) {
#if TENUTO_BF16
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  return __builtin_convertvector(to_bf16_bits(v), u16x16);
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

// What vectors of pairs of bfloat16 are multiplied with: such pairs themselves, or floats where there is no instruction
// for bfloat16. A vector of pairs has the first of each in the low half of its lane; dot_pair is, in lane n, acc +
// a[n][0] b[0] + a[n][1] b[1].
#if TENUTO_BF16
typedef uint16_t Half;
typedef u32x16 Pairs;
typedef uint32_t Pair;
INLINE void store_halves(Half *to, f32x16 v) { store(to, to_bf16(v)); }
INLINE Pairs load_pairs(const void *p) { return load<u32x16>(p); }
INLINE f32x16 dot_pair(f32x16 acc, Pairs a, Pair b) {
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
}
#else
typedef float Half;
struct Pairs {
  f32x16 first, second;
};
struct Pair {
  float first, second;
};
INLINE void store_halves(Half *to, f32x16 v) { store(to, v); }
INLINE Pairs load_pairs(const void *p) {
  u32x16 v = load<u32x16>(p);
  return {(f32x16)(v << 16), (f32x16)(v & 0xFFFF0000u)};
}
INLINE f32x16 dot_pair(f32x16 acc, Pairs a, Pair b) { return acc + a.first * b.first + a.second * b.second; }
#endif
INLINE Pair pair_at(const Half *p) {
  Pair pair;
  memcpy(&pair, p, sizeof pair);
  return pair;
}

// Lane n: acc + the products of the four unsigned bytes w[4 n ...] and the four signed bytes at `x`. `x` is above -128.
INLINE i32x16 dot_quad(i32x16 acc, u8x64 w, const int8_t *x) {
  int32_t quad;
  memcpy(&quad, x, 4);
#if TENUTO_AVX512
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(quad));
#else
  // 16-bit sums of two products would overflow for weights above 128: split those off.
  __m256i b = _mm256_set1_epi32(quad), ones = _mm256_set1_epi16(1), seven = _mm256_set1_epi8(0x7F);
  __m256i part[2];
  memcpy(part, &w, 64);
  i32x16 sums;
  for (int i = 0; i < 2; i++) {
    __m256i low = _mm256_and_si256(part[i], seven);
    __m256i top = _mm256_andnot_si256(seven, part[i]); // 0 or 128
    __m256i half = _mm256_srli_epi16(top, 1);          // 0 or 64: bit 7 to bit 6 within each byte
    __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(low, b), ones);
    __m256i c = _mm256_madd_epi16(_mm256_maddubs_epi16(half, b), ones);
    a = _mm256_add_epi32(a, _mm256_add_epi32(c, c));
    memcpy((char *)&sums + 32 * i, &a, 32);
  }
  return acc + sums;
#endif
}
// The same for weights of at most 127: cheaper without VNNI.
INLINE i32x16 dot_quad_small(i32x16 acc, u8x64 w, const int8_t *x) {
#if TENUTO_AVX512
  return dot_quad(acc, w, x);
#else
  int32_t quad;
  memcpy(&quad, x, 4);
  __m256i b = _mm256_set1_epi32(quad), ones = _mm256_set1_epi16(1);
  __m256i part[2];
  memcpy(part, &w, 64);
  i32x16 sums;
  for (int i = 0; i < 2; i++) {
    __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(part[i], b), ones);
    memcpy((char *)&sums + 32 * i, &a, 32);
  }
  return acc + sums;
#endif
}

// exp(x) for x <= 0, relative error about 1e-7; 0 below -87. 2^f on [-1/2, 1/2] by its Taylor polynomial.
INLINE f32x16 exp_nonpositive(f32x16 x) {
  f32x16 y = max16(x, splat(-87.0f)) * 1.44269504f;
  i32x16 whole = nearest(y);
  f32x16 f = y - to_float(whole);
  f32x16 p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  i32x16 scaled = (i32x16)p + (whole << 23);
  return x < -87.0f ? f32x16{} : (f32x16)scaled;
}

// x / (1 + exp(-x)), for any x.
INLINE f32x16 silu16(f32x16 x) {
  f32x16 e = exp_nonpositive(x < 0.0f ? x : -x); // exp(-|x|)
  return (x < 0.0f ? x * e : x) / (1.0f + e);
}

// What is not finite becomes 0, what would not be finite as bfloat16 the largest that is.
INLINE f32x16 storable(f32x16 x) {
  const float most = 3.3895314e38f;
  i32x16 finite = ((i32x16)x & 0x7F800000) != 0x7F800000;
  x = finite ? x : f32x16{};
  x = x > most ? splat(most) : x;
  return x < -most ? splat(-most) : x;
}
