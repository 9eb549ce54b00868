// Sixteen lanes in the compilers' vector extension: one zmm register, or two ymm. Included once an instruction set.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "inferplane_cpu.h"

namespace {

typedef ip_bf16 bf16;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

constexpr int kLanes = 16;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

template <class V, class T>
inline V load(const T *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
inline void store(T *p, V v) {
  memcpy(p, &v, sizeof v);
}
inline F splat(float x) { return x - F{}; }

// GCC 12 converts a vector in halves, for which there is one instruction.
#ifdef __AVX512F__
inline U long16(H h) { return (U)_mm512_cvtepu16_epi32((__m256i)h); }
inline H short16(U u) { return (H)_mm512_cvtepi32_epi16((__m512i)u); }
#else
inline U long16(H h) {
  __m128i part[2];
  memcpy(part, &h, 32);
  __m256i wide[2] = {_mm256_cvtepu16_epi32(part[0]), _mm256_cvtepu16_epi32(part[1])};
  return load<U>(wide);
}
inline H short16(U u) {
  __m256i wide[2];
  memcpy(wide, &u, 64);
  return (H)_mm256_permute4x64_epi64(_mm256_packus_epi32(wide[0], wide[1]), 0xd8);
}
#endif
inline F widen(H h) { return (F)(long16(h) << 16); }
inline F load16(const bf16 *p) { return widen(load<H>(p)); }

// To nearest even; NaN stays NaN.
inline H narrow(F v) {
#ifdef __AVX512BF16__
  constexpr int denormal = 0x20;  // which the processor's own rounding takes for zero
  if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, denormal), 1)) return (H)_mm512_cvtneps_pbh((__m512)v);
#endif
  U u = (U)v;
  U rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  U quiet = (u >> 16) | 0x40;
  U nan = (U)(v != v);
  return short16((rounded & ~nan) | (quiet & nan));
}
inline void store16(bf16 *p, F v) { store(p, narrow(v)); }

inline float widen1(bf16 b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline bf16 narrow1(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return (bf16)((u >> 16) | 0x40);
  return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// First `n` of 16 entries, zeros behind.
inline F load16(const bf16 *p, int64_t n) {
  if (n >= kLanes) return load16(p);
  bf16 part[kLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(bf16));
  return load16(part);
}
inline void store16(bf16 *p, F v, int64_t n) {
  if (n >= kLanes) return store16(p, v);
  bf16 part[kLanes];
  store16(part, v);
  memcpy(p, part, (size_t)n * sizeof(bf16));
}
inline F load_f(const float *p, int64_t n) {
  if (n >= kLanes) return load<F>(p);
  float part[kLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(float));
  return load<F>(part);
}
inline void store_f(float *p, F v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  memcpy(p, &v, (size_t)n * sizeof(float));
}

#ifndef __AVX512F__
inline float sum(__m256 a) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#endif
// The sum of the lanes, always in the same tree.
inline float sum(F v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  __m256 a, b;
  memcpy(&a, &v, 32);
  memcpy(&b, (const char *)&v + 32, 32);
  return sum(_mm256_add_ps(a, b));
#endif
}
#ifdef __AVX512F__
// `sum` of each of four, to the same bits: lane i is added to lane i + 8, then to i + 4, i + 2 and i + 1.
inline __m128 sums_of_four(F a, F b, F c, F d) {
  auto halves = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  __m512 ab = halves((__m512)a, (__m512)b), cd = halves((__m512)c, (__m512)d);
  __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
  const __m512i firsts = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v));
}
#endif
inline int32_t sum(I v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t all = 0;
  for (int l = 0; l < kLanes; l++) all += v[l];
  return all;
#endif
}
inline F fma(F a, F b, F c) {
#ifdef __AVX512F__
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  memcpy(z, &c, 64);
  z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]);
  z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
  memcpy(&c, z, 64);
  return c;
#endif
}
// One register: what chains of operations are written in, since GCC keeps vectors of two registers in memory.
#ifdef __AVX512F__
constexpr int kWide = 16;
typedef F V;
typedef I N;
inline V load_v(const bf16 *p) { return load16(p); }
inline V load_v(const bf16 *p, int64_t n) { return load16(p, n); }
inline V load_v(const float *p, int64_t n) { return load_f(p, n); }
inline void store_v(bf16 *p, V v) { store16(p, v); }
inline void store_v(bf16 *p, V v, int64_t n) { store16(p, v, n); }
inline void store_v(float *p, V v, int64_t n) { store_f(p, v, n); }
inline V rounded(V v) { return widen(narrow(v)); }
#else
constexpr int kWide = 8;
typedef float V __attribute__((vector_size(32)));
typedef int32_t N __attribute__((vector_size(32)));
inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline V load_v(const bf16 *p) {
  return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
inline V load_v(const bf16 *p, int64_t n) {
  if (n >= kWide) return load_v(p);
  bf16 part[kWide] = {};
  memcpy(part, p, (size_t)n * sizeof(bf16));
  return load_v(part);
}
inline V load_v(const float *p, int64_t n) {
  if (n >= kWide) return load<V>(p);
  V v = {};
  memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
}
// To nearest even, in the upper halves; NaN stays NaN.
inline __m256i rounded_up(V v) {
  __m256i u = (__m256i)v, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(near, quiet, (__m256i)_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
}
inline V rounded(V v) { return (V)_mm256_and_si256(rounded_up(v), _mm256_set1_epi32((int)0xffff0000u)); }
inline void store_v(bf16 *p, V v) {
  __m256i u = _mm256_srli_epi32(rounded_up(v), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1)));
}
inline void store_v(bf16 *p, V v, int64_t n) {
  if (n >= kWide) return store_v(p, v);
  bf16 part[kWide];
  store_v(part, v);
  memcpy(p, part, (size_t)n * sizeof(bf16));
}
inline void store_v(float *p, V v, int64_t n) { memcpy(p, &v, (size_t)min64(n, kWide) * sizeof(float)); }
#endif
inline V all(float x) { return x - V{}; }
#ifndef __AVX512F__
inline int32_t sum(N v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#endif

inline F round_even(F v) {
#ifdef __AVX512F__
  return (F)_mm512_roundscale_ps((__m512)v, 0);
#else
  const F magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for fractions
  return (v + magic) - magic;
#endif
}
#ifndef __AVX512F__
inline V round_even(V v) { return (V)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#endif

// exp to about 2 units in the last place; below -87 it is 0. Cephes' polynomial.
inline V vexp(V x) {
  V low = (V)((N)(x < -87.0f));
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  V n = round_even(x * 1.44269504088896341f);
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  N bits = (__builtin_convertvector(n, N) + 127) << 23;
  return (V)((N)(y * (V)bits) & ~(N)low);
}
inline V silu(V x) { return x / (1.0f + vexp(-x)); }

}  // namespace
