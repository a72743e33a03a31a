// Vectors of 16 lanes, each in two registers of 32 bytes (AVX2). The compiler would keep vectors of 64 bytes in memory.
#pragma once

#include <type_traits>
#include <utility>

#include "transfer.h"

typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class V> struct Twice {
  V low, high;

  Twice &operator+=(Twice o) { return low += o.low, high += o.high, *this; }
};

template <class V> using Lane = std::remove_reference_t<decltype(std::declval<V &>()[0])>;

#define TENUTO_OPERATOR(op)                                                                                            \
  template <class V> INLINE auto operator op(Twice<V> a, Twice<V> b)->Twice<decltype(a.low op b.low)> {                \
    return {a.low op b.low, a.high op b.high};                                                                         \
  }                                                                                                                    \
  template <class V> INLINE auto operator op(Twice<V> a, Lane<V> b)->Twice<decltype(a.low op b)> {                     \
    return {a.low op b, a.high op b};                                                                                  \
  }
TENUTO_OPERATOR(+)
TENUTO_OPERATOR(-)
TENUTO_OPERATOR(*)
TENUTO_OPERATOR(/)
TENUTO_OPERATOR(&)
TENUTO_OPERATOR(|)
TENUTO_OPERATOR(^)
TENUTO_OPERATOR(<<)
TENUTO_OPERATOR(>>)
TENUTO_OPERATOR(<)
TENUTO_OPERATOR(>)
TENUTO_OPERATOR(<=)
TENUTO_OPERATOR(!=)
#undef TENUTO_OPERATOR
template <class V> INLINE Twice<V> operator-(Twice<V> a) { return {-a.low, -a.high}; }
template <class V> INLINE Twice<V> operator+(Lane<V> a, Twice<V> b) { return {a + b.low, a + b.high}; }
template <class V> INLINE Twice<V> operator-(Lane<V> a, Twice<V> b) { return {a - b.low, a - b.high}; }

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef Twice<f32x8> f32x16;
typedef Twice<i32x8> i32x16;
typedef Twice<u32x8> u32x16;

template <class V> struct Transfer<Twice<V>> {
  static Twice<V> load(const void *p) { return {Transfer<V>::load(p), Transfer<V>::load((const char *)p + 32)}; }
  static void store(void *p, Twice<V> v) { Transfer<V>::store(p, v.low), Transfer<V>::store((char *)p + 32, v.high); }
};

template <class To, class V> INLINE To as(Twice<V> v) { // reinterprets the bits
  return {(decltype(To::low))v.low, (decltype(To::high))v.high};
}
template <class Mask, class V> INLINE Twice<V> select(Mask mask, Twice<V> yes, Twice<V> no) {
  return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
}
INLINE i32x16 lane_numbers() { return {i32x8{0, 1, 2, 3, 4, 5, 6, 7}, i32x8{8, 9, 10, 11, 12, 13, 14, 15}}; }
INLINE f32x16 to_float(i32x16 v) {
  return {__builtin_convertvector(v.low, f32x8), __builtin_convertvector(v.high, f32x8)};
}
INLINE f32x16 max16(f32x16 a, f32x16 b) {
  return {(f32x8)_mm256_max_ps((__m256)a.low, (__m256)b.low), (f32x8)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
}
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
}
INLINE i32x16 nearest(f32x16 x) {
  return {(i32x8)_mm256_cvtps_epi32((__m256)x.low), (i32x8)_mm256_cvtps_epi32((__m256)x.high)};
}
INLINE f32x16 float16_to_float(const void *p) { // 16 float16
  return {(f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
          (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
}
INLINE u32x16 load_bytes(const void *p) { // 16 bytes
  const __m128i all = _mm_loadu_si128((const __m128i *)p);
  return {(u32x8)_mm256_cvtepu8_epi32(all), (u32x8)_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
// Returns the bytes of `table` that the bytes of `v`, below 16, number.
INLINE u32x16 looked_up(const uint8_t (&table)[16], u32x16 v) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return {(u32x8)_mm256_shuffle_epi8(twice, (__m256i)v.low), (u32x8)_mm256_shuffle_epi8(twice, (__m256i)v.high)};
}
INLINE float sum16(f32x16 v) {
  const __m256 both = (__m256)(v.low + v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float highest16(f32x16 v) {
  const __m256 both = _mm256_max_ps((__m256)v.low, (__m256)v.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE u16x16 to_words(u32x16 v) { // lanes must fit 16 bits
  const __m256i packed = _mm256_packus_epi32((__m256i)v.low, (__m256i)v.high);
  return (u16x16)_mm256_permute4x64_epi64(packed, 0xD8); // the pack instruction works on each half by itself
}
INLINE u32x16 widened(u16x16 v) {
  const __m256i all = (__m256i)v;
  return {(u32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)),
          (u32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1))};
}
INLINE i8x16 to_bytes(i32x16 v) { // lanes must fit 8 bits
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.low, (__m256i)v.high), 0xD8);
  return (i8x16)_mm_packs_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
}

// Returns `sum`, and makes the compiler have it in a register. Otherwise it computes all products of a block first, or
// all its weights, for which there are too few registers, and adds them up from memory.
INLINE __m256i added(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

#if TENUTO_VNNI
INLINE __m256i four_bytes(const void *p) { // in each lane
  int32_t quad;
  memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}

// The dot products of a block of unsigned weights of `BITS` bits with signed inputs. A vector has 4 weights, of
// neighbouring inputs, for each of 16 outputs. The instruction adds four products to a lane. It takes weights of 8 bits
// as unsigned, so what they have too much is subtracted from the sums. Thus products are those of plain AVX2, bit by
// bit.
template <int Offset> struct OffsetDot {
  static constexpr int OFFSET = Offset; // subtracted from 8-bit weights
  __m256i low = {}, high = {};
  __m256i excess = {}; // in each lane the sum of the inputs, times the offset

  // Adds to lane n the dot product of the four bytes w[4 n ...] and the four bytes at `x`.
  template <int BITS> void add(u32x16 w, const int8_t *x) {
    const __m256i inputs = four_bytes(x);
    low = added(_mm256_dpbusd_avx_epi32(low, (__m256i)w.low, inputs));
    high = added(_mm256_dpbusd_avx_epi32(high, (__m256i)w.high, inputs));
    if (BITS == 8 && OFFSET > 0)
      excess = added(_mm256_dpbusd_avx_epi32(excess, _mm256_set1_epi8((char)OFFSET), inputs));
  }
  template <int BITS> i32x16 total() const {
    return {(i32x8)_mm256_sub_epi32(low, excess), (i32x8)_mm256_sub_epi32(high, excess)};
  }
};
typedef OffsetDot<128> Dot;
typedef OffsetDot<0> KeyDot;

// The dot products of signed bytes, four for each of 16 lanes, with the four unsigned bytes below 128 at `x`.
struct UnsignedDot {
  __m256i low = {}, high = {};

  void add(u32x16 w, const uint8_t *x) {
    const __m256i inputs = four_bytes(x);
    low = added(_mm256_dpbusd_avx_epi32(low, inputs, (__m256i)w.low));
    high = added(_mm256_dpbusd_avx_epi32(high, inputs, (__m256i)w.high));
  }
  i32x16 total() const { return {(i32x8)low, (i32x8)high}; }
};
#else
// The instructions for `plain_dots.h`. A lane has four bytes or two words.
constexpr int QUADS_OF_5_BITS = 2; // see `quads_at_once`

// Calls a function of vectors of 32 bytes for both halves.
template <class To, class Use, class... V> INLINE Twice<To> both(Use use, Twice<V>... v) {
  return {(To)use((__m256i)v.low...), (To)use((__m256i)v.high...)};
}
INLINE i32x16 added(i32x16 v) { return {(i32x8)added((__m256i)v.low), (i32x8)added((__m256i)v.high)}; }
// Returns the products of unsigned and signed bytes, those of two neighbours added up in a word.
INLINE i32x16 byte_products(u32x16 a, u32x16 b) {
  return both<i32x8>([](__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }, a, b);
}
// Returns the sums of the products of words.
INLINE i32x16 word_products(u32x16 a, u32x16 b) {
  return both<i32x8>([](__m256i a, __m256i b) { return _mm256_madd_epi16(a, b); }, a, b);
}
INLINE i32x16 add_words(i32x16 a, i32x16 b) {
  return both<i32x8>([](__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }, a, b);
}
INLINE u32x16 sizes_of_bytes(u32x16 v) {
  return both<u32x8>([](__m256i v) { return _mm256_abs_epi8(v); }, v);
}
// Changes the signs of bytes where those of `q` are negative.
INLINE u32x16 with_signs(u32x16 v, u32x16 q) {
  return both<u32x8>([](__m256i v, __m256i q) { return _mm256_sign_epi8(v, q); }, v, q);
}
// Returns bytes `order[i]` of each 16, or 0 where that is negative.
INLINE u32x16 reordered(u32x16 v, const int8_t (&order)[16]) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)order));
  return both<u32x8>([twice](__m256i v) { return _mm256_shuffle_epi8(v, twice); }, v);
}
// Divides signed words by 256, and rounds down.
INLINE u32x16 high_bytes(u32x16 v) {
  return both<u32x8>([](__m256i v) { return _mm256_srai_epi16(v, 8); }, v);
}
#endif

// As in `vectors_avx512.h`.
constexpr int MATMUL_ROWS = 4, UNPACKED_ROWS = 16, ATTENTION_ROWS = 5, INT8_ATTENTION_ROWS = TENUTO_WORDS ? 4 : 2,
              FEW_ROWS = 5;
constexpr int MOST_PANELS = 1, PANELS_AT_ONCE = 1;
constexpr int blocks_at_once(int rows) { return rows > 2 ? 1 : 2; }
constexpr int values_at_once(int rows) { return rows > 3 ? 1 : 2; }
