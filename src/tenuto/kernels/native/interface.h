// The C interface over raw pointers. `library.py` reads the structures from this file; each line of a structure
// declares fields of one type. The caller keeps the memory that pointers refer to.
#pragma once

#include "kv_cache.h"
#include "sampling.h"
#include "weight_formats.h"

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
  EXPERTS = 14,
  KEEP = 15,
  JOIN = 16,
  NARROW = 17
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED = 2, RELU2 = 3 };

} // namespace

extern "C" {

// A rotary embedding. The pairs (i, i + pairs) of a head are rotated by `frequencies` radians per token, float [pairs],
// and multiplied by `magnitude`.
struct TenutoRope {
  int32_t pairs;
  float magnitude;
  const float *frequencies;
};

// A memory group of `layers` layers: attention layers with pages, or recurrent layers with state slots.
//   Pages have keys and values of the type `kv_type`, a `KvType`, of `kv_heads` heads of `head_dim` dimensions. A token
//   attends to the last `window` tokens, or with 0 to all.
//   State slots (`kv_heads` is 0) have for each layer the last inputs of the convolution, float [conv_tokens]
//   [conv_channels], and the recurrent state, float [state_floats]. What is kept of a token that may be rejected is
//   float [input_floats] a layer: the inputs of the convolution, then each head's time step or decay, and then (DELTA)
//   each head's write strength.
struct TenutoGroup {
  int32_t layers, kv_heads, head_dim, window, kv_type, conv_tokens, conv_channels, state_floats, input_floats;
};

// An attention layer: layer number `layer` of its memory group. `rope` is -1 for a layer without positions. With
// `gated`, the query projection has each head's gate behind its query. Scores are multiplied by `scale`, and then
// limited to `cap` by a hyperbolic tangent unless that is 0. These may be null: norms, float [head_dim]; `sinks`, the
// scores of a key without a value, float [heads]; and `key_scales`, powers of two by which rotated keys are multiplied
// and queries divided, float [kv_heads][head_dim].
struct TenutoAttention {
  int32_t group, layer, heads, rope, gated;
  float scale, cap, epsilon;
  const float *query_norm, *key_norm, *sinks, *key_scales;
};

// A recurrent layer: layer number `layer` of its memory group. Each of `heads` heads has a state, float [state_size]
// [head_dim]. The heads of each of `groups` groups share the vectors of `state_size` elements that write to the state
// (B, keys) and read from it (C, queries). The convolution has weights, float [kernel][conv_channels], and a bias,
// float [conv_channels] or null. `*_column` is the first column, among the projected ones, of the convolution's inputs,
// of the output gate, of each head's time step or decay, and (DELTA) of each head's write strength. `rates`,
// `step_bias` and `skip` are float [heads]. The norm, float [heads * head_dim] or null, normalises `norm_groups` equal
// parts, after the gate if `gate_first`. Gates and steps are multiplied by `gate_scale` and `step_scale`.
struct TenutoRecurrent {
  int32_t group, layer, heads, head_dim, groups, state_size, kernel;
  int32_t conv_column, gate_column, step_column, write_column;
  int32_t norm_groups, gate_first;
  float min_step, max_step, gate_scale, step_scale, epsilon;
  const float *weights, *bias, *rates, *step_bias, *skip, *norm;
};

// A mixture of experts. Each token is computed by `chosen` of `count` experts: those with the highest scores, which are
// the first projected columns. An expert's weight is its probability among all experts, or with `normalised` among the
// chosen ones, times `scale`. With a `correction`, float [count], weights are sigmoids of the scores, with `normalised`
// divided by their sum, and experts are chosen by sigmoid plus correction. Matrices are arrays of `count`. Experts
// without gates have a null `up`, and their up projections are in `gate`.
struct TenutoExperts {
  int32_t count, chosen, normalised;
  float scale;
  const float *correction;
  const Matrix *gate, *up, *down;
};

// An operation. x, the residual stream, and y are float [tokens][hidden]; y collects outputs until POST and is zero
// between layers. A and B are inputs of products; P, float, has the results of PROJECT. H, float [tokens][hidden],
// lasts beyond a step.
//   EMBED      x = scale * rows of `first`.
//   NORM       A = x / rms(x) * norm.
//   QKV        queries, keys and values = A times first, second and third; rotated. Keys and values go to the cache.
//   ATTEND     B = attention of the queries.
//   ADD        x, or with `apart` y, += scale * (B times first), times the sigmoid of column `column` of P unless -1.
//   GATED      B = activation(gate_scale * (A times first)) * (A times second), or without a second activation(A times
//              first).
//   POST       x += scale * y / rms(y) * norm, or scale * y if norm is null; y = 0.
//   PROJECT    P = A times first, followed by A times second.
//   CONVOLVE, then SCAN (Mamba-2) or DELTA (the gated delta rule), then GATE: B = the output of the recurrent layer.
//   EXPERTS    x, or with `apart` y, += scale * the output of the experts that P chooses, for A.
//   NARROW     leaves x to the tokens whose logits are wanted, for the operations that follow, unless vectors are
//              wanted.
//   SELECT     as NORM, for the tokens whose logits are wanted; adds up the vectors that are wanted.
//   KEEP       H = x / rms(x) * norm.
//   JOIN       B = rows e of `first` and h of H (see `sources`), normed and side by side: scale * e / rms(scale * e) *
//              norm[0], h / rms(h) * norm[1], with norm [2][hidden]; x = 0.
//   LOGITS     scale * (A times first), limited to `cap` by a hyperbolic tangent unless that is 0.
// `consumer` is the format of the matrices that the result, A or B, is multiplied by. In NORM, SELECT and ATTEND,
// column j of the result is the one that would be column `order[j]` otherwise, int32 [columns], unless that is null.
struct TenutoOp {
  int32_t kind;
  PanelFormat consumer;
  int32_t activation, apart, column;
  float epsilon, scale, gate_scale, cap;
  const float *norm;
  const int32_t *order;
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

// A step's memory in one group. With pages: `table`, page tables by row id, `width` entries each. With state slots: the
// slots that each row reads, negative for the zero state, and writes; how many of the inputs kept for its row id it
// absorbs first; and whether it keeps the inputs of its tokens, and writes the state before them; int32 [rows].
struct TenutoGroupStep {
  const int32_t *table;
  int64_t width;
  const int32_t *reads, *writes, *absorbs, *keeps;
};

// A low-rank change of a matrix: its products grow by up (down (input)) times `scale`. Both are float, or `bfloat16`:
// `down`, [ranks rounded up to 16 / 16][inputs rounded up to 32][16], and `up`, [panels of outputs][rank][16]. With
// rank 0 there is no change.
struct TenutoLowRank {
  int32_t rank, bfloat16;
  float scale;
  const void *down, *up;
};

// An adapter: the changes of each operation's three matrices, [operations][3]. `widest` is its highest rank, rounded up
// to 16.
struct TenutoAdapter {
  int32_t widest;
  const TenutoLowRank *changes;
};

// A step. The arrays of its plan are int32: `row_ids`, `starts`, `counts` [rows]; `tokens` [sum(counts)]; and `outputs`
// [outputs_count], the tokens whose logits are wanted. `groups` is [memory groups]. Results are `logits`, float
// [outputs] [vocab], or null if only `best` is wanted, int32 [outputs], the first of the likeliest tokens. `vectors`,
// float [sums_count] [hidden], are sums of the last norm's results: the first for `lengths[0]` tokens from index
// `firsts[0]` on, and so on. The duration of operations is added to `op_seconds`, by kind. `adapter_of`, int32 [rows],
// is the index of each row's adapter in `adapters`, or -1; it is not read if there are no adapters. `guesses`, int32
// [rows] or null, is how many of each row's tokens are guesses. Where arithmetic depends on the number of tokens, these
// do not count, so that guesses change no result. Operations number `first_op` to `end_op` - 1 are computed; in JOIN,
// token i takes row `sources[i]` of H, int32 [tokens], which is less than the last step's number of tokens.
struct TenutoStep {
  int32_t rows, tokens_count, outputs_count, sums_count;
  const int32_t *row_ids, *starts, *counts, *tokens;
  const TenutoGroupStep *groups;
  const int32_t *outputs;
  const int32_t *firsts, *lengths;
  float *logits;
  int32_t *best;
  float *vectors;
  double *op_seconds;
  int32_t adapters_count;
  const TenutoAdapter *adapters;
  const int32_t *adapter_of;
  const int32_t *guesses;
  int32_t first_op, end_op;
  const int32_t *sources;
};

// Samples `rows` tokens: `logits` float [rows][vocab], `options` [rows], `tokens` int32 [rows]. `masks`, [rows] or
// null, has for each row null or its mask of `words` words (see `forbid`), which changes the logits.
struct TenutoDraws {
  int32_t rows, words;
  float *logits;
  const SamplingOptions *options;
  const uint32_t *const *masks;
  int32_t *tokens;
};
}
