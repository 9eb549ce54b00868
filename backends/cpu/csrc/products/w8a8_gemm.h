// Products with many rows, and a decoder layer for many tokens, where weights and activations have 8 bits (W8A8).
#pragma once
#include "layer.h"
#include "many.h"

namespace {

constexpr int64_t kBytesPassed = 512;  // rows of activations that pass by a thread's weights

// `put(j, i, n, sums)` as of `bytes_products`, for `pairs` pairs of panels and all rows of x, shared by the team.
template <class Pair, class Put>
inline void bytes_many(Team &team, const ip_matrix &w, const Bytes &x, int64_t pairs, Pair pair, Put put) {
  int64_t chunk = max64(1, min64(4, pairs / (4 * team.count)));
  for (int64_t i = 0; i < x.m; i += kBytesPassed)
    team.each(pairs, chunk, [&](int64_t first, int64_t last) {
      bytes_products(w, x, i, min64(kBytesPassed, x.m - i), first, last, pair, put);
    });
}

// y = x w^T + bias.
inline void bytes_rows(Team &team, const ip_matrix &w, const Bytes &x, void *y, int64_t ldy, int wide) {
  int64_t panels = (w.n + kPanel - 1) / kPanel;
  auto pair = [&](int64_t j, int h) { return 2 * j + h < panels ? 2 * j + h : -1; };
  bytes_many(team, w, x, (panels + 1) / 2, pair, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
    for (int h = 0; h < 2 && 2 * j + h < panels; h++) {
      int64_t column = (2 * j + h) * kPanel, have = min64(kPanel, w.n - column);
      F bias = w.bias ? load16(w.bias + column, have) : F{};
      for (int64_t r = 0; r < n; r++) {
        F v = bytes_result(w, 2 * j + h, x, i + r, sums + h * 512 + r * 16);
        if (w.bias) v = v + bias;
        if (wide)
          store_f((float *)y + (i + r) * ldy + column, v, have);
        else
          store16((bf16 *)y + (i + r) * ldy + column, v, have);
      }
    }
  });
}

// silu(gate) * up, both rounded to bf16 first; w.n / 2 is a multiple of 16.
inline void gated_bytes(Team &team, const ip_matrix &w, const Bytes &x, bf16 *out) {
  int64_t inner = w.n / 2, half = inner / kPanel;
  auto pair = [&](int64_t j, int h) { return h * half + j; };
  bytes_many(team, w, x, half, pair, [&](int64_t j, int64_t i, int64_t n, const int32_t *sums) {
    for (int64_t r = 0; r < n; r++) {
      float gate[kPanel], up[kPanel];
      store(gate, bytes_result(w, j, x, i + r, sums + r * 16));
      store(up, bytes_result(w, half + j, x, i + r, sums + 512 + r * 16));
      for (int64_t c = 0; c < kPanel; c += kWide)
        store_v(out + (i + r) * inner + j * kPanel + c, silu(rounded(load<V>(gate + c))) * rounded(load<V>(up + c)));
    }
  });
}

// The rows at row(i) as bytes, shared by the team.
template <class RowAt>
inline void fill_all(Team &team, const Bytes &x, int64_t k, RowAt row) {
  team.each(x.m, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) fill_bytes(x, i, row(i), k);
  });
}

inline void bytes_linear(Team &team, const ip_matrix &w, const Bytes &b, const bf16 *x, int64_t ldx, void *y, int64_t ldy,
                         int wide) {
  fill_all(team, b, w.k, [&](int64_t i) { return x + i * ldx; });
  team.barrier();
  bytes_rows(team, w, b, y, ldy, wide);
}

#if defined(INFERPLANE_MANY)
// Bytes of one product after the other, in the same memory.
struct LayerBytes {
  Bytes in, wide, inner;
};

inline LayerBytes layer_bytes_in(Scratch s[3], int64_t m, const ip_layer &l) {
  const ip_matrix *each[] = {&l.qkv, &l.o, &l.down};
  Bytes of[3], most = {};
  for (int i = 0; i < 3; i++) {
    of[i] = bytes_in(s, m, *each[i]);
    if (of[i].padded > most.padded) most = of[i];
  }
  for (Bytes &b : of) b.x = most.x, b.scale = most.scale, b.sums = most.sums, b.pairs = most.pairs;
  return {of[0], of[1], of[2]};
}

inline void norm_bytes(Team &team, const Bytes &to, const bf16 *x, const bf16 *r, const bf16 *weight, float eps, int64_t d,
                       bf16 *s) {
  fill_all(team, to, d, [&](int64_t i) {
    bf16 *y = scratch(18)->get<bf16>(d);
    rms_norm_row(x + i * d, r ? r + i * d : nullptr, weight, eps, d, s ? s + i * d : nullptr, y);
    return y;
  });
}

inline void layer_bytes(Team &team, const ip_layer &l, const ip_step &step, const bf16 *x, const bf16 *residual, bf16 *out,
                        bf16 *out_residual, const LayerBuffers &b, const Attend &a, const AttendPlan &plan,
                        const ManyPlan &many, const LayerBytes &bytes, Phases &phases) {
  int64_t width = l.qkv.k;
  auto end = [&](Phase phase) {
    team.barrier();
    phases.end(phase);
  };
  norm_bytes(team, bytes.in, x, residual, l.attn_norm, l.attn_eps, width, residual ? b.s : nullptr);
  end(kAttnNorm);
  bytes_rows(team, l.qkv, bytes.in, b.qkv, l.qkv.n, 0);
  end(kProject);
  enter(team, l, step, step.cache, b.qkv, b.q);
  end(kEnter);
  attend(team, a, plan);
  attend_many(team, a, many);
  end(kAttend);
  bytes_linear(team, l.o, bytes.wide, b.mixed, l.o.k, b.y, width, 0);
  end(kOut);
  norm_bytes(team, bytes.in, b.y, residual ? b.s : x, l.mlp_norm, l.mlp_eps, width, out_residual);
  end(kMlpNorm);
  gated_bytes(team, l.gate_up, bytes.in, b.act);
  end(kMlp);
  bytes_linear(team, l.down, bytes.inner, b.act, l.down.k, out, width, 0);
  end(kDown);
}
#endif

}  // namespace
