// Products with many rows on tiles (tiles.h), for weights of every kind.
//
// The activations are laid out once as panels of 16 rows with pairs of columns interleaved, which is how tiles want the
// second factor. A thread takes some rows of the weight and goes through its columns in blocks: 32 rows of a block are
// copied (or expanded, from 8 or 4 bits) to the first-level cache, and all rows of activations pass by. A result is
// summed over the columns in one order, which on AMX is that of `amx_dot`: both give the same bits for bf16 weights whose rows
// fill the tiles.
#pragma once
#include "linear.h"
#include "tiles.h"

namespace {

constexpr int64_t kGemmRows = 512;    // rows of activations that pass by a block of weights
constexpr int64_t kGemmColumns = 256; // columns of a block
constexpr int64_t kPanelRows = 16;

// Activations in panels: pairs[panel][padded / 2][16], zeros behind the last row and column.
struct PanelsOf {
  uint32_t *pairs;
  int64_t m, padded;
  uint32_t *at(int64_t panel, int64_t column) const { return pairs + (panel * padded + column) * (kPanelRows / 2); }
};

inline PanelsOf panels_in(Scratch *s, int64_t m, int64_t k) {
  int64_t padded = round_up(k, kStep);
  return {s->get<uint32_t>(round_up(m, 2 * kPanelRows) * padded / 2), m, padded};
}

// Rows become columns.
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

inline __mmask32 first_of_32(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }

// One panel: `row(i)` points to the k entries of row i.
template <class RowAt>
inline void fill_panel(const PanelsOf &x, int64_t panel, int64_t k, RowAt row) {
  int64_t have = min64(kPanelRows, x.m - panel * kPanelRows);
  const bf16 *rows[kPanelRows];
  for (int64_t i = 0; i < have; i++) rows[i] = row(panel * kPanelRows + i);
  for (int64_t c = 0; c < x.padded; c += kStep) {
    __mmask32 mask = first_of_32(k - c);
    __m512i r[16];
    for (int64_t i = 0; i < 16; i++) r[i] = i < have ? _mm512_maskz_loadu_epi16(mask, rows[i] + c) : __m512i{};
    transpose16(r);
    uint32_t *to = x.at(panel, c);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * 16, r[i]);
  }
}

inline int64_t panel_count(const PanelsOf &x) { return (x.m + 2 * kPanelRows - 1) / (2 * kPanelRows) * 2; }

template <class RowAt>
inline void fill_panels(Team &team, const PanelsOf &x, int64_t k, RowAt row) {
  team.each(panel_count(x), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) fill_panel(x, p, k, row);
  });
}

// Sixteen rows of a weight from `row` on and 32 columns from `c` on as a tile. Rows behind the last and columns behind k
// are zeros.
inline void weight_tile(const ip_matrix &w, int64_t row, int64_t c, bf16 *to) {
  int64_t have = max64(0, min64(kPanelRows, w.n - row));
  __m512i r[kPanelRows];  // all read before any is written: rows and tiles often lie a multiple of 4096 bytes apart
  if (is_bf16(w)) {
    const bf16 *from = (const bf16 *)w.data + row * w.ld + c;
    if (have == kPanelRows && c + kStep <= w.k) {
#pragma GCC unroll 16
      for (int i = 0; i < kPanelRows; i++) r[i] = _mm512_loadu_si512(from + i * w.ld);
    } else {
      for (int i = 0; i < kPanelRows; i++)
        r[i] = i < have ? _mm512_maskz_loadu_epi16(first_of_32(w.k - c), from + i * w.ld) : __m512i{};
    }
  } else if (w.kind == IP_FP8) {
    int64_t blocks = (w.k + kBlock - 1) / kBlock;
    for (int i = 0; i < kPanelRows; i++) {
      alignas(64) bf16 part[kStep] = {};
      if (i < have) {
        fp8_widen((const uint8_t *)w.data + (row + i) * w.ld + c, min64(kStep, w.k - c), part);
        F scale = splat(w.scale[(row + i) / w.group * blocks + c / kBlock]);
        for (int h = 0; h < 2; h++) store16(part + h * 16, load16(part + h * 16) * scale);
      }
      r[i] = _mm512_load_si512(part);
    }
  } else if (have) {
    int64_t panel = row / kPanelRows;
    const uint8_t *line = (const uint8_t *)w.data + panel * panel_bytes(w) + c / line_columns(w) * 64;
#pragma GCC unroll 8
    for (int q = 0; q < 8; q++) {
      Line v = line_at(line + (w.kind == IP_INT8 ? q : q / 2) * 64);
      r[q] = (__m512i)(w.kind == IP_INT8 ? v : q % 2 ? high_nibbles(v) : low_nibbles(v));
      r[8 + q] = __m512i{};
    }
    transpose16(r);
    alignas(64) float scale[kLanes], less[kLanes];
    F of = scale_of(w, panel, w.group ? c / group_of(w) : 0);
    store(scale, of), store(less, of * (float)-offset_of(w));
    __mmask32 mask = first_of_32(w.k - c);
    for (int i = 0; i < kPanelRows; i++) {
      __m512 by = _mm512_set1_ps(scale[i]), minus = _mm512_set1_ps(less[i]);
      __m256i bytes = _mm512_castsi512_si256(r[i]);
      __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)));
      __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)));
      __m512bh both = _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(b, by, minus), _mm512_fmadd_ps(a, by, minus));
      r[i] = _mm512_maskz_mov_epi16(mask, (__m512i)both);
    }
  } else {
    for (int i = 0; i < kPanelRows; i++) r[i] = __m512i{};
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPanelRows; i++) _mm512_store_si512(to + i * kStep, r[i]);
}

// The lines that `weight_tile` will read, asked for one after the other: sixteen at once would take the places in which
// a core keeps its misses, and what is multiplied meanwhile waits for places too.
struct TileLines {
  const char *at = nullptr;
  int64_t apart = 0, left = 0;
  void one() {
    if (left <= 0) return;
    _mm_prefetch(at, _MM_HINT_T1);
    at += apart, left--;
  }
  void rest() {
    while (left > 0) one();
  }
};

inline TileLines tile_lines(const ip_matrix &w, int64_t row, int64_t c) {
  if (is_bf16(w) || w.kind == IP_FP8) {
    int64_t size = is_bf16(w) ? 2 : 1;
    return {(const char *)w.data + (row * w.ld + c) * size, w.ld * size, min64(kPanelRows, w.n - row)};
  }
  const char *line = (const char *)w.data + row / kPanelRows * panel_bytes(w) + c / line_columns(w) * 64;
  return {line, 64, row < w.n ? kStep / line_columns(w) : 0};
}

// Rows a thread takes at a time.
inline int64_t gemm_chunk(const ip_matrix &w, int64_t n, int threads) {
  int64_t most = round_up((n + threads * 4 - 1) / (threads * 4), 32);
  return max64(32, min64(w.k > 1024 ? 256 : 128, most));
}

// Block b of some rows: 32 rows of the weight and kGemmColumns columns; all rows of a column block come first.
struct Blocks {
  const ip_matrix *w;
  int64_t first, rows, padded;  // of blocks of rows
  int64_t count() const { return rows * ((padded + kGemmColumns - 1) / kGemmColumns); }
  int64_t column(int64_t b) const { return b / rows * kGemmColumns; }
  int64_t tiles(int64_t b) const { return b < count() ? min64(kGemmColumns, padded - column(b)) / kStep * 2 : 0; }
};

// `half(j, h)`, h 0 or 1, is where the sixteen rows of the weight begin that block j of `blocks` is made of. put(j, panel,
// sums) receives its four tiles [16 weight rows, 16 rows of activations]: sums[0], [1]: the first sixteen times panels
// `panel` and `panel + 1`; [2], [3]: the second. A block is laid out while the one
// before it is multiplied, and the memory of the next one is asked for.
template <class Half, class Put>
inline void gemm(Team &team, const ip_matrix &w, const PanelsOf &x, int64_t blocks, Half half, Put put) {
  int64_t chunk = gemm_chunk(w, blocks * 32, team.count) / 32, panels = panel_count(x);
  for (int64_t p0 = 0; p0 < panels; p0 += kGemmRows / kPanelRows) {
    int64_t pairs = (min64(panels, p0 + kGemmRows / kPanelRows) - p0) / 2;
    team.each(blocks, chunk, [&](int64_t first, int64_t last) {
      tiles_begin();
      bf16 *weights = scratch(5)->get<bf16>(2 * 32 * kGemmColumns);
      for (int64_t j0 = first; j0 < last; j0 += chunk) {
        Blocks of = {&w, j0, min64(chunk, last - j0), x.padded};
        float *sums = scratch(7)->get<float>(of.rows * pairs * 1024);
        auto lay = [&](int64_t b, int64_t u) {
          weight_tile(w, half(j0 + b % of.rows, u & 1), of.column(b) + u / 2 * kStep,
                      weights + (b & 1) * 32 * kGemmColumns + u * 512);
        };
        TileLines soon;
        auto ask = [&](int64_t b, int64_t u) {
          soon.rest();
          soon = tile_lines(w, half(j0 + b % of.rows, u & 1), of.column(b) + u / 2 * kStep);
        };
        for (int64_t u = 0; u < of.tiles(0); u++) lay(0, u);
        for (int64_t u = 0; u < of.tiles(1); u++) ask(1, u);
        for (int64_t b = 0; b < of.count(); b++) {
          int64_t laid = 0, asked = 0, c = of.column(b);
          for (int64_t p = 0; p < pairs; p++) {
            float *at = sums + (b % of.rows * pairs + p) * 1024;
            for (int64_t to = of.tiles(b + 1) * (p + 1) / pairs; laid < to; laid++) lay(b + 1, laid);
            for (int64_t to = of.tiles(b + 2) * (p + 1) / pairs; asked < to; asked++) ask(b + 2, asked);
            const bf16 *block = weights + (b & 1) * 32 * kGemmColumns;
            tile_products({block, block + 512, kStep, 1024}, x.at(p0 + 2 * p, c), x.at(p0 + 2 * p + 1, c), of.tiles(b) / 2,
                          c == 0, {at, 512, 256}, [&] { soon.one(); });
            if (c + kGemmColumns >= x.padded) put(j0 + b % of.rows, p0 + 2 * p, at);
          }
        }
      }
      tiles_end();
      _mm_sfence();  // what `put` streamed to memory is seen with the rest
    });
  }
}

// Two rows of 16 sums in bf16, one entry of each after the other. Sums out of tiles are never denormal, which is where the
// processor's own rounding differs from `narrow`.
inline __m512i side_by_side(F a, F b) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                         4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}
inline __m512i interleaved(const float *rows) { return side_by_side(load<F>(rows), load<F>(rows + 16)); }

// One row of sums rounded to bf16, widened again.
inline __m512i rounded(const float *row) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(row))), 16);
}

// Results as rows: y[i, j .. j + 32] of the rows of activations that the panels hold.
inline void put_rows(const ip_matrix &w, const PanelsOf &x, int64_t j, int64_t panel, float *sums, void *y, int64_t ldy,
                     int wide) {
  int64_t n = min64(32, w.n - j);
  if (w.bias)
    for (int64_t r = 0; r < n; r++) {
      F bias = splat(widen1(w.bias[j + r]));
      float *at = sums + r / 16 * 512 + r % 16 * 16;
      store(at, load<F>(at) + bias), store(at + 256, load<F>(at + 256) + bias);
    }
  for (int h = 0; h < 2; h++) {
    int64_t i0 = (panel + h) * kPanelRows, have = min64(kPanelRows, x.m - i0);
    const float *low = sums + h * 256, *high = low + 512;
    __m512i t[16];
    if (wide) {
      for (int part = 0; part < 2; part++) {
        for (int r = 0; r < 16; r++) t[r] = _mm512_load_si512((part ? high : low) + r * 16);
        transpose16(t);
        __mmask16 mask = (__mmask16)(first_of_32(n - part * 16) & 0xffff);
        for (int64_t i = 0; i < have; i++)
          _mm512_mask_storeu_epi32((float *)y + (i0 + i) * ldy + j + part * 16, mask, t[i]);
      }
      continue;
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) t[r] = interleaved((r < 8 ? low : high) + r % 8 * 32);
    transpose16(t);
    for (int64_t i = 0; i < have; i++) {
      bf16 *to = (bf16 *)y + (i0 + i) * ldy + j;
      if (n == 32 && ((uintptr_t)to & 63) == 0)
        _mm512_stream_si512((__m512i *)to, t[i]);
      else
        _mm512_mask_storeu_epi16(to, first_of_32(n), t[i]);
    }
  }
}

inline void gemm_rows(Team &team, const ip_matrix &w, const PanelsOf &x, void *y, int64_t ldy, int wide) {
  gemm(
      team, w, x, (w.n + 31) / 32, [](int64_t j, int h) { return j * 32 + h * 16; },
      [&](int64_t j, int64_t panel, float *sums) { put_rows(w, x, j * 32, panel, sums, y, ldy, wide); });
}

// As `interleaved`, for any values.
inline __m512i narrowed(const float *rows) {
  __m512i even = _mm512_cvtepu16_epi32((__m256i)narrow(load<F>(rows)));
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow(load<F>(rows + 16))), 16));
}

// silu(gate) * up, both rounded to bf16 first, as the panels of the product with `down`.
inline void gated_panels(Team &team, const ip_matrix &w, const PanelsOf &x, const PanelsOf &to) {
  int64_t inner = w.n / 2;
  gemm(
      team, w, x, inner / 16, [&](int64_t j, int h) { return h * inner + j * 16; },
      [&](int64_t j, int64_t panel, float *sums) {
        for (int h = 0; h < 2; h++) {
          uint32_t *at = to.at(panel + h, j * 16);
          for (int r = 0; r < 16; r++) {
            float *gate = sums + h * 256 + r * 16;
            F a = (F)_mm512_castsi512_ps(rounded(gate)), b = (F)_mm512_castsi512_ps(rounded(gate + 512));
            store(gate, silu(a) * b);
          }
          for (int r = 0; r < 8; r++) _mm512_store_si512(at + r * 16, narrowed(sums + h * 256 + r * 32));
          if (inner % kStep && j * 16 + 16 == inner) memset(at + 128, 0, 128 * sizeof(uint32_t));
        }
      });
}

}  // namespace
