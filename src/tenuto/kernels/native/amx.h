// AMX tiles: their configuration, and conversions to bfloat16.
#pragma once

#include "simd.h"

namespace amx {

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// A barrier for the compiler, which does not know that tile instructions read and write memory. It must not move or
// drop other stores around them.
INLINE void compiler_barrier() { asm volatile("" : : : "memory"); }

// The configurations of the tiles: for matrix products, or for attention, which multiplies softmax weights by the
// values of one block or of a pair of blocks at a time.
enum Layout { NONE, MATMUL, ATTENTION, ATTENTION_TO_PAIRS };
static thread_local Layout configured = NONE;
static thread_local int configured_rows = 0;

static void configure(Layout layout, int query_rows = 0) {
  if (configured == layout && configured_rows == query_rows)
    return;
  Config config;
  for (int t = 0; t < 8; t++)
    config.rows[t] = 16, config.row_bytes[t] = 64;
  if (layout >= ATTENTION)
    for (int t = 0; t < 6; t++)
      config.rows[t] = query_rows; // results, queries, softmax weights
  if (layout == ATTENTION) {
    config.row_bytes[5] = 32; // softmax weights of 16 token slots
    config.rows[7] = 8;       // values: 8 pairs of slots
  }
  // The intrinsic is declared as reading only 8 bytes; without this line the compiler may drop the stores above.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
  configured = layout, configured_rows = query_rows;
}

static void release() {
  if (configured != NONE)
    _tile_release();
  configured = NONE;
}

// The average relative error of truncating a float to bfloat16: half of the last place, 2^-8 / m for a mantissa of 1 <=
// m < 2 that is distributed evenly on a logarithmic scale.
constexpr float TRUNCATION = 0.7213475f / 256.0f;

// Truncates two floats of each lane to bfloat16, the first in the low half.
INLINE __m512i truncated_pair(__m512 first, __m512 second) {
  const __m512i low = _mm512_castps_si512(first);
  return _mm512_mask_alignr_epi8(_mm512_castps_si512(second), 0x3333333333333333u, low, low, 2);
}

// Sets tiles 0 to 3, which hold results, to zero.
INLINE void clear() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

} // namespace amx
