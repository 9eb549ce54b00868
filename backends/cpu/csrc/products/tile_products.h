// Products of 2 x 2 tiles, 16 x 16 float32 sums each, of bf16 pairs: what products and attention of many tokens are
// made of (gemm_tiles.h, prefill_tiles.h). They use AMX if there is AMX, else AVX-512's own products of pairs.
//
// Both flush denormal numbers to zero and sum a result over its columns pair by pair, in one order whatever the number
// of rows. AMX's order is also that of `dot` there (kDotOnTiles); `dot` on AVX-512 sums sixteen pairs side by side.
#pragma once
#include "products/bf16_dot.h"

namespace {

// The first factor: two times sixteen rows that begin `row` entries apart. A step is 32 columns, and begins `step`
// entries after the previous one.
struct TileRows {
  const bf16 *upper, *lower;
  int64_t row, step;
};

// What a product does between its steps if nothing is given: nothing (gemm_tiles.h prefetches).
struct NoOp {
  void operator()() const {}
};

// Tile [i][j], of the upper or lower rows and the first or second panel, is at + i * lower + j * second, [16, 16]
// floats.
struct TileSums {
  float *at;
  int64_t lower, second;
};

#if defined(INFERPLANE_AMX)
// Configures this thread's tile registers for `multiply_tiles`; each thread calls it before, and `release_tiles` after.
inline void configure_tiles() { amx_configure(16); }
// Releases the tile registers: torch's kernels use tiles too, with shapes of their own.
inline void release_tiles() { _tile_release(); }

// Four tiles of sums: two times sixteen rows of w times two panels x0 and x1, each [steps, 16 pairs of columns, 16
// rows], over `steps` times 32 columns. `begin`: the tiles are overwritten; else the products are added to them.
// `meanwhile()` is called twice per step.
template <class Meanwhile = NoOp>
inline __attribute__((always_inline)) void multiply_tiles(const TileRows &w, const uint32_t *x0, const uint32_t *x1,
                                                         int64_t steps, bool begin, const TileSums &sums,
                                                         Meanwhile meanwhile = {}) {
  const bf16 *upper = w.upper, *lower = w.lower;
  float *s0 = sums.at, *s1 = s0 + sums.second, *s2 = s0 + sums.lower, *s3 = s1 + sums.lower;
  size_t row = (size_t)w.row * sizeof(bf16);
  // GCC's tile loads do not declare that they read memory; this keeps the stores before them.
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
// Without tile registers there is nothing to configure or release.
inline void configure_tiles() {}
inline void release_tiles() {}

// Eight rows of w, which are `row` entries apart, times both panels: row r goes to s0[r * 16 ..] for x0 and s1[r * 16
// ..] for x1; `begin`: overwritten, else added. `step` is how far apart the 32 columns of two steps begin. Sixteen sums
// are more than the processor has in flight, and each pair of w is brought to a register once for two products.
// `meanwhile()` is called once per step.
template <class Meanwhile>
inline void multiply_tile_quarter(const bf16 *w, int64_t row, int64_t step, const uint32_t *x0, const uint32_t *x1,
                                  int64_t steps, bool begin, float *s0, float *s1, Meanwhile meanwhile) {
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
        __asm__("" : "+v"(each));  // or GCC reads it from memory again for each product
        a[r] = _mm512_dpbf16_ps(a[r], (__m512bh)each, left);
        b[r] = _mm512_dpbf16_ps(b[r], (__m512bh)each, right);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++) _mm512_store_ps(s0 + r * 16, a[r]), _mm512_store_ps(s1 + r * 16, b[r]);
}

// The same function without AMX, with AVX-512's products of pairs; `meanwhile()` is called four times per step, once
// for each quarter.
template <class Meanwhile = NoOp>
inline void multiply_tiles(const TileRows &w, const uint32_t *x0, const uint32_t *x1, int64_t steps, bool begin,
                          const TileSums &sums, Meanwhile meanwhile = {}) {
  for (int h = 0; h < 4; h++) {
    const bf16 *from = (h < 2 ? w.upper : w.lower) + h % 2 * 8 * w.row;
    float *to = sums.at + h / 2 * sums.lower + h % 2 * 128;
    multiply_tile_quarter(from, w.row, w.step, x0, x1, steps, begin, to, to + sums.second, meanwhile);
  }
}
#endif

}  // namespace
