// Sampling a token from logits. `kernels/torch_sampling.py` does the same with PyTorch, and `kernels/sampling.py`
// describes the options.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

// Options of one token: `uniform` is a random number in [0, 1). `top_k` is 0 for all tokens. `temperature` is 0 for the
// likeliest token, the first among equals.
struct SamplingOptions {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

// Returns the likeliest token, the first among equals.
static int likeliest(const float *logits, int vocab) {
  int best = 0;
  float highest = -INFINITY;
  for (int i = 0; i < vocab; i += 16) {
    const int width = std::min(16, vocab - i);
    if (width == 16 && !(highest16(load<f32x16>(logits + i)) > highest))
      continue;
    for (int k = i; k < i + width; k++)
      if (logits[k] > highest)
        highest = logits[k], best = k;
  }
  return best;
}

// Sets the logits of forbidden tokens to minus infinity: those whose bits in `mask`, of `words` words, are clear, and
// those behind the last word. A mask that forbids all tokens changes nothing.
static void forbid(float *logits, int vocab, const uint32_t *mask, int words) {
  bool any = false;
  for (int word = 0; word < words && word * 32 < vocab && !any; word++)
    any = (mask[word] & (vocab - word * 32 >= 32 ? ~0u : (1u << (vocab - word * 32)) - 1)) != 0;
  if (!any)
    return;
  for (int i = 0; i < vocab; i += 32) {
    const uint32_t allowed = i / 32 < words ? mask[i / 32] : 0;
    const int width = std::min(32, vocab - i);
    if (allowed == ~0u)
      continue;
    if (allowed == 0)
      std::fill(logits + i, logits + i + width, -INFINITY);
    else
      for (int k = 0; k < width; k++)
        if (!(allowed >> k & 1))
          logits[i + k] = -INFINITY;
  }
}

// Samples one token at a time, with private buffers.
class Sampler {
public:
  explicit Sampler(int vocab) : vocab_(vocab), weights_((vocab + STRIP - 1) / STRIP * STRIP) {
    within_.reserve(vocab);
    strips_.reserve(weights_.size() / STRIP);
  }

  int choose(const float *logits, const SamplingOptions &options) {
    const int best = likeliest(logits, vocab_);
    if (options.temperature == 0)
      return best;
    weigh(logits, logits[best], (float)std::max(options.temperature, 1e-30));
    limit(options);
    return draw(options.uniform, best);
  }

private:
  static constexpr int STRIP = 1024; // tokens whose weights are added before a search for one of them
  static constexpr int BINS = 1024;  // of weights from 0 to 1, by their leading bits: eight bins for each power of two

  // The least weight that is kept, and the number of tokens of exactly that weight that are kept, the first ones.
  struct Edge {
    float least = 0.0f;
    int64_t equals = INT64_MAX;
  };

  // Computes weights relative to the likeliest token, and 0 behind the vocabulary.
  void weigh(const float *logits, float highest, float temperature) {
    for (int i = 0; i < (int)weights_.size(); i += 16) {
      f32x16 logit = splat(-INFINITY);
      if (i + 16 <= vocab_)
        logit = load<f32x16>(logits + i);
      else if (i < vocab_)
        memcpy(&logit, logits + i, sizeof(float) * (vocab_ - i));
      const f32x16 below = (logit - highest) / temperature; // false for NaN
      store(&weights_[i], exp_nonpositive(select(below <= 0.0f, below, splat(-INFINITY))));
    }
  }

  static int bin_of(float weight) {
    uint32_t bits;
    memcpy(&bits, &weight, 4);
    return std::min((int)(bits >> 20), BINS - 1);
  }

  // Sets the weights that the options exclude to zero. Most weights are tiny; they are examined only if they matter.
  void limit(const SamplingOptions &options) {
    Edge edge;
    const bool by_count = options.top_k > 0 && options.top_k < vocab_;
    const int64_t count = by_count ? options.top_k : vocab_;
    if (by_count || options.top_p < 1) {
      const double all = by_count ? 0.0 : sum(0, weights_.size());
      for (const float least : {1.0f / 1024, 0.0f}) {
        sort_into_bins(least);
        double total = all;
        if ((!by_count || find_edge(count, INFINITY, edge, total)) &&
            (options.top_p >= 1 || find_edge(count, options.top_p * total, edge, total)))
          break;
      }
    }
    if (options.min_p > edge.least)
      edge = {(float)options.min_p, INT64_MAX};
    if (edge.least > 0)
      cut(edge);
  }

  double sum(size_t from, size_t to) const {
    f32x16 sums = {};
    for (size_t i = from; i < to; i += 16)
      sums += load<f32x16>(&weights_[i]);
    return sum16(sums);
  }

  // Sorts weights of at least `least` into bins.
  void sort_into_bins(float least) {
    std::fill(counts_, counts_ + BINS, 0);
    std::fill(sums_, sums_ + BINS, 0.0);
    for (int i = 0; i < vocab_; i += 16) {
      if (highest16(load<f32x16>(&weights_[i])) < least)
        continue;
      for (int k = i; k < std::min(i + 16, vocab_); k++)
        if (weights_[k] >= least) {
          const int bin = bin_of(weights_[k]);
          counts_[bin]++, sums_[bin] += weights_[k];
        }
    }
  }

  // Finds the edge of the likeliest tokens: at most `count` tokens, at most `share` of the weight, but at least one
  // token. Sets `total` to their weight. Returns false if the bins do not have as many.
  bool find_edge(int64_t count, double share, Edge &edge, double &total) {
    total = 0;
    for (int bin = BINS - 1; bin >= 0; bin--) {
      if (counts_[bin] == 0)
        continue;
      if (counts_[bin] < count && total + sums_[bin] < share) {
        count -= counts_[bin], total += sums_[bin];
        continue;
      }
      edge = {-1.0f, 0};
      for (float weight : sorted(bin)) {
        edge.equals = weight == edge.least ? edge.equals + 1 : 1, edge.least = weight;
        total += weight;
        if (--count == 0 || total >= share)
          break;
      }
      return true;
    }
    return false;
  }

  // Returns the weights in a bin, in descending order.
  const std::vector<float> &sorted(int bin) {
    within_.clear();
    const float least = float_of((uint16_t)(bin << 4));
    for (int i = 0; i < vocab_; i += 16) {
      if (highest16(load<f32x16>(&weights_[i])) < least)
        continue;
      for (int k = i; k < std::min(i + 16, vocab_); k++)
        if (bin_of(weights_[k]) == bin)
          within_.push_back(weights_[k]);
    }
    std::sort(within_.begin(), within_.end(), std::greater<float>());
    return within_;
  }

  void cut(Edge edge) {
    int64_t equals = 0;
    for (int i = 0; i < vocab_; i += 16) {
      const f32x16 w = load<f32x16>(&weights_[i]);
      store(&weights_[i], select(w < edge.least, f32x16{}, w));
    }
    for (int i = 0; i < vocab_ && edge.equals < vocab_; i++)
      if (weights_[i] == edge.least && ++equals > edge.equals)
        weights_[i] = 0.0f;
  }

  // Returns the token at the fraction `uniform` of the weight, in order of ids, or `best` if all weights are 0.
  int draw(double uniform, int best) {
    strips_.clear();
    double total = 0;
    for (size_t i = 0; i < weights_.size(); i += STRIP)
      strips_.push_back(total += sum(i, i + STRIP));
    const double target = uniform * total;
    const size_t strip = std::upper_bound(strips_.begin(), strips_.end(), target) - strips_.begin();
    if (strip == strips_.size())
      return best;
    double below = strip > 0 ? strips_[strip - 1] : 0.0;
    int token = -1;
    for (int i = (int)strip * STRIP; i < vocab_ && i < (int)(strip + 1) * STRIP; i++) {
      if (weights_[i] <= 0)
        continue;
      token = i; // the last one, if rounding keeps the sum below the target
      if ((below += weights_[i]) > target)
        break;
    }
    return token < 0 ? best : token;
  }

  int vocab_;
  std::vector<float> weights_, within_;
  std::vector<double> strips_; // cumulative weight at the end of each strip
  int64_t counts_[BINS];
  double sums_[BINS];
};
