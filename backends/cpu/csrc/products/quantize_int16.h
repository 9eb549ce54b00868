// Activations rounded to 16-bit integers with one scale per row and group of columns, laid out for the products with
// int8, int4 and MXFP4 panels (panel_products.h). linear.h calls `quantize_int16` once per call and thread.
#pragma once
#include "products/bf16_dot.h"
#include "products/quantize_activations.h"
#include "products/weight_panels.h"

namespace {

// m rows of activations in `groups` groups of `group` columns.
struct Int16Activations {
  int64_t m, groups, group;
  // [columns / 32, m, 2, 8]: four columns per number; VNNI: their high bytes, then their low bytes; else columns 0 and
  // 2, then 1 and 3.
  const int32_t *quads;
  const float *scale;  // [groups, m]
  const int32_t *correction;  // [groups, m]: what removes the offset of the weight's entries from a group's sum
  const float *total;  // [groups, m]: the sum of a group's activations, which minimums multiply; null without them
};

// Lanes value * inverse rounded to integers of 16 bits, ties to even.
inline Ints round_to_int16(Floats value, float inverse) {
  // The instruction rounds to even, and makes of NaN an integer whose lower half is zero; a conversion of C++ need not.
#ifdef __AVX512F__
  __m512i rounded = _mm512_cvtps_epi32((__m512)(value * inverse));
  return (Ints)_mm512_srai_epi32(_mm512_slli_epi32(rounded, 16), 16);
#else
  __m256i rounded = _mm256_cvtps_epi32((__m256)(value * inverse));
  return (Ints)_mm256_srai_epi32(_mm256_slli_epi32(rounded, 16), 16);
#endif
}
// Rounds sixteen activations at `value`, times `inverse`, to 16 bits and writes them in the form of
// `Int16Activations::quads`: four numbers to first[0 .. 4], four to second[0 .. 4]. Returns a register whose lanes sum
// to the sum of the sixteen integers.
#if defined(__AVX512VNNI__)
inline Ints store_int16_quads(const Floats *value, float inverse, int32_t *first, int32_t *second) {
  Ints v = round_to_int16(*value, inverse), low = v << 24 >> 24;
  _mm_storeu_si128((__m128i *)first, _mm512_cvtepi32_epi8((__m512i)((v - low) >> 8)));
  _mm_storeu_si128((__m128i *)second, _mm512_cvtepi32_epi8((__m512i)low));
  return v;
}
#elif defined(__AVX512F__)
inline Ints store_int16_quads(const Floats *value, float inverse, int32_t *first, int32_t *second) {
  Ints v = round_to_int16(*value, inverse);
  for (int c = 0; c < 4; c++) {
    const int32_t e[4] = {v[4 * c], v[4 * c + 1], v[4 * c + 2], v[4 * c + 3]};
    first[c] = (int32_t)((uint32_t)(uint16_t)e[0] | (uint32_t)e[2] << 16);
    second[c] = (int32_t)((uint32_t)(uint16_t)e[1] | (uint32_t)e[3] << 16);
  }
  return v;
}
#else
inline Ints store_int16_quads(const Floats *value, float inverse, int32_t *first, int32_t *second) {
  Ints a = round_to_int16(value[0], inverse), b = round_to_int16(value[1], inverse);
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  __m256i quads = _mm256_shuffle_epi8(_mm256_packs_epi32((__m256i)a, (__m256i)b), order);  // columns 0 and 2, 1 and 3
  __m128i low = _mm256_castsi256_si128(quads), high = _mm256_extracti128_si256(quads, 1);
  _mm_storeu_si128((__m128i *)first, _mm_unpacklo_epi32(low, high));
  _mm_storeu_si128((__m128i *)second, _mm_unpackhi_epi32(low, high));
  return a + b;
}
#endif

constexpr int64_t kPrefetchLines = 8;  // prefetched with each group of columns
constexpr int64_t kMaxPrefetchBytes = 32768;  // and at most this much in all

// Quantizes all rows of x to 16 bits for products with w (int8 or int4), with one scale per row and group of columns,
// into `buffers` of the calling thread. Meanwhile it prefetches, a few lines per group, what is read next: at most
// kMaxPrefetchBytes from `prefetch_from` on; null: nothing. Columns after the last become zeros.
inline Int16Activations quantize_int16(Workspace buffers[3], const ActivationRows &x, const ip_matrix &w,
                                       const char *prefetch_from) {
  int64_t g = group_size(w), groups = num_groups(w), chunks = g / kLanes;
  const char *prefetch_end = prefetch_from ? prefetch_from + kMaxPrefetchBytes : prefetch_from;
  int32_t *q = buffers[0].reserve<int32_t>(x.m * groups * chunks * 8), offset = (int32_t)entry_offset(w);
  float *scale = buffers[1].reserve<float>(2 * x.m * groups), *total = scale + x.m * groups;
  const bool sums = has_minimums(w);
  int32_t *correction = buffers[2].reserve<int32_t>(x.m * groups);
  for (int64_t i = 0; i < x.m; i++)
    for (int64_t b = 0; b < groups; b++) {
      int64_t at = b * x.m + i, columns = min64(g, x.padded - b * g);
      for (int64_t l = 0; l < kPrefetchLines && prefetch_from != prefetch_end; l++, prefetch_from += 64)
        _mm_prefetch(prefetch_from, _MM_HINT_T1);
      const bf16 *from = x.x + i * x.padded + b * g;
      Floats value[128 / kRegisterLanes];
      Ints largest_lanes = {};
      for (int64_t c = 0; c < g / kRegisterLanes; c++) {
        value[c] = c * kRegisterLanes < columns ? load_floats(from + c * kRegisterLanes) : Floats{};
        Ints magnitude_bits = (Ints)value[c] & 0x7fffffff;
        largest_lanes = magnitude_bits > largest_lanes ? magnitude_bits : largest_lanes;
      }
      float largest = largest_of_lanes(largest_lanes);
      scale[at] = largest / 32512.0f;
      float inverse = largest > 0 ? 32512.0f / largest : 0.0f;
      // Too small to be distinguished from zero; NaN takes this branch too.
      if (!(inverse < 3e38f)) scale[at] = inverse = 0.0f;
      if (!(largest < 3e38f)) scale[at] = largest - largest;  // infinite or NaN: so is every result
      Ints all = {};
      for (int64_t c = 0; c < g / kLanes; c++) {
        int64_t chunk = b * chunks + c;
        int32_t *to = q + (chunk / 2 * x.m + i) * 16 + chunk % 2 * 4;
        all += store_int16_quads(value + c * (kLanes / kRegisterLanes), inverse, to, to + 8);
      }
      int32_t sum = sum_lanes(all);
      correction[at] = -offset * sum;
      if (sums) total[at] = (float)sum * scale[at];
    }
  return {x.m, groups, g, q, scale, correction, sums ? total : nullptr};
}

}  // namespace
