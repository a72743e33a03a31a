// Products of weight matrices and input rows, with the fastest kernel for their formats on this CPU.
#pragma once

#include "matmul_simd.h"
#if TENUTO_AMX
#include "matmul_amx.h"
#endif

// Multiplies rows `first` to `last` of the input, at most `ROWS_AT_ONCE`, by `count` panels from `panel` on: float
// [count][last - first][16], and rows up to the next multiple of 4 may be written. `first` is a multiple of 16.
static void product(const Matrix &w, int panel, int count, const Input &x, ProductState &state, int first, int last,
                    float *out) {
#if TENUTO_AMX
  if (x.type == InputType::BF16) {
    const amx::Target target = {out, LANES, (int64_t)(last - first) * LANES};
    amx::product(w, panel, count, x, first, last, target, false, state.buffer.as<uint8_t>());
    return;
  }
#endif
  with_format(w.format, [&](auto format) { multiply<decltype(format)>(w, panel, count, x, state, first, last, out); });
}

// Returns the size of a thread's buffer for inputs of `blocks` blocks.
INLINE int64_t buffer_bytes(int blocks) { return (int64_t)blocks * 2 * 1024; }
