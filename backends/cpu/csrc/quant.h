// Weights of 8 and 4 bits times activations, exactly in integers.
//
// Activations are rounded to 16-bit integers in groups of columns (32 to 128), an error of 2^-16 of a group's largest
// entry, 1/128 of what rounding the result to bf16 costs. Products and sums within a group are then exact in 32 bits,
// on every instruction set alike: with VNNI the 16 bits are two signed bytes (256 high + low), without it pairs of
// 16-bit products.
#pragma once
#include "codes.h"
#include "dot.h"
#include "pack.h"

namespace {

struct Quantized {
  int64_t m, groups, group;
  const int32_t *quads;  // [m, groups, 2, group / 4]: VNNI: high bytes, then low bytes; else (0, 2) and (1, 3) a quad
  const float *scale;    // [m, groups]
  const int32_t *sums;   // [m, groups, 2]: of what stands in `quads`
};

inline Quantized quantize(Scratch scratch[3], const Rows &x, const ip_matrix &w) {
  int64_t g = group_of(w), groups = groups_of(w), quads = g / 4;
  int32_t *q = scratch[0].get<int32_t>(x.m * groups * 2 * quads);
  float *scale = scratch[1].get<float>(x.m * groups);
  int32_t *sums = scratch[2].get<int32_t>(x.m * groups * 2);
  for (int64_t i = 0; i < x.m; i++)
    for (int64_t b = 0; b < groups; b++) {
      int64_t at = i * groups + b, have = min64(g, x.padded - b * g);
      const bf16 *from = x.x + i * x.padded + b * g;
      F top = F{}, value[8];
      for (int64_t c = 0; c < g / kLanes; c++) {
        value[c] = c * kLanes < have ? load16(from + c * kLanes) : F{};
        F size = (F)((U)value[c] & 0x7fffffffu);
        top = size > top ? size : top;
      }
      float most = 0;
      for (int l = 0; l < kLanes; l++) most = top[l] > most ? top[l] : most;
      scale[at] = most / 32512.0f;
      float inverse = most > 0 ? 32512.0f / most : 0.0f;
      if (!(inverse < 3e38f)) scale[at] = inverse = 0.0f;  // too small to be told from zero; NaN goes the same way
      if (!(most < 3e38f)) scale[at] = most - most;        // infinite or NaN: so is every result
      int16_t v[128];
      int32_t high_sum = 0, low_sum = 0;
      for (int64_t c = 0; c < g / kLanes; c++)
        store(v + c * kLanes, __builtin_convertvector(__builtin_convertvector(round_even(value[c] * inverse), I),
                                                      int16_t __attribute__((vector_size(32)))));
      int32_t *first = q + at * 2 * quads, *second = first + quads;
#if defined(__AVX512VNNI__)
      for (int64_t c = 0; c < quads; c++) {
        uint32_t high = 0, low = 0;
        for (int e = 0; e < 4; e++) {
          int32_t l = (int8_t)v[c * 4 + e], h = (v[c * 4 + e] - l) / 256;
          high_sum += h, low_sum += l;
          high |= (uint32_t)(uint8_t)h << (8 * e);
          low |= (uint32_t)(uint8_t)l << (8 * e);
        }
        first[c] = (int32_t)high;
        second[c] = (int32_t)low;
      }
#else
      for (int64_t c = 0; c < quads; c++) {
        const int16_t *e = v + c * 4;
        high_sum += e[0] + e[1] + e[2] + e[3];
        first[c] = (int32_t)((uint32_t)(uint16_t)e[0] | (uint32_t)(uint16_t)e[2] << 16);
        second[c] = (int32_t)((uint32_t)(uint16_t)e[1] | (uint32_t)(uint16_t)e[3] << 16);
      }
#endif
      sums[at * 2] = high_sum;
      sums[at * 2 + 1] = low_sum;
    }
  return {x.m, groups, g, q, scale, sums};
}

// A line of a panel; nibbles as bytes.
#if defined(__AVX512F__)
typedef U Line;
inline Line line_at(const uint8_t *p) { return load<U>(p); }
inline Line low_nibbles(Line w) { return w & 0x0f0f0f0fu; }
inline Line high_nibbles(Line w) { return (w >> 4) & 0x0f0f0f0fu; }
#else
struct Line {
  __m256i half[2];
};
inline Line line_at(const uint8_t *p) {
  return {{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
}
inline Line low_nibbles(Line w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(w.half[0], mask), _mm256_and_si256(w.half[1], mask)}};
}
inline Line high_nibbles(Line w) {
  return low_nibbles({{_mm256_srli_epi16(w.half[0], 4), _mm256_srli_epi16(w.half[1], 4)}});
}
#endif

// Sixteen rows' exact products with one group of one row of activations.
#if defined(__AVX512F__)
struct Sums {
  I a, b;
  inline void begin(const int32_t *sums, int32_t offset) {
    a = I{} - sums[0] * offset;
    b = I{} - sums[1] * offset;
  }
  // One line of four columns of 16 rows, unsigned bytes.
  inline void add(Line w, int32_t first, int32_t second) {
#if defined(__AVX512VNNI__)
    a = (I)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, _mm512_set1_epi32(first));
    b = (I)_mm512_dpbusd_epi32((__m512i)b, (__m512i)w, _mm512_set1_epi32(second));
#else
    __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)w, 8);
    a = a + (I)_mm512_madd_epi16(even, _mm512_set1_epi32(first));
    a = a + (I)_mm512_madd_epi16(odd, _mm512_set1_epi32(second));
#endif
  }
  inline F end() const {
#if defined(__AVX512VNNI__)
    return __builtin_convertvector(a * 256 + b, F);
#else
    return __builtin_convertvector(a, F);
#endif
  }
};

#else
struct Sums {
  __m256i a[2];
  inline void begin(const int32_t *sums, int32_t offset) { a[0] = a[1] = _mm256_set1_epi32(-sums[0] * offset); }
  inline void add(Line w, int32_t first, int32_t second) {
    __m256i x = _mm256_set1_epi32(first), y = _mm256_set1_epi32(second), bytes = _mm256_set1_epi16(255);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_and_si256(w.half[i], bytes), x));
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_srli_epi16(w.half[i], 8), y));
    }
  }
  inline F end() const {
    F v;
    __m256 half[2] = {_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])};
    memcpy(&v, half, 64);
    return v;
  }
};
#endif

inline F scale_of(const ip_matrix &w, int64_t panel, int64_t g) {
  int64_t at = (panel * scale_groups(w) + (w.group ? g : 0)) * kLanes;
  if (w.scale) return load<F>(w.scale + at);
#ifdef __AVX512F__
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w.half + at)));
#else
  F v;
  __m256 half[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w.half + at))),
                    _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w.half + at + 8)))};
  memcpy(&v, half, 64);
  return v;
#endif
}

// out[i * ldo ..] for the 16 rows of a panel and MT rows of activations.
template <int KIND, int MT>
inline void quant_tile(const ip_matrix &w, int64_t panel, const Quantized &x, int64_t i0, float *out, int64_t ldo) {
  const uint8_t *p = (const uint8_t *)w.data + panel * panel_bytes(w);
  int64_t quads = x.group / 4;
  constexpr int32_t offset = KIND == IP_INT8 ? 128 : 8;
  F acc[MT];
  for (int i = 0; i < MT; i++) acc[i] = F{};
  for (int64_t g = 0; g < x.groups; g++) {
    Sums s[MT];
    const int32_t *q[MT];
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) {
      int64_t at = (i0 + i) * x.groups + g;
      s[i].begin(x.sums + at * 2, offset);
      q[i] = x.quads + at * 2 * quads;
    }
    if (KIND == IP_INT8) {
      for (int64_t c = 0; c < quads; c++, p += 64) {
        Line line = line_at(p);
        _mm_prefetch((const char *)p + 2048, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int i = 0; i < MT; i++) s[i].add(line, q[i][c], q[i][quads + c]);
      }
    } else {
      for (int64_t c = 0; c < quads; c += 2, p += 64) {
        Line line = line_at(p), low = low_nibbles(line), high = high_nibbles(line);
        _mm_prefetch((const char *)p + 2048, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int i = 0; i < MT; i++) {
          s[i].add(low, q[i][c], q[i][quads + c]);
          s[i].add(high, q[i][c + 1], q[i][quads + c + 1]);
        }
      }
    }
    F scale = w.group ? scale_of(w, panel, g) : splat(1.0f);
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) acc[i] = fma(s[i].end(), scale * x.scale[(i0 + i) * x.groups + g], acc[i]);
  }
  F row = w.group ? splat(1.0f) : scale_of(w, panel, 0);
  int64_t have = min64(kLanes, w.n - panel * kLanes);
  for (int i = 0; i < MT; i++) store_f(out + (i0 + i) * ldo, acc[i] * row, have);
}

template <int KIND>
inline void quant_panel(const ip_matrix &w, int64_t panel, const Quantized &x, float *out, int64_t ldo) {
  int64_t i = 0;
  for (; i + 4 <= x.m; i += 4) quant_tile<KIND, 4>(w, panel, x, i, out, ldo);
  if (i + 2 <= x.m) quant_tile<KIND, 2>(w, panel, x, i, out, ldo), i += 2;
  if (i < x.m) quant_tile<KIND, 1>(w, panel, x, i, out, ldo);
}

}  // namespace
