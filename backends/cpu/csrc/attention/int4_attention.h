// Attention of few query tokens over values of 4 bits and keys of 4 bits or int8, entries not converted: scores by
// int4_scores.h or int8_scores.h; weights times the scales of values become 16-bit numbers, whose halves are multiplied
// with entries as they lie (vpdpbusd). `attend` (paged_attention.h) calls `attend_span_int4` where `has_int4_products`.
#pragma once
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

// A span of a unit: the keys that its tokens see, and the buffers of the calling thread.
struct Int4Span {
  const AttentionArgs &args;
  const AttentionUnit &u;
  SpanKeys visible;
  int64_t group, m, chunks, value_group, value_groups;  // of a head: entries that share a scale, and such groups
  float *scores;  // [heads, m, kSpan]: scores in powers of two, then weights
  float *scale, *minimum;  // of values: [heads * value_groups, kSpan]
  int64_t slots[kChunks];  // the first slot of each chunk

  int64_t begin() const { return visible.begin; }
  bool sees(int64_t chunk) const { return begin() + (chunk + 1) * kChunk > visible.from; }
};

// Prefetches `bytes` of each of the rows first .. last, which are `stride` bytes apart.
inline void prefetch_rows(const void *from, int64_t stride, int64_t bytes, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r++)
    for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch((const char *)from + r * stride + b, _MM_HINT_T1);
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

// Scores of a unit with the keys of a span, of which those of 4 bits are differences.
inline void score_differences(const Int4Span &s) {
  const AttentionArgs &args = s.args;
  const KvEntries &k = args.k;
  const int64_t groups = args.dim / kDifferenceGroup, heads = s.u.heads, columns = heads * groups;
  float *firsts = workspace(kInt4Firsts)->reserve<float>(heads * s.m * kChunks + s.m + 2 * columns * kChunk);
  float *first = firsts + heads * s.m * kChunks, *scale = first + s.m, *minimum = scale + columns * kChunk;
  for (int64_t g = 0; g < heads; g++) {
    const int8_t *at[kChunks];
    for (int64_t c = 0; c < kChunks; c++)
      at[c] = k.first + s.slots[min64(c, s.chunks - 1)] / kSpanSlots * k.stride + (s.u.g + g) * args.dim;
    scores_of_firsts(at, args.dim, s.u.q[g].int16, firsts + g * s.m * kChunks);
  }
  const int64_t row = k.stride / 2, share = (kChunk + heads - 1) / heads;
  for (int64_t c = 0; c < s.chunks; c++) {
    if (!s.sees(c)) continue;
    const int64_t slot = s.slots[c], next = s.slots[min64(c + 1, s.chunks - 1)];
    convert_ranges(k.ranges + 2 * (slot * k.groups + s.u.g * groups), k.groups, columns, scale, minimum, kChunk);
    for (int64_t g = 0; g < heads; g++) {
      const int64_t from = min64(kChunk, g * share), to = min64(kChunk, from + share);
      const int64_t at = s.u.g * args.dim / 2, value = s.u.g * args.v_dim / 2;
      prefetch_rows((const char *)k.data + next * row + at, row, heads * args.dim / 2, from, to);
      prefetch_rows(k.ranges + 2 * (next * k.groups + s.u.g * groups), 4 * k.groups, 4 * columns, from, to);
      prefetch_rows((const char *)args.v.data + slot * args.v.stride / 2 + value, args.v.stride / 2,
                    heads * args.v_dim / 2, from, to);
      const float by = k.first_scale[slot / kSpanSlots * args.kv_heads + s.u.g + g] * args.scale * kLog2E;
      for (int64_t i = 0; i < s.m; i++) first[i] = firsts[(g * s.m + i) * kChunks + c] * by;
      difference_scores_of_rows((const uint8_t *)k.data + slot * row + (s.u.g + g) * args.dim / 2, row,
                                scale + g * groups * kChunk, minimum + g * groups * kChunk, s.u.q[g].int8, first,
                                s.scores + g * s.m * kSpan + c * kChunk, kSpan);
    }
  }
}

// Scores of a unit with the keys of a span, which are int8.
inline void score_int8(const Int4Span &s) {
  const AttentionArgs &args = s.args;
  const KvEntries &k = args.k;
  for (int64_t c = 0; c < s.chunks; c++) {
    if (!s.sees(c)) continue;
    const int64_t slot = s.slots[c], next = s.slots[min64(c + 1, s.chunks - 1)];
    prefetch_rows(k.int8_entries() + next * k.stride + s.u.g * args.dim, k.stride, s.u.heads * args.dim, 0, kChunk);
    prefetch_rows((const char *)args.v.data + slot * args.v.stride / 2 + s.u.g * args.v_dim / 2, args.v.stride / 2,
                  s.u.heads * args.v_dim / 2, 0, kChunk);
    for (int64_t g = 0; g < s.u.heads; g++) {
      float *to = s.scores + g * s.m * kSpan + c * kChunk, of[kChunk];
      const Int16Rows &x = s.u.q[g].int16;
      int8_scores(k.int8_entries() + slot * k.stride + (s.u.g + g) * args.dim, k.stride, kChunk, args.dim, x, to, kSpan);
      for (int64_t t = 0; t < kChunk; t++) of[t] = k.scale[(slot + t) * k.groups + s.u.g + g] * args.scale * kLog2E;
      for (int64_t i = 0; i < s.m; i++)
        store(to + i * kSpan, load<F32x16>(to + i * kSpan) * (load<F32x16>(of) * x.scale[i]));
    }
  }
}

// Softmax of a row of scores over keys low .. high, which are not none: they become weights, 0 of other keys. part =
// {maximum as a natural logarithm, sum of the weights}.
inline void softmax_powers(const Int4Span &s, int64_t low, int64_t high, float *scores, float *part) {
  __m512 most = _mm512_set1_ps(-__builtin_inff()), all = {};
  const __m512 none = most;
  const int64_t first = (low - s.begin()) / kChunk, last = (high - s.begin() + kChunk - 1) / kChunk;
  for (int64_t c = 0; c < s.chunks; c++) {
    const int64_t key = s.begin() + c * kChunk;
    __m512 v = none;
    if (c >= first && c < last)
      v = _mm512_mask_mov_ps(none, lanes_between(key, low, high), _mm512_loadu_ps(scores + c * kChunk));
    _mm512_storeu_ps(scores + c * kChunk, v);
    most = _mm512_max_ps(v, most);  // keeps `most` where v is NaN
  }
  float top = _mm512_reduce_max_ps(most);
  for (int64_t c = 0; c < s.chunks; c++) {
    __m512 p = exp2_of_negative(_mm512_sub_ps(_mm512_loadu_ps(scores + c * kChunk), _mm512_set1_ps(top)));
    all = _mm512_add_ps(all, p);
    _mm512_storeu_ps(scores + c * kChunk, p);
  }
  part[0] = top * 0.693147181f, part[1] = _mm512_reduce_add_ps(all);
}

// Adds, to the sums of MT rows, 32 entries (`from` of a slot 0, rows of `stride` bytes) times 16-bit weights: those of
// chunk c, row i and the entries' groups begin at weights + (c * rows + i) * ld. out[i * ldo + e] is overwritten:
// Int sums times unit[i], which has one number for entries 0 .. 15 and one for the others, plus offset[i], likewise.
// `TWO`: whether the halves of the entries are groups of their own.
template <int MT, bool TWO>
inline void add_entries(const Int4Span &s, const uint8_t *from, int64_t stride, int64_t first, const uint8_t *weights,
                        int64_t row_bytes, int64_t chunk_bytes, int group, const float (*unit)[2],
                        const float (*offset)[2], float *const *out) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i high_bits = _mm512_set1_epi8((char)0xf0), top_bit = _mm512_set1_epi8((char)0x80);
  constexpr int kAndXor = 0x6a;  // (a & b) ^ c
  __m512i low[MT][2] = {}, high[MT][2] = {};  // products with the lower and the upper half of weights
  for (int64_t c = first; c < s.chunks; c++) {
    const uint8_t *at = from + s.slots[c] * stride, *w = weights + c * chunk_bytes + group % 2 * 8;
#pragma GCC unroll 2
    for (int quad = 0; quad < 4; quad++, at += 4 * stride, w += 16) {
      __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)at));
      x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(at + stride)), 1);
      x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(at + 2 * stride)), 2);
      x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i *)(at + 3 * stride)), 3);
      x = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(order, x), bytes);
      // Bytes of sixteen times an entry less 8: of the odd entries, and of the even ones.
      __m512i odd = _mm512_ternarylogic_epi32(x, high_bits, top_bit, kAndXor);
      __m512i even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(x, 4), high_bits, top_bit, kAndXor);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        int32_t of[4];
        memcpy(of, w + i * row_bytes, TWO ? 16 : 8);
        __m512i a = _mm512_set1_epi32(of[0]), b = _mm512_set1_epi32(of[1]);
        if (TWO) a = _mm512_mask_set1_epi32(a, 0xff00, of[2]), b = _mm512_mask_set1_epi32(b, 0xff00, of[3]);
        low[i][0] = _mm512_dpbusd_epi32(low[i][0], a, even), low[i][1] = _mm512_dpbusd_epi32(low[i][1], a, odd);
        high[i][0] = _mm512_dpbusd_epi32(high[i][0], b, even), high[i][1] = _mm512_dpbusd_epi32(high[i][1], b, odd);
      }
    }
  }
  const __m512i first_pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i last_pairs = _mm512_add_epi32(first_pairs, _mm512_set1_epi32(8));
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) {
    __m512 sums[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
      sums[half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[i][half]), _mm512_set1_ps(256.0f),
                                   _mm512_cvtepi32_ps(low[i][half]));
    _mm512_storeu_ps(out[i], _mm512_fmadd_ps(_mm512_permutex2var_ps(sums[0], first_pairs, sums[1]),
                                             _mm512_set1_ps(unit[i][0]), _mm512_set1_ps(offset[i][0])));
    _mm512_storeu_ps(out[i] + 16, _mm512_fmadd_ps(_mm512_permutex2var_ps(sums[0], last_pairs, sums[1]),
                                                  _mm512_set1_ps(unit[i][1]), _mm512_set1_ps(offset[i][1])));
  }
}

// Adds values that are not all finite, one by one, as float32: those of keys low .. high of head u.g + g.
inline void add_values_one_by_one(const Int4Span &s, int64_t g, int64_t low, int64_t high, const float *weights,
                                  float *out) {
  const AttentionArgs &args = s.args;
  bf16 *value = workspace(kEntriesInBf16)->reserve<bf16>(args.v_dim);
  memset(out, 0, (size_t)args.v_dim * sizeof(float));
  for (int64_t j = low - s.begin(); j < high - s.begin(); j++) {
    int4_entries_to_bf16(args.v, s.slots[j / kChunk] + j % kChunk, (s.u.g + g) * args.v_dim, args.v_dim, value);
    for (int64_t c = 0; c < args.v_dim; c += kLanes)
      store(out + c, fma(splat(weights[j]), load_f32x16(value + c), load<F32x16>(out + c)));
  }
}

// part[i] + 2 = the weighted values of MT rows, whose weights are at `scores`, kSpan apart, over keys low .. high.
template <int MT>
inline void add_int4_values(const Int4Span &s, int64_t g, int64_t low, int64_t high, const float *scores,
                            float *const *out) {
  const AttentionArgs &args = s.args;
  const int64_t groups = s.value_groups, pairs = (groups + 1) / 2, first = (low - s.begin()) / kChunk;
  const __m512i halves = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  // [pairs, chunks, MT, 64 bytes]: of four keys the lower, then the upper bytes of a group's weights; then the next's.
  uint8_t *weights = workspace(kInt4Weights)->reserve<uint8_t>(pairs * kChunks * MT * 64 + MT * groups * 8);
  float *unit = (float *)(weights + pairs * kChunks * MT * 64), *offset = unit + MT * groups;
  for (int64_t p = 0; p < pairs; p++) {
    const float *scale[2], *minimum[2];
    __m512 largest[2] = {}, check = {}, offsets[MT][2] = {};
    for (int k = 0; k < 2; k++) {
      int64_t column = (g * groups + min64(2 * p + k, groups - 1)) * kSpan;
      scale[k] = s.scale + column, minimum[k] = s.minimum + column;
    }
    for (int64_t c = first; c < s.chunks; c++) {
      const __mmask16 lanes = lanes_between(s.begin() + c * kChunk, low, high);
#pragma GCC unroll 2
      for (int k = 0; k < 2; k++) {
        __m512 of = _mm512_maskz_loadu_ps(lanes, scale[k] + c * kChunk);
        __m512 m = _mm512_maskz_loadu_ps(lanes, minimum[k] + c * kChunk);
        largest[k] = _mm512_max_ps(largest[k], of);
        m = _mm512_fmadd_ps(of, _mm512_set1_ps(8.0f), m);
        check = _mm512_fmadd_ps(m, _mm512_setzero_ps(), check);  // NaN if anything is not finite
#pragma GCC unroll 4
        for (int i = 0; i < MT; i++)
          offsets[i][k] = _mm512_fmadd_ps(_mm512_loadu_ps(scores + i * kSpan + c * kChunk), m, offsets[i][k]);
      }
    }
    if (_mm512_cmp_ps_mask(check, check, _CMP_UNORD_Q)) {
      for (int i = 0; i < MT; i++) add_values_one_by_one(s, g, low, high, scores + i * kSpan, out[i]);
      return;
    }
    __m512 inverse[2];
    for (int k = 0; k < 2; k++) {
      float top = _mm512_reduce_max_ps(largest[k]);
      inverse[k] = _mm512_set1_ps(top > 0 ? kLargestWeight / top : 0.0f);
      for (int i = 0; i < MT && 2 * p + k < groups; i++) {
        unit[i * groups + 2 * p + k] = top / (kLargestWeight * 16.0f);
        offset[i * groups + 2 * p + k] = _mm512_reduce_add_ps(offsets[i][k]);
      }
    }
    for (int64_t c = first; c < s.chunks; c++) {
      const __mmask16 lanes = lanes_between(s.begin() + c * kChunk, low, high);
      __m512 a = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, scale[0] + c * kChunk), inverse[0]);
      __m512 b = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, scale[1] + c * kChunk), inverse[1]);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        __m512 w = _mm512_loadu_ps(scores + i * kSpan + c * kChunk);
        __m512i both = _mm512_packus_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(w, a)),
                                           _mm512_cvtps_epi32(_mm512_mul_ps(w, b)));
        _mm512_store_si512(weights + ((p * kChunks + c) * MT + i) * 64, _mm512_shuffle_epi8(both, halves));
      }
    }
  }
  const int64_t stride = args.v.stride / 2;
  for (int64_t e = 0; e < args.v_dim; e += 32) {
    const int group = (int)(e / s.value_group);
    const bool two = s.value_group == 16;
    float units[MT][2], offsets[MT][2], *to[MT];
    for (int i = 0; i < MT; i++)
      for (int k = 0; k < 2; k++) {
        units[i][k] = unit[i * groups + group + (two ? k : 0)], offsets[i][k] = offset[i * groups + group + (two ? k : 0)];
        to[i] = out[i] + e;
      }
    const uint8_t *from = (const uint8_t *)args.v.data + ((s.u.g + g) * args.v_dim + e) / 2;
    const uint8_t *of = weights + group / 2 * kChunks * MT * 64;
    (two ? add_entries<MT, true> : add_entries<MT, false>)(s, from, stride, first, of, 64, MT * 64, group, units, offsets,
                                                           to);
  }
}

// Computes the partial results of a unit of work over the span with number `span`, written to `to`. The arithmetic of a
// row does not depend on other rows.
inline void attend_span_int4(const AttentionArgs &args, const AttentionUnit &u, int64_t span, const PartialResults &to) {
  const SpanKeys visible(args, u.t, span);
  const int64_t group = args.heads / args.kv_heads, m = u.t.tokens * group;
  const int64_t value_group = args.v.stride / args.v.groups, groups = args.v_dim / value_group;
  const int64_t chunks = (visible.end - visible.begin + kChunk - 1) / kChunk;
  float *scores = workspace(kScores)->reserve<float>((u.heads * m + 2 * u.heads * groups) * kSpan);
  float *scale = scores + u.heads * m * kSpan;
  Int4Span s = {args, u, visible, group, m, chunks, value_group, groups, scores, scale, scale + u.heads * groups * kSpan, {}};
  for (int64_t c = 0; c < chunks; c++) {
    int64_t key = visible.begin + c * kChunk;
    s.slots[c] = (int64_t)u.t.table[key / args.block] * args.block + key % args.block;
  }
  if (args.k.is_int8())
    score_int8(s);
  else
    score_differences(s);
  for (int64_t c = 0; c < chunks; c++)
    if (s.sees(c))
      convert_ranges(args.v.ranges + 2 * (s.slots[c] * args.v.groups + u.g * groups), args.v.groups, u.heads * groups,
                     s.scale + c * kChunk, s.minimum + c * kChunk, kSpan);
  for (int64_t g = 0; g < u.heads; g++)
    for (int64_t i = 0; i < u.t.tokens; i++) {
      const int64_t high = min64(visible.end, u.t.position + i + 1);
      const int64_t low = args.window ? max64(visible.begin, u.t.position + i + 1 - args.window) : visible.begin;
      float *of = scores + (g * m + i * group) * kSpan, *out[4];
      for (int64_t h = 0; h < group;) {
        const int64_t rows = group - h >= 4 ? 4 : group - h >= 2 ? 2 : 1;
        for (int64_t r = 0; r < rows; r++) {
          float *part = to.part + i * to.token_stride + ((u.g + g) * group + h + r) * to.stride;
          out[r] = part + 2;
          if (low < high) {
            softmax_powers(s, low, high, of + (h + r) * kSpan, part);
          } else {  // this token sees nothing of the span
            part[0] = -__builtin_inff(), part[1] = 0;
            memset(part + 2, 0, (size_t)(to.stride - 2) * sizeof(float));
          }
        }
        if (low < high)
          (rows == 4 ? add_int4_values<4> : rows == 2 ? add_int4_values<2> : add_int4_values<1>)(s, g, low, high,
                                                                                                  of + h * kSpan, out);
        h += rows;
      }
    }
}

}  // namespace
#endif
