// The C interface over raw pointers; `library.py` describes it once more. All that is pointed to is kept by the caller.
#pragma once

#include "matrix.h"
#include "sampling.h"

namespace {

enum OpKind : int32_t {
  EMBED = 0,
  NORM = 1,
  QKV = 2,
  ATTEND = 3,
  ADD = 4,
  GATED = 5,
  SELECT = 6,
  LOGITS = 7,
  POST = 8,
  PROJECT = 9,
  CONVOLVE = 10,
  SCAN = 11,
  DELTA = 12,
  GATE = 13,
  EXPERTS = 14
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED = 2, RELU2 = 3 };

} // namespace

extern "C" {

// The pairs (i, i + pairs) of a head are turned by `frequencies` radians a token, float [pairs], and multiplied by
// `magnitude`.
struct TenutoRope {
  int32_t pairs;
  float magnitude;
  const float *frequencies;
};

// A memory group of `layers` layers. Of pages: keys and values of `kv_heads` heads of `head_dim` elements, of the last
// `window` tokens, or with 0 of all, as bfloat16 or, with `in_bytes`, quants (see `Cache`). Of state slots, where
// `kv_heads` is 0: for each layer float [kept][convolved], the last inputs of the convolution, and then float
// [recurrent].
struct TenutoGroup {
  int32_t layers, kv_heads, head_dim, window, in_bytes, kept, convolved, recurrent;
};

// An attention layer, number `place` of its memory group. `rope` is -1 where positions do not count. With `gated` the
// projection of queries has each head's gate behind its query. Scores are multiplied by `scale`, then kept within `cap`
// by a hyperbolic tangent unless that is 0. Norms float [head_dim], and sinks float [heads], scores of attending to
// nothing, may be null. So may `key_scales`, float [kv_heads][head_dim]: powers of two that rotated keys are multiplied
// by, and queries divided by.
struct TenutoAttention {
  int32_t group, place, heads, rope, gated;
  float scale, cap, epsilon;
  const float *query_norm, *key_norm, *sinks, *key_scales;
};

// A recurrent layer, number `place` of its memory group. `heads` heads of `head_dim` lanes have states float
// [size][head_dim]; `groups` groups of them share what is written with and read by, `size` elements each. The
// convolution's weights are float [kernel][convolved], its bias float [convolved] or null. `inputs`, `gate`, `steps`
// and `writes` are columns of what was projected: what is convolved, the output gate, and what of each head makes its
// time step or decay, and (DELTA) how strongly it writes. `rates`, `step_bias` and `skip` are float [heads]. The norm,
// float [heads * head_dim] or null, is that of `norm_groups` equal parts, after the gate if that comes first. Gates and
// steps are multiplied by `gate_scale` and `step_scale`.
struct TenutoRecurrent {
  int32_t group, place, heads, head_dim, groups, size, kernel, inputs, gate, steps, writes, norm_groups, gate_first;
  float least_step, most_step, gate_scale, step_scale, epsilon;
  const float *weights, *bias, *rates, *step_bias, *skip, *norm;
};

// `chosen` of `count` networks compute a token: those with the highest scores, the first projected columns. Their
// weights are probabilities among all, or with `normalised` among the chosen, times `scale`. With a `correction`, float
// [count], weights are sigmoids of scores, with `normalised` divided by their sum, and the correction is added to
// choose. Each of the matrices is [count]; without gates `up` is null, and `gate` has the projections up.
struct TenutoExperts {
  int32_t count, chosen, normalised;
  float scale;
  const float *correction;
  const Matrix *gate, *up, *down;
};

// One operation. x and y are float [tokens][hidden]; y is zero between layers. There are two inputs of products, A and
// B, and what was projected, P, float.
//   EMBED: x = scale * rows of `first`.             NORM: A = x / rms(x) * norm.
//   QKV: queries, keys, values = A times first, second, third; rotated; keys and values go to the cache.
//   ATTEND: B = attention of the queries.
//   ADD: x, or y with `apart`, += scale * (B times first), times the sigmoid of P's column `column` if that is not -1.
//   GATED: B = activation(gate_scale * (A times first)) * (A times second); without a second, activation(A times
//   first). POST: x += scale * y / rms(y) * norm, or scale * y if that is null; y = 0.    PROJECT: P = A times first,
//   and behind it A times second. CONVOLVE, then SCAN (Mamba-2) or DELTA (the gated delta rule), then GATE: B = what
//   the recurrent layer gives. EXPERTS: x, or y with `apart`, += scale * what the networks chosen by P make of A.
//   SELECT: as NORM, only for tokens whose logits are wanted.
//   LOGITS: scale * (A times first), kept within `cap` by a hyperbolic tangent unless that is 0.
// `reader` is the kind of the matrices that the A or B that an operation makes is multiplied with.
struct TenutoOp {
  int32_t kind, reader, activation, apart, column;
  float epsilon, scale, gate_scale, cap;
  const float *norm;
  Matrix first, second, third;
  const TenutoAttention *attention;
  const TenutoRecurrent *recurrent;
  const TenutoExperts *experts;
};

struct TenutoModel {
  int32_t hidden, vocab, page_size, groups_count, ropes_count;
  const TenutoGroup *groups;
  const TenutoRope *ropes;
};

// A step in one memory group. Of pages: `table`, page tables by row id, `width` entries apart. Of state slots: for each
// row the slot that is read, negative for the zero state, and the slot that is written, int32 [rows].
struct TenutoMoves {
  const int32_t *table;
  int64_t width;
  const int32_t *reads, *writes;
};

// A plan's arrays, all int32: `row_ids`, `starts`, `counts` [rows]; `tokens` [sum(counts)]; `outputs` [outputs], after
// which tokens logits are wanted; `moves` [groups]. Results: `logits` float [outputs][vocab], and `best` int32
// [outputs], the first of the likeliest tokens. How long operations took is added to `op_seconds`, by kind.
struct TenutoStep {
  int32_t rows, tokens_count, outputs_count;
  const int32_t *row_ids, *starts, *counts, *tokens;
  const TenutoMoves *moves;
  const int32_t *outputs;
  float *logits;
  int32_t *best;
  double *op_seconds;
};

// `rows` tokens to choose: `logits` float [rows][vocab], `options` [rows], `tokens` int32 [rows]. `masks` [rows] or
// null: for each row null or its mask, of `words` words, see `forbid`; it changes the logits.
struct TenutoDraws {
  int32_t rows, words;
  float *logits;
  const SamplingOptions *options;
  const uint32_t *const *masks;
  int32_t *tokens;
};
}
