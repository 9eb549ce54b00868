// The arguments of attention over a paged cache, and how a call is divided into tasks. isa_entries.h and the layers
// plan a call once, before the team starts; paged_attention.h computes it.
//
// Keys are taken in spans of kSpan positions, counted from the sequence's beginning. A span gives a partial result
// (maximum, sum, weighted values); partial results are merged in order. Several threads may compute the spans of a
// query; the arithmetic is the same for every division and every number of queries in the call: results are
// chunk-invariant.
#pragma once
#include "attention/kv_prefetch.h"

namespace {

// Keys per span.
constexpr int64_t kSpan = 256;
// Keys whose values are added up for one head after the other while they are in the cache.
constexpr int64_t kValueWindow = 32;
constexpr int64_t kPrefetchKeys = 16;  // keys, or their values, that are prefetched ahead of their use
constexpr int64_t kMaxHeadsPerUnit = 16;  // at most this many KV heads are one unit of work

// What attention computes: softmax(scale q k^T) v for `heads` query heads, each group of heads / kv_heads on one KV
// head. `block` is the cache's block size, `window` how many keys a query sees (0: all before it).
struct AttentionArgs {
  const bf16 *q;  // [tokens, heads, dim]
  KvEntries k, v;  // of a slot and KV head g: `dim` entries from g * dim on, `v_dim` entries from g * v_dim on
  int64_t heads, kv_heads, dim, v_dim, block, window;
  float scale;
  bf16 *out;  // [tokens, heads, v_dim]
  const float *sinks = nullptr;  // [heads]: each softmax has one more score, whose weight falls on no value; or null
  float softcap = 0;  // a score s counts as softcap tanh(s / softcap); 0: as it is
  // Whether the cache keeps latents: then v is the beginning of k, and kv_heads is 1.
  bool has_latents() const { return v.data == k.data; }
  // Whether scores are computed on tiles. The model's sizes alone decide: a score must not depend on the number of
  // queries.
  bool uses_tiles() const { return heads >= 8 * kv_heads; }
  // Whether keys are int8 with one scale per key and head, so that scores may be scaled in place of the entries.
  bool has_int8_keys() const { return k.is_int8() && v.is_int8() && !has_latents(); }
};

// The arguments for one layer's cache; `out` [tokens, heads, v_dim]. A cache with v == k keeps latents: then values are
// the first v_dim entries of a key.
inline AttentionArgs attention_args(const ip_cache &c, const bf16 *q, int64_t heads, int64_t kv_heads, int64_t dim,
                                    int64_t v_dim, int64_t window, float scale, bf16 *out) {
  bool has_latents = c.v == c.k;
  KvEntries k = key_entries(c, kv_heads * dim);
  return {q, k, has_latents ? k : value_entries(c, kv_heads * v_dim), heads, kv_heads, dim, v_dim, c.block, window,
          scale, out};
}

// Query tokens of one sequence, and the spans that they look at.
struct AttentionTask {
  int64_t first, tokens;  // rows of q
  int64_t position;  // the first token's position
  const int32_t *table;  // the sequence's block table
  int64_t span, spans;  // the first span and the number of spans of this task
  int64_t part;  // the first partial result; all spans of a token stand together
  int64_t all_spans, first_span;  // the same for all spans of these tokens, also those that are other tasks
};

// The tasks of a call: `count` of them, with `parts` partial results per head. `spans_shared`: each task is one span,
// and results are merged after a barrier; else a task is all spans of its tokens.
struct AttentionPlan {
  AttentionTask *tasks = nullptr;
  int64_t count = 0, parts = 0;
  float *partial = nullptr;  // [parts, heads, part_size], if several threads compute the spans of a token
  bool spans_shared = false;
  bool one_task_per_sequence = false;  // then no task looks at keys that another task of the step writes
  int64_t heads = 1;  // KV heads of one unit of work, side by side in the cache
};

// Floats of one partial result: maximum, sum of weights, and v_dim weighted values, padded to a multiple of 16.
inline int64_t part_size(const AttentionArgs &args) { return 2 + round_up(args.v_dim, kLanes); }

// Query tokens of one sequence that are one task, and the spans that they look at: `token` is the first one's row of q,
// `position` its position, `first_key` the first key that it sees.
struct QueryTile {
  int64_t sequence, token, tokens, position, first_key, first_span, spans;
  // Keys that the tile sees in the span with this number, times tokens.
  int64_t work(int64_t span) const {
    return tokens * (min64((span + 1) * kSpan, position + tokens) - max64(span * kSpan, first_key));
  }
};

// Calls f(tile) for each tile of query tokens of the batch, in order: tokens that fill about 16 query rows per KV head.
// Padded sequences (length 0) have no tiles.
template <class Fn>
inline void for_each_query_tile(const AttentionArgs &args, const ip_batch &batch, Fn f) {
  int64_t rows = max64(1, 16 / (args.heads / args.kv_heads));
  for (int64_t i = 0; i < batch.sequences; i++) {
    int64_t n = batch.start[i + 1] - batch.start[i];
    for (int64_t t = 0; t < n && batch.lens[i]; t += rows) {
      int64_t tokens = min64(rows, n - t), position = batch.lens[i] - n + t;
      int64_t first_key = args.window ? max64(0, position + 1 - args.window) : 0, first = first_key / kSpan;
      f(QueryTile{i, batch.start[i] + t, tokens, position, first_key, first,
                  (position + tokens - 1) / kSpan + 1 - first});
    }
  }
}

// Estimates the work (keys times tokens times heads) of the thread that has most of it, if a thread that is free takes
// the next unit: `heads` KV heads of one span of a task if `spans_shared`, else of all its spans.
inline int64_t estimate_longest_work(const AttentionArgs &args, const ip_batch &batch, int threads, bool spans_shared,
                                     int64_t heads) {
  constexpr int64_t kMaxScheduledUnits = 64;  // of more units, only the largest and the sum are considered
  int64_t load[kMaxShares] = {}, total = 0, largest = 0, units = 0, num_threads = min64(threads, kMaxShares);
  auto add = [&](int64_t work) {
    for (int64_t h = 0; h < args.kv_heads; h += heads, units++) {
      int64_t *least = load;
      for (int64_t t = 1; t < num_threads && units < kMaxScheduledUnits; t++)
        if (load[t] < *least) least = load + t;
      *least += work * heads, total += work * heads;
    }
    largest = max64(largest, work * heads);
  };
  for_each_query_tile(args, batch, [&](const QueryTile &t) {
    int64_t all = 0;
    for (int64_t c = t.first_span; c < t.first_span + t.spans; c++) {
      if (spans_shared) add(t.work(c));
      all += t.work(c);
    }
    if (!spans_shared) add(all);
  });
  if (units > kMaxScheduledUnits || threads > kMaxShares) return total / threads + largest;
  for (int64_t t = 1; t < num_threads; t++) load[0] = max64(load[0], load[t]);
  return load[0];
}

// Sets plan.heads, how many KV heads are a unit of work, and plan.spans_shared, whether several threads compute the
// spans of a task. It takes as many heads as cost no more than a tenth of the time, since then a thread reads long runs
// of the cache, which processors prefetch. Spans are shared only if that helps, since it takes one more barrier.
// `any_has_many_spans`: some tile has more than one span; else spans are not shared.
inline void choose_split(AttentionPlan &plan, const AttentionArgs &args, const ip_batch &batch, int threads,
                         bool any_has_many_spans) {
  int64_t best = INT64_MAX;
  for (int pass = 0; pass < 2; pass++)
    for (int64_t h = min64(args.kv_heads, kMaxHeadsPerUnit); h > 0; h--)
      for (int spans_shared = 0; spans_shared <= (any_has_many_spans && threads > 1) && args.kv_heads % h == 0;
           spans_shared++) {
        int64_t time = threads > 1 ? estimate_longest_work(args, batch, threads, spans_shared, h) : 0;
        if (pass && time <= best + best / 10) {
          plan.heads = h, plan.spans_shared = spans_shared;
          return;
        }
        best = min64(best, time);
      }
}

// The tasks of a batch for a team of `threads`, in memory of `s`: tasks, and partial results if spans are shared.
// Called by the leading thread before the team starts; the team reads the plan until the next call.
inline AttentionPlan plan_attention(const AttentionArgs &args, const ip_batch &batch, int threads, Workspace s[2]) {
  int64_t most = 0, units = 0, sequences = 0, before = -1;
  bool any_has_many_spans = false;
  for_each_query_tile(args, batch, [&](const QueryTile &t) {
    units++, most += t.spans, sequences += t.sequence != before, any_has_many_spans |= t.spans > 1;
    before = t.sequence;
  });
  AttentionPlan plan;
  choose_split(plan, args, batch, threads, any_has_many_spans);
  plan.tasks = s[0].reserve<AttentionTask>(max64(most, 1));
  for_each_query_tile(args, batch, [&](const QueryTile &t) {
    AttentionTask task = {t.token,      t.tokens, t.position, batch.tables + t.sequence * batch.table_width,
                          t.first_span, t.spans, plan.parts, t.spans, t.first_span};
    if (plan.spans_shared) task.spans = 1;
    for (int64_t c = 0; c < (plan.spans_shared ? t.spans : 1); c++, task.span++) plan.tasks[plan.count++] = task;
    plan.parts += t.tokens * t.spans;
  });
  plan.one_task_per_sequence = !plan.spans_shared && units == sequences;
  if (plan.spans_shared) plan.partial = s[1].reserve<float>(plan.parts * args.heads * part_size(args));
  return plan;
}

}  // namespace
