// Products with many rows in float32 (float32_tiles.h), for weights of every kind; reached through attention/prefill.h.
//
// The activations are widened once. A thread takes some rows of the weight and goes through its columns in blocks,
// which it transposes or expands into the second-level cache; a few rows of activations at a time pass by all of them.
#pragma once
#include "products/float32_tiles.h"

namespace {

constexpr int64_t kGemmRows = 512;  // rows of activations that pass by a block of weights
constexpr int64_t kGemmColumns = 256;  // columns of a block
constexpr int64_t kGemmBlocks = 2;  // blocks of two times sixteen weight rows that a thread takes at a time
constexpr int64_t kCachedRows = 48;  // rows of activations that stay in the cache while a thread's weights pass by

// Activations in float32, rows `padded` entries apart: an odd number of cache lines, so that neighbouring rows, which
// are read together, do not compete for the same sets of a cache.
struct ActivationPanels {
  float *rows;
  int64_t m, padded;
  float *at(int64_t row, int64_t column) const { return rows + row * padded + column; }
};

// Reserves space for m rows of k columns in `s`; it is not cleared. The leading thread calls it; the team shares it.
inline ActivationPanels reserve_panels(Workspace *s, int64_t m, int64_t k) {
  int64_t padded = round_up(k, kLanes) | kLanes;
  return {s->reserve<float>(m * padded), m, padded};
}

// Groups of sixteen rows of x, the last one perhaps incomplete.
inline int64_t num_panels(const ActivationPanels &x) { return (x.m + kPanelRows - 1) / kPanelRows; }

// Writes rows 16 * panel .. 16 * panel + 16 of x, as far as x has them, in float32; row(i) points to the k bf16 entries
// of row i. Zeros follow up to a multiple of 16 columns.
template <class RowAt>
inline void fill_panel(const ActivationPanels &x, int64_t panel, int64_t k, RowAt row) {
  for (int64_t i = panel * kPanelRows; i < min64(x.m, (panel + 1) * kPanelRows); i++) {
    const bf16 *from = row(i);
    for (int64_t c = 0; c < k; c += kLanes) store(x.at(i, c), load_f32x16(from + c, k - c));
  }
}

// Fills all panels of x with `fill_panel`. Every thread of the team calls it; complete after the next `barrier`.
template <class RowAt>
inline void fill_panels(Team &team, const ActivationPanels &x, int64_t k, RowAt row) {
  team.for_each_chunk(num_panels(x), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) fill_panel(x, p, k, row);
  });
}

// Multiplies all rows of x with `blocks` blocks of 32 weight rows. Every thread of the team calls it; x is complete.
// first_weight_row(j, h), h 0 or 1, is the weight row where the first or second group of sixteen rows of block j
// begins. The thread that computed them calls store_sums(j, i, n, first, second) once for each block and part of the
// rows: the sums over all columns of both groups with rows i .. i + n of x, each [n, 16] in float32 without bias.
template <class FirstRow, class Store>
inline void gemm(Team &team, const ip_matrix &w, const ActivationPanels &x, int64_t blocks, FirstRow first_weight_row,
                 Store store_sums) {
  int64_t chunk = max64(1, min64(kGemmBlocks, blocks / (4 * team.count)));
  for (int64_t r0 = 0; r0 < x.m; r0 += kGemmRows) {
    int64_t rows = min64(kGemmRows, x.m - r0);
    team.for_each_chunk(blocks, chunk, [&](int64_t first, int64_t last) {
      float *weights = workspace(kWeightTile)->reserve<float>(2 * chunk * kGemmColumns * kPanelRows);
      float *sums = workspace(kProductSums)->reserve<float>(2 * chunk * rows * kPanelRows);
      auto weights_of = [&](int64_t u) { return weights + u * kGemmColumns * kPanelRows; };
      auto sums_of = [&](int64_t u, int64_t i) { return sums + (u * rows + i) * kPanelRows; };
      for (int64_t j0 = first; j0 < last; j0 += chunk) {
        int64_t n = min64(chunk, last - j0);
        for (int64_t c = 0; c < w.k; c += kGemmColumns) {
          int64_t width = min64(kGemmColumns, w.k - c);
          for (int64_t u = 0; u < 2 * n; u++)
            load_weight_panel(w, first_weight_row(j0 + u / 2, u & 1), c, width, weights_of(u));
          for (int64_t i = 0; i < rows; i += kCachedRows) {
            int64_t cached = min64(kCachedRows, rows - i);
            for (int64_t u = 0; u < 2 * n; u++)
              multiply_float_tiles(x.at(r0 + i, c), x.padded, cached, weights_of(u), width, c == 0, sums_of(u, i),
                                   kPanelRows);
            if (c + width < w.k) continue;
            for (int64_t b = 0; b < n; b++)
              store_sums(j0 + b, r0 + i, cached, sums_of(2 * b, i), sums_of(2 * b + 1, i));
          }
        }
      }
    });
  }
}

// y[i * ldy + j] = x w^T + bias, overwritten, for all rows i of x and all rows j of w; `wide`: y is float32, else bf16.
// Every thread of the team calls it after `fill_panels` and a barrier; y is complete after the next `barrier`.
inline void gemm_to_rows(Team &team, const ip_matrix &w, const ActivationPanels &x, void *y, int64_t ldy, int wide) {
  gemm(
      team, w, x, (w.n + 31) / 32, [](int64_t j, int h) { return j * 32 + h * kPanelRows; },
      [&](int64_t j, int64_t i, int64_t n, const float *first, const float *second) {
        for (int h = 0; h < 2; h++) {
          int64_t column = j * 32 + h * kPanelRows, have = min64(kPanelRows, w.n - column);
          if (have <= 0) continue;
          F32x16 bias = w.bias ? load_f32x16(w.bias + column, have) : F32x16{};
          const float *sums = h ? second : first;
          for (int64_t r = 0; r < n; r++) {
            F32x16 v = load<F32x16>(sums + r * kPanelRows);
            if (w.bias) v = v + bias;
            if (wide)
              store_f32x16((float *)y + (i + r) * ldy + column, v, have);
            else
              store_bf16x16((bf16 *)y + (i + r) * ldy + column, v, have);
          }
        }
      });
}

// to = f(x gate^T) * (x up^T) [m, w.n / 2], as activations for the product with `down`; rows of w are gate, then up,
// each a multiple of 16. f is one of ip_activation. Both products are rounded to bf16 first, and so is the result.
// Every thread of the team calls it; `to` is complete after the next `barrier`.
inline void gemm_activation_mul(Team &team, const ip_matrix &w, const ActivationPanels &x, int32_t f,
                                const ActivationPanels &to) {
  int64_t inner = w.n / 2;
  gemm(
      team, w, x, inner / kPanelRows, [&](int64_t j, int h) { return h * inner + j * kPanelRows; },
      [&](int64_t j, int64_t i, int64_t n, const float *gates, const float *ups) {
        for (int64_t r = 0; r < n; r++) {
          for (int64_t c = 0; c < kPanelRows; c += kRegisterLanes) {
            Floats gate = round_to_bf16(load<Floats>(gates + r * kPanelRows + c)),
                   up = round_to_bf16(load<Floats>(ups + r * kPanelRows + c));
            store(to.at(i + r, j * kPanelRows + c), round_to_bf16(activate(gate, f) * up));
          }
        }
      });
}

}  // namespace
