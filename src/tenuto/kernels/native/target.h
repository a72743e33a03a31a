// The instruction set that this library is compiled for; `build.py` has the compiler flags of each variant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#define TENUTO_NEON 1
#else
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define TENUTO_AVX512 1
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define TENUTO_VNNI 1
#endif
#if !defined(__aarch64__) && !TENUTO_VNNI // quants of 15 bits are multiplied as words: as bytes, it would take longer
#define TENUTO_WORDS 1
#else
#define TENUTO_WORDS 0
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TENUTO_BF16 1
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define TENUTO_DOT 1
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8) // variants that have these instructions also have those for bfloat16
#define TENUTO_I8MM 1
#else
#define TENUTO_I8MM 0
#endif
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TENUTO_AMX 1
#else
#define TENUTO_AMX 0
#endif

#define INLINE static inline __attribute__((always_inline))

// Tells the CPU that this thread waits in a loop.
INLINE void pause_spinning() {
#if TENUTO_NEON
  asm volatile("yield");
#else
  _mm_pause();
#endif
}
