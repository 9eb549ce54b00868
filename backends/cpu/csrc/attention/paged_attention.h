// Attention of few query tokens over a paged cache, for grouped queries and for latents. `attend` computes the tasks of
// a plan (attention_plan.h) on all threads of the team; layers and isa_entries.h call it. Scores, softmax and weighted
// values of a span are computed in float32 by one thread; keys and values are prefetched in between (kv_prefetch.h).
#pragma once
#include "attention/int4_attention.h"

namespace {

// Softmax of one head and token over keys low .. high of a span that begins at key `begin`: scores s[j] of key begin +
// j become weights exp(scale s[j] - maximum), times value_scales[j] if that is not null; weights of other keys, up to a
// multiple of 16, become zero. With a soft cap, scale s[j] is capped first. part [size] = {maximum, sum of the weights
// without value_scales, zeros}.
inline void softmax_span(const AttentionArgs &args, const float *value_scales, int64_t begin, int64_t low, int64_t high,
                         float *s, float *part, int64_t size) {
  int64_t padded = round_up(high - begin, kLanes);
  float scale = args.scale;
  if (args.softcap > 0) {
    for (int64_t j = 0; j < padded; j += kRegisterLanes)
      store(s + j, soft_cap(load<Floats>(s + j) * scale, args.softcap));
    scale = 1;
  }
  for (int64_t j = 0; j < low - begin; j++) s[j] = -__builtin_inff();
  for (int64_t j = high - begin; j < padded; j++) s[j] = -__builtin_inff();
  Floats most = Floats{} - __builtin_inff(), all = {};
  for (int64_t j = 0; j < padded; j += kRegisterLanes) {
    Floats v = load<Floats>(s + j) * scale;
    store(s + j, v);
    most = v > most ? v : most;
  }
  float top = most[0];
  for (int l = 1; l < kRegisterLanes; l++) top = most[l] > top ? most[l] : top;
  for (int64_t j = 0; j < padded; j += kRegisterLanes) {
    Floats p = vexp(load<Floats>(s + j) - top);
    all = all + p;
    store(s + j, value_scales ? p * load<Floats>(value_scales + j) : p);
  }
  part[0] = top;
  part[1] = sum_lanes(all);
  memset(part + 2, 0, (size_t)(size - 2) * sizeof(float));
}

// Adds the values of keys low .. high to R heads' partial results, each times its weight: head r's values are at part +
// r * stride + 2, its weights at weights + r * kSpan. values[j] + g * v_dim points to those of key begin + j (bf16, or
// int8 without scale). D registers of values are summed at a time. Every four keys, `queue` prefetches 4 * `bytes`.
template <int R, int D, class Entry>
inline void add_weighted_values(const AttentionArgs &args, const Entry *const *values, int64_t g, int64_t begin,
                                int64_t low, int64_t high, const float *weights, float *part, int64_t stride,
                                PrefetchQueue &queue, int64_t bytes) {
  for (int64_t c = 0; c < args.v_dim; c += D * kRegisterLanes) {
    bool is_full = c + D * kRegisterLanes <= args.v_dim;
    Floats acc[R][D];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        acc[r][d] = c + d * kRegisterLanes < args.v_dim ? load<Floats>(part + r * stride + 2 + c + d * kRegisterLanes)
                                                        : Floats{};
    for (int64_t j = low; j < high; j++) {
      const Entry *v = values[j - begin] + g * args.v_dim + c;
      if (!(j & 3) && c == 0) queue.prefetch(4 * bytes);
      Floats value[D];
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        value[d] = is_full ? load_floats(v + d * kRegisterLanes)
                   : c + d * kRegisterLanes < args.v_dim
                       ? load_floats(v + d * kRegisterLanes, args.v_dim - c - d * kRegisterLanes)
                       : Floats{};
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        Floats p = splat_floats(weights[r * kSpan + j - begin]);
#pragma GCC unroll 8
        for (int d = 0; d < D; d++) acc[r][d] = fma(p, value[d], acc[r][d]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int d = 0; d < D; d++)
        if (c + d * kRegisterLanes < args.v_dim) store(part + r * stride + 2 + c + d * kRegisterLanes, acc[r][d]);
  }
}

// Registers in which a row of values is summed for `rows` query rows: if the row is wide (more than
// narrow_value_registers(1) registers), and otherwise. If all of a row fits registers, it is read once, from its
// beginning to its end.
#ifdef __AVX512F__
constexpr int wide_value_registers(int rows) { return rows < 4 ? 8 : 4; }
constexpr int narrow_value_registers(int) { return 4; }
#else
constexpr int wide_value_registers(int rows) { return 8 / rows; }
constexpr int narrow_value_registers(int rows) { return 8 / rows; }
#endif

// From the scores of a span, scores[((head - u.g) * m + row) * kSpan + key - begin] with m query rows per KV head, to
// its partial results at `to`, which are overwritten; scores become weights. values[j] points to the values of key
// begin + j for KV head u.g; for int8 values, value_scales[(head - u.g) * kSpan + j] is their scale, else it is null. A
// token that sees no key of the span gets maximum -inf and zeros.
template <class Entry>
inline void softmax_and_add_values(const AttentionArgs &args, const AttentionUnit &u, const SpanKeys &visible,
                                   const Entry *const *values, const float *value_scales, float *scores,
                                   const PartialResults &to, PrefetchQueue &queue) {
  const int64_t group = args.heads / args.kv_heads, m = u.t.tokens * group, begin = visible.begin;
  const bool wide = args.v_dim > narrow_value_registers(1) * kRegisterLanes;
  auto one = wide ? add_weighted_values<1, wide_value_registers(1), Entry>
                  : add_weighted_values<1, narrow_value_registers(1), Entry>;
  auto two = wide ? add_weighted_values<2, wide_value_registers(2), Entry>
                  : add_weighted_values<2, narrow_value_registers(2), Entry>;
  auto high_of = [&](int64_t i) { return min64(visible.end, u.t.position + i + 1); };
  auto low_of = [&](int64_t i) { return args.window ? max64(begin, u.t.position + i + 1 - args.window) : begin; };
  auto part_of = [&](int64_t g, int64_t i, int64_t h) {
    return to.part + i * to.token_stride + ((u.g + g) * group + h) * to.stride;
  };
  for (int64_t g = 0; g < u.heads; g++)
    for (int64_t i = 0; i < u.t.tokens; i++)
      for (int64_t h = 0, low = low_of(i), high = high_of(i); h < group; h++) {
        float *p = part_of(g, i, h), *s = scores + (g * m + i * group + h) * kSpan;
        if (low < high) {
          softmax_span(args, value_scales ? value_scales + g * kSpan : nullptr, begin, low, high, s, p, to.stride);
        } else {  // this token sees nothing of the span
          p[0] = -__builtin_inff(), p[1] = 0;
          memset(p + 2, 0, (size_t)(to.stride - 2) * sizeof(float));
        }
      }
  const int64_t row = args.v_dim * (int64_t)sizeof(Entry);
  for (int64_t w = begin; w < visible.end; w += kValueWindow)
    for (int64_t g = 0; g < u.heads; g++) {
      int64_t bytes = row;
      for (int64_t i = 0; i < u.t.tokens; i++) {
        int64_t low = max64(w, low_of(i)), high = min64(w + kValueWindow, high_of(i));
        for (int64_t h = 0; h < group && low < high;) {
          float *s = scores + (g * m + i * group + h) * kSpan, *p = part_of(g, i, h);
          if (h + 4 <= group)
            add_weighted_values<4, narrow_value_registers(4)>(args, values, g, begin, low, high, s, p, to.stride, queue,
                                                              bytes),
                h += 4;
          else if (h + 2 <= group)
            two(args, values, g, begin, low, high, s, p, to.stride, queue, bytes), h += 2;
          else
            one(args, values, g, begin, low, high, s, p, to.stride, queue, bytes), h += 1;
          bytes = 0;  // once is enough
        }
      }
    }
}

// keys [n, dim] = the keys of n slots from `slot` on and one head in bf16, without scales; those of 4 bits, differences.
inline void convert_keys(const AttentionArgs &args, int64_t slot, int64_t n, int64_t head, bf16 *keys) {
  const KvEntries &k = args.k;
  for (int64_t i = 0; i < n; i++, keys += args.dim) {
    int64_t at = (slot + i) * k.stride + head * args.dim;
    if (k.is_int8())
      int8_to_bf16(k.int8_entries() + at, args.dim, keys);
    else if (k.kind == IP_KV_FP8)
      fp8_row_to_bf16((const uint8_t *)k.data + at, args.dim, keys);
    else
      int4_entries_to_bf16(k, slot + i, head * args.dim, args.dim, keys);
  }
}

// Computes the partial results of a unit of work over the span with number `span` (keys span * kSpan on), written to
// `to`; `queue` prefetches meanwhile. Keys are read as they lie, all heads of one key before the next, and so are
// values, a window at a time: a stream that processors prefetch.
inline void attend_span(const AttentionArgs &args, const AttentionUnit &u, int64_t span, const PartialResults &to,
                        PrefetchQueue &queue) {
  const AttentionTask &t = u.t;
  const SpanKeys visible(args, t, span);
  const int64_t begin = visible.begin, m = u.q[0].rows.m, rows = u.heads * m;
  float *scores = workspace(kScores)->reserve<float>((rows + 2 * u.heads) * kSpan + m * kLanes);
  float *k_scale = scores + rows * kSpan;
  float *v_scale = k_scale + u.heads * kSpan;
  // Those of a tile in bf16.
  // A cache in FP8 or 4 bits: keys of a block and head, and values of all keys and heads, in bf16.
  const bool converts = !args.k.is_bf16() && !args.has_int8_keys() && !args.has_latents();
  bf16 *keys = workspace(kEntriesInBf16)
                   ->reserve<bf16>(args.k.is_bf16() ? 0 : kSpan * (args.dim + (converts ? u.heads * args.v_dim : 0)));
  bf16 *converted = keys + kSpan * args.dim;
  float *of_first = v_scale + u.heads * kSpan;  // scores of a span's first key: [m, kLanes]
  const bf16 *values[kSpan];
  const int8_t *int8_values[kSpan];
  const int64_t row = args.k.bytes_of(args.dim);
  if (!args.has_latents())
    queue.values = {args.v, t.table, args.block, visible.from, visible.end, u.g * args.v_dim, u.heads * args.v_dim};
  if (args.k.has_scales()) memset(k_scale, 0, (size_t)(2 * u.heads * kSpan) * sizeof(float));
  // Whole blocks, even if the sequence ends within one: a key's score must not depend on the keys after it.
  int64_t first_block = visible.from / args.block, last_block = (visible.end - 1) / args.block;
  for (int64_t b = first_block; b <= last_block; b++) {
    int64_t skip = max64(0, begin - b * args.block), n = min64(args.block, begin + kSpan - b * args.block) - skip;
    int64_t j = b * args.block + skip - begin, slot = (int64_t)t.table[b] * args.block + skip, ld = args.k.stride;
    if (args.has_int8_keys()) {
      for (int64_t i = 0; i < n; i++) {
        int8_values[j + i] = args.v.int8_entries() + (slot + i) * args.v.stride + u.g * args.v_dim;
        for (int64_t g = 0; g < u.heads; g++) {
          k_scale[g * kSpan + j + i] = args.k.scale[(slot + i) * args.k.groups + u.g + g];
          v_scale[g * kSpan + j + i] = args.v.scale[(slot + i) * args.v.groups + u.g + g];
        }
      }
      for (int64_t g = 0; g < u.heads; g++) {
        const int8_t *of = args.k.int8_entries() + slot * ld + (u.g + g) * args.dim;
        float *s = scores + g * m * kSpan + j;
        queue.prefetch(n * row);
        if (!args.uses_tiles()) {
          int8_scores(of, ld, n, args.dim, u.q[g].int16, s, kSpan);
          continue;
        }
        for (int64_t i = 0; i < n; i++) int8_to_bf16(of + i * ld, args.dim, keys + i * args.dim);
        dot(keys, args.dim, n, args.dim, u.q[g].rows, 0, s, kSpan);
      }
      continue;
    }
    if (converts) {
      for (int64_t g = 0; g < u.heads; g++) {
        convert_keys(args, slot, n, u.g + g, keys);
        queue.prefetch(n * row);
        float *s = scores + g * m * kSpan + j;
        auto multiply = [&](const bf16 *from, int64_t count, float *out, int64_t ldo) {
          if (args.uses_tiles())
            dot(from, args.dim, count, args.dim, u.q[g].rows, 0, out, ldo);
          else
            dot_without_tiles(from, args.dim, count, args.dim, u.q[g].rows, 0, out, ldo);
        };
        multiply(keys, n, s, kSpan);
        if (args.k.kind == IP_KV_INT4_DIFFERENCES) {
          int64_t span = slot / kSpanSlots;
          int8_to_bf16(SpanOfHead(args.k, span, u.g + g).first, args.dim, keys);
          multiply(keys, 1, of_first, kLanes);
          float scale = args.k.first_scale[span * args.kv_heads + u.g + g];
          for (int64_t r = 0; r < m; r++)
            for (int64_t i = 0; i < n; i++) s[r * kSpan + i] += of_first[r * kLanes] * scale;
        }
        for (int64_t i = 0; i < n; i++) {
          bf16 *v = converted + ((j + i) * u.heads + g) * args.v_dim;
          if (args.k.has_scales()) k_scale[g * kSpan + j + i] = args.k.scale[(slot + i) * args.k.groups + u.g + g];
          if (args.v.kind == IP_KV_FP8) {
            fp8_row_to_bf16((const uint8_t *)args.v.data + (slot + i) * args.v.stride + (u.g + g) * args.v_dim,
                            args.v_dim, v);
            v_scale[g * kSpan + j + i] = args.v.scale[(slot + i) * args.v.groups + u.g + g];
          } else {
            int4_entries_to_bf16(args.v, slot + i, (u.g + g) * args.v_dim, args.v_dim, v);
          }
          if (g == 0) values[j + i] = v;
        }
      }
      continue;
    }
    const bf16 *k = args.k.bf16_entries() + slot * ld + u.g * args.dim;
    if (!args.k.is_bf16()) {  // latents
      k = keys + j * args.dim, ld = args.dim;
      for (int64_t i = 0; i < n; i++) dequantize_entries(args.k, slot + i, 0, args.dim, keys + (j + i) * args.dim);
    }
    const bf16 *v = args.has_latents() ? k : args.v.bf16_entries() + slot * args.v.stride + u.g * args.v_dim;
    for (int64_t i = 0; i < n; i++) values[j + i] = v + i * (args.has_latents() ? ld : args.v.stride);
    int64_t step = args.uses_tiles() ? n : 4;
    for (int64_t i = 0; i < n; i += step)
      for (int64_t g = 0; g < u.heads; g++) {
        queue.prefetch(step * row);
        const bf16 *from = k + i * ld + g * args.dim;
        float *s = scores + g * m * kSpan + j + i;
        if (args.uses_tiles())
          dot(from, ld, n, args.dim, u.q[g].rows, 0, s, kSpan);
        else
          dot_without_tiles(from, ld, min64(step, n - i), args.dim, u.q[g].rows, 0, s, kSpan);
      }
  }
  if (args.has_latents() || !args.k.has_scales())
    return softmax_and_add_values(args, u, visible, values, nullptr, scores, to, queue);
  const bool has_int16_queries = args.has_int8_keys() && !args.uses_tiles();
  for (int64_t r = 0; r < rows; r++) {
    F32x16 query_scale = splat(has_int16_queries ? u.q[r / m].int16.scale[r % m] : 1.0f);
    float *s = scores + r * kSpan, *of = k_scale + r / m * kSpan;
    for (int64_t j = 0; j < kSpan; j += kLanes)
      store(s + j, load<F32x16>(s + j) * (load<F32x16>(of + j) * query_scale));
  }
  if (args.has_int8_keys())
    softmax_and_add_values(args, u, visible, int8_values, v_scale, scores, to, queue);
  else
    softmax_and_add_values(args, u, visible, values, args.v.has_scales() ? v_scale : nullptr, scores, to, queue);
}

// out[0 .. v_dim] = the attention result in bf16 of one token and head, from `count` partial results (maximum, sum,
// weighted values) that stand `step` floats apart, in their order. `sink`: the head's sink, or null.
inline void merge_spans(const float *part, int64_t step, int64_t count, int64_t v_dim, const float *sink, bf16 *out) {
  float top = sink ? *sink : -__builtin_inff(), all = 0;
  for (int64_t i = 0; i < count; i++) top = part[i * step] > top ? part[i * step] : top;
  if (sink) all = vexp(Floats{} + (*sink - top))[0];
  float weight[512];
  for (int64_t i0 = 0; i0 < count; i0 += 512)
    for (int64_t i = i0; i < min64(count, i0 + 512); i++)
      all += part[i * step + 1] * vexp(Floats{} + (part[i * step] - top))[0];
  for (int64_t c = 0; c < v_dim; c += kRegisterLanes) {
    Floats acc = {};
    for (int64_t i = 0; i < count; i++) {
      if (c == 0 && i < 512) weight[i] = vexp(Floats{} + (part[i * step] - top))[0];
      float w = i < 512 ? weight[i] : vexp(Floats{} + (part[i * step] - top))[0];
      if (part[i * step + 1] > 0) acc = fma(Floats{} + w, load<Floats>(part + i * step + 2 + c), acc);
    }
    store_floats(out + c, acc / all, v_dim - c);
  }
}

// The keys that unit n reads first, in span `span` of its task, counted from the task's first one; nothing if there is
// no unit n. Unit n is `plan.heads` KV heads of task n / parts, from n % parts * heads on, where a task has kv_heads /
// heads parts.
inline KvPrefetch prefetch_of_unit(const AttentionArgs &args, const AttentionPlan &plan, int64_t n, int64_t span = 0) {
  int64_t parts = args.kv_heads / plan.heads;
  if (n >= plan.count * parts) return {};
  const AttentionTask &t = plan.tasks[n / parts];
  SpanKeys visible(args, t, t.span + span);
  return {
      args.k, t.table, args.block, visible.from, visible.end, n % parts * plan.heads * args.dim, plan.heads * args.dim};
}

// Bytes of keys that are prefetched before a unit begins: those of kPrefetchKeys keys.
inline int64_t initial_prefetch_bytes(const AttentionArgs &args, const AttentionPlan &plan) {
  return args.k.bytes_of(kPrefetchKeys * plan.heads * args.dim);
}

// The number of a unit of work whose first keys are being prefetched, and what is left of them; -1: none.
struct PrefetchedUnit {
  int64_t unit = -1;
  KvPrefetch keys;
};

// Begins to prefetch the keys of the unit that this thread will most likely take first in `attend`, before the queries
// are computed; the caller gives the result to `attend`.
inline PrefetchedUnit prefetch_first_unit(Team &team, const AttentionArgs &args, const AttentionPlan &plan) {
  int64_t n = team.first_chunk(plan.count * (args.kv_heads / plan.heads));
  PrefetchedUnit e = {n, prefetch_of_unit(args, plan, n)};
  e.keys.prefetch(initial_prefetch_bytes(args, plan));
  return e;
}

// Computes all tasks of a plan and writes args.out, except for rows of padding. Every thread of the team calls it;
// `args.out` is complete after the next `barrier` (it waits at one itself if plan.spans_shared). The thread that takes
// a unit calls prepare(task, g) for each of its KV heads before it reads queries or keys of it. `prefetched` is the
// result of `prefetch_first_unit` in this thread.
template <class Prepare>
inline void attend(Team &team, const AttentionArgs &args, const AttentionPlan &plan, Prepare prepare,
                   PrefetchedUnit prefetched = {}) {
  static thread_local Workspace rows[kQueryBuffers * kMaxHeadsPerUnit];
  int64_t group = args.heads / args.kv_heads, size = part_size(args), parts = args.kv_heads / plan.heads;
  PrefetchQueue queue;
  team.for_each_chunk(plan.count * parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) {
      const AttentionTask &t = plan.tasks[n / parts];
      Queries q[kMaxHeadsPerUnit];
      const AttentionUnit u = {t, n % parts * plan.heads, plan.heads, q};
      if (n == prefetched.unit)
        queue.keys = prefetched.keys;
      else
        (queue.keys = prefetch_of_unit(args, plan, n)).prefetch(initial_prefetch_bytes(args, plan));
      for (int64_t i = 0; i < u.heads; i++) {
        int64_t g = u.g + i;
        prepare(t, g);
        q[i] = lay_out_queries(args, rows + kQueryBuffers * i, t.tokens * group, [&](int64_t r) {
          return args.q + ((t.first + r / group) * args.heads + g * group + r % group) * args.dim;
        });
      }
      float *part = plan.spans_shared ? plan.partial + (t.part + t.span - t.first_span) * args.heads * size
                                : workspace(kPartialResults)->reserve<float>(t.tokens * t.spans * args.heads * size);
      int64_t token_stride = (plan.spans_shared ? t.all_spans : t.spans) * args.heads * size;
      for (int64_t c = 0; c < t.spans; c++) {
        queue.next_keys =
            c + 1 < t.spans ? prefetch_of_unit(args, plan, n, c + 1) : prefetch_of_unit(args, plan, n + 1);
        const PartialResults to = {part + c * args.heads * size, token_stride, size};
#if defined(__AVX512VNNI__)
        if (has_int4_products(args))
          attend_span_int4(args, u, t.span + c, to);
        else
#endif
          attend_span(args, u, t.span + c, to, queue);
        queue.keys = queue.next_keys;
      }
      prefetched = {n + 1, queue.next_keys};  // the unit that this thread takes next most likely
      if (plan.spans_shared) continue;
      for (int64_t i = 0; i < t.tokens; i++)
        for (int64_t h = u.g * group; h < (u.g + u.heads) * group; h++)
          merge_spans(part + (i * t.spans * args.heads + h) * size, args.heads * size, t.spans, args.v_dim,
                      args.sinks ? args.sinks + h : nullptr, args.out + ((t.first + i) * args.heads + h) * args.v_dim);
    }
  });
  if (!plan.spans_shared) return;
  team.barrier();
  team.for_each_chunk(plan.count * args.heads, 4, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const AttentionTask &t = plan.tasks[u / args.heads];
      if (t.span != t.first_span) continue;
      for (int64_t i = 0, h = u % args.heads; i < t.tokens; i++)
        merge_spans(plan.partial + ((t.part + i * t.all_spans) * args.heads + h) * size, args.heads * size, t.all_spans,
                    args.v_dim, args.sinks ? args.sinks + h : nullptr,
                    args.out + ((t.first + i) * args.heads + h) * args.v_dim);
    }
  });
}

// `attend` without preparation: queries and cache are complete already.
inline void attend(Team &team, const AttentionArgs &args, const AttentionPlan &plan) {
  attend(team, args, plan, [](const AttentionTask &, int64_t) {});
}

}  // namespace
