// Attention of many query tokens in float32 (float32_tiles.h), reached through prefill.h.
//
// A thread takes some query tokens of a KV head's query heads and goes through the keys in spans, which it transposes
// into the second-level cache with their values; some query rows at a time pass by. Scores, weights and results are
// rows of float32.
#pragma once
#include <float.h>
#include <math.h>

#include "products/gemm_float32.h"
#include "attention/prefill_plan.h"
#include "sampling/token_weights.h"

namespace {

constexpr int64_t kPrefillSpan = 128;  // keys of a span
constexpr int64_t kQueryRows = 24;  // query rows that pass by a span together

// One KV head's part of a task: its query rows against all keys that they see.
struct PrefillHead {
  const AttentionArgs &args;
  const PrefillTask &t;
  int64_t g, group;  // query heads are g * group + 0 .. group
  float *queries;  // [group, tokens, dim]
  float *keys;  // of a span: [kPrefillSpan / 16, dim, 16]
  float *values;  // [v_dim / 16, kPrefillSpan, 16]
  float *scores;  // [kQueryRows, kPrefillSpan], overwritten by weights
  float *sums;  // [group, tokens, v_dim]
  float *top, *total;  // [group, tokens]: maximum of scores, sum of weights
  bf16 *entry_buffer;  // keys or values converted to bf16: [16, dim or v_dim]

  // The cache slot of a key, given by its position.
  int64_t slot(int64_t key) const { return (int64_t)t.table[key / args.block] * args.block + key % args.block; }

  // The `width` entries of a key, or of its value, for this KV head in bf16: a pointer into a bf16 cache; other entries
  // are dequantized to `to`, which is returned.
  const bf16 *load_entries(const KvEntries &entries, int64_t key, int64_t width, bf16 *to) const {
    if (entries.is_bf16()) return entries.bf16_entries() + slot(key) * entries.stride + g * width;
    dequantize_entries(entries, slot(key), g * width, width, to);
    return to;
  }

  // Writes `queries`: the task's query rows in float32, times args.scale. Clears `sums` and `total`, and sets `top` to
  // -FLT_MAX.
  void load_queries() const {
    for (int64_t h = 0; h < group; h++)
      for (int64_t i = 0; i < t.tokens; i++) {
        const bf16 *from = args.q + ((t.first + i) * args.heads + g * group + h) * args.dim;
        float *to = queries + (h * t.tokens + i) * args.dim;
        for (int64_t c = 0; c < args.dim; c += kLanes) store(to + c, load_f32x16(from + c) * args.scale);
        top[h * t.tokens + i] = -FLT_MAX, total[h * t.tokens + i] = 0;
      }
    memset(sums, 0, (size_t)(group * t.tokens * args.v_dim) * sizeof(float));
  }

  // Fills `keys` and `values` with keys first .. last, at most kPrefillSpan, in float32 (int8 entries dequantized):
  // `keys` in groups of sixteen keys, transposed [dim, 16], with zeros up to a multiple of sixteen keys; `values` in
  // panels of sixteen columns [v_dim / 16, kPrefillSpan, 16], where entries from key `last` on keep what they held.
  void load_span(int64_t first, int64_t last) const {
    for (int64_t k = first; k < last; k += kPanelRows) {
      const bf16 *rows[kPanelRows];
      int64_t have = min64(kPanelRows, last - k);
      for (int64_t i = 0; i < have; i++) rows[i] = load_entries(args.k, k + i, args.dim, entry_buffer + i * args.dim);
      transpose_rows(rows, have, args.dim, keys + (k - first) * args.dim);
      for (int64_t i = 0; i < have; i++) {
        const bf16 *from = load_entries(args.v, k + i, args.v_dim, entry_buffer);
        for (int64_t d = 0; d < args.v_dim; d += kPanelRows)
          store(values + (d / kPanelRows * kPrefillSpan + k - first + i) * kPanelRows, load_f32x16(from + d));
      }
    }
  }

  // The first key that a query at `position` sees, counted from key `first`; 0 if it sees that one or earlier ones.
  int64_t first_visible(int64_t first, int64_t position) const {
    return args.window ? max64(0, position + 1 - args.window - first) : 0;
  }
  // The end of the keys that a query at `position` sees among first .. last, counted from key `first`; 0 or negative if
  // it sees none.
  static int64_t end_visible(int64_t first, int64_t last, int64_t position) {
    return min64(last, position + 1) - first;
  }

  // Scores s[j] of keys first + j, up to `last`, of a query row at `position` become weights in place; weights of keys
  // that it does not see, up to a multiple of 16, become zero. Updates the row's maximum and sum of weights; `sums_row`
  // [v_dim], the weighted values so far, and the sum are rescaled if the maximum has grown. If the row sees none of the
  // keys, nothing changes.
  void softmax_row(int64_t first, int64_t last, int64_t position, float *s, float *row_maximum, float *weight_sum,
                   float *sums_row) const {
    int64_t padded = round_up(last - first, kLanes), from = first_visible(first, position),
            to = end_visible(first, last, position);
    if (from >= to) return;
    for (int64_t j = 0; args.softcap > 0 && j < padded; j += kRegisterLanes)
      store(s + j, soft_cap(load<Floats>(s + j), args.softcap));
    for (int64_t j = 0; j < from; j++) s[j] = -__builtin_inff();
    for (int64_t j = to; j < padded; j++) s[j] = -__builtin_inff();
    Floats most = splat_floats(*row_maximum);
    for (int64_t j = 0; j < padded; j += kRegisterLanes) most = max_floats(load<Floats>(s + j), most);
    float maximum = most[0];
    for (int l = 1; l < kRegisterLanes; l++) maximum = most[l] > maximum ? most[l] : maximum;
    // Weights and their sum are 2^20 times too large, which cancels in their quotient.
    auto weight = [](Floats below) { return below < kExponentFloor ? Floats{} : exp_scaled(below); };  // NaN is kept
    Floats weight_sums = {};
    for (int64_t j = 0; j < padded; j += kRegisterLanes) {
      Floats p = weight(load<Floats>(s + j) - maximum);
      weight_sums += p;
      store(s + j, p);
    }
    if (maximum > *row_maximum) {
      float change = weight(splat_floats(*row_maximum - maximum))[0] * 0x1p-20f;
      for (int64_t d = 0; d < args.v_dim; d += kLanes) store(sums_row + d, load<F32x16>(sums_row + d) * change);
      *weight_sum *= change, *row_maximum = maximum;
    }
    *weight_sum += sum_lanes((__m256)weight_sums);
  }

  // Adds the values of keys first .. last to `rows` query rows (at most kFloatTileRows) from `position` on, each times
  // its weight: row r's weights are weights[r * kPrefillSpan + key - first], its sums at sums_row + r * v_dim. Keys
  // that all rows see are added together, the others row by row: a value that is not finite must not meet a weight of
  // zero.
  void add_values(int64_t first, int64_t last, int64_t position, int64_t rows, const float *weights,
                  float *sums_row) const {
    int64_t from = first_visible(first, position + rows - 1), to = end_visible(first, last, position);
    auto add = [&](int64_t r, int64_t n, int64_t begin, int64_t end, int64_t d) {
      if (begin < end)
        multiply_float_tiles(weights + r * kPrefillSpan + begin, kPrefillSpan, n,
                             values + (d * kPrefillSpan + begin * kPanelRows), end - begin,
                             false, sums_row + r * args.v_dim + d, args.v_dim);
    };
    for (int64_t d = 0; d < args.v_dim; d += kPanelRows) {
      for (int64_t r = 0; r < rows; r++) {
        int64_t end = end_visible(first, last, position + r);
        add(r, 1, first_visible(first, position + r), from < to ? min64(from, end) : end, d);
      }
      if (from >= to) continue;
      add(0, rows, from, to, d);
      for (int64_t r = 0; r < rows; r++) add(r, 1, to, end_visible(first, last, position + r), d);
    }
  }

  // args.out = sums / total in bf16, for the task's tokens and this KV head's query heads.
  void store_results() const {
    for (int64_t h = 0; h < group; h++)
      for (int64_t i = 0; i < t.tokens; i++) {
        const float *sums_row = sums + (h * t.tokens + i) * args.v_dim;
        bf16 *to = args.out + ((t.first + i) * args.heads + g * group + h) * args.v_dim;
        float all = total[h * t.tokens + i];
        if (args.sinks) all += expf(args.sinks[g * group + h] - top[h * t.tokens + i]) * 0x1p20f;
        for (int64_t d = 0; d < args.v_dim; d += kLanes)
          store_bf16x16(to + d, load<F32x16>(sums_row + d) / all);
      }
  }

  // Computes this KV head's part of the task, span by span, and writes its results to args.out.
  void run() const {
    load_queries();
    int64_t end_key = t.position + t.tokens;
    for (int64_t first = first_visible(0, t.position); first < end_key; first += kPrefillSpan) {
      int64_t last = min64(first + kPrefillSpan, end_key);
      load_span(first, last);
      for (int64_t u = 0; u < group * t.tokens;) {
        int64_t token = u % t.tokens, rows = min64(kQueryRows, t.tokens - token), position = t.position + token;
        int64_t seen = min64(last, position + rows);
        if (first < seen) {
          for (int64_t k = 0; k < seen - first; k += kPanelRows)
            multiply_float_tiles(queries + u * args.dim, args.dim, rows, keys + k * args.dim, args.dim, true,
                                 scores + k, kPrefillSpan);
          for (int64_t r = 0; r < rows; r++)
            softmax_row(first, seen, position + r, scores + r * kPrefillSpan, top + u + r, total + u + r,
                        sums + (u + r) * args.v_dim);
          for (int64_t r = 0; r < rows; r += kFloatTileRows)
            add_values(first, seen, position + r, min64(kFloatTileRows, rows - r), scores + r * kPrefillSpan,
                       sums + (u + r) * args.v_dim);
        }
        u += rows;
      }
    }
    store_results();
  }
};

// Attention of all tasks of a plan, written to args.out. Every thread of the team calls it; queries and cache are
// complete; `args.out` is complete after the next `barrier`.
inline void attend_prefill(Team &team, const AttentionArgs &args, const PrefillPlan &plan) {
  int64_t group = args.heads / args.kv_heads, rows = group * plan.tokens;
  team.for_each_chunk(plan.count * args.kv_heads, 1, [&](int64_t first, int64_t last) {
    float *queries = workspace(kActivationRows)->reserve<float>(rows * args.dim);
    float *sums = workspace(kScores)->reserve<float>(rows * (args.v_dim + 2));
    float *keys = workspace(kPartialResults)->reserve<float>(kPrefillSpan * (args.dim + args.v_dim + kQueryRows));
    float *values = keys + kPrefillSpan * args.dim, *scores = values + kPrefillSpan * args.v_dim;
    bf16 *entry_buffer = workspace(kEntriesInBf16)->reserve<bf16>(kPanelRows * max64(args.dim, args.v_dim));
    for (int64_t u = first; u < last; u++)  // head by head, so that its keys and values stay in the cache
      PrefillHead{args, plan.tasks[plan.count - 1 - u % plan.count], u / plan.count, group, queries, keys, values,
                  scores, sums, sums + rows * args.v_dim, sums + rows * (args.v_dim + 1), entry_buffer}
          .run();
  });
}

}  // namespace
