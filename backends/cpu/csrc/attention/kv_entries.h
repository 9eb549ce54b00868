// A layer's cached entries as they are kept: bf16, or int8 with a scale for every group of a token's entries.
//
// Where few query rows meet a key, the rows are rounded to 16-bit integers (an error of 2^-16 of a row's largest entry) and
// multiplied with int8 entries as they lie, exactly; scales are applied to the sums. Where many rows do, entries become bf16
// first, once for all of them: without their scale, which is exact, or with it.
#pragma once
#include "linear.h"

namespace {

// K, V or latents: of slot s the entries from data + s * stride, the scales from scale + s * groups; scale null: bf16.
struct Kept {
  void *data;
  float *scale;
  int64_t stride, groups, width;  // `width` entries share a scale
  bool coded() const { return scale; }
  bf16 *rows() const { return (bf16 *)data; }
  int8_t *codes() const { return (int8_t *)data; }
};

inline Kept keys_of(const ip_cache &c, int64_t entries) {
  return {c.k, c.k_scale, c.k_stride, c.k_groups, c.k_scale ? entries / c.k_groups : 0};
}
inline Kept values_of(const ip_cache &c, int64_t entries) {
  return {c.v, c.v_scale, c.v_stride, c.v_groups, c.v_scale ? entries / c.v_groups : 0};
}

// Writes entries first .. first + n of a slot, whole groups: a group's largest becomes 127, a group of zeros has scale 1.
inline void keep(const Kept &k, int64_t slot, int64_t first, const bf16 *x, int64_t n) {
  if (!k.coded()) {
    memcpy(k.rows() + slot * k.stride + first, x, (size_t)n * sizeof(bf16));
    return;
  }
  for (int64_t g = 0; g < n; g += k.width) {
    int64_t at = first + g;
    k.scale[slot * k.groups + at / k.width] = code(x + g, k.width, k.codes() + slot * k.stride + at).scale;
  }
}

// n entries in bf16 without their scale.
inline void widen_codes(const int8_t *from, int64_t n, bf16 *out) {
  for (int64_t c = 0; c < n; c += kLanes) store16(out + c, load16(from + c, n - c), n - c);
}

// Entries first .. first + n of a slot in bf16.
inline void read_back(const Kept &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  const int8_t *from = k.codes() + slot * k.stride + first;
  const float *scale = k.scale + slot * k.groups + first / k.width;
  for (int64_t c = 0, end = k.width - first % k.width; c < n; end += k.width) {
    F by = splat(*scale++);
    int64_t last = min64(n, end);
#ifdef __AVX512BF16__
    for (; c + 2 * kLanes <= last; c += 2 * kLanes)
      _mm512_storeu_si512(out + c, (__m512i)_mm512_cvtne2ps_pbh((__m512)(load16(from + c + kLanes) * by),
                                                                 (__m512)(load16(from + c) * by)));
#endif
    for (; c < last; c = min64(last, c + kLanes)) store16(out + c, load16(from + c, last - c) * by, last - c);
  }
}

// Rows of activations as 16-bit integers.
struct Codes {
  int64_t m, padded;
  const int16_t *x;    // [m, padded], zeros behind the last column
  const float *scale;  // [m]
};

#ifdef __AVX512BW__
typedef __m512i Ints;
constexpr int kSums = 16;  // registers of sums, and sums in a register
inline Ints codes_at(const int8_t *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
inline Ints ints_at(const int16_t *p) { return _mm512_loadu_si512(p); }
inline Ints add_products(Ints sum, Ints a, Ints b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
inline void to_floats(float *p, Ints v) { _mm512_storeu_ps(p, _mm512_cvtepi32_ps(v)); }
// Lane i: the sum of register i.
inline Ints add_up(Ints r[16]) {
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2)
    r[i / 2] = _mm512_add_epi32(_mm512_unpacklo_epi32(r[i], r[i + 1]), _mm512_unpackhi_epi32(r[i], r[i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2)
    r[i / 2] = _mm512_add_epi32(_mm512_unpacklo_epi64(r[i], r[i + 1]), _mm512_unpackhi_epi64(r[i], r[i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2)
    r[i / 2] = _mm512_add_epi32(_mm512_shuffle_i32x4(r[i], r[i + 1], 0x88), _mm512_shuffle_i32x4(r[i], r[i + 1], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(r[0], r[1], 0x88), _mm512_shuffle_i32x4(r[0], r[1], 0xdd));
}
#else
typedef __m256i Ints;
constexpr int kSums = 8;
inline Ints codes_at(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
inline Ints ints_at(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline Ints add_products(Ints sum, Ints a, Ints b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline void to_floats(float *p, Ints v) { _mm256_storeu_ps(p, _mm256_cvtepi32_ps(v)); }
inline Ints add_up(Ints r[8]) {
  Ints low = _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]), _mm256_hadd_epi32(r[2], r[3]));
  Ints high = _mm256_hadd_epi32(_mm256_hadd_epi32(r[4], r[5]), _mm256_hadd_epi32(r[6], r[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif
constexpr int kCodes = sizeof(Ints) / 2;

template <class RowAt>
inline Codes codes_of(Scratch scratch[2], int64_t m, int64_t k, RowAt row) {
  int64_t padded = round_up(k, kCodes);
  int16_t *x = scratch[0].get<int16_t>(m * padded);
  float *scale = scratch[1].get<float>(m);
  for (int64_t i = 0; i < m; i++) {
    const bf16 *from = row(i);
    float most = largest(from, k);
    float inverse = most > 0 ? 32767.0f / most : 0.0f;
    scale[i] = most / 32767.0f;
    if (!(inverse < 3e38f)) scale[i] = inverse = 0.0f;  // too small to be told from zero; NaN goes the same way
    if (!(most < 3e38f)) scale[i] = most - most;        // infinite or NaN: so is every result
    for (int64_t c = 0; c < padded; c += kLanes) {
      F v = c < k ? load16(from + c, k - c) * inverse : F{};
      store(x + i * padded + c,
            __builtin_convertvector(__builtin_convertvector(round_even(v), I), int16_t __attribute__((vector_size(32)))));
    }
  }
  return {m, padded, x, scale};
}

// Sums of NR keys, the rows at `at`, and MT rows of x: out[i * ldo + r].
template <int NR, int MT>
inline void codes_tile(const int8_t *const *at, int64_t dim, const Codes &x, int64_t i0, float *out, int64_t ldo) {
  Ints sums[kSums] = {};
  int64_t whole = dim / kCodes * kCodes;
  auto step = [&](int64_t c, int64_t have) __attribute__((always_inline)) {
    Ints q[MT];
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) q[i] = ints_at(x.x + (i0 + i) * x.padded + c);
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) {
      int8_t tail[kCodes] = {};
      if (have < kCodes) memcpy(tail, at[r] + c, (size_t)have);
      Ints key = codes_at(have < kCodes ? tail : at[r] + c);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) sums[i * NR + r] = add_products(sums[i * NR + r], key, q[i]);
    }
  };
  for (int64_t c = 0; c < whole; c += kCodes) step(c, kCodes);
  if (whole < dim) step(whole, dim - whole);
  float all[kSums];
  to_floats(all, add_up(sums));
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) memcpy(out + i * ldo, all + i * NR, NR * sizeof(float));
}

// out[i * ldo + j]: sums of n keys, `stride` entries apart, with every row of x, without their scales.
inline void codes_dot(const int8_t *keys, int64_t stride, int64_t n, int64_t dim, const Codes &x, float *out, int64_t ldo) {
  const int8_t *at[kSums];
  float rest[4 * kSums];
  for (int64_t i = 0; i < x.m;) {
    int64_t rows = x.m - i >= 4 ? 4 : x.m - i >= 2 ? 2 : 1, tile = kSums / rows;
    for (int64_t j = 0; j < n; j += tile) {
      bool fits = j + tile <= n;
      for (int64_t r = 0; r < tile; r++) at[r] = keys + min64(j + r, n - 1) * stride;
      float *to = fits ? out + i * ldo + j : rest;
      int64_t ld = fits ? ldo : tile;
      if (rows == 4)
        codes_tile<kSums / 4, 4>(at, dim, x, i, to, ld);
      else if (rows == 2)
        codes_tile<kSums / 2, 2>(at, dim, x, i, to, ld);
      else
        codes_tile<kSums, 1>(at, dim, x, i, to, ld);
      for (int64_t r = 0; !fits && r < rows; r++)
        memcpy(out + (i + r) * ldo + j, rest + r * tile, (size_t)(n - j) * sizeof(float));
    }
    i += rows;
  }
}

}  // namespace
