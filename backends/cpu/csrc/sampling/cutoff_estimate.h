// Estimates, from every 16th register of a row's logits, the interval of logits that contains the top-p or top-k
// cutoff, or the token to be drawn. sample_row.h calls it before it reads the whole row; a wrong estimate costs a
// second pass, never the result.
#pragma once
#include "sampling/topk_select.h"

namespace {

constexpr int kSampleEvery = 16;  // one register of this many is sampled
constexpr float kBandDeviations = 3;  // half the width of a band, in standard deviations of the estimate
constexpr float kUnseenShare = 0.01f;  // of the known tokens' weight: heavy tokens that are neither known nor sampled

// The interval of logits from `low` up to below `high` in which a token is looked for: the tokens in it, and what is
// above it.
struct Band {
  float low, high;
  TokenList inside;
  RankTotals above;
};

// Histogram of a row's weights by interval of logits, accumulated from the largest logit down.
class CutoffEstimate {
 public:
  // `low`: the least logit to count. The counts are in this thread's workspaces.
  CutoffEstimate(const Softmax &softmax, float low)
      : intervals_(softmax.top, low, kIntervals), step_((softmax.top - low) / (float)(kIntervals - 1)),
        temperature_(softmax.temperature),
        sampled_(workspace(kRankedTokens)->reserve<int32_t>(2 * (kIntervals + 1))), known_(sampled_ + kIntervals + 1) {
    memset(sampled_, 0, 2 * (kIntervals + 1) * sizeof(int32_t));
  }

  // Counts logits[0 .. n], whole registers of sampled ones; each stands for kSampleEvery tokens.
  void add_sampled(const float *logits, int64_t n) { count(sampled_, logits, n); }
  // Counts logits[0 .. n], whole registers of logits that are in the row; each stands for itself.
  void add_known(const float *logits, int64_t n) { count(known_, logits, n); }

  // Accumulates the counts to weights, tokens and their variances; call it after all logits are added.
  void accumulate() {
    upto_ = workspace(kIntervalSums)->reserve<SumVector>(kIntervals);
    float weights[kIntervals];
    const Floats number = __builtin_convertvector(lane_numbers(), Floats);
    for (int i = 0; i < kIntervals; i += kRegisterLanes)
      store(weights + i,
            exp_scaled(max_floats((number + (float)i) * (-step_ / temperature_), splat_floats(kExponentFloor))));
    float spread = step_ / temperature_, uneven = spread * spread / 12;  // weights differ within an interval
    SumVector sum = {};
    for (int i = 0; i < kIntervals; i++) {
      float light = (float)sampled_[i] * kSampleEvery, tokens = light + (float)known_[i], w = weights[i];
      known_weight_ += (float)known_[i] * w;
      sum += SumVector{tokens * w, (light * kSampleEvery + tokens * uneven) * w * w, tokens, light * kSampleEvery};
      upto_[i] = sum;
    }
  }

  // The estimated weight of all tokens, times 2^-20; after `accumulate`, as all estimates.
  float weight() const { return upto_[kIntervals - 1][0]; }
  // The estimated number of tokens with a weight.
  float tokens() const { return upto_[kIntervals - 1][2]; }
  // The estimated weight of the first `tokens` tokens by rank, times 2^-20.
  float weight_of_first(float tokens) const { return upto_[first_interval(2, tokens)][0]; }
  // The estimated weight of tokens with (logit - top) / temperature >= below, times 2^-20.
  float weight_above(float below) const {
    return upto_[(int)fmaxf(fminf(-below * temperature_ / step_, kIntervals - 1), 0)][0];
  }

  // Sets b.low and b.high so that the band most likely contains the token up to which the first tokens by rank have
  // `share` of `total`: by number if `by_number`, else by weight.
  void place_band(Band &b, bool by_number, float share, float total) const {
    int column = by_number ? 2 : 0;
    float target = share * total, noise = upto_[first_interval(column, target)][column + 1],
          rest = upto_[first_interval(column, total)][column + 1];
    float margin = kBandDeviations * sqrtf((1 - share) * (1 - share) * noise + share * share * (rest - noise));
    if (!by_number) margin += kUnseenShare * known_weight_;
    int from = first_interval(column, target - margin), to = first_interval(column, target + margin);
    b.high = from == 0 ? INFINITY : intervals_.top - ((float)from - 0.5f) * step_;
    b.low = to == kIntervals - 1 ? -FLT_MAX : intervals_.top - ((float)to + 0.5f) * step_;
  }

 private:
  typedef float SumVector __attribute__((vector_size(16)));  // weights, their variance, tokens, their variance

  // Adds one to the count of each logit's interval, for logits[0 .. n], whole registers.
  void count(int32_t *counts, const float *logits, int64_t n) const {
    for (int64_t i = 0; i < n; i += kRegisterLanes) {
      int32_t to[kRegisterLanes];
      store(to, intervals_.number_of(load<Floats>(logits + i)));
#pragma GCC unroll 16
      for (int l = 0; l < kRegisterLanes; l++) counts[to[l]]++;
    }
  }

  // The first interval up to which a column of `upto_` sums to at least `amount`; the last interval if there is none.
  int first_interval(int column, float amount) const {
    int first = 0, count = kIntervals - 1;
    while (count > 0) {
      int half = count / 2;
      if (upto_[first + half][column] < amount)
        first += half + 1, count -= half + 1;
      else
        count = half;
    }
    return first;
  }

  Intervals intervals_;
  float step_, temperature_;
  int32_t *sampled_, *known_;
  float known_weight_ = 0;
  SumVector *upto_ = nullptr;
};

}  // namespace
