// Scales and minimums of weights in panels (weight_panels.h), in each of the forms that they are stored in.
// panel_products.h and what expands panels read them here.
#pragma once
#include "products/weight_panels.h"
#include "runtime/vectors.h"

namespace {

// A panel's scales or minimums, sixteen per group: float32, or if `full` is null float16, or if that is null too,
// float32's exponent bits alone, or integers times a unit in float16 per 2^shift groups.
struct PanelScales {
  const float *full;
  const bf16 *half;
  const uint8_t *exponents;
  const int8_t *multiples;
  const bf16 *units;
  int shift;
#ifndef __AVX512F__
  // Scales 8 * h .. 8 * h + 8 of group g.
  inline __m256 eight_of_group(int64_t g, int h) const {
    int64_t at = g * kLanes + h * 8;
    if (exponents) {
      __m256i bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(exponents + at)));
      return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
    }
    if (multiples) {
      __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(multiples + at)));
      const __m128i *unit = (const __m128i *)(units + (g >> shift) * kLanes + h * 8);
      return _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_cvtph_ps(_mm_loadu_si128(unit)));
    }
    return full ? _mm256_loadu_ps(full + at) : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + at)));
  }
#endif
#ifdef __AVX512F__
  // The integers of group g.
  inline F32x16 multiples_of_group(int64_t g) const {
    __m512i code = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(multiples + g * kLanes)));
    return (F32x16)_mm512_cvtepi32_ps(code);
  }
  // What the integers of group g are multiplied by.
  inline F32x16 unit_of_group(int64_t g) const {
    const __m256i *unit = (const __m256i *)(units + (g >> shift) * kLanes);
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256(unit));
  }
#endif
  // The sixteen scales of group g, one per weight row.
  inline F32x16 of_group(int64_t g) const {
    if (full) return load<F32x16>(full + g * kLanes);
#ifdef __AVX512F__
    if (exponents) {
      __m512i bits = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(exponents + g * kLanes)));
      return (F32x16)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
    }
    if (multiples) return multiples_of_group(g) * unit_of_group(g);
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + g * kLanes)));
#else
    __m256 two[2] = {eight_of_group(g, 0), eight_of_group(g, 1)};
    return load<F32x16>(two);
#endif
  }
};

// The scales of one panel, for all groups of columns.
inline PanelScales panel_scales(const ip_matrix &w, int64_t panel) {
  int64_t at = panel * num_scale_groups(w) * kLanes, unit = panel * num_units(w) * kLanes;
  return {w.scale ? w.scale + at : nullptr,
          w.scale_f16 ? w.scale_f16 + at : nullptr,
          w.scale_exponent ? w.scale_exponent + at : nullptr,
          w.scale_code ? w.scale_code + at : nullptr,
          w.scale_unit ? w.scale_unit + unit : nullptr,
          unit_shift(w)};
}
// The minimums of one panel, if the weight has them.
inline PanelScales panel_minimums(const ip_matrix &w, int64_t panel) {
  int64_t at = panel * num_scale_groups(w) * kLanes, unit = panel * num_units(w) * kLanes;
  return {w.minimum ? w.minimum + at : nullptr,
          w.minimum_f16 ? w.minimum_f16 + at : nullptr,
          nullptr,
          w.minimum_code ? w.minimum_code + at : nullptr,
          w.minimum_unit ? w.minimum_unit + unit : nullptr,
          unit_shift(w)};
}
// The scales of a panel's sixteen rows in group g of columns; g is ignored if the weight has one scale per row.
inline F32x16 panel_scale(const ip_matrix &w, int64_t panel, int64_t g) {
  return panel_scales(w, panel).of_group(w.group ? g : 0);
}
// What is added to the values of a panel's sixteen rows in group g of columns.
inline F32x16 panel_minimum(const ip_matrix &w, int64_t panel, int64_t g) {
  return has_minimums(w) ? panel_minimums(w, panel).of_group(g) : F32x16{};
}

}  // namespace
