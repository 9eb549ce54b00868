// W8A8 products: int8 weights with one scale per row times activations that are quantized to int8 with one scale per
// row as they come. linear.h calls `w8a8_dot` for few rows, w8a8_gemm.h `multiply_panel_pairs` for many.
//
// Sums are exact in 32 bits, so every instruction set, and every way to split a product, gives the same bits. The
// panels are those of IP_INT8: a line is what VNNI takes for four columns, and sixteen lines are what AMX takes for 64.
#pragma once
#include "products/panel_products.h"

namespace {

constexpr int64_t kInt8TileRows = 32;  // rows of activations, and of weights, that are multiplied at a time

// Rows of activations as signed bytes, zeros after the last column. Space for whole tiles of rows is reserved, and
// read.
struct Int8Activations {
  int64_t m, padded;
  int8_t *x;  // [m, padded]
  float *scale;  // [m]
  int32_t *sums;  // [m], of the quantized entries
  int32_t *pairs;  // without VNNI: [m, padded / 4, 2]: of each four columns 0 and 2, then 1 and 3, in 16 bits each
};

// Reserves space in `s` for m rows of w.k activations (padded to whole groups of w, and to kInt8TileRows rows); it is
// not cleared. `quantize_row` fills one row.
inline Int8Activations reserve_int8(Workspace s[3], int64_t m, const ip_matrix &w) {
  int64_t padded = num_groups(w) * group_size(w), rows = round_up(m, kInt8TileRows);
  Int8Activations b = {m, padded, s[0].reserve<int8_t>(rows * padded), s[1].reserve<float>(2 * rows), nullptr, nullptr};
  b.sums = (int32_t *)(b.scale + rows);
#if !defined(__AVX512VNNI__)
  b.pairs = s[2].reserve<int32_t>(rows * padded / 2);
#endif
  return b;
}

// Quantizes k bf16 entries to row i of b: entries, scale and sum; zeros in columns k .. padded.
inline void quantize_row(const Int8Activations &b, int64_t i, const bf16 *row, int64_t k) {
  int8_t *x = b.x + i * b.padded;
  QuantizedRow quantized = quantize_int8_row(row, k, x);
  memset(x + k, 0, (size_t)(b.padded - k));
  b.scale[i] = quantized.scale, b.sums[i] = quantized.sum;
#if !defined(__AVX512VNNI__)
  for (int64_t c = 0; c < b.padded / 4; c++)
    for (int e = 0; e < 2; e++)
      b.pairs[i * b.padded / 2 + 2 * c + e] =
          (int32_t)((uint32_t)(uint16_t)x[4 * c + e] | (uint32_t)(uint16_t)x[4 * c + 2 + e] << 16);
#endif
}

// sums[r * 16 + j] = row j of a panel times row i + r of x over all columns, for 16 rows j and r < MT, overwritten:
// exact integers, with the weight's offset of 128 still in them.
template <int MT>
inline void dot_panel_tile(const uint8_t *panel, const Int8Activations &x, int64_t i, int32_t *sums) {
  int64_t lines = x.padded / 4;
#if defined(__AVX512VNNI__)
  constexpr int kSums = MT == 1 ? 4 : MT == 2 ? 2 : 1;  // sums per row: a sum waits for its last addition
  __m512i acc[MT][kSums];
  const int32_t *q[MT];
#pragma GCC unroll 8
  for (int r = 0; r < MT; r++) {
    q[r] = (const int32_t *)(x.x + (i + r) * x.padded);
    for (int n = 0; n < kSums; n++) acc[r][n] = __m512i{};
  }
  for (int64_t c = 0; c < lines; c += 4) {
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) {
      __m512i line = _mm512_loadu_si512(panel + (c + l) * 64);
      if (kHardwarePrefetchedRows)
        prefetch_line<IP_W8A8, MT>(panel + (c + l) * 64);
      else if (MT <= 4)
        _mm_prefetch((const char *)panel + (c + l) * 64 + 2048, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int r = 0; r < MT; r++)
        acc[r][l % kSums] = _mm512_dpbusd_epi32(acc[r][l % kSums], line, _mm512_set1_epi32(q[r][c + l]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MT; r++) {
    for (int n = 1; n < kSums; n++) acc[r][0] = _mm512_add_epi32(acc[r][0], acc[r][n]);
    _mm512_storeu_si512(sums + r * 16, acc[r][0]);
  }
#else
  GroupSums s[MT];
  const int32_t *q[MT];
#pragma GCC unroll 4
  for (int r = 0; r < MT; r++) s[r].start_at(0), q[r] = x.pairs + (i + r) * x.padded / 2;
  for (int64_t c = 0; c < lines; c++) {
    Line line = load_line(panel + c * 64);
    _mm_prefetch((const char *)panel + c * 64 + 2048, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int r = 0; r < MT; r++) s[r].template add<false>(line, q[r][2 * c], q[r][2 * c + 1]);
  }
  for (int r = 0; r < MT; r++) memcpy(sums + r * 16, &s[r].a, 64);
#endif
}

// `dot_panel_tile` for rows i .. i + rows of x, at most kInt8TileRows: sums [rows, 16].
inline void dot_panel(const uint8_t *panel, const Int8Activations &x, int64_t i, int64_t rows, int32_t *sums) {
  int64_t r = 0;
#if defined(__AVX512VNNI__)
  for (; r + 8 <= rows; r += 8) dot_panel_tile<8>(panel, x, i + r, sums + r * 16);
#endif
  for (; r + 4 <= rows; r += 4) dot_panel_tile<4>(panel, x, i + r, sums + r * 16);
  if (r + 2 <= rows) dot_panel_tile<2>(panel, x, i + r, sums + r * 16), r += 2;
  if (r < rows) dot_panel_tile<1>(panel, x, i + r, sums + r * 16);
}

#if defined(INFERPLANE_AMX)
constexpr int64_t kMinAmxRows = 9;  // from this many rows on, tiles are faster

// The sums of `dot_panel_tile` for two panels p0 and p1 and rows i .. i + 32 of x, on AMX tiles: those of panel h are
// sums[h * 512 + r * 16 + j]. `amx_configure(16)` was called. Rows of x after the last are read too.
inline void dot_panels_amx(const uint8_t *p0, const uint8_t *p1, const Int8Activations &x, int64_t i, int32_t *sums) {
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

// float32 results of row `row` of x with the sixteen rows of a panel, from their integer sums[0 .. 16]: offset removed,
// scales of both applied, without bias.
inline F32x16 scale_sums(const ip_matrix &w, int64_t panel, const Int8Activations &x, int64_t row,
                         const int32_t *sums) {
  I32x16 exact = load<I32x16>(sums) - 128 * x.sums[row];
  return __builtin_convertvector(exact, F32x16) * panel_scale(w, panel, 0) * x.scale[row];
}

// Multiplies rows first .. first + m of x with pairs of panels `from` .. `to`, on the calling thread. panel_of(j, h), h
// 0 or 1, is the number of a panel of pair j; -1 for h 1: none. store_sums(j, i, n, sums) receives, for each pair j,
// the integer sums of n rows of x from row i on (at most kInt8TileRows): those of panel h are [n, 16] at sums + h *
// 512, with the weight's offset still in them.
template <class PanelOf, class Store>
inline void multiply_panel_pairs(const ip_matrix &w, const Int8Activations &x, int64_t first, int64_t m, int64_t from,
                                 int64_t to, PanelOf panel_of, Store store_sums) {
  alignas(64) int32_t sums[2 * kInt8TileRows * 16];
  auto at = [&](int64_t panel) { return (const uint8_t *)w.data + panel * panel_bytes(w); };
  bool tiles = false;
#if defined(INFERPLANE_AMX)
  tiles = m >= kMinAmxRows;
  if (tiles) amx_configure(16);
#endif
  for (int64_t j = from; j < to; j++) {
    int64_t p0 = panel_of(j, 0), p1 = panel_of(j, 1);
    for (int64_t i = first; i < first + m; i += kInt8TileRows) {
      int64_t rows = min64(kInt8TileRows, first + m - i);
#if defined(INFERPLANE_AMX)
      if (tiles) dot_panels_amx(at(p0), at(p1 < 0 ? p0 : p1), x, i, sums);
#endif
      if (!tiles) dot_panel(at(p0), x, i, rows, sums);
      if (!tiles && p1 >= 0) dot_panel(at(p1), x, i, rows, sums + 512);
      store_sums(j, i, rows, sums);
    }
  }
#if defined(INFERPLANE_AMX)
  if (tiles) _tile_release();  // torch's kernels use tiles too, with shapes of their own
#endif
}

// out[i * ldo + j - first] = w[j, .] x[i, .] in float32 with scales, overwritten, for weight rows j first .. last and
// all rows i of x; without bias. `first` is a multiple of 16; `last` is one too, or w.n. Computed by the calling
// thread.
inline void w8a8_dot(const ip_matrix &w, int64_t first, int64_t last, const Int8Activations &x, float *out,
                     int64_t ldo) {
  int64_t begin = first / kPanelRows, panels = (last + kPanelRows - 1) / kPanelRows - begin;
  auto panel_of = [&](int64_t j, int h) { return 2 * j + h < panels ? begin + 2 * j + h : -1; };
  multiply_panel_pairs(
      w, x, 0, x.m, 0, (panels + 1) / 2, panel_of, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
        for (int h = 0; h < 2 && 2 * j + h < panels; h++) {
          int64_t column = (2 * j + h) * kPanelRows;
          for (int64_t r = 0; r < n; r++)
            store_f32x16(out + (i + r) * ldo + column,
                         scale_sums(w, begin + 2 * j + h, x, i + r, sums + h * 512 + r * 16), last - first - column);
        }
      });
}

}  // namespace
