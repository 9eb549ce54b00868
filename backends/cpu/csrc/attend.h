// Attention over a paged cache, for grouped queries and for latents.
//
// Keys are taken in spans of kSpan positions counted from the sequence's beginning. A span gives a partial result
// (maximum, sum, weighted values); partial results are merged in order. Spans may be computed by several threads, and
// the arithmetic is the same whoever computes them, however many queries are asked together: chunk-invariant.
#pragma once
#include "linear.h"

namespace {

constexpr int64_t kSpan = 256;

struct Attend {
  const bf16 *q;            // [tokens, heads, dim]
  const bf16 *k, *v;        // of slot s and head g: k + s * k_stride + g * dim, v + s * v_stride + g * v_dim
  int64_t k_stride, v_stride, heads, kv_heads, dim, v_dim, block, window;
  float scale;
  bf16 *out;                // [tokens, heads, v_dim]
};

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
// values[j] points to those of key `begin + j`.
template <int R>
inline void weigh(const Attend &a, const bf16 *const *values, int64_t begin, int64_t low, int64_t high, float *scores,
                  float *part, int64_t stride) {
  for (int r = 0; r < R; r++) {
    float *s = scores + r * kSpan, *to = part + r * stride, top = -__builtin_inff();
    for (int64_t j = low; j < high; j++) {
      s[j - begin] *= a.scale;
      top = s[j - begin] > top ? s[j - begin] : top;
    }
    for (int64_t j = begin; j < low; j++) s[j - begin] = -__builtin_inff();
    for (int64_t j = high; j < begin + kSpan && j < round_up(high, kLanes); j++) s[j - begin] = -__builtin_inff();
    F all = F{};
    for (int64_t j = 0; j < round_up(high - begin, kLanes); j += kLanes) {
      F p = vexp(load<F>(s + j) - top);
      store(s + j, p);
      all = all + p;
    }
    to[0] = top;
    to[1] = sum(all);
  }
#ifdef __AVX512F__
  constexpr int D = 4;
#else
  constexpr int D = 1;
#endif
  for (int64_t c = 0; c < a.v_dim; c += D * kLanes) {
    F acc[R][D];
    for (int r = 0; r < R; r++)
      for (int d = 0; d < D; d++) acc[r][d] = F{};
    bool whole = c + D * kLanes <= a.v_dim;
    for (int64_t j = low; j < high; j++) {
      const bf16 *v = values[j - begin] + c;
      F value[D];
#pragma GCC unroll 4
      for (int d = 0; d < D; d++)
        value[d] = whole ? load16(v + d * kLanes)
                         : c + d * kLanes < a.v_dim ? load16(v + d * kLanes, a.v_dim - c - d * kLanes) : F{};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        F p = splat(scores[r * kSpan + j - begin]);
#pragma GCC unroll 4
        for (int d = 0; d < D; d++) acc[r][d] = fma(p, value[d], acc[r][d]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int d = 0; d < D && c + d * kLanes < a.v_dim; d++) store(part + r * stride + 2 + c + d * kLanes, acc[r][d]);
  }
}

// Has n rows of `dim` entries brought near: they lie apart, so the processor does not foresee them.
inline void fetch_rows(const bf16 *at, int64_t stride, int64_t n, int64_t dim) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t c = 0; c < dim; c += 32) _mm_prefetch((const char *)(at + i * stride + c), _MM_HINT_T1);
}

// The partial results of a task's tokens, for one KV head and one span: part[token * token_stride + head * stride].
inline void attend_span(const Attend &a, const AttendTask &t, int64_t g, int64_t span, const Rows &q, float *part,
                        int64_t token_stride, int64_t stride) {
  int64_t group = a.heads / a.kv_heads, begin = span * kSpan;
  int64_t end = min64(begin + kSpan, t.position + t.tokens);
  int64_t from = a.window ? max64(begin, t.position + 1 - a.window) : begin;
  float *scores = scratch(8)->get<float>(q.m * kSpan);
  const bf16 *values[kSpan];
  // A decision by the model's sizes alone: a score must not depend on how many ask.
  bool tiles = group >= 8;
  // Whole blocks, also where the sequence ends within one: a key's score must not depend on what stands behind it.
  int64_t first_block = from / a.block, last_block = (end - 1) / a.block;
  for (int64_t b = first_block; b <= last_block; b++) {
    const int64_t block = (int64_t)t.table[b] * a.block, j = b * a.block;
    int64_t skip = max64(0, begin - j), n = min64(a.block, begin + kSpan - j) - skip;
    const bf16 *k = a.k + (block + skip) * a.k_stride + g * a.dim, *v = a.v + (block + skip) * a.v_stride + g * a.v_dim;
    if (b < last_block) fetch_rows(a.k + (int64_t)t.table[b + 1] * a.block * a.k_stride + g * a.dim, a.k_stride, n, a.dim);
    if (a.v != a.k) fetch_rows(v, a.v_stride, min64(n, end - j - skip), a.v_dim);
    for (int64_t i = 0; i < n; i++) values[j + skip - begin + i] = v + i * a.v_stride;
    if (tiles)
      dot(k, a.k_stride, n, a.dim, q, 0, scores + j + skip - begin, kSpan);
    else
      dot_few(k, a.k_stride, n, a.dim, q, 0, scores + j + skip - begin, kSpan);
  }
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
        weigh<4>(a, values, begin, low, high, s, p, stride), h += 4;
      } else if (h + 2 <= group) {
        weigh<2>(a, values, begin, low, high, s, p, stride), h += 2;
      } else {
        weigh<1>(a, values, begin, low, high, s, p, stride), h += 1;
      }
    }
  }
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

// `before(task, g)` is called by whoever takes a KV head of a task, before anything is read for it.
template <class Before>
inline void attend(Team &team, const Attend &a, const AttendPlan &plan, Before before) {
  int64_t group = a.heads / a.kv_heads, size = part_size(a);
  team.each(plan.count * a.kv_heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const AttendTask &t = plan.tasks[u / a.kv_heads];
      int64_t g = u % a.kv_heads;
      before(t, g);
      Rows q = rows_of(scratch(0), t.tokens * group, a.dim, [&](int64_t r) {
        return a.q + ((t.first + r / group) * a.heads + g * group + r % group) * a.dim;
      });
      if (plan.shared) {
        float *part = plan.partial + (t.part + t.span - t.first_span) * a.heads * size;
        attend_span(a, t, g, t.span, q, part, t.all_spans * a.heads * size, size);
        continue;
      }
      float *part = scratch(9)->get<float>(t.tokens * t.spans * a.heads * size);
      for (int64_t c = 0; c < t.spans; c++)
        attend_span(a, t, g, t.span + c, q, part + c * a.heads * size, t.spans * a.heads * size, size);
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
