// Attention of query rows to a span of the KV cache, with the fastest kernel for its type on this CPU.
#pragma once

#include "attention_int8.h"
#include "attention_pairs.h"
#if TENUTO_AMX
#include "attention_amx.h"
#endif

// Calls `use` with the constant `count`, from 1 to MOST, so that `use` is compiled for each.
template <int MOST, class Use> INLINE void with_count(int count, Use use) {
  if constexpr (MOST > 1)
    if (count < MOST)
      return with_count<MOST - 1>(count, use);
  use(std::integral_constant<int, MOST>());
}

// Prefetches a block's keys and values.
INLINE void prefetch_block(const Cache &cache, const char *keys, const char *values) {
  const int64_t bytes = cache.block_bytes() / 2;
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(keys + i, 0, 2), __builtin_prefetch(values + i, 0, 2);
}

// Computes attention of query rows to a span, a chunk at a time, so that it stays in the first cache while all rows use
// it: by MOST rows while there are as many, and then by up to `FEW_ROWS`. `attend_rows(row, count, from, to, ahead)`
// attends to blocks, with a constant count. `ahead`, unless it is null, is the chunk to prefetch meanwhile.
template <int MOST, class Use>
INLINE void attend_by_chunks(const Span &span, const QueryRows &rows, const Span *next, Use attend_rows) {
  for (int start = span.from, end; start < span.to; start = end) {
    end = Blocks::chunk_end(start, span.to);
    const Span *then = end < span.to ? &span : next;
    Chunk ahead;
    if (then) {
      ahead = then->blocks.chunk(then == &span ? end : then->from, then->to);
      const Cache &cache = then->blocks.cache;
      for (int i = end - start; i < ahead.count; i++) // those before are prefetched while this chunk is multiplied
        prefetch_block(cache, ahead.at[i], ahead.values(i));
      std::fill(ahead.at + ahead.count, ahead.at + CHUNK, ahead.at[ahead.count - 1]);
    }
    for (int r = 0, now; r < rows.count; r += now) {
      const int left = rows.count - r;
      now = left >= MOST ? MOST : std::min(left, FEW_ROWS);
      const int seen = std::min(end, span.blocks.cache.block_of(rows.end(r + now - 1) - 1) + 1);
      if (seen <= start)
        continue;
      const Chunk *const prefetched = then && r == 0 ? &ahead : nullptr;
      if (now == MOST)
        attend_rows(r, std::integral_constant<int, MOST>(), start, seen, prefetched);
      else
        with_count<std::min(FEW_ROWS, MOST)>(now, [&](auto count) { attend_rows(r, count, start, seen, prefetched); });
    }
  }
}

// Computes attention of query rows to a span. `next`, unless it is null, is the span that this thread most likely
// attends to afterwards.
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
  if (type == KvType::INT8) {
    const QuantizedQueries queries(rows);
    attend_by_chunks<INT8_ATTENTION_ROWS>(
        span, rows, next, [&](int row, auto count, int from, int to, const Chunk *ahead) {
          attend_int8<decltype(count)::value>(span.blocks, rows, queries, row, from, to, ahead, cap);
        });
  } else {
    attend_by_chunks<ATTENTION_ROWS>(span, rows, next, [&](int row, auto count, int from, int to, const Chunk *ahead) {
      attend_pairs<KvBf16, decltype(count)::value>(span.blocks, rows, row, from, to, ahead, cap);
    });
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
