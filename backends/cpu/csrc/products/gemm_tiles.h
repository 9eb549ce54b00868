// Products with many rows on tiles (tile_products.h), for weights of every kind; reached through attention/prefill.h,
// which says what gemm_float32.h provides under the same names.
//
// The activations are laid out once as panels of 16 rows with pairs of columns interleaved, which is how tiles read the
// second factor. A thread takes some rows of the weight and goes through its columns in blocks: 32 rows of a block are
// copied (or expanded, from 8 or 4 bits) to the first-level cache, and all rows of activations pass by. A result is
// summed over the columns in one order, which on AMX is that of `amx_dot`: both give the same bits for bf16 weights
// whose rows fill the tiles.
#pragma once
#include "products/linear.h"
#include "products/tile_products.h"

namespace {

constexpr int64_t kGemmRows = 512;  // rows of activations that pass by a block of weights
constexpr int64_t kGemmColumns = 256;  // columns of a block of weights

// Activations in panels: pairs[panel][padded / 2][16], zeros after the last row and column.
struct ActivationPanels {
  uint32_t *pairs;
  int64_t m, padded;
  uint32_t *at(int64_t panel, int64_t column) const { return pairs + (panel * padded + column) * (kPanelRows / 2); }
};

// Reserves space in `s` for m rows of k columns, as an even number of panels; it is not cleared. The leading thread
// calls it; the team shares it.
inline ActivationPanels reserve_panels(Workspace *s, int64_t m, int64_t k) {
  int64_t padded = round_up(k, kColumnStep);
  return {s->reserve<uint32_t>(round_up(m, 2 * kPanelRows) * padded / 2), m, padded};
}

// Transposes, in place, a matrix of 16 x 16 numbers of 32 bits; r[i] is row i.
inline void transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[4 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[8 + j], t[12 + j], 0xdd);
  }
}

// A mask of the first n of 32 lanes.
inline __mmask32 mask_of_first(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

// Writes one panel of x: rows 16 * panel .. 16 * panel + 16, where row(i) points to the k entries of row i. Rows from
// x.m on and columns k .. padded are zeros.
template <class RowAt>
inline void fill_panel(const ActivationPanels &x, int64_t panel, int64_t k, RowAt row) {
  int64_t have = min64(kPanelRows, x.m - panel * kPanelRows);
  const bf16 *rows[kPanelRows];
  for (int64_t i = 0; i < have; i++) rows[i] = row(panel * kPanelRows + i);
  for (int64_t c = 0; c < x.padded; c += kColumnStep) {
    __mmask32 mask = mask_of_first(k - c);
    __m512i r[16];
    for (int64_t i = 0; i < 16; i++) r[i] = i < have ? _mm512_maskz_loadu_epi16(mask, rows[i] + c) : __m512i{};
    transpose16(r);
    uint32_t *to = x.at(panel, c);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 16, r[i]);
  }
}

// Panels that the rows of x fill, rounded up to an even number.
inline int64_t num_panels(const ActivationPanels &x) { return (x.m + 2 * kPanelRows - 1) / (2 * kPanelRows) * 2; }

// Fills all panels of x with `fill_panel`. Every thread of the team calls it; complete after the next `barrier`.
template <class RowAt>
inline void fill_panels(Team &team, const ActivationPanels &x, int64_t k, RowAt row) {
  team.for_each_chunk(num_panels(x), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) fill_panel(x, p, k, row);
  });
}

// Writes `to` [16, 32] in bf16, dense and 64-byte aligned: weight rows from `row` on and columns from `c` on of a
// weight of any kind, scales applied. Rows from w.n on and columns from w.k on are zeros. `row` is a multiple of 16, c
// of 32.
inline void load_weight_tile(const ip_matrix &w, int64_t row, int64_t c, bf16 *to) {
  int64_t have = max64(0, min64(kPanelRows, w.n - row));
  __m512i r[kPanelRows];  // all are read before any is written: rows and tiles often lie a multiple of 4096 bytes apart
  if (is_bf16(w)) {
    const bf16 *from = (const bf16 *)w.data + row * w.ld + c;
    if (have == kPanelRows && c + kColumnStep <= w.k) {
#pragma GCC unroll 16
      for (int i = 0; i < kPanelRows; i++) r[i] = _mm512_loadu_si512(from + i * w.ld);
    } else {
      for (int i = 0; i < kPanelRows; i++)
        r[i] = i < have ? _mm512_maskz_loadu_epi16(mask_of_first(w.k - c), from + i * w.ld) : __m512i{};
    }
  } else if (w.kind == IP_FP8) {
    int64_t blocks = (w.k + kFp8Block - 1) / kFp8Block;
    for (int i = 0; i < kPanelRows; i++) {
      alignas(64) bf16 part[kColumnStep] = {};
      if (i < have) {
        fp8_row_to_bf16((const uint8_t *)w.data + (row + i) * w.ld + c, min64(kColumnStep, w.k - c), part);
        F32x16 scale = splat(w.scale[(row + i) / w.group * blocks + c / kFp8Block]);
        for (int h = 0; h < 2; h++) store_bf16x16(part + h * 16, load_f32x16(part + h * 16) * scale);
      }
      r[i] = _mm512_load_si512(part);
    }
  } else if (have) {
    int64_t panel = row / kPanelRows;
    const uint8_t *line = (const uint8_t *)w.data + panel * panel_bytes(w) + columns_bytes(w, c);
#pragma GCC unroll 8
    for (int q = 0; q < 8; q++) {
      Line v;
      if (w.kind == IP_INT6) {
        v = six_bit_entries<false>(line + q / 4 * kSixBitLines * 64, q % 4);
      } else {
        v = load_line(line + (w.kind == IP_INT8 ? q : q / 2) * 64);
        if (w.kind != IP_INT8) v = q % 2 ? high_nibbles(v) : low_nibbles(v);
      }
      r[q] = (__m512i)(w.kind == IP_MXFP4 ? unsigned_entries<IP_MXFP4>(v) : v);
      r[8 + q] = __m512i{};
    }
    transpose16(r);
    alignas(64) float scale[2][kLanes], less[2][kLanes];  // of the first and, in groups of 16, of the last 16 columns
    const int parts = w.group == kLanes ? 2 : 1;
    for (int h = 0; h < parts; h++) {
      int64_t g = (c + h * kLanes) / group_size(w);
      F32x16 of = panel_scale(w, panel, g);
      store(scale[h], of), store(less[h], of * (float)-entry_offset(w) + panel_minimum(w, panel, g));
    }
    __mmask32 mask = mask_of_first(w.k - c);
    for (int i = 0; i < kPanelRows; i++) {
      __m512 by = _mm512_set1_ps(scale[0][i]), minus = _mm512_set1_ps(less[0][i]);
      __m512 last_by = _mm512_set1_ps(scale[parts - 1][i]), last_minus = _mm512_set1_ps(less[parts - 1][i]);
      __m256i bytes = _mm512_castsi512_si256(r[i]);
      __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)));
      __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)));
      __m512bh both = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(b, last_by, last_minus), _mm512_fmadd_ps(a, by, minus));
      r[i] = _mm512_maskz_mov_epi16(mask, (__m512i)both);
    }
  } else {
    for (int i = 0; i < kPanelRows; i++) r[i] = __m512i{};
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPanelRows; i++) _mm512_store_si512(to + i * kColumnStep, r[i]);
}

// The lines that `load_weight_tile` will read, prefetched one after the other: sixteen at once would occupy the buffers
// in which a core tracks its cache misses, and the product in progress needs such buffers too.
struct TilePrefetch {
  const char *at = nullptr;
  int64_t stride = 0, left = 0;
  // Prefetches the next line, if one is left, into the second-level cache.
  void prefetch_one() {
    if (left <= 0) return;
    _mm_prefetch(at, _MM_HINT_T1);
    at += stride, left--;
  }
  // Prefetches all lines that are left.
  void prefetch_rest() {
    while (left > 0) prefetch_one();
  }
};

// The cache lines that `load_weight_tile(w, row, c, ...)` will read.
inline TilePrefetch prefetch_of_tile(const ip_matrix &w, int64_t row, int64_t c) {
  if (is_bf16(w) || w.kind == IP_FP8) {
    int64_t size = is_bf16(w) ? 2 : 1;
    return {(const char *)w.data + (row * w.ld + c) * size, w.ld * size, min64(kPanelRows, w.n - row)};
  }
  const char *line = (const char *)w.data + row / kPanelRows * panel_bytes(w) + columns_bytes(w, c);
  return {line, 64, row < w.n ? columns_bytes(w, kColumnStep) / 64 : 0};
}

// Rows of a weight with n rows that a thread takes at a time: a multiple of 32, about a quarter of a thread's even
// share, but at least 32 and at most 128 (256 if w.k exceeds 1024).
inline int64_t gemm_rows_per_chunk(const ip_matrix &w, int64_t n, int threads) {
  int64_t most = round_up((n + threads * 4 - 1) / (threads * 4), 32);
  return max64(32, min64(w.k > 1024 ? 256 : 128, most));
}

// How a thread goes through `rows` groups of 32 weight rows, the first of which is number `first`: block b is one group
// and kGemmColumns columns; all groups of one column block come before the next columns. `count`: blocks; `column`: the
// first column of block b; `tiles`: tiles of 16 rows and 32 columns in block b, 0 from `count` on.
struct WeightBlocks {
  const ip_matrix *w;
  int64_t first, rows, padded;  // of blocks of rows
  int64_t count() const { return rows * ((padded + kGemmColumns - 1) / kGemmColumns); }
  int64_t column(int64_t b) const { return b / rows * kGemmColumns; }
  int64_t tiles(int64_t b) const { return b < count() ? min64(kGemmColumns, padded - column(b)) / kColumnStep * 2 : 0; }
};

// Multiplies all rows of x with `blocks` blocks of 32 weight rows. Every thread of the team calls it; x is complete.
// first_weight_row(j, h), h 0 or 1, is the weight row where the first or second group of sixteen rows of block j
// begins. The thread that computed them calls store_sums(j, panel, sums) once for each block and pair of panels: four
// dense tiles [16 weight rows, 16 rows of activations] of float32 without bias, sums + 256 * t: t 0 and 1 are the first
// group times panels `panel` and `panel` + 1; 2 and 3 the second group. store_sums may overwrite them. A block is
// loaded while the one before it is multiplied, and the one after it is prefetched.
template <class FirstRow, class Store>
inline void gemm(Team &team, const ip_matrix &w, const ActivationPanels &x, int64_t blocks, FirstRow first_weight_row,
                 Store store_sums) {
  int64_t chunk = gemm_rows_per_chunk(w, blocks * 32, team.count) / 32, panels = num_panels(x);
  for (int64_t p0 = 0; p0 < panels; p0 += kGemmRows / kPanelRows) {
    int64_t pairs = (min64(panels, p0 + kGemmRows / kPanelRows) - p0) / 2;
    team.for_each_chunk(blocks, chunk, [&](int64_t first, int64_t last) {
      configure_tiles();
      bf16 *weights = workspace(kWeightTile)->reserve<bf16>(2 * 32 * kGemmColumns);
      for (int64_t j0 = first; j0 < last; j0 += chunk) {
        WeightBlocks of = {&w, j0, min64(chunk, last - j0), x.padded};
        float *sums = workspace(kProductSums)->reserve<float>(of.rows * pairs * 1024);
        auto load_tile = [&](int64_t b, int64_t u) {
          load_weight_tile(w, first_weight_row(j0 + b % of.rows, u & 1), of.column(b) + u / 2 * kColumnStep,
                      weights + (b & 1) * 32 * kGemmColumns + u * 512);
        };
        TilePrefetch prefetch;
        auto start_prefetch = [&](int64_t b, int64_t u) {
          prefetch.prefetch_rest();
          prefetch = prefetch_of_tile(w, first_weight_row(j0 + b % of.rows, u & 1), of.column(b) + u / 2 * kColumnStep);
        };
        for (int64_t u = 0; u < of.tiles(0); u++) load_tile(0, u);
        for (int64_t u = 0; u < of.tiles(1); u++) start_prefetch(1, u);
        for (int64_t b = 0; b < of.count(); b++) {
          int64_t loaded = 0, prefetched = 0, c = of.column(b);
          for (int64_t p = 0; p < pairs; p++) {
            float *at = sums + (b % of.rows * pairs + p) * 1024;
            for (int64_t to = of.tiles(b + 1) * (p + 1) / pairs; loaded < to; loaded++) load_tile(b + 1, loaded);
            for (int64_t to = of.tiles(b + 2) * (p + 1) / pairs; prefetched < to; prefetched++)
              start_prefetch(b + 2, prefetched);
            const bf16 *block = weights + (b & 1) * 32 * kGemmColumns;
            multiply_tiles({block, block + 512, kColumnStep, 1024}, x.at(p0 + 2 * p, c), x.at(p0 + 2 * p + 1, c),
                           of.tiles(b) / 2, c == 0, {at, 512, 256}, [&] { prefetch.prefetch_one(); });
            if (c + kGemmColumns >= x.padded) store_sums(j0 + b % of.rows, p0 + 2 * p, at);
          }
        }
      }
      release_tiles();
      _mm_sfence();  // makes what `store_sums` streamed to memory visible with the rest
    });
  }
}

// Lanes 2i and 2i + 1 of the 32 are a[i] and b[i], rounded to bf16. Sums that come out of tiles are never denormal, and
// only there the processor's own rounding differs from `f32_to_bf16`.
inline __m512i interleave_as_bf16(F32x16 a, F32x16 b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
// `interleave_as_bf16` of rows[0 .. 16] and rows[16 .. 32].
inline __m512i load_interleaved(const float *rows) {
  return interleave_as_bf16(load<F32x16>(rows), load<F32x16>(rows + 16));
}

// row[0 .. 16] rounded to bf16 (by the processor, as `interleave_as_bf16`), as float32.
inline __m512i load_rounded(const float *row) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(row))), 16);
}

// Writes the four tiles of sums that `gemm` gives for `panel` as rows: y[i * ldy + c] for the rows i of x in panels
// `panel` and `panel` + 1 and columns c from j on, 32 of them or as many as w has; adds the bias, to `sums` too.
// `wide`: y is float32, else bf16. Other entries of y are not touched.
inline void store_rows(const ip_matrix &w, const ActivationPanels &x, int64_t j, int64_t panel, float *sums, void *y,
                       int64_t ldy, int wide) {
  int64_t n = min64(32, w.n - j);
  if (w.bias)
    for (int64_t r = 0; r < n; r++) {
      F32x16 bias = splat(bf16_to_float(w.bias[j + r]));
      float *at = sums + r / 16 * 512 + r % 16 * 16;
      store(at, load<F32x16>(at) + bias), store(at + 256, load<F32x16>(at + 256) + bias);
    }
  for (int h = 0; h < 2; h++) {
    int64_t i0 = (panel + h) * kPanelRows, have = min64(kPanelRows, x.m - i0);
    const float *low = sums + h * 256, *high = low + 512;
    __m512i t[16];
    if (wide) {
      for (int part = 0; part < 2; part++) {
        for (int r = 0; r < 16; r++) t[r] = _mm512_load_si512((part ? high : low) + r * 16);
        transpose16(t);
        __mmask16 mask = (__mmask16)(mask_of_first(n - part * 16) & 0xffff);
        for (int64_t i = 0; i < have; i++)
          _mm512_mask_storeu_epi32((float *)y + (i0 + i) * ldy + j + part * 16, mask, t[i]);
      }
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) t[r] = load_interleaved((r < 8 ? low : high) + r % 8 * 32);
    transpose16(t);
    for (int64_t i = 0; i < have; i++) {
      bf16 *to = (bf16 *)y + (i0 + i) * ldy + j;
      if (n == 32 && ((uintptr_t)to & 63) == 0)
        _mm512_stream_si512((__m512i *)to, t[i]);
      else
        _mm512_mask_storeu_epi16(to, mask_of_first(n), t[i]);
    }
  }
}

// y[i * ldy + j] = x w^T + bias, overwritten, for all rows i of x and all rows j of w; `wide`: y is float32, else bf16.
// Every thread of the team calls it after `fill_panels` and a barrier; y is complete after the next `barrier`.
inline void gemm_to_rows(Team &team, const ip_matrix &w, const ActivationPanels &x, void *y, int64_t ldy, int wide) {
  gemm(
      team, w, x, (w.n + 31) / 32, [](int64_t j, int h) { return j * 32 + h * 16; },
      [&](int64_t j, int64_t panel, float *sums) { store_rows(w, x, j * 32, panel, sums, y, ldy, wide); });
}

// The lanes of `load_interleaved`, rounded as `f32_to_bf16`: for values that may be denormal.
inline __m512i load_interleaved_exact(const float *rows) {
  __m512i even = _mm512_cvtepu16_epi32((__m256i)f32_to_bf16(load<F32x16>(rows)));
  return _mm512_or_si512(even,
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)f32_to_bf16(load<F32x16>(rows + 16))), 16));
}

// to = f(x gate^T) * (x up^T) [m, w.n / 2], as panels for the product with `down`; rows of w are gate, then up, each a
// multiple of 16. f is one of ip_activation. Both products are rounded to bf16 first. If w.n / 2 is not a multiple of
// 32, zeros fill the last 16 columns of `to`. Every thread of the team calls it; `to` is complete after the next
// `barrier`.
inline void gemm_activation_mul(Team &team, const ip_matrix &w, const ActivationPanels &x, int32_t f,
                                const ActivationPanels &to) {
  int64_t inner = w.n / 2;
  gemm(
      team, w, x, inner / 16, [&](int64_t j, int h) { return h * inner + j * 16; },
      [&](int64_t j, int64_t panel, float *sums) {
        for (int h = 0; h < 2; h++) {
          uint32_t *at = to.at(panel + h, j * 16);
          for (int r = 0; r < 16; r++) {
            float *gate = sums + h * 256 + r * 16;
            F32x16 a = (F32x16)_mm512_castsi512_ps(load_rounded(gate)),
                   b = (F32x16)_mm512_castsi512_ps(load_rounded(gate + 512));
            store(gate, activate(a, f) * b);
          }
          for (int r = 0; r < 8; r++) _mm512_store_si512(at + r * 16, load_interleaved_exact(sums + h * 256 + r * 32));
          if (inner % kColumnStep && j * 16 + 16 == inner) memset(at + 128, 0, 128 * sizeof(uint32_t));
        }
      });
}

}  // namespace
