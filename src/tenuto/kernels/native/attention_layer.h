// Attention layers: queries, keys and values, and the tasks that attention is divided into.
#pragma once

#include "attention.h"
#include "dense.h"

// The queries of one KV head for `queries` tokens of a row, beginning with its token `query`.
struct QueryRange {
  int row, head, query, queries;
};

// A part of the attention of a query range: one chunk of blocks, or with a single part all chunks. Tasks with the parts
// of one range form a group, whose last task merges the results.
struct AttentionTask {
  QueryRange range;
  int from;        // the first chunk that any of the queries attends to
  int part, parts; // part `part` of `parts`
  int group;
  int64_t slot; // of the group's partial results, [parts][query rows]
};

// The pages of one memory group.
class Pages {
public:
  Pages(const TenutoGroup &group, int page_size) : window_(group.window) {
    cache.page_size = page_size, cache.blocks = round_up(page_size, LANES) / LANES;
    cache.layers = group.layers, cache.kv_heads = group.kv_heads, cache.head_dim = group.head_dim;
    cache.type = (KvType)group.kv_type;
  }
  int64_t unit_bytes() const { return cache.page_bytes(); }
  int window() const { return window_; } // tokens that a query attends to, or 0 for all
  // Returns the first token that a query at `position` attends to.
  int first_seen(int position) const { return window_ ? std::max(0, position - window_ + 1) : 0; }

  Cache cache;

private:
  int window_;
};

// Runs the layers of one memory group that have `heads` query heads.
class AttentionLayers {
public:
  AttentionLayers(Workspace &work, const Pages &pages, int group, int heads)
      : work_(work), pages_(pages), group_(group), heads_(heads) {}

  bool serves(const TenutoAttention &a) const { return a.group == group_ && a.heads == heads_; }

  // Divides the attention of a step into tasks.
  void lay_out() {
    const TenutoStep &step = *work_.step;
    ranges_.clear(), tasks_.clear();
    for (int row = 0; row < step.rows; row++)
      for (int end = step.counts[row], query; end > 0; end = query) { // longest first
        query = std::max(0, end - max_tokens());
        for (int head = 0; head < pages_.cache.kv_heads; head++)
          ranges_.push_back({row, head, query, end - query});
      }
    groups_ = 0, slots_ = 0;
    const int heads = pages_.cache.kv_heads;
    const bool many = (int)ranges_.size() >= 8 * work_.team.size();
    if (!many)
      share_long_ranges();
    for (size_t i = 0; i < ranges_.size(); i += heads) {
      if (many && query_rows(ranges_[i]) > LANES)
        std::for_each_n(&ranges_[i], heads, [&](const QueryRange &range) { add_task(range); });
      else if (many || !is_long(ranges_[i]))
        add_by_chunks(ranges_[i]);
    }
    if (slots_ > partial_room_) {
      const int64_t room = slots_ + slots_ / 4;
      partial_room_ = 0; // until it is allocated
      partials_.resize(room * partial_bytes(dim()));
      partial_room_ = room;
    }
    if (groups_ > (int)finished_.size())
      finished_ = std::vector<std::atomic<int>>(2 * groups_);
    for (int i = 0; i < groups_; i++)
      finished_[i].store(0, std::memory_order_relaxed);
    list_pages();
  }

  // Sets what a member's tasks read first as that which it reads after products with `blocks` blocks of weights, two
  // panels at once.
  void foresee(int layer, int64_t blocks, Member &member) const {
    const int32_t *const list = page_list_.data();
    const int first = first_pages_[member.number], last = first_pages_[member.number + 1];
    const int64_t calls = blocks / PANELS_AT_ONCE * ((work_.tokens() + 7) / 8) / work_.team.size(); // by 8 rows
    member.state.upcoming.begin(pages_.cache.block(layer, 0, 0, 0), pages_.cache.page_bytes(),
                                pages_.cache.layer_bytes(), list + first, list + last, calls);
  }

  void project(const TenutoOp &op, Member &member) {
    const TenutoAttention &a = *op.attention;
    const int panels = dim() / LANES, first = a.gated ? 2 * a.heads : a.heads;
    const int values = first + pages_.cache.kv_heads, all = values + pages_.cache.kv_heads;
    const Input from = work_.a(op.first);
    member.state.outliers.find(from, 0, work_.runs(work_.tokens()));
    work_.share(all, work_.tokens(), member, [&](int head, int begin, int end) {
      const Matrix &w = head < first ? op.first : head < values ? op.second : op.third;
      const int which = head < first ? 0 : head < values ? 1 : 2;
      const int own = head < first ? head : head < values ? head - first : head - values;
      float *const products = member.products.as<float>();
      product(w, own * panels, panels, from, member.state, begin, end, products);
      for (int token = begin; token < end; token++) {
        alignas(64) float vector[1024];
        for (int p = 0; p < panels; p++) {
          f32x16 v = load<f32x16>(products + ((int64_t)p * (end - begin) + token - begin) * LANES);
          const int panel = own * panels + p;
          store(vector + p * LANES, work_.adapters.add(v + bias_of(w, panel), op, which, panel, token));
        }
        if (head >= values)
          write_to_cache(a, token, own, vector, true);
        else if (head >= first)
          rotate(a, a.key_norm, token, vector), scale_key(a, own, vector), write_to_cache(a, token, own, vector, false);
        else if (!a.gated)
          store_query(a, token, own, vector);
        else if (own % 2 == 0)
          store_query(a, token, own / 2, vector);
        else
          memcpy(work_.gates(token) + own / 2 * dim(), vector, sizeof(float) * dim());
      }
    });
  }

  void attend(const TenutoOp &op, Member &member) {
    const TenutoAttention &a = *op.attention;
    const Input to = work_.b(a.heads * dim(), op.consumer);
    const int count = (int)tasks_.size();
    const int first = work_.team.begin_of(member.number, count), last = work_.team.begin_of(member.number + 1, count);
    for (int i; (i = work_.team.take(member.number, count)) >= 0;) {
      const AttentionTask &task = tasks_[i];
      attend(task, a, i >= first && i + 1 < last ? &tasks_[i + 1] : nullptr);
      if (finished_[task.group].fetch_add(1, std::memory_order_acq_rel) + 1 < task.parts)
        continue;
      finished_[task.group].store(0, std::memory_order_relaxed);
      for (int r = 0; r < query_rows(task.range); r++) {
        PartialAttention *result = partial(task, 0, r);
        for (int part = 1; part < task.parts; part++)
          add_partial(result, partial(task, part, r), dim());
        const int token = work_.batch.first(task.range.row) + task.range.query + r / queries_per_kv();
        finish(op, to, token, task.range.head * queries_per_kv() + r % queries_per_kv(), result);
      }
    }
    if (!has_parts_of_heads(op))
      return;
    work_.team.barrier();
    const int width = a.heads * dim();
    for (int token; (token = work_.team.take(member.number, work_.tokens())) >= 0;) {
      const float *from = work_.attention_output(token);
      for (int b = 0; b < to.blocks; b++) {
        const int at = b * BLOCK;
        const f32x16 high = at + LANES < width ? columns(from, op.order, at + LANES) : f32x16{};
        to.set(token, b, columns(from, op.order, at), high);
      }
    }
  }

private:
  // Whether blocks of the next product's input have parts of several heads.
  bool has_parts_of_heads(const TenutoOp &op) const { return dim() % BLOCK || op.order; }
  int query_rows(const QueryRange &range) const { return range.queries * queries_per_kv(); }
  bool is_long(const QueryRange &range) const { return query_rows(range) >= LANES * work_.team.size(); }
  int chunk_of(int position) const { return pages_.cache.block_of(position) / CHUNK; }

  // Lists the pages that each member's tasks read first, as many as `Upcoming` has room for.
  void list_pages() {
    const Cache &cache = pages_.cache;
    const int team = work_.team.size(), count = (int)tasks_.size();
    const bool foresees = PANELS_AT_ONCE > 1 && work_.tokens() >= ROWS_FOR_TWO_PANELS;
    const size_t room = foresees ? (size_t)(Upcoming::room(team) / cache.layer_bytes()) : 0;
    page_list_.clear(), first_pages_.assign(1, 0);
    for (int member = 0; member < team; member++) {
      const size_t most = page_list_.size() + room;
      const int end = work_.team.begin_of(member + 1, count);
      int row = -1, listed = 0; // the row of the task before, and the end of its pages in the list
      for (int i = work_.team.begin_of(member, count); i < end && page_list_.size() < most; i++) {
        const Span own = span(tasks_[i], 0);
        listed = tasks_[i].range.row == row ? listed : 0, row = tasks_[i].range.row;
        for (int page = std::max(listed, own.from / cache.blocks);
             page * cache.blocks < own.to && page_list_.size() < most; listed = ++page)
          page_list_.push_back(own.blocks.pages[page]);
      }
      first_pages_.push_back((int)page_list_.size());
    }
  }

  // Adds a task for all chunks.
  void add_task(const QueryRange &range) {
    const int at = work_.step->starts[range.row] + range.query;
    tasks_.push_back({range, chunk_of(pages_.first_seen(at)), 0, 1, groups_++, slots_});
    slots_ += query_rows(range);
  }

  // Adds tasks for long ranges: equal numbers for all members, the rest divided.
  void share_long_ranges() {
    const int team = work_.team.size();
    const auto all = std::count_if(ranges_.begin(), ranges_.end(), [&](const auto &range) { return is_long(range); });
    const int each = (int)all / team;
    for (int member = 0; member < team; member++) {
      int i = 0;
      for (const QueryRange &range : ranges_) {
        const int from = range.queries * member / team, to = range.queries * (member + 1) / team;
        if (is_long(range) && i >= each * team)
          add_task({range.row, range.head, range.query + from, to - from});
        else if (is_long(range) && i / each == member)
          add_task(range);
        i += is_long(range);
      }
    }
  }

  // Adds a task for each chunk of a range and of the same range of the heads that follow it. Those for one chunk are
  // neighbours, as what they read is in a page: memory is faster the longer the runs that are read.
  void add_by_chunks(QueryRange range) {
    const int at = work_.step->starts[range.row] + range.query, heads = pages_.cache.kv_heads;
    const int from = chunk_of(pages_.first_seen(at)), parts = chunk_of(at + range.queries - 1) + 1 - from;
    const int64_t size = (int64_t)query_rows(range) * parts;
    for (int part = 0; part < parts; part++)
      for (range.head = 0; range.head < heads; range.head++)
        tasks_.push_back({range, from, part, parts, groups_ + range.head, slots_ + range.head * size});
    slots_ += heads * size, groups_ += heads;
  }

  int dim() const { return pages_.cache.head_dim; }
  int queries_per_kv() const { return heads_ / pages_.cache.kv_heads; } // query heads that share a KV head
  // Returns the number of a row's tokens that a task has at most.
  int max_tokens() const { return std::max(1, MAX_GROUPS * LANES / queries_per_kv()); }
  // Returns the result of a query row for one part.
  PartialAttention *partial(const AttentionTask &task, int part, int row) const {
    const int64_t slot = task.slot + (int64_t)part * query_rows(task.range) + row;
    return (PartialAttention *)(partials_.as<char>() + slot * partial_bytes(dim()));
  }

  // Normalises a head, and rotates its leading pairs (i, i + pairs) by their angles.
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

  // Multiplies a rotated key by its scales.
  void scale_key(const TenutoAttention &a, int head, float *v) const {
    for (int d = 0; d < dim() && a.key_scales; d += LANES)
      store(v + d, load<f32x16>(v + d) * load<f32x16>(a.key_scales + head * dim() + d));
  }

  // Stores a query of this step, multiplied by the scale of its scores.
  void store_query(const TenutoAttention &a, int token, int head, float *vector) const {
    rotate(a, a.query_norm, token, vector);
    PairElement *to =
        work_.query(token, head / queries_per_kv(), queries_per_kv(), dim()) + head % queries_per_kv() * dim();
    for (int d = 0; d < dim() && a.key_scales; d += LANES)
      store(vector + d, load<f32x16>(vector + d) / load<f32x16>(a.key_scales + head / queries_per_kv() * dim() + d));
    for (int d = 0; d < dim(); d += LANES)
      store_elements(to + d, storable(load<f32x16>(vector + d) * (a.scale * LOG2_E)));
  }

  // Writes a key or a value to its page.
  void write_to_cache(const TenutoAttention &a, int token, int head, float *vector, bool value) const {
    const Cache &cache = pages_.cache;
    for (int d = 0; d < dim(); d += LANES)
      store(vector + d, storable(load<f32x16>(vector + d)));
    const int at = work_.batch.position(token), slot = at % cache.page_size;
    const int page = work_.pages(group_, work_.batch.row_of(token))[at / cache.page_size];
    char *block = cache.block(a.layer, page, head, slot / LANES);
    if (value)
      cache.write_value(block, slot % LANES, vector);
    else
      cache.write_key(block, slot % LANES, vector);
  }

  void attend(const AttentionTask &task, const TenutoAttention &a, const AttentionTask *next) const {
    const int row = task.range.row, token = work_.batch.first(row) + task.range.query;
    const QueryRows rows = {work_.query(token, task.range.head, queries_per_kv(), dim()),
                            (char *)partial(task, task.part, 0),
                            query_rows(task.range),
                            work_.batch.position(token),
                            queries_per_kv(),
                            pages_.window(),
                            dim(),
                            work_.certain(row) * queries_per_kv() >= 2 * LANES};
    const Span own = span(task, a.layer), then = next ? span(*next, a.layer) : own;
    ::attend(own, rows, a.cap * LOG2_E, next ? &then : nullptr);
  }

  // Returns the blocks that the queries of a task attend to.
  Span span(const AttentionTask &task, int layer) const {
    const Cache &cache = pages_.cache;
    const int position = work_.step->starts[task.range.row] + task.range.query;
    int begin = cache.block_of(pages_.first_seen(position));
    if (cache.pairs())
      begin -= begin % 2;
    const int end = cache.block_of(position + task.range.queries - 1) + 1, from = (task.from + task.part) * CHUNK;
    return {{cache, layer, task.range.head, work_.pages(group_, task.range.row), end},
            std::max(from, begin),
            task.parts > 1 ? std::min(from + CHUNK, end) : end};
  }

  // Normalises the result of a head of a token, and stores it in the next product's input.
  void finish(const TenutoOp &op, const Input &to, int token, int head, PartialAttention *result) const {
    const TenutoAttention &a = *op.attention;
    float inverse = result->sum > 0.0f ? 1.0f / result->sum : 0.0f; // 0 if all scores are NaN
    if (a.sinks) {
      const float sink = a.sinks[head] * LOG2_E, highest = std::max(result->max_score, sink);
      const float kept = exp2f(result->max_score - highest);
      inverse = kept / (result->sum * kept + exp2f(sink - highest));
    }
    float *values = weighted_values(result);
    if (a.gated) {
      const float *gate = work_.gates(token) + head * dim();
      for (int d = 0; d < dim(); d += LANES)
        store(values + d, load<f32x16>(values + d) * sigmoid16(load<f32x16>(gate + d)));
    }
    if (!has_parts_of_heads(op)) {
      for (int d = 0; d < dim(); d += BLOCK)
        to.set(token, (head * dim() + d) / BLOCK, load<f32x16>(values + d) * inverse,
               load<f32x16>(values + d + LANES) * inverse);
      return;
    }
    float *whole = work_.attention_output(token) + head * dim();
    for (int d = 0; d < dim(); d += LANES)
      store(whole + d, load<f32x16>(values + d) * inverse);
  }

  Workspace &work_;
  const Pages &pages_;
  const int group_, heads_;
  std::vector<QueryRange> ranges_;
  std::vector<AttentionTask> tasks_;
  int groups_ = 0; // of tasks
  int64_t slots_ = 0;
  std::vector<std::atomic<int>> finished_;
  std::vector<int32_t> page_list_; // of member 0, of member 1, ...
  std::vector<int> first_pages_;   // of each member in the list, and the end
  Memory partials_;
  int64_t partial_room_ = 0;
};
