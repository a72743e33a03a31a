// Vectors of 16 lanes in one register of 64 bytes (AVX-512).
#pragma once

typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(64)));

template <class V> INLINE V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void store(void *p, V v) { memcpy(p, &v, sizeof v); }

template <class To, class From> INLINE To as(From v) { return (To)v; } // the same bits
template <class Mask, class V> INLINE V select(Mask mask, V yes, V no) { return mask ? yes : no; }
INLINE i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
INLINE f32x16 max16(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) { return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE i32x16 nearest(f32x16 x) { return (i32x16)_mm512_cvtps_epi32((__m512)x); }
INLINE f32x16 half_to_float(const void *p) { // 16 float16
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE float sum16(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float highest16(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE i8x16 to_bytes(i32x16 v) { return (i8x16)_mm512_cvtepi32_epi8((__m512i)v); }
INLINE u16x16 to_words(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE u32x16 widened(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
// Write the low word, or byte, of each lane to number `place` of the two, or four, at `to`; others are not touched, for
// another thread may write them.
INLINE void store_words(uint16_t *to, int place, u32x16 v) {
  _mm512_mask_storeu_epi16(to, 0x55555555u << place, (__m512i)(v << (16 * place)));
}
INLINE void store_bytes(uint8_t *to, int place, u32x16 v) {
  _mm512_mask_storeu_epi8(to, 0x1111111111111111u << place, (__m512i)(v << (8 * place)));
}

// The products of a block of unsigned weights with signed inputs. A vector has 4 weights, of neighbouring inputs, for
// each of 16 outputs.
struct Dot {
  i32x16 sum = {};

  // Lane n: + the products of the four bytes w[4 n ...] and the four at `x`.
  template <int BITS> void add(u32x16 w, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(quad));
  }
  template <int BITS> i32x16 total() const { return sum; }
};
// The products of signed bytes, four for each of 16 lanes, with the four unsigned bytes below 128 at `x`.
struct UnsignedDot {
  i32x16 sum = {};

  void add(u32x16 w, const uint8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(quad), (__m512i)w);
  }
  i32x16 total() const { return sum; }
};
constexpr int OFFSET = 0; // what `add` takes off weights of 8 bits

constexpr int ROWS_A_PRODUCT = 8, ROWS_AN_ATTENTION = 6, VECTORS_OF_VALUES = 4; // that registers have room for
