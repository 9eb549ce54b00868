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

extern int64_t ip_asked_near;  // api.cpp; bytes ahead of a line of weights from where it is asked for a second time

namespace {

struct Quantized {
  int64_t m, groups, group;
  const int32_t *quads;  // [columns / 32, m, 2, 8]: VNNI: high bytes, then low bytes; else (0, 2) and (1, 3) a quad
  const float *scale;    // [groups, m]
  const int32_t *start;  // [groups, m]: what takes the entries' offset out of a group's sum
};

inline N rounded_codes(V value, float inverse) {
  return __builtin_convertvector(round_even(value * inverse), N) << 16 >> 16;  // what NaN became has no lower half
}
// Writes sixteen activations, times `inverse` and rounded, as products with panels want them; returns them, or sums of them.
#if defined(__AVX512VNNI__)
inline N split_codes(const V *value, float inverse, int32_t *first, int32_t *second) {
  N v = rounded_codes(*value, inverse), low = v << 24 >> 24;
  _mm_storeu_si128((__m128i *)first, _mm512_cvtepi32_epi8((__m512i)((v - low) >> 8)));
  _mm_storeu_si128((__m128i *)second, _mm512_cvtepi32_epi8((__m512i)low));
  return v;
}
#elif defined(__AVX512F__)
inline N split_codes(const V *value, float inverse, int32_t *first, int32_t *second) {
  N v = rounded_codes(*value, inverse);
  for (int c = 0; c < 4; c++) {
    const int32_t e[4] = {v[4 * c], v[4 * c + 1], v[4 * c + 2], v[4 * c + 3]};
    first[c] = (int32_t)((uint32_t)(uint16_t)e[0] | (uint32_t)e[2] << 16);
    second[c] = (int32_t)((uint32_t)(uint16_t)e[1] | (uint32_t)e[3] << 16);
  }
  return v;
}
#else
inline N split_codes(const V *value, float inverse, int32_t *first, int32_t *second) {
  N a = rounded_codes(value[0], inverse), b = rounded_codes(value[1], inverse);
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  __m256i quads = _mm256_shuffle_epi8(_mm256_packs_epi32((__m256i)a, (__m256i)b), order);  // 0 and 2, 1 and 3
  __m128i low = _mm256_castsi256_si128(quads), high = _mm256_extracti128_si256(quads, 1);
  _mm_storeu_si128((__m128i *)first, _mm_unpacklo_epi32(low, high));
  _mm_storeu_si128((__m128i *)second, _mm_unpackhi_epi32(low, high));
  return a + b;
}
#endif

constexpr int64_t kSoonLines = 8;     // asked for with each group of columns
constexpr int64_t kSoonBytes = 32768;  // and so many at most

// `soon`: what is read next, of which a few lines a group come meanwhile; null: nothing.
inline Quantized quantize(Scratch scratch[3], const Rows &x, const ip_matrix &w, const char *soon) {
  int64_t g = group_of(w), groups = groups_of(w), blocks = g / kStep;
  const char *until = soon ? soon + kSoonBytes : soon;
  int32_t *q = scratch[0].get<int32_t>(x.m * groups * blocks * 16), offset = (int32_t)offset_of(w);
  float *scale = scratch[1].get<float>(x.m * groups);
  int32_t *start = scratch[2].get<int32_t>(x.m * groups);
  for (int64_t i = 0; i < x.m; i++)
    for (int64_t b = 0; b < groups; b++) {
      int64_t at = b * x.m + i, have = min64(g, x.padded - b * g);
      for (int64_t l = 0; l < kSoonLines && soon != until; l++, soon += 64) _mm_prefetch(soon, _MM_HINT_T1);
      const bf16 *from = x.x + i * x.padded + b * g;
      V value[128 / kWide];
      N top = {};
      for (int64_t c = 0; c < g / kWide; c++) {
        value[c] = c * kWide < have ? load_v(from + c * kWide) : V{};
        N size = (N)value[c] & 0x7fffffff;
        top = size > top ? size : top;
      }
      float most = magnitude(top);
      scale[at] = most / 32512.0f;
      float inverse = most > 0 ? 32512.0f / most : 0.0f;
      if (!(inverse < 3e38f)) scale[at] = inverse = 0.0f;  // too small to be told from zero; NaN goes the same way
      if (!(most < 3e38f)) scale[at] = most - most;        // infinite or NaN: so is every result
      N all = {};
      for (int64_t c = 0; c < g / kLanes; c++) {
        int32_t *to = q + ((b * blocks + c / 2) * x.m + i) * 16 + c % 2 * 4;
        all += split_codes(value + c * (kLanes / kWide), inverse, to, to + 8);
      }
      start[at] = -offset * sum(all);
    }
  return {x.m, groups, g, q, scale, start};
}

// A line of a panel; nibbles as bytes.
#if defined(__AVX512F__)
typedef U Line;
inline Line line_at(const uint8_t *p) { return load<U>(p); }
inline Line low_nibbles(Line w) { return w & 0x0f0f0f0fu; }
inline Line high_nibbles(Line w) { return (w >> 4) & 0x0f0f0f0fu; }
inline Line upper_nibbles(Line w) { return w & 0xf0f0f0f0u; }  // sixteen times as much
#else
struct Line {
  __m256i half[2];
};
inline Line line_at(const uint8_t *p) {
  return {{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
}
#endif

// Sixteen rows' exact products with one group of one row of activations.
#if defined(__AVX512F__)
struct Sums {
#if defined(__AVX512VNNI__)
  I a, b;
  inline void begin(int32_t start) { a = I{}, b = (I)_mm512_set1_epi32(start); }
  inline I end() const { return (a << 8) + b; }
#else
  I a;
  inline void begin(int32_t start) { a = (I)_mm512_set1_epi32(start); }
  inline I end() const { return a; }
#endif
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
};

#else
struct Sums {
  __m256i a[2];
  inline void begin(int32_t start) { a[0] = a[1] = _mm256_set1_epi32(start); }
  inline void add(Line w, int32_t first, int32_t second) {
    __m256i x = _mm256_set1_epi32(first), y = _mm256_set1_epi32(second), bytes = _mm256_set1_epi16(255);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_and_si256(w.half[i], bytes), x));
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_srli_epi16(w.half[i], 8), y));
      __asm__("" : "+x"(a[i]));  // as in quant_tile
    }
  }
  inline I end() const {
    I v;
    memcpy(&v, a, 64);
    return v;
  }
};
#endif

// A panel's scales: sixteen a group.
struct Scales {
  const float *full;
  const bf16 *half;  // where `full` is null
#ifndef __AVX512F__
  // Eight of the sixteen.
  inline __m256 half_at(int64_t g, int h) const {
    int64_t at = g * kLanes + h * 8;
    return full ? _mm256_loadu_ps(full + at) : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + at)));
  }
#endif
  inline F at(int64_t g) const {
    if (full) return load<F>(full + g * kLanes);
#ifdef __AVX512F__
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + g * kLanes)));
#else
    __m256 two[2] = {half_at(g, 0), half_at(g, 1)};
    return load<F>(two);
#endif
  }
};

inline Scales scales_of(const ip_matrix &w, int64_t panel) {
  int64_t at = panel * scale_groups(w) * kLanes;
  return {w.scale ? w.scale + at : nullptr, w.half ? w.half + at : nullptr};
}
inline F scale_of(const ip_matrix &w, int64_t panel, int64_t g) { return scales_of(w, panel).at(w.group ? g : 0); }

#if defined(__AVX512BF16__) && !defined(INFERPLANE_AMX)
// Zen 4 and 5, measured. Bytes that are read with so few rows they foresee by themselves, and asking is slower. Nibbles, of
// which a line takes more arithmetic, they do not; and what Zen 4 is asked for far ahead comes as far as the second cache,
// from where it is asked for again (ip_asked_near); on Zen 5 that costs a tenth of the speed.
constexpr int kForeseen = 2;
constexpr bool kAsksTwice = true;
#else
constexpr int kForeseen = 0;
constexpr bool kAsksTwice = false;
#endif
template <int KIND, int MT>
inline void ask_ahead(const uint8_t *line) {
  if (KIND != IP_INT4 && MT <= kForeseen) return;
  _mm_prefetch((const char *)line + kAhead, _MM_HINT_T1);
  if (kAsksTwice && KIND != IP_W8A8) _mm_prefetch((const char *)line + ip_asked_near, _MM_HINT_T0);
}

#if defined(__AVX512VNNI__)
constexpr int kQuantRows = 8;   // rows of activations that a line is multiplied with while it is at hand
constexpr int kSplitRows = 2;   // so few have two chains of sums each, or they wait for themselves
#else
constexpr int kQuantRows = 4, kSplitRows = 0;
#endif

#if defined(__AVX512F__)
// out[i * ldo ..] for the 16 rows of a panel and MT rows of activations.
template <int KIND, int MT>
inline void quant_tile(const ip_matrix &w, int64_t panel, const Quantized &x, int64_t i0, float *out, int64_t ldo) {
  const uint8_t *p = (const uint8_t *)w.data + panel * panel_bytes(w);
  const int32_t *q = x.quads + i0 * 16;
  const int64_t blocks = x.group / kStep;
  constexpr int lines = KIND == IP_INT8 ? 8 : 4;
  constexpr bool split = MT <= kSplitRows;
  Scales scales = scales_of(w, panel);
  F acc[MT];
  for (int i = 0; i < MT; i++) acc[i] = F{};
  for (int64_t g = 0; g < x.groups; g++) {
    Sums s[MT], t[MT];
    const int64_t at = g * x.m + i0;
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      s[i].begin(x.start[at + i]);
      if (split) t[i].begin(0);
    }
    for (int64_t b = 0; b < blocks; b++, p += 64 * lines, q += 16 * x.m) {
      // A long panel puts them out of the nearest cache before the next one asks for them again.
      if (KIND == IP_INT8 && MT <= kForeseen) _mm_prefetch((const char *)(q + 8 * 16 * x.m), _MM_HINT_T0);
#pragma GCC unroll 8
      for (int l = 0; l < lines; l++) {
        Line line = line_at(p + 64 * l);
        ask_ahead<KIND, MT>(p + 64 * l);
        if (KIND == IP_INT8) {
#pragma GCC unroll 8
          for (int i = 0; i < MT; i++) (split && l % 2 ? t[i] : s[i]).add(line, q[16 * i + l], q[16 * i + l + 8]);
        } else {
          Line low = low_nibbles(line), high = split ? upper_nibbles(line) : high_nibbles(line);
#pragma GCC unroll 8
          for (int i = 0; i < MT; i++) {
            s[i].add(low, q[16 * i + 2 * l], q[16 * i + 2 * l + 8]);
            (split ? t[i] : s[i]).add(high, q[16 * i + 2 * l + 1], q[16 * i + 2 * l + 9]);
          }
        }
      }
    }
    F scale = w.group ? scales.at(g) : splat(1.0f);
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      I exact = s[i].end();
      if (split) exact += KIND == IP_INT8 ? t[i].end() : t[i].end() >> 4;
      acc[i] = fma(__builtin_convertvector(exact, F), scale * x.scale[at + i], acc[i]);
    }
  }
  F row = w.group ? splat(1.0f) : scales.at(0);
  int64_t have = min64(kLanes, w.n - panel * kLanes);
  for (int i = 0; i < MT; i++) store_f(out + (i0 + i) * ldo, acc[i] * row, have);
}
#else
// out[i * ldo ..] for the 16 rows of a panel and MT rows of activations, in registers that GCC's vectors of 64 bytes are
// not kept in. Columns whose nibbles are high in their bytes are summed by themselves, sixteen times too large, where one
// row asks.
template <int KIND, int MT>
inline void quant_tile(const ip_matrix &w, int64_t panel, const Quantized &x, int64_t i0, float *out, int64_t ldo) {
  const uint8_t *p = (const uint8_t *)w.data + panel * panel_bytes(w);
  const int32_t *q = x.quads + i0 * 16;
  const int64_t blocks = x.group / kStep;
  constexpr int lines = KIND == IP_INT8 ? 8 : 4;
  constexpr bool apart = KIND == IP_INT4 && MT == 1;
  const __m256i mask = _mm256_set1_epi16(KIND == IP_INT8 ? 255 : 15), upper = _mm256_set1_epi16(240);
  Scales scales = scales_of(w, panel);
  __m256 acc[MT][2];
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = __m256{};
  for (int64_t g = 0; g < x.groups; g++) {
    __m256i s[MT][2], t[2] = {__m256i{}, __m256i{}};
    const int64_t at = g * x.m + i0;
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) s[i][0] = s[i][1] = _mm256_set1_epi32(x.start[at + i]);
    for (int64_t b = 0; b < blocks; b++, p += 64 * lines, q += 16 * x.m) {
#pragma GCC unroll 8
      for (int l = 0; l < lines; l++) {
        ask_ahead<KIND, MT>(p + 64 * l);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          __m256i v = _mm256_loadu_si256((const __m256i *)(p + 64 * l + 32 * h)), odd = _mm256_srli_epi16(v, 8);
          auto add = [](__m256i sum, __m256i entries, int32_t pair) __attribute__((always_inline)) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(entries, _mm256_set1_epi32(pair)));
            __asm__("" : "+x"(sum));  // or GCC adds products up in a tree, for which there are too few registers
            return sum;
          };
          __m256i a = _mm256_and_si256(v, mask), c = KIND == IP_INT8 ? odd : _mm256_and_si256(odd, mask), e, d;
          if (KIND == IP_INT4) {
            e = _mm256_and_si256(apart ? v : _mm256_srli_epi16(v, 4), apart ? upper : mask);
            d = apart ? _mm256_and_si256(odd, upper) : _mm256_srli_epi16(v, 12);
          }
#pragma GCC unroll 4
          for (int i = 0; i < MT; i++) {
            const int32_t *of = q + 16 * i + (KIND == IP_INT8 ? l : 2 * l);
            s[i][h] = add(add(s[i][h], a, of[0]), c, of[8]);
            if (KIND == IP_INT4) (apart ? t[h] : s[i][h]) = add(add(apart ? t[h] : s[i][h], e, of[1]), d, of[9]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      __m256 scale = w.group ? scales.half_at(g, h) : _mm256_set1_ps(1);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        if (apart) s[i][h] = _mm256_add_epi32(s[i][h], _mm256_srai_epi32(t[h], 4));
        __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[at + i]));
        acc[i][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[i][h]), by, acc[i][h]);
      }
    }
  }
  F row = w.group ? splat(1.0f) : scales.at(0);
  int64_t have = min64(kLanes, w.n - panel * kLanes);
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) {
    __m256 sums[2] = {acc[i][0], acc[i][1]};
    store_f(out + (i0 + i) * ldo, load<F>(sums) * row, have);
  }
}
#endif

template <int KIND, int MT = kQuantRows>
inline void quant_rows(const ip_matrix &w, int64_t panel, const Quantized &x, int64_t i, int64_t rows, float *out,
                       int64_t ldo) {
  if constexpr (MT > 1)
    if (rows < MT) return quant_rows<KIND, MT - 1>(w, panel, x, i, rows, out, ldo);
  quant_tile<KIND, MT>(w, panel, x, i, out, ldo);
}

template <int KIND>
inline void quant_panel(const ip_matrix &w, int64_t panel, const Quantized &x, float *out, int64_t ldo) {
  int64_t tiles = (x.m + kQuantRows - 1) / kQuantRows, rows = (x.m + tiles - 1) / tiles;
  for (int64_t i = 0; i < x.m; i += rows) quant_rows<KIND>(w, panel, x, i, min64(rows, x.m - i), out, ldo);
}

}  // namespace
