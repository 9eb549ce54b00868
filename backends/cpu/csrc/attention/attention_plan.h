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

inline int64_t part_size(const Attend &a) { return 2 + round_up(a.v_dim, kLanes); }

// Query tokens of one sequence that are one task, and the spans that they look at.
struct Tile {
  int64_t sequence, token, tokens, position, low, first_span, spans;
  // Keys of a span, for all tokens.
  int64_t work(int64_t span) const {
    return tokens * (min64((span + 1) * kSpan, position + tokens) - max64(span * kSpan, low));
  }
};

template <class Fn>
inline void each_tile(const Attend &a, const ip_batch &b, Fn f) {
  int64_t rows = max64(1, 16 / (a.heads / a.kv_heads));
  for (int64_t i = 0; i < b.sequences; i++) {
    int64_t n = b.start[i + 1] - b.start[i];
    for (int64_t t = 0; t < n && b.lens[i]; t += rows) {
      int64_t tokens = min64(rows, n - t), position = b.lens[i] - n + t;
      int64_t low = a.window ? max64(0, position + 1 - a.window) : 0, first = low / kSpan;
      f(Tile{i, b.start[i] + t, tokens, position, low, first, (position + tokens - 1) / kSpan + 1 - first});
    }
  }
}

// The work of the thread that has most of it, where who is free takes the next unit: a span of a task or all of them, and
// `heads` KV heads.
inline int64_t longest_of(const Attend &a, const ip_batch &b, int threads, bool shared, int64_t heads) {
  constexpr int64_t kCounted = 64;  // of more units only the largest and the sum are looked at
  int64_t load[kShares] = {}, total = 0, largest = 0, units = 0, some = min64(threads, kShares);
  auto add = [&](int64_t work) {
    for (int64_t h = 0; h < a.kv_heads; h += heads, units++) {
      int64_t *least = load;
      for (int64_t t = 1; t < some && units < kCounted; t++)
        if (load[t] < *least) least = load + t;
      *least += work * heads, total += work * heads;
    }
    largest = max64(largest, work * heads);
  };
  each_tile(a, b, [&](const Tile &t) {
    int64_t all = 0;
    for (int64_t c = t.first_span; c < t.first_span + t.spans; c++) {
      if (shared) add(t.work(c));
      all += t.work(c);
    }
    if (!shared) add(all);
  });
  if (units > kCounted || threads > kShares) return total / threads + largest;
  for (int64_t t = 1; t < some; t++) load[0] = max64(load[0], load[t]);
  return load[0];
}

// As many heads at once as cost no more than a tenth of the time: then a thread reads long runs of the cache, which
// processors foresee. Tasks are cut into spans only where that helps, since then there is one barrier more.
inline void cut(AttendPlan &plan, const Attend &a, const ip_batch &b, int threads, bool several) {
  int64_t best = INT64_MAX;
  for (int pass = 0; pass < 2; pass++)
    for (int64_t h = min64(a.kv_heads, kHeadsAtOnce); h > 0; h--)
      for (int shared = 0; shared <= (several && threads > 1) && a.kv_heads % h == 0; shared++) {
        int64_t time = threads > 1 ? longest_of(a, b, threads, shared, h) : 0;
        if (pass && time <= best + best / 10) {
          plan.heads = h, plan.shared = shared;
          return;
        }
        best = min64(best, time);
      }
}

inline AttendPlan plan_attention(const Attend &a, const ip_batch &b, int threads, Scratch s[2]) {
  int64_t most = 0, units = 0, sequences = 0, before = -1;
  bool several = false;
  each_tile(a, b, [&](const Tile &t) {
    units++, most += t.spans, sequences += t.sequence != before, several |= t.spans > 1;
    before = t.sequence;
  });
  AttendPlan plan;
  cut(plan, a, b, threads, several);
  plan.tasks = s[0].get<AttendTask>(max64(most, 1));
  each_tile(a, b, [&](const Tile &t) {
    AttendTask task = {t.token,      t.tokens, t.position, b.tables + t.sequence * b.table_width, t.first_span, t.spans,
                       plan.parts, t.spans,  t.first_span};
    if (plan.shared) task.spans = 1;
    for (int64_t c = 0; c < (plan.shared ? t.spans : 1); c++, task.span++) plan.tasks[plan.count++] = task;
    plan.parts += t.tokens * t.spans;
  });
  plan.whole = !plan.shared && units == sequences;
  if (plan.shared) plan.partial = s[1].get<float>(plan.parts * a.heads * part_size(a));
  return plan;
}

}  // namespace
