// Scores of keys of 4 bits that are stored as differences, in integers: query rows rounded to int8 by groups of 16
// entries times the differences as they lie, sixteen keys side by side. paged_attention.h reads them by
// int4_attention.h, on processors with products of bytes (VNNI); elsewhere keys are converted to bf16.
#pragma once
#include "attention/attention_plan.h"
#include "attention/int8_scores.h"

namespace {

// Whether attention over this cache is computed by int4_attention.h: few query rows per key, values of 4 bits, keys of
// 4 bits or int8. The model's sizes and the cache's kind decide, so that a result does not depend on the step.
inline bool has_int4_products(const AttentionArgs &args) {
#if defined(__AVX512VNNI__)
  bool keys = args.k.kind == IP_KV_INT4_DIFFERENCES || args.k.is_int8();
#if defined(INFERPLANE_AMX)
  keys = keys && !args.uses_tiles();
#endif
  return keys && args.v.kind == IP_KV_INT4 && !args.has_latents() && args.softcap == 0 &&
         args.block % kSpanSlots == 0 && args.dim % 32 == 0 && args.v_dim % 32 == 0;
#else
  return false;
#endif
}

// Rows of queries as 8-bit integers, with a scale for each group of kDifferenceGroup entries of a row.
struct Int8Rows {
  int64_t m, groups;
  const int32_t *quads;  // [m, groups, 4]: of 8 entries the even ones, then the odd ones; then those of the next 8
  const float *scale, *sum;  // [m, groups]: of the entries; the sum of a group's entries times its scale
};

// Rounds m rows of k entries, a multiple of 16, where row(i) points to row i, times `factor`, in `buffer`. A group that
// is not finite has the scale NaN, and a group of zeros 0.
template <class RowAt>
inline Int8Rows quantize_rows_int8(Workspace &buffer, int64_t m, int64_t k, float factor, RowAt row) {
  int64_t groups = k / kDifferenceGroup;
  int32_t *quads = buffer.reserve<int32_t>(m * groups * 6);
  float *scale = (float *)(quads + m * groups * 4), *sum = scale + m * groups;
  for (int64_t i = 0; i < m * groups; i++) {
    const bf16 *from = row(i / groups) + i % groups * kDifferenceGroup;
    float largest = largest_magnitude(from, kDifferenceGroup), inverse = largest > 0 ? 127.0f / largest : 0.0f;
    scale[i] = largest / 127.0f * factor;
    if (!(inverse < 3e38f)) scale[i] = inverse = 0.0f;  // too small; NaN takes this branch too
    if (!(largest < 3e38f)) scale[i] = largest - largest;
    I32x16 entries = __builtin_convertvector(round_even(load_f32x16(from) * inverse), I32x16);
    int32_t all = 0;
    uint8_t bytes[16];
    for (int e = 0; e < 16; e++) all += (int8_t)entries[e], bytes[e / 8 * 8 + e % 2 * 4 + e % 8 / 2] = (uint8_t)entries[e];
    memcpy(quads + i * 4, bytes, 16);
    sum[i] = (float)all * scale[i];
  }
  return {m, groups, quads, scale, sum};
}

#if defined(__AVX512VNNI__)
// The pairs of scale and minimum of sixteen slots in float32: scale[c * ld + t] and minimum[c * ld + t] of slot t are
// those of pair c of `columns`; `from` has float16, `stride` pairs a slot.
inline void convert_ranges(const bf16 *from, int64_t stride, int64_t columns, float *scale, float *minimum, int64_t ld) {
  const __m512i halves = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                          20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  auto load_slots = [&](__m512i r[4], auto slot) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // lane l has slot 4 l + i
      r[i] = _mm512_castsi128_si512(slot(i));
      r[i] = _mm512_inserti32x4(r[i], slot(4 + i), 1);
      r[i] = _mm512_inserti32x4(r[i], slot(8 + i), 2);
      r[i] = _mm512_inserti32x4(r[i], slot(12 + i), 3);
    }
  };
  for (int64_t c = 0; c < columns; c += 4) {
    __m512i r[4], u[4];
    const bf16 *at = from + 2 * c;
    if (columns - c >= 4) {
      load_slots(r, [&](int64_t t) { return _mm_loadu_si128((const __m128i *)(at + 2 * t * stride)); });
    } else {
      const __mmask8 have = (__mmask8)((1 << (columns - c)) - 1);
      load_slots(r, [&](int64_t t) { return _mm_maskz_loadu_epi32(have, at + 2 * t * stride); });
    }
    u[0] = _mm512_unpacklo_epi32(r[0], r[1]), u[1] = _mm512_unpackhi_epi32(r[0], r[1]);
    u[2] = _mm512_unpacklo_epi32(r[2], r[3]), u[3] = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(u[0], u[2]), r[1] = _mm512_unpackhi_epi64(u[0], u[2]);
    r[2] = _mm512_unpacklo_epi64(u[1], u[3]), r[3] = _mm512_unpackhi_epi64(u[1], u[3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      if (c + i >= columns) break;
      __m512i both = _mm512_permutexvar_epi16(halves, r[i]);
      _mm512_storeu_ps(scale + (c + i) * ld, _mm512_cvtph_ps(_mm512_castsi512_si256(both)));
      _mm512_storeu_ps(minimum + (c + i) * ld, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)));
    }
  }
}

// columns[c]: entries 8 c .. 8 c + 7 of sixteen keys of 4 bits, side by side; `bytes` (16 or 32) of each key are read.
inline void load_key_columns(const uint8_t *from, int64_t stride, int64_t bytes, __m512i columns[8]) {
  const __mmask8 have = (__mmask8)((1 << bytes / 8) - 1);
  const __m512i first = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13), last = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i split = _mm512_setr_epi32(0, 2, 4, 6, 16, 18, 20, 22, 1, 3, 5, 7, 17, 19, 21, 23);
  const __m512i upper = _mm512_add_epi32(split, _mm512_set1_epi32(8));
  __m512i x[4], y[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    auto two = [&](int64_t t) {
      return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi64(have, from + t * stride)),
                                _mm256_maskz_loadu_epi64(have, from + (t + 1) * stride), 1);
    };
    __m512i a = two(4 * i), b = two(4 * i + 2);
    x[i] = _mm512_permutex2var_epi64(a, first, b), y[i] = _mm512_permutex2var_epi64(a, last, b);
  }
  auto store_group = [&](const __m512i *of, __m512i index, __m512i *to) __attribute__((always_inline)) {
    __m512i low = _mm512_permutex2var_epi32(of[0], index, of[1]), high = _mm512_permutex2var_epi32(of[2], index, of[3]);
    to[0] = _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1), to[1] = _mm512_shuffle_i64x2(low, high, 0xee);
  };
  store_group(x, split, columns), store_group(x, upper, columns + 2);
  store_group(y, split, columns + 4), store_group(y, upper, columns + 6);
}

// out[i * ldo + t] = first[i] plus the product of row i0 + i of x with the differences of key t, for MT rows and sixteen
// keys: `from` their bytes, `stride` apart; ranges as `convert_ranges` wrote them with ld 16.
template <int MT>
inline void difference_scores(const uint8_t *from, int64_t stride, const float *scale, const float *minimum,
                              const Int8Rows &x, int64_t i0, const float *first, float *out, int64_t ldo) {
  const __m512i low_bits = _mm512_set1_epi8(15);
  __m512 total[MT];
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) total[i] = _mm512_set1_ps(first[i]);
  for (int64_t c = 0; c < x.groups; c += 4) {
    __m512i columns[8];
    load_key_columns(from + c * 8, stride, min64(4, x.groups - c) * 8, columns);
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
      if (c + g >= x.groups) break;
      __m512i even[2], odd[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        even[half] = _mm512_and_si512(columns[2 * g + half], low_bits);
        odd[half] = _mm512_and_si512(_mm512_srli_epi16(columns[2 * g + half], 4), low_bits);
      }
      __m512 s = _mm512_loadu_ps(scale + (c + g) * 16), m = _mm512_loadu_ps(minimum + (c + g) * 16);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        int64_t at = (i0 + i) * x.groups + c + g;
        const int32_t *q = x.quads + at * 4;
        __m512i sum = _mm512_dpbusd_epi32(__m512i{}, even[0], _mm512_set1_epi32(q[0]));
        __m512i other = _mm512_dpbusd_epi32(__m512i{}, odd[0], _mm512_set1_epi32(q[1]));
        sum = _mm512_dpbusd_epi32(sum, even[1], _mm512_set1_epi32(q[2]));
        other = _mm512_dpbusd_epi32(other, odd[1], _mm512_set1_epi32(q[3]));
        __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sum, other)), _mm512_set1_ps(x.scale[at]));
        total[i] = _mm512_fmadd_ps(product, s, total[i]);
        total[i] = _mm512_fmadd_ps(m, _mm512_set1_ps(x.sum[at]), total[i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) _mm512_storeu_ps(out + i * ldo, total[i]);
}

// `difference_scores` of all rows of x, at most four at a time.
inline void difference_scores_of_rows(const uint8_t *from, int64_t stride, const float *scale, const float *minimum,
                                      const Int8Rows &x, const float *first, float *out, int64_t ldo) {
  for (int64_t i = 0; i < x.m;) {
    float *to = out + i * ldo;
    if (x.m - i >= 4)
      difference_scores<4>(from, stride, scale, minimum, x, i, first + i, to, ldo), i += 4;
    else if (x.m - i >= 2)
      difference_scores<2>(from, stride, scale, minimum, x, i, first + i, to, ldo), i += 2;
    else
      difference_scores<1>(from, stride, scale, minimum, x, i, first + i, to, ldo), i += 1;
  }
}
#endif

}  // namespace
