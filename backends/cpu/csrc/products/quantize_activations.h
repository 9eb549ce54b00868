// Dynamic quantization of bf16 rows to int8 with one scale per row, as the op `quantize` defines it, and int8 loads.
// W8A8 products quantize activations with it, the KV cache its entries.
#pragma once
#include "runtime/vectors.h"

namespace {

// Sixteen int8 entries as floats, without their scale; with n: the first n, zeros in the other lanes. load_floats: the
// same for one register of kRegisterLanes.
inline F32x16 load_f32x16(const int8_t *p) {
#ifdef __AVX512F__
  return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
  __m256 half[2] = {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
  F32x16 v;
  memcpy(&v, half, 64);
  return v;
#endif
}
inline F32x16 load_f32x16(const int8_t *p, int64_t n) {
  if (n >= kLanes) return load_f32x16(p);
  int8_t part[kLanes] = {};
  memcpy(part, p, (size_t)n);
  return load_f32x16(part);
}

#ifdef __AVX512F__
inline Floats load_floats(const int8_t *p) { return load_f32x16(p); }
inline Floats load_floats(const int8_t *p, int64_t n) { return load_f32x16(p, n); }
#else
inline Floats load_floats(const int8_t *p) {
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Floats load_floats(const int8_t *p, int64_t n) {
  if (n >= kRegisterLanes) return load_floats(p);
  int8_t part[kRegisterLanes] = {};
  memcpy(part, p, (size_t)n);
  return load_floats(part);
}
#endif

// The largest lane, as a float: the lanes are magnitudes given by their bits as integers, which rise as the magnitudes
// do; NaN is the largest.
inline float largest_of_lanes(Ints largest_lanes) {
#ifdef __AVX512F__
  int32_t largest = _mm512_reduce_max_epi32((__m512i)largest_lanes);
#else
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)largest_lanes),
                            _mm256_extracti128_si256((__m256i)largest_lanes, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  int32_t largest = _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#endif
  float f;
  memcpy(&f, &largest, 4);
  return f;
}

// The largest of |x[0 .. n]|; NaN if one of them is NaN.
inline float largest_magnitude(const bf16 *x, int64_t n) {
  Ints largest_lanes = {};
  for (int64_t c = 0; c < n; c += kRegisterLanes) {
    Ints magnitude_bits = (Ints)load_floats(x + c, n - c) & 0x7fffffff;
    largest_lanes = magnitude_bits > largest_lanes ? magnitude_bits : largest_lanes;
  }
  return largest_of_lanes(largest_lanes);
}

// p[l] = lane l as a byte for the first n lanes (all if n >= 16); each is from -128 to 127.
inline void store_int8(int8_t *p, I32x16 v, int64_t n) {
#ifdef __AVX512BW__
  _mm512_mask_cvtepi32_storeu_epi8(p, (__mmask16)(n >= kLanes ? 0xffff : (1 << n) - 1), (__m512i)v);
#else
  for (int64_t l = 0; l < min64(kLanes, n); l++) p[l] = (int8_t)v[l];
#endif
}

// What quantizing a row returns besides its entries.
struct QuantizedRow {
  float scale;
  int32_t sum;  // of the quantized entries
};

// to[c] = x[c] / scale, rounded to even, for n entries: integers from -127 to 127. Returns scale, which is the largest
// magnitude / 127, or 1 for a row of zeros, and the integers' sum. Of a row that is not finite all integers are 0, and
// scale is NaN or infinite, so that no entry is read as a number.
inline QuantizedRow quantize_int8_row(const bf16 *x, int64_t n, int8_t *to) {
  float scale = largest_magnitude(x, n) / 127.0f;
  if (!(scale < 3e38f)) {  // no integer is nearest to NaN
    memset(to, 0, (size_t)n);
    return {scale, 0};
  }
  if (scale == 0) scale = 1;
  float inverse = 1 / scale;
  bool exact = scale > 1e-30f && scale < 1e30f;
  I32x16 total = {};
  for (int64_t c = 0; c < n; c += kLanes) {
    F32x16 v = load_f32x16(x + c, n - c), q = v * inverse;
    q = exact ? fma(fma(-q, splat(scale), v), splat(inverse), q) : v / scale;  // rounds as a division does, for less
    I32x16 quantized = __builtin_convertvector(round_even(q), I32x16);
    store_int8(to + c, quantized, n - c);
    total = total + quantized;
  }
  return {scale, sum_lanes(total)};
}

}  // namespace
