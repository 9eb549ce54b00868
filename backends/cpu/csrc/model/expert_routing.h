// Which experts each token goes to, from the router's logits in float32.
#pragma once
#include "vec.h"

namespace {

constexpr int64_t kMostExperts = 1024;

// Of n numbers the place of the largest; among equals the first.
inline int64_t largest(const float *x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

// score = sigmoid(logits) or softmax(logits), of n experts.
inline void route_scores(const float *logits, int64_t n, int32_t sigmoid, float *score) {
  float top = logits[largest(logits, n)], all = 0;
  for (int64_t c = 0; c < n; c += kWide) {
    V x = load_v(logits + c, n - c);
    store_v(score + c, sigmoid ? 1.0f / (1.0f + vexp(-x)) : vexp(x - top), n - c);
  }
  if (sigmoid) return;
  for (int64_t e = 0; e < n; e++) all += score[e];
  for (int64_t e = 0; e < n; e++) score[e] /= all;
}

// Leaves in `choice` only the experts of the best groups; the others become -inf.
inline void keep_groups(const ip_experts &x, float *choice) {
  float rank[kMostExperts];
  int64_t each = x.experts / x.groups;
  for (int64_t g = 0; g < x.groups; g++) {
    float *of = choice + g * each;
    int64_t best = largest(of, each);
    rank[g] = of[best];
    if (!x.best_two) continue;
    float second = -__builtin_inff();
    for (int64_t e = 0; e < each; e++)
      if (e != best && of[e] > second) second = of[e];
    rank[g] += second;
  }
  bool kept[kMostExperts] = {};
  for (int64_t i = 0; i < x.top_groups; i++) {
    int64_t g = largest(rank, x.groups);
    kept[g] = true, rank[g] = -__builtin_inff();
  }
  for (int64_t e = 0; e < x.experts; e++)
    if (!kept[e / each]) choice[e] = -__builtin_inff();
}

// ids and weights [top] of one token.
inline void route(const ip_experts &x, const float *logits, int64_t *ids, float *weights) {
  float score[kMostExperts], choice[kMostExperts], all = 0;
  route_scores(logits, x.experts, x.sigmoid, score);
  for (int64_t e = 0; e < x.experts; e++) choice[e] = x.bias ? score[e] + x.bias[e] : score[e];
  if (x.groups > 1) keep_groups(x, choice);
  bool taken[kMostExperts] = {};
  for (int64_t j = 0; j < x.top; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < x.experts; e++)
      if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
    taken[best] = true, ids[j] = best;
    all += weights[j] = score[best];
  }
  float by = x.renormalize ? x.factor / (all + 1e-20f) : x.factor;
  for (int64_t j = 0; j < x.top; j++) weights[j] *= by;
}

}  // namespace
