// A recurrent layer's mixer for few tokens, computed by one team with a barrier wherever results are shared. Each step
// rounds to bf16 where the separate kernels do, and uses their functions, to the same bits. entries.h calls it.
#pragma once
#include "products/linear.h"
#include "recurrent/conv.h"
#include "recurrent/delta_rule.h"
#include "recurrent/gates.h"
#include "recurrent/selective_scan.h"

namespace {

// Rows [m, ...] between the parts of a mixer, which the team shares: projections; inputs and results of the convolution;
// results of the recurrence; rows for the last product; of Kimi's gates the low rank, the gates, and decays by channel.
struct MixerBuffers {
  bf16 *projected, *gates, *inputs, *convolved, *recurred, *mixed, *low, *gate;
  float *decays;
};

// Reserves buffers for each of `count` mixers with m tokens: mixer_at(i) points to it, or is null. `recurred` and `mixed` are zeros: rows of padding are
// skipped, and what follows must not read memory that was never written.
template <class MixerAt>
MixerBuffers reserve_mixer_buffers(int64_t count, MixerAt mixer_at, int64_t m, Workspace *memory) {
  int64_t projected = 0, gates = 0, channels = 0, inner = 0, low = 0, gate = 0, decays = 0;
  for (int64_t i = 0; i < count; i++) {
    const ip_mixer *mixer = mixer_at(i);
    if (!mixer) continue;
    projected = max64(projected, mixer->proj.n), gates = max64(gates, mixer->gates.n);
    channels = max64(channels, mixer->conv.channels), inner = max64(inner, mixer->o.k);
    low = max64(low, mixer->low.n), gate = max64(gate, mixer->gate_up.n), decays = max64(decays, mixer->decay_up.n);
  }
  MixerBuffers b = {};
  bf16 **each[] = {&b.projected, &b.gates, &b.inputs, &b.convolved, &b.recurred, &b.mixed, &b.low, &b.gate};
  int64_t rows[] = {projected, gates, channels, channels, inner, inner, low, gate}, size = 2 * m * decays;
  for (int64_t n : rows) size += round_up(m * n, kLanes);
  bf16 *at = memory->reserve<bf16>(size);
  for (int i = 0; i < 8; at += round_up(m * rows[i++], kLanes)) *each[i] = at;
  b.decays = (float *)at;
  if (!inner) return b;
  memset(b.recurred, 0, (size_t)(m * inner) * sizeof(bf16));
  memset(b.mixed, 0, (size_t)(m * inner) * sizeof(bf16));
  return b;
}

// to[0 .. n] = a * b, rounded once. `to` may be either.
inline void multiply_entries(const bf16 *a, const bf16 *b, int64_t n, bf16 *to) {
  for_each_register(n, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
    store_floats(to + c, load_floats(a + c, m) * load_floats(b + c, m), m);
  });
}

// Projects m rows of x; columns get their factors, if there are any, after they are rounded, and are rounded again.
inline void project_inputs(Team &team, const ip_mixer &mixer, const bf16 *x, int64_t m, const MixerBuffers &buffers) {
  const ip_matrix &w = mixer.proj;
  if (!mixer.factors) {
    linear(team, w, x, w.k, m, buffers.projected, w.n, 0);
  } else {
    multiply(
        team, w, m, [&](int64_t i) { return x + i * w.k; },
        [&](int64_t i, int64_t j, int64_t n, float *sums) {
          add_bias(w, j, n, sums);
          for (int64_t c = 0; c < n; c++) sums[c] = bf16_to_float(float_to_bf16(sums[c])) * mixer.factors[j + c];
          store_bf16(buffers.projected + i * w.n + j, sums, n);
        });
  }
  if (mixer.gates.n) linear(team, mixer.gates, x, w.k, m, buffers.gates, mixer.gates.n, 0);
  if (mixer.low.n) linear(team, mixer.low, x, w.k, m, buffers.low, mixer.low.n, 0);
}

// A gated delta net after its projections; complete after the next `barrier`, as all of these functions.
inline void mix_delta_net(Team &team, const ip_mixer &mixer, const ip_sequences &s, bf16 *conv_states, float *states,
                          int64_t m, const MixerBuffers &b) {
  const ip_delta_rule &rule = mixer.rule;
  int64_t k_dim = rule.k_dim, v_dim = rule.v_dim, each = rule.heads / rule.groups, keys = rule.groups * k_dim;
  int64_t channels = mixer.conv.channels, all = mixer.proj.n, group = 2 * k_dim + 2 * each * v_dim;
  // If rows of the projection are ordered by groups, the convolution's inputs are copied: q, k and v of all groups.
  auto gather = [&](const LiveRows &rows, int64_t first, int64_t n) {
    if (!mixer.grouped) return;
    for (int64_t t = rows.begin; t < rows.begin + rows.count; t++) {
      const bf16 *from = b.projected + t * all;
      for (int64_t c = first; c < first + n; c++) {
        int64_t part = c < keys ? 0 : c < 2 * keys ? 1 : 2, i = c - part * keys, size = part == 2 ? each * v_dim : k_dim;
        b.inputs[t * channels + c] = from[i / size * group + part * k_dim + i % size];
      }
    }
  };
  auto nothing = [](const LiveRows &, int64_t, int64_t) {};
  causal_conv1d(team, mixer.conv, s, mixer.grouped ? b.inputs : b.projected, mixer.grouped ? channels : all, conv_states,
                conv_states, b.convolved, gather, nothing);
  team.barrier();
  DeltaRuleArgs args = {rule,
                        {b.convolved, channels, k_dim},
                        {b.convolved + keys, channels, k_dim},
                        {b.convolved + 2 * keys, channels, v_dim},
                        states,
                        states,
                        b.recurred,
                        nullptr,
                        0};
  gated_delta_rule(team, args, s, [&](int64_t t, int64_t h) {
    const bf16 *row = b.gates + t * 2 * rule.heads + (mixer.grouped ? h / each * 2 * each + h % each : h);
    float decay = delta_rule_decay(mixer.a_log[h], mixer.dt_bias[h],
                                   bf16_to_float(row[mixer.grouped ? each : rule.heads]));
    return DeltaRuleGates{__builtin_expf(decay), delta_rule_beta(bf16_to_float(row[0]))};
  });
  team.barrier();
  gated_norm(
      team, mixer.norm, [&](int64_t t, int64_t h) { return b.recurred + (t * rule.heads + h) * v_dim; },
      [&](int64_t t, int64_t h) {
        int64_t at = mixer.grouped ? h / each * group + 2 * k_dim + (each + h % each) * v_dim : channels + h * v_dim;
        return b.projected + t * all + at;
      },
      m, rule.heads, v_dim, b.mixed);
}

// Kimi Delta Attention after its projections.
inline void mix_kimi_delta(Team &team, const ip_mixer &mixer, const ip_sequences &s, bf16 *conv_states, float *states,
                           int64_t m, const MixerBuffers &b) {
  const ip_delta_rule &rule = mixer.rule;
  int64_t heads = rule.heads, dim = rule.k_dim, inner = heads * dim, low = mixer.low.n, channels = mixer.conv.channels;
  causal_conv1d(team, mixer.conv, s, b.projected, channels, conv_states, conv_states, b.convolved);
  multiply(
      team, mixer.decay_up, m, [&](int64_t i) { return b.low + i * low; },
      [&](int64_t i, int64_t j, int64_t n, float *sums) {
        add_bias(mixer.decay_up, j, n, sums);
        for (int64_t c = 0; c < n; c++) sums[c] = bf16_to_float(float_to_bf16(sums[c]));
        for (int64_t c = j, part; c < j + n; c += part) {
          part = min64(j + n, (c / dim + 1) * dim) - c;
          channel_decays(mixer.a_log[c / dim], mixer.dt_bias + c, sums + c - j, part, b.decays + i * inner + c);
        }
      });
  linear(team, mixer.gate_up, b.low + low / 2, low, m, b.gate, inner, 0);
  team.barrier();
  DeltaRuleArgs args = {rule,
                        {b.convolved, channels, dim},
                        {b.convolved + inner, channels, dim},
                        {b.convolved + 2 * inner, channels, dim},
                        states,
                        states,
                        b.recurred,
                        b.decays,
                        inner};
  gated_delta_rule(team, args, s, [&](int64_t t, int64_t h) {
    return DeltaRuleGates{1.0f, delta_rule_beta(bf16_to_float(b.gates[t * heads + h]))};
  });
  team.barrier();
  gated_norm(
      team, mixer.norm, [&](int64_t t, int64_t h) { return b.recurred + t * inner + h * dim; },
      [&](int64_t t, int64_t h) { return b.gate + t * inner + h * dim; }, m, heads, dim, b.mixed);
}

// A Mamba-2 mixer after its projection.
inline void mix_mamba2(Team &team, const ip_mixer &mixer, const ip_sequences &s, bf16 *conv_states, float *states,
                       int64_t m, const MixerBuffers &b) {
  const ip_scan &scan = mixer.scan;
  int64_t all = mixer.proj.n, channels = mixer.conv.channels, inner = scan.heads * scan.dim;
  causal_conv1d(team, mixer.conv, s, b.projected + inner, all, conv_states, conv_states, b.convolved);
  team.barrier();
  ScanArgs args = {scan,
                   {b.convolved, channels, scan.dim},
                   {b.convolved + inner, channels, scan.size},
                   {b.convolved + inner + scan.groups * scan.size, channels, scan.size},
                   b.projected + inner + channels,
                   all,
                   states,
                   states,
                   b.recurred};
  selective_scan(team, args, s);
  team.barrier();
  gated_norm(
      team, mixer.norm, [&](int64_t t, int64_t) { return b.recurred + t * inner; },
      [&](int64_t t, int64_t) { return b.projected + t * all; }, m, 1, inner, b.mixed);
}

// A gated short convolution after its projection.
inline void mix_short_conv(Team &team, const ip_mixer &mixer, const ip_sequences &s, bf16 *conv_states,
                           const MixerBuffers &b) {
  int64_t channels = mixer.conv.channels;
  auto for_each_row = [&](const LiveRows &rows, int64_t first, auto f) {
    for (int64_t t = rows.begin; t < rows.begin + rows.count; t++)
      f(b.projected + t * 3 * channels + first, t * channels + first);
  };
  causal_conv1d(
      team, mixer.conv, s, b.inputs, channels, conv_states, conv_states, b.convolved,
      [&](const LiveRows &rows, int64_t first, int64_t n) {
        for_each_row(rows, first, [&](const bf16 *row, int64_t at) {
          multiply_entries(row, row + 2 * channels, n, b.inputs + at);
        });
      },
      [&](const LiveRows &rows, int64_t first, int64_t n) {
        for_each_row(rows, first, [&](const bf16 *row, int64_t at) {
          multiply_entries(row + channels, b.convolved + at, n, b.mixed + at);
        });
      });
}

// buffers.mixed [tokens, o.k] from x [tokens, width], and the states after the step. Every thread of the team calls it;
// complete on return.
inline void mix_tokens(Team &team, const ip_mixer &mixer, const ip_sequences &s, const bf16 *x, bf16 *conv_states,
                       float *states, const MixerBuffers &buffers) {
  int64_t m = s.start[s.sequences];
  project_inputs(team, mixer, x, m, buffers);
  team.barrier();
  switch (mixer.kind) {
    case IP_DELTA_NET: mix_delta_net(team, mixer, s, conv_states, states, m, buffers); break;
    case IP_KIMI_DELTA: mix_kimi_delta(team, mixer, s, conv_states, states, m, buffers); break;
    case IP_MAMBA2: mix_mamba2(team, mixer, s, conv_states, states, m, buffers); break;
    default: mix_short_conv(team, mixer, s, conv_states, buffers);
  }
  team.barrier();
}

}  // namespace
