// Takes the place of AVX-VNNI in kernels that are compiled for plain AVX2, so that they run on CPUs without it. The
// compiler includes it before all sources.
#pragma once

#include <immintrin.h>

// Adds to each lane of `sum` the products of four unsigned bytes of `a` and four signed ones of `b`. Nothing saturates:
// the bytes are multiplied as numbers of 16 bits, those at even and those at odd places.
static inline __m256i dpbusd_in_software(__m256i sum, __m256i a, __m256i b) {
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xFF)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#define _mm256_dpbusd_avx_epi32 dpbusd_in_software
#define __AVXVNNI__ 1
