// What the operations of a step work with: its arrays, who computes, and the buffers they hand on.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "memory.h"
#include "team.h"

struct Best {
  float value;
  int token;
};

// One thread's own.
struct Member {
  int number;
  Memory products, buffer;
  UnevenBlocks uneven;    // of the operation's input
  std::vector<float> row; // of any buffer
  std::vector<Best> best;
  std::unique_ptr<Sampler> sampler;
};

// Which token is whose.
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

// How wide the buffers are, in floats a token. The widths of P and of what is convolved are multiples of 16.
struct Widths {
  int hidden = 0, input = 0, projected = 0, convolved = 0, found = 0, attended = 0, queries = 0, rotation = 0;
  int per_head = 0;   // of an attention layer
  bool apart = false; // whether there is a y
};

class Work {
public:
  Work(const TenutoModel &model, const std::vector<TenutoOp> &ops, int threads)
      : team(threads), members(threads), model(model), groups(model.groups, model.groups + model.groups_count),
        ropes(model.ropes, model.ropes + model.ropes_count) {
    widths.hidden = round_up(model.hidden, BLOCK);
    for (const TenutoRope &rope : ropes)
      rotations_.push_back(widths.rotation), widths.rotation += 2 * rope.pairs;
    for (const TenutoOp &op : ops)
      widen(op);
    const int panels = std::max(8, widths.per_head / LANES);
    const int row = std::max(widths.hidden, round_up(std::max(widths.found, widths.convolved), BLOCK));
    for (int i = 0; i < threads; i++) {
      Member &member = members[i];
      member.number = i, member.sampler = std::make_unique<Sampler>(model.vocab);
      member.products.resize((int64_t)panels * ROWS_AT_ONCE * LANES * 4);
      member.buffer.resize(buffer_bytes(round_up(widths.input, BLOCK) / BLOCK));
      member.row.resize(row);
    }
    reserve(64);
  }

  void begin(const TenutoStep &step) {
    this->step = &step;
    reserve(std::max(step.tokens_count, step.outputs_count));
    batch.lay_out(step);
    for (Member &member : members)
      member.best.assign(step.outputs_count, {-INFINITY, 0});
  }

  int tokens() const { return step->tokens_count; }
  const TenutoMoves &moves(int group) const { return step->moves[group]; }
  const int32_t *pages(int group, int row) const {
    return step->moves[group].table + step->row_ids[row] * step->moves[group].width;
  }
  // The number of rows decides what they are for products with a matrix of such a kind.
  Form form(int kind) const { return form_for(kind, step->tokens_count); }
  // What all tokens are multiplied with: A and B.
  Input a(const Matrix &w) const { return a_.view(w.inputs, form(w.kind)); }
  Input b(const Matrix &w) const { return b_.view(w.inputs, form(w.kind)); }
  Input a(int columns, int rows, int reader) const { return a_.view(columns, form_for(reader, rows)); }
  Input b(int columns, int reader) const { return b_.view(columns, form(reader)); }

  float *x(int token) const { return at(x_, token, widths.hidden); }
  float *y(int token) const { return at(y_, token, widths.hidden); }
  float *target(const TenutoOp &op, int token) const { return op.apart ? y(token) : x(token); }
  float *projected(int token) const { return at(projected_, token, widths.projected); }
  float *convolved(int token) const { return at(convolved_, token, widths.convolved); }
  float *found(int token) const { return at(found_, token, widths.found); }
  float *attended(int token) const { return at(attended_, token, widths.attended); }
  float *gates(int token) const { return at(gates_, token, widths.attended); }
  // The queries of a token that share a key head. Those of the step's next token follow them.
  Half *query(int token, int key_head, int a_key, int dim) const {
    return queries_.as<Half>() + ((int64_t)key_head * step->tokens_count + token) * a_key * dim;
  }
  // Cosines and then sines of the token's angles.
  float *rotation(int token, int rope) const { return at(rotation_, token, widths.rotation) + rotations_[rope]; }

  // How products take so many rows: in as many runs as keep each thread with rows of its own, unless those are few.
  Runs runs(int rows) const {
    const Runs least(rows), even(rows, round_up(least.count, team.size()));
    return rows < even.count * ROWS_AT_ONCE / 2 ? least : even;
  }
  // Share out `tasks` for each run of the rows: `use(task, first, last)`. All tasks of a run come before those of the
  // next, so that a thread stays with rows that its core's caches hold.
  template <class Use> void share(int tasks, int rows, Member &member, Use use) {
    const Runs runs = this->runs(rows);
    for (int i; (i = team.take(member.number, runs.count * tasks)) >= 0;)
      use(i % tasks, runs.begin(i / tasks), runs.begin(i / tasks + 1));
  }
  // Share out the panels of `w`, `at_once` together, and then those of `also` if there are any; `use(w, panel, count,
  // first, last)` finds the products in `member.products`.
  template <class Use>
  void share(const Matrix &w, const Matrix &also, int at_once, const Input &x, int rows, Member &member, Use use) {
    const int own = tasks(w, at_once);
    member.uneven.find(x, 0, runs(rows));
    share(own + tasks(also, at_once), rows, member, [&](int task, int first, int last) {
      const Matrix &of = task < own ? w : also;
      const int panel = (task < own ? task : task - own) * at_once, count = std::min(at_once, of.panels - panel);
      product(of, panel, count, x, member.uneven, first, last, member.products.as<float>(),
              member.buffer.as<uint8_t>());
      use(of, panel, count, first, last);
    });
  }
  // Multiply rows `from` up to `to`, `from` a multiple of 16, some at once; the member knows their uneven blocks.
  // `use(first, last)` as above.
  template <class Use>
  static void multiply(const Matrix &w, int panel, int count, const Input &x, int from, int to, Member &member,
                       Use use) {
    const Runs runs(to - from);
    for (int run = 0; run < runs.count; run++) {
      const int first = from + runs.begin(run), last = from + runs.begin(run + 1);
      product(w, panel, count, x, member.uneven, first, last, member.products.as<float>(), member.buffer.as<uint8_t>());
      use(first, last);
    }
  }

  Team team;
  std::vector<Member> members;
  const TenutoModel model;
  const std::vector<TenutoGroup> groups;
  const std::vector<TenutoRope> ropes;
  Widths widths;
  Batch batch;
  const TenutoStep *step = nullptr;

private:
  static int tasks(const Matrix &w, int at_once) { return (w.panels + at_once - 1) / at_once; }
  static float *at(const Memory &memory, int token, int width) { return memory.as<float>() + (int64_t)token * width; }

  // Note what an operation needs.
  void widen(const TenutoOp &op) {
    Widths &w = widths;
    for (const Matrix *matrix : {&op.first, &op.second, &op.third})
      w.input = std::max(w.input, matrix->inputs);
    if (op.kind == PROJECT)
      w.projected = std::max(w.projected, (op.first.panels + op.second.panels) * LANES);
    w.apart |= op.apart != 0;
    if (op.kind == GATED)
      w.input = std::max(w.input, op.first.outputs);
    if (const TenutoAttention *a = op.attention) {
      const TenutoGroup &g = groups[a->group];
      w.queries = std::max(w.queries, a->heads * g.head_dim);
      if (g.head_dim % BLOCK || a->gated)
        w.attended = std::max(w.attended, a->heads * g.head_dim);
      w.per_head = std::max(w.per_head, g.head_dim);
    }
    if (const TenutoRecurrent *r = op.recurrent) {
      w.convolved = std::max(w.convolved, groups[r->group].convolved);
      w.found = std::max(w.found, r->heads * r->head_dim);
    }
    if (const TenutoExperts *e = op.experts)
      w.input = std::max(w.input, e->down->inputs);
  }

  // Room for a step of so many tokens.
  void reserve(int tokens) {
    if (tokens <= room_)
      return;
    const int64_t room = std::max(tokens, 2 * room_);
    room_ = 0; // until all of it is there
    x_.resize(room * widths.hidden * 4), y_.resize(widths.apart ? room * widths.hidden * 4 : 0);
    queries_.resize((room + LANES) * widths.queries * sizeof(Half)); // tiles read 16 rows
    attended_.resize(room * widths.attended * 4), gates_.resize(room * widths.attended * 4);
    projected_.resize(room * widths.projected * 4), convolved_.resize(room * widths.convolved * 4);
    found_.resize(room * widths.found * 4);
    rotation_.resize(room * widths.rotation * 4);
    a_.resize((int)room, widths.input), b_.resize((int)room, widths.input);
    for (Member &member : members)
      member.uneven.reserve((int)room, round_up(widths.input, BLOCK) / BLOCK);
    room_ = (int)room;
  }

  std::vector<int> rotations_; // where each rope's angles begin
  int room_ = 0;
  Memory x_, y_, queries_, attended_, gates_, projected_, convolved_, found_, rotation_;
  OwnInput a_, b_;
};
