// Attention over a paged cache, for grouped queries and for latents.
//
// Keys are taken in spans of kSpan positions counted from the sequence's beginning. A span gives a partial result
// (maximum, sum, weighted values); partial results are merged in order. Spans may be computed by several threads, and
// the arithmetic is the same whoever computes them, however many queries are asked together: chunk-invariant.
#pragma once
#include "fetch.h"

namespace {

constexpr int64_t kSpan = 256;

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
};

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
  plan.shared = threads > 1 && longest > 1 && units * a.kv_heads < 4 * threads;
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
  if (plan.shared) plan.partial = s[1].get<float>(plan.parts * a.heads * part_size(a));
  return plan;
}

// part = {maximum, sum, values[v_dim]} of R heads of one token over keys low .. high of a span that begins at `begin`;
// values[j] points to those of key `begin + j`, which are multiplied with by[j] where `by` is not null. D registers of
// values are summed at a time; meanwhile `next` is fetched.
template <int R, int D, class Entry>
inline void weigh(const Attend &a, const Entry *const *values, const float *by, int64_t begin, int64_t low, int64_t high,
                  float *scores, float *part, int64_t stride, Fetch &next) {
  int64_t padded = round_up(high - begin, kLanes);
  for (int r = 0; r < R; r++) {
    float *s = scores + r * kSpan, *to = part + r * stride;
    for (int64_t j = 0; j < low - begin; j++) s[j] = -__builtin_inff();
    for (int64_t j = high - begin; j < padded; j++) s[j] = -__builtin_inff();
    F most = splat(-__builtin_inff()), all = F{};
    for (int64_t j = 0; j < padded; j += kLanes) {
      F v = load<F>(s + j) * a.scale;
      store(s + j, v);
      most = v > most ? v : most;
    }
    float top = most[0];
    for (int l = 1; l < kLanes; l++) top = most[l] > top ? most[l] : top;
    for (int64_t j = 0; j < padded; j += kLanes) {
      F p = vexp(load<F>(s + j) - top);
      all = all + p;
      store(s + j, by ? p * load<F>(by + j) : p);
    }
    to[0] = top;
    to[1] = sum(all);
  }
  for (int64_t c = 0; c < a.v_dim; c += D * kLanes) {
    F acc[R][D];
    for (int r = 0; r < R; r++)
      for (int d = 0; d < D; d++) acc[r][d] = F{};
    bool whole = c + D * kLanes <= a.v_dim;
    for (int64_t j = low; j < high; j++) {
      const Entry *v = values[j - begin] + c;
      next.some(1);
      F value[D];
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        value[d] = whole ? load16(v + d * kLanes)
                         : c + d * kLanes < a.v_dim ? load16(v + d * kLanes, a.v_dim - c - d * kLanes) : F{};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        F p = splat(scores[r * kSpan + j - begin]);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) acc[r][d] = fma(p, value[d], acc[r][d]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int d = 0; d < D && c + d * kLanes < a.v_dim; d++) store(part + r * stride + 2 + c + d * kLanes, acc[r][d]);
  }
}

// Registers in which a row of values is summed: of one or two query rows with wide values, and else. With all of a row in
// registers it is read once, from its beginning to its end.
#ifdef __AVX512F__
constexpr int kMost = 8, kFew = 4;
#else
constexpr int kMost = 1, kFew = 1;
#endif

// Query rows of a task as its keys want them.
struct Queries {
  Rows rows;
  Codes codes;
};

template <class RowAt>
inline Queries queries_of(const Attend &a, int64_t m, RowAt row) {
  if (a.codes() && !a.tiles()) return {{m, a.dim, 0, nullptr, nullptr, nullptr}, codes_of(scratch(0), m, a.dim, row)};
  return {rows_of(scratch(0), m, a.dim, row), {}};
}

// Weighs the values of a span with the scores of a task's tokens and one KV head.
template <class Entry>
inline void weigh_span(const Attend &a, const AttendTask &t, int64_t g, int64_t begin, int64_t end,
                       const Entry *const *values, const float *by, float *scores, float *part, int64_t token_stride,
                       int64_t stride, Fetch &next) {
  int64_t group = a.heads / a.kv_heads;
  bool wide = a.v_dim > kFew * kLanes;
  auto one = wide ? weigh<1, kMost, Entry> : weigh<1, kFew, Entry>;
  auto two = wide ? weigh<2, kMost, Entry> : weigh<2, kFew, Entry>;
  for (int64_t i = 0; i < t.tokens; i++) {
    int64_t high = min64(end, t.position + i + 1);
    int64_t low = a.window ? max64(begin, t.position + i + 1 - a.window) : begin;
    for (int64_t h = 0; h < group;) {
      float *s = scores + (i * group + h) * kSpan, *p = part + i * token_stride + (g * group + h) * stride;
      if (low >= high) {  // this token sees nothing of the span
        p[0] = -__builtin_inff(), p[1] = 0;
        memset(p + 2, 0, (size_t)(stride - 2) * sizeof(float));
        h += 1;
      } else if (h + 4 <= group) {
        weigh<4, kFew>(a, values, by, begin, low, high, s, p, stride, next), h += 4;
      } else if (h + 2 <= group) {
        two(a, values, by, begin, low, high, s, p, stride, next), h += 2;
      } else {
        one(a, values, by, begin, low, high, s, p, stride, next), h += 1;
      }
    }
  }
}

// The keys of a span that a task's tokens look at.
struct Keys {
  int64_t begin, from, end;  // of the span; those that are seen
  Keys(const Attend &a, const AttendTask &t, int64_t span)
      : begin(span * kSpan), from(a.window ? max64(begin, t.position + 1 - a.window) : begin),
        end(min64(begin + kSpan, t.position + t.tokens)) {}
};

inline Fetch fetch_keys(const Attend &a, const AttendTask &t, int64_t g, int64_t span) {
  Keys keys(a, t, span);
  return {a.k, t.table, a.block, keys.from, keys.end, g * a.dim, a.dim};
}

// The partial results of a task's tokens, for one KV head and one span: part[token * token_stride + head * stride]. While
// keys are read values are fetched, and `next` while these are read.
inline void attend_span(const Attend &a, const AttendTask &t, int64_t g, int64_t span, const Queries &q, float *part,
                        int64_t token_stride, int64_t stride, Fetch next) {
  const Keys seen(a, t, span);
  int64_t begin = seen.begin, from = seen.from, end = seen.end, m = q.rows.m;
  Fetch fetch(a.v, t.table, a.block, from, a.latents() ? from : end, g * a.v_dim, a.v_dim);
  float *scores = scratch(8)->get<float>((m + 2) * kSpan), *k_scale = scores + m * kSpan, *v_scale = k_scale + kSpan;
  bf16 *keys = scratch(14)->get<bf16>(a.k.coded() ? kSpan * a.dim : 0);  // in bf16
  const bf16 *values[kSpan];
  const int8_t *codes[kSpan];
  if (a.codes()) memset(k_scale, 0, 2 * kSpan * sizeof(float));
  // Whole blocks, also where the sequence ends within one: a key's score must not depend on what stands behind it.
  int64_t first_block = from / a.block, last_block = (end - 1) / a.block;
  for (int64_t b = first_block; b <= last_block; b++) {
    int64_t skip = max64(0, begin - b * a.block), n = min64(a.block, begin + kSpan - b * a.block) - skip;
    int64_t j = b * a.block + skip - begin, slot = (int64_t)t.table[b] * a.block + skip, ld = a.k.stride;
    const bf16 *k = a.k.rows() + slot * ld + g * a.dim;
    if (a.codes()) {
      const int8_t *of = a.k.codes() + slot * ld + g * a.dim;
      for (int64_t i = 0; i < n; i++) {
        codes[j + i] = a.v.codes() + (slot + i) * a.v.stride + g * a.v_dim;
        k_scale[j + i] = a.k.scale[(slot + i) * a.k.groups + g];
        v_scale[j + i] = a.v.scale[(slot + i) * a.v.groups + g];
        if (a.tiles()) widen_codes(of + i * ld, a.dim, keys + i * a.dim);
      }
      if (!a.tiles()) {
        fetch.some(n);
        codes_dot(of, ld, n, a.dim, q.codes, scores + j, kSpan);
        continue;
      }
      k = keys, ld = a.dim;
    } else {
      if (a.k.coded()) {
        k = keys + j * a.dim, ld = a.dim;
        for (int64_t i = 0; i < n; i++) read_back(a.k, slot + i, 0, a.dim, keys + (j + i) * a.dim);
      }
      const bf16 *v = a.latents() ? k : a.v.rows() + slot * a.v.stride + g * a.v_dim;
      for (int64_t i = 0; i < n; i++) values[j + i] = v + i * (a.latents() ? ld : a.v.stride);
    }
    if (a.tiles()) {
      fetch.some(n);
      dot(k, ld, n, a.dim, q.rows, 0, scores + j, kSpan);
      continue;
    }
    for (int64_t i = 0; i < n; i += 4) {
      fetch.some(4);
      dot_few(k + i * ld, ld, min64(4, n - i), a.dim, q.rows, 0, scores + j + i, kSpan);
    }
  }
  if (!a.codes()) return weigh_span(a, t, g, begin, end, values, nullptr, scores, part, token_stride, stride, next);
  for (int64_t r = 0; r < m; r++) {
    F by = splat(a.tiles() ? 1.0f : q.codes.scale[r]);
    float *s = scores + r * kSpan;
    for (int64_t j = 0; j < kSpan; j += kLanes) store(s + j, load<F>(s + j) * (load<F>(k_scale + j) * by));
  }
  weigh_span(a, t, g, begin, end, codes, v_scale, scores, part, token_stride, stride, next);
}

// Merges `count` partial results that stand `step` floats apart.
inline void merge_spans(const float *part, int64_t step, int64_t count, int64_t v_dim, bf16 *out) {
  float top = -__builtin_inff(), all = 0;
  for (int64_t i = 0; i < count; i++) top = part[i * step] > top ? part[i * step] : top;
  float weight[512];
  for (int64_t i0 = 0; i0 < count; i0 += 512)
    for (int64_t i = i0; i < min64(count, i0 + 512); i++)
      all += part[i * step + 1] * vexp(splat(part[i * step] - top))[0];
  for (int64_t c = 0; c < v_dim; c += kLanes) {
    F acc = F{};
    for (int64_t i = 0; i < count; i++) {
      if (c == 0 && i < 512) weight[i] = vexp(splat(part[i * step] - top))[0];
      float w = i < 512 ? weight[i] : vexp(splat(part[i * step] - top))[0];
      if (part[i * step + 1] > 0) acc = fma(splat(w), load<F>(part + i * step + 2 + c), acc);
    }
    store16(out + c, acc / all, v_dim - c);
  }
}

// KV head u % kv_heads of task u / kv_heads is a unit of work: the keys that it reads first.
inline Fetch fetch_unit(const Attend &a, const AttendPlan &plan, int64_t u) {
  if (u >= plan.count * a.kv_heads) return {};
  const AttendTask &t = plan.tasks[u / a.kv_heads];
  return fetch_keys(a, t, u % a.kv_heads, t.span);
}

// Has keys brought near before the queries are there.
inline void expect(Team &team, const Attend &a, const AttendPlan &plan) { fetch_unit(a, plan, team.id).some(kSpan); }

// `before(task, g)` is called by whoever takes a KV head of a task, before anything is read for it.
template <class Before>
inline void attend(Team &team, const Attend &a, const AttendPlan &plan, Before before, bool expected = false) {
  int64_t group = a.heads / a.kv_heads, size = part_size(a), expects = expected ? team.id : -1;
  team.each(plan.count * a.kv_heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const AttendTask &t = plan.tasks[u / a.kv_heads];
      int64_t g = u % a.kv_heads;
      if (u != expects) fetch_unit(a, plan, u).some(kSpan);
      expects = u + team.count;  // most likely
      Fetch next_unit = fetch_unit(a, plan, expects);
      before(t, g);
      Queries q = queries_of(a, t.tokens * group, [&](int64_t r) {
        return a.q + ((t.first + r / group) * a.heads + g * group + r % group) * a.dim;
      });
      if (plan.shared) {
        float *part = plan.partial + (t.part + t.span - t.first_span) * a.heads * size;
        attend_span(a, t, g, t.span, q, part, t.all_spans * a.heads * size, size, next_unit);
        continue;
      }
      float *part = scratch(9)->get<float>(t.tokens * t.spans * a.heads * size);
      for (int64_t c = 0; c < t.spans; c++)
        attend_span(a, t, g, t.span + c, q, part + c * a.heads * size, t.spans * a.heads * size, size,
                    c + 1 < t.spans ? fetch_keys(a, t, g, t.span + c + 1) : next_unit);
      for (int64_t i = 0; i < t.tokens; i++)
        for (int64_t h = g * group; h < (g + 1) * group; h++)
          merge_spans(part + (i * t.spans * a.heads + h) * size, a.heads * size, t.spans, a.v_dim,
                      a.out + ((t.first + i) * a.heads + h) * a.v_dim);
    }
  });
  if (!plan.shared) return;
  team.barrier();
  team.each(plan.count * a.heads, 4, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const AttendTask &t = plan.tasks[u / a.heads];
      if (t.span != t.first_span) continue;
      for (int64_t i = 0, h = u % a.heads; i < t.tokens; i++)
        merge_spans(plan.partial + ((t.part + i * t.all_spans) * a.heads + h) * size, a.heads * size, t.all_spans,
                    a.v_dim, a.out + ((t.first + i) * a.heads + h) * a.v_dim);
    }
  });
}

inline void attend(Team &team, const Attend &a, const AttendPlan &plan) {
  attend(team, a, plan, [](const AttendTask &, int64_t) {});
}

}  // namespace
