// Attention of many query tokens on tiles (tile_products.h), reached through prefill.h. Weights are rounded to bf16, as
// oneDNN's and torch's attention round them.
//
// Everything is stored with queries side by side: scores [keys, queries], weights [keys, queries], results [values,
// queries]. Then keys are a first factor as they lie in the cache, and weights a second one once pairs of keys are
// interleaved; maxima and sums are sixteen queries wide; and V alone is transposed, once for all queries of a task.
#pragma once
#include <float.h>
#include <math.h>

#include "products/gemm_tiles.h"
#include "attention/prefill_plan.h"

namespace {

constexpr float kMaxGrowth = 8.0f;  // a weight is at most 2^kMaxGrowth

// 2^x in each lane within 2^-13 of its value, enough for a result in bf16. x is at most kMaxGrowth, or NaN, which is
// kept. 0 below -126.
inline F32x16 exp2_bf16(F32x16 x) {
  __m512 v = (__m512)x;
  // From 0 to 1; scalef applies the rest.
  F32x16 r = (F32x16)_mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  F32x16 y = fma(fma(fma(splat(0.0782680f), r, splat(0.2263077f)), r, splat(0.6954243f)), r, splat(1.0f));
  return (F32x16)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), (__m512)y, v);
}

// One KV head's part of a task, for two tiles of 16 tokens of each of its query heads at a time.
struct PrefillHead {
  const AttentionArgs &args;
  const PrefillTask &t;
  int64_t g, pairs, pairs_per_head;  // pairs of query tiles, and how many of them belong to one head
  uint32_t *queries;  // [pairs, 2, dim / 2, 16]
  float *scores;  // [2, kSpan, 16], overwritten by weights
  bf16 *transposed;  // V of a span, transposed: [kSpan / 32, v_dim / 16, 16, 32]
  bf16 *keys, *values;  // of a span, converted from int8: [kSpan, dim], [32, v_dim]
  float *sums;  // [pairs, 2, v_dim, 16]
  F32x16 *top, *all;  // [pairs, 2]: maxima of scores, sums of weights
  mutable int64_t prefetch_key = 0, prefetch_end = 0;  // keys of the next span that are not prefetched yet
  // Keys of a span whose values are not all finite; those are zero in `transposed`.
  mutable uint64_t nonfinite[kSpan / 64];
  mutable bool any_nonfinite;

  // The query head of a pair of tiles.
  int64_t head(int64_t pair) const { return g * (args.heads / args.kv_heads) + pair / pairs_per_head; }
  // The first token, counted in the task, of tile 0 or 1 of a pair.
  int64_t token(int64_t pair, int64_t tile) const { return pair % pairs_per_head * 32 + tile * 16; }

  // The cache slot of a key, given by its position.
  int64_t slot(int64_t key) const { return (int64_t)t.table[key / args.block] * args.block + key % args.block; }

  // Writes `queries`: the task's query rows as panels, zeros for tokens that the task lacks. Clears `sums` and `all`,
  // and sets `top` to -FLT_MAX.
  void load_queries() const {
    ActivationPanels x = {queries, 0, args.dim};
    for (int64_t p = 0; p < pairs; p++)
      for (int64_t i = 0; i < 2; i++) {
        x.m = (2 * p + i) * 16 + max64(0, min64(16, t.tokens - token(p, i)));
        fill_panel(x, 2 * p + i, args.dim, [&](int64_t r) {
          return args.q + ((t.first + token(p, i) + r % 16) * args.heads + head(p)) * args.dim;
        });
        top[2 * p + i] = splat(-FLT_MAX), all[2 * p + i] = F32x16{};
      }
    memset(sums, 0, (size_t)(pairs * 2 * args.v_dim * 16) * sizeof(float));
  }

  // The v_dim entries of a key's value for this KV head in bf16: a pointer into a bf16 cache; other entries are
  // dequantized to `to`, which is returned.
  const bf16 *value(int64_t key, bf16 *to) const {
    if (args.v.is_bf16()) return args.v.bf16_entries() + slot(key) * args.v.stride + g * args.v_dim;
    dequantize_entries(args.v, slot(key), g * args.v_dim, args.v_dim, to);
    return to;
  }

  // Fills `transposed` with V of keys first .. last, at most kSpan (layout: see there), with zeros up to a multiple of
  // 32 keys. Entries that are not finite become zero there, and `nonfinite` marks their keys. Each group of 32 values
  // of another cache overwrites `values`.
  void transpose_values(int64_t first, int64_t last) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    memset(nonfinite, 0, sizeof nonfinite), any_nonfinite = false;
    for (int64_t k = first; k < last; k += 32) {
      const bf16 *rows[32] = {};
      for (int64_t i = 0; i < min64(32, last - k); i++) rows[i] = value(k + i, values + i * args.v_dim);
      for (int64_t d = 0; d < args.v_dim; d += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
          __m512i even = rows[2 * i] ? _mm512_cvtepu16_epi32((__m256i)load<U16x16>(rows[2 * i] + d)) : __m512i{};
          __m512i odd = rows[2 * i + 1] ? _mm512_cvtepu16_epi32((__m256i)load<U16x16>(rows[2 * i + 1] + d)) : __m512i{};
          r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
          uint32_t nonfinite_mask = _mm512_cmpeq_epi16_mask(_mm512_and_si512(r[i], exponent), exponent);
          if (__builtin_expect(nonfinite_mask != 0, 0)) {
            r[i] = _mm512_maskz_mov_epi16(~nonfinite_mask, r[i]), any_nonfinite = true;
            uint64_t of = (uint64_t)!!(nonfinite_mask & 0x55555555) | (uint64_t)!!(nonfinite_mask & 0xaaaaaaaa) << 1;
            nonfinite[(k - first) / 64] |= of << ((k - first) % 64 + 2 * i);
          }
        }
        transpose16(r);
        bf16 *to = transposed + ((k - first) / 32 * (args.v_dim / 16) + d / 16) * 512;
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, r[i]);
      }
    }
  }

  // Fills `keys` with keys first .. last, rounded up to a multiple of 16, in bf16, if the cache is not; else nothing.
  void dequantize_keys(int64_t first, int64_t last) const {
    if (args.k.is_bf16()) return;
    for (int64_t k = first; k < round_up(last, kPanelRows); k++)
      dequantize_entries(args.k, slot(k), g * args.dim, args.dim, keys + (k - first) * args.dim);
  }

  // Overwrites `scores` [2, kSpan, 16] with the unscaled scores of keys first .. last with one pair of query tiles q,
  // in whole groups of 16 keys; `first` is a multiple of 16, at most kSpan keys.
  void compute_scores(int64_t first, int64_t last, const uint32_t *q) const {
    int64_t stride = args.k.is_bf16() ? args.k.stride : args.dim;
    auto at = [&](int64_t k) {
      return args.k.is_bf16() ? args.k.bf16_entries() + slot(k) * args.k.stride + g * args.dim
                              : keys + (k - first) * args.dim;
    };
    for (int64_t k = first; k < last; k += 32) {
      const bf16 *k0 = at(k), *k1 = k + 16 < last ? at(k + 16) : k0;
      multiply_tiles({k0, k1, stride, kColumnStep}, q, q + args.dim * 8, args.dim / kColumnStep, true,
                    {scores + (k - first) * 16, 256, kSpan * 16});
    }
  }

  // Prefetches one key and its value into the second-level cache: rows lie too far apart for the processor to do it by
  // itself.
  void prefetch_next_key() const {
    if (prefetch_key >= prefetch_end) return;
    int64_t at = slot(prefetch_key++);
    auto lines = [&](const KvEntries &entries, int64_t width) {
      const char *from = (const char *)entries.data + entries.bytes_of(at * entries.stride + g * width);
      for (int64_t b = 0; b < entries.bytes_of(width); b += 64) _mm_prefetch(from + b, _MM_HINT_T1);
    };
    lines(args.k, args.dim), lines(args.v, args.v_dim);
  }

  // A mask of those of the sixteen queries from `position` on that see a key.
  __mmask16 visible_queries(int64_t key, int64_t position) const {
    int64_t from = key - position, to = args.window ? key + args.window - position : 16;
    uint32_t low = from <= 0 ? 0xffff : from >= 16 ? 0 : 0xffffu << from;
    return (__mmask16)(low & (to >= 16 ? 0xffff : to <= 0 ? 0 : (1u << to) - 1));
  }

  // Scores s [keys, 16] of keys first .. last with sixteen queries from `position` on become weights in place: bf16,
  // pairs of keys interleaved, zeros for keys that a query does not see and up to a multiple of 32 keys. Updates the
  // queries' maxima and sums of weights (`total`); the weighted values so far, o [v_dim, 16], and `total` are rescaled
  // if a maximum has grown by more than kMaxGrowth.
  void softmax_tile(int64_t first, int64_t last, int64_t position, float *s, F32x16 *tile_maximum, F32x16 *total,
                    float *o) const {
    int64_t n = last - first;
    if (args.softcap > 0)
      for (int64_t j = 0; j < n; j++)
        store(s + j * 16, soft_cap(load<F32x16>(s + j * 16) * args.scale, args.softcap));
    const F32x16 by = splat((args.softcap > 0 ? 1 : args.scale) * 1.44269504f);
    bool all_visible = last - 1 <= position && (!args.window || first + args.window > position + 15);
    F32x16 most = *tile_maximum;
    if (all_visible) {
      F32x16 others = most;  // two chains, or each maximum waits for the one before it
      int64_t j = 0;
      for (; j + 1 < n; j += 2) {
        most = (F32x16)_mm512_max_ps((__m512)most, (__m512)(load<F32x16>(s + j * 16) * by));
        others = (F32x16)_mm512_max_ps((__m512)others, (__m512)(load<F32x16>(s + j * 16 + 16) * by));
      }
      if (j < n) most = (F32x16)_mm512_max_ps((__m512)most, (__m512)(load<F32x16>(s + j * 16) * by));
      most = (F32x16)_mm512_max_ps((__m512)most, (__m512)others);
    } else {
      for (int64_t j = 0; j < n; j++)
        most = (F32x16)_mm512_mask_max_ps((__m512)most, visible_queries(first + j, position), (__m512)most,
                                          (__m512)(load<F32x16>(s + j * 16) * by));
    }
    // A maximum that has grown a little keeps its old value: then the weighted values so far need not be rescaled.
    F32x16 old = *tile_maximum;
    bool grown = _mm512_cmp_ps_mask((__m512)most, (__m512)(old + splat(kMaxGrowth)), _CMP_NLE_UQ);
    if (!grown) most = old;
    F32x16 sum0 = F32x16{}, sum1 = F32x16{}, less = F32x16{} - most;
    auto weight = [&](int64_t j) {
      F32x16 p = exp2_bf16(fma(load<F32x16>(s + j * 16), by, less));
      return all_visible ? p : (F32x16)_mm512_maskz_mov_ps(visible_queries(first + j, position), (__m512)p);
    };
    int64_t j = 0;
    for (; j + 1 < n; j += 2) {
      if (j % 8 == 0) prefetch_next_key();
      F32x16 p0 = weight(j), p1 = weight(j + 1);
      sum0 = sum0 + p0, sum1 = sum1 + p1;
      _mm512_store_si512(s + j / 2 * 16, interleave_as_bf16(p0, p1));
    }
    if (j < n) {
      F32x16 p0 = weight(j);
      sum0 = sum0 + p0;
      _mm512_store_si512(s + j / 2 * 16, interleave_as_bf16(p0, F32x16{}));
      j += 2;
    }
    for (; j < round_up(n, 32); j += 2) _mm512_store_si512(s + j / 2 * 16, __m512i{});
    if (grown) {
      F32x16 change = exp2_bf16(old - most);
      for (int64_t d = 0; d < args.v_dim; d++) store(o + d * 16, load<F32x16>(o + d * 16) * change);
      *total = *total * change;
    }
    *total = *total + (sum0 + sum1);
    *tile_maximum = most;
  }

  // Adds weights times values of the span's first `keys` keys, a multiple of 32, to the sums o [2, v_dim, 16] of a pair
  // of tiles.
  void add_values(int64_t keys, float *o) const {
    for (int64_t d = 0; d < args.v_dim; d += 32) {
      const bf16 *v = transposed + d * kColumnStep;
      const uint32_t *weights = (const uint32_t *)scores;
      multiply_tiles({v, v + 512, kColumnStep, args.v_dim * kColumnStep}, weights, weights + kSpan * 16,
                     keys / kColumnStep, false, {o + d * 16, 256, args.v_dim * 16});
    }
  }

  // Adds to o [v_dim, 16] the values of keys first .. last that are not finite, times the weights s of one tile, for
  // those of the sixteen queries from `position` on that see them: a weight of zero must not meet them.
  void add_nonfinite_values(int64_t first, int64_t last, int64_t position, const float *s, float *o) const {
    for (int64_t key = first; key < last; key++) {
      if (!(nonfinite[(key - first) / 64] >> (key - first) % 64 & 1)) continue;
      const bf16 *v = value(key, values), *weights = (const bf16 *)(s + (key - first) / 2 * 16) + (key - first) % 2;
      __mmask16 queries_of = visible_queries(key, position);
      for (int64_t d = 0; d < args.v_dim; d++)
        for (int64_t q = 0; q < 16; q++)
          if ((v[d] & 0x7f80) == 0x7f80 && queries_of >> q & 1)
            o[d * 16 + q] += bf16_to_float(weights[2 * q]) * bf16_to_float(v[d]);
    }
  }

  // args.out = sums / all in bf16, for the task's tokens and this KV head's query heads; `sums` are overwritten.
  void store_results() const {
    for (int64_t p = 0; p < pairs; p++)
      for (int64_t i = 0; i < 2; i++) {
        float *o = sums + (2 * p + i) * args.v_dim * 16;
        F32x16 total = all[2 * p + i];
        for (int64_t q = 0; args.sinks && q < 16; q++)
          total[q] += exp2f(args.sinks[head(p)] * 1.44269504f - top[2 * p + i][q]);
        F32x16 inverse = splat(1.0f) / total;
        int64_t have = min64(16, t.tokens - token(p, i));
        for (int64_t d = 0; have > 0 && d < args.v_dim; d += 32) {
          __m512i r[16];
          for (int64_t c = 0; c < 32; c++) store(o + (d + c) * 16, load<F32x16>(o + (d + c) * 16) * inverse);
          for (int64_t c = 0; c < 16; c++) r[c] = load_interleaved(o + (d + 2 * c) * 16);
          transpose16(r);
          for (int64_t q = 0; q < have; q++)
            _mm512_storeu_si512(args.out + ((t.first + token(p, i) + q) * args.heads + head(p)) * args.v_dim + d, r[q]);
        }
      }
  }

  // Computes this KV head's part of the task, span by span, and writes its results to args.out.
  void run() const {
    load_queries();
    int64_t end_key = t.position + t.tokens, low = args.window ? max64(0, t.position + 1 - args.window) : 0;
    for (int64_t first = low / kPanelRows * kPanelRows; first < end_key; first += kSpan) {
      int64_t last = min64(first + kSpan, end_key);
      prefetch_key = last, prefetch_end = min64(last + kSpan, end_key);
      transpose_values(first, last);
      dequantize_keys(first, last);
      for (int64_t p = 0; p < pairs; p++) {
        int64_t position = t.position + token(p, 0), keys = min64(last, position + 32);
        if (keys <= first || token(p, 0) >= t.tokens) continue;
        compute_scores(first, keys, queries + p * args.dim * 16);
        float *o = sums + p * 2 * args.v_dim * 16;
        softmax_tile(first, keys, position, scores, top + 2 * p, all + 2 * p, o);
        softmax_tile(first, keys, position + 16, scores + kSpan * 16, top + 2 * p + 1, all + 2 * p + 1,
                     o + args.v_dim * 16);
        add_values(round_up(keys - first, 32), o);
        if (!any_nonfinite) continue;
        add_nonfinite_values(first, keys, position, scores, o);
        add_nonfinite_values(first, keys, position + 16, scores + kSpan * 16, o + args.v_dim * 16);
      }
    }
    store_results();
  }
};

// Attention of all tasks of a plan, written to args.out. Every thread of the team calls it; queries and cache are
// complete; `args.out` is complete after the next `barrier`.
inline void attend_prefill(Team &team, const AttentionArgs &args, const PrefillPlan &plan) {
  int64_t group = args.heads / args.kv_heads, pairs_per_head = plan.tokens / 32, pairs = group * pairs_per_head;
  team.for_each_chunk(plan.count * args.kv_heads, 1, [&](int64_t first, int64_t last) {
    configure_tiles();
    uint32_t *queries = workspace(kActivationRows)->reserve<uint32_t>(pairs * args.dim * 16);
    float *floats = workspace(kScores)->reserve<float>((2 * kSpan + 2 * pairs * args.v_dim + 4 * pairs) * 16);
    bf16 *transposed = workspace(kPartialResults)->reserve<bf16>(kSpan * args.v_dim);
    bf16 *keys = workspace(kEntriesInBf16)->reserve<bf16>(args.k.is_bf16() ? 0 : kSpan * args.dim + 32 * args.v_dim);
    bf16 *values = keys + (args.k.is_bf16() ? 0 : kSpan * args.dim);
    float *sums = floats + 2 * kSpan * 16;
    F32x16 *top = (F32x16 *)(sums + 2 * pairs * args.v_dim * 16);
    for (int64_t u = first; u < last; u++)  // head by head, so that its keys and values stay in the second-level cache
      PrefillHead{args, plan.tasks[plan.count - 1 - u % plan.count], u / plan.count, pairs, pairs_per_head,
                  queries, floats, transposed, keys, values, sums, top, top + 2 * pairs}
          .run();
    release_tiles();
  });
}

}  // namespace
