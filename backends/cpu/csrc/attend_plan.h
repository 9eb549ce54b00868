// What attention is asked for, and how it is cut into tasks.
//
// Keys are taken in spans of kSpan positions counted from the sequence's beginning. A span gives a partial result
// (maximum, sum, weighted values); partial results are merged in order. Spans may be computed by several threads, and
// the arithmetic is the same whoever computes them, however many queries are asked together: chunk-invariant.
#pragma once
#include "fetch.h"

namespace {

constexpr int64_t kSpan = 256;
constexpr int64_t kWindow = 32;       // keys whose values are weighed for one head after the other while they are near
constexpr int64_t kAheadKeys = 16;     // keys, or their values, that are on their way
constexpr int64_t kHeadsAtOnce = 16;  // KV heads of a unit of work at most

struct Attend {
  const bf16 *q;            // [tokens, heads, dim]
  Kept k, v;                // of a slot and head g: `dim` entries from g * dim, `v_dim` entries from g * v_dim; latents: v is k
  int64_t heads, kv_heads, dim, v_dim, block, window;
  float scale;
  bf16 *out;                // [tokens, heads, v_dim]
  bool latents() const { return v.data == k.data; }
  // A decision by the model's sizes alone: a score must not depend on how many ask.
  bool tiles() const { return heads >= 8 * kv_heads; }
  // Int8 entries with one scale a key, so that sums may be scaled in place of them.
  bool codes() const { return k.coded() && !latents(); }
};

inline Attend attend_on(const ip_cache &c, const bf16 *q, int64_t heads, int64_t kv_heads, int64_t dim, int64_t v_dim,
                        int64_t window, float scale, bf16 *out) {
  bool latents = c.v == c.k;
  Kept k = keys_of(c, kv_heads * dim);
  return {q, k, latents ? k : values_of(c, kv_heads * v_dim), heads, kv_heads, dim, v_dim, c.block, window, scale, out};
}

// Some query tokens of a sequence, and the spans they look at.
struct AttendTask {
  int64_t first, tokens;    // rows of q
  int64_t position;         // of the first one
  const int32_t *table;
  int64_t span, spans;      // this task's
  int64_t part;             // first partial result; all spans of a token stand together
  int64_t all_spans, first_span;
};

struct AttendPlan {
  AttendTask *tasks = nullptr;
  int64_t count = 0, parts = 0;
  float *partial = nullptr;  // [parts, heads, 2 + v_dim], when spans are shared out
  bool shared = false;
  bool whole = false;        // each sequence is one task: nobody looks at keys that another task of the step writes
  int64_t heads = 1;         // KV heads of a unit of work, which stand side by side in the cache
};

// As many as leave each thread equally much to do: then a thread reads long runs of the cache, which processors foresee.
inline int64_t heads_at_once(const Attend &a, int64_t tasks, int threads) {
  for (int64_t h = min64(a.kv_heads, kHeadsAtOnce); h > 1; h--) {
    int64_t units = tasks * (a.kv_heads / h);
    if (a.kv_heads % h == 0 && (units % threads == 0 || units >= 8 * threads)) return h;
  }
  return 1;
}

inline int64_t part_size(const Attend &a) { return 2 + round_up(a.v_dim, kLanes); }

inline AttendPlan plan_attention(const Attend &a, const ip_batch &b, int threads, Scratch s[2]) {
  int64_t group = a.heads / a.kv_heads, tile = max64(1, 16 / group), most = 0, units = 0, longest = 0, sequences = 0;
  auto spans_of = [&](int64_t position, int64_t tokens, int64_t *first) {
    int64_t low = a.window ? max64(0, position + 1 - a.window) : 0;
    *first = low / kSpan;
    return (position + tokens - 1) / kSpan + 1 - *first;
  };
  for (int64_t i = 0; i < b.sequences; i++) {
    if (!b.lens[i]) continue;
    int64_t n = b.start[i + 1] - b.start[i], first;
    sequences++, units += (n + tile - 1) / tile;
    longest = max64(longest, spans_of(b.lens[i] - n, n, &first));
    most += (n + tile - 1) / tile * (spans_of(b.lens[i] - n, n, &first) + 1);
  }
  AttendPlan plan;
  plan.shared = threads > 1 && longest > 1 && (units * a.kv_heads < 4 * threads || units < threads);
  plan.tasks = s[0].get<AttendTask>(max64(most, 1));
  for (int64_t i = 0; i < b.sequences; i++) {
    if (!b.lens[i]) continue;
    int64_t n = b.start[i + 1] - b.start[i];
    for (int64_t t = 0; t < n; t += tile) {
      AttendTask task = {b.start[i] + t, min64(tile, n - t), b.lens[i] - n + t, b.tables + i * b.table_width,
                         0, 0, plan.parts, 0, 0};
      task.all_spans = spans_of(task.position, task.tokens, &task.first_span);
      task.span = task.first_span, task.spans = plan.shared ? 1 : task.all_spans;
      for (int64_t c = 0; c < (plan.shared ? task.all_spans : 1); c++, task.span++) plan.tasks[plan.count++] = task;
      plan.parts += task.tokens * task.all_spans;
    }
  }
  plan.whole = !plan.shared && plan.count == units && units == sequences;
  plan.heads = heads_at_once(a, max64(plan.count, 1), threads);
  if (plan.shared) plan.partial = s[1].get<float>(plan.parts * a.heads * part_size(a));
  return plan;
}

}  // namespace
