// Vectors of numbers in the compilers' vector extension, conversions, and the sums and exponentials that all kernels
// use. F32x16, I32x16, U32x16 and U16x16 have sixteen lanes: one zmm register, or two ymm. Floats and Ints are one
// register, kRegisterLanes wide. Included once per instruction set; all functions give the same bits on every one of
// them.
//
// Conventions of all headers: a product is y[m, n] = x[m, k] w[n, k]^T, with m rows of activations, n rows of the
// weight and k columns; `ld*` and `*stride` are distances between rows in entries, not bytes; a range is first .. last,
// without last; a load or store with a count `n` accesses the first n lanes only, and loads zeros into the others.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "inferplane_cpu.h"

namespace {

typedef ip_bf16 bf16;
typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;

// `n` rounded up to a multiple of `to`.
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Reads, or writes, a whole vector at p, which need not be aligned.
template <class Vector, class T>
inline Vector load(const T *p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class Vector, class T>
inline void store(T *p, Vector v) {
  memcpy(p, &v, sizeof v);
}
// A vector whose sixteen lanes are all x.
inline F32x16 splat(float x) { return x - F32x16{}; }

// widen_u16: sixteen unsigned 16-bit integers as 32-bit ones, zeros in the upper halves. narrow_u32: back, for lanes
// below 65536. By hand: GCC 12 converts such a vector in halves, though there is one instruction for it.
#ifdef __AVX512F__
inline U32x16 widen_u16(U16x16 h) { return (U32x16)_mm512_cvtepu16_epi32((__m256i)h); }
inline U16x16 narrow_u32(U32x16 u) { return (U16x16)_mm512_cvtepi32_epi16((__m512i)u); }
#else
inline U32x16 widen_u16(U16x16 h) {
  __m128i part[2];
  memcpy(part, &h, 32);
  __m256i wide[2] = {_mm256_cvtepu16_epi32(part[0]), _mm256_cvtepu16_epi32(part[1])};
  return load<U32x16>(wide);
}
inline U16x16 narrow_u32(U32x16 u) {
  __m256i wide[2];
  memcpy(wide, &u, 64);
  return (U16x16)_mm256_permute4x64_epi64(_mm256_packus_epi32(wide[0], wide[1]), 0xd8);
}
#endif
// Sixteen bf16 numbers to float32, exactly: from a register (bf16_to_f32), or from memory (load_f32x16).
inline F32x16 bf16_to_f32(U16x16 h) { return (F32x16)(widen_u16(h) << 16); }
inline F32x16 load_f32x16(const bf16 *p) { return bf16_to_f32(load<U16x16>(p)); }

// Rounds sixteen floats to bf16, to nearest even; NaN stays NaN; the same bits on every instruction set.
inline U16x16 f32_to_bf16(F32x16 v) {
#ifdef __AVX512BF16__
  constexpr int denormal = 0x20;  // the processor's own rounding flushes denormal numbers to zero
  if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)v, denormal), 1)) return (U16x16)_mm512_cvtneps_pbh((__m512)v);
#endif
  U32x16 u = (U32x16)v;
  U32x16 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  U32x16 quiet = (u >> 16) | 0x40;
  U32x16 nan = (U32x16)(v != v);
  return narrow_u32((rounded & ~nan) | (quiet & nan));
}
// Rounds sixteen floats to bf16 (`f32_to_bf16`) and writes them to p[0 .. 16]; no alignment needed.
inline void store_bf16x16(bf16 *p, F32x16 v) { store(p, f32_to_bf16(v)); }

// One bf16 number in float32, exactly.
inline float bf16_to_float(bf16 b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
// One float32 number rounded to bf16, to nearest even; NaN stays NaN.
inline bf16 float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return (bf16)((u >> 16) | 0x40);
  return (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// The first n of sixteen bf16 entries at p (all if n >= 16) in float32; zeros in the other lanes.
inline F32x16 load_f32x16(const bf16 *p, int64_t n) {
  if (n >= kLanes) return load_f32x16(p);
  bf16 part[kLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(bf16));
  return load_f32x16(part);
}
// Writes the first n lanes (all if n >= 16), rounded as `f32_to_bf16` rounds, to p; p[n ..] keeps what it held.
inline void store_bf16x16(bf16 *p, F32x16 v, int64_t n) {
  if (n >= kLanes) return store_bf16x16(p, v);
  bf16 part[kLanes];
  store_bf16x16(part, v);
  memcpy(p, part, (size_t)n * sizeof(bf16));
}
// The first n of sixteen float32 entries at p (all if n >= 16); zeros in the other lanes.
inline F32x16 load_f32x16(const float *p, int64_t n) {
  if (n >= kLanes) return load<F32x16>(p);
  float part[kLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(float));
  return load<F32x16>(part);
}
// Writes the first n lanes (all if n >= 16) to p; p[n ..] keeps what it held.
inline void store_f32x16(float *p, F32x16 v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  memcpy(p, &v, (size_t)n * sizeof(float));
}

#ifndef __AVX512F__
// The sum of eight lanes: i and i + 4 are added, then i and i + 2, then the two that are left.
inline float sum_lanes(__m256 a) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
#endif
// The sum of the sixteen lanes, always added in the same tree (see `sum_lanes_of_four`): results are equal on all
// instruction sets.
inline float sum_lanes(F32x16 v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#else
  __m256 a, b;
  memcpy(&a, &v, 32);
  memcpy(&b, (const char *)&v + 32, 32);
  return sum_lanes(_mm256_add_ps(a, b));
#endif
}
#ifdef __AVX512F__
// `sum_lanes` of each of four vectors, to the same bits: lane i is added to lane i + 8, then to i + 4, i + 2 and i + 1.
inline __m128 sum_lanes_of_four(F32x16 a, F32x16 b, F32x16 c, F32x16 d) {
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
// The sum of sixteen integers; it must fit 32 bits.
inline int32_t sum_lanes(I32x16 v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t all = 0;
  for (int l = 0; l < kLanes; l++) all += v[l];
  return all;
#endif
}
// a * b + c in each lane, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#ifdef __AVX512F__
  return (F32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
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
// One register. Chains of operations are written with Floats and Ints, since GCC keeps vectors of two registers in
// memory. load_floats: kRegisterLanes entries at p as float32; with n: the first n only, zeros in the other lanes.
// store_floats: writes all lanes, or the first n, to float32 or, rounded as `f32_to_bf16` rounds, to bf16.
// round_to_bf16: the same rounding, result in float32.
#ifdef __AVX512F__
constexpr int kRegisterLanes = 16;
typedef F32x16 Floats;
typedef I32x16 Ints;
inline Floats load_floats(const bf16 *p) { return load_f32x16(p); }
inline Floats load_floats(const bf16 *p, int64_t n) { return load_f32x16(p, n); }
inline Floats load_floats(const float *p) { return load<Floats>(p); }
inline Floats load_floats(const float *p, int64_t n) { return load_f32x16(p, n); }
inline void store_floats(bf16 *p, Floats v) { store_bf16x16(p, v); }
inline void store_floats(bf16 *p, Floats v, int64_t n) { store_bf16x16(p, v, n); }
inline void store_floats(float *p, Floats v, int64_t n) { store_f32x16(p, v, n); }
inline Floats round_to_bf16(Floats v) { return bf16_to_f32(f32_to_bf16(v)); }
#else
constexpr int kRegisterLanes = 8;
typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
inline Floats fma(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline Floats load_floats(const bf16 *p) {
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
inline Floats load_floats(const bf16 *p, int64_t n) {
  if (n >= kRegisterLanes) return load_floats(p);
  bf16 part[kRegisterLanes] = {};
  memcpy(part, p, (size_t)n * sizeof(bf16));
  return load_floats(part);
}
inline Floats load_floats(const float *p) { return load<Floats>(p); }
inline Floats load_floats(const float *p, int64_t n) {
  if (n >= kRegisterLanes) return load<Floats>(p);
  Floats v = {};
  memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
}
// The bits of v rounded to bf16, to nearest even, in the upper half of each lane (the lower halves are not cleared);
// NaN stays NaN.
inline __m256i round_to_bf16_bits(Floats v) {
  __m256i u = (__m256i)v, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i near = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(near, quiet, (__m256i)_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
}
inline Floats round_to_bf16(Floats v) {
  return (Floats)_mm256_and_si256(round_to_bf16_bits(v), _mm256_set1_epi32((int)0xffff0000u));
}
inline void store_floats(bf16 *p, Floats v) {
  __m256i u = _mm256_srli_epi32(round_to_bf16_bits(v), 16);
  _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1)));
}
inline void store_floats(bf16 *p, Floats v, int64_t n) {
  if (n >= kRegisterLanes) return store_floats(p, v);
  bf16 part[kRegisterLanes];
  store_floats(part, v);
  memcpy(p, part, (size_t)n * sizeof(bf16));
}
inline void store_floats(float *p, Floats v, int64_t n) {
  memcpy(p, &v, (size_t)min64(n, kRegisterLanes) * sizeof(float));
}
#endif
// A register whose lanes are all x.
inline Floats splat_floats(float x) { return x - Floats{}; }
#ifndef __AVX512F__
// The sum of a register's integers; it must fit 32 bits.
inline int32_t sum_lanes(Ints v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
#endif

// Each lane rounded to the nearest integer, ties to even.
inline F32x16 round_even(F32x16 v) {
#ifdef __AVX512F__
  return (F32x16)_mm512_roundscale_ps((__m512)v, 0);
#else
  const F32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for fractions
  return (v + magic) - magic;
#endif
}
#ifndef __AVX512F__
// Each lane of one register rounded to the nearest integer, ties to even.
inline Floats round_even(Floats v) {
  return (Floats)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#endif

// exp of each lane, to about 2 units in the last place; 0 below -87, exp(88) above 88. The polynomial is Cephes'.
inline Floats vexp(Floats x) {
  Floats low = (Floats)((Ints)(x < -87.0f));
  x = x < -87.0f ? splat_floats(-87.0f) : x;
  x = x > 88.0f ? splat_floats(88.0f) : x;
  Floats n = round_even(x * 1.44269504088896341f);
  Floats r = fma(n, splat_floats(-0.693359375f), x);
  r = fma(n, splat_floats(2.12194440e-4f), r);
  Floats y = splat_floats(1.9875691500e-4f);
  y = fma(y, r, splat_floats(1.3981999507e-3f));
  y = fma(y, r, splat_floats(8.3334519073e-3f));
  y = fma(y, r, splat_floats(4.1665795894e-2f));
  y = fma(y, r, splat_floats(1.6666665459e-1f));
  y = fma(y, r, splat_floats(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)((Ints)(y * (Floats)bits) & ~(Ints)low);
}
// cap tanh(s / cap) of each lane, to about 1e-7 of `cap`.
inline Floats soft_cap(Floats s, float cap) { return cap - 2 * cap / (vexp(s * (2 / cap)) + 1.0f); }
// x / (1 + exp(-x)) of each lane.
inline Floats silu(Floats x) { return x / (1.0f + vexp(-x)); }
// x times the normal distribution's function at x, to about 5e-6 of the result. With z = |x| / sqrt(2) and t = 1 / (1 +
// 0.45 z) it is erfc(z) = t p(t) exp(-z^2), where p is a fit of our own: relative error 3e-7 for z up to 9.5.
inline Floats gelu(Floats x) {
  Floats z = (x < 0.0f ? -x : x) * 0.70710678118654752f, t = 1.0f / fma(z, splat_floats(0.45f), splat_floats(1.0f));
  Floats p = splat_floats(6.63202703e-2f);
  p = fma(p, t, splat_floats(-2.37891987e-1f));
  p = fma(p, t, splat_floats(2.04558760e-1f));
  p = fma(p, t, splat_floats(4.44063880e-2f));
  p = fma(p, t, splat_floats(1.86381161e-1f));
  p = fma(p, t, splat_floats(2.28790313e-1f));
  p = fma(p, t, splat_floats(2.53518581e-1f));
  p = fma(p, t, splat_floats(2.53916800e-1f));
  Floats tail = 0.5f * p * t * vexp(-(z * z));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}
// The approximation of `gelu` by tanh: x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh(Floats x) {
  Floats u = fma(x * x * x, splat_floats(0.044715f), x) * 1.5957691216057308f;
  return x / (1.0f + vexp(-u));
}
// An activation function, one of ip_activation, of each lane.
inline Floats activate(Floats x, int32_t function) {
  switch (function) {
    case IP_GELU: return gelu(x);
    case IP_GELU_TANH: return gelu_tanh(x);
    case IP_RELU2: return x <= 0.0f ? Floats{} : x * x;
    default: return silu(x);
  }
}

// Calls f(c, n) for the registers that cover d columns: each begins at column c and has n columns, kRegisterLanes
// except perhaps for the last.
template <class Fn>
inline __attribute__((always_inline)) void for_each_register(int64_t d, Fn f) {
  int64_t c = 0;
  for (; c + kRegisterLanes <= d; c += kRegisterLanes) f(c, (int64_t)kRegisterLanes);
  if (c < d) f(c, d - c);
}

// 1 / sqrt(squares / d + eps), where `squares` holds partial sums of the squares of d entries.
inline float inverse_rms(Floats squares, int64_t d, float eps) {
  return 1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)d + eps);
}

}  // namespace
