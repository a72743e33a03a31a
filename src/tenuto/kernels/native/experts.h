// Mixtures of experts (Shazeer et al., arXiv:1701.06538): tokens are grouped by the experts that compute them.
#pragma once

#include "dense.h"

class ExpertWork {
public:
  ExpertWork(Workspace &work, const std::vector<TenutoOp> &ops) : work_(work) {
    for (const TenutoOp &op : ops)
      if (const TenutoExperts *e = op.experts) {
        count_ = std::max(count_, e->count), chosen_ = std::max(chosen_, e->chosen);
        width_ = std::max(width_, e->down->inputs);
      }
  }

  // Reserves room for the step that begins.
  void begin() {
    if (!chosen_ || work_.tokens() <= room_)
      return;
    const int room = std::max(64, 2 * work_.tokens());
    room_ = 0; // until all of it is allocated
    const int rows = room * chosen_ + LANES * std::min(count_, room * chosen_);
    gathered_.resize(rows, work_.model.hidden), inner_.resize(rows, width_);
    results_.resize((int64_t)rows * work_.widths.hidden * 4);
    choices_.resize(room * chosen_), weights_.resize(room * chosen_), rows_.resize(room * chosen_);
    active_.reserve(count_), starts_.resize(count_), counts_.resize(count_);
    for (Member &member : work_.members)
      member.state.outliers.reserve(rows, round_up(std::max(work_.model.hidden, width_), BLOCK) / BLOCK);
    room_ = room;
  }

  void compute(const TenutoOp &op, Member &member) {
    const TenutoExperts &e = *op.experts;
    for (int token; (token = work_.team.take(member.number, work_.tokens())) >= 0;)
      choose(e, work_.projected(token), &choices_[token * e.chosen], &weights_[token * e.chosen]);
    work_.team.barrier();
    if (member.number == 0)
      assign(e);
    work_.team.barrier();
    gather(e, member);
    work_.team.barrier();
    gated(op, member);
    work_.team.barrier();
    down(e, member);
    work_.team.barrier();
    combine(op, member);
  }

private:
  int pairs(const TenutoExperts &e) const { return work_.tokens() * e.chosen; }
  float *result(int row) const { return results_.as<float>() + (int64_t)row * work_.widths.hidden; }

  // Chooses the experts with the highest scores, the first among equals, and computes their weights. With a correction,
  // `scores` are replaced by their sigmoids.
  static void choose(const TenutoExperts &e, float *scores, int *chosen, float *weights) {
    for (int i = 0; i < e.count && e.correction; i++)
      scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    auto rank = [&](int i) { return e.correction ? scores[i] + e.correction[i] : scores[i]; };
    for (int j = 0; j < e.chosen; j++) {
      int best = -1;
      for (int i = 0; i < e.count; i++) {
        if (best >= 0 && !(rank(i) > rank(best)))
          continue;
        if (std::find(chosen, chosen + j, i) == chosen + j)
          best = i;
      }
      chosen[j] = best;
    }
    const float highest = scores[chosen[0]];
    auto weight = [&](int i) { return e.correction ? scores[i] : expf(scores[i] - highest); };
    float sum = 0;
    for (int j = 0; j < e.chosen; j++)
      weights[j] = weight(chosen[j]), sum += weights[j];
    if (!e.normalised) {
      sum = e.correction ? 1.0f : 0.0f;
      for (int i = 0; i < e.count && !e.correction; i++)
        sum += weight(i);
    }
    for (int j = 0; j < e.chosen; j++)
      weights[j] *= e.scale / sum;
  }

  // Assigns rows to each expert that was chosen: consecutive rows from a multiple of 16 on, in the order of its tokens.
  void assign(const TenutoExperts &e) {
    std::fill(counts_.begin(), counts_.end(), 0);
    for (int i = 0; i < pairs(e); i++)
      rows_[i] = counts_[choices_[i]]++;
    active_.clear();
    int rows = 0;
    for (int expert = 0; expert < e.count; expert++)
      if (counts_[expert]) {
        active_.push_back(expert), starts_[expert] = rows;
        rows += round_up(counts_[expert], LANES);
      }
    for (int i = 0; i < pairs(e); i++)
      rows_[i] += starts_[choices_[i]];
  }

  void gather(const TenutoExperts &e, Member &member) {
    const Input from = work_.a(*e.gate), to = gathered(e);
    for (int i; (i = work_.team.take(member.number, pairs(e))) >= 0;)
      to.copy_row(rows_[i], from, i / e.chosen);
  }

  void gated(const TenutoOp &op, Member &member) {
    const TenutoExperts &e = *op.experts;
    const Input from = gathered(e), to = inner(e);
    int known = -1; // the expert whose rows `member.state` describes
    for (int task; (task = work_.team.take(member.number, (int)active_.size() * to.blocks)) >= 0;) {
      const int expert = active_[task / to.blocks], start = starts_[expert];
      if (expert != known)
        member.state.outliers.find(from, start, Runs(counts_[expert])), known = expert;
      gate_block(e.gate[expert], e.up ? e.up[expert] : op.second, task % to.blocks, op, from, to, start,
                 start + counts_[expert], member, nullptr);
    }
  }

  void down(const TenutoExperts &e, Member &member) {
    constexpr int AT_ONCE = 2; // panels of a task
    const Input from = inner(e);
    const int tasks = (e.down->panels + AT_ONCE - 1) / AT_ONCE;
    int known = -1; // the expert whose rows `member.state` describes
    for (int task; (task = work_.team.take(member.number, (int)active_.size() * tasks)) >= 0;) {
      const int expert = active_[task / tasks], start = starts_[expert];
      if (expert != known)
        member.state.outliers.find(from, start, Runs(counts_[expert])), known = expert;
      const Matrix &w = e.down[expert];
      const int panel = task % tasks * AT_ONCE, count = std::min(AT_ONCE, w.panels - panel);
      Workspace::multiply(w, panel, count, from, start, start + counts_[expert], member, [&](int first, int last) {
        const float *values = member.products.as<float>();
        for (int p = panel; p < panel + count; p++)
          for (int row = first; row < last; row++, values += LANES)
            store(result(row) + p * LANES, load<f32x16>(values) + bias_of(w, p));
      });
    }
  }

  void combine(const TenutoOp &op, Member &member) {
    const TenutoExperts &e = *op.experts;
    for (int token; (token = work_.team.take(member.number, work_.tokens())) >= 0;)
      for (int k = 0; k < e.down->panels * LANES; k += LANES) {
        f32x16 sum = {};
        for (int j = token * e.chosen; j < (token + 1) * e.chosen; j++)
          sum += load<f32x16>(result(rows_[j]) + k) * weights_[j];
        float *to = work_.target(op, token) + k;
        store(to, load<f32x16>(to) + sum * op.scale);
      }
  }

  Input gathered(const TenutoExperts &e) const { return gathered_.view(e.gate->inputs, work_.type(e.gate->format)); }
  Input inner(const TenutoExperts &e) const { return inner_.view(e.down->inputs, work_.type(e.down->format)); }

  Workspace &work_;
  int count_ = 0, chosen_ = 0, width_ = 0, room_ = 0;
  OwnInput gathered_, inner_;
  Memory results_;
  std::vector<int> choices_, rows_, active_, starts_, counts_; // of pairs of token and choice; of experts
  std::vector<float> weights_;
};
