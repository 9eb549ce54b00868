// Attention of few query tokens over values of 4 bits and keys of 4 bits or int8, entries not converted: scores by
// int4_scores.h or int8_scores.h; weights times the scales of values become 16-bit numbers, whose halves are multiplied
// with entries as they lie (vpdpbusd). `attend` (paged_attention.h) calls `attend_span_int4` where `has_int4_products`.
#pragma once
#include <type_traits>

#include "attention/attention_unit.h"

#if defined(__AVX512VNNI__)
namespace {

constexpr int64_t kChunk = kSpanSlots;  // keys that are computed side by side
constexpr int64_t kChunks = kSpan / kChunk;
constexpr float kLargestWeight = 65535.0f;

// 2^x in each lane within 2^-13 of its value, for x of at most 0; 0 below -126; NaN stays NaN.
inline __m512 exp2_of_negative(__m512 x) {
  __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.0782680f), r, _mm512_set1_ps(0.2263077f));
  y = _mm512_fmadd_ps(_mm512_fmadd_ps(y, r, _mm512_set1_ps(0.6954243f)), r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, x);
}

// The lanes of the sixteen keys from `key` on that lie in low .. high.
inline __mmask16 lanes_between(int64_t key, int64_t low, int64_t high) {
  int64_t from = min64(16, max64(0, low - key)), to = min64(16, max64(0, high - key));
  return (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
}

inline __attribute__((always_inline)) void prefetch_lines(const void *from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += 64) {
    _mm_prefetch((const char *)from + b, _MM_HINT_T0);
    asm volatile("");  // else the compiler drops the loop, which computes nothing
  }
}

// A span of keys of a unit, and the buffers of the calling thread.
struct Int4Span {
  const AttentionArgs &args;
  const AttentionUnit &u;
  SpanKeys visible;
  int64_t m, chunks, value_group, value_groups;  // of a head: query rows; entries that share a scale, and such groups
  float *scores;  // of a head, [m, kSpan]: scores in powers of two, then weights
  int64_t spans[kChunks], next_spans[kChunks];  // where each chunk is in the cache, and that of the next span of keys

  int64_t begin() const { return visible.begin; }
  SpanOfHead keys(int64_t chunk, int64_t g) const { return {args.k, spans[chunk], u.g + g}; }
  SpanOfHead values(int64_t chunk, int64_t g) const { return {args.v, spans[chunk], u.g + g}; }
  // Prefetches the keys, or the values, that the head after u.g + g has in a chunk; behind the last head, those of the
  // first one in the next span of keys.
  void prefetch_keys(int64_t chunk, int64_t g) const {
    const int64_t span = g + 1 < u.heads ? spans[chunk] : next_spans[chunk], head = g + 1 < u.heads ? u.g + g + 1 : u.g;
    if (args.k.is_int8()) {
      for (int64_t t = 0; t < kSpanSlots; t++)
        prefetch_lines(args.k.int8_entries() + (span * kSpanSlots + t) * args.k.stride + head * args.dim, args.dim);
      return;
    }
    const SpanOfHead at(args.k, span, head);
    prefetch_lines(at.bytes, args.dim * kSpanSlots / 2);
    prefetch_lines(at.ranges, args.dim / kDifferenceGroup * 4 * kSpanSlots);
    prefetch_lines(at.first, args.dim);
    _mm_prefetch((const char *)(args.k.first_scale + span * args.kv_heads + head), _MM_HINT_T0);
  }
  void prefetch_values(int64_t chunk, int64_t g) const {
    const bool same = g + 1 < u.heads;
    const SpanOfHead at(args.v, same ? spans[chunk] : next_spans[chunk], same ? u.g + g + 1 : u.g);
    prefetch_lines(at.bytes, args.v_dim * kSpanSlots / 2);
    prefetch_lines(at.ranges, value_groups * 4 * kSpanSlots);
  }
  bool sees(int64_t chunk) const { return begin() + (chunk + 1) * kChunk > visible.from; }
};

// The keys low .. high of a span that a token sees, which are not none.
struct SeenKeys {
  int64_t first, last;  // their chunks
  __mmask16 first_lanes, last_lanes;
  SeenKeys(int64_t begin, int64_t low, int64_t high)
      : first((low - begin) / kChunk), last((high - begin + kChunk - 1) / kChunk),
        first_lanes(lanes_between(begin + first * kChunk, low, high)),
        last_lanes(lanes_between(begin + (last - 1) * kChunk, low, high)) {}
  __mmask16 lanes(int64_t chunk) const {
    return chunk == first ? first_lanes : chunk == last - 1 ? last_lanes : (__mmask16)0xffff;
  }
};

// Calls f(number, first) for each tile of at most four of m rows, `number.value` rows from `first` on.
template <class Fn>
inline void for_rows(int64_t m, Fn f) {
  for (int64_t i = 0; i < m;) {
    const int64_t rows = m - i >= 4 ? 4 : m - i >= 2 ? 2 : 1;
    if (rows == 4)
      f(std::integral_constant<int, 4>(), i);
    else if (rows == 2)
      f(std::integral_constant<int, 2>(), i);
    else
      f(std::integral_constant<int, 1>(), i);
    i += rows;
  }
}

// Fills out[i * kChunks + c] with the product of row i of x and the int8 keys at[c], times the scale of the row.
inline void scores_of_firsts(const int8_t *const at[kChunks], int64_t dim, const Int16Rows &x, float *out) {
  for (int64_t i = 0; i < x.m;) {
    int64_t rows = x.m - i >= 4 ? 4 : x.m - i >= 2 ? 2 : 1, tile = kScoreRegisters / rows;
    for (int64_t c = 0; c < kChunks; c += tile)
      if (rows == 4)
        score_tile<kScoreRegisters / 4, 4>(at + c, dim, x, i, out + i * kChunks + c, kChunks);
      else if (rows == 2)
        score_tile<kScoreRegisters / 2, 2>(at + c, dim, x, i, out + i * kChunks + c, kChunks);
      else
        score_tile<kScoreRegisters, 1>(at + c, dim, x, i, out + i * kChunks + c, kChunks);
    for (int64_t r = i; r < i + rows; r++)
      for (int64_t c = 0; c < kChunks; c++) out[r * kChunks + c] *= x.scale[r];
    i += rows;
  }
}

// Scores of head u.g + g with the keys of a span, of which those of 4 bits are differences.
inline void score_differences(const Int4Span &s, int64_t g) {
  const AttentionArgs &args = s.args;
  const KvEntries &k = args.k;
  const int64_t head = s.u.g + g;
  float *firsts = workspace(kInt4Firsts)->reserve<float>(s.m * kChunks);
  const int8_t *at[kChunks];
  float scale[kChunks];
  for (int64_t c = 0; c < kChunks; c++) {
    const int64_t span = s.spans[min64(c, s.chunks - 1)];
    at[c] = SpanOfHead(k, span, head).first;
    scale[c] = k.first_scale[span * args.kv_heads + head];
  }
  scores_of_firsts(at, args.dim, s.u.q[g].int16, firsts);
  const __m512 of = _mm512_mul_ps(_mm512_loadu_ps(scale), _mm512_set1_ps(args.scale * kLog2E));
  for (int64_t i = 0; i < s.m; i++)
    _mm512_storeu_ps(firsts + i * kChunks, _mm512_mul_ps(_mm512_loadu_ps(firsts + i * kChunks), of));
  auto score = [&](auto rows, int64_t i) {
    for (int64_t c = 0; c < s.chunks; c++) {
      if (i == 0) s.prefetch_values(c, g);
      if (s.sees(c))
        difference_scores<rows.value>(s.keys(c, g), s.u.q[g].int8, i, firsts + i * kChunks + c, kChunks,
                                      s.scores + i * kSpan + c * kChunk, kSpan);
    }
  };
  for_rows(s.m, score);
}

// Scores of head u.g + g with the keys of a span, which are int8.
inline void score_int8(const Int4Span &s, int64_t g) {
  const AttentionArgs &args = s.args;
  const KvEntries &k = args.k;
  const Int16Rows &x = s.u.q[g].int16;
  for (int64_t c = 0; c < s.chunks; c++) {
    s.prefetch_values(c, g);
    if (!s.sees(c)) continue;
    const int64_t slot = s.spans[c] * kSpanSlots;
    float *to = s.scores + c * kChunk, of[kChunk];
    int8_scores(k.int8_entries() + slot * k.stride + (s.u.g + g) * args.dim, k.stride, kChunk, args.dim, x, to, kSpan);
    for (int64_t t = 0; t < kChunk; t++) of[t] = k.scale[(slot + t) * k.groups + s.u.g + g] * args.scale * kLog2E;
    for (int64_t i = 0; i < s.m; i++)
      store(to + i * kSpan, load<F32x16>(to + i * kSpan) * (load<F32x16>(of) * x.scale[i]));
  }
}

// The largest of a row of scores over the keys that a token sees; NaN are passed over.
inline float largest_score(const SeenKeys &seen, const float *scores) {
  __m512 most = _mm512_set1_ps(-__builtin_inff());
  for (int64_t c = seen.first; c < seen.last; c++)  // `most` where a score is NaN
    most = _mm512_mask_max_ps(most, seen.lanes(c), _mm512_loadu_ps(scores + c * kChunk), most);
  return _mm512_reduce_max_ps(most);
}

// The weights of a row and chunk: 2^(score - top), 0 of keys that are not seen.
inline __m512 weights_of(const SeenKeys &seen, int64_t chunk, const float *scores, float top) {
  __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), seen.lanes(chunk), scores + chunk * kChunk);
  return exp2_of_negative(_mm512_sub_ps(v, _mm512_set1_ps(top)));
}

// Adds values that are not all finite, one by one, as float32: those of keys low .. high of head u.g + g.
inline void add_values_one_by_one(const Int4Span &s, int64_t g, int64_t low, int64_t high, const float *weights,
                                  float *out) {
  const AttentionArgs &args = s.args;
  bf16 *value = workspace(kEntriesInBf16)->reserve<bf16>(args.v_dim);
  memset(out, 0, (size_t)args.v_dim * sizeof(float));
  for (int64_t j = low - s.begin(); j < high - s.begin(); j++) {
    int4_entries_to_bf16(args.v, s.spans[j / kChunk] * kSpanSlots + j % kChunk, (s.u.g + g) * args.v_dim, args.v_dim, value);
    for (int64_t c = 0; c < args.v_dim; c += kLanes)
      store(out + c, fma(splat(weights[j]), load_f32x16(value + c), load<F32x16>(out + c)));
  }
}

// What the values of two groups of entries share over the keys that a token sees.
struct GroupPair {
  const bf16 *ranges[kChunks];  // of the first of the two, and of the other behind them, but if there is only one
  float unit[2];  // of 16-bit weights, times sixteen
  __m512 inverse[2];
  int64_t next;  // from the ranges of the one to those of the other
};

// Fills `pair` for groups 2 p, 2 p + 1 of head u.g + g. Returns whether all ranges are finite.
inline bool load_pair(const Int4Span &s, int64_t g, int64_t p, const SeenKeys &seen, GroupPair &pair) {
  pair.next = 2 * p + 1 < s.value_groups ? 2 * kSpanSlots : 0;
  __m512 largest[2] = {}, check = {};
  for (int64_t c = seen.first; c < seen.last; c++) {
    const bf16 *at = pair.ranges[c] = s.values(c, g).ranges + 4 * p * kSpanSlots;
    const __mmask16 lanes = seen.lanes(c);
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++, at += pair.next) {
      __m512 of = _mm512_maskz_mov_ps(lanes, load_float16s(at));
      __m512 minimum = _mm512_maskz_mov_ps(lanes, load_float16s(at + kSpanSlots));
      largest[k] = _mm512_max_ps(largest[k], of);
      check = _mm512_fmadd_ps(_mm512_add_ps(of, minimum), _mm512_setzero_ps(), check);  // NaN if anything is not finite
    }
  }
  for (int k = 0; k < 2; k++) {
    const float top = _mm512_reduce_max_ps(largest[k]);
    pair.inverse[k] = _mm512_set1_ps(top > 0 ? kLargestWeight / top : 0.0f);
    pair.unit[k] = top / (kLargestWeight * 16.0f);
  }
  return !_mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q);
}

// From MT rows of scores, kSpan apart, to the 16-bit weights of a pair of groups: weight times scale times inverse.
// FIRST: scores become weights, in place, whose sums are sums[i]; else they are weights already. offsets[i][k] = the weighted
// sum of what is to be added to values less 8 of group k. to [chunks, MT, 64 bytes]: of four keys the lower, then the
// upper bytes of the one group's weights; then the other's.
template <int MT, bool FIRST>
inline void round_weights(const Int4Span &s, int64_t g, const SeenKeys &seen, const GroupPair &pair, float *scores,
                          const float *top, float *sums, float (*offsets)[2], uint8_t *to) {
  const __m512i halves = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  __m512 all[MT] = {}, more[MT][2] = {};
  for (int64_t c = seen.first; c < seen.last; c++) {
    if (FIRST) s.prefetch_keys(c, g);
    const __mmask16 lanes = seen.lanes(c);
    __m512 scale[2], add[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
      const bf16 *at = pair.ranges[c] + k * pair.next;
      scale[k] = _mm512_maskz_mov_ps(lanes, load_float16s(at));
      add[k] = _mm512_maskz_mov_ps(lanes, load_float16s(at + kSpanSlots));
      add[k] = _mm512_fmadd_ps(scale[k], _mm512_set1_ps(8.0f), add[k]);
      scale[k] = _mm512_mul_ps(scale[k], pair.inverse[k]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) {
      float *at = scores + i * kSpan;
      __m512 w;
      if (FIRST) {
        w = weights_of(seen, c, at, top[i]);
        all[i] = _mm512_add_ps(all[i], w);
        _mm512_storeu_ps(at + c * kChunk, w);
      } else {
        w = _mm512_loadu_ps(at + c * kChunk);
      }
      __m512i both = _mm512_packus_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(w, scale[0])),
                                         _mm512_cvtps_epi32(_mm512_mul_ps(w, scale[1])));
      _mm512_store_si512(to + (c * MT + i) * 64, _mm512_shuffle_epi8(both, halves));
      more[i][0] = _mm512_fmadd_ps(w, add[0], more[i][0]), more[i][1] = _mm512_fmadd_ps(w, add[1], more[i][1]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) {
    if (FIRST) sums[i] = _mm512_reduce_add_ps(all[i]);
    offsets[i][0] = _mm512_reduce_add_ps(more[i][0]), offsets[i][1] = _mm512_reduce_add_ps(more[i][1]);
  }
}

// out[i][0 .. 32] = line `line` of values of head u.g + g times 16-bit weights, which `round_weights` wrote: integer
// sums times units[k], plus offsets[i][k], where the two halves of the line have groups k = of[0] and of[1] of the pair.
template <int MT, bool TWO>
inline void add_line(const Int4Span &s, int64_t g, int64_t line, const SeenKeys &seen, const uint8_t *weights,
                     const int of[2], const float units[2], const float (*offsets)[2], float *const *out) {
  const __m512i high_bits = _mm512_set1_epi8((char)0xf0), top_bit = _mm512_set1_epi8((char)0x80);
  constexpr int kAndXor = 0x6a;  // (a & b) ^ c
  const int64_t next = s.args.v_dim * 2;
  __m512i low[MT][2] = {}, high[MT][2] = {};  // products with the lower and the upper half of weights
  for (int64_t c = seen.first; c < seen.last; c++) {
    const uint8_t *at = s.values(c, g).bytes + line * 64, *w = weights + c * MT * 64 + of[0] * 8;
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++, at += next, w += 16) {
      // Bytes of sixteen times an entry less 8: of the first sixteen entries, and of the others.
      const __m512i x = _mm512_loadu_si512(at);
      const __m512i a = _mm512_ternarylogic_epi32(_mm512_slli_epi16(x, 4), high_bits, top_bit, kAndXor);
      const __m512i b = _mm512_ternarylogic_epi32(x, high_bits, top_bit, kAndXor);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        int32_t parts[4];
        memcpy(parts, w + i * 64, TWO ? 16 : 8);
        const __m512i lower = _mm512_set1_epi32(parts[0]), upper = _mm512_set1_epi32(parts[1]);
        low[i][0] = _mm512_dpbusd_epi32(low[i][0], lower, a);
        high[i][0] = _mm512_dpbusd_epi32(high[i][0], upper, a);
        low[i][1] = _mm512_dpbusd_epi32(low[i][1], TWO ? _mm512_set1_epi32(parts[2]) : lower, b);
        high[i][1] = _mm512_dpbusd_epi32(high[i][1], TWO ? _mm512_set1_epi32(parts[3]) : upper, b);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const int k = of[half];
      const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[i][half]), _mm512_set1_ps(256.0f),
                                         _mm512_cvtepi32_ps(low[i][half]));
      _mm512_storeu_ps(out[i] + line * 32 + half * 16,
                       _mm512_fmadd_ps(sum, _mm512_set1_ps(units[k]), _mm512_set1_ps(offsets[i][k])));
    }
}

// From MT rows of scores, kSpan apart, of head u.g + g over keys low .. high of a span, which are not none, to their
// partial results, part[i] = {maximum as a natural logarithm, sum of weights, weighted values}.
template <int MT>
inline void attend_rows(const Int4Span &s, int64_t g, int64_t low, int64_t high, float *scores, float *const *part) {
  const SeenKeys seen(s.begin(), low, high);
  const int64_t pairs = (s.value_groups + 1) / 2;
  uint8_t *weights = workspace(kInt4Weights)->reserve<uint8_t>(kChunks * MT * 64 + pairs * (int64_t)sizeof(GroupPair));
  GroupPair *groups = (GroupPair *)(weights + kChunks * MT * 64);
  float top[MT], sums[MT], offsets[MT][2], *out[MT];
  bool finite = true;
  for (int64_t p = 0; p < pairs; p++) finite = load_pair(s, g, p, seen, groups[p]) && finite;
  for (int i = 0; i < MT; i++)
    top[i] = largest_score(seen, scores + i * kSpan), part[i][0] = top[i] * 0.693147181f, out[i] = part[i] + 2;
  for (int64_t p = 0; p < pairs && finite; p++) {
    if (p == 0)
      round_weights<MT, true>(s, g, seen, groups[p], scores, top, sums, offsets, weights);
    else
      round_weights<MT, false>(s, g, seen, groups[p], scores, top, sums, offsets, weights);
    static constexpr int kOne[2] = {0, 0}, kOther[2] = {1, 1}, kBoth[2] = {0, 1};
    if (s.value_group == 16) {
      add_line<MT, true>(s, g, p, seen, weights, kBoth, groups[p].unit, offsets, out);
      continue;
    }
    add_line<MT, false>(s, g, 2 * p, seen, weights, kOne, groups[p].unit, offsets, out);
    if (groups[p].next) add_line<MT, false>(s, g, 2 * p + 1, seen, weights, kOther, groups[p].unit, offsets, out);
  }
  for (int i = 0; i < MT && !finite; i++) {
    __m512 all = {};
    for (int64_t c = seen.first; c < seen.last; c++) {
      __m512 w = weights_of(seen, c, scores + i * kSpan, top[i]);
      all = _mm512_add_ps(all, w);
      _mm512_storeu_ps(scores + i * kSpan + c * kChunk, w);
    }
    sums[i] = _mm512_reduce_add_ps(all);
    add_values_one_by_one(s, g, low, high, scores + i * kSpan, out[i]);
  }
  for (int i = 0; i < MT; i++) part[i][1] = sums[i];
}

// Computes the partial results of a unit of work over the span with number `span`, written to `to`. The arithmetic of a
// row does not depend on other rows.
inline void attend_span_int4(const AttentionArgs &args, const AttentionUnit &u, int64_t span, const PartialResults &to) {
  const SpanKeys visible(args, u.t, span);
  const int64_t group = args.heads / args.kv_heads, m = u.t.tokens * group;
  const int64_t value_group = args.v.groups;
  const int64_t chunks = (visible.end - visible.begin + kChunk - 1) / kChunk;
  Int4Span s = {args, u, visible, m, chunks, value_group, args.v_dim / value_group,
                workspace(kScores)->reserve<float>(m * kSpan), {}, {}};
  for (int64_t c = 0; c < chunks; c++) {
    int64_t key = visible.begin + c * kChunk;
    s.spans[c] = ((int64_t)u.t.table[key / args.block] * args.block + key % args.block) / kSpanSlots;
    key = min64(key + kSpan, u.t.position);
    s.next_spans[c] = ((int64_t)u.t.table[key / args.block] * args.block + key % args.block) / kSpanSlots;
  }
  for (int64_t g = 0; g < u.heads; g++) {
    if (args.k.is_int8())
      score_int8(s, g);
    else
      score_differences(s, g);
    for (int64_t i = 0; i < u.t.tokens; i++) {
      const int64_t high = min64(visible.end, u.t.position + i + 1);
      const int64_t low = args.window ? max64(visible.begin, u.t.position + i + 1 - args.window) : visible.begin;
      for_rows(group, [&](auto rows, int64_t h) {
        float *part[rows.value];
        for (int r = 0; r < rows.value; r++) {
          part[r] = to.part + i * to.token_stride + ((u.g + g) * group + h + r) * to.stride;
          if (low < high) continue;
          part[r][0] = -__builtin_inff(), part[r][1] = 0;  // this token sees nothing of the span
          memset(part[r] + 2, 0, (size_t)(to.stride - 2) * sizeof(float));
        }
        if (low < high) attend_rows<rows.value>(s, g, low, high, s.scores + (i * group + h) * kSpan, part);
      });
    }
  }
}

}  // namespace
#endif
