// Vectors of 16 lanes, each in one register of 64 bytes (AVX-512).
#pragma once

#include <climits>

#include "transfer.h"

typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(64)));

template <class To, class From> INLINE To as(From v) { return (To)v; } // reinterprets the bits
template <class Mask, class V> INLINE V select(Mask mask, V yes, V no) { return mask ? yes : no; }
INLINE i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
INLINE f32x16 max16(f32x16 a, f32x16 b) { return (f32x16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) { return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE i32x16 nearest(f32x16 x) { return (i32x16)_mm512_cvtps_epi32((__m512)x); }
INLINE f32x16 float16_to_float(const void *p) { // 16 float16
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE u32x16 load_bytes(const void *p) { // 16 bytes
  return (u32x16)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
// Returns the bytes of `table` that the bytes of `v`, below 16, number.
INLINE u32x16 looked_up(const uint8_t (&table)[16], u32x16 v) {
  return (u32x16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)v);
}
INLINE float sum16(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float highest16(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE i8x16 to_bytes(i32x16 v) { return (i8x16)_mm512_cvtepi32_epi8((__m512i)v); }
// Stores bits 7 to 14 of 64 nonnegative numbers below 2^15 as bytes at `high`, and their lower bits at `low`.
INLINE void store_split(uint8_t *high, uint8_t *low, const i32x16 (&v)[4]) {
  const __m512i first = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]),
                second = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]), mask = _mm512_set1_epi16(127);
  const __m512i to = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); // packing keeps its lanes
  const __m512i upper = _mm512_packus_epi16(_mm512_srli_epi16(first, 7), _mm512_srli_epi16(second, 7));
  const __m512i lower = _mm512_packus_epi16(_mm512_and_si512(first, mask), _mm512_and_si512(second, mask));
  _mm512_storeu_si512(high, _mm512_permutexvar_epi32(to, upper));
  _mm512_storeu_si512(low, _mm512_permutexvar_epi32(to, lower));
}
INLINE u16x16 to_words(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE u32x16 widened(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
// Stores the low word of each lane as word `index` of the lane's pair at `to`, or the low byte as byte `index` of its
// four. The other words and bytes are not written: another thread may be writing them.
INLINE void store_words(uint16_t *to, int index, u32x16 v) {
  _mm512_mask_storeu_epi16(to, 0x55555555u << index, (__m512i)(v << (16 * index)));
}
INLINE void store_bytes(uint8_t *to, int index, u32x16 v) {
  _mm512_mask_storeu_epi8(to, 0x1111111111111111u << index, (__m512i)(v << (8 * index)));
}

#if TENUTO_BF16
// Rounds to bfloat16, as `to_bf16_bits` does.
INLINE u16x16 rounded_to_bf16(f32x16 v) { return (u16x16)_mm512_cvtneps_pbh((__m512)v); }
// Returns 16 pairs of floats of 8 bits (E4M3, arXiv:2209.05433) as bfloat16. Those without a leading one, the multiples
// of 2^-9 below 2^-6, come from a table.
INLINE u32x16 e4m3_pairs(const void *p) {
  alignas(64) static constexpr uint16_t SMALL[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
  const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
  const __m512i size = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x7F)), 4);
  const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(0x3C00));
  const __mmask32 small = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
  const __m512i both = _mm512_mask_permutexvar_epi16(normal, small, x, _mm512_load_si512(SMALL));
  // The sign: x << 8 & 0x8000 | both.
  return (u32x16)_mm512_ternarylogic_epi32(_mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000), both, 0xEA);
}
// Adds to each lane of `acc` the dot product of a pair of bfloat16 in `a` and the pair `b`.
INLINE f32x16 dot_bf16(f32x16 acc, u32x16 a, uint32_t b) {
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
}
#endif

#if TENUTO_VNNI
// The dot products of a block of unsigned weights with signed inputs. A vector has 4 weights, of neighbouring inputs,
// for each of 16 outputs.
struct Dot {
  static constexpr int OFFSET = 0; // subtracted from 8-bit weights
  i32x16 sum = {};

  // Adds to lane n the dot product of the four bytes w[4 n ...] and the four bytes at `x`.
  template <int BITS> void add(u32x16 w, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(quad));
  }
  template <int BITS> i32x16 total() const { return sum; }
};
typedef Dot KeyDot; // that of the keys in a cache, with whatever offset is faster

// The dot products of signed bytes, four for each of 16 lanes, with the four unsigned bytes below 128 at `x`.
struct UnsignedDot {
  i32x16 sum = {};

  void add(u32x16 w, const uint8_t *x) {
    int32_t quad;
    memcpy(&quad, x, 4);
    sum = (i32x16)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(quad), (__m512i)w);
  }
  i32x16 total() const { return sum; }
};
#else
// As in `vectors_avx2.h`.
constexpr int QUADS_OF_5_BITS = 4;
INLINE i32x16 added(i32x16 sum) {
  asm("" : "+v"(sum));
  return sum;
}
INLINE i32x16 byte_products(u32x16 a, u32x16 b) { return (i32x16)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
INLINE i32x16 word_products(u32x16 a, u32x16 b) { return (i32x16)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE i32x16 add_words(i32x16 a, i32x16 b) { return (i32x16)_mm512_add_epi16((__m512i)a, (__m512i)b); }
INLINE u32x16 sizes_of_bytes(u32x16 v) { return (u32x16)_mm512_abs_epi8((__m512i)v); }
INLINE u32x16 with_signs(u32x16 v, u32x16 q) {
  return (u32x16)_mm512_mask_sub_epi8((__m512i)v, _mm512_movepi8_mask((__m512i)q), __m512i{}, (__m512i)v);
}
INLINE u32x16 reordered(u32x16 v, const int8_t (&order)[16]) {
  return (u32x16)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)order)));
}
INLINE u32x16 high_bytes(u32x16 v) { return (u32x16)_mm512_srai_epi16((__m512i)v, 8); }
#endif

// The number of input rows that a product takes at once: the sums of a block fit into the registers, beside them those
// of all blocks do not, but they are needed only once a block. The numbers of query rows whose sums fit; `FEW_ROWS`
// where there are not as many.
constexpr int MATMUL_ROWS = 16, ATTENTION_ROWS = 12, INT8_ATTENTION_ROWS = TENUTO_WORDS ? 8 : 6, FEW_ROWS = 6;
// AMD's CPUs unpack while they multiply, and load as much as they multiply: so they never unpack a panel first, but
// multiply two small ones at once. Others unpack from a number of rows on.
static const bool IS_AMD = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}();
static const int UNPACKED_ROWS = IS_AMD ? INT_MAX : 24;
constexpr int MOST_PANELS = TENUTO_AMX ? 1 : 2;
static const int PANELS_AT_ONCE = IS_AMD ? MOST_PANELS : 1;
// The numbers of blocks of keys, and of vectors of values, that a number of query rows takes at once: enough that an
// addition need not wait for the one before.
constexpr int blocks_at_once(int rows) { return rows > 6 ? 2 : rows > 2 ? 4 : 8; }
constexpr int values_at_once(int rows) { return rows > 6 ? 2 : 4; }
