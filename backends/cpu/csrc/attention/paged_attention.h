// Attention over a paged cache, for grouped queries and for latents.
#pragma once
#include "attend_plan.h"

namespace {

// Of one head and token over keys low .. high of a span that begins at `begin`: part = {maximum, sum, zeros}, and scores
// become weights, times by[j] where `by` is not null.
inline void soften(const Attend &a, const float *by, int64_t begin, int64_t low, int64_t high, float *s, float *part,
                   int64_t size) {
  int64_t padded = round_up(high - begin, kLanes);
  for (int64_t j = 0; j < low - begin; j++) s[j] = -__builtin_inff();
  for (int64_t j = high - begin; j < padded; j++) s[j] = -__builtin_inff();
  V most = V{} - __builtin_inff(), all = {};
  for (int64_t j = 0; j < padded; j += kWide) {
    V v = load<V>(s + j) * a.scale;
    store(s + j, v);
    most = v > most ? v : most;
  }
  float top = most[0];
  for (int l = 1; l < kWide; l++) top = most[l] > top ? most[l] : top;
  for (int64_t j = 0; j < padded; j += kWide) {
    V p = vexp(load<V>(s + j) - top);
    all = all + p;
    store(s + j, by ? p * load<V>(by + j) : p);
  }
  part[0] = top;
  part[1] = sum(all);
  memset(part + 2, 0, (size_t)(size - 2) * sizeof(float));
}

// Adds the values of keys low .. high to R heads' parts, each times its weight; values[j] points to those of key
// `begin + j`. D registers of values are summed at a time.
template <int R, int D, class Entry>
inline void weigh(const Attend &a, const Entry *const *values, int64_t g, int64_t begin, int64_t low, int64_t high,
                  const float *weights, float *part, int64_t stride, Ahead &ahead, int64_t bytes) {
  for (int64_t c = 0; c < a.v_dim; c += D * kWide) {
    bool whole = c + D * kWide <= a.v_dim;
    V acc[R][D];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        acc[r][d] = c + d * kWide < a.v_dim ? load<V>(part + r * stride + 2 + c + d * kWide) : V{};
    for (int64_t j = low; j < high; j++) {
      const Entry *v = values[j - begin] + g * a.v_dim + c;
      if (!(j & 3) && c == 0) ahead.some(4 * bytes);
      V value[D];
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        value[d] = whole ? load_v(v + d * kWide)
                         : c + d * kWide < a.v_dim ? load_v(v + d * kWide, a.v_dim - c - d * kWide) : V{};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        V p = all(weights[r * kSpan + j - begin]);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) acc[r][d] = fma(p, value[d], acc[r][d]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        if (c + d * kWide < a.v_dim) store(part + r * stride + 2 + c + d * kWide, acc[r][d]);
  }
}

// Registers in which a row of values is summed for so many query rows, if it is wide, and else. With all of a row in
// registers it is read once, from its beginning to its end.
#ifdef __AVX512F__
constexpr int most_registers(int rows) { return rows < 4 ? 8 : 4; }
constexpr int few_registers(int) { return 4; }
#else
constexpr int most_registers(int rows) { return 8 / rows; }
constexpr int few_registers(int rows) { return 8 / rows; }
#endif

// Query rows of a task as its keys want them.
struct Queries {
  Rows rows;
  Codes codes;
};

template <class RowAt>
inline Queries queries_of(const Attend &a, Scratch s[2], int64_t m, RowAt row) {
  if (a.codes() && !a.tiles()) return {{m, a.dim, 0, nullptr, nullptr, nullptr}, codes_of(s, m, a.dim, row)};
  return {rows_of(s, m, a.dim, row), {}};
}

// The keys of a span that a task's tokens look at.
struct Keys {
  int64_t begin, from, end;  // of the span; those that are seen
  Keys(const Attend &a, const AttendTask &t, int64_t span)
      : begin(span * kSpan), from(a.window ? max64(begin, t.position + 1 - a.window) : begin),
        end(min64(begin + kSpan, t.position + t.tokens)) {}
};

// Where the results of a unit of work go: part + token * token_stride + head * stride.
struct Parts {
  float *part;
  int64_t token_stride, stride;
};

// One unit's scores over one span: of its `heads` KV heads from g on.
struct Unit {
  const AttendTask &t;
  int64_t g, heads;
  const Queries *q;  // [heads]
};

// From the scores of a span to its results: values[j] points to those of key begin + j and KV head u.g, times
// by[(head - u.g) * kSpan + j] where `by` is not null.
template <class Entry>
inline void weigh_span(const Attend &a, const Unit &u, const Keys &seen, const Entry *const *values, const float *by,
                       float *scores, const Parts &to, Ahead &ahead) {
  const int64_t group = a.heads / a.kv_heads, m = u.t.tokens * group, begin = seen.begin;
  const bool wide = a.v_dim > few_registers(1) * kWide;
  auto one = wide ? weigh<1, most_registers(1), Entry> : weigh<1, few_registers(1), Entry>;
  auto two = wide ? weigh<2, most_registers(2), Entry> : weigh<2, few_registers(2), Entry>;
  auto high_of = [&](int64_t i) { return min64(seen.end, u.t.position + i + 1); };
  auto low_of = [&](int64_t i) { return a.window ? max64(begin, u.t.position + i + 1 - a.window) : begin; };
  auto part_of = [&](int64_t g, int64_t i, int64_t h) {
    return to.part + i * to.token_stride + ((u.g + g) * group + h) * to.stride;
  };
  for (int64_t g = 0; g < u.heads; g++)
    for (int64_t i = 0; i < u.t.tokens; i++)
      for (int64_t h = 0, low = low_of(i), high = high_of(i); h < group; h++) {
        float *p = part_of(g, i, h), *s = scores + (g * m + i * group + h) * kSpan;
        if (low < high) {
          soften(a, by ? by + g * kSpan : nullptr, begin, low, high, s, p, to.stride);
        } else {  // this token sees nothing of the span
          p[0] = -__builtin_inff(), p[1] = 0;
          memset(p + 2, 0, (size_t)(to.stride - 2) * sizeof(float));
        }
      }
  const int64_t row = a.v_dim * (int64_t)sizeof(Entry);
  for (int64_t w = begin; w < seen.end; w += kWindow)
    for (int64_t g = 0; g < u.heads; g++) {
      int64_t bytes = row;
      for (int64_t i = 0; i < u.t.tokens; i++) {
        int64_t low = max64(w, low_of(i)), high = min64(w + kWindow, high_of(i));
        for (int64_t h = 0; h < group && low < high;) {
          float *s = scores + (g * m + i * group + h) * kSpan, *p = part_of(g, i, h);
          if (h + 4 <= group)
            weigh<4, few_registers(4)>(a, values, g, begin, low, high, s, p, to.stride, ahead, bytes), h += 4;
          else if (h + 2 <= group)
            two(a, values, g, begin, low, high, s, p, to.stride, ahead, bytes), h += 2;
          else
            one(a, values, g, begin, low, high, s, p, to.stride, ahead, bytes), h += 1;
          bytes = 0;  // once is enough
        }
      }
    }
}

// The partial results of a unit of work over one span. Keys are read as they lie, all heads of one before the next, and so
// are values, a window at a time: a stream that processors foresee.
inline void attend_span(const Attend &a, const Unit &u, int64_t span, const Parts &to, Ahead &ahead) {
  const AttendTask &t = u.t;
  const Keys seen(a, t, span);
  const int64_t begin = seen.begin, m = u.q[0].rows.m, rows = u.heads * m;
  float *scores = scratch(8)->get<float>((rows + 2 * u.heads) * kSpan), *k_scale = scores + rows * kSpan;
  float *v_scale = k_scale + u.heads * kSpan;
  bf16 *keys = scratch(14)->get<bf16>(a.k.coded() ? kSpan * a.dim : 0);  // in bf16
  const bf16 *values[kSpan];
  const int8_t *codes[kSpan];
  const int64_t row = a.dim * (a.k.coded() ? 1 : (int64_t)sizeof(bf16));
  if (!a.latents())
    ahead.values = {a.v, t.table, a.block, seen.from, seen.end, u.g * a.v_dim, u.heads * a.v_dim};
  if (a.codes()) memset(k_scale, 0, (size_t)(2 * u.heads * kSpan) * sizeof(float));
  // Whole blocks, also where the sequence ends within one: a key's score must not depend on what stands behind it.
  int64_t first_block = seen.from / a.block, last_block = (seen.end - 1) / a.block;
  for (int64_t b = first_block; b <= last_block; b++) {
    int64_t skip = max64(0, begin - b * a.block), n = min64(a.block, begin + kSpan - b * a.block) - skip;
    int64_t j = b * a.block + skip - begin, slot = (int64_t)t.table[b] * a.block + skip, ld = a.k.stride;
    if (a.codes()) {
      for (int64_t i = 0; i < n; i++) {
        codes[j + i] = a.v.codes() + (slot + i) * a.v.stride + u.g * a.v_dim;
        for (int64_t g = 0; g < u.heads; g++) {
          k_scale[g * kSpan + j + i] = a.k.scale[(slot + i) * a.k.groups + u.g + g];
          v_scale[g * kSpan + j + i] = a.v.scale[(slot + i) * a.v.groups + u.g + g];
        }
      }
      for (int64_t g = 0; g < u.heads; g++) {
        const int8_t *of = a.k.codes() + slot * ld + (u.g + g) * a.dim;
        float *s = scores + g * m * kSpan + j;
        ahead.some(n * row);
        if (!a.tiles()) {
          codes_dot(of, ld, n, a.dim, u.q[g].codes, s, kSpan);
          continue;
        }
        for (int64_t i = 0; i < n; i++) widen_codes(of + i * ld, a.dim, keys + i * a.dim);
        dot(keys, a.dim, n, a.dim, u.q[g].rows, 0, s, kSpan);
      }
      continue;
    }
    const bf16 *k = a.k.rows() + slot * ld + u.g * a.dim;
    if (a.k.coded()) {  // latents
      k = keys + j * a.dim, ld = a.dim;
      for (int64_t i = 0; i < n; i++) read_back(a.k, slot + i, 0, a.dim, keys + (j + i) * a.dim);
    }
    const bf16 *v = a.latents() ? k : a.v.rows() + slot * a.v.stride + u.g * a.v_dim;
    for (int64_t i = 0; i < n; i++) values[j + i] = v + i * (a.latents() ? ld : a.v.stride);
    int64_t step = a.tiles() ? n : 4;
    for (int64_t i = 0; i < n; i += step)
      for (int64_t g = 0; g < u.heads; g++) {
        ahead.some(step * row);
        const bf16 *from = k + i * ld + g * a.dim;
        float *s = scores + g * m * kSpan + j + i;
        if (a.tiles())
          dot(from, ld, n, a.dim, u.q[g].rows, 0, s, kSpan);
        else
          dot_few(from, ld, min64(step, n - i), a.dim, u.q[g].rows, 0, s, kSpan);
      }
  }
  if (!a.codes()) return weigh_span(a, u, seen, values, nullptr, scores, to, ahead);
  for (int64_t r = 0; r < rows; r++) {
    F by = splat(a.tiles() ? 1.0f : u.q[r / m].codes.scale[r % m]);
    float *s = scores + r * kSpan, *of = k_scale + r / m * kSpan;
    for (int64_t j = 0; j < kSpan; j += kLanes) store(s + j, load<F>(s + j) * (load<F>(of + j) * by));
  }
  weigh_span(a, u, seen, codes, v_scale, scores, to, ahead);
}

// Merges `count` partial results that stand `step` floats apart.
inline void merge_spans(const float *part, int64_t step, int64_t count, int64_t v_dim, bf16 *out) {
  float top = -__builtin_inff(), all = 0;
  for (int64_t i = 0; i < count; i++) top = part[i * step] > top ? part[i * step] : top;
  float weight[512];
  for (int64_t i0 = 0; i0 < count; i0 += 512)
    for (int64_t i = i0; i < min64(count, i0 + 512); i++)
      all += part[i * step + 1] * vexp(V{} + (part[i * step] - top))[0];
  for (int64_t c = 0; c < v_dim; c += kWide) {
    V acc = {};
    for (int64_t i = 0; i < count; i++) {
      if (c == 0 && i < 512) weight[i] = vexp(V{} + (part[i * step] - top))[0];
      float w = i < 512 ? weight[i] : vexp(V{} + (part[i * step] - top))[0];
      if (part[i * step + 1] > 0) acc = fma(V{} + w, load<V>(part + i * step + 2 + c), acc);
    }
    store_v(out + c, acc / all, v_dim - c);
  }
}

// KV heads `heads` of task n / parts from n % parts * heads on are a unit of work: the keys that it reads first.
inline Fetch fetch_unit(const Attend &a, const AttendPlan &plan, int64_t n, int64_t span = 0) {
  int64_t parts = a.kv_heads / plan.heads;
  if (n >= plan.count * parts) return {};
  const AttendTask &t = plan.tasks[n / parts];
  Keys seen(a, t, t.span + span);
  return {a.k, t.table, a.block, seen.from, seen.end, n % parts * plan.heads * a.dim, plan.heads * a.dim};
}

inline int64_t first_bytes(const Attend &a, const AttendPlan &plan) {
  return kAheadKeys * plan.heads * a.dim * (a.k.coded() ? 1 : (int64_t)sizeof(bf16));
}

// A unit of work whose first keys are on their way.
struct Expected {
  int64_t unit = -1;
  Fetch keys;
};

// Has the first keys brought near before the queries are there.
inline Expected expect(Team &team, const Attend &a, const AttendPlan &plan) {
  int64_t n = team.first_of(plan.count * (a.kv_heads / plan.heads));
  Expected e = {n, fetch_unit(a, plan, n)};
  e.keys.some(first_bytes(a, plan));
  return e;
}

// `before(task, g)` is called for each KV head of a task by whoever takes it, before anything is read for it.
template <class Before>
inline void attend(Team &team, const Attend &a, const AttendPlan &plan, Before before, Expected soon = {}) {
  static thread_local Scratch rows[2 * kHeadsAtOnce];
  int64_t group = a.heads / a.kv_heads, size = part_size(a), parts = a.kv_heads / plan.heads;
  Ahead ahead;
  team.each(plan.count * parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) {
      const AttendTask &t = plan.tasks[n / parts];
      Queries q[kHeadsAtOnce];
      const Unit u = {t, n % parts * plan.heads, plan.heads, q};
      if (n == soon.unit)
        ahead.keys = soon.keys;
      else
        (ahead.keys = fetch_unit(a, plan, n)).some(first_bytes(a, plan));
      for (int64_t i = 0; i < u.heads; i++) {
        int64_t g = u.g + i;
        before(t, g);
        q[i] = queries_of(a, rows + 2 * i, t.tokens * group, [&](int64_t r) {
          return a.q + ((t.first + r / group) * a.heads + g * group + r % group) * a.dim;
        });
      }
      float *part = plan.shared ? plan.partial + (t.part + t.span - t.first_span) * a.heads * size
                                : scratch(9)->get<float>(t.tokens * t.spans * a.heads * size);
      int64_t token_stride = (plan.shared ? t.all_spans : t.spans) * a.heads * size;
      for (int64_t c = 0; c < t.spans; c++) {
        ahead.next = c + 1 < t.spans ? fetch_unit(a, plan, n, c + 1) : fetch_unit(a, plan, n + 1);
        attend_span(a, u, t.span + c, {part + c * a.heads * size, token_stride, size}, ahead);
        ahead.keys = ahead.next;
      }
      soon = {n + 1, ahead.next};  // most likely
      if (plan.shared) continue;
      for (int64_t i = 0; i < t.tokens; i++)
        for (int64_t h = u.g * group; h < (u.g + u.heads) * group; h++)
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
