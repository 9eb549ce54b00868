// Tiles of float32 sums and weights laid out for them: what products and attention of many tokens are made of if the
// processor does not multiply pairs of bf16 (AVX2). gemm_float32.h and prefill_float32.h call it.
//
// Rows of activations are widened once and read entry by entry; sixteen rows of a weight stand side by side, [columns,
// 16], as they do in a panel of 8 or 4 bits. A result is summed over its columns one after the other.
#pragma once
#include "products/linear.h"

namespace {

// Times two registers of sums: with one register for each factor they fill AVX2's sixteen.
constexpr int kFloatTileRows = 6;

// For R rows r and 16 columns j: c[r * ldc + j] = the sum over i < k of a[r * lda + i] b[i * 16 + j] if `begin`; else
// the sum is added to c. b [k, 16] is 32-byte aligned.
template <int R>
inline void multiply_float_tile(const float *a, int64_t lda, const float *b, int64_t k, bool begin, float *c,
                                int64_t ldc) {
  __m256 low[R], high[R];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    low[r] = begin ? __m256{} : _mm256_loadu_ps(c + r * ldc);
    high[r] = begin ? __m256{} : _mm256_loadu_ps(c + r * ldc + 8);
  }
  for (int64_t i = 0; i < k; i++, b += kPanelRows) {
    __m256 left = _mm256_load_ps(b), right = _mm256_load_ps(b + 8);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      __m256 entry = _mm256_broadcast_ss(a + r * lda + i);
      low[r] = _mm256_fmadd_ps(entry, left, low[r]);
      high[r] = _mm256_fmadd_ps(entry, right, high[r]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) _mm256_storeu_ps(c + r * ldc, low[r]), _mm256_storeu_ps(c + r * ldc + 8, high[r]);
}

// `multiply_float_tile` for any number of rows of a and c: R at a time, then the rest in one smaller tile.
template <int R = kFloatTileRows>
inline void multiply_float_tiles(const float *a, int64_t lda, int64_t rows, const float *b, int64_t k, bool begin,
                                 float *c, int64_t ldc) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc) multiply_float_tile<R>(a, lda, b, k, begin, c, ldc);
  if constexpr (R > 1)
    if (rows) multiply_float_tiles<R - 1>(a, lda, rows, b, k, begin, c, ldc);
}

// to[e * 16 + i] = rows[i][c + e] in float32, for e and i from 0 to 7: eight entries, from column c on, of eight bf16
// rows. `to` is 32-byte aligned.
inline void transpose_8x8(const bf16 *const *rows, int64_t c, float *to) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    r[i] = _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(rows[i] + c))), 16));
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm256_store_ps(to + i * kPanelRows, _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
    _mm256_store_ps(to + (4 + i) * kPanelRows, _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
  }
}

// to[c * 16 + i] = rows[i][c] in float32 for i < have (at most 16) rows of `width` bf16 entries: `to` is [width rounded
// up to a multiple of 8, 16]. Zeros are written for i >= have and, in the last group of 8, for c >= width.
inline void transpose_rows(const bf16 *const rows[kPanelRows], int64_t have, int64_t width, float *to) {
  static const bf16 none[kPanelRows] = {};
  for (int64_t c = 0; c < width; c += 8, to += 8 * kPanelRows) {
    bf16 part[kPanelRows][8];
    const bf16 *at[kPanelRows];
    for (int64_t r = 0; r < kPanelRows; r++) {
      at[r] = r < have ? rows[r] + c : none;
      if (r >= have || c + 8 <= width) continue;
      memset(part[r], 0, sizeof part[r]);
      memcpy(part[r], at[r], (size_t)(width - c) * sizeof(bf16));
      at[r] = part[r];
    }
    transpose_8x8(at, 0, to), transpose_8x8(at + 8, 0, to + 8);
  }
}

// The unsigned entries of MXFP4 that the bytes of `nibbles` stand for.
inline I32x16 look_up_mxfp4(I32x16 nibbles) {
  __m256i half[2], entries = _mm256_broadcastsi128_si256(mxfp4_entries());
  memcpy(half, &nibbles, 64);
  for (__m256i &h : half) h = _mm256_shuffle_epi8(entries, h);
  return load<I32x16>(half);
}

// to[i * 16 + r] = entry (row + r, c + i) of w in float32 with its scale, for the 16 rows of the panel that begins at
// `row` and i < width. w is in panels, KIND its kind: int8 (4 columns per line), int4 or MXFP4 (8), or int6 (16 in three
// lines). c is a multiple of these columns. `to` is written in whole lines, so up to `width` rounded up to such a
// multiple.
template <int KIND>
inline void dequantize_lines(const ip_matrix &w, int64_t row, int64_t c, int64_t width, float *to) {
  constexpr int COLUMNS = KIND == IP_INT8 ? 4 : KIND == IP_INT6 ? kSixBitColumns : 8;
  constexpr int LINES = KIND == IP_INT6 ? kSixBitLines : 1;
  int64_t panel = row / kPanelRows, group = group_size(w);
  const uint8_t *line = (const uint8_t *)w.data + panel * panel_bytes(w) + c / COLUMNS * LINES * 64;
  const int32_t offset = (int32_t)entry_offset(w);
  for (int64_t i = 0; i < width;) {
    F32x16 scale = panel_scale(w, panel, (c + i) / group), minimum = panel_minimum(w, panel, (c + i) / group);
    int64_t end = min64(width, ((c + i) / group + 1) * group - c);
    for (; i < end; i += COLUMNS, line += 64 * LINES, to += COLUMNS * kPanelRows) {
      I32x16 quads = load<I32x16>(line), fours = quads;
      if (KIND == IP_INT6) {
#pragma GCC unroll 4
        for (int q = 0; q < 4; q++) {
          Line entries = six_bit_entries<false>(line, q);
          memcpy(&quads, &entries, 64);
#pragma GCC unroll 4
          for (int e = 0; e < 4; e++)
            store(to + (4 * q + e) * kPanelRows,
                  __builtin_convertvector((quads >> 8 * e & 255) - offset, F32x16) * scale + minimum);
        }
        continue;
      }
      if (KIND == IP_MXFP4) quads = look_up_mxfp4(quads & 0x0f0f0f0f), fours = look_up_mxfp4(fours >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 8
      for (int e = 0; e < COLUMNS; e++) {
        I32x16 entry = KIND == IP_INT8    ? quads >> 8 * e & 255
                       : KIND == IP_MXFP4 ? (e < 4 ? quads : fours) >> 8 * (e & 3) & 255
                                          : quads >> (8 * (e & 3) + e / 4 * 4) & 15;
        store(to + e * kPanelRows, __builtin_convertvector(entry - offset, F32x16) * scale + minimum);
      }
    }
  }
}

// to[i * 16 + r] = entry (row + r, c + i) of a weight of any kind in float32, with its scale, for r < 16 and i < width;
// `row` is a multiple of 16, c one of 128, and c + width is at most k. Rows from w.n on are zeros. `to` has space for
// `width` rounded up to a multiple of 16 columns.
inline void load_weight_panel(const ip_matrix &w, int64_t row, int64_t c, int64_t width, float *to) {
  int64_t have = max64(0, min64(kPanelRows, w.n - row));
  if (!have) {
    memset(to, 0, (size_t)(width * kPanelRows) * sizeof(float));
  } else if (is_bf16(w)) {
    const bf16 *rows[kPanelRows];
    for (int64_t r = 0; r < have; r++) rows[r] = (const bf16 *)w.data + (row + r) * w.ld + c;
    transpose_rows(rows, have, width, to);
  } else if (w.kind == IP_FP8) {
    alignas(64) bf16 wide[kPanelRows * kFp8Block];
    const bf16 *rows[kPanelRows];
    for (int64_t r = 0; r < have; r++) rows[r] = wide + r * kFp8Block;
    for (int64_t b = 0; b < width; b += kFp8Block) {
      int64_t part = min64(kFp8Block, width - b);
      for (int64_t r = 0; r < have; r++)
        fp8_row_to_bf16((const uint8_t *)w.data + (row + r) * w.ld + c + b, part, wide + r * kFp8Block);
      float *at = to + b * kPanelRows;
      transpose_rows(rows, have, part, at);
      F32x16 scale = load_fp8_scales(w, row, have, (c + b) / kFp8Block);
      for (int64_t i = 0; i < part; i++) store(at + i * kPanelRows, load<F32x16>(at + i * kPanelRows) * scale);
    }
  } else {
    (w.kind == IP_INT8   ? dequantize_lines<IP_INT8>
     : w.kind == IP_INT6 ? dequantize_lines<IP_INT6>
     : w.kind == IP_INT4 ? dequantize_lines<IP_INT4>
                         : dequantize_lines<IP_MXFP4>)(w, row, c, width, to);
  }
}

}  // namespace
