// Operations that compute each token independently.
#pragma once

#include "workspace.h"

// Returns 1 / rms of `width` floats, padded with zeros to `count`, a multiple of 16.
INLINE float inverse_rms(const float *x, int count, int width, float epsilon) {
  f32x16 squares = {}, others = {}; // two sums, so that an addition need not wait for the one before
  int k = 0;
  for (; k + LANES < count; k += 2 * LANES) {
    const f32x16 a = load<f32x16>(x + k), b = load<f32x16>(x + k + LANES);
    squares += a * a, others += b * b;
  }
  if (k < count)
    squares += load<f32x16>(x + k) * load<f32x16>(x + k);
  return 1.0f / sqrtf(sum16(squares + others) / width + epsilon);
}

INLINE f32x16 activate(int activation, f32x16 gate, f32x16 up) {
  switch (activation) {
  case GELU_TANH: // 1 + tanh(u) = 2 sigmoid(2 u)
    return gate * sigmoid16((gate + gate * gate * gate * 0.044715f) * 1.5957691f) * up;
  case CLAMPED:
    gate = select(gate > 7.0f, splat(7.0f), gate);
    up = select(up > 7.0f, splat(7.0f), select(up < -7.0f, splat(-7.0f), up));
    return gate * sigmoid16(gate * 1.702f) * (up + 1.0f);
  case RELU2:
    return select(gate > 0.0f, gate * gate, f32x16{});
  default:
    return silu16(gate) * up;
  }
}

INLINE f32x16 bias_of(const Matrix &w, int panel) { return w.bias ? load<f32x16>(w.bias + panel * LANES) : f32x16{}; }

// Writes a token's embedding to `to`, and computes its angles.
static void embed(Workspace &work, const TenutoOp &op, int token, float *to) {
  weight_row(op.first, work.step->tokens[token], to);
  if (op.scale != 1.0f)
    for (int i = 0; i < work.model.hidden; i++)
      to[i] *= op.scale;
  for (int r = 0; r < (int)work.ropes.size(); r++) {
    const TenutoRope &rope = work.ropes[r];
    float *angles = work.rotation(token, r);
    for (int i = 0; i < rope.pairs; i++) {
      const float angle = (float)work.batch.position(token) * rope.frequencies[i];
      angles[i] = cosf(angle) * rope.magnitude, angles[rope.pairs + i] = sinf(angle) * rope.magnitude;
    }
  }
}

static void embed(Workspace &work, const TenutoOp &op, Member &member) {
  for (int token; (token = work.team.take(member.number, work.tokens())) >= 0;)
    embed(work, op, token, work.x(token));
}

// Writes `from`, float [hidden rounded up to 32], normalised, to `to`, float [hidden].
static void normalise(const Workspace &work, float epsilon, const float *norm, const float *from, float *to) {
  const float factor = inverse_rms(from, work.widths.hidden, work.model.hidden, epsilon);
  for (int i = 0; i < work.model.hidden; i++)
    to[i] = from[i] * factor * norm[i];
}

static void keep(Workspace &work, const TenutoOp &op, Member &member) {
  for (int token; (token = work.team.take(member.number, work.tokens())) >= 0;)
    normalise(work, op.epsilon, op.norm, work.x(token), work.h(token));
}

static void join(Workspace &work, const TenutoOp &op, Member &member) {
  const int hidden = work.model.hidden;
  const Input to = work.b(2 * hidden, op.consumer);
  float *const joined = member.row.data();
  for (int token; (token = work.team.take(member.number, work.tokens())) >= 0;) {
    float *const x = work.x(token);
    embed(work, op, token, x);
    normalise(work, op.epsilon, op.norm, x, joined);
    normalise(work, op.epsilon, op.norm + hidden, work.h(work.step->sources[token]), joined + hidden);
    std::fill(joined + 2 * hidden, joined + to.blocks * BLOCK, 0.0f);
    for (int b = 0; b < to.blocks; b++)
      to.set(token, b, load<f32x16>(joined + b * BLOCK), load<f32x16>(joined + b * BLOCK + LANES));
    std::fill(x, x + work.widths.hidden, 0.0f);
  }
}

// Several rows share cache lines with the scales of their quants. So a member takes a block of all its rows before the
// next one, and begins elsewhere than the others: otherwise the lines would go to and fro between cores.
static void norm(Workspace &work, const TenutoOp &op, Member &member, const Input &to, int count,
                 const int32_t *which) {
  constexpr int ROWS = 8; // at once
  const int width = work.widths.hidden, first = work.team.begin_of(member.number, count),
            last = work.team.begin_of(member.number + 1, count), begin = work.team.begin_of(member.number, to.blocks);
  auto row = [&](int i) { return work.x(which ? which[i] : i); };
  for (int i = first; i < last; i += ROWS) {
    const int now = std::min(ROWS, last - i);
    float factors[ROWS];
    for (int r = 0; r < now && i == first; r++) // another core may have the rows in its caches
      for (int k = 0; k < width; k += LANES)
        __builtin_prefetch(row(i + r) + k);
    for (int r = 0; r < now; r++)
      factors[r] = inverse_rms(row(i + r), width, work.model.hidden, op.epsilon);
    for (int n = 0; n < to.blocks; n++) {
      const int b = (begin + n) % to.blocks;
      const int at = b * BLOCK;
      const f32x16 low = columns(op.norm, op.order, at), high = columns(op.norm, op.order, at + LANES);
      for (int r = 0; r < now; r++) {
        const float *from = row(i + r);
        if (i + now + r < last)
          for (int k = 0; k < BLOCK; k += LANES)
            __builtin_prefetch(row(i + now + r) + at + k);
        to.set(i + r, b, columns(from, op.order, at) * factors[r] * low,
               columns(from, op.order, at + LANES) * factors[r] * high);
      }
    }
  }
}

// Adds up normalised vectors, as `TenutoStep::vectors` asks.
static void add_up(Workspace &work, const TenutoOp &op, Member &member) {
  const TenutoStep &step = *work.step;
  const int hidden = work.model.hidden;
  for (int sum; (sum = work.team.take(member.number, step.sums_count)) >= 0;) {
    float *to = step.vectors + (int64_t)sum * hidden;
    memset(to, 0, hidden * sizeof(float));
    for (int i = step.firsts[sum]; i < step.firsts[sum] + step.lengths[sum]; i++) {
      const float *from = work.x(i);
      const float factor = inverse_rms(from, work.widths.hidden, hidden, op.epsilon);
      for (int k = 0; k < hidden; k++)
        to[k] += from[k] * factor * op.norm[k];
    }
  }
}

static void narrow(Workspace &work, Member &member) {
  if (member.number == 0)
    work.narrow();
}

static void select(Workspace &work, const TenutoOp &op, Member &member) {
  const int count = work.step->outputs_count;
  add_up(work, op, member);
  norm(work, op, member, work.a(work.model.hidden, count, op.consumer), count, work.wanted());
}

static void post(Workspace &work, const TenutoOp &op, Member &member) {
  const int width = work.widths.hidden;
  for (int token; (token = work.team.take(member.number, work.tokens())) >= 0;) {
    float *from = work.y(token), *to = work.x(token);
    const float factor = (op.norm ? inverse_rms(from, width, work.model.hidden, op.epsilon) : 1.0f) * op.scale;
    for (int k = 0; k < width; k += LANES) {
      const f32x16 found = load<f32x16>(from + k) * factor;
      store(to + k, load<f32x16>(to + k) + (op.norm ? found * load<f32x16>(op.norm + k) : found));
      store(from + k, f32x16{});
    }
  }
}

#if TENUTO_AMX
// Does what `add` does, with AMX tiles that start from the values to which products are added. Returns false if the
// operation also has a bias, gate, scale or second matrix.
static bool add_tiles(Workspace &work, const TenutoOp &op, Member &member) {
  constexpr int PANELS = 2; // of a task
  const Matrix &w = op.first;
  const Input from = work.b(w);
  if (from.type != InputType::BF16 || op.second.panels || w.bias || op.column >= 0 || op.scale != 1.0f)
    return false;
  work.share((w.panels + PANELS - 1) / PANELS, work.tokens(), member, [&](int task, int first, int last) {
    const int panel = task * PANELS;
    amx::product(w, panel, std::min(PANELS, w.panels - panel), from, first, last,
                 {work.target(op, first) + panel * LANES, work.widths.hidden, LANES}, true,
                 member.state.buffer.as<uint8_t>());
    for (int p = panel; p < std::min(panel + PANELS, w.panels); p++)
      for (int row = first; row < last; row++) {
        float *to = work.target(op, row) + p * LANES;
        store(to, work.adapters.add(load<f32x16>(to), op, 0, p, row));
      }
  });
  return true;
}
#endif

static void add(Workspace &work, const TenutoOp &op, Member &member) {
#if TENUTO_AMX
  if (add_tiles(work, op, member))
    return;
#endif
  const float *values = member.products.as<float>();
  work.share(op.first, op.second, 2, work.b(op.first), work.tokens(), member,
             [&](const Matrix &w, int panel, int count, int first, int last) {
               const float *from = values;
               for (int p = panel; p < panel + count; p++) {
                 const f32x16 bias = bias_of(w, p);
                 for (int row = first; row < last; row++, from += LANES) {
                   float *to = work.target(op, row) + p * LANES;
                   f32x16 found = work.adapters.add(load<f32x16>(from) + bias, op, 0, p, row);
                   if (op.column >= 0)
                     found = found * (1.0f / (1.0f + expf(-work.projected(row)[op.column])));
                   store(to, load<f32x16>(to) + (op.scale == 1.0f ? found : found * op.scale));
                 }
               }
             });
}

// Computes block `block` of the next product's input from two neighbouring panels of `gate` and, unless it is empty, of
// `up`. `adapters`: null if rows are not those of the step's tokens.
INLINE void gate_block(const Matrix &gate, const Matrix &up, int block, const TenutoOp &op, const Input &from,
                       const Input &to, int start, int end, Member &member, const Adapters *adapters) {
  const int panels = std::min(2, gate.panels - 2 * block);
  const Runs runs(end - start);
  for (int run = 0; run < runs.count; run++) {
    const int first = start + runs.begin(run), last = start + runs.begin(run + 1);
    const int64_t step = (int64_t)(last - first) * LANES;
    float *gates = member.products.as<float>(), *ups = gates + panels * step;
    product(gate, 2 * block, panels, from, member.state, first, last, gates);
    if (up.panels)
      product(up, 2 * block, panels, from, member.state, first, last, ups);
    else
      ups = gates;
    for (int p = 0; p < panels; p++) { // apart from `set` below, so that both loops are short enough to overlap
      const int panel = 2 * block + p;
      const f32x16 gate_bias = bias_of(gate, panel), up_bias = bias_of(up, panel);
      float *at = gates + p * step;
      for (int row = first; row < last; row++, at += LANES) {
        f32x16 gate_input = load<f32x16>(at) + gate_bias, up_input = load<f32x16>(at + (ups - gates)) + up_bias;
        if (adapters)
          gate_input = adapters->add(gate_input, op, 0, panel, row),
          up_input = adapters->add(up_input, op, 1, panel, row);
        gate_input = op.gate_scale == 1.0f ? gate_input : gate_input * op.gate_scale;
        store(at, activate(op.activation, gate_input, up_input));
      }
    }
    for (int row = first; row < last; row++) {
      const float *at = gates + (int64_t)(row - first) * LANES;
      to.set(row, block, load<f32x16>(at), panels > 1 ? load<f32x16>(at + step) : f32x16{});
    }
  }
}

static void gated(Workspace &work, const TenutoOp &op, Member &member) {
  const Input from = work.a(op.first), to = work.b(op.first.outputs, op.consumer);
  member.state.outliers.find(from, 0, work.runs(work.tokens()));
  work.share(to.blocks, work.tokens(), member, [&](int block, int first, int last) {
    gate_block(op.first, op.second, block, op, from, to, first, last, member, &work.adapters);
  });
}

static void project(Workspace &work, const TenutoOp &op, Member &member) {
  const float *values = member.products.as<float>();
  work.share(op.first, op.second, 2, work.a(op.first), work.tokens(), member,
             [&](const Matrix &w, int panel, int count, int first, int last) {
               const float *from = values;
               const int behind = &w == &op.first ? 0 : op.first.panels;
               for (int p = panel; p < panel + count; p++) {
                 const f32x16 bias = bias_of(w, p);
                 for (int row = first; row < last; row++, from += LANES)
                   store(work.projected(row) + (behind + p) * LANES, load<f32x16>(from) + bias);
               }
             });
}

static void logits(Workspace &work, const TenutoOp &op, Member &member) {
  const TenutoStep &step = *work.step;
  const int vocab = work.model.vocab;
  const Input from = work.a(op.first.inputs, step.outputs_count, op.first.format);
  float *values = member.products.as<float>();
  work.share(op.first, op.second, 4, from, step.outputs_count, member,
             [&](const Matrix &, int panel, int count, int first, int last) {
               float *found = values;
               for (int p = panel; p < panel + count; p++)
                 for (int row = first; row < last; row++, found += LANES) {
                   if (op.scale != 1.0f)
                     store(found, load<f32x16>(found) * op.scale);
                   for (int i = 0; i < LANES && op.cap != 0.0f; i++)
                     found[i] = op.cap * tanhf(found[i] / op.cap);
                   const int token = p * LANES, width = std::min(LANES, vocab - token);
                   if (step.logits)
                     memcpy(step.logits + (int64_t)row * vocab + token, found, sizeof(float) * width);
                   Best &best = member.best[row];
                   if (width == LANES && !(highest16(load<f32x16>(found)) > best.value))
                     continue;
                   for (int i = 0; i < width; i++)
                     if (found[i] > best.value)
                       best = {found[i], token + i};
                 }
             });
}
