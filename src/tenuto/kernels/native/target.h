// The instruction set that this library is compiled for; `build.py` has the compiler flags of each variant.
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
