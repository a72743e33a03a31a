// The workspace of a step: its arrays, the threads, and the buffers through which operations pass results.
#pragma once

#include <memory>
#include <numeric>
#include <vector>

#include "adapters.h"
#include "interface.h"
#include "matmul.h"
#include "memory.h"
#include "team.h"

struct Best {
  float value;
  int token;
};

// The state of one thread.
struct Member {
  int number;
  ProductState state;
  Memory products;
  std::vector<float> row;  // as wide as any buffer
  std::vector<float> scan; // a head's state, and then its output
  std::vector<Best> best;
  std::unique_ptr<Sampler> sampler;
};

// The rows of a step's tokens.
class Batch {
public:
  void lay_out(const TenutoStep &step) {
    starts_ = step.starts;
    row_.resize(step.tokens_count), firsts_.resize(step.rows);
    for (int row = 0, token = 0; row < step.rows; row++) {
      firsts_[row] = token;
      for (int i = 0; i < step.counts[row]; i++)
        row_[token++] = row;
    }
  }
  int row_of(int token) const { return row_[token]; }
  int first(int row) const { return firsts_[row]; } // of its tokens
  int position(int token) const { return starts_[row_[token]] + token - firsts_[row_[token]]; }

private:
  const int32_t *starts_ = nullptr;
  std::vector<int> row_, firsts_;
};

// The widths of the buffers, in floats per token. Those of P and of convolutions are multiples of 16.
struct Widths {
  int hidden = 0, input = 0, projected = 0, conv_channels = 0, recurrent_output = 0, attention_output = 0, queries = 0,
      rotation = 0;
  int head_dim = 0;   // of an attention layer
  int head_state = 0; // of a recurrent layer, and its output
  bool apart = false; // whether an operation uses y
  bool kept = false;  // whether an operation uses H
};

class Workspace {
public:
  Workspace(const TenutoModel &model, const std::vector<TenutoOp> &ops, int threads)
      : team(threads), members(threads), adapters(ops), model(model),
        groups(model.groups, model.groups + model.groups_count), ropes(model.ropes, model.ropes + model.ropes_count) {
    widths.hidden = round_up(model.hidden, BLOCK);
    for (const TenutoRope &rope : ropes)
      rotations_.push_back(widths.rotation), widths.rotation += 2 * rope.pairs;
    for (const TenutoOp &op : ops)
      widen(op);
    const int panels = std::max(8, widths.head_dim / LANES);
    const int joined = widths.kept ? round_up(2 * model.hidden, BLOCK) : widths.hidden;
    const int row = std::max(joined, round_up(std::max(widths.recurrent_output, widths.conv_channels), BLOCK));
    for (int i = 0; i < threads; i++) {
      Member &member = members[i];
      member.number = i, member.sampler = std::make_unique<Sampler>(model.vocab);
      member.products.resize((int64_t)panels * ROWS_AT_ONCE * LANES * 4);
      member.state.buffer.resize(buffer_bytes(round_up(widths.input, BLOCK) / BLOCK));
      member.row.resize(row), member.scan.resize(widths.head_state);
    }
    reserve(64);
  }

  // Reserves room for inputs that steps absorb: for each of `rows` rows, at most `most` tokens.
  void reserve_absorbed(int rows, int most) {
    most_absorbed_ = most;
    absorbed_.resize((int64_t)rows * most * widths.conv_channels * 4);
  }

  void begin(const TenutoStep &step) {
    this->step = &step;
    tokens_ = step.tokens_count, narrowed_ = false;
    guesses_ = step.guesses ? std::accumulate(step.guesses, step.guesses + step.rows, 0) : 0;
    reserve(std::max(step.tokens_count, step.outputs_count));
    batch.lay_out(step);
    adapters.begin(step);
    for (Member &member : members)
      member.best.assign(step.outputs_count, {-INFINITY, 0});
  }

  // Leaves x to the tokens whose logits are wanted, if nothing else is.
  void narrow() {
    const int32_t *wanted = step->outputs;
    const int count = step->outputs_count;
    if (step->sums_count || std::adjacent_find(wanted, wanted + count, std::greater_equal<>()) != wanted + count)
      return;
    for (int i = 0; i < count; i++)
      if (wanted[i] > i) // so in ascending order none is overwritten too early
        memcpy(x(i), x(wanted[i]), widths.hidden * sizeof(float));
    adapters.narrow(wanted, count);
    tokens_ = count, narrowed_ = true;
  }

  // Returns the number of tokens that operations compute.
  int tokens() const { return tokens_; }
  // Returns the indices among them of those whose logits are wanted, or null if it is all of them, in order.
  const int32_t *wanted() const { return narrowed_ ? nullptr : step->outputs; }
  const TenutoGroupStep &group_step(int group) const { return step->groups[group]; }
  const int32_t *pages(int group, int row) const {
    return step->groups[group].table + step->row_ids[row] * step->groups[group].width;
  }
  // Returns the number of a row's tokens without guesses.
  int certain(int row) const { return step->counts[row] - (step->guesses ? step->guesses[row] : 0); }
  // Returns the number format of the input rows of all tokens for products with a matrix of `format`. It is that of all
  // the step's tokens, even if they have been narrowed.
  InputType type(PanelFormat format) const { return type(format, step->tokens_count); }
  // The inputs of products, A and B.
  Input a(const Matrix &w) const { return a_.view(w.inputs, type(w.format)); }
  Input b(const Matrix &w) const { return b_.view(w.inputs, type(w.format)); }
  Input a(int columns, PanelFormat consumer) const { return a_.view(columns, type(consumer)); }
  Input a(int columns, int rows, PanelFormat consumer) const { return a_.view(columns, type(consumer, rows)); }
  Input b(int columns, PanelFormat consumer) const { return b_.view(columns, type(consumer)); }

  float *x(int token) const { return at(x_, token, widths.hidden); }
  float *y(int token) const { return at(y_, token, widths.hidden); }
  float *h(int token) const { return at(h_, token, widths.hidden); }
  float *target(const TenutoOp &op, int token) const { return op.apart ? y(token) : x(token); }
  float *projected(int token) const { return at(projected_, token, widths.projected); }
  float *convolved(int token) const { return at(convolved_, token, widths.conv_channels); }
  // Returns the results of the convolution for token number `token` of those that a row absorbs.
  float *absorbed(int row, int token) const {
    return at(absorbed_, row * most_absorbed_ + token, widths.conv_channels);
  }
  float *recurrent_output(int token) const { return at(recurrent_output_, token, widths.recurrent_output); }
  float *attention_output(int token) const { return at(attention_output_, token, widths.attention_output); }
  float *gates(int token) const { return at(gates_, token, widths.attention_output); }
  // Returns the queries of a token for one KV head; those of the step's next token follow.
  PairElement *query(int token, int kv_head, int queries_per_kv, int dim) const {
    return queries_.as<PairElement>() + ((int64_t)kv_head * step->tokens_count + token) * queries_per_kv * dim;
  }
  // Returns the cosines, and then the sines, of a token's angles.
  float *rotation(int token, int rope) const { return at(rotation_, token, widths.rotation) + rotations_[rope]; }

  // Divides `rows` rows into the runs in which products take them: a multiple of the number of threads, so that each
  // keeps its own rows, unless the runs would be short.
  Runs runs(int rows) const {
    const Runs least(rows), even(rows, round_up(least.count, team.size()));
    return rows < even.count * ROWS_AT_ONCE / 2 ? least : even;
  }
  // Distributes `tasks` tasks for each run of the rows: `use(task, first, last)`. All tasks of a run come before those
  // of the next, so that a thread keeps using rows that are in its core's caches.
  template <class Use> void share(int tasks, int rows, Member &member, Use use) {
    const Runs runs = this->runs(rows);
    for (int i; (i = team.take(member.number, runs.count * tasks)) >= 0;)
      use(i % tasks, runs.begin(i / tasks), runs.begin(i / tasks + 1));
  }
  // Distributes the panels of `w`, and then those of `also`, `at_once` panels a task. `use(w, panel, count, first,
  // last)` is called with the products in `member.products`.
  template <class Use>
  void share(const Matrix &w, const Matrix &also, int at_once, const Input &x, int rows, Member &member, Use use) {
    const int own = tasks(w, at_once);
    member.state.outliers.find(x, 0, runs(rows));
    share(own + tasks(also, at_once), rows, member, [&](int task, int first, int last) {
      const Matrix &of = task < own ? w : also;
      const int panel = (task < own ? task : task - own) * at_once, count = std::min(at_once, of.panels - panel);
      product(of, panel, count, x, member.state, first, last, member.products.as<float>());
      use(of, panel, count, first, last);
    });
  }
  // Multiplies rows `from` to `to`, `from` a multiple of 16, in runs. `member.state` has their outlier blocks.
  // `use(first, last)` as above.
  template <class Use>
  static void multiply(const Matrix &w, int panel, int count, const Input &x, int from, int to, Member &member,
                       Use use) {
    const Runs runs(to - from);
    for (int run = 0; run < runs.count; run++) {
      const int first = from + runs.begin(run), last = from + runs.begin(run + 1);
      product(w, panel, count, x, member.state, first, last, member.products.as<float>());
      use(first, last);
    }
  }

  Team team;
  std::vector<Member> members;
  Adapters adapters;
  const TenutoModel model;
  const std::vector<TenutoGroup> groups;
  const std::vector<TenutoRope> ropes;
  Widths widths;
  Batch batch;
  const TenutoStep *step = nullptr;

private:
  // Likewise for `rows` rows, which those of guesses are among.
  InputType type(PanelFormat format, int rows) const { return input_type(format, rows - guesses_); }
  static int tasks(const Matrix &w, int at_once) { return (w.panels + at_once - 1) / at_once; }
  static float *at(const Memory &memory, int token, int width) { return memory.as<float>() + (int64_t)token * width; }

  // Increases the widths to those that an operation needs.
  void widen(const TenutoOp &op) {
    Widths &w = widths;
    for (const Matrix *matrix : {&op.first, &op.second, &op.third})
      w.input = std::max(w.input, matrix->inputs);
    if (op.kind == PROJECT)
      w.projected = std::max(w.projected, (op.first.panels + op.second.panels) * LANES);
    w.apart |= op.apart != 0, w.kept |= op.kind == KEEP;
    if (op.kind == GATED)
      w.input = std::max(w.input, op.first.outputs);
    if (const TenutoAttention *a = op.attention) {
      const TenutoGroup &g = groups[a->group];
      w.queries = std::max(w.queries, a->heads * g.head_dim);
      if (g.head_dim % BLOCK || a->gated || op.order)
        w.attention_output = std::max(w.attention_output, a->heads * g.head_dim);
      w.head_dim = std::max(w.head_dim, g.head_dim);
    }
    if (const TenutoRecurrent *r = op.recurrent) {
      w.conv_channels = std::max(w.conv_channels, groups[r->group].conv_channels);
      w.recurrent_output = std::max(w.recurrent_output, r->heads * r->head_dim);
      w.head_state = std::max(w.head_state, (r->state_size + 1) * r->head_dim);
    }
    if (const TenutoExperts *e = op.experts)
      w.input = std::max(w.input, e->down->inputs);
  }

  // Reserves room for a step of `tokens` tokens.
  void reserve(int tokens) {
    if (tokens <= room_)
      return;
    const int64_t room = std::max(tokens, 2 * room_);
    room_ = 0; // until all of it is allocated
    x_.resize(room * widths.hidden * 4), y_.resize(widths.apart ? room * widths.hidden * 4 : 0);
    h_.resize(widths.kept ? room * widths.hidden * 4 : 0);
    queries_.resize((room + LANES) * widths.queries * sizeof(PairElement)); // tiles load 16 rows
    attention_output_.resize(room * widths.attention_output * 4), gates_.resize(room * widths.attention_output * 4);
    projected_.resize(room * widths.projected * 4), convolved_.resize(room * widths.conv_channels * 4);
    recurrent_output_.resize(room * widths.recurrent_output * 4);
    rotation_.resize(room * widths.rotation * 4);
    a_.resize((int)room, widths.input), b_.resize((int)room, widths.input);
    for (Member &member : members)
      member.state.outliers.reserve((int)room, round_up(widths.input, BLOCK) / BLOCK);
    room_ = (int)room;
  }

  std::vector<int> rotations_; // the index of each rope's first angle
  int room_ = 0, most_absorbed_ = 0, guesses_ = 0, tokens_ = 0;
  bool narrowed_ = false;
  Memory x_, y_, h_, queries_, attention_output_, gates_, projected_, convolved_, absorbed_, recurrent_output_,
      rotation_;
  OwnInput a_, b_;
};
