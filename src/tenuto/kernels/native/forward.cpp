// The forward pass of a step: a list of operations, made once from the model's description, carried out over the arrays
// of a plan by a team of threads. The interface is plain C over raw pointers; `library.py` describes it once more.
#include <memory>
#include <vector>

#include "attention.h"
#include "memory.h"
#include "sampling.h"
#include "team.h"

#if TENUTO_AMX
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif

namespace {

enum OpKind : int32_t { EMBED = 0, NORM = 1, QKV = 2, ATTEND = 3, ADD = 4, GATED = 5, SELECT = 6, LOGITS = 7 };

} // namespace

extern "C" {

// One operation. x is the residual stream, float [tokens][hidden]; there are two inputs of products, A and B.
//   EMBED: x = rows of `first`.                     NORM: A = x / rms(x) * norm.
//   QKV: queries, keys, values = A times first, second, third; rotated; keys and values go to the cache.
//   ATTEND: B = attention of the queries.           ADD: x += B times first.
//   GATED: B = silu(A times first) * (A times second).
//   SELECT: as NORM, only for tokens whose logits are wanted.    LOGITS: A times first.
// `reader` is the kind of the matrices that the A or B that an operation makes is multiplied with.
struct TenutoOp {
  int32_t kind, layer, reader;
  float epsilon;
  const float *norm;
  Matrix first, second, third;
};

// `frequencies`: radians a token of each rotary pair, float [head_dim / 2].
struct TenutoModel {
  int32_t hidden, widest, heads, kv_heads, head_dim, layers, vocab, page_size;
  const float *frequencies;
};

// A plan's arrays, all int32: `row_ids`, `starts`, `counts` [rows]; `tokens` [sum(counts)]; `table`, page tables by row
// id, `table_width` entries apart; `outputs` [outputs], after which tokens logits are wanted. Results: `logits` float
// [outputs][vocab], and `best` int32 [outputs], the first of the likeliest tokens. How long operations took is added to
// `op_seconds`, by kind.
struct TenutoStep {
  int32_t rows, tokens_count, outputs_count;
  const int32_t *row_ids, *starts, *counts, *tokens, *table;
  int64_t table_width;
  const int32_t *outputs;
  float *logits;
  int32_t *best;
  double *op_seconds;
};

// `rows` tokens to choose: `logits` float [rows][vocab], `options` [rows], `tokens` int32 [rows].
struct TenutoDraws {
  int32_t rows;
  const float *logits;
  const SamplingOptions *options;
  int32_t *tokens;
};
}

namespace {

struct AttentionTask {
  int row, head, query, queries; // the row's tokens from `query` on
  int from, to, parts;           // parts of the sequence, each `PART` blocks, of how many
  int group;                     // of tasks that together have all parts: whoever is last joins them
  int64_t slot;                  // of the group's partial results: [parts][query rows], or of one task for all parts
                                 // [2][query rows], the first the sum so far
};

struct Best {
  float value;
  int token;
};

class Forward {
public:
  Forward(const TenutoModel &model, const TenutoOp *ops, int count, int threads)
      : model_(model), ops_(ops, ops + count), team_(threads), members_(threads) {
    frequencies_.assign(model.frequencies, model.frequencies + model.head_dim / 2);
    model_.frequencies = frequencies_.data();
    hidden_ = round_up(model.hidden, BLOCK);
    cache_.page_size = model.page_size, cache_.blocks = round_up(model.page_size, LANES) / LANES;
    cache_.layers = model.layers, cache_.kv_heads = model.kv_heads, cache_.head_dim = model.head_dim;
    int panels = std::max(8, model.head_dim / LANES);
    for (int i = 0; i < threads; i++) {
      Member &member = members_[i];
      member.number = i, member.sampler = std::make_unique<Sampler>(model.vocab);
      member.products.resize((int64_t)panels * ROWS_AT_ONCE * LANES * 4);
      member.buffer.resize(buffer_bytes(round_up(model.widest, BLOCK) / BLOCK));
      member.rows.reserve(LANES * (model.heads / model.kv_heads));
    }
    reserve(64);
  }

  void prepare(int64_t pages) {
    kv_.resize(pages * cache_.page_values() * 2);
    cache_.data = kv_.as<uint16_t>();
  }

  void copy(int count, const int32_t *sources, const int32_t *targets) {
    for (int i = 0; i < count; i++)
      memcpy(cache_.block(0, targets[i], 0, 0), cache_.block(0, sources[i], 0, 0), cache_.page_values() * 2);
  }

  void step(const TenutoStep &step) {
    step_ = &step;
    reserve(std::max(step.tokens_count, step.outputs_count));
    lay_out();
    team_.run([this](int member) {
      double began = Team::seconds();
      for (const auto &op : ops_) {
        carry_out(op, member);
        team_.barrier();
        if (member == 0) {
          const double ended = Team::seconds();
          step_->op_seconds[op.kind] += ended - began;
          began = ended;
        }
      }
#if TENUTO_AMX
      tiles::release();
#endif
    });
    for (int i = 0; i < step.outputs_count; i++) {
      Best best = members_[0].best[i];
      for (auto &member : members_) {
        const Best &other = member.best[i];
        if (other.value > best.value || (other.value == best.value && other.token < best.token))
          best = other;
      }
      step.best[i] = best.token;
    }
  }

  void sample(const TenutoDraws &draws) {
    team_.run([&](int member) {
      for (int row; (row = team_.take(member, draws.rows)) >= 0;)
        draws.tokens[row] =
            members_[member].sampler->choose(draws.logits + (int64_t)row * model_.vocab, draws.options[row]);
    });
  }

private:
  struct Member {
    int number;
    Memory products, buffer;
    std::vector<Best> best;
    std::unique_ptr<Sampler> sampler;
    std::vector<QueryRow> rows; // of a task; with room for all that one can have
  };

  // Room for a step of so many tokens.
  void reserve(int tokens) {
    if (tokens <= room_)
      return;
    const int64_t room = std::max(tokens, 2 * room_);
    room_ = 0; // until all of it is there
    x_.resize(room * hidden_ * 4);
    queries_.resize(room * model_.heads * model_.head_dim * sizeof(Half));
    attended_.resize(room * model_.heads * model_.head_dim * 4);
    rotation_.resize(room * model_.head_dim * 4);
    a_.resize((int)room, model_.widest), b_.resize((int)room, model_.widest);
    room_ = (int)room;
  }

  // Which token is whose, and who attends to what.
  void lay_out() {
    const TenutoStep &step = *step_;
    token_row_.resize(step.tokens_count);
    firsts_.resize(step.rows);
    tasks_.clear();
    int group_size = model_.heads / model_.kv_heads, groups = 0;
    int64_t slots = 0;
    int64_t undivided = 0;
    for (int row = 0; row < step.rows; row++)
      undivided += (int64_t)model_.kv_heads * round_up(step.counts[row], tokens_at_once(row)) / tokens_at_once(row);
    const bool few = undivided < 8 * team_.size();
    for (int row = 0, token = 0; row < step.rows; row++) {
      firsts_[row] = token;
      for (int i = 0; i < step.counts[row]; i++)
        token_row_[token++] = row;
      const int per_task = tokens_at_once(row);
      for (int head = 0; head < model_.kv_heads; head++)
        for (int query = 0; query < step.counts[row]; query += per_task) {
          int queries = std::min(per_task, step.counts[row] - query);
          int parts = block_of(step.starts[row] + query + queries - 1) / PART + 1, at_once = few ? 1 : parts;
          for (int part = 0; part < parts; part += at_once)
            tasks_.push_back({row, head, query, queries, part, part + at_once, parts, groups, slots});
          slots += (int64_t)queries * group_size * (few ? parts : 2), groups++;
        }
    }
    if (slots > partial_room_) {
      const int64_t room = slots + slots / 4;
      partial_room_ = 0; // until it is there
      partials_.resize(room * partial_bytes(model_.head_dim));
      partial_room_ = room;
    }
    if (groups > (int)joined_.size())
      joined_ = std::vector<std::atomic<int>>(2 * groups);
    for (int i = 0; i < groups; i++)
      joined_[i].store(0, std::memory_order_relaxed);
    for (auto &member : members_)
      member.best.assign(step.outputs_count, {-INFINITY, 0});
  }

  // How many of a row's tokens one task attends for.
  int tokens_at_once(int row) const { return step_->counts[row] < 4 ? 1 : LANES; }

  Partial *partial(int64_t slot) const {
    return (Partial *)(partials_.as<char>() + slot * partial_bytes(model_.head_dim));
  }
  int block_of(int position) const {
    return position / cache_.page_size * cache_.blocks + position % cache_.page_size / LANES;
  }
  const int32_t *pages_of(int row) const { return step_->table + step_->row_ids[row] * step_->table_width; }
  float *x(int token) const { return x_.as<float>() + (int64_t)token * hidden_; }
  float *rotation(int token) const { return rotation_.as<float>() + (int64_t)token * model_.head_dim; }
  int attention_width() const { return model_.heads * model_.head_dim; }
  int position(int token) const {
    int row = token_row_[token];
    return step_->starts[row] + token - firsts_[row];
  }

  // What all tokens are for products with a matrix of such a kind.
  Form form(int kind) const { return form_for(kind, step_->tokens_count); }

  void carry_out(const TenutoOp &op, int member) {
    switch (op.kind) {
    case EMBED:
      embed(op, members_[member]);
      break;
    case NORM:
      norm(op, members_[member], step_->tokens_count, nullptr);
      break;
    case QKV:
      project(op, members_[member]);
      break;
    case ATTEND:
      attend_all(op, members_[member]);
      break;
    case ADD:
      add(op, members_[member]);
      break;
    case GATED:
      gated(op, members_[member]);
      break;
    case SELECT:
      norm(op, members_[member], step_->outputs_count, step_->outputs);
      break;
    case LOGITS:
      logits(op, members_[member]);
      break;
    }
  }

  void embed(const TenutoOp &op, const Member &member) {
    for (int token; (token = team_.take(member.number, step_->tokens_count)) >= 0;) {
      float *to = x(token);
      weight_row(op.first, step_->tokens[token], to);
      int half = model_.head_dim / 2;
      for (int i = 0; i < half; i++) {
        float angle = (float)position(token) * model_.frequencies[i];
        rotation(token)[i] = cosf(angle), rotation(token)[half + i] = sinf(angle);
      }
    }
  }

  void norm(const TenutoOp &op, const Member &member, int count, const int32_t *which) {
    Input to = a_.view(model_.hidden, form_for(op.reader, count));
    for (int i; (i = team_.take(member.number, count)) >= 0;) {
      const float *from = x(which ? which[i] : i);
      f32x16 squares = {};
      for (int k = 0; k < hidden_; k += LANES) {
        f32x16 v = load<f32x16>(from + k);
        squares += v * v;
      }
      float factor = 1.0f / sqrtf(sum16(squares) / model_.hidden + op.epsilon);
      for (int b = 0; b < to.blocks; b++) {
        f32x16 low = load<f32x16>(from + b * BLOCK) * factor * load<f32x16>(op.norm + b * BLOCK);
        f32x16 high = load<f32x16>(from + b * BLOCK + LANES) * factor * load<f32x16>(op.norm + b * BLOCK + LANES);
        to.set(i, b, low, high);
      }
    }
  }

  // Share out the panels of `w`, `at_once` together; `use(panel, count, first, last)` finds the products in
  // `member.products`.
  template <class Use> void share(const Matrix &w, int at_once, const Input &x, int rows, Member &member, Use use) {
    const int tasks = (w.panels + at_once - 1) / at_once;
    for (int task; (task = team_.take(member.number, tasks)) >= 0;) {
      int panel = task * at_once, count = std::min(at_once, w.panels - panel);
      for (int first = 0; first < rows; first += ROWS_AT_ONCE) {
        int last = std::min(rows, first + ROWS_AT_ONCE);
        product(w, panel, count, x, first, last, member.products.as<float>(), member.buffer.as<uint8_t>());
        use(panel, count, first, last);
      }
    }
  }

  void add(const TenutoOp &op, Member &member) {
    Input from = b_.view(op.first.inputs, form(op.first.kind));
    share(op.first, 2, from, step_->tokens_count, member, [&](int panel, int count, int first, int last) {
      const float *values = member.products.as<float>();
      for (int p = panel; p < panel + count; p++) {
        f32x16 bias = op.first.bias ? load<f32x16>(op.first.bias + p * LANES) : f32x16{};
        for (int row = first; row < last; row++, values += LANES) {
          float *to = x(row) + p * LANES;
          store(to, load<f32x16>(to) + load<f32x16>(values) + bias);
        }
      }
    });
  }

  void gated(const TenutoOp &op, Member &member) {
    Input from = a_.view(model_.hidden, form(op.first.kind)), to = b_.view(op.first.outputs, form(op.reader));
    for (int block; (block = team_.take(member.number, to.blocks)) >= 0;) {
      int panels = std::min(2, op.first.panels - 2 * block);
      for (int first = 0; first < step_->tokens_count; first += ROWS_AT_ONCE) {
        int last = std::min(step_->tokens_count, first + ROWS_AT_ONCE);
        int64_t step = (int64_t)(last - first) * LANES;
        float *gate = member.products.as<float>(), *up = gate + panels * step;
        product(op.first, 2 * block, panels, from, first, last, gate, member.buffer.as<uint8_t>());
        product(op.second, 2 * block, panels, from, first, last, up, member.buffer.as<uint8_t>());
        for (int row = first; row < last; row++) {
          f32x16 out[2] = {};
          for (int p = 0; p < panels; p++) {
            int64_t at = p * step + (int64_t)(row - first) * LANES;
            out[p] = silu16(load<f32x16>(gate + at)) * load<f32x16>(up + at);
          }
          to.set(row, block, out[0], out[1]);
        }
      }
    }
  }

  void project(const TenutoOp &op, Member &member) {
    int dim = model_.head_dim, panels = dim / LANES, keys = model_.heads, values = keys + model_.kv_heads;
    Input from = a_.view(model_.hidden, form(op.first.kind));
    for (int head; (head = team_.take(member.number, values + model_.kv_heads)) >= 0;) {
      const Matrix &w = head < keys ? op.first : head < values ? op.second : op.third;
      int own = head < keys ? head : head < values ? head - keys : head - values;
      for (int first = 0; first < step_->tokens_count; first += ROWS_AT_ONCE) {
        int last = std::min(step_->tokens_count, first + ROWS_AT_ONCE);
        float *products = member.products.as<float>();
        product(w, own * panels, panels, from, first, last, products, member.buffer.as<uint8_t>());
        for (int token = first; token < last; token++) {
          alignas(64) float vector[1024];
          for (int p = 0; p < panels; p++) {
            f32x16 v = load<f32x16>(products + ((int64_t)p * (last - first) + token - first) * LANES);
            if (w.bias)
              v += load<f32x16>(w.bias + (own * panels + p) * LANES);
            store(vector + p * LANES, v);
          }
          if (head < values)
            rotate(vector, rotation(token));
          for (int d = 0; d < dim; d += LANES)
            store(vector + d, storable(load<f32x16>(vector + d)));
          if (head < keys) {
            Half *to = queries_.as<Half>() + ((int64_t)token * model_.heads + own) * dim;
            for (int d = 0; d < dim; d += LANES)
              store_halves(to + d, load<f32x16>(vector + d));
            continue;
          }
          int at = position(token), slot = at % cache_.page_size,
              page = pages_of(token_row_[token])[at / cache_.page_size];
          uint16_t *block = cache_.block(op.layer, page, own, slot / LANES);
          if (head < values)
            cache_.write_key(block, slot % LANES, vector);
          else
            cache_.write_value(block, slot % LANES, vector);
        }
      }
    }
  }

  // Turn the pairs (i, i + head_dim / 2) by their angles: `angles` are cosines, then sines.
  void rotate(float *v, const float *angles) const {
    int half = model_.head_dim / 2;
    for (int i = 0; i < half; i++) {
      float a = v[i], b = v[half + i];
      v[i] = a * angles[i] - b * angles[half + i];
      v[half + i] = b * angles[i] + a * angles[half + i];
    }
  }

  void attend_all(const TenutoOp &op, Member &member) {
    const TenutoStep &step = *step_;
    const int dim = model_.head_dim, group = model_.heads / model_.kv_heads;
    const float scale = 1.0f / sqrtf((float)dim);
    Input to = b_.view(attention_width(), form(op.reader));
    for (int i; (i = team_.take(member.number, (int)tasks_.size())) >= 0;) {
      const AttentionTask &task = tasks_[i];
      std::vector<QueryRow> &rows = member.rows;
      rows.clear();
      for (int q = task.query; q < task.query + task.queries; q++)
        for (int g = 0; g < group; g++) {
          int token = firsts_[task.row] + q;
          const Half *query = queries_.as<Half>() + ((int64_t)token * model_.heads + task.head * group + g) * dim;
          rows.push_back({query, step.starts[task.row] + q + 1, nullptr});
        }
      const int count = (int)rows.size();
      const Blocks blocks = {cache_, op.layer, task.head, pages_of(task.row)};
      const int end = block_of(rows.back().visible - 1) + 1;
      const int own = task.to - task.from;
      for (int part = task.from; part < task.to; part++) {
        const int64_t place = own < task.parts ? part : std::min(part, 1);
        for (int r = 0; r < count; r++)
          rows[r].result = partial(task.slot + place * count + r);
        attend_rows(blocks, rows.data(), count, part * PART, std::min((part + 1) * PART, end), scale);
        if (own == task.parts && part > 0)
          for (int r = 0; r < count; r++)
            add_part(partial(task.slot + r), rows[r].result, dim);
      }
      if (joined_[task.group].fetch_add(own, std::memory_order_acq_rel) + own < task.parts)
        continue;
      joined_[task.group].store(0, std::memory_order_relaxed);
      for (int r = 0; r < count; r++) {
        Partial *result = partial(task.slot + r);
        for (int part = 1; part < task.parts && own < task.parts; part++)
          add_part(result, partial(task.slot + (int64_t)part * count + r), dim);
        deliver(to, firsts_[task.row] + task.query + r / group, task.head * group + r % group, result);
      }
    }
    if (dim % BLOCK == 0)
      return;
    team_.barrier(); // heads share blocks
    for (int token; (token = team_.take(member.number, step.tokens_count)) >= 0;) {
      const float *from = attended_.as<float>() + (int64_t)token * attention_width();
      for (int b = 0; b < to.blocks; b++) {
        f32x16 low = load<f32x16>(from + b * BLOCK);
        f32x16 high = (b * BLOCK + LANES < attention_width()) ? load<f32x16>(from + b * BLOCK + LANES) : f32x16{};
        to.set(token, b, low, high);
      }
    }
  }

  // What a head of a token has attended to becomes part of the next product's input.
  void deliver(const Input &to, int token, int head, Partial *result) {
    const int dim = model_.head_dim;
    const float inverse = 1.0f / result->sum, *values = weighted(result);
    if (dim % BLOCK == 0) {
      for (int d = 0; d < dim; d += BLOCK)
        to.set(token, (head * dim + d) / BLOCK, load<f32x16>(values + d) * inverse,
               load<f32x16>(values + d + LANES) * inverse);
      return;
    }
    float *whole = attended_.as<float>() + (int64_t)token * attention_width() + head * dim;
    for (int d = 0; d < dim; d += LANES)
      store(whole + d, load<f32x16>(values + d) * inverse);
  }

  void logits(const TenutoOp &op, Member &member) {
    Input from = a_.view(model_.hidden, form_for(op.first.kind, step_->outputs_count));
    share(op.first, 4, from, step_->outputs_count, member, [&](int panel, int count, int first, int last) {
      const float *values = member.products.as<float>();
      for (int p = panel; p < panel + count; p++)
        for (int row = first; row < last; row++, values += LANES) {
          int token = p * LANES, width = std::min(LANES, model_.vocab - token);
          memcpy(step_->logits + (int64_t)row * model_.vocab + token, values, sizeof(float) * width);
          Best &best = member.best[row];
          f32x16 v = load<f32x16>(values);
          if (width == LANES && !(highest16(v) > best.value))
            continue;
          for (int i = 0; i < width; i++)
            if (values[i] > best.value)
              best = {values[i], token + i};
        }
    });
  }

  TenutoModel model_;
  std::vector<TenutoOp> ops_;
  std::vector<float> frequencies_;
  Team team_;
  std::vector<Member> members_;
  int hidden_, room_ = 0;
  Cache cache_;
  Memory kv_, x_, queries_, attended_, rotation_, partials_;
  OwnInput a_, b_;
  const TenutoStep *step_ = nullptr;
  std::vector<int> token_row_, firsts_;
  std::vector<AttentionTask> tasks_;
  std::vector<std::atomic<int>> joined_;
  int64_t partial_room_ = 0;
};

template <class Work> int guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception &) { // memory, or threads
    return 1;
  }
}

} // namespace

extern "C" {

// What the library was made for.
const char *tenuto_variant() {
#if TENUTO_AMX
  return "amx";
#elif TENUTO_BF16
  return "avx512_bf16";
#elif TENUTO_AVX512
  return "avx512";
#else
  return "avx2";
#endif
}

// Ask the system for what this process needs; 0 if it may run.
int tenuto_permit() {
#if TENUTO_AMX
  return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
  return 0;
#endif
}

// All that operations point to is kept by the caller until `tenuto_close`. Null if there is no memory.
void *tenuto_open(const TenutoModel *model, const TenutoOp *ops, int count, int threads) {
  Forward *forward = nullptr;
  guarded([&] { forward = new Forward(*model, ops, count, threads); });
  return forward;
}

// 0, or 1 if there is no memory for so many pages.
int tenuto_prepare(void *forward, int64_t pages) {
  return guarded([&] { ((Forward *)forward)->prepare(pages); });
}

// Copy whole pages.
void tenuto_copy(void *forward, int count, const int32_t *sources, const int32_t *targets) {
  ((Forward *)forward)->copy(count, sources, targets);
}

// 0, or 1 if there is no memory.
int tenuto_step(void *forward, const TenutoStep *step) {
  return guarded([&] { ((Forward *)forward)->step(*step); });
}

// Choose tokens.
void tenuto_sample(void *forward, const TenutoDraws *draws) { ((Forward *)forward)->sample(*draws); }

void tenuto_close(void *forward) { delete (Forward *)forward; }
}
