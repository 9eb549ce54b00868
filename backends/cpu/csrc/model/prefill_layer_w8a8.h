// A decoder layer for many tokens with W8A8 weights: every product's input is quantized to int8 per row. isa_entries.h
// calls it.
#pragma once
#include "attention/prefill.h"
#include "model/decoder_layer.h"
#include "products/w8a8_gemm.h"

namespace {

// Quantized inputs of qkv and gate_up, of o, and of down. They share memory, since they follow each other.
struct Int8LayerInputs {
  Int8Activations in, wide, inner;
};

// Reserves space in `s` for m rows of the layer's three inputs, which share it; it is not cleared.
inline Int8LayerInputs reserve_int8_inputs(Workspace s[3], int64_t m, const ip_layer &layer) {
  const ip_matrix *each[] = {&layer.qkv, &layer.o, &layer.down};
  Int8Activations of[3], largest = {};
  for (int i = 0; i < 3; i++) {
    of[i] = reserve_int8(s, m, *each[i]);
    if (of[i].padded > largest.padded) largest = of[i];
  }
  for (Int8Activations &b : of)
    b.x = largest.x, b.scale = largest.scale, b.sums = largest.sums, b.pairs = largest.pairs;
  return {of[0], of[1], of[2]};
}

// s = after(x) + r (r null: s is x; no norm `after`: x + r) and norm(s) quantized to `to`, for the to.m dense rows of d
// entries. s is not written if it is null. Every thread of the team calls it; complete after the next `barrier`.
inline void norm_and_quantize(Team &team, const Int8Activations &to, const ip_norm &after, const bf16 *x, const bf16 *r,
                              const ip_norm &norm, int64_t d, bf16 *s) {
  quantize_rows(team, to, d, [&](int64_t i) {
    bf16 *y = workspace(kNormedRows)->reserve<bf16>(d);
    rms_norm_row_after(after, x + i * d, r ? r + i * d : nullptr, norm, d, s ? s + i * d : nullptr, y);
    return y;
  });
}

// Computes a layer with grouped-query attention, a gated MLP and W8A8 weights for many tokens: out and out_residual
// from x and residual, all [tokens, width]; residual may be null. `plan` has the sequences with few query tokens,
// `prefill` the others. Every thread of the team calls it; all is complete on return.
inline void prefill_layer_w8a8(Team &team, const ip_layer &layer, const ip_step &step, const bf16 *x,
                               const bf16 *residual, bf16 *out, bf16 *out_residual, const LayerBuffers &buffers,
                               const AttentionArgs &args, const AttentionPlan &plan, const PrefillPlan &prefill,
                               const Int8LayerInputs &inputs, PhaseTimer &phases) {
  int64_t width = layer.qkv.k;
  auto end_phase = [&](LayerPhase phase) {
    team.barrier();
    phases.end_phase(phase);
  };
  norm_and_quantize(team, inputs.in, {}, x, residual, layer.attn_norm, width,
                    residual ? buffers.attn_residual : nullptr);
  end_phase(kAttnNorm);
  w8a8_gemm_to_rows(team, layer.qkv, inputs.in, buffers.qkv, layer.qkv.n, 0);
  end_phase(kProject);
  rope_and_cache(team, layer, step, step.cache, buffers.qkv, buffers.q);
  end_phase(kRopeCache);
  attend(team, args, plan);
  attend_prefill(team, args, prefill);
  end_phase(kAttend);
  w8a8_linear(team, layer.o, inputs.wide, buffers.mixed, layer.o.k, buffers.attn_output, width, 0);
  end_phase(kOut);
  norm_and_quantize(team, inputs.in, layer.attn_after, buffers.attn_output, residual ? buffers.attn_residual : x,
                    layer.mlp_norm, width, out_residual);
  end_phase(kMlpNorm);
  w8a8_gemm_activation_mul(team, layer.gate_up, inputs.in, layer.activation, buffers.mlp_hidden);
  end_phase(kMlp);
  w8a8_linear(team, layer.down, inputs.inner, buffers.mlp_hidden, layer.down.k, out, width, 0);
  team.barrier();
  if (layer.mlp_after.weight) norm_in_place(team, layer.mlp_after, out, step.tokens, width);
  phases.end_phase(kDown);
}

}  // namespace
