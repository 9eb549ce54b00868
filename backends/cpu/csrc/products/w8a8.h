// Weights of 8 bits with one scale a row times activations that are rounded to 8 bits a row as they come (W8A8).
//
// Sums are exact in 32 bits, so every instruction set, and every way to cut a product up, gives the same bits. The panels are
// those of IP_INT8: a line of one is what VNNI takes for four columns, and sixteen lines are what AMX takes for 64.
#pragma once
#include "quant.h"

namespace {

constexpr int64_t kByteRows = 32;  // rows of activations, and of weights, that are multiplied at a time

// Rows of activations as signed bytes, zeros behind the last column; whole tiles of rows may be read.
struct Bytes {
  int64_t m, padded;
  int8_t *x;              // [m, padded]
  float *scale;           // [m]
  int32_t *sums;          // [m], of the codes
  int32_t *pairs;         // without VNNI: [m, padded / 4, 2], columns 0 and 2, then 1 and 3, of four, in 16 bits
};

inline Bytes bytes_in(Scratch s[3], int64_t m, const ip_matrix &w) {
  int64_t padded = groups_of(w) * group_of(w), rows = round_up(m, kByteRows);
  Bytes b = {m, padded, s[0].get<int8_t>(rows * padded), s[1].get<float>(2 * rows), nullptr, nullptr};
  b.sums = (int32_t *)(b.scale + rows);
#if !defined(__AVX512VNNI__)
  b.pairs = s[2].get<int32_t>(rows * padded / 2);
#endif
  return b;
}

inline void fill_bytes(const Bytes &b, int64_t i, const bf16 *row, int64_t k) {
  int8_t *x = b.x + i * b.padded;
  Coded coded = code(row, k, x);
  memset(x + k, 0, (size_t)(b.padded - k));
  b.scale[i] = coded.scale, b.sums[i] = coded.sum;
#if !defined(__AVX512VNNI__)
  for (int64_t c = 0; c < b.padded / 4; c++)
    for (int e = 0; e < 2; e++)
      b.pairs[i * b.padded / 2 + 2 * c + e] =
          (int32_t)((uint32_t)(uint16_t)x[4 * c + e] | (uint32_t)(uint16_t)x[4 * c + 2 + e] << 16);
#endif
}

// sums[r * 16 ..]: a panel's sixteen rows times rows i .. i + MT of x, still with the offset.
template <int MT>
inline void bytes_tile(const uint8_t *panel, const Bytes &x, int64_t i, int32_t *sums) {
  int64_t lines = x.padded / 4;
#if defined(__AVX512VNNI__)
  constexpr int N = MT == 1 ? 4 : MT == 2 ? 2 : 1;  // chains of sums a row: one has to wait for itself
  __m512i acc[MT][N];
  const int32_t *q[MT];
#pragma GCC unroll 8
  for (int r = 0; r < MT; r++) {
    q[r] = (const int32_t *)(x.x + (i + r) * x.padded);
    for (int n = 0; n < N; n++) acc[r][n] = __m512i{};
  }
  for (int64_t c = 0; c < lines; c += 4) {
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
      __m512i line = _mm512_loadu_si512(panel + (c + l) * 64);
      if (kForeseen)
        ask_ahead<IP_W8A8, MT>(panel + (c + l) * 64);
      else if (MT <= 4)
        _mm_prefetch((const char *)panel + (c + l) * 64 + 2048, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int r = 0; r < MT; r++)
        acc[r][l % N] = _mm512_dpbusd_epi32(acc[r][l % N], line, _mm512_set1_epi32(q[r][c + l]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MT; r++) {
    for (int n = 1; n < N; n++) acc[r][0] = _mm512_add_epi32(acc[r][0], acc[r][n]);
    _mm512_storeu_si512(sums + r * 16, acc[r][0]);
  }
#else
  Sums s[MT];
  const int32_t *q[MT];
#pragma GCC unroll 4
  for (int r = 0; r < MT; r++) s[r].begin(0), q[r] = x.pairs + (i + r) * x.padded / 2;
  for (int64_t c = 0; c < lines; c++) {
    Line line = line_at(panel + c * 64);
    _mm_prefetch((const char *)panel + c * 64 + 2048, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int r = 0; r < MT; r++) s[r].add(line, q[r][2 * c], q[r][2 * c + 1]);
  }
  for (int r = 0; r < MT; r++) memcpy(sums + r * 16, &s[r].a, 64);
#endif
}

// As bytes_tile, for up to kByteRows rows.
inline void bytes_panel(const uint8_t *panel, const Bytes &x, int64_t i, int64_t rows, int32_t *sums) {
  int64_t r = 0;
#if defined(__AVX512VNNI__)
  for (; r + 8 <= rows; r += 8) bytes_tile<8>(panel, x, i + r, sums + r * 16);
#endif
  for (; r + 4 <= rows; r += 4) bytes_tile<4>(panel, x, i + r, sums + r * 16);
  if (r + 2 <= rows) bytes_tile<2>(panel, x, i + r, sums + r * 16), r += 2;
  if (r < rows) bytes_tile<1>(panel, x, i + r, sums + r * 16);
}

#if defined(INFERPLANE_AMX)
constexpr int64_t kByteTiles = 9;  // from so many rows on tiles are faster

// Two panels times 32 rows: sums[h * 512 + r * 16 ..] of panel h.
inline void bytes_block(const uint8_t *p0, const uint8_t *p1, const Bytes &x, int64_t i, int32_t *sums) {
  const int8_t *x0 = x.x + i * x.padded, *x1 = x0 + 16 * x.padded;
  __asm__ volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t c = 0; c < x.padded; c += 64, p0 += 1024, p1 += 1024) {
    _tile_loadd(4, x0 + c, x.padded);
    _tile_loadd(6, p0, 64);
    _tile_loadd(5, x1 + c, x.padded);
    _tile_loadd(7, p1, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 5, 6);
    _tile_dpbsud(2, 4, 7);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
  __asm__ volatile("" ::: "memory");
}
#endif

// Results of row `row` of x with the sixteen rows of a panel.
inline F bytes_result(const ip_matrix &w, int64_t panel, const Bytes &x, int64_t row, const int32_t *sums) {
  I exact = load<I>(sums) - 128 * x.sums[row];
  return __builtin_convertvector(exact, F) * scale_of(w, panel, 0) * x.scale[row];
}

// Rows first .. first + m of x times pairs of panels `from` .. `to`: pair(j, h), h 0 or 1, says which panel; -1: none.
// put(j, i, n, sums) receives n rows' sums from i on, those of panel h at sums + h * 512.
template <class Pair, class Put>
inline void bytes_products(const ip_matrix &w, const Bytes &x, int64_t first, int64_t m, int64_t from, int64_t to, Pair pair,
                           Put put) {
  alignas(64) int32_t sums[2 * kByteRows * 16];
  auto at = [&](int64_t panel) { return (const uint8_t *)w.data + panel * panel_bytes(w); };
  bool tiles = false;
#if defined(INFERPLANE_AMX)
  tiles = m >= kByteTiles;
  if (tiles) amx_configure(16);
#endif
  for (int64_t j = from; j < to; j++) {
    int64_t p0 = pair(j, 0), p1 = pair(j, 1);
    for (int64_t i = first; i < first + m; i += kByteRows) {
      int64_t rows = min64(kByteRows, first + m - i);
#if defined(INFERPLANE_AMX)
      if (tiles) bytes_block(at(p0), at(p1 < 0 ? p0 : p1), x, i, sums);
#endif
      if (!tiles) bytes_panel(at(p0), x, i, rows, sums);
      if (!tiles && p1 >= 0) bytes_panel(at(p1), x, i, rows, sums + 512);
      put(j, i, rows, sums);
    }
  }
#if defined(INFERPLANE_AMX)
  if (tiles) _tile_release();  // torch's kernels use the tiles too, with shapes of their own
#endif
}

// float32 results of weight rows first .. last, whole panels, for all of x: out[i * ldo + j - first].
inline void bytes_dot(const ip_matrix &w, int64_t first, int64_t last, const Bytes &x, float *out, int64_t ldo) {
  int64_t begin = first / kPanel, panels = (last + kPanel - 1) / kPanel - begin;
  auto pair = [&](int64_t j, int h) { return 2 * j + h < panels ? begin + 2 * j + h : -1; };
  bytes_products(w, x, 0, x.m, 0, (panels + 1) / 2, pair, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
    for (int h = 0; h < 2 && 2 * j + h < panels; h++) {
      int64_t column = (2 * j + h) * kPanel;
      for (int64_t r = 0; r < n; r++)
        store_f(out + (i + r) * ldo + column, bytes_result(w, begin + 2 * j + h, x, i + r, sums + h * 512 + r * 16),
                last - first - column);
    }
  });
}

}  // namespace
