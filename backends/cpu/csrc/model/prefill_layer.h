// A decoder layer for many tokens. Each step writes its results as the next product reads its activations (panels), so
// that nothing is rearranged in between. isa_entries.h calls it; prefill.h says which products and which attention it
// uses.
#pragma once
#include "model/decoder_layer.h"
#include "attention/prefill.h"

namespace {

// Activations of the products, and the tasks of attention.
struct PrefillBuffers {
  ActivationPanels in, wide, inner;  // inputs of qkv and gate_up, of o, of down
  PrefillPlan plan;
};

// s = after(x) + r (r null: s is x; no norm `after`: x + r) and norm(s) as panels `to`, for the to.m dense rows of d
// entries, sixteen rows at a time. s is not written if it is null. Every thread of the team calls it; complete after
// the next `barrier`.
inline void norm_panels(Team &team, const ActivationPanels &to, const ip_norm &after, const bf16 *x, const bf16 *r,
                        const ip_norm &norm, int64_t d, bf16 *s) {
  team.for_each_chunk(num_panels(to), 1, [&](int64_t first, int64_t last) {
    bf16 *y = workspace(kNormedRows)->reserve<bf16>(kPanelRows * d);
    for (int64_t p = first; p < last; p++) {
      for (int64_t i = p * kPanelRows; i < min64(to.m, (p + 1) * kPanelRows); i++)
        rms_norm_row_after(after, x + i * d, r ? r + i * d : nullptr, norm, d, s ? s + i * d : nullptr,
                           y + i % kPanelRows * d);
      fill_panel(to, p, d, [&](int64_t i) { return y + i % kPanelRows * d; });
    }
  });
}

// Computes a layer with grouped-query attention and a gated MLP for many tokens: out and out_residual from x and
// residual, all [tokens, width]; residual may be null. `plan` has the sequences with few query tokens, prefill.plan the
// others. Every thread of the team calls it; all is complete on return.
inline void prefill_layer(Team &team, const ip_layer &layer, const ip_step &step, const bf16 *x, const bf16 *residual,
                          bf16 *out, bf16 *out_residual, const LayerBuffers &buffers, const AttentionArgs &args,
                          const AttentionPlan &plan, const PrefillBuffers &prefill, PhaseTimer &phases) {
  int64_t width = layer.qkv.k, wide = layer.o.k;
  auto end_phase = [&](LayerPhase phase) {
    team.barrier();
    phases.end_phase(phase);
  };
  norm_panels(team, prefill.in, {}, x, residual, layer.attn_norm, width,
              residual ? buffers.attn_residual : nullptr);
  end_phase(kAttnNorm);
  gemm_to_rows(team, layer.qkv, prefill.in, buffers.qkv, layer.qkv.n, 0);
  end_phase(kProject);
  rope_and_cache(team, layer, step, step.cache, buffers.qkv, buffers.q);
  end_phase(kRopeCache);
  attend(team, args, plan);
  attend_prefill(team, args, prefill.plan);
  end_phase(kAttend);
  fill_panels(team, prefill.wide, wide, [&](int64_t i) { return buffers.mixed + i * wide; });
  team.barrier();
  gemm_to_rows(team, layer.o, prefill.wide, buffers.attn_output, width, 0);
  end_phase(kOut);
  norm_panels(team, prefill.in, layer.attn_after, buffers.attn_output, residual ? buffers.attn_residual : x,
              layer.mlp_norm, width, out_residual);
  end_phase(kMlpNorm);
  gemm_activation_mul(team, layer.gate_up, prefill.in, layer.activation, prefill.inner);
  end_phase(kMlp);
  gemm_to_rows(team, layer.down, prefill.inner, out, width, 0);
  team.barrier();
  if (layer.mlp_after.weight) norm_in_place(team, layer.mlp_after, out, step.tokens, width);
  phases.end_phase(kDown);
}

}  // namespace
