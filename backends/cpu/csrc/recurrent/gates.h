// Row by row in recurrent layers: norms with a gate, and the gates of the delta rule.
#pragma once
#include "recurrent/sequences.h"

namespace {

// The factor of a norm's result by its gate.
inline Floats gate_factor(const ip_norm_with_gate &norm, Floats gate) {
  return norm.sigmoid ? 1.0f / (1.0f + vexp(-gate)) : silu(gate);
}

// y = one row of d entries after its norm and its gate, as `ip_gated_norm`. norm.weight null: the gate alone.
inline void gated_norm_row(const ip_norm_with_gate &norm, const bf16 *x, const bf16 *gate, int64_t d, bf16 *y) {
  if (!norm.weight) {
    for_each_register(d, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
      store_floats(y + c, load_floats(x + c, m) * silu(load_floats(gate + c, m)), m);
    });
    return;
  }
  int64_t width = d / norm.groups;
  float *row = workspace(kRecurrentInputs)->reserve<float>(width);
  for (int64_t g = 0; g < norm.groups; g++, x += width, gate += width, y += width) {
    const float *weight = norm.weight + g * width;
    Floats squares = {};
    for_each_register(width, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
      Floats h = load_floats(x + c, m);
      if (norm.gate_first) h *= gate_factor(norm, load_floats(gate + c, m));
      squares = fma(h, h, squares);
      store_floats(row + c, h, m);
    });
    float inverse = inverse_rms(squares, width, norm.eps);
    for_each_register(width, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
      Floats h = load_floats(row + c, m) * inverse * load_floats(weight + c, m);
      if (!norm.gate_first) h *= gate_factor(norm, load_floats(gate + c, m));
      store_floats(y + c, h, m);
    });
  }
}

// y [tokens, heads, d], dense, = `gated_norm_row` of each head of each token: x_at(t, h) and gate_at(t, h) point to the
// head's entries. Every thread of the team calls it; complete after the next `barrier`.
template <class X, class Gate>
inline void gated_norm(Team &team, const ip_norm_with_gate &norm, X x_at, Gate gate_at, int64_t tokens, int64_t heads,
                       int64_t d, bf16 *y) {
  team.for_each_chunk(tokens * heads, max64(1, 1024 / d), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      gated_norm_row(norm, x_at(i / heads, i % heads), gate_at(i / heads, i % heads), d, y + i * d);
  });
}

// The logarithm of what remains of a head's state, from a token's number a.
inline float delta_rule_decay(float a_log, float dt_bias, float a) {
  return -__builtin_expf(a_log) * softplus(a + dt_bias);
}
// decay[0 .. n] = the logarithms of what remains of n rows of a head's state, from a token's numbers a, bf16 or float.
template <class Number>
inline void channel_decays(float a_log, const float *dt_bias, const Number *a, int64_t n, float *decay) {
  float rate = -__builtin_expf(a_log);
  for_each_register(n, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
    store_floats(decay + c, rate * softplus(load_floats(a + c, m) + load_floats(dt_bias + c, m)), m);
  });
}
// The share of the correction, from a token's number b.
inline float delta_rule_beta(float b) { return 1.0f / (1.0f + __builtin_expf(-b)); }

}  // namespace
