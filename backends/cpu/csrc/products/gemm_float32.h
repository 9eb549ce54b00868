// Products with many rows in float32 (floats.h), for weights of every kind.
//
// The activations are widened once. A thread takes some rows of the weight and goes through its columns in blocks, which it
// turns or expands into the second-level cache; a few rows of activations at a time pass by all of them.
#pragma once
#include "floats.h"

namespace {

constexpr int64_t kGemmRows = 512;     // rows of activations that pass by a block of weights
constexpr int64_t kGemmColumns = 256;  // columns of a block
constexpr int64_t kGemmBlocks = 2;     // blocks of twice sixteen rows that a thread takes at a time
constexpr int64_t kNearRows = 48;      // rows of activations that stay near while a thread's weights pass by

// Activations in float32, rows `padded` entries apart: an odd number of lines, so that rows side by side, which are read
// together, do not take the same places in a cache.
struct PanelsOf {
  float *rows;
  int64_t m, padded;
  float *at(int64_t row, int64_t column) const { return rows + row * padded + column; }
};

inline PanelsOf panels_in(Scratch *s, int64_t m, int64_t k) {
  int64_t padded = round_up(k, kLanes) | kLanes;
  return {s->get<float>(m * padded), m, padded};
}

inline int64_t panel_count(const PanelsOf &x) { return (x.m + kPanelRows - 1) / kPanelRows; }

// Sixteen rows of activations; `row(i)` points to the k entries of row i.
template <class RowAt>
inline void fill_panel(const PanelsOf &x, int64_t panel, int64_t k, RowAt row) {
  for (int64_t i = panel * kPanelRows; i < min64(x.m, (panel + 1) * kPanelRows); i++) {
    const bf16 *from = row(i);
    for (int64_t c = 0; c < k; c += kLanes) store(x.at(i, c), load16(from + c, k - c));
  }
}

template <class RowAt>
inline void fill_panels(Team &team, const PanelsOf &x, int64_t k, RowAt row) {
  team.each(panel_count(x), 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) fill_panel(x, p, k, row);
  });
}

// `half(j, h)`, h 0 or 1, is where the sixteen rows of the weight begin that block j of `blocks` is made of. put(j, i, n,
// first, second) receives the sums of both with n rows of activations from i on, each [n, 16].
template <class Half, class Put>
inline void gemm(Team &team, const ip_matrix &w, const PanelsOf &x, int64_t blocks, Half half, Put put) {
  int64_t chunk = max64(1, min64(kGemmBlocks, blocks / (4 * team.count)));
  for (int64_t r0 = 0; r0 < x.m; r0 += kGemmRows) {
    int64_t rows = min64(kGemmRows, x.m - r0);
    team.each(blocks, chunk, [&](int64_t first, int64_t last) {
      float *weights = scratch(5)->get<float>(2 * chunk * kGemmColumns * kPanelRows);
      float *sums = scratch(7)->get<float>(2 * chunk * rows * kPanelRows);
      auto weights_of = [&](int64_t u) { return weights + u * kGemmColumns * kPanelRows; };
      auto sums_of = [&](int64_t u, int64_t i) { return sums + (u * rows + i) * kPanelRows; };
      for (int64_t j0 = first; j0 < last; j0 += chunk) {
        int64_t n = min64(chunk, last - j0);
        for (int64_t c = 0; c < w.k; c += kGemmColumns) {
          int64_t width = min64(kGemmColumns, w.k - c);
          for (int64_t u = 0; u < 2 * n; u++) weight_floats(w, half(j0 + u / 2, u & 1), c, width, weights_of(u));
          for (int64_t i = 0; i < rows; i += kNearRows) {
            int64_t near = min64(kNearRows, rows - i);
            for (int64_t u = 0; u < 2 * n; u++)
              tiles_floats(x.at(r0 + i, c), x.padded, near, weights_of(u), width, c == 0, sums_of(u, i), kPanelRows);
            if (c + width < w.k) continue;
            for (int64_t b = 0; b < n; b++) put(j0 + b, r0 + i, near, sums_of(2 * b, i), sums_of(2 * b + 1, i));
          }
        }
      }
    });
  }
}

// y = x w^T + bias, in rows.
inline void gemm_rows(Team &team, const ip_matrix &w, const PanelsOf &x, void *y, int64_t ldy, int wide) {
  gemm(
      team, w, x, (w.n + 31) / 32, [](int64_t j, int h) { return j * 32 + h * kPanelRows; },
      [&](int64_t j, int64_t i, int64_t n, const float *first, const float *second) {
        for (int h = 0; h < 2; h++) {
          int64_t column = j * 32 + h * kPanelRows, have = min64(kPanelRows, w.n - column);
          if (have <= 0) continue;
          F bias = w.bias ? load16(w.bias + column, have) : F{};
          const float *sums = h ? second : first;
          for (int64_t r = 0; r < n; r++) {
            F v = load<F>(sums + r * kPanelRows);
            if (w.bias) v = v + bias;
            if (wide)
              store_f((float *)y + (i + r) * ldy + column, v, have);
            else
              store16((bf16 *)y + (i + r) * ldy + column, v, have);
          }
        }
      });
}

// silu(gate) * up, both rounded to bf16 first, as the activations of the product with `down`.
inline void gated_panels(Team &team, const ip_matrix &w, const PanelsOf &x, const PanelsOf &to) {
  int64_t inner = w.n / 2;
  gemm(
      team, w, x, inner / kPanelRows, [&](int64_t j, int h) { return h * inner + j * kPanelRows; },
      [&](int64_t j, int64_t i, int64_t n, const float *gates, const float *ups) {
        for (int64_t r = 0; r < n; r++) {
          for (int64_t c = 0; c < kPanelRows; c += kWide) {
            V gate = rounded(load<V>(gates + r * kPanelRows + c)), up = rounded(load<V>(ups + r * kPanelRows + c));
            store(to.at(i + r, j * kPanelRows + c), rounded(silu(gate) * up));
          }
        }
      });
}

}  // namespace
