// Recurrent layers: Mamba-2 (Dao and Gu, arXiv:2405.21060) and gated delta nets (Yang et al., arXiv:2412.06464), token
// by token, so that results do not depend on the steps in which tokens are computed. A row first absorbs inputs that
// its last step kept, and computes them as that step would have done; what they output is already known.
#pragma once

#include "dense.h"

// The state slots of one memory group.
class States {
public:
  explicit States(const TenutoGroup &group) : group_(group) {}
  int64_t unit_bytes() const { return group_.layers * layer_floats() * 4; }
  int conv_tokens() const { return group_.conv_tokens; }
  int conv_channels() const { return group_.conv_channels; }

  // Return the parts of a layer's state in a slot, or null for the zero state: the last inputs of the convolution,
  // [conv_tokens][conv_channels], and the recurrent state.
  float *convolution(int slot, int layer) const {
    return slot < 0 ? nullptr : data + (slot * (int64_t)group_.layers + layer) * layer_floats();
  }
  float *recurrent(int slot, int layer) const {
    float *const state = convolution(slot, layer);
    return state ? state + (int64_t)group_.conv_tokens * group_.conv_channels : nullptr;
  }

  // Returns what is kept of a row's token, number `token` of the step that kept it, in a layer.
  float *input(int row_id, int layer, int token) const {
    return inputs + (((int64_t)row_id * group_.layers + layer) * most_kept + token) * group_.input_floats;
  }
  int64_t input_bytes() const { return (int64_t)group_.layers * group_.input_floats * 4; } // of a token

  float *data = nullptr, *inputs = nullptr;
  int most_kept = 0; // tokens of a row

private:
  int64_t layer_floats() const { return (int64_t)group_.conv_tokens * group_.conv_channels + group_.state_floats; }
  const TenutoGroup group_;
};

constexpr int STRIPS = 4; // vectors of channels, or of a head, that are computed together

// Computes a causal convolution of each channel, and then x * sigmoid(x). The state has the inputs before the next
// token.
static void convolve(Workspace &work, const States &states, const TenutoOp &op, Member &member) {
  const TenutoRecurrent &r = *op.recurrent;
  const TenutoGroupStep &slots = work.group_step(r.group);
  const int kept = states.conv_tokens(), width = states.conv_channels(),
            blocks = (width + STRIPS * LANES - 1) / (STRIPS * LANES);
  for (int task; (task = work.team.take(member.number, work.step->rows * blocks)) >= 0;) {
    const int row = task / blocks, from = task % blocks * STRIPS * LANES, to = std::min(width, from + STRIPS * LANES);
    const int first = work.batch.first(row), count = work.step->counts[row], id = work.step->row_ids[row];
    const int absorbed = slots.absorbs[row], stop = slots.keeps[row] ? 0 : count;
    const float *before = states.convolution(slots.reads[row], r.layer);
    float *after = states.convolution(slots.writes[row], r.layer);
    for (int channel = from; channel < to; channel += LANES) {
      // Returns the input of token i of the row, which is negative for tokens before the step.
      auto input = [&](int i) __attribute__((always_inline)) {
        if (i >= 0)
          return load<f32x16>(work.projected(first + i) + r.conv_column + channel);
        if (i >= -absorbed)
          return load<f32x16>(states.input(id, r.layer, absorbed + i) + channel);
        return before ? load<f32x16>(before + (int64_t)(kept + absorbed + i) * width + channel) : f32x16{};
      };
      for (int i = -absorbed; i < count; i++) {
        f32x16 sum = r.bias ? load<f32x16>(r.bias + channel) : f32x16{};
        for (int k = 0; k <= kept; k++)
          sum += input(i - kept + k) * load<f32x16>(r.weights + (int64_t)k * width + channel);
        store((i < 0 ? work.absorbed(row, absorbed + i) : work.convolved(first + i)) + channel, silu16(sum));
      }
      for (int k = 0; k < kept; k++)
        store(after + (int64_t)k * width + channel, input(stop - kept + k));
      for (int i = 0; i < count - stop; i++)
        store(states.input(id, r.layer, i) + channel, input(i));
    }
  }
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Updates WIDTH vectors of a head's state h, [size][lanes], to decay * h + in x^T, and computes h out.
template <int WIDTH>
INLINE void scan_lanes(const float *before, float *after, int lanes, int size, float decay, const float *in,
                       const float *out, const f32x16 *x, f32x16 *output) {
  f32x16 entering[WIDTH], sum[WIDTH] = {};
  for (int v = 0; v < WIDTH; v++)
    entering[v] = x[v];
  for (int n = 0; n < size; n++, before += lanes, after += lanes)
#pragma GCC unroll 4
    for (int v = 0; v < WIDTH; v++) {
      const f32x16 h = load<f32x16>(before + v * LANES) * decay + entering[v] * in[n];
      store(after + v * LANES, h);
      sum[v] += h * out[n];
    }
  for (int v = 0; v < WIDTH; v++)
    output[v] = sum[v];
}

// Calls `use(lane, width)` for all lanes of a head, `width` vectors at a time.
template <class Use> INLINE void by_strips(int lanes, Use use) {
  int lane = 0;
  for (; lane + STRIPS * LANES <= lanes; lane += STRIPS * LANES)
    use(lane, std::integral_constant<int, STRIPS>());
  for (; lane < lanes; lane += LANES)
    use(lane, std::integral_constant<int, 1>());
}

// The inputs of a scan for a token, and the place for the output of head `head`, which is of group `group`: the results
// of the convolution, and for each head the time step or decay and (DELTA) the write strength.
struct ScanToken {
  int head, group;
  const float *channels, *steps, *strengths;
  float *output;
};

// Calls `use(token, before, after)` for the tokens of each row, in order, and every head. The head's state before and
// after the token, [state_size][head_dim], may be the same memory.
template <class Use>
INLINE void each_token(Workspace &work, const States &states, const TenutoOp &op, Member &member, Use use) {
  const TenutoRecurrent &r = *op.recurrent;
  const TenutoGroupStep &slots = work.group_step(r.group);
  const int64_t floats = (int64_t)r.state_size * r.head_dim;
  const int width = states.conv_channels();
  for (int task; (task = work.team.take(member.number, work.step->rows * r.heads)) >= 0;) {
    const int row = task / r.heads, head = task % r.heads, first = work.batch.first(row);
    const int count = work.step->counts[row], id = work.step->row_ids[row], absorbed = slots.absorbs[row];
    const bool keeps = slots.keeps[row];
    float *const written = states.recurrent(slots.writes[row], r.layer) + head * floats, *after = written;
    const float *before = states.recurrent(slots.reads[row], r.layer);
    if (before)
      before += head * floats;
    else
      before = (const float *)memset(written, 0, sizeof(float) * floats);
    if (keeps && !absorbed && before != written)
      before = (const float *)memcpy(written, before, sizeof(float) * floats);
    for (int i = -absorbed; i < count; i++, before = after) {
      ScanToken token{head, head / (r.heads / r.groups)};
      if (i < 0) {
        token.channels = work.absorbed(row, absorbed + i), token.output = member.scan.data() + floats;
        token.steps = states.input(id, r.layer, absorbed + i) + width, token.strengths = token.steps + r.heads;
      } else {
        const float *projected = work.projected(first + i);
        token.channels = work.convolved(first + i), token.output = work.recurrent_output(first + i) + head * r.head_dim;
        token.steps = projected + r.step_column, token.strengths = projected + r.write_column;
      }
      if (i == 0 && keeps)
        after = member.scan.data();
      use(token, before, after);
    }
    for (int i = 0; keeps && i < count; i++) {
      float *const kept = states.input(id, r.layer, i) + width + head;
      kept[0] = work.projected(first + i)[r.step_column + head];
      if (op.kind == DELTA)
        kept[r.heads] = work.projected(first + i)[r.write_column + head];
    }
  }
}

// Mamba-2. The state h of a head becomes decay * h + step * B x^T and gives h C, where its group has B and C.
static void scan(Workspace &work, const States &states, const TenutoOp &op, Member &member) {
  const TenutoRecurrent &r = *op.recurrent;
  each_token(work, states, op, member, [&](const ScanToken &token, const float *before, float *after) {
    const int head = token.head;
    const float *x = token.channels + head * r.head_dim;
    const float *in = token.channels + r.heads * r.head_dim + token.group * r.state_size,
                *out = in + r.groups * r.state_size;
    float step = softplus(token.steps[head] * r.step_scale + r.step_bias[head]);
    step = std::min(std::max(step, r.min_step), r.max_step);
    const float decay = expf(step * r.rates[head]);
    by_strips(r.head_dim, [&](int lane, auto width) {
      constexpr int WIDTH = decltype(width)::value;
      f32x16 entering[WIDTH], output[WIDTH];
      for (int v = 0; v < WIDTH; v++)
        entering[v] = load<f32x16>(x + lane + v * LANES) * step;
      scan_lanes<WIDTH>(before + lane, after + lane, r.head_dim, r.state_size, decay, in, out, entering, output);
      for (int v = 0; v < WIDTH; v++)
        store(token.output + lane + v * LANES, output[v] + load<f32x16>(x + lane + v * LANES) * r.skip[head]);
    });
  });
}

// Scales a vector of `size` elements to `length`; 1e-6 is added to its squared length before.
INLINE void normalise(const float *from, int size, float length, float *to) {
  float squares = 1e-6f;
  for (int i = 0; i < size; i++)
    squares += from[i] * from[i];
  const float factor = length / sqrtf(squares);
  for (int i = 0; i < size; i++)
    to[i] = from[i] * factor;
}

// The gated delta rule: the state S, [size][lanes], becomes T + k u^T with T = decay * S and u = strength * (v - T^T
// k), and gives S^T q.
static void delta(Workspace &work, const States &states, const TenutoOp &op, Member &member) {
  const TenutoRecurrent &r = *op.recurrent;
  float *const query = member.row.data(), *const key = query + r.state_size;
  each_token(work, states, op, member, [&](const ScanToken &token, const float *before, float *after) {
    const int head = token.head;
    const float *channels = token.channels;
    normalise(channels + token.group * r.state_size, r.state_size, 1.0f / sqrtf((float)r.state_size), query);
    normalise(channels + (r.groups + token.group) * r.state_size, r.state_size, 1.0f, key);
    const float *value = channels + 2 * r.groups * r.state_size + head * r.head_dim;
    const float decay = expf(softplus(token.steps[head] + r.step_bias[head]) * r.rates[head]);
    const float strength = 1.0f / (1.0f + expf(-token.strengths[head]));
    by_strips(r.head_dim, [&](int lane, auto width) {
      constexpr int WIDTH = decltype(width)::value;
      f32x16 recalled[WIDTH] = {}, update[WIDTH], output[WIDTH];
      for (int n = 0; n < r.state_size; n++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++)
          recalled[v] += load<f32x16>(before + (int64_t)n * r.head_dim + lane + v * LANES) * key[n];
      for (int v = 0; v < WIDTH; v++)
        update[v] = (load<f32x16>(value + lane + v * LANES) - recalled[v] * decay) * strength;
      scan_lanes<WIDTH>(before + lane, after + lane, r.head_dim, r.state_size, decay, key, query, update, output);
      for (int v = 0; v < WIDTH; v++)
        store(token.output + lane + v * LANES, output[v]);
    });
  });
}

// Gates and normalises the layer's output, which becomes the next product's input.
static void gate(Workspace &work, const TenutoOp &op, Member &member) {
  const TenutoRecurrent &r = *op.recurrent;
  const int width = r.heads * r.head_dim, part = width / r.norm_groups;
  const Input to = work.b(width, op.consumer);
  float *const row = member.row.data();
  for (int token; (token = work.team.take(member.number, work.tokens())) >= 0;) {
    const float *found = work.recurrent_output(token), *gates = work.projected(token) + r.gate_column;
    for (int begin = 0; begin < width; begin += part) {
      auto gate_at = [&](int d)
                         __attribute__((always_inline)) { return silu16(load<f32x16>(gates + d) * r.gate_scale); };
      for (int d = begin; d < begin + part; d += LANES)
        store(row + d, r.gate_first ? load<f32x16>(found + d) * gate_at(d) : load<f32x16>(found + d));
      const float factor = r.norm ? inverse_rms(row + begin, part, part, r.epsilon) : 1.0f;
      for (int d = begin; d < begin + part; d += LANES) {
        f32x16 normalised = load<f32x16>(row + d) * factor;
        if (r.norm)
          normalised = normalised * load<f32x16>(r.norm + d);
        store(row + d, r.gate_first ? normalised : normalised * gate_at(d));
      }
    }
    if (width % BLOCK)
      store(row + width, f32x16{});
    for (int b = 0; b < to.blocks; b++)
      to.set(token, b, load<f32x16>(row + b * BLOCK), load<f32x16>(row + b * BLOCK + LANES));
  }
}
