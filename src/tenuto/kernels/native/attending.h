// Attention layers: queries, keys and values, and who attends to what.
#pragma once

#include "dense.h"

// Tokens of a row, from `query` on, and a key head.
struct Piece {
  int row, head, query, queries;
};

struct AttentionTask {
  Piece piece;
  int from;        // the first chunk that any of its queries sees
  int part, parts; // a part of how many: of one chunk each from there on, or one of all
  int group;       // of tasks that together have all parts: whoever is last joins them
  int64_t slot;    // of the group's partial results, [parts][query rows]
};

// The pages of one memory group.
class Pages {
public:
  Pages(const TenutoGroup &group, int page_size) : window_(group.window) {
    cache.page_size = page_size, cache.blocks = round_up(page_size, LANES) / LANES;
    cache.layers = group.layers, cache.kv_heads = group.kv_heads, cache.head_dim = group.head_dim;
    cache.bytes = group.in_bytes != 0;
  }
  int64_t unit_bytes() const { return cache.page_bytes(); }
  int window() const { return window_; } // tokens that one sees, or 0 for all
  // The first token that one at `position` sees.
  int first_seen(int position) const { return window_ ? std::max(0, position - window_ + 1) : 0; }

  Cache cache;

private:
  int window_;
};

// What the layers do that have one memory group and as many heads.
class Attending {
public:
  Attending(Work &work, const Pages &pages, int group, int heads)
      : work_(work), pages_(pages), group_(group), heads_(heads) {}

  bool serves(const TenutoAttention &a) const { return a.group == group_ && a.heads == heads_; }

  // Who attends to what in this step.
  void lay_out() {
    const TenutoStep &step = *work_.step;
    pieces_.clear(), tasks_.clear();
    for (int row = 0; row < step.rows; row++)
      for (int end = step.counts[row], query; end > 0; end = query) { // what takes longest first
        query = std::max(0, end - most_tokens());
        for (int head = 0; head < pages_.cache.kv_heads; head++)
          pieces_.push_back({row, head, query, end - query});
      }
    groups_ = 0, slots_ = 0;
    const int team = work_.team.size();
    if ((int)pieces_.size() >= 8 * team) {
      for (const Piece &piece : pieces_)
        add_tasks(piece, false);
    } else { // long ones are dealt out to the members, what is left over is divided between them; others by chunks
      auto is_long = [&](const Piece &piece) { return piece.queries * a_key() >= LANES * team; };
      const int each = (int)std::count_if(pieces_.begin(), pieces_.end(), is_long) / team;
      for (int member = 0; member < team; member++) {
        int i = 0;
        for (const Piece &piece : pieces_) {
          const int from = piece.queries * member / team, to = piece.queries * (member + 1) / team;
          if (is_long(piece) && i >= each * team)
            add_tasks({piece.row, piece.head, piece.query + from, to - from}, false);
          else if (is_long(piece) && i / each == member)
            add_tasks(piece, false);
          i += is_long(piece);
        }
      }
      for (const Piece &piece : pieces_)
        if (!is_long(piece))
          add_tasks(piece, true);
    }
    if (slots_ > partial_room_) {
      const int64_t room = slots_ + slots_ / 4;
      partial_room_ = 0; // until it is there
      partials_.resize(room * partial_bytes(dim()));
      partial_room_ = room;
    }
    if (groups_ > (int)joined_.size())
      joined_ = std::vector<std::atomic<int>>(2 * groups_);
    for (int i = 0; i < groups_; i++)
      joined_[i].store(0, std::memory_order_relaxed);
  }

  void project(const TenutoOp &op, Member &member) {
    const TenutoAttention &a = *op.attention;
    const int panels = dim() / LANES, first = a.gated ? 2 * a.heads : a.heads;
    const int values = first + pages_.cache.kv_heads, all = values + pages_.cache.kv_heads;
    const Input from = work_.a(op.first);
    member.uneven.find(from, 0, work_.runs(work_.tokens()));
    work_.share(all, work_.tokens(), member, [&](int head, int begin, int end) {
      const Matrix &w = head < first ? op.first : head < values ? op.second : op.third;
      const int own = head < first ? head : head < values ? head - first : head - values;
      float *const products = member.products.as<float>();
      product(w, own * panels, panels, from, member.uneven, begin, end, products, member.buffer.as<uint8_t>());
      for (int token = begin; token < end; token++) {
        alignas(64) float vector[1024];
        for (int p = 0; p < panels; p++) {
          f32x16 v = load<f32x16>(products + ((int64_t)p * (end - begin) + token - begin) * LANES);
          store(vector + p * LANES, v + bias_of(w, own * panels + p));
        }
        if (head >= values)
          keep(a, token, own, vector, true);
        else if (head >= first)
          rotate(a, a.key_norm, token, vector), scale(a, own, vector), keep(a, token, own, vector, false);
        else if (!a.gated)
          ask(a, token, own, vector);
        else if (own % 2 == 0)
          ask(a, token, own / 2, vector);
        else
          memcpy(work_.gates(token) + own / 2 * dim(), vector, sizeof(float) * dim());
      }
    });
  }

  void attend(const TenutoOp &op, Member &member) {
    const TenutoAttention &a = *op.attention;
    const Input to = work_.b(a.heads * dim(), op.reader);
    const int count = (int)tasks_.size();
    const int first = work_.team.begin_of(member.number, count), last = work_.team.begin_of(member.number + 1, count);
    for (int i; (i = work_.team.take(member.number, count)) >= 0;) {
      const AttentionTask &task = tasks_[i];
      attend(task, a, i >= first && i + 1 < last ? &tasks_[i + 1] : nullptr);
      if (joined_[task.group].fetch_add(1, std::memory_order_acq_rel) + 1 < task.parts)
        continue;
      joined_[task.group].store(0, std::memory_order_relaxed);
      for (int r = 0; r < task.piece.queries * a_key(); r++) {
        Partial *result = partial(task, 0, r);
        for (int part = 1; part < task.parts; part++)
          add_part(result, partial(task, part, r), dim());
        const int token = work_.batch.first(task.piece.row) + task.piece.query + r / a_key();
        deliver(a, to, token, task.piece.head * a_key() + r % a_key(), result);
      }
    }
    if (dim() % BLOCK == 0)
      return;
    work_.team.barrier(); // heads share blocks
    const int width = a.heads * dim();
    for (int token; (token = work_.team.take(member.number, work_.tokens())) >= 0;) {
      const float *from = work_.attended(token);
      for (int b = 0; b < to.blocks; b++) {
        f32x16 high = b * BLOCK + LANES < width ? load<f32x16>(from + b * BLOCK + LANES) : f32x16{};
        to.set(token, b, load<f32x16>(from + b * BLOCK), high);
      }
    }
  }

private:
  void add_tasks(const Piece &piece, bool by_chunks) {
    const int at = work_.step->starts[piece.row] + piece.query;
    const int from = pages_.cache.block_of(pages_.first_seen(at)) / CHUNK;
    const int parts = by_chunks ? pages_.cache.block_of(at + piece.queries - 1) / CHUNK + 1 - from : 1;
    for (int part = 0; part < parts; part++)
      tasks_.push_back({piece, from, part, parts, groups_, slots_});
    slots_ += (int64_t)piece.queries * a_key() * parts, groups_++;
  }

  int dim() const { return pages_.cache.head_dim; }
  int a_key() const { return heads_ / pages_.cache.kv_heads; } // query heads that share a key head
  // How many of a row's tokens one task attends for, at most.
  int most_tokens() const { return std::max(1, MOST_GROUPS * LANES / a_key()); }
  // The result of a query row, of one part.
  Partial *partial(const AttentionTask &task, int part, int row) const {
    const int64_t slot = task.slot + (int64_t)part * task.piece.queries * a_key() + row;
    return (Partial *)(partials_.as<char>() + slot * partial_bytes(dim()));
  }

  // Normalise a head, and turn its leading pairs (i, i + pairs) by their angles.
  void rotate(const TenutoAttention &a, const float *norm, int token, float *v) const {
    if (norm) {
      const float factor = inverse_rms(v, dim(), dim(), a.epsilon);
      for (int d = 0; d < dim(); d += LANES)
        store(v + d, load<f32x16>(v + d) * factor * load<f32x16>(norm + d));
    }
    if (a.rope < 0)
      return;
    const int pairs = work_.ropes[a.rope].pairs;
    const float *angles = work_.rotation(token, a.rope);
    for (int i = 0; i < pairs; i++) {
      const float first = v[i], second = v[pairs + i];
      v[i] = first * angles[i] - second * angles[pairs + i];
      v[pairs + i] = second * angles[i] + first * angles[pairs + i];
    }
  }

  // Multiply a rotated key with its scales.
  void scale(const TenutoAttention &a, int head, float *v) const {
    for (int d = 0; d < dim() && a.key_scales; d += LANES)
      store(v + d, load<f32x16>(v + d) * load<f32x16>(a.key_scales + head * dim() + d));
  }

  // Keep a query of this step.
  void ask(const TenutoAttention &a, int token, int head, float *vector) const {
    rotate(a, a.query_norm, token, vector);
    Half *to = work_.query(token, head / a_key(), a_key(), dim()) + head % a_key() * dim();
    for (int d = 0; d < dim() && a.key_scales; d += LANES)
      store(vector + d, load<f32x16>(vector + d) / load<f32x16>(a.key_scales + head / a_key() * dim() + d));
    for (int d = 0; d < dim(); d += LANES)
      store_halves(to + d, storable(load<f32x16>(vector + d) * (a.scale * LOG2_E)));
  }

  // Write a key or a value to its page.
  void keep(const TenutoAttention &a, int token, int head, float *vector, bool value) const {
    const Cache &cache = pages_.cache;
    for (int d = 0; d < dim(); d += LANES)
      store(vector + d, storable(load<f32x16>(vector + d)));
    const int at = work_.batch.position(token), slot = at % cache.page_size;
    const int page = work_.pages(group_, work_.batch.row_of(token))[at / cache.page_size];
    char *block = cache.block(a.place, page, head, slot / LANES);
    if (value)
      cache.write_value(block, slot % LANES, vector);
    else
      cache.write_key(block, slot % LANES, vector);
  }

  void attend(const AttentionTask &task, const TenutoAttention &a, const AttentionTask *next) const {
    const int row = task.piece.row, token = work_.batch.first(row) + task.piece.query;
    const QueryRows rows = {work_.query(token, task.piece.head, a_key(), dim()),
                            (char *)partial(task, task.part, 0),
                            task.piece.queries * a_key(),
                            work_.batch.position(token),
                            a_key(),
                            pages_.window(),
                            dim(),
                            work_.step->counts[row] * a_key() >= 2 * LANES};
    const Span own = span(task, a), then = next ? span(*next, a) : own;
    ::attend(own, rows, a.cap * LOG2_E, next ? &then : nullptr);
  }

  // What the queries of a task attend to.
  Span span(const AttentionTask &task, const TenutoAttention &a) const {
    const Cache &cache = pages_.cache;
    const int position = work_.step->starts[task.piece.row] + task.piece.query;
    int begin = cache.block_of(pages_.first_seen(position));
    if (cache.pairs())
      begin -= begin % 2;
    const int end = cache.block_of(position + task.piece.queries - 1) + 1, from = (task.from + task.part) * CHUNK;
    return {{cache, a.place, task.piece.head, work_.pages(group_, task.piece.row), end},
            std::max(from, begin),
            task.parts > 1 ? std::min(from + CHUNK, end) : end};
  }

  // What a head of a token has attended to becomes part of the next product's input.
  void deliver(const TenutoAttention &a, const Input &to, int token, int head, Partial *result) const {
    float inverse = result->sum > 0.0f ? 1.0f / result->sum : 0.0f; // 0 if no score is a number
    if (a.sinks) {
      const float sink = a.sinks[head] * LOG2_E, highest = std::max(result->highest, sink);
      const float kept = exp2f(result->highest - highest);
      inverse = kept / (result->sum * kept + exp2f(sink - highest));
    }
    float *values = weighted(result);
    if (a.gated) {
      const float *gate = work_.gates(token) + head * dim();
      for (int d = 0; d < dim(); d += LANES)
        store(values + d, load<f32x16>(values + d) * sigmoid16(load<f32x16>(gate + d)));
    }
    if (dim() % BLOCK == 0) {
      for (int d = 0; d < dim(); d += BLOCK)
        to.set(token, (head * dim() + d) / BLOCK, load<f32x16>(values + d) * inverse,
               load<f32x16>(values + d + LANES) * inverse);
      return;
    }
    float *whole = work_.attended(token) + head * dim();
    for (int d = 0; d < dim(); d += LANES)
      store(whole + d, load<f32x16>(values + d) * inverse);
  }

  Work &work_;
  const Pages &pages_;
  const int group_, heads_;
  std::vector<Piece> pieces_;
  std::vector<AttentionTask> tasks_;
  int groups_ = 0; // of tasks
  int64_t slots_ = 0;
  std::vector<std::atomic<int>> joined_;
  Memory partials_;
  int64_t partial_room_ = 0;
};
