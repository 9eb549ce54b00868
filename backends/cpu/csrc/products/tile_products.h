// Two by two tiles of 16 x 16 sums in float32 of products of bf16 pairs, which is what products and attention of many
// tokens are made of: by AMX where there is AMX, else by AVX-512's own products of pairs.
//
// Either takes denormal numbers for zero, and sums a result over its columns pair by pair, in one order whatever the
// number of rows. AMX's order is also that of `dot` there (kDotOnTiles); `dot` on AVX-512 sums sixteen pairs side by side.
#pragma once
#include "dot.h"

namespace {

// The first factor: twice sixteen rows that begin `row` entries apart; 32 columns are a step, and lie `step` entries
// behind those before.
struct TileRows {
  const bf16 *upper, *lower;
  int64_t row, step;
};

// What a product does besides at each of its steps.
struct Nothing {
  void operator()() const {}
};

// Tile [i][j], of the upper or lower rows and the first or second panel, is at + i * lower + j * second, [16, 16].
struct TileSums {
  float *at;
  int64_t lower, second;
};

#if defined(INFERPLANE_AMX)
inline void tiles_begin() { amx_configure(16); }
inline void tiles_end() { _tile_release(); }  // torch's kernels use the tiles too, with shapes of their own

// sums += w times two panels [steps, 16 pairs of columns, 16]; `begin`: from zero.
template <class Meanwhile = Nothing>
inline __attribute__((always_inline)) void tile_products(const TileRows &w, const uint32_t *x0, const uint32_t *x1,
                                                         int64_t steps, bool begin, const TileSums &sums,
                                                         Meanwhile meanwhile = {}) {
  const bf16 *upper = w.upper, *lower = w.lower;
  float *s0 = sums.at, *s1 = s0 + sums.second, *s2 = s0 + sums.lower, *s3 = s1 + sums.lower;
  size_t row = (size_t)w.row * sizeof(bf16);
  // GCC's tile loads do not say that they read memory: what was written before them must be told to be wanted.
  __asm__ volatile("" ::: "memory");
  if (begin) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, s0, 64);
    _tile_loadd(1, s1, 64);
    _tile_loadd(2, s2, 64);
    _tile_loadd(3, s3, 64);
  }
  for (int64_t s = 0; s < steps; s++) {
    _tile_loadd(4, upper, row);
    _tile_loadd(6, x0, 64);
    _tile_loadd(5, lower, row);
    _tile_loadd(7, x1, 64);
    _tile_dpbf16ps(0, 4, 6);
    meanwhile();
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    meanwhile();
    upper += w.step, lower += w.step, x0 += 256, x1 += 256;
  }
  _tile_stored(0, s0, 64);
  _tile_stored(1, s1, 64);
  _tile_stored(2, s2, 64);
  _tile_stored(3, s3, 64);
  __asm__ volatile("" ::: "memory");
}
#elif defined(__AVX512BF16__)
inline void tiles_begin() {}
inline void tiles_end() {}

// Eight rows of w and both panels: sixteen sums, more than the processor has under way, and each of w's pairs is brought
// to a register once for two products.
template <class Meanwhile>
inline void tile_quarter(const bf16 *w, int64_t row, int64_t step, const uint32_t *x0, const uint32_t *x1, int64_t steps,
                         bool begin, float *s0, float *s1, Meanwhile meanwhile) {
  constexpr int kRows = 8;
  __m512 a[kRows], b[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) {
    a[r] = begin ? __m512{} : _mm512_load_ps(s0 + r * 16);
    b[r] = begin ? __m512{} : _mm512_load_ps(s1 + r * 16);
  }
  for (int64_t s = 0; s < steps; s++, w += step, x0 += 256, x1 += 256) {
    meanwhile();
    for (int c = 0; c < 16; c++) {
      __m512bh left = (__m512bh)_mm512_load_si512(x0 + c * 16), right = (__m512bh)_mm512_load_si512(x1 + c * 16);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) {
        int32_t pair;
        memcpy(&pair, w + r * row + 2 * c, sizeof pair);
        __m512i each = _mm512_set1_epi32(pair);
        __asm__("" : "+v"(each));  // or GCC reads it from memory for each product anew
        a[r] = _mm512_dpbf16_ps(a[r], (__m512bh)each, left);
        b[r] = _mm512_dpbf16_ps(b[r], (__m512bh)each, right);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) _mm512_store_ps(s0 + r * 16, a[r]), _mm512_store_ps(s1 + r * 16, b[r]);
}

// sums += w times two panels [steps, 16 pairs of columns, 16]; `begin`: from zero.
template <class Meanwhile = Nothing>
inline void tile_products(const TileRows &w, const uint32_t *x0, const uint32_t *x1, int64_t steps, bool begin,
                          const TileSums &sums, Meanwhile meanwhile = {}) {
  for (int h = 0; h < 4; h++) {
    const bf16 *from = (h < 2 ? w.upper : w.lower) + h % 2 * 8 * w.row;
    float *to = sums.at + h / 2 * sums.lower + h % 2 * 128;
    tile_quarter(from, w.row, w.step, x0, x1, steps, begin, to, to + sums.second, meanwhile);
  }
}
#endif

}  // namespace
