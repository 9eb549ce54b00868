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
  const int32_t *quads;  // [m, groups, 4]: four entries each
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
    for (int e = 0; e < 16; e++) all += (int8_t)entries[e], bytes[e] = (uint8_t)entries[e];
    memcpy(quads + i * 4, bytes, 16);
    sum[i] = (float)all * scale[i];
  }
  return {m, groups, quads, scale, sum};
}

#if defined(__AVX512VNNI__)
inline __m512 load_float16s(const bf16 *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

// out[i * ldo + t] = first[i * ldf] plus the product of row i0 + i of x with the differences of key t, for MT rows and
// the sixteen keys of a span and head.
template <int MT>
inline __attribute__((always_inline)) void difference_scores(const SpanOfHead &keys, const Int8Rows &x, int64_t i0,
                                                             const float *first, int64_t ldf, float *out, int64_t ldo) {
  const uint8_t *from = keys.bytes;
  const bf16 *ranges = keys.ranges;
  const __m512i low_bits = _mm512_set1_epi8(15);
  __m512 total[MT];
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) total[i] = _mm512_set1_ps(first[i * ldf]);
  for (int64_t g = 0; g < x.groups; g++, from += 128, ranges += 2 * kSpanSlots) {
    __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
    const __m512i entries[4] = {_mm512_and_si512(a, low_bits), _mm512_and_si512(_mm512_srli_epi16(a, 4), low_bits),
                                _mm512_and_si512(b, low_bits), _mm512_and_si512(_mm512_srli_epi16(b, 4), low_bits)};
    const __m512 scale = load_float16s(ranges), minimum = load_float16s(ranges + kSpanSlots);
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) {
      const int64_t at = (i0 + i) * x.groups + g;
      __m512i sum = {};
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sum = _mm512_dpbusd_epi32(sum, entries[j], _mm512_set1_epi32(x.quads[at * 4 + j]));
      total[i] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.sum[at]), total[i]);
      total[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(x.scale[at])), scale, total[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) _mm512_storeu_ps(out + i * ldo, total[i]);
}
#endif

}  // namespace
