// Products of FP8 (e4m3) weights with scales per block of rows and 128 columns: expanded to bf16, exactly, a tile at a
// time in the first-level cache. linear.h calls `fp8_dot` for few rows; the gemm headers use the conversions.
#pragma once
#include "products/bf16_dot.h"

namespace {

// Columns that share a scale.
constexpr int64_t kFp8Block = 128;

// One e4m3 number as bf16. With exponent 0 its value is 0, 1/512 .. 7/512; others are shifted into place and get
// another bias.
inline bf16 fp8_to_bf16(uint8_t b) {
  static const bf16 small[8] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  bf16 sign = (bf16)((b & 0x80) << 8);
  if ((b & 0x7f) == 0x7f) return sign | 0x7fc0;
  return sign | ((b & 0x78) ? (bf16)(((b & 0x7f) << 4) + 0x3c00) : small[b & 7]);
}

// bf16 of all 256 e4m3 numbers.
struct Fp8Table {
  bf16 scales[256];
  Fp8Table() {
    for (int i = 0; i < 256; i++) scales[i] = fp8_to_bf16((uint8_t)i);
  }
};

// out[c] = from[c] in bf16, exactly and without the scale, for n e4m3 numbers.
inline void fp8_row_to_bf16(const uint8_t *from, int64_t n, bf16 *out) {
  int64_t c = 0;
#if defined(__AVX512BW__)
  const __m512i small = _mm512_set_epi16(
      0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0, 0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00,
      0, 0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0, 0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80,
      0x3b00, 0);
  for (; c + 32 <= n; c += 32) {
    __m512i b = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(from + c)));
    __m512i size = _mm512_and_si512(b, _mm512_set1_epi16(0x7f));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(0x3c00));
    __mmask32 tiny = _mm512_testn_epi16_mask(b, _mm512_set1_epi16(0x78));
    v = _mm512_mask_permutexvar_epi16(v, tiny, size, small);
    v = _mm512_mask_mov_epi16(v, _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f)), _mm512_set1_epi16(0x7fc0));
    v = _mm512_or_si512(v, _mm512_slli_epi16(_mm512_and_si512(b, _mm512_set1_epi16(0x80)), 8));
    _mm512_storeu_si512(out + c, v);
  }
#endif
  static const Fp8Table table;
  for (; c < n; c++) out[c] = table.scales[from[c]];
}

// Lane r is the scale of row `row` + r in one block of 128 columns, for r < rows; the other lanes hold the scale of row
// `row` + rows - 1.
inline F32x16 load_fp8_scales(const ip_matrix &w, int64_t row, int64_t rows, int64_t block) {
  int64_t blocks = (w.k + kFp8Block - 1) / kFp8Block;
  float scales[kLanes];
  for (int64_t r = 0; r < kLanes; r++) scales[r] = w.scale[(row + min64(r, rows - 1)) / w.group * blocks + block];
  return load<F32x16>(scales);
}

// out[i * ldo + j] = sum over all columns of w[row + j, .] x[i, .] in float32 with scales applied, overwritten, for n
// rows of the FP8 weight from `row` on and all rows of x. Computed by the calling thread; `buffers` are two of its
// workspaces.
inline void fp8_dot(const ip_matrix &w, int64_t row, int64_t n, const ActivationRows &x, float *out, int64_t ldo,
                    Workspace *buffers) {
  bf16 *tile = buffers[0].reserve<bf16>(16 * kFp8Block);
  float *part = buffers[1].reserve<float>(16 * x.m);
  int64_t blocks = (w.k + kFp8Block - 1) / kFp8Block;
  const uint8_t *data = (const uint8_t *)w.data;
  memset(tile, 0, 16 * kFp8Block * sizeof(bf16));
  for (int64_t j = 0; j < n; j += 16) {
    int64_t rows = min64(16, n - j);
    for (int64_t b = 0; b < blocks; b++) {
      int64_t width = min64(kFp8Block, w.k - b * kFp8Block);
      for (int64_t r = 0; r < rows; r++)
        fp8_row_to_bf16(data + (row + j + r) * w.ld + b * kFp8Block, width, tile + r * kFp8Block);
      dot(tile, kFp8Block, 16, width, x, b * kFp8Block, part, 16);
      F32x16 scale = load_fp8_scales(w, row + j, rows, b);
      for (int64_t i = 0; i < x.m; i++) {
        float *to = out + i * ldo + j;
        F32x16 sums = load<F32x16>(part + i * 16);
        store_f32x16(to, b ? fma(sums, scale, load_f32x16(to, rows)) : sums * scale, rows);
      }
    }
  }
}

}  // namespace
