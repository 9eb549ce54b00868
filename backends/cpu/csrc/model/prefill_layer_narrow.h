// A decoder layer for many tokens whose products round activations to at most 8 bits (quantize_narrow.h): products by
// panels, attention as `prefill_layer` has it. isa_entries.h calls it.
#pragma once
#include "attention/prefill.h"
#include "model/decoder_layer.h"

namespace {

// Computes a layer with grouped-query attention and a gated MLP for many tokens, more than kMaxDecodeRows: out and
// out_residual from x and residual, all [tokens, width]; residual may be null. `plan` has the sequences with few query
// tokens, `prefill` the others. Every thread of the team calls it; all is complete on return.
inline void prefill_layer_narrow(Team &team, const ip_layer &layer, const ip_step &step, const bf16 *x,
                                 const bf16 *residual, bf16 *out, bf16 *out_residual, const LayerBuffers &buffers,
                                 const AttentionArgs &args, const AttentionPlan &plan, const PrefillPlan &prefill,
                                 PhaseTimer &phases) {
  int64_t m = step.tokens, width = layer.o.n;
  auto end_phase = [&](LayerPhase phase) {
    team.barrier();
    phases.end_phase(phase);
  };
  NormResult first = add_norm(team, {}, x, residual, layer.attn_norm, m, width, buffers.attn_residual,
                              buffers.attn_input, kNormedRows);
  phases.end_phase(kAttnNorm);
  linear(team, layer.qkv, first.y, width, m, buffers.qkv, layer.qkv.n, 0);
  end_phase(kProject);
  rope_and_cache(team, layer, step, step.cache, buffers.qkv, buffers.q);
  end_phase(kRopeCache);
  attend(team, args, plan);
  attend_prefill(team, args, prefill);
  end_phase(kAttend);
  linear(team, layer.o, buffers.mixed, layer.o.k, m, buffers.attn_output, width, 0);
  end_phase(kOut);
  NormResult second = add_norm(team, layer.attn_after, buffers.attn_output, first.s, layer.mlp_norm, m, width,
                               out_residual, buffers.mlp_input, kSecondNormedRows);
  phases.end_phase(kMlpNorm);
  gate_up_activation_mul(team, layer.gate_up, second.y, m, layer.activation, buffers.mlp_hidden);
  end_phase(kMlp);
  linear(team, layer.down, buffers.mlp_hidden, layer.down.k, m, out, width, 0);
  team.barrier();
  if (layer.mlp_after.weight) norm_in_place(team, layer.mlp_after, out, m, width);
  phases.end_phase(kDown);
}

}  // namespace
