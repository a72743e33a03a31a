// Attention layers: queries, keys and values, and who attends to what.
#pragma once

#include "dense.h"

struct AttentionTask {
  int row, head, query, queries; // the row's tokens from `query` on
  int first;                     // part of the sequence, each `PART` blocks, that any of them sees
  int from, to, parts;           // parts counted from there, of how many
  int group;                     // of tasks that together have all parts: whoever is last joins them
  int64_t slot;                  // of the group's partial results: [parts][query rows], or of one task for all parts
                                 // [2][query rows], the first the sum so far
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
  int block_of(int position) const {
    return position / cache.page_size * cache.blocks + position % cache.page_size / LANES;
  }
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
    const Cache &cache = pages_.cache;
    tasks_.clear();
    int groups = 0;
    int64_t slots = 0, undivided = 0;
    for (int row = 0; row < step.rows; row++)
      undivided += (int64_t)cache.kv_heads * round_up(step.counts[row], tokens_at_once(row)) / tokens_at_once(row);
    const bool few = undivided < 8 * work_.team.size();
    for (int row = 0; row < step.rows; row++) {
      const int per_task = tokens_at_once(row);
      for (int head = 0; head < cache.kv_heads; head++)
        for (int query = 0; query < step.counts[row]; query += per_task) {
          const int queries = std::min(per_task, step.counts[row] - query), at = step.starts[row] + query;
          const int first = pages_.block_of(pages_.first_seen(at)) / PART;
          const int parts = pages_.block_of(at + queries - 1) / PART + 1 - first, at_once = few ? 1 : parts;
          for (int part = 0; part < parts; part += at_once)
            tasks_.push_back({row, head, query, queries, first, part, part + at_once, parts, groups, slots});
          slots += (int64_t)queries * a_key() * (few ? parts : 2), groups++;
        }
    }
    if (slots > partial_room_) {
      const int64_t room = slots + slots / 4;
      partial_room_ = 0; // until it is there
      partials_.resize(room * partial_bytes(cache.head_dim));
      partial_room_ = room;
    }
    if (groups > (int)joined_.size())
      joined_ = std::vector<std::atomic<int>>(2 * groups);
    for (int i = 0; i < groups; i++)
      joined_[i].store(0, std::memory_order_relaxed);
  }

  void project(const TenutoOp &op, Member &member) {
    const TenutoAttention &a = *op.attention;
    const int panels = dim() / LANES, first = a.gated ? 2 * a.heads : a.heads;
    const int values = first + pages_.cache.kv_heads, all = values + pages_.cache.kv_heads;
    const Input from = work_.a(op.first);
    member.uneven.find(from, 0, work_.tokens());
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
          rotate(a, a.key_norm, token, vector), keep(a, token, own, vector, false);
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
    std::vector<QueryRow> &rows = member.queries;
    for (int i; (i = work_.team.take(member.number, (int)tasks_.size())) >= 0;) {
      const AttentionTask &task = tasks_[i];
      rows.clear();
      for (int q = task.query; q < task.query + task.queries; q++)
        for (int g = 0; g < a_key(); g++) {
          const int at = work_.step->starts[task.row] + q, token = work_.batch.first(task.row) + q;
          const Half *query = work_.queries(token) + (task.head * a_key() + g) * dim();
          rows.push_back({query, pages_.first_seen(at), at + 1, nullptr});
        }
      attend(task, a, rows);
      const int own = task.to - task.from;
      if (joined_[task.group].fetch_add(own, std::memory_order_acq_rel) + own < task.parts)
        continue;
      joined_[task.group].store(0, std::memory_order_relaxed);
      const int count = (int)rows.size();
      for (int r = 0; r < count; r++) {
        Partial *result = partial(task.slot + r);
        for (int part = 1; part < task.parts && own < task.parts; part++)
          add_part(result, partial(task.slot + (int64_t)part * count + r), dim());
        const int token = work_.batch.first(task.row) + task.query + r / a_key();
        deliver(a, to, token, task.head * a_key() + r % a_key(), result);
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
  int dim() const { return pages_.cache.head_dim; }
  int a_key() const { return heads_ / pages_.cache.kv_heads; } // query heads that share a key head
  // How many of a row's tokens one task attends for.
  int tokens_at_once(int row) const { return work_.step->counts[row] < 4 ? 1 : LANES; }
  Partial *partial(int64_t slot) const {
    return (Partial *)(partials_.as<char>() + slot * partial_bytes(pages_.cache.head_dim));
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

  // Keep a query of this step.
  void ask(const TenutoAttention &a, int token, int head, float *vector) const {
    rotate(a, a.query_norm, token, vector);
    Half *to = work_.queries(token) + head * dim();
    for (int d = 0; d < dim(); d += LANES)
      store_halves(to + d, storable(load<f32x16>(vector + d)));
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

  void attend(const AttentionTask &task, const TenutoAttention &a, std::vector<QueryRow> &rows) const {
    const int count = (int)rows.size(), own = task.to - task.from;
    const int begin = pages_.block_of(rows.front().first), end = pages_.block_of(rows.back().end - 1) + 1;
    const Blocks blocks = {pages_.cache, a.place, task.head, work_.pages(group_, task.row), end};
    for (int part = task.from; part < task.to; part++) {
      const int64_t place = own < task.parts ? part : std::min(part, 1);
      for (int r = 0; r < count; r++)
        rows[r].result = partial(task.slot + place * count + r);
      const int from = (task.first + part) * PART;
      attend_rows(blocks, rows.data(), count, std::max(from, begin), std::min(from + PART, end), {a.scale, a.cap});
      if (own == task.parts && part > 0)
        for (int r = 0; r < count; r++)
          add_part(partial(task.slot + r), rows[r].result, dim());
    }
  }

  // What a head of a token has attended to becomes part of the next product's input.
  void deliver(const TenutoAttention &a, const Input &to, int token, int head, Partial *result) const {
    float inverse = 1.0f / result->sum;
    if (a.sinks) {
      const float highest = std::max(result->highest, a.sinks[head]), kept = expf(result->highest - highest);
      inverse = kept / (result->sum * kept + expf(a.sinks[head] - highest));
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
  std::vector<AttentionTask> tasks_;
  std::vector<std::atomic<int>> joined_;
  Memory partials_;
  int64_t partial_room_ = 0;
};
