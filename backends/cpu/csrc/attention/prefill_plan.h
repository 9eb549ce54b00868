// Divides attention of many query tokens into tasks. prefill_tiles.h and prefill_float32.h compute them; sequences with
// few query tokens are left to paged_attention.h.
#pragma once
#include "attention/paged_attention.h"

namespace {

// Query tokens of a task, for each head of a group; half as many if there are few tasks.
constexpr int64_t kMaxTaskTokens = 128;
constexpr int64_t kMaxDecodeTokens = 8;  // sequences with no more query tokens are left to `attend`

// Query tokens of one sequence that are one task, for each KV head.
struct PrefillTask {
  int64_t first, tokens, position;  // rows of q, and the first row's position
  const int32_t *table;
};

// The tasks of a batch.
struct PrefillPlan {
  PrefillTask *tasks = nullptr;
  int64_t count = 0, num_decode = 0;  // the first `num_decode` sequences are left to `attend`
  int64_t tokens = kMaxTaskTokens;
};

// Whether sizes suit attention of many tokens: dim and v_dim are multiples of 32, at most 256, and blocks of the cache
// are a multiple of 16 keys.
inline bool can_prefill(const AttentionArgs &args) {
  return args.dim % 32 == 0 && args.v_dim % 32 == 0 && args.dim <= 256 && args.v_dim <= 256 && args.block % 16 == 0;
}

// The tasks of a batch whose sequences with few query tokens come first, in memory of `s`: plan.num_decode counts those
// (the caller computes them with `attend`); every other sequence that is not padding is divided into tasks of at most
// plan.tokens query tokens. Called by the leading thread before the team starts.
inline PrefillPlan plan_prefill(const ip_batch &batch, int64_t kv_heads, int threads, Workspace *s) {
  PrefillPlan plan;
  while (plan.num_decode < batch.sequences &&
         batch.start[plan.num_decode + 1] - batch.start[plan.num_decode] <= kMaxDecodeTokens)
    plan.num_decode++;
  int64_t all = batch.start[batch.sequences] - batch.start[plan.num_decode];
  if (all * kv_heads < 4 * threads * kMaxTaskTokens) plan.tokens = kMaxTaskTokens / 2;
  plan.tasks = s->reserve<PrefillTask>(all / plan.tokens + batch.sequences);
  for (int64_t i = plan.num_decode; i < batch.sequences; i++) {
    int64_t n = batch.start[i + 1] - batch.start[i];
    if (!batch.lens[i]) continue;
    for (int64_t t = 0; t < n; t += plan.tokens)
      plan.tasks[plan.count++] = {batch.start[i] + t, min64(plan.tokens, n - t), batch.lens[i] - n + t,
                                  batch.tables + i * batch.table_width};
  }
  return plan;
}

}  // namespace
