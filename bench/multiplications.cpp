// Multiplications and additions in registers alone, by the instructions that products of quantized weights and many
// rows are made of in each variant of the kernels.
#include "simd.h"
#if TENUTO_AMX
#include "amx.h"
#endif

#if TENUTO_AMX
constexpr int SUMS = 4, EACH = 16 * 16 * 32; // bfloat16, to tiles of float32

static void add_all() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}
#elif TENUTO_AVX512
constexpr int SUMS = 12, EACH = 64;
typedef __m512i Sum;
#if TENUTO_VNNI
// Bytes, to 32 bits.
INLINE Sum add(Sum sum, Sum a, Sum b) { return _mm512_dpbusd_epi32(sum, a, b); }
#else
// Bytes, to 16 bits.
INLINE Sum add(Sum sum, Sum a, Sum b) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b)); }
#endif
#elif !TENUTO_NEON
constexpr int EACH = 32;
typedef __m256i Sum;
#if TENUTO_VNNI
// Bytes, to 32 bits.
constexpr int SUMS = 12;
INLINE Sum add(Sum sum, Sum a, Sum b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
#else
// Bytes, to 16 bits.
constexpr int SUMS = 8;
INLINE Sum add(Sum sum, Sum a, Sum b) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b)); }
#endif
#elif TENUTO_I8MM
constexpr int SUMS = 16, EACH = 32; // bytes, to 32 bits
typedef int32x4_t Sum;
INLINE Sum add(Sum sum, Sum a, Sum b) { return vmmlaq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)); }
#elif TENUTO_DOT
constexpr int SUMS = 16, EACH = 16; // bytes, to 32 bits
typedef int32x4_t Sum;
INLINE Sum add(Sum sum, Sum a, Sum b) { return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)); }
#else
constexpr int SUMS = 16, EACH = 8; // bytes, to 16 bits
typedef int32x4_t Sum;
INLINE Sum add(Sum sum, Sum a, Sum b) {
  const int8x8_t first = vget_low_s8(vreinterpretq_s8_s32(a)), second = vget_low_s8(vreinterpretq_s8_s32(b));
  return vreinterpretq_s32_s16(vmlal_s8(vreinterpretq_s16_s32(sum), first, second));
}
#endif

#if TENUTO_NEON
#define IN_REGISTER(v) asm volatile("" : "+w"(v))
#else
#define IN_REGISTER(v) asm volatile("" : "+v"(v))
#endif

// Does `rounds` rounds, and returns the number of multiplications.
extern "C" int64_t multiply(int64_t rounds) {
#if TENUTO_AMX
  amx::configure(amx::MATMUL);
  for (int64_t i = 0; i < rounds; i++)
    add_all();
  amx::release();
#else
  Sum a = {}, b = {}, sums[SUMS] = {};
  IN_REGISTER(b);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
    for (int s = 0; s < SUMS; s++) {
      IN_REGISTER(a); // each product is a new one to the compiler
      sums[s] = add(sums[s], a, b);
      IN_REGISTER(sums[s]);
    }
  }
#endif
  return rounds * SUMS * EACH;
}
