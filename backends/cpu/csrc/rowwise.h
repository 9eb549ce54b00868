// What is done row by row between the products: norms, activations, rotary positions.
#pragma once
#include "team.h"

namespace {

// s = x + r rounded to bf16, as the op's definition rounds it, then y = s / rms(s) * weight.
inline void rms_norm_row(const bf16 *x, const bf16 *r, const bf16 *weight, float eps, int64_t d, bf16 *s, bf16 *y) {
  F squares = F{};
  for (int64_t c = 0; c < d; c += kLanes) {
    F v = load16(x + c, d - c);
    if (r) v = widen(narrow(v + load16(r + c, d - c)));
    if (s) store16(s + c, v, d - c);
    squares = fma(v, v, squares);
  }
  float inverse = 1.0f / __builtin_sqrtf(sum(squares) / (float)d + eps);
  const bf16 *from = s ? s : x;
  for (int64_t c = 0; c < d; c += kLanes)
    store16(y + c, load16(from + c, d - c) * inverse * load16(weight + c, d - c), d - c);
}

inline void silu_mul_row(const bf16 *gate, const bf16 *up, int64_t d, bf16 *y) {
  for (int64_t c = 0; c < d; c += kLanes)
    store16(y + c, silu(load16(gate + c, d - c)) * load16(up + c, d - c), d - c);
}

// One head; cosines then sines of a position in `table`, dim / 2 each. y may be x.
inline void rope_head(const bf16 *x, const float *table, int64_t dim, int interleaved, bf16 *y) {
  int64_t half = dim / 2;
  const float *cosine = table, *sine = table + half;
  if (interleaved) {
    for (int64_t c = 0; c < half; c++) {
      float a = widen1(x[2 * c]), b = widen1(x[2 * c + 1]);
      y[2 * c] = narrow1(a * cosine[c] - b * sine[c]);
      y[2 * c + 1] = narrow1(b * cosine[c] + a * sine[c]);
    }
    return;
  }
  for (int64_t c = 0; c < half; c += kLanes) {
    int64_t n = half - c;
    F a = load16(x + c, n), b = load16(x + half + c, n), co = load_f(cosine + c, n), si = load_f(sine + c, n);
    store16(y + c, a * co - b * si, n);
    store16(y + half + c, b * co + a * si, n);
  }
}

inline void rms_norm(Team &team, const bf16 *x, int64_t ldx, const bf16 *r, const bf16 *weight, float eps, int64_t m,
                     int64_t d, bf16 *s, bf16 *y) {
  team.each(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      rms_norm_row(x + i * ldx, r ? r + i * d : nullptr, weight, eps, d, s ? s + i * d : nullptr, y + i * d);
  });
}

inline void silu_mul(Team &team, const bf16 *x, int64_t ldx, int64_t m, int64_t d, bf16 *y) {
  team.each(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) silu_mul_row(x + i * ldx, x + i * ldx + d, d, y + i * d);
  });
}

inline void rope(Team &team, const bf16 *x, int64_t row_stride, int64_t head_stride, const float *table,
                 const int64_t *positions, int64_t m, int64_t heads, int64_t dim, int interleaved, bf16 *y) {
  team.each(m, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      for (int64_t h = 0; h < heads; h++)
        rope_head(x + i * row_stride + h * head_stride, table + positions[i] * dim, dim, interleaved,
                  y + (i * heads + h) * dim);
  });
}

}  // namespace
