// The recurrent kernels of one instruction set as the functions of inferplane_cpu.h. isa_entries.h includes it.
#pragma once
#include "recurrent/mixer.h"

namespace {

// The rows of a step's tokens, with padding.
inline int64_t count_rows(const ip_sequences &s) { return s.start[s.sequences]; }

// `ip_causal_conv1d`: y [tokens, channels] and the states after the step.
void causal_conv1d_entry(const ip_convolution *conv, const ip_sequences *s, const bf16 *x, int64_t ldx,
                         const bf16 *before, bf16 *after, bf16 *y) {
  run_on_team(count_rows(*s) * conv->channels * conv->size,
              [&](Team &team) { causal_conv1d(team, *conv, *s, x, ldx, before, after, y); });
}

// `ip_delta_rule_gates`: decay [tokens, heads], or [tokens, heads, channels], and beta [tokens, heads].
void delta_rule_gates_entry(const float *a_log, const float *dt_bias, const bf16 *a, int64_t lda, const bf16 *b,
                            int64_t ldb, int64_t tokens, int64_t heads, int64_t channels, float *decay, float *beta) {
  run_on_team(tokens * heads * max64(1, channels) * 16, [&](Team &team) {
    team.for_each_chunk(tokens, 16, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < heads; h++) {
          if (channels)
            channel_decays(a_log[h], dt_bias + h * channels, a + t * lda + h * channels, channels,
                           decay + (t * heads + h) * channels);
          else
            decay[t * heads + h] = delta_rule_decay(a_log[h], dt_bias[h], bf16_to_float(a[t * lda + h]));
          beta[t * heads + h] = delta_rule_beta(bf16_to_float(b[t * ldb + h]));
        }
    });
  });
}

// `ip_gated_delta_rule`: y [tokens, heads, v_dim] and the states after the step.
void gated_delta_rule_entry(const ip_delta_rule *rule, const ip_sequences *s, const ip_head_rows *qkv,
                            const float *decay, int64_t ld_decay, const float *beta, int64_t ld_beta,
                            const float *before, float *after, bf16 *y) {
  DeltaRuleArgs args = {*rule, qkv[0], qkv[1], qkv[2], before, after, y, rule->by_channel ? decay : nullptr, ld_decay};
  run_on_team(count_rows(*s) * rule->heads * rule->k_dim * rule->v_dim, [&](Team &team) {
    gated_delta_rule(team, args, *s, [&](int64_t t, int64_t h) {
      float remains = rule->by_channel ? 1.0f : __builtin_expf(decay[t * ld_decay + h]);
      return DeltaRuleGates{remains, beta[t * ld_beta + h]};
    });
  });
}

// `ip_gated_norm`: y [tokens, heads, d].
void gated_norm_entry(const ip_norm_with_gate *norm, const ip_head_rows *x, const ip_head_rows *gate, int64_t tokens,
                      int64_t heads, int64_t d, bf16 *y) {
  run_on_team(tokens * heads * d, [&](Team &team) {
    gated_norm(
        team, *norm, [&](int64_t t, int64_t h) { return head_at(*x, t, h); },
        [&](int64_t t, int64_t h) { return head_at(*gate, t, h); }, tokens, heads, d, y);
  });
}

// `ip_selective_scan`: y [tokens, heads, dim] and the states after the step.
void selective_scan_entry(const ip_scan *scan, const ip_sequences *s, const ip_head_rows *xbc, const bf16 *dt,
                          int64_t dt_row, const float *before, float *after, bf16 *y) {
  ScanArgs args = {*scan, xbc[0], xbc[1], xbc[2], dt, dt_row, before, after, y};
  run_on_team(count_rows(*s) * scan->heads * scan->dim * scan->size,
              [&](Team &team) { selective_scan(team, args, *s); });
}

// `ip_recurrent_block`: out [tokens, width] and the states after the step.
void recurrent_block_entry(const ip_mixer *mixer, const ip_sequences *s, const bf16 *x, bf16 *conv_states,
                           float *states, bf16 *out) {
  int64_t m = count_rows(*s);
  MixerBuffers buffers = reserve_mixer_buffers(1, [&](int64_t) { return mixer; }, m, workspace(kMixerRows));
  run_on_team(m * (mixer->proj.n * mixer->proj.k + mixer->o.n * mixer->o.k) / 4, [&](Team &team) {
    mix_tokens(team, *mixer, *s, x, conv_states, states, buffers);
    linear(team, mixer->o, buffers.mixed, mixer->o.k, m, out, mixer->o.n, 0);
  });
}

}  // namespace
