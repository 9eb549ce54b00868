// Attention of many query tokens in float32 (floats.h).
//
// A thread takes some query tokens of a KV head's query heads and goes through the keys in spans, which it turns into the
// second-level cache with their values; some query rows at a time pass by. Scores, weights and results are rows of float32.
#pragma once
#include <float.h>

#include "gemm_floats.h"
#include "many_plan.h"
#include "weigh.h"

namespace {

constexpr int64_t kManySpan = 128;  // keys
constexpr int64_t kQueryRows = 24;  // query rows that stay near while a span passes by

// One KV head's part of a task.
struct Many {
  const Attend &a;
  const ManyTask &t;
  int64_t g, group;   // query heads are g * group + 0 .. group
  float *queries;     // [group, tokens, dim]
  float *keys;        // of a span: [kManySpan / 16, dim, 16]
  float *values;      // [v_dim / 16, kManySpan, 16]
  float *scores;      // [kQueryRows, kManySpan], overwritten by weights
  float *sums;        // [group, tokens, v_dim]
  float *top, *total; // [group, tokens]
  bf16 *read;         // keys or values read back from int8: [16, dim or v_dim]

  int64_t slot(int64_t key) const { return (int64_t)t.table[key / a.block] * a.block + key % a.block; }

  // Entries of a key in bf16; `to` is where they go when they must be read back.
  const bf16 *entries(const Kept &kept, int64_t key, int64_t width, bf16 *to) const {
    if (!kept.coded()) return kept.rows() + slot(key) * kept.stride + g * width;
    read_back(kept, slot(key), g * width, width, to);
    return to;
  }

  void begin() const {
    for (int64_t h = 0; h < group; h++)
      for (int64_t i = 0; i < t.tokens; i++) {
        const bf16 *from = a.q + ((t.first + i) * a.heads + g * group + h) * a.dim;
        float *to = queries + (h * t.tokens + i) * a.dim;
        for (int64_t c = 0; c < a.dim; c += kLanes) store(to + c, load16(from + c) * a.scale);
        top[h * t.tokens + i] = -FLT_MAX, total[h * t.tokens + i] = 0;
      }
    memset(sums, 0, (size_t)(group * t.tokens * a.v_dim) * sizeof(float));
  }

  // Keys and values first .. last; zeros behind the last key of sixteen.
  void lay(int64_t first, int64_t last) const {
    for (int64_t k = first; k < last; k += kPanelRows) {
      const bf16 *rows[kPanelRows];
      int64_t have = min64(kPanelRows, last - k);
      for (int64_t i = 0; i < have; i++) rows[i] = entries(a.k, k + i, a.dim, read + i * a.dim);
      turn(rows, have, a.dim, keys + (k - first) * a.dim);
      for (int64_t i = 0; i < have; i++) {
        const bf16 *from = entries(a.v, k + i, a.v_dim, read);
        for (int64_t d = 0; d < a.v_dim; d += kPanelRows)
          store(values + (d / kPanelRows * kManySpan + k - first + i) * kPanelRows, load16(from + d));
      }
    }
  }

  // The keys that a query at `position` sees, of first .. last, counted from `first`.
  int64_t low(int64_t first, int64_t position) const {
    return a.window ? max64(0, position + 1 - a.window - first) : 0;
  }
  static int64_t high(int64_t first, int64_t last, int64_t position) { return min64(last, position + 1) - first; }

  // Scores of keys first .. last of a query row at `position` to weights in place; `o`: what was summed before, which is
  // brought to the new maximum.
  void weigh(int64_t first, int64_t last, int64_t position, float *s, float *highest, float *sum_of, float *o) const {
    int64_t padded = round_up(last - first, kLanes), from = low(first, position), to = high(first, last, position);
    if (from >= to) return;
    for (int64_t j = 0; j < from; j++) s[j] = -__builtin_inff();
    for (int64_t j = to; j < padded; j++) s[j] = -__builtin_inff();
    V most = all(*highest);
    for (int64_t j = 0; j < padded; j += kWide) most = larger(load<V>(s + j), most);
    float now = most[0];
    for (int l = 1; l < kWide; l++) now = most[l] > now ? most[l] : now;
    // Weights and their sum are 2^20 times too large, which their quotient does not show.
    auto weight = [](V below) { return below < kFar ? V{} : exp_scaled(below); };  // NaN is kept
    V sums_of = {};
    for (int64_t j = 0; j < padded; j += kWide) {
      V p = weight(load<V>(s + j) - now);
      sums_of += p;
      store(s + j, p);
    }
    if (now > *highest) {
      float change = weight(all(*highest - now))[0] * 0x1p-20f;
      for (int64_t d = 0; d < a.v_dim; d += kLanes) store(o + d, load<F>(o + d) * change);
      *sum_of *= change, *highest = now;
    }
    *sum_of += sum((__m256)sums_of);
  }

  // Adds the values of keys first .. last to a tile of query rows from `position` on, each times its weight. Keys that all of
  // them see are added together, the others row by row: a value that is not finite must not meet a weight of zero.
  void add_values(int64_t first, int64_t last, int64_t position, int64_t rows, const float *weights, float *o) const {
    int64_t from = low(first, position + rows - 1), to = high(first, last, position);
    auto add = [&](int64_t r, int64_t n, int64_t begin, int64_t end, int64_t d) {
      if (begin < end)
        tiles_floats(weights + r * kManySpan + begin, kManySpan, n, values + (d * kManySpan + begin * kPanelRows), end - begin,
                     false, o + r * a.v_dim + d, a.v_dim);
    };
    for (int64_t d = 0; d < a.v_dim; d += kPanelRows) {
      for (int64_t r = 0; r < rows; r++) {
        int64_t end = high(first, last, position + r);
        add(r, 1, low(first, position + r), from < to ? min64(from, end) : end, d);
      }
      if (from >= to) continue;
      add(0, rows, from, to, d);
      for (int64_t r = 0; r < rows; r++) add(r, 1, to, high(first, last, position + r), d);
    }
  }

  void end() const {
    for (int64_t h = 0; h < group; h++)
      for (int64_t i = 0; i < t.tokens; i++) {
        const float *o = sums + (h * t.tokens + i) * a.v_dim;
        bf16 *to = a.out + ((t.first + i) * a.heads + g * group + h) * a.v_dim;
        for (int64_t d = 0; d < a.v_dim; d += kLanes) store16(to + d, load<F>(o + d) / total[h * t.tokens + i]);
      }
  }

  void run() const {
    begin();
    int64_t end_key = t.position + t.tokens;
    for (int64_t first = low(0, t.position); first < end_key; first += kManySpan) {
      int64_t last = min64(first + kManySpan, end_key);
      lay(first, last);
      for (int64_t u = 0; u < group * t.tokens;) {
        int64_t token = u % t.tokens, rows = min64(kQueryRows, t.tokens - token), position = t.position + token;
        int64_t seen = min64(last, position + rows);
        if (first < seen) {
          for (int64_t k = 0; k < seen - first; k += kPanelRows)
            tiles_floats(queries + u * a.dim, a.dim, rows, keys + k * a.dim, a.dim, true, scores + k, kManySpan);
          for (int64_t r = 0; r < rows; r++)
            weigh(first, seen, position + r, scores + r * kManySpan, top + u + r, total + u + r, sums + (u + r) * a.v_dim);
          for (int64_t r = 0; r < rows; r += kTileRows)
            add_values(first, seen, position + r, min64(kTileRows, rows - r), scores + r * kManySpan,
                       sums + (u + r) * a.v_dim);
        }
        u += rows;
      }
    }
    end();
  }
};

inline void attend_many(Team &team, const Attend &a, const ManyPlan &plan) {
  int64_t group = a.heads / a.kv_heads, rows = group * plan.tokens;
  team.each(plan.count * a.kv_heads, 1, [&](int64_t first, int64_t last) {
    float *queries = scratch(0)->get<float>(rows * a.dim);
    float *sums = scratch(8)->get<float>(rows * (a.v_dim + 2));
    float *keys = scratch(9)->get<float>(kManySpan * (a.dim + a.v_dim + kQueryRows));
    float *values = keys + kManySpan * a.dim, *scores = values + kManySpan * a.v_dim;
    bf16 *read = scratch(14)->get<bf16>(kPanelRows * max64(a.dim, a.v_dim));
    for (int64_t u = first; u < last; u++)  // head by head, so that its keys and values stay near
      Many{a, plan.tasks[plan.count - 1 - u % plan.count], u / plan.count, group, queries, keys, values, scores, sums,
           sums + rows * a.v_dim, sums + rows * (a.v_dim + 1), read}
          .run();
  });
}

}  // namespace
