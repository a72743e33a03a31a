// Attention of query rows to a span of the KV cache, with the fastest kernel for its type on this CPU.
#pragma once

#include "attention_int8.h"
#include "attention_pairs.h"
#if TENUTO_AMX
#include "attention_amx.h"
#endif

// Computes attention of ROWS query rows with the kernel for the cache's type.
template <class Kv, int ROWS>
INLINE void attend_rows(const Blocks &blocks, const QueryRows &rows, int row, int from, int to, float cap) {
  if constexpr (std::is_same_v<Kv, KvInt8>)
    attend_int8<ROWS>(blocks, rows, row, from, to, cap);
  else
    attend_pairs<Kv, ROWS>(blocks, rows, row, from, to, cap);
}

// Calls `use` with the constant `count`, from 1 to MOST, so that `use` is compiled for each.
template <int MOST, class Use> INLINE void with_count(int count, Use use) {
  if constexpr (MOST > 1)
    if (count < MOST)
      return with_count<MOST - 1>(count, use);
  use(std::integral_constant<int, MOST>());
}

constexpr int STRIP = 2 * CHUNK; // blocks that all rows attend to before the next are read

// Computes attention of query rows to a span. `next`, unless it is null, is the span that this thread most likely
// attends to afterwards; tiles prefetch it.
static void attend(const Span &span, const QueryRows &rows, float cap, const Span *next) {
  const KvType type = span.blocks.cache.type;
#if TENUTO_AMX
  if (rows.head_dim % BLOCK == 0 && rows.count <= MAX_GROUPS * LANES &&
      (type == KvType::BF16 || (type == KvType::INT8 && rows.many)))
    return (rows.count <= LANES ? amx::attend<true> : amx::attend<false>)(span, rows, cap, next);
#endif
  for (int r = 0; r < rows.count; r++) {
    *rows.result(r) = {-INFINITY, 0.0f};
    memset(weighted_values(rows.result(r)), 0, sizeof(float) * rows.head_dim);
  }
  for (int start = span.from, end; start < span.to; start = end) {
    end = std::min(span.to, start / STRIP * STRIP + STRIP);
    for (int r = 0, now, seen; r < rows.count; r += now) {
      auto attend_now = [&](auto so_many) {
        constexpr int ROWS = decltype(so_many)::value;
        with_kv_type(type, [&](auto kv) { attend_rows<decltype(kv), ROWS>(span.blocks, rows, r, start, seen, cap); });
      };
      now = std::min(rows.count - r, ATTENTION_ROWS);
      seen = std::min(end, span.blocks.cache.block_of(rows.end(r + now - 1) - 1) + 1);
      with_count<ATTENTION_ROWS>(now, attend_now);
    }
  }
}

// Adds `part`, the result of a query row for the chunks that follow, to `total`, its result so far.
static void add_partial(PartialAttention *total, const PartialAttention *part, int head_dim) {
  if (part->max_score == -INFINITY)
    return;
  const float max_score = std::max(total->max_score, part->max_score);
  const float kept = power_of_two(total->max_score - max_score), added = power_of_two(part->max_score - max_score);
  for (int d = 0; d < head_dim; d += LANES)
    store(weighted_values(total) + d, load<f32x16>(weighted_values(total) + d) * kept +
                                          load<f32x16>(weighted_values((PartialAttention *)part) + d) * added);
  *total = {max_score, total->sum * kept + part->sum * added};
}
