// A decoder layer for many tokens: what a product wants of its activations is written by whoever makes them.
#pragma once
#include "layer.h"
#include "many.h"

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
