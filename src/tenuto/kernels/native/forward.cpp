// The forward pass: a team of threads runs the model's list of operations over the arrays of a step.
#include "attention_layer.h"
#include "experts.h"
#include "recurrent.h"

#if TENUTO_AMX
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#endif

namespace {

// The units of one memory group: pages, or state slots.
struct GroupMemory {
  std::unique_ptr<Pages> pages;
  std::unique_ptr<States> states;
  Memory memory, inputs;

  int64_t unit_bytes() const { return pages ? pages->unit_bytes() : states->unit_bytes(); }
};

class Forward {
public:
  Forward(const TenutoModel &model, const TenutoOp *ops, int count, int threads)
      : ops_(ops, ops + count), work_(model, ops_, threads), groups_(model.groups_count), experts_(work_, ops_) {
    for (int g = 0; g < model.groups_count; g++) {
      if (model.groups[g].kv_heads)
        groups_[g].pages = std::make_unique<Pages>(model.groups[g], model.page_size);
      else
        groups_[g].states = std::make_unique<States>(model.groups[g]);
    }
    for (const TenutoOp &op : ops_)
      if (op.attention && !attention(*op.attention)) {
        const TenutoAttention &a = *op.attention;
        attention_.push_back(std::make_unique<AttentionLayers>(work_, *groups_[a.group].pages, a.group, a.heads));
      }
  }

  Team &team() { return work_.team; }

  void prepare(const int64_t *units, int rows, int most_kept) {
    bool recurrent = false;
    for (int g = 0; g < (int)groups_.size(); g++) {
      GroupMemory &group = groups_[g];
      group.memory.resize(units[g] * group.unit_bytes());
      if (group.pages)
        group.pages->cache.data = group.memory.as<char>();
      else {
        recurrent = true;
        group.inputs.resize((int64_t)rows * most_kept * group.states->input_bytes());
        group.states->data = group.memory.as<float>(), group.states->inputs = group.inputs.as<float>();
        group.states->most_kept = most_kept;
      }
    }
    work_.reserve_absorbed(recurrent ? rows : 0, most_kept);
  }

  void copy(int group, int count, const int32_t *sources, const int32_t *targets) {
    const int64_t bytes = groups_[group].unit_bytes();
    char *const units = groups_[group].memory.as<char>();
    for (int i = 0; i < count; i++)
      memcpy(units + targets[i] * bytes, units + sources[i] * bytes, (size_t)bytes);
  }

  void *memory(int group) const { return groups_[group].memory.as<void>(); }

  void step(const TenutoStep &step) {
    work_.begin(step);
    experts_.begin();
    for (auto &layers : attention_)
      layers->lay_out();
    work_.team.run([&](int member) {
      double began = seconds();
      foresee(step.first_op, step.end_op, work_.members[member]);
      for (int i = step.first_op; i < step.end_op; i++) {
        const TenutoOp &op = ops_[i];
        if (work_.adapters.change(op)) {
          const Input input = op.kind == ADD ? work_.b(op.first) : work_.a(op.first);
          work_.adapters.shrink(op, input, work_.team, member);
          work_.team.barrier();
        }
        run(op, work_.members[member]);
        if (op.kind == ATTEND)
          foresee(i + 1, step.end_op, work_.members[member]);
        work_.team.barrier();
        if (member == 0) {
          const double ended = seconds();
          step.op_seconds[op.kind] += ended - began;
          began = ended;
        }
      }
#if TENUTO_AMX
      amx::release();
#endif
    });
    for (int i = 0; i < step.outputs_count; i++) {
      Best best = work_.members[0].best[i];
      for (const Member &member : work_.members) {
        const Best &other = member.best[i];
        if (other.value > best.value || (other.value == best.value && other.token < best.token))
          best = other;
      }
      step.best[i] = best.token;
    }
  }

  void sample(const TenutoDraws &draws) {
    const int64_t vocab = work_.model.vocab;
    work_.team.run([&](int member) {
      for (int row; (row = work_.team.take(member, draws.rows)) >= 0;) {
        float *logits = draws.logits + row * vocab;
        if (draws.masks != nullptr && draws.masks[row] != nullptr)
          forbid(logits, (int)vocab, draws.masks[row], draws.words);
        draws.tokens[row] = work_.members[member].sampler->choose(logits, draws.options[row]);
      }
    });
  }

private:
  AttentionLayers *attention(const TenutoAttention &a) const {
    for (auto &layers : attention_)
      if (layers->serves(a))
        return layers.get();
    return nullptr;
  }

  // Tells a member what attention it computes after the next products, those of the operations from `first` to `last`,
  // as far as these fetch what it reads.
  void foresee(int first, int last, Member &member) const {
    int64_t blocks = 0;
    for (int i = first; i < last; i++) {
      const TenutoOp &op = ops_[i];
      if (op.kind == ATTEND)
        return attention(*op.attention)->foresee(op.attention->layer, blocks, member);
      for (const Matrix *w : {&op.first, &op.second, &op.third})
        if (takes_two_panels(*w, work_.tokens()))
          blocks += (int64_t)w->panels * (round_up(w->inputs, BLOCK) / BLOCK);
    }
    member.state.upcoming.end();
  }

  const States &states(const TenutoOp &op) const { return *groups_[op.recurrent->group].states; }

  void run(const TenutoOp &op, Member &member) {
    switch (op.kind) {
    case EMBED:
      return embed(work_, op, member);
    case NORM:
      return norm(work_, op, member, work_.a(work_.model.hidden, op.consumer), work_.tokens(), nullptr);
    case QKV:
      return attention(*op.attention)->project(op, member);
    case ATTEND:
      return attention(*op.attention)->attend(op, member);
    case ADD:
      return add(work_, op, member);
    case GATED:
      return gated(work_, op, member);
    case NARROW:
      return narrow(work_, member);
    case SELECT:
      return select(work_, op, member);
    case LOGITS:
      return logits(work_, op, member);
    case POST:
      return post(work_, op, member);
    case PROJECT:
      return project(work_, op, member);
    case CONVOLVE:
      return convolve(work_, states(op), op, member);
    case SCAN:
      return scan(work_, states(op), op, member);
    case DELTA:
      return delta(work_, states(op), op, member);
    case GATE:
      return gate(work_, op, member);
    case EXPERTS:
      return experts_.compute(op, member);
    case KEEP:
      return keep(work_, op, member);
    case JOIN:
      return join(work_, op, member);
    }
  }

  const std::vector<TenutoOp> ops_;
  Workspace work_;
  std::vector<GroupMemory> groups_;
  std::vector<std::unique_ptr<AttentionLayers>> attention_;
  ExpertWork experts_;
};

template <class Does> int guarded(Does does) {
  try {
    does();
    return 0;
  } catch (const std::exception &) { // no memory, or no threads
    return 1;
  }
}

} // namespace

extern "C" {

// Returns the variant that this library was compiled for.
const char *tenuto_variant() { return TENUTO_VARIANT; }

// Asks the system for permission to use AMX; returns 0 if this library may be used.
int tenuto_permit() {
#if TENUTO_AMX
  return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
  return 0;
#endif
}

// Returns a forward pass, or null if there is not enough memory. The caller keeps the memory that operations point to
// until `tenuto_close`.
void *tenuto_open(const TenutoModel *model, const TenutoOp *ops, int count, int threads) {
  Forward *forward = nullptr;
  guarded([&] { forward = new Forward(*model, ops, count, threads); });
  return forward;
}

// Keeps thread `member`, 1 to threads - 1, on these cores. Returns 1 if the system cannot do that, or else 0.
int tenuto_pin(void *forward, int member, const int32_t *cores, int count) {
  return !((Forward *)forward)->team().pin(member, cores, count);
}

// Allocates `units[g]` units of each group, and room to keep the inputs of `most_kept` tokens for each of `rows` row
// ids. Returns 1 if there is not enough memory, or else 0.
int tenuto_prepare(void *forward, const int64_t *units, int rows, int most_kept) {
  return guarded([&] { ((Forward *)forward)->prepare(units, rows, most_kept); });
}

// Copies whole units of a group.
void tenuto_copy(void *forward, int group, int count, const int32_t *sources, const int32_t *targets) {
  ((Forward *)forward)->copy(group, count, sources, targets);
}

// Returns the units of a group, one after another.
void *tenuto_memory(void *forward, int group) { return ((Forward *)forward)->memory(group); }

// Computes a step. Returns 1 if there is not enough memory, or else 0.
int tenuto_step(void *forward, const TenutoStep *step) {
  return guarded([&] { ((Forward *)forward)->step(*step); });
}

// Samples tokens.
void tenuto_sample(void *forward, const TenutoDraws *draws) { ((Forward *)forward)->sample(*draws); }

void tenuto_close(void *forward) { delete (Forward *)forward; }
}
