// A decoder layer for many tokens on tiles: what a product wants of its activations is written by whoever makes them.
#pragma once
#include "attend_many.h"
#include "layer.h"

namespace {

struct ManyBuffers {
  PanelsOf in, wide, inner;  // inputs of qkv and gate_up, of o, of down
  ManyPlan plan;
};

// Sixteen rows at a time: s = x + r, and norm(s) as a panel.
inline void norm_panels(Team &team, const PanelsOf &to, const bf16 *x, const bf16 *r, const bf16 *weight, float eps,
                        int64_t d, bf16 *s) {
  team.each(panel_count(to), 1, [&](int64_t first, int64_t last) {
    bf16 *y = scratch(18)->get<bf16>(kPanelRows * d);
    for (int64_t p = first; p < last; p++) {
      for (int64_t i = p * kPanelRows; i < min64(to.m, (p + 1) * kPanelRows); i++)
        rms_norm_row(x + i * d, r ? r + i * d : nullptr, weight, eps, d, s ? s + i * d : nullptr, y + i % kPanelRows * d);
      fill_panel(to, p, d, [&](int64_t i) { return y + i % kPanelRows * d; });
    }
  });
}

// As `interleaved`, for any values.
inline __m512i narrowed(const float *rows) {
  __m512i even = _mm512_cvtepu16_epi32((__m256i)narrow(load<F>(rows)));
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)narrow(load<F>(rows + 16))), 16));
}

// silu(gate) * up, both rounded to bf16 first, as the panels of the product with `down`.
inline void gated_panels(Team &team, const ip_matrix &w, const PanelsOf &x, const PanelsOf &to) {
  int64_t inner = w.n / 2;
  gemm(
      team, w, x, inner / 16, [&](int64_t j, int h) { return h * inner + j * 16; },
      [&](int64_t j, int64_t panel, float *sums) {
        for (int h = 0; h < 2; h++) {
          uint32_t *at = to.at(panel + h, j * 16);
          for (int r = 0; r < 16; r++) {
            float *gate = sums + h * 256 + r * 16;
            F a = (F)_mm512_castsi512_ps(rounded(gate)), b = (F)_mm512_castsi512_ps(rounded(gate + 512));
            store(gate, silu(a) * b);
          }
          for (int r = 0; r < 8; r++) _mm512_store_si512(at + r * 16, narrowed(sums + h * 256 + r * 32));
          if (inner % kStep && j * 16 + 16 == inner) memset(at + 128, 0, 128 * sizeof(uint32_t));
        }
      });
}

inline void layer_many(Team &team, const ip_layer &l, const ip_step &step, const bf16 *x, const bf16 *residual, bf16 *out,
                       bf16 *out_residual, const LayerBuffers &b, const Attend &a, const AttendPlan &plan,
                       const ManyBuffers &many, Phases &phases) {
  int64_t width = l.qkv.k, wide = l.o.k;
  auto end = [&](Phase phase) {
    team.barrier();
    phases.end(phase);
  };
  norm_panels(team, many.in, x, residual, l.attn_norm, l.attn_eps, width, residual ? b.s : nullptr);
  end(kAttnNorm);
  gemm_rows(team, l.qkv, many.in, b.qkv, l.qkv.n, 0);
  end(kProject);
  enter(team, l, step, step.cache, b.qkv, b.q);
  end(kEnter);
  attend(team, a, plan);
  attend_many(team, a, many.plan);
  end(kAttend);
  fill_panels(team, many.wide, wide, [&](int64_t i) { return b.mixed + i * wide; });
  team.barrier();
  gemm_rows(team, l.o, many.wide, b.y, width, 0);
  end(kOut);
  norm_panels(team, many.in, b.y, residual ? b.s : x, l.mlp_norm, l.mlp_eps, width, out_residual);
  end(kMlpNorm);
  gated_panels(team, l.gate_up, many.in, many.inner);
  end(kMlp);
  gemm_rows(team, l.down, many.inner, out, width, 0);
  end(kDown);
}

}  // namespace
