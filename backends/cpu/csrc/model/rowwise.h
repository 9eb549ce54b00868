// What is done row by row between the products: norms, activations, rotary positions.
#pragma once
#include "team.h"

namespace {

// f(c, n) for every register of columns from c on, of which n are there: a constant but for the last.
template <class Fn>
inline __attribute__((always_inline)) void by_lanes(int64_t d, Fn f) {
  int64_t c = 0;
  for (; c + kWide <= d; c += kWide) f(c, (int64_t)kWide);
  if (c < d) f(c, d - c);
}

inline float inverse_rms(V squares, int64_t d, float eps) {
  return 1.0f / __builtin_sqrtf(sum(squares) / (float)d + eps);
}

// s = x + r rounded to bf16, as the op's definition rounds it, then y = s / rms(s) * weight.
inline void rms_norm_row(const bf16 *x, const bf16 *r, const bf16 *weight, float eps, int64_t d, bf16 *s, bf16 *y) {
  V squares = {};
  by_lanes(d, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
    V v = load_v(x + c, n);
    if (r) v = rounded(v + load_v(r + c, n));
    if (s) store_v(s + c, v, n);
    squares = fma(v, v, squares);
  });
  float inverse = inverse_rms(squares, d, eps);
  const bf16 *from = s ? s : x;
  by_lanes(d, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
    store_v(y + c, load_v(from + c, n) * inverse * load_v(weight + c, n), n);
  });
}

inline void silu_mul_row(const bf16 *gate, const bf16 *up, int64_t d, bf16 *y) {
  for (int64_t c = 0; c < d; c += kWide)
    store_v(y + c, silu(load_v(gate + c, d - c)) * load_v(up + c, d - c), d - c);
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
  for (int64_t c = 0; c < half; c += kWide) {
    int64_t n = half - c;
    V a = load_v(x + c, n), b = load_v(x + half + c, n), co = load_v(cosine + c, n), si = load_v(sine + c, n);
    store_v(y + c, a * co - b * si, n);
    store_v(y + half + c, b * co + a * si, n);
  }
}

// A head's norm, where there is a weight for it, and its rotation, in registers.
template <int DIM>
inline void enter_in_registers(const bf16 *x, const bf16 *weight, float eps, const float *table, bf16 *y) {
  constexpr int N = DIM / kWide;
  V v[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; i++) v[i] = load_v(x + i * kWide);
  if (weight) {
    V squares = {};
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) squares = fma(v[i], v[i], squares);
    float inverse = inverse_rms(squares, DIM, eps);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) v[i] = rounded(v[i] * inverse * load_v(weight + i * kWide));
  }
#pragma GCC unroll 8
  for (int i = 0; i < N / 2; i++) {
    V a = v[i], b = v[N / 2 + i], co = load<V>(table + i * kWide), si = load<V>(table + (N / 2 + i) * kWide);
    store_v(y + i * kWide, a * co - b * si);
    store_v(y + (N / 2 + i) * kWide, b * co + a * si);
  }
}

// `rms_norm_row` where there is a weight, then `rope_head`, to the same bits. `room`: of a head.
inline void norm_and_rope(const bf16 *x, const bf16 *weight, float eps, const float *table, int64_t dim, int interleaved,
                          bf16 *room, bf16 *y) {
  if (!interleaved && dim == 64) return enter_in_registers<64>(x, weight, eps, table, y);
  if (!interleaved && dim == 128) return enter_in_registers<128>(x, weight, eps, table, y);
  if (weight) rms_norm_row(x, nullptr, weight, eps, dim, nullptr, room), x = room;
  rope_head(x, table, dim, interleaved, y);
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
