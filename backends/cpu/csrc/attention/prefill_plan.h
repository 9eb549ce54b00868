// How attention of many query tokens is cut into tasks.
#pragma once
#include "attend.h"

namespace {

constexpr int64_t kManyTokens = 128; // query tokens of a task, for each head of a group; half as many if tasks are few
constexpr int64_t kFewTokens = 8;    // sequences with more are attended to here

struct ManyTask {
  int64_t first, tokens, position;  // rows of q, and the first one's position
  const int32_t *table;
};

struct ManyPlan {
  ManyTask *tasks = nullptr;
  int64_t count = 0, few = 0;  // sequences that are left to `attend`: those before
  int64_t tokens = kManyTokens;
};

inline bool attends_many(const Attend &a) {
  return a.dim % 32 == 0 && a.v_dim % 32 == 0 && a.dim <= 256 && a.v_dim <= 256 && a.block % 16 == 0;
}

inline ManyPlan plan_many(const ip_batch &b, int64_t kv_heads, int threads, Scratch *s) {
  ManyPlan plan;
  while (plan.few < b.sequences && b.start[plan.few + 1] - b.start[plan.few] <= kFewTokens) plan.few++;
  int64_t all = b.start[b.sequences] - b.start[plan.few];
  if (all * kv_heads < 4 * threads * kManyTokens) plan.tokens = kManyTokens / 2;
  plan.tasks = s->get<ManyTask>(all / plan.tokens + b.sequences);
  for (int64_t i = plan.few; i < b.sequences; i++) {
    int64_t n = b.start[i + 1] - b.start[i];
    if (!b.lens[i]) continue;
    for (int64_t t = 0; t < n; t += plan.tokens)
      plan.tasks[plan.count++] = {b.start[i] + t, min64(plan.tokens, n - t), b.lens[i] - n + t,
                                  b.tables + i * b.table_width};
  }
  return plan;
}

}  // namespace
