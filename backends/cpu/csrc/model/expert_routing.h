// Chooses the experts of a token from the router's logits in float32, as the op `moe_route` defines it. The decoder
// layer and isa_entries.h call `route_token`.
#pragma once
#include "runtime/vectors.h"

namespace {

// At most this many experts fit the arrays below; the caller checks it.
constexpr int64_t kMaxExperts = 1024;

// The index of the largest of x[0 .. n]; among equals the first.
inline int64_t argmax_index(const float *x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

// sqrt(ln(1 + exp(x))) of each lane, to about 1e-7 of it; 0 below -174. With e = exp(-|x|) and s = e / (2 + e) it is
// sqrt(max(x, 0) + 2 atanh(s)), by the series of atanh; far below 0 it is exp(x / 2) to that precision.
inline Floats sqrt_softplus(Floats x) {
  Floats e = vexp(x < 0.0f ? x : -x), s = e / (e + 2.0f), s2 = s * s;
  Floats p = splat_floats(1.0f / 15);
  for (int i = 13; i > 0; i -= 2) p = fma(p, s2, splat_floats(1.0f / i));
  Floats soft = (x > 0.0f ? x : Floats{}) + 2.0f * s * p;
  float roots[kRegisterLanes];
  store(roots, soft);
  for (float &root : roots) root = __builtin_sqrtf(root);
  return x < -17.0f ? vexp(0.5f * x) : load<Floats>(roots);
}

// score[0 .. n] of n logits, as `kind`, one of ip_score, says.
inline void expert_scores(const float *logits, int64_t n, int32_t kind, float *score) {
  if (kind == IP_SQRT_SOFTPLUS) {
    for (int64_t c = 0; c < n; c += kRegisterLanes)
      store_floats(score + c, sqrt_softplus(load_floats(logits + c, n - c)), n - c);
    return;
  }
  bool sigmoid = kind == IP_SIGMOID;
  float top = logits[argmax_index(logits, n)], all = 0;
  for (int64_t c = 0; c < n; c += kRegisterLanes) {
    Floats x = load_floats(logits + c, n - c);
    store_floats(score + c, sigmoid ? 1.0f / (1.0f + vexp(-x)) : vexp(x - top), n - c);
  }
  if (sigmoid) return;
  for (int64_t e = 0; e < n; e++) all += score[e];
  for (int64_t e = 0; e < n; e++) score[e] /= all;
}

// Sets choice[e] to -inf for experts outside of the x.top_groups best of x.groups equal groups. A group ranks by the
// sum of its best two experts if x.best_two, else by its best one.
inline void mask_other_groups(const ip_experts &x, float *choice) {
  float rank[kMaxExperts];
  int64_t each = x.experts / x.groups;
  for (int64_t g = 0; g < x.groups; g++) {
    float *of = choice + g * each;
    int64_t best = argmax_index(of, each);
    rank[g] = of[best];
    if (!x.best_two) continue;
    float second = -__builtin_inff();
    for (int64_t e = 0; e < each; e++)
      if (e != best && of[e] > second) second = of[e];
    rank[g] += second;
  }
  bool is_chosen[kMaxExperts] = {};
  for (int64_t i = 0; i < x.top_groups; i++) {
    int64_t g = argmax_index(rank, x.groups);
    is_chosen[g] = true, rank[g] = -__builtin_inff();
  }
  for (int64_t e = 0; e < x.experts; e++)
    if (!is_chosen[e / each]) choice[e] = -__builtin_inff();
}

// Writes the weights [x.top] of one token's experts `ids` from the scores of all: theirs times x.factor, divided by
// max(their sum, x.least_sum) + x.sum_eps if x.renormalize. By the calling thread.
inline void expert_weights(const ip_experts &x, const float *score, const int64_t *ids, float *weights) {
  float all = 0;
  for (int64_t j = 0; j < x.top; j++) all += weights[j] = score[ids[j]];
  if (all < x.least_sum) all = x.least_sum;
  float by = x.renormalize ? x.factor / (all + x.sum_eps + 1e-20f) : x.factor;
  for (int64_t j = 0; j < x.top; j++) weights[j] *= by;
}

// Writes the ids and weights [x.top] of one token's experts from its logits [x.experts]: the best ones by score plus
// bias (of the best groups), best first; the lower id among equals. Weights are of scores without bias (`expert_weights`).
// By the calling thread.
inline void route_token(const ip_experts &x, const float *logits, int64_t *ids, float *weights) {
  float score[kMaxExperts], choice[kMaxExperts];
  expert_scores(logits, x.experts, x.score, score);
  for (int64_t e = 0; e < x.experts; e++) choice[e] = x.bias ? score[e] + x.bias[e] : score[e];
  if (x.groups > 1) mask_other_groups(x, choice);
  bool is_taken[kMaxExperts] = {};
  for (int64_t j = 0; j < x.top; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < x.experts; e++)
      if (!is_taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
    is_taken[best] = true, ids[j] = best;
  }
  expert_weights(x, score, ids, weights);
}

}  // namespace
