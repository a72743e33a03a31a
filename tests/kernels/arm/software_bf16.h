// What instructions for bfloat16 compute, in terms of AVX2's. A compiler that includes this first makes kernels that
// round as those for CPUs with such instructions do, and that run on CPUs without.
#pragma once

#include "vectors_avx2.h"

#define TENUTO_BF16 1

INLINE u16x16 rounded_to_bf16(f32x16 v) {
  const u32x16 bits = as<u32x16>(v);
  return to_words((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
INLINE f32x16 dot_bf16(f32x16 acc, u32x16 a, uint32_t b) {
  const uint32_t bits[2] = {b << 16, b & 0xFFFF0000u};
  float pair[2];
  memcpy(pair, bits, sizeof pair);
  return acc + as<f32x16>(a << 16) * pair[0] + as<f32x16>(a & 0xFFFF0000u) * pair[1];
}
