// Scores of int8 keys: rows of queries, rounded to 16 bits, times int8 entries of the cache as they lie, exact in
// integers. paged_attention.h calls `int8_scores` and then applies the scales of queries and keys to the sums.
#pragma once
#include "products/linear.h"

namespace {

// Rows of queries as 16-bit integers, with one scale per row.
struct Int16Rows {
  int64_t m, padded;
  const int16_t *x;  // [m, padded], zeros from column k on
  const float *scale;  // [m]
};

#ifdef __AVX512BW__
// A register of 16-bit integers (its sums are 32-bit integers), with loads, multiply-add of pairs, and conversions:
// add_pair_products: lane i of the result is sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1]. store_as_floats: all 32-bit
// lanes.
typedef __m512i Int16s;
constexpr int kScoreRegisters = 16;  // registers of sums, and sums per register
inline Int16s load_int8_as_int16(const int8_t *p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
}
inline Int16s load_int16(const int16_t *p) { return _mm512_loadu_si512(p); }
// 32-bit lane i of the result is sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1].
inline Int16s add_pair_products(Int16s sum, Int16s a, Int16s b) {
#ifdef __AVX512VNNI__
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
inline void store_as_floats(float *p, Int16s v) { _mm512_storeu_ps(p, _mm512_cvtepi32_ps(v)); }
// Lane i of the result is the sum of register i's lanes.
inline Int16s sum_registers(Int16s r[16]) {
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
typedef __m256i Int16s;
constexpr int kScoreRegisters = 8;
inline Int16s load_int8_as_int16(const int8_t *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
inline Int16s load_int16(const int16_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
// 32-bit lane i of the result is sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1].
inline Int16s add_pair_products(Int16s sum, Int16s a, Int16s b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
inline void store_as_floats(float *p, Int16s v) { _mm256_storeu_ps(p, _mm256_cvtepi32_ps(v)); }
// Lane i of the result is the sum of register i's lanes; r is overwritten.
inline Int16s sum_registers(Int16s r[8]) {
  Int16s low = _mm256_hadd_epi32(_mm256_hadd_epi32(r[0], r[1]), _mm256_hadd_epi32(r[2], r[3]));
  Int16s high = _mm256_hadd_epi32(_mm256_hadd_epi32(r[4], r[5]), _mm256_hadd_epi32(r[6], r[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif
constexpr int kInt16Lanes = sizeof(Int16s) / 2;

// Rounds m rows of k entries, where row(i) points to row i, to 16-bit integers from -32767 to 32767 with one scale per
// row, in `buffers` of the calling thread; zeros from column k on.
template <class RowAt>
inline Int16Rows quantize_rows_int16(Workspace buffers[2], int64_t m, int64_t k, RowAt row) {
  int64_t padded = round_up(k, kInt16Lanes);
  int16_t *x = buffers[0].reserve<int16_t>(m * padded);
  float *scale = buffers[1].reserve<float>(m);
  for (int64_t i = 0; i < m; i++) {
    const bf16 *from = row(i);
    float largest = largest_magnitude(from, k);
    float inverse = largest > 0 ? 32767.0f / largest : 0.0f;
    scale[i] = largest / 32767.0f;
    // Too small to be distinguished from zero; NaN takes this branch too.
    if (!(inverse < 3e38f)) scale[i] = inverse = 0.0f;
    if (!(largest < 3e38f)) scale[i] = largest - largest;  // infinite or NaN: so is every result
    for (int64_t c = 0; c < padded; c += kLanes) {
      F32x16 v = c < k ? load_f32x16(from + c, k - c) * inverse : F32x16{};
      store(x + i * padded + c, __builtin_convertvector(__builtin_convertvector(round_even(v), I32x16),
                                                        int16_t __attribute__((vector_size(32)))));
    }
  }
  return {m, padded, x, scale};
}

// out[i * ldo + r] = sum over c < dim of at[r][c] x[i0 + i, c], overwritten, for NR keys r and MT rows of x from i0 on:
// exact integers as floats, without any scale. NR * MT is kScoreRegisters.
template <int NR, int MT>
inline void score_tile(const int8_t *const *at, int64_t dim, const Int16Rows &x, int64_t i0, float *out, int64_t ldo) {
  Int16s sums[kScoreRegisters] = {};
  int64_t whole = dim / kInt16Lanes * kInt16Lanes;
  auto step = [&](int64_t c, int64_t have) __attribute__((always_inline)) {
    Int16s q[MT];
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) q[i] = load_int16(x.x + (i0 + i) * x.padded + c);
#pragma GCC unroll 16
    for (int r = 0; r < NR; r++) {
      int8_t tail[kInt16Lanes] = {};
      if (have < kInt16Lanes) memcpy(tail, at[r] + c, (size_t)have);
      Int16s key = load_int8_as_int16(have < kInt16Lanes ? tail : at[r] + c);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) sums[i * NR + r] = add_pair_products(sums[i * NR + r], key, q[i]);
    }
  };
  for (int64_t c = 0; c < whole; c += kInt16Lanes) step(c, kInt16Lanes);
  if (whole < dim) step(whole, dim - whole);
  float all[kScoreRegisters];
  store_as_floats(all, sum_registers(sums));
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) memcpy(out + i * ldo, all + i * NR, NR * sizeof(float));
}

// out[i * ldo + j] = key j times row i of x over `dim` entries, overwritten, for n keys, which are `stride` entries
// apart, and all rows of x, without the scales of keys and rows. Computed by the calling thread.
inline void int8_scores(const int8_t *keys, int64_t stride, int64_t n, int64_t dim, const Int16Rows &x, float *out,
                        int64_t ldo) {
  const int8_t *at[kScoreRegisters];
  float rest[4 * kScoreRegisters];
  for (int64_t i = 0; i < x.m;) {
    int64_t rows = x.m - i >= 4 ? 4 : x.m - i >= 2 ? 2 : 1, tile = kScoreRegisters / rows;
    for (int64_t j = 0; j < n; j += tile) {
      bool fits = j + tile <= n;
      for (int64_t r = 0; r < tile; r++) at[r] = keys + min64(j + r, n - 1) * stride;
      float *to = fits ? out + i * ldo + j : rest;
      int64_t ld = fits ? ldo : tile;
      if (rows == 4)
        score_tile<kScoreRegisters / 4, 4>(at, dim, x, i, to, ld);
      else if (rows == 2)
        score_tile<kScoreRegisters / 2, 2>(at, dim, x, i, to, ld);
      else
        score_tile<kScoreRegisters, 1>(at, dim, x, i, to, ld);
      for (int64_t r = 0; !fits && r < rows; r++)
        memcpy(out + (i + r) * ldo + j, rest + r * tile, (size_t)(n - j) * sizeof(float));
    }
    i += rows;
  }
}

}  // namespace
