// Adapters: low-rank changes of projections (LoRA, Hu et al., arXiv:2106.09685). Before an operation multiplies its
// input by weights, `shrink` multiplies the input of tokens with an adapter by its down-projections. The operation then
// adds, to each panel of its products, these values times the up-projection. Every token is computed in the same order
// of additions, whatever shares the step.
#pragma once

#include "interface.h"
#include "memory.h"
#include "team.h"

class Adapters {
public:
  static constexpr int MATRICES = 3; // of an operation

  explicit Adapters(const std::vector<TenutoOp> &ops) : ops_(ops) {}

  // Groups the tokens of a step by their adapters. Throws std::bad_alloc.
  void begin(const TenutoStep &step) {
    step_ = &step, adapter_of_.clear(), widest_ = 0;
    for (int row = 0; row < step.rows && step.adapters_count; row++)
      adapter_of_.insert(adapter_of_.end(), step.counts[row], step.adapter_of[row]);
    for (int a = 0; a < step.adapters_count; a++)
      widest_ = std::max(widest_, step.adapters[a].widest);
    group();
    const int64_t needed = (int64_t)step.tokens_count * MATRICES * widest_;
    if (needed > room_) {
      room_ = 0; // until it is allocated
      low_.resize(2 * needed * sizeof(float));
      room_ = 2 * needed;
    }
  }

  // Leaves out all but `count` tokens of the step, in ascending order: token `tokens[i]` becomes token i.
  void narrow(const int32_t *tokens, int count) {
    if (!step_->adapters_count)
      return;
    for (int i = 0; i < count; i++)
      adapter_of_[i] = adapter_of_[tokens[i]];
    adapter_of_.resize(count);
    group();
  }

  // Whether an adapter of the step changes a matrix of the operation.
  bool change(const TenutoOp &op) const {
    for (int a = 0; a < step_->adapters_count; a++)
      for (int which = 0; which < MATRICES; which++)
        if (find(op, a, which).rank)
          return true;
    return false;
  }

  // Multiplies the operation's input by the down-projections of its tokens' adapters.
  void shrink(const TenutoOp &op, const Input &x, Team &team, int member) {
    for (int task; (task = team.take(member, (int)groups_.size() * MATRICES)) >= 0;) {
      const Group &group = groups_[task / MATRICES];
      const int which = task % MATRICES;
      const TenutoLowRank &change = find(op, group.adapter, which);
      if (change.rank && change.bfloat16)
        shrink<uint16_t>(change, x, group, which);
      else if (change.rank)
        shrink<float>(change, x, group, which);
    }
  }

  // Returns `products`, those of a token and panel `panel` of matrix number `which` of the operation, plus the change
  // by the token's adapter.
  f32x16 add(f32x16 products, const TenutoOp &op, int which, int panel, int token) const {
    if (groups_.empty() || adapter_of_[token] < 0)
      return products;
    const TenutoLowRank &change = find(op, adapter_of_[token], which);
    if (!change.rank)
      return products;
    return products + (change.bfloat16 ? expand<uint16_t>(change, panel, low(token, which))
                                       : expand<float>(change, panel, low(token, which)));
  }

private:
  static constexpr int AT_ONCE = 4; // tokens for which a down-projection is read once

  // `count` tokens with the same adapter, from index `first` of `tokens_` on.
  struct Group {
    int adapter, first, count;
  };

  // Finds the groups of `adapter_of_`.
  void group() {
    groups_.clear(), tokens_.clear();
    for (int a = 0; a < step_->adapters_count; a++) {
      const int first = (int)tokens_.size();
      for (int token = 0; token < (int)adapter_of_.size(); token++)
        if (adapter_of_[token] == a)
          tokens_.push_back(token);
      for (int at = first; at < (int)tokens_.size(); at += AT_ONCE)
        groups_.push_back({a, at, std::min(AT_ONCE, (int)tokens_.size() - at)});
    }
  }

  const TenutoLowRank &find(const TenutoOp &op, int adapter, int which) const {
    return step_->adapters[adapter].changes[(&op - ops_.data()) * MATRICES + which];
  }
  float *low(int token, int which) const { return low_.as<float>() + ((int64_t)token * MATRICES + which) * widest_; }

  static f32x16 weights(const float *from) { return load<f32x16>(from); }
  static f32x16 weights(const uint16_t *from) { return bf16_to_float(from); }

  template <class Weight> void shrink(const TenutoLowRank &change, const Input &x, const Group &group, int which) {
    const int *tokens = tokens_.data() + group.first;
    switch (group.count) {
    case 1:
      return shrink<Weight, 1>(change, x, tokens, which);
    case 2:
      return shrink<Weight, 2>(change, x, tokens, which);
    case 3:
      return shrink<Weight, 3>(change, x, tokens, which);
    default:
      return shrink<Weight, AT_ONCE>(change, x, tokens, which);
    }
  }

  template <class Weight, int COUNT>
  void shrink(const TenutoLowRank &change, const Input &x, const int *tokens, int which) {
    const Weight *from = (const Weight *)change.down;
    for (int lane = 0; lane < change.rank; lane += LANES) {
      f32x16 even[COUNT] = {}, odd[COUNT] = {}; // two sums, so that an addition need not wait for the one before
      for (int block = 0; block < x.blocks; block++) {
        alignas(64) float columns[COUNT][BLOCK];
        for (int i = 0; i < COUNT; i++)
          x.get(tokens[i], block, columns[i]);
        for (int k = 0; k < BLOCK; k += 2, from += 2 * LANES) {
          const f32x16 first = weights(from), second = weights(from + LANES);
          for (int i = 0; i < COUNT; i++)
            even[i] += first * columns[i][k], odd[i] += second * columns[i][k + 1];
        }
      }
      for (int i = 0; i < COUNT; i++)
        store(low(tokens[i], which) + lane, (even[i] + odd[i]) * change.scale);
    }
  }

  template <class Weight> static f32x16 expand(const TenutoLowRank &change, int panel, const float *low) {
    const Weight *from = (const Weight *)change.up + (int64_t)panel * change.rank * LANES;
    f32x16 even = {}, odd = {};
    int k = 0;
    for (; k + 1 < change.rank; k += 2, from += 2 * LANES)
      even += weights(from) * low[k], odd += weights(from + LANES) * low[k + 1];
    if (k < change.rank)
      even += weights(from) * low[k];
    return even + odd;
  }

  const std::vector<TenutoOp> &ops_;
  const TenutoStep *step_ = nullptr;
  std::vector<int> adapter_of_, tokens_; // the adapter of each token, or -1; tokens with adapters, grouped by adapter
  std::vector<Group> groups_;
  int widest_ = 0; // the largest number of lanes that a down-projection fills
  int64_t room_ = 0;
  Memory low_; // float [tokens][MATRICES][widest_]
};
