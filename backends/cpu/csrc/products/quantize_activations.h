// Entries in bf16 as signed bytes with a scale, as the op `quantize` makes them.
#pragma once
#include "vec.h"

namespace {

inline F load16(const int8_t *p) {
#ifdef __AVX512F__
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
  __m256 half[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
  F v;
  memcpy(&v, half, 64);
  return v;
#endif
}
inline F load16(const int8_t *p, int64_t n) {
  if (n >= kLanes) return load16(p);
  int8_t part[kLanes] = {};
  memcpy(part, p, (size_t)n);
  return load16(part);
}

#ifdef __AVX512F__
inline V load_v(const int8_t *p) { return load16(p); }
inline V load_v(const int8_t *p, int64_t n) { return load16(p, n); }
#else
inline V load_v(const int8_t *p) {
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline V load_v(const int8_t *p, int64_t n) {
  if (n >= kWide) return load_v(p);
  int8_t part[kWide] = {};
  memcpy(part, p, (size_t)n);
  return load_v(part);
}
#endif

// The largest of a register's magnitudes that stand as integers, which rise as they do, and NaN is above all.
inline float magnitude(N top) {
#ifdef __AVX512F__
  int32_t most = _mm512_reduce_max_epi32((__m512i)top);
#else
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)top), _mm256_extracti128_si256((__m256i)top, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  int32_t most = _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#endif
  float f;
  memcpy(&f, &most, 4);
  return f;
}

// The largest magnitude of n entries; NaN where one is.
inline float largest(const bf16 *x, int64_t n) {
  N top = {};
  for (int64_t c = 0; c < n; c += kWide) {
    N size = (N)load_v(x + c, n - c) & 0x7fffffff;
    top = size > top ? size : top;
  }
  return magnitude(top);
}

// The first n of 16 integers in bytes.
inline void store8(int8_t *p, I v, int64_t n) {
#ifdef __AVX512BW__
  _mm512_mask_cvtepi32_storeu_epi8(p, (__mmask16)(n >= kLanes ? 0xffff : (1 << n) - 1), (__m512i)v);
#else
  for (int64_t l = 0; l < min64(kLanes, n); l++) p[l] = (int8_t)v[l];
#endif
}

struct Coded {
  float scale;
  int32_t sum;  // of the codes
};

// n entries as codes from -127 to 127, the largest as one of these; zeros have scale 1.
inline Coded code(const bf16 *x, int64_t n, int8_t *to) {
  float scale = largest(x, n) / 127.0f;
  if (scale == 0) scale = 1;
  float inverse = 1 / scale;
  bool exact = scale > 1e-30f && scale < 1e30f;
  I total = {};
  for (int64_t c = 0; c < n; c += kLanes) {
    F v = load16(x + c, n - c), q = v * inverse;
    q = exact ? fma(fma(-q, splat(scale), v), splat(inverse), q) : v / scale;  // rounded as a division rounds, for less
    I code = __builtin_convertvector(round_even(q), I);
    store8(to + c, code, n - c);
    total = total + code;
  }
  return {scale, sum(total)};
}

}  // namespace
