// `dot` of bf16_dot.h on AMX tiles. Sixteen rows of the weight are one tile as they lie in memory; the activations are
// the other factor, with pairs of columns interleaved, so that only the few activations must be rearranged.
//
// Tile registers: 0 .. 3 sums [16 weight rows, activation rows], 4 and 5 weights, 6 activations.
#pragma once
#include "runtime/thread_team.h"

namespace {

// The operand of the instruction that configures the tile registers: rows and bytes per row of each.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t colsb[16] = {};
  uint8_t rows[16] = {};
};

// Lays out x [m, padded] (padded even) as second factors of tile products: for every 16 rows of x a block [padded / 2,
// rows of the block], where each number is two neighbouring columns of one row; the last block has the rows that are
// left. Blocks follow each other in `pairs` without gaps, m * padded / 2 numbers in all.
inline void amx_interleave_pairs(const bf16 *x, int64_t m, int64_t padded, uint32_t *pairs) {
  for (int64_t i = 0; i < m; i += 16) {
    int64_t cols = min64(16, m - i);
    for (int64_t j = 0; j < cols; j++) {
      const char *row = (const char *)(x + (i + j) * padded);
      for (int64_t c = 0; c < padded / 2; c++) memcpy(&pairs[c * cols + j], row + c * 4, 4);
    }
    pairs += padded / 2 * cols;
  }
}

// Configures this thread's tile registers: 0 .. 3 sums [16, cols] float32, 4, 5 and 7 weights [16, 32] bf16, 6
// activations [16 pairs of columns, cols], for `cols` rows of activations, at most 16. With 16, all registers are 16
// rows of 64 bytes.
inline void amx_configure(int cols) {
  TileConfig t;
  for (int i = 0; i < 8; i++) t.rows[i] = 16, t.colsb[i] = 64;
  for (int i = 0; i < 4; i++) t.colsb[i] = (uint16_t)(cols * 4);
  t.colsb[6] = (uint16_t)(cols * 4);
  // GCC 12 believes that this reads the first 8 bytes only, and then drops the stores after them.
  __asm__ volatile("" ::"r"(&t) : "memory");
  _tile_loadconfig(&t);
}

// out[i * ldo + j] = sum over the columns c < width of w[j, c] x[i, c], overwritten, for NT * 16 rows j of w, which are
// ldw entries apart, and `cols` rows i of activations, at most 16. `pairs` points into their block of
// `amx_interleave_pairs`, to the columns that meet column 0 of w. NT is 1 .. 4; `amx_configure(cols)` was called.
template <int NT>
inline void amx_multiply_tiles(const bf16 *w, int64_t ldw, int64_t width, const uint32_t *pairs, int cols, float *out,
                      int64_t ldo) {
  // GCC's tile loads do not declare that they read memory; this keeps the stores before them.
  auto compiler_barrier = [] { __asm__ volatile("" ::: "memory"); };
  compiler_barrier();
  _tile_zero(0);
  if (NT > 1) {
    _tile_zero(1);
  }
  if (NT > 2) {
    _tile_zero(2);
  }
  if (NT > 3) {
    _tile_zero(3);
  }
  auto step = [&](const bf16 *at, int64_t stride, const uint32_t *p) __attribute__((always_inline)) {
    size_t row = (size_t)stride * sizeof(bf16);
    _tile_loadd(6, p, cols * 4);
    _tile_loadd(4, at, row);
    _tile_dpbf16ps(0, 4, 6);
    if (NT > 1) {
      _tile_loadd(5, at + 16 * stride, row);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (NT > 2) {
      _tile_loadd(4, at + 32 * stride, row);
      _tile_dpbf16ps(2, 4, 6);
    }
    if (NT > 3) {
      _tile_loadd(5, at + 48 * stride, row);
      _tile_dpbf16ps(3, 5, 6);
    }
  };
  int64_t c = 0;
  for (; c + 32 <= width; c += 32) step(w + c, ldw, pairs + c / 2 * cols);
  if (c < width) {
    alignas(64) bf16 tail[NT * 16 * 32] = {};
    for (int r = 0; r < NT * 16; r++) memcpy(tail + r * 32, w + r * ldw + c, (size_t)(width - c) * sizeof(bf16));
    compiler_barrier();
    step(tail, 32, pairs + c / 2 * cols);
  }
  alignas(64) float sums[16 * 16];
  auto store_tile = [&](int64_t first) {
    for (int i = 0; i < cols; i++)
      for (int r = 0; r < 16; r++) out[i * ldo + first + r] = sums[r * cols + i];
  };
  _tile_stored(0, sums, cols * 4);
  store_tile(0);
  if (NT > 1) {
    _tile_stored(1, sums, cols * 4);
    store_tile(16);
  }
  if (NT > 2) {
    _tile_stored(2, sums, cols * 4);
    store_tile(32);
  }
  if (NT > 3) {
    _tile_stored(3, sums, cols * 4);
    store_tile(48);
  }
}

// out[i * ldo + j] = sum over the columns c < width of w[j, c] x[i, first + c], overwritten, for all m rows i of x and
// the first n / 16 * 16 rows j of w, which are ldw entries apart. Returns that number of rows; the caller computes the
// others. `pairs` is `amx_interleave_pairs` of x [m, padded]; `first` is even.
inline int64_t amx_dot(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const uint32_t *pairs, int64_t m,
                       int64_t padded, int64_t first, float *out, int64_t ldo) {
  int64_t done = n / 16 * 16;
  if (!done) return 0;
  for (int64_t i = 0; i < m; i += 16) {
    int cols = (int)min64(16, m - i);
    amx_configure(cols);
    const uint32_t *p = pairs + i * padded / 2 + first / 2 * cols;
    float *o = out + i * ldo;
    int64_t j = 0;
    for (; j + 64 <= done; j += 64) amx_multiply_tiles<4>(w + j * ldw, ldw, width, p, cols, o + j, ldo);
    for (; j + 16 <= done; j += 16) amx_multiply_tiles<1>(w + j * ldw, ldw, width, p, cols, o + j, ldo);
  }
  _tile_release();  // torch's kernels use tiles too, with shapes of their own
  return done;
}

}  // namespace
