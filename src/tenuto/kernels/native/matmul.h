// Products of weight matrices and input rows, with the fastest kernel for their formats on this CPU.
#pragma once

#include "matmul_simd.h"
#if TENUTO_AMX
#include "matmul_amx.h"
#endif

// Multiplies rows `first` to `last` of the input, at most `ROWS_AT_ONCE`, by `count` panels from `panel` on: float
// [count][last - first][16], and rows up to the next multiple of 4 may be written. `first` is a multiple of 16.
// `outliers` has the input's outlier blocks. `buffer` has room for two unpacked panels.
static void product(const Matrix &w, int panel, int count, const Input &x, const OutlierBlocks &outliers, int first,
                    int last, float *out, uint8_t *buffer) {
#if TENUTO_AMX
  if (x.type == InputType::BF16) {
    amx::product(w, panel, count, x, first, last, {out, LANES, (int64_t)(last - first) * LANES}, false, buffer);
    return;
  }
#endif
  for (int i = 0; i < count; i++, out += (int64_t)(last - first) * LANES) {
    const Panel one(w, panel + i);
    with_format(w.format,
                [&](auto format) { multiply_panel<decltype(format)>(one, x, outliers, first, last, out, buffer); });
  }
}

// Returns the size of `buffer` for inputs of `blocks` blocks.
INLINE int64_t buffer_bytes(int blocks) { return (int64_t)blocks * 2 * 1024; }
