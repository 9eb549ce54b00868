// What a sample of a row says about its tokens by rank: in which logits the one at a share of their weights, or of their
// number, is likely to lie.
#pragma once
#include "choose.h"

namespace {

constexpr int kEvery = 16;         // one register in so many is sampled
constexpr float kDeviations = 3;   // how far from its guess a token is looked for
constexpr float kUnseen = 0.01f;   // of the weight of known tokens: heavy ones that are neither known nor sampled

// Logits from `low` up to below `high` in which a token is looked for.
struct Band {
  float low, high;
  Few inside;
  Upto above;
};

class Guess {
 public:
  // `low`: the least logit to count.
  Guess(const Heat &heat, float low)
      : intervals_(heat.top, low, kBins), step_((heat.top - low) / (float)(kBins - 1)), degrees_(heat.degrees),
        sampled_(scratch(17)->get<int32_t>(2 * (kBins + 1))), known_(sampled_ + kBins + 1) {
    memset(sampled_, 0, 2 * (kBins + 1) * sizeof(int32_t));
  }

  // Whole registers of logits; each stands for kEvery tokens.
  void sampled(const float *logits, int64_t n) { count(sampled_, logits, n); }
  // Of those that are there once.
  void known(const float *logits, int64_t n) { count(known_, logits, n); }

  void add_up() {
    upto_ = scratch(16)->get<Sums>(kBins);
    float weights[kBins];
    const V number = __builtin_convertvector(first_ids(), V);
    for (int i = 0; i < kBins; i += kWide)
      store(weights + i, exp_scaled(larger((number + (float)i) * (-step_ / degrees_), all(kFar))));
    float spread = step_ / degrees_, uneven = spread * spread / 12;  // weights differ within an interval
    Sums sum = {};
    for (int i = 0; i < kBins; i++) {
      float light = (float)sampled_[i] * kEvery, tokens = light + (float)known_[i], w = weights[i];
      known_weight_ += (float)known_[i] * w;
      sum += Sums{tokens * w, (light * kEvery + tokens * uneven) * w * w, tokens, light * kEvery};
      upto_[i] = sum;
    }
  }

  float weight() const { return upto_[kBins - 1][0]; }
  float tokens() const { return upto_[kBins - 1][2]; }
  float weight_of_first(float tokens) const { return upto_[where(2, tokens)][0]; }
  float weight_above(float below) const { return upto_[(int)fmaxf(fminf(-below * degrees_ / step_, kBins - 1), 0)][0]; }

  // Where the token lies up to which there is a `share` of the first tokens that have `whole` together.
  void place(Band &b, bool by_number, float share, float whole) const {
    int what = by_number ? 2 : 0;
    float target = share * whole, noise = upto_[where(what, target)][what + 1], rest = upto_[where(what, whole)][what + 1];
    float far = kDeviations * sqrtf((1 - share) * (1 - share) * noise + share * share * (rest - noise));
    if (!by_number) far += kUnseen * known_weight_;
    int from = where(what, target - far), to = where(what, target + far);
    b.high = from == 0 ? INFINITY : intervals_.top - ((float)from - 0.5f) * step_;
    b.low = to == kBins - 1 ? -FLT_MAX : intervals_.top - ((float)to + 0.5f) * step_;
  }

 private:
  typedef float Sums __attribute__((vector_size(16)));  // weights, their variance, tokens, their variance

  void count(int32_t *counts, const float *logits, int64_t n) const {
    for (int64_t i = 0; i < n; i += kWide) {
      int32_t to[kWide];
      store(to, intervals_.of(load<V>(logits + i)));
#pragma GCC unroll 16
      for (int l = 0; l < kWide; l++) counts[to[l]]++;
    }
  }

  // The first interval up to which there is so much; the last if there is none.
  int where(int what, float much) const {
    int first = 0, count = kBins - 1;
    while (count > 0) {
      int half = count / 2;
      if (upto_[first + half][what] < much)
        first += half + 1, count -= half + 1;
      else
        count = half;
    }
    return first;
  }

  Intervals intervals_;
  float step_, degrees_;
  int32_t *sampled_, *known_;
  float known_weight_ = 0;
  Sums *upto_ = nullptr;
};

}  // namespace
