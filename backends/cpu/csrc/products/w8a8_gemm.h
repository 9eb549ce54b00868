// W8A8 products with many rows on all threads of the team: results as rows, or with silu-mul applied. isa_entries.h
// calls `w8a8_linear`, prefill_layer_w8a8.h the others. Activations are quantized first (`quantize_rows`), with a
// barrier in between.
#pragma once
#include "products/linear.h"

namespace {

constexpr int64_t kMaxRowsPassed = 512;  // rows of activations that pass by a thread's weights at a time

// `multiply_panel_pairs` for all pairs of panels 0 .. pairs and all rows of x, divided between the threads; store_sums
// is called on the thread that computed the sums. Every thread of the team calls it; all is stored after the next
// `barrier`.
template <class Pair, class Store>
inline void w8a8_gemm(Team &team, const ip_matrix &w, const Int8Activations &x, int64_t pairs, Pair panel_of,
                      Store store_sums) {
  int64_t chunk = max64(1, min64(4, pairs / (4 * team.count)));
  for (int64_t i = 0; i < x.m; i += kMaxRowsPassed)
    team.for_each_chunk(pairs, chunk, [&](int64_t first, int64_t last) {
      multiply_panel_pairs(w, x, i, min64(kMaxRowsPassed, x.m - i), first, last, panel_of, store_sums);
    });
}

// y[i * ldy + j] = x w^T + bias, overwritten, for all rows i of the quantized x and all rows j of w; `wide`: y is
// float32, else bf16. Every thread of the team calls it; y is complete after the next `barrier`.
inline void w8a8_gemm_to_rows(Team &team, const ip_matrix &w, const Int8Activations &x, void *y, int64_t ldy,
                              int wide) {
  int64_t panels = (w.n + kPanelRows - 1) / kPanelRows;
  auto panel_of = [&](int64_t j, int h) { return 2 * j + h < panels ? 2 * j + h : -1; };
  w8a8_gemm(team, w, x, (panels + 1) / 2, panel_of, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
    for (int h = 0; h < 2 && 2 * j + h < panels; h++) {
      int64_t column = (2 * j + h) * kPanelRows, have = min64(kPanelRows, w.n - column);
      F32x16 bias = w.bias ? load_f32x16(w.bias + column, have) : F32x16{};
      for (int64_t r = 0; r < n; r++) {
        F32x16 v = scale_sums(w, 2 * j + h, x, i + r, sums + h * 512 + r * 16);
        if (w.bias) v = v + bias;
        if (wide)
          store_f32x16((float *)y + (i + r) * ldy + column, v, have);
        else
          store_bf16x16((bf16 *)y + (i + r) * ldy + column, v, have);
      }
    }
  });
}

// out [x.m, w.n / 2], dense, = f(x gate^T) * (x up^T), both rounded to bf16 first, f one of ip_activation; rows of w
// are gate, then up, each a multiple of 16. Every thread of the team calls it; `out` is complete after the next
// `barrier`.
inline void w8a8_gemm_activation_mul(Team &team, const ip_matrix &w, const Int8Activations &x, int32_t f, bf16 *out) {
  int64_t inner = w.n / 2, half_panels = inner / kPanelRows;
  auto panel_of = [&](int64_t j, int h) { return h * half_panels + j; };
  w8a8_gemm(team, w, x, half_panels, panel_of, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
    for (int64_t r = 0; r < n; r++) {
      float gate[kPanelRows], up[kPanelRows];
      store(gate, scale_sums(w, j, x, i + r, sums + r * 16));
      store(up, scale_sums(w, half_panels + j, x, i + r, sums + 512 + r * 16));
      for (int64_t c = 0; c < kPanelRows; c += kRegisterLanes)
        store_floats(out + (i + r) * inner + j * kPanelRows + c,
                     activate(round_to_bf16(load<Floats>(gate + c)), f) * round_to_bf16(load<Floats>(up + c)));
    }
  });
}

// Quantizes all x.m rows into x, where row(i) points to the k bf16 entries of row i. Every thread of the team calls it;
// complete after the next `barrier`.
template <class RowAt>
inline void quantize_rows(Team &team, const Int8Activations &x, int64_t k, RowAt row) {
  team.for_each_chunk(x.m, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) quantize_row(x, i, row(i), k);
  });
}

// y[i * ldy + j] = x w^T + bias for the b.m rows of x, which are ldx entries apart: quantizes them into `b`, waits at a
// barrier, and multiplies. `wide`: y is float32, else bf16. Every thread of the team calls it; y is complete after the
// next `barrier`.
inline void w8a8_linear(Team &team, const ip_matrix &w, const Int8Activations &b, const bf16 *x, int64_t ldx, void *y,
                        int64_t ldy, int wide) {
  quantize_rows(team, b, w.k, [&](int64_t i) { return x + i * ldx; });
  team.barrier();
  w8a8_gemm_to_rows(team, w, b, y, ldy, wide);
}

}  // namespace
