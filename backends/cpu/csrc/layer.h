// A whole decoder layer with grouped-query attention and a gated MLP: one team, a barrier where results are shared.
//
// Each step rounds to bf16 where the smaller kernels do, and uses their functions: a row's result is that of the layer
// composed of them, to the last bit.
#pragma once
#include "attend.h"
#include "rowwise.h"

namespace {

constexpr int64_t kOwnRows = 8;  // so few rows are normed by every thread for itself, which is cheaper than a barrier

struct LayerBuffers {
  bf16 *h, *h2, *s, *qkv, *q, *mixed, *y, *act;  // [m, ...], shared by the team, each written once
};

// out[i, j] = silu(gate) * up, both rounded to bf16 first; `inner` is a multiple of 16.
inline void gated(Team &team, const ip_matrix &w, const bf16 *x, int64_t m, bf16 *out) {
  int64_t inner = w.n / 2, width = w.k, chunk = min64(chunk_rows(w, team.count), inner);
  for (int64_t i0 = 0; i0 < m; i0 += kRowTile) {
    int64_t tile = min64(kRowTile, m - i0);
    Laid laid = lay_out(w, tile, [&](int64_t i) { return x + (i0 + i) * width; });
    team.each(inner, chunk, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += chunk) {
        int64_t n = min64(chunk, last - j);
        float *gate = scratch(7)->get<float>(2 * tile * (chunk + kLanes)), *up = gate + tile * (chunk + kLanes);
        products(w, j, j + n, laid.rows, laid.q, gate, chunk);
        products(w, inner + j, inner + j + n, laid.rows, laid.q, up, chunk);
        for (int64_t i = 0; i < tile; i++)
          for (int64_t c = 0; c < n; c += kLanes) {
            F a = widen(narrow(load<F>(gate + i * chunk + c))), b = widen(narrow(load<F>(up + i * chunk + c)));
            store16(out + (i0 + i) * inner + j + c, silu(a) * b);
          }
      }
    });
  }
}

// Norms on q and k where there are, rotation, and the step's K and V to the cache.
inline void rotate_and_write(Team &team, const ip_layer &l, const ip_step &step, const bf16 *qkv, bf16 *q) {
  int64_t all = l.heads + 2 * l.kv_heads, d = l.head_dim;
  team.each(step.tokens * all, 8, [&](int64_t first, int64_t last) {
    bf16 *normed = scratch(9)->get<bf16>(d);
    for (int64_t u = first; u < last; u++) {
      int64_t t = u / all, h = u % all, slot = step.slots[t];
      const bf16 *from = qkv + u * d;
      const float *table = l.rope + step.positions[t] * d;
      if (h < l.heads + l.kv_heads) {
        const bf16 *norm = h < l.heads ? l.q_norm : l.k_norm;
        if (norm) rms_norm_row(from, nullptr, norm, h < l.heads ? l.q_eps : l.k_eps, d, nullptr, normed), from = normed;
      }
      if (h < l.heads) {
        rope_head(from, table, d, l.interleaved, q + (t * l.heads + h) * d);
      } else if (slot >= 0 && h < l.heads + l.kv_heads) {
        rope_head(from, table, d, l.interleaved, step.cache.k + slot * step.cache.k_stride + (h - l.heads) * d);
      } else if (slot >= 0) {
        memcpy(step.cache.v + slot * step.cache.v_stride + (h - l.heads - l.kv_heads) * d, from, (size_t)d * sizeof(bf16));
      }
    }
  });
}

// s = x + r, y = norm(s): by each thread for itself when there are few rows, else shared out, with a barrier.
struct Normed {
  const bf16 *y, *s;
};
inline Normed add_norm(Team &team, const bf16 *x, const bf16 *r, const bf16 *weight, float eps, int64_t m, int64_t d,
                       bf16 *s, bf16 *y, int own) {
  if (m > kOwnRows) {
    rms_norm(team, x, d, r, weight, eps, m, d, r ? s : nullptr, y);
    team.barrier();
    return {y, r ? s : x};
  }
  bf16 *mine = scratch(own)->get<bf16>(2 * m * d);
  for (int64_t i = 0; i < m; i++)
    rms_norm_row(x + i * d, r ? r + i * d : nullptr, weight, eps, d, r ? mine + (m + i) * d : nullptr, mine + i * d);
  return {mine, r ? mine + m * d : x};
}

inline void layer(Team &team, const ip_layer &l, const ip_step &step, const bf16 *x, const bf16 *residual, bf16 *out,
                  bf16 *out_residual, const LayerBuffers &b, const Attend &a, const AttendPlan &plan) {
  int64_t m = step.tokens, width = l.qkv.k;
  Normed first = add_norm(team, x, residual, l.attn_norm, l.attn_eps, m, width, b.s, b.h, 18);
  linear(team, l.qkv, first.y, width, m, b.qkv, l.qkv.n, 0);
  team.barrier();
  rotate_and_write(team, l, step, b.qkv, b.q);
  team.barrier();
  attend(team, a, plan);
  team.barrier();
  linear(team, l.o, b.mixed, l.o.k, m, b.y, width, 0);
  team.barrier();
  Normed second = add_norm(team, b.y, first.s, l.mlp_norm, l.mlp_eps, m, width, out_residual, b.h2, 19);
  if (m <= kOwnRows && team.id == 0) memcpy(out_residual, second.s, (size_t)(m * width) * sizeof(bf16));
  gated(team, l.gate_up, second.y, m, b.act);
  team.barrier();
  linear(team, l.down, b.act, l.down.k, m, out, width, 0);
}

}  // namespace
