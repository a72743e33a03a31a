// Vectors of 16 lanes, each in four registers of 16 bytes (Arm's NEON).
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "transfer.h"

typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class V> struct Four {
  V a, b, c, d;

  Four &operator+=(Four o) { return a += o.a, b += o.b, c += o.c, d += o.d, *this; }
};

template <class V> using Lane = std::remove_reference_t<decltype(std::declval<V &>()[0])>;

#define TENUTO_OPERATOR(op)                                                                                            \
  template <class V> INLINE auto operator op(Four<V> x, Four<V> y)->Four<decltype(x.a op y.a)> {                       \
    return {x.a op y.a, x.b op y.b, x.c op y.c, x.d op y.d};                                                           \
  }                                                                                                                    \
  template <class V> INLINE auto operator op(Four<V> x, Lane<V> y)->Four<decltype(x.a op y)> {                         \
    return {x.a op y, x.b op y, x.c op y, x.d op y};                                                                   \
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
template <class V> INLINE Four<V> operator-(Four<V> x) { return {-x.a, -x.b, -x.c, -x.d}; }
template <class V> INLINE Four<V> operator+(Lane<V> x, Four<V> y) { return {x + y.a, x + y.b, x + y.c, x + y.d}; }
template <class V> INLINE Four<V> operator-(Lane<V> x, Four<V> y) { return {x - y.a, x - y.b, x - y.c, x - y.d}; }

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef Four<f32x4> f32x16;
typedef Four<i32x4> i32x16;
typedef Four<u32x4> u32x16;
struct u16x16 {
  u16x8 low, high;
};

template <class V> struct Transfer<Four<V>> {
  typedef Transfer<V> Quarter;

  static Four<V> load(const void *p) {
    const char *at = (const char *)p;
    return {Quarter::load(at), Quarter::load(at + 16), Quarter::load(at + 32), Quarter::load(at + 48)};
  }
  static void store(void *p, Four<V> v) {
    char *at = (char *)p;
    Quarter::store(at, v.a), Quarter::store(at + 16, v.b), Quarter::store(at + 32, v.c), Quarter::store(at + 48, v.d);
  }
};

// Applies `use` to each quarter.
template <class To, class V, class Use> INLINE Four<To> each(Four<V> v, Use use) {
  return {(To)use(v.a), (To)use(v.b), (To)use(v.c), (To)use(v.d)};
}

template <class To, class V> INLINE To as(Four<V> v) { // reinterprets the bits
  return {(decltype(To::a))v.a, (decltype(To::a))v.b, (decltype(To::a))v.c, (decltype(To::a))v.d};
}
template <class M, class V> INLINE V select4(M mask, V yes, V no) {
  return (V)vbslq_u32((uint32x4_t)mask, (uint32x4_t)yes, (uint32x4_t)no);
}
template <class M, class V> INLINE Four<V> select(Four<M> mask, Four<V> yes, Four<V> no) {
  return {select4(mask.a, yes.a, no.a), select4(mask.b, yes.b, no.b), select4(mask.c, yes.c, no.c),
          select4(mask.d, yes.d, no.d)};
}
INLINE i32x16 lane_numbers() {
  return {i32x4{0, 1, 2, 3}, i32x4{4, 5, 6, 7}, i32x4{8, 9, 10, 11}, i32x4{12, 13, 14, 15}};
}
INLINE f32x16 to_float(i32x16 v) {
  return each<f32x4>(v, [](i32x4 q) { return vcvtq_f32_s32((int32x4_t)q); });
}
// Returns the second of two lanes if one of them is NaN, as x86 does.
INLINE f32x16 max16(f32x16 a, f32x16 b) { return select(a > b, a, b); }
INLINE f32x4 fused4(f32x4 a, f32x4 b, f32x4 c) {
  return (f32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
  return {fused4(a.a, b.a, c.a), fused4(a.b, b.b, c.b), fused4(a.c, b.c, c.c), fused4(a.d, b.d, c.d)};
}
INLINE i32x16 nearest(f32x16 x) {
  return each<i32x4>(x, [](f32x4 q) { return vcvtnq_s32_f32((float32x4_t)q); });
}
INLINE f32x4 float16_to_float4(const void *p) { return (f32x4)vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(p))); }
INLINE f32x16 float16_to_float(const void *p) { // 16 float16
  const char *at = (const char *)p;
  return {float16_to_float4(at), float16_to_float4(at + 8), float16_to_float4(at + 16), float16_to_float4(at + 24)};
}
INLINE u32x16 load_bytes(const void *p) { // 16 bytes
  const uint8x16_t all = load<uint8x16_t>(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
  return {(u32x4)vmovl_u16(vget_low_u16(low)), (u32x4)vmovl_high_u16(low), (u32x4)vmovl_u16(vget_low_u16(high)),
          (u32x4)vmovl_high_u16(high)};
}
// Returns the bytes of `table` that the bytes of `v`, below 16, number.
INLINE u32x16 looked_up(const uint8_t (&table)[16], u32x16 v) {
  const uint8x16_t bytes = load<uint8x16_t>(table);
  return each<u32x4>(v, [&](u32x4 q) { return vqtbl1q_u8(bytes, (uint8x16_t)q); });
}
// As in `simd.h`.
INLINE u32x16 high_nibbles(u32x16 v) {
  return each<u32x4>(v, [](u32x4 q) { return vshrq_n_u8((uint8x16_t)q, 4); });
}
INLINE float sum16(f32x16 v) { return vaddvq_f32((float32x4_t)((v.a + v.b) + (v.c + v.d))); }
INLINE float highest16(f32x16 v) {
  const float32x4_t first = vmaxq_f32((float32x4_t)v.a, (float32x4_t)v.b);
  return vmaxvq_f32(vmaxq_f32(first, vmaxq_f32((float32x4_t)v.c, (float32x4_t)v.d)));
}
INLINE u16x8 to_words(u32x4 low, u32x4 high) { return (u16x8)vuzp1q_u16((uint16x8_t)low, (uint16x8_t)high); }
INLINE u16x16 to_words(u32x16 v) { return {to_words(v.a, v.b), to_words(v.c, v.d)}; } // the low words
INLINE i8x16 to_bytes(i32x16 v) {                                                     // the low bytes
  const u16x16 words = to_words(as<u32x16>(v));
  return (i8x16)vuzp1q_u8((uint8x16_t)words.low, (uint8x16_t)words.high);
}
INLINE u32x16 widened(u16x16 v) {
  const uint16x8_t low = (uint16x8_t)v.low, high = (uint16x8_t)v.high;
  return {(u32x4)vmovl_u16(vget_low_u16(low)), (u32x4)vmovl_high_u16(low), (u32x4)vmovl_u16(vget_low_u16(high)),
          (u32x4)vmovl_high_u16(high)};
}

// Returns lanes 8 HALF to 8 HALF + 7 of two vectors, in turns, and from two such halves again the first or the second.
template <int HALF> INLINE u32x16 interleaved(u32x16 first, u32x16 second) {
  const uint32x4_t a = (uint32x4_t)(HALF ? first.c : first.a), b = (uint32x4_t)(HALF ? second.c : second.a),
                   c = (uint32x4_t)(HALF ? first.d : first.b), d = (uint32x4_t)(HALF ? second.d : second.b);
  return {(u32x4)vzip1q_u32(a, b), (u32x4)vzip2q_u32(a, b), (u32x4)vzip1q_u32(c, d), (u32x4)vzip2q_u32(c, d)};
}
INLINE u32x16 separated(u32x16 low, u32x16 high, bool second) {
  const auto of = [&](u32x4 a, u32x4 b) {
    return (u32x4)(second ? vuzp2q_u32((uint32x4_t)a, (uint32x4_t)b) : vuzp1q_u32((uint32x4_t)a, (uint32x4_t)b));
  };
  return {of(low.a, low.b), of(low.c, low.d), of(high.a, high.b), of(high.c, high.d)};
}

#if TENUTO_BF16
// Rounds to bfloat16, as `to_bf16_bits` does.
INLINE u16x16 rounded_to_bf16(f32x16 v) {
  auto both = [](f32x4 low, f32x4 high) {
    return (u16x8)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
  };
  return {both(v.a, v.b), both(v.c, v.d)};
}
// Adds to each lane of `acc` the dot product of a pair of bfloat16 in `a` and the pair `b`.
INLINE f32x16 dot_bf16(f32x16 acc, u32x16 a, uint32_t b) {
  const bfloat16x8_t pair = vreinterpretq_bf16_u32(vdupq_n_u32(b));
  auto dot = [&](f32x4 sum, u32x4 of) {
    return (f32x4)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32((uint32x4_t)of), pair);
  };
  return {dot(acc.a, a.a), dot(acc.b, a.b), dot(acc.c, a.c), dot(acc.d, a.d)};
}
#endif

#if TENUTO_I8MM
// Sums of products of pairs of bfloat16 in 16 lanes, for each of ROWS rows, with an instruction for two rows and two
// lanes at once (BFMMLA). As the Arm architecture defines it, it adds up four products as two BFDOT do, so the sums are
// the same as those of `dot_pair`. Those of two rows are together: for lanes 2 k and 2 k + 1, {lane, row}.
template <int ROWS> struct PairedSums {
  static constexpr int PAIRS = (ROWS + 1) / 2; // the last row of an odd number is computed twice
  float32x4_t of[PAIRS][8];

  PairedSums() {
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++)
#pragma GCC unroll 8
      for (int k = 0; k < 8; k++)
        of[p][k] = vdupq_n_f32(0.0f);
  }
  // Adds the products of two pairs in each of 16 lanes, those at `first` and at `second`, and four elements of each
  // row: those at `rows[r] + at`.
  void add(const uint16_t *first, const uint16_t *second, const uint16_t *const (&rows)[ROWS], int at) {
    bfloat16x8_t two[PAIRS];
#pragma GCC unroll 4
    for (int p = 0; p < PAIRS; p++) {
      const uint16_t *const one = rows[2 * p] + at, *const other = rows[std::min(2 * p + 1, ROWS - 1)] + at;
      two[p] = vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(one), vld1_u16(other)));
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
      const uint32x4_t a = load<uint32x4_t>(first + 8 * q), b = load<uint32x4_t>(second + 8 * q);
      const bfloat16x8_t low = vreinterpretq_bf16_u32(vzip1q_u32(a, b)),
                         high = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
#pragma GCC unroll 4
      for (int p = 0; p < PAIRS; p++) {
        of[p][2 * q] = vbfmmlaq_f32(of[p][2 * q], low, two[p]);
        of[p][2 * q + 1] = vbfmmlaq_f32(of[p][2 * q + 1], high, two[p]);
      }
    }
  }
  // Returns the sums of a row.
  f32x16 row(int r) const {
    const auto quarter = [&](int q) {
      const float32x4_t low = of[r / 2][2 * q], high = of[r / 2][2 * q + 1];
      return (f32x4)(r % 2 ? vuzp2q_f32(low, high) : vuzp1q_f32(low, high));
    };
    return {quarter(0), quarter(1), quarter(2), quarter(3)};
  }
};
#endif

// Adds the products of four signed bytes in each lane. Without an instruction for that, the sum of two products must
// fit 16 bits.
INLINE i32x4 dot4(i32x4 sum, int8x16_t w, int8x16_t x) {
#if TENUTO_DOT
  return (i32x4)vdotq_s32((int32x4_t)sum, w, x);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return (i32x4)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
}
INLINE int8x16_t four_bytes(const void *p) {
  int32_t quad;
  memcpy(&quad, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(quad));
}

// The dot products of a block of unsigned weights of `BITS` bits with signed inputs above -128. A vector has 4 weights,
// of neighbouring inputs, for each of 16 outputs. Products are of signed bytes, so weights of 8 bits become signed,
// unless there is an instruction for unsigned ones.
struct Dot {
  static constexpr int OFFSET = TENUTO_I8MM ? 0 : 128; // subtracted from 8-bit weights
  i32x16 sum = {};

  // Adds to lane n the dot product of the four bytes w[4 n ...] and the four bytes at `x`.
  template <int BITS> void add(u32x16 w, const int8_t *x) {
    const int8x16_t inputs = four_bytes(x);
    sum = {with<BITS>(sum.a, w.a, inputs), with<BITS>(sum.b, w.b, inputs), with<BITS>(sum.c, w.c, inputs),
           with<BITS>(sum.d, w.d, inputs)};
  }
  template <int BITS> i32x16 total() const { return sum; }

private:
  template <int BITS> static i32x4 with(i32x4 sum, u32x4 w, int8x16_t x) {
#if TENUTO_I8MM
    if (BITS == 8)
      return (i32x4)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, x);
#endif
    return dot4(sum, (int8x16_t)(BITS == 8 ? w ^ 0x80808080u : w), x);
  }
};
typedef Dot KeyDot;

// The dot products of signed bytes, four for each of 16 lanes, with the four unsigned bytes below 128 at `x`.
struct UnsignedDot {
  i32x16 sum = {};

  void add(u32x16 w, const uint8_t *x) {
    const int8x16_t inputs = four_bytes(x);
    sum = {dot4(sum.a, (int8x16_t)w.a, inputs), dot4(sum.b, (int8x16_t)w.b, inputs),
           dot4(sum.c, (int8x16_t)w.c, inputs), dot4(sum.d, (int8x16_t)w.d, inputs)};
  }
  i32x16 total() const { return sum; }
};

// As in `vectors_avx512.h`.
constexpr int MATMUL_ROWS = 4, UNPACKED_ROWS = 16, FEW_ROWS = 5;
constexpr int ATTENTION_ROWS = 6, INT8_ATTENTION_ROWS = TENUTO_I8MM ? 3 : 2;
constexpr int MOST_PANELS = 1, PANELS_AT_ONCE = 1;
constexpr int blocks_at_once(int rows) { return rows > 3 ? 1 : rows > 1 ? 2 : 4; }
constexpr int values_at_once(int rows) { return rows > 3 ? 1 : 2; }
