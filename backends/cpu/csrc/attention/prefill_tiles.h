// Attention of many query tokens on tiles (tiles.h): weights are rounded to bf16, as oneDNN's and torch's attention round them.
//
// Everything is kept with queries side by side: scores [keys, queries], weights [keys, queries], results [values, queries].
// Keys are then a first factor as they lie in the cache, weights a second one once pairs of keys are interleaved, maxima and
// sums are sixteen queries wide, and V alone is transposed, once for all queries of a task.
#pragma once
#include <float.h>

#include "gemm.h"
#include "many_plan.h"

namespace {

constexpr float kGrowth = 8.0f;       // a weight is at most 2^kGrowth

// 2^x to 2^-13 of it, enough for what becomes bf16; x is at most kGrowth, or NaN, which is kept. Zero below 2^-126.
inline F exp2_short(F x) {
  __m512 v = (__m512)x;
  F r = (F)_mm512_reduce_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // from 0 to 1, and scalef takes the rest
  F y = fma(fma(fma(splat(0.0782680f), r, splat(0.2263077f)), r, splat(0.6954243f)), r, splat(1.0f));
  return (F)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), (__m512)y, v);
}

// One KV head's part of a task, for two tiles of 16 tokens of each of its query heads at a time.
struct Many {
  const Attend &a;
  const ManyTask &t;
  int64_t g, pairs, of_head; // pairs of query tiles, and how many of them belong to one head
  uint32_t *queries;         // [pairs, 2, dim / 2, 16]
  float *scores;             // [2, kSpan, 16], overwritten by weights
  bf16 *turned;              // V of a span: [kSpan / 32, v_dim / 16, 16, 32]
  bf16 *keys, *values;       // of a span, read back from int8: [kSpan, dim], [32, v_dim]
  float *sums;               // [pairs, 2, v_dim, 16]
  F *top, *all;              // [pairs, 2]
  mutable int64_t ahead = 0, ahead_end = 0;  // keys of the next span that are still to be fetched
  mutable uint64_t infinite[kSpan / 64];     // keys of a span whose values are not all finite; those are zero in `turned`
  mutable bool any_infinite;

  int64_t head(int64_t pair) const { return g * (a.heads / a.kv_heads) + pair / of_head; }
  int64_t token(int64_t pair, int64_t tile) const { return pair % of_head * 32 + tile * 16; }

  int64_t slot(int64_t key) const { return (int64_t)t.table[key / a.block] * a.block + key % a.block; }

  void begin() const {
    PanelsOf x = {queries, 0, a.dim};
    for (int64_t p = 0; p < pairs; p++)
      for (int64_t i = 0; i < 2; i++) {
        x.m = (2 * p + i) * 16 + max64(0, min64(16, t.tokens - token(p, i)));
        fill_panel(x, 2 * p + i, a.dim, [&](int64_t r) {
          return a.q + ((t.first + token(p, i) + r % 16) * a.heads + head(p)) * a.dim;
        });
        top[2 * p + i] = splat(-FLT_MAX), all[2 * p + i] = F{};
      }
    memset(sums, 0, (size_t)(pairs * 2 * a.v_dim * 16) * sizeof(float));
  }

  // A value of one key and head, in bf16; `to` is where it goes when it must be read back.
  const bf16 *value(int64_t key, bf16 *to) const {
    if (!a.v.coded()) return a.v.rows() + slot(key) * a.v.stride + g * a.v_dim;
    read_back(a.v, slot(key), g * a.v_dim, a.v_dim, to);
    return to;
  }

  // V of keys first .. last as [values, keys], zeros behind the last.
  void turn(int64_t first, int64_t last) const {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    memset(infinite, 0, sizeof infinite), any_infinite = false;
    for (int64_t k = first; k < last; k += 32) {
      const bf16 *rows[32] = {};
      for (int64_t i = 0; i < min64(32, last - k); i++) rows[i] = value(k + i, values + i * a.v_dim);
      for (int64_t d = 0; d < a.v_dim; d += 16) {
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
          __m512i even = rows[2 * i] ? _mm512_cvtepu16_epi32((__m256i)load<H>(rows[2 * i] + d)) : __m512i{};
          __m512i odd = rows[2 * i + 1] ? _mm512_cvtepu16_epi32((__m256i)load<H>(rows[2 * i + 1] + d)) : __m512i{};
          r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
          uint32_t bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(r[i], exponent), exponent);
          if (__builtin_expect(bad != 0, 0)) {
            r[i] = _mm512_maskz_mov_epi16(~bad, r[i]), any_infinite = true;
            uint64_t of = (uint64_t)!!(bad & 0x55555555) | (uint64_t)!!(bad & 0xaaaaaaaa) << 1;
            infinite[(k - first) / 64] |= of << ((k - first) % 64 + 2 * i);
          }
        }
        transpose16(r);
        bf16 *to = turned + ((k - first) / 32 * (a.v_dim / 16) + d / 16) * 512;
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 32, r[i]);
      }
    }
  }

  // Int8 keys of whole tiles as `score` reads them.
  void read_keys(int64_t first, int64_t last) const {
    if (!a.k.coded()) return;
    for (int64_t k = first; k < round_up(last, kPanelRows); k++)
      read_back(a.k, slot(k), g * a.dim, a.dim, keys + (k - first) * a.dim);
  }

  // Scores of keys first .. last (both multiples of 16 in the cache's blocks) with one pair of query tiles.
  void score(int64_t first, int64_t last, const uint32_t *q) const {
    int64_t stride = a.k.coded() ? a.dim : a.k.stride;
    auto at = [&](int64_t k) {
      return a.k.coded() ? keys + (k - first) * a.dim : a.k.rows() + slot(k) * a.k.stride + g * a.dim;
    };
    for (int64_t k = first; k < last; k += 32) {
      const bf16 *k0 = at(k), *k1 = k + 16 < last ? at(k + 16) : k0;
      tile_products({k0, k1, stride, kStep}, q, q + a.dim * 8, a.dim / kStep, true,
                    {scores + (k - first) * 16, 256, kSpan * 16});
    }
  }

  // One key and its value to the second-level cache: rows lie too far apart for the processor to do it by itself.
  void fetch() const {
    if (ahead >= ahead_end) return;
    int64_t at = slot(ahead++);
    auto lines = [&](const Kept &kept, int64_t width) {
      int64_t size = kept.coded() ? 1 : sizeof(bf16);
      const char *from = (const char *)kept.data + (at * kept.stride + g * width) * size;
      for (int64_t b = 0; b < width * size; b += 64) _mm_prefetch(from + b, _MM_HINT_T1);
    };
    lines(a.k, a.dim), lines(a.v, a.v_dim);
  }

  // Of the sixteen queries from `position` on, those that see a key.
  __mmask16 seen(int64_t key, int64_t position) const {
    int64_t from = key - position, to = a.window ? key + a.window - position : 16;
    uint32_t low = from <= 0 ? 0xffff : from >= 16 ? 0 : 0xffffu << from;
    return (__mmask16)(low & (to >= 16 ? 0xffff : to <= 0 ? 0 : (1u << to) - 1));
  }

  // Scores of one tile to weights in place, pairs of keys interleaved; what was summed before is brought to the new maximum.
  void weigh_tile(int64_t first, int64_t last, int64_t position, float *s, F *highest, F *total, float *o) const {
    const F by = splat(a.scale * 1.44269504f);
    int64_t n = last - first;
    bool all_seen = last - 1 <= position && (!a.window || first + a.window > position + 15);
    F most = *highest;
    if (all_seen) {
      F others = most;  // two chains, or each maximum waits for the one before it
      int64_t j = 0;
      for (; j + 1 < n; j += 2) {
        most = (F)_mm512_max_ps((__m512)most, (__m512)(load<F>(s + j * 16) * by));
        others = (F)_mm512_max_ps((__m512)others, (__m512)(load<F>(s + j * 16 + 16) * by));
      }
      if (j < n) most = (F)_mm512_max_ps((__m512)most, (__m512)(load<F>(s + j * 16) * by));
      most = (F)_mm512_max_ps((__m512)most, (__m512)others);
    } else {
      for (int64_t j = 0; j < n; j++)
        most = (F)_mm512_mask_max_ps((__m512)most, seen(first + j, position), (__m512)most, (__m512)(load<F>(s + j * 16) * by));
    }
    // A maximum that has grown a little stays what it was: what was summed before need not be brought to a new one.
    F old = *highest;
    bool grown = _mm512_cmp_ps_mask((__m512)most, (__m512)(old + splat(kGrowth)), _CMP_NLE_UQ);
    if (!grown) most = old;
    F sum0 = F{}, sum1 = F{}, less = F{} - most;
    auto weight = [&](int64_t j) {
      F p = exp2_short(fma(load<F>(s + j * 16), by, less));
      return all_seen ? p : (F)_mm512_maskz_mov_ps(seen(first + j, position), (__m512)p);
    };
    int64_t j = 0;
    for (; j + 1 < n; j += 2) {
      if (j % 8 == 0) fetch();
      F p0 = weight(j), p1 = weight(j + 1);
      sum0 = sum0 + p0, sum1 = sum1 + p1;
      _mm512_store_si512(s + j / 2 * 16, side_by_side(p0, p1));
    }
    if (j < n) {
      F p0 = weight(j);
      sum0 = sum0 + p0;
      _mm512_store_si512(s + j / 2 * 16, side_by_side(p0, F{}));
      j += 2;
    }
    for (; j < round_up(n, 32); j += 2) _mm512_store_si512(s + j / 2 * 16, __m512i{});
    if (grown) {
      F change = exp2_short(old - most);
      for (int64_t d = 0; d < a.v_dim; d++) store(o + d * 16, load<F>(o + d * 16) * change);
      *total = *total * change;
    }
    *total = *total + (sum0 + sum1);
    *highest = most;
  }

  void add_values(int64_t keys, float *o) const {
    for (int64_t d = 0; d < a.v_dim; d += 32) {
      const bf16 *v = turned + d * kStep;
      const uint32_t *weights = (const uint32_t *)scores;
      tile_products({v, v + 512, kStep, a.v_dim * kStep}, weights, weights + kSpan * 16, keys / kStep, false,
                    {o + d * 16, 256, a.v_dim * 16});
    }
  }

  // Adds the values that are not finite to those of sixteen queries that see them: no weight of zero may meet them.
  void add_infinite(int64_t first, int64_t last, int64_t position, const float *s, float *o) const {
    for (int64_t key = first; key < last; key++) {
      if (!(infinite[(key - first) / 64] >> (key - first) % 64 & 1)) continue;
      const bf16 *v = value(key, values), *weights = (const bf16 *)(s + (key - first) / 2 * 16) + (key - first) % 2;
      __mmask16 queries_of = seen(key, position);
      for (int64_t d = 0; d < a.v_dim; d++)
        for (int64_t q = 0; q < 16; q++)
          if ((v[d] & 0x7f80) == 0x7f80 && queries_of >> q & 1) o[d * 16 + q] += widen1(weights[2 * q]) * widen1(v[d]);
    }
  }

  void end() const {
    for (int64_t p = 0; p < pairs; p++)
      for (int64_t i = 0; i < 2; i++) {
        float *o = sums + (2 * p + i) * a.v_dim * 16;
        F inverse = splat(1.0f) / all[2 * p + i];
        int64_t have = min64(16, t.tokens - token(p, i));
        for (int64_t d = 0; have > 0 && d < a.v_dim; d += 32) {
          __m512i r[16];
          for (int64_t c = 0; c < 32; c++) store(o + (d + c) * 16, load<F>(o + (d + c) * 16) * inverse);
          for (int64_t c = 0; c < 16; c++) r[c] = interleaved(o + (d + 2 * c) * 16);
          transpose16(r);
          for (int64_t q = 0; q < have; q++)
            _mm512_storeu_si512(a.out + ((t.first + token(p, i) + q) * a.heads + head(p)) * a.v_dim + d, r[q]);
        }
      }
  }

  void run() const {
    begin();
    int64_t end_key = t.position + t.tokens, low = a.window ? max64(0, t.position + 1 - a.window) : 0;
    for (int64_t first = low / kPanelRows * kPanelRows; first < end_key; first += kSpan) {
      int64_t last = min64(first + kSpan, end_key);
      ahead = last, ahead_end = min64(last + kSpan, end_key);
      turn(first, last);
      read_keys(first, last);
      for (int64_t p = 0; p < pairs; p++) {
        int64_t position = t.position + token(p, 0), keys = min64(last, position + 32);
        if (keys <= first || token(p, 0) >= t.tokens) continue;
        score(first, keys, queries + p * a.dim * 16);
        float *o = sums + p * 2 * a.v_dim * 16;
        weigh_tile(first, keys, position, scores, top + 2 * p, all + 2 * p, o);
        weigh_tile(first, keys, position + 16, scores + kSpan * 16, top + 2 * p + 1, all + 2 * p + 1, o + a.v_dim * 16);
        add_values(round_up(keys - first, 32), o);
        if (!any_infinite) continue;
        add_infinite(first, keys, position, scores, o);
        add_infinite(first, keys, position + 16, scores + kSpan * 16, o + a.v_dim * 16);
      }
    }
    end();
  }
};

inline void attend_many(Team &team, const Attend &a, const ManyPlan &plan) {
  int64_t group = a.heads / a.kv_heads, of_head = plan.tokens / 32, pairs = group * of_head;
  team.each(plan.count * a.kv_heads, 1, [&](int64_t first, int64_t last) {
    tiles_begin();
    uint32_t *queries = scratch(0)->get<uint32_t>(pairs * a.dim * 16);
    float *floats = scratch(8)->get<float>((2 * kSpan + 2 * pairs * a.v_dim + 4 * pairs) * 16);
    bf16 *turned = scratch(9)->get<bf16>(kSpan * a.v_dim);
    bf16 *keys = scratch(14)->get<bf16>(a.k.coded() ? kSpan * a.dim + 32 * a.v_dim : 0);
    bf16 *values = keys + (a.k.coded() ? kSpan * a.dim : 0);
    float *sums = floats + 2 * kSpan * 16;
    F *top = (F *)(sums + 2 * pairs * a.v_dim * 16);
    for (int64_t u = first; u < last; u++)  // head by head, so that its keys and values stay in the second-level cache
      Many{a, plan.tasks[plan.count - 1 - u % plan.count], u / plan.count, pairs, of_head, queries, floats, turned, keys,
           values, sums, top, top + 2 * pairs}
          .run();
    tiles_end();
  });
}

}  // namespace
