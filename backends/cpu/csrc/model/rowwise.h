// Operations on single rows between the products: RMS norm, gated activations, rotary positions. Each exists for one
// row (called by the layer kernels) and for all rows of a call, divided between the threads (called by isa_entries.h).
// Arithmetic is in float32, results are rounded to bf16 once.
#pragma once
#include "runtime/thread_team.h"

namespace {

// s = x + r rounded to bf16, as the op's definition rounds it, then y = norm(s), for one row of d entries. r null: s is
// x. s null: only y is written; then r must be null too. y may be x.
inline void rms_norm_row(const bf16 *x, const bf16 *r, const ip_norm &norm, int64_t d, bf16 *s, bf16 *y) {
  Floats squares = {};
  for_each_register(d, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
    Floats v = load_floats(x + c, n);
    if (r) v = round_to_bf16(v + load_floats(r + c, n));
    if (s) store_floats(s + c, v, n);
    squares = fma(v, v, squares);
  });
  float inverse = inverse_rms(squares, d, norm.eps);
  const bf16 *from = s ? s : x;
  for_each_register(d, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
    store_floats(y + c, load_floats(from + c, n) * inverse * (load_floats(norm.weight + c, n) + norm.offset), n);
  });
}

// `rms_norm_row` of after(x) rounded to bf16 in place of x, if there is a norm `after`; then r may not be null.
inline void rms_norm_row_after(const ip_norm &after, const bf16 *x, const bf16 *r, const ip_norm &norm, int64_t d,
                               bf16 *s, bf16 *y) {
  if (after.weight) {
    bf16 *normed = workspace(kAfterNormRow)->reserve<bf16>(d);
    rms_norm_row(x, nullptr, after, d, nullptr, normed);
    x = normed;
  }
  rms_norm_row(x, r, norm, d, s, y);
}

constexpr ip_gate_limits kNoLimits = {__builtin_inff(), __builtin_inff(), __builtin_inff()};

// f(gate) * up of each lane within limits; f is one of ip_activation. NaN stays NaN.
inline Floats multiply_gate(Floats gate, Floats up, int32_t f, const ip_gate_limits &limits) {
  gate = gate > limits.input ? splat_floats(limits.input) : gate;
  up = up > limits.other ? splat_floats(limits.other) : up;
  up = up < -limits.other ? splat_floats(-limits.other) : up;
  Floats activated = activate(gate, f);
  return (activated > limits.output ? splat_floats(limits.output) : activated) * up;
}

// y[c] = f(gate[c]) * up[c] within limits, for d entries; f is one of ip_activation.
inline void activation_mul_row(const bf16 *gate, const bf16 *up, int64_t d, int32_t f, const ip_gate_limits &limits,
                               bf16 *y) {
  for (int64_t c = 0; c < d; c += kRegisterLanes)
    store_floats(y + c, multiply_gate(load_floats(gate + c, d - c), load_floats(up + c, d - c), f, limits), d - c);
}

// y = one head of `dim` entries, rotated. `table` holds the cosines, then the sines of the head's position, dim / 2
// each. `interleaved`: entries 2c and 2c + 1 are a pair; else c and c + dim / 2. y may be x.
inline void rope_head(const bf16 *x, const float *table, int64_t dim, int interleaved, bf16 *y) {
  int64_t half = dim / 2;
  const float *cosine = table, *sine = table + half;
  if (interleaved) {
    for (int64_t c = 0; c < half; c++) {
      float a = bf16_to_float(x[2 * c]), b = bf16_to_float(x[2 * c + 1]);
      y[2 * c] = float_to_bf16(a * cosine[c] - b * sine[c]);
      y[2 * c + 1] = float_to_bf16(b * cosine[c] + a * sine[c]);
    }
    return;
  }
  for (int64_t c = 0; c < half; c += kRegisterLanes) {
    int64_t n = half - c;
    Floats a = load_floats(x + c, n), b = load_floats(x + half + c, n), co = load_floats(cosine + c, n),
           si = load_floats(sine + c, n);
    store_floats(y + c, a * co - b * si, n);
    store_floats(y + half + c, b * co + a * si, n);
  }
}

// y = one head of DIM entries after its RMS norm, if there is one, and its rotation, where entries c and c +
// DIM / 2 are a pair; all of the head is in registers.
template <int DIM>
inline void norm_and_rope_in_registers(const bf16 *x, const ip_norm &norm, const float *table, bf16 *y) {
  constexpr int kRegisters = DIM / kRegisterLanes;
  Floats v[kRegisters];
#pragma GCC unroll 16
  for (int i = 0; i < kRegisters; i++) v[i] = load_floats(x + i * kRegisterLanes);
  if (norm.weight) {
    Floats squares = {};
#pragma GCC unroll 16
    for (int i = 0; i < kRegisters; i++) squares = fma(v[i], v[i], squares);
    float inverse = inverse_rms(squares, DIM, norm.eps);
#pragma GCC unroll 16
    for (int i = 0; i < kRegisters; i++)
      v[i] = round_to_bf16(v[i] * inverse * (load_floats(norm.weight + i * kRegisterLanes) + norm.offset));
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRegisters / 2; i++) {
    Floats a = v[i], b = v[kRegisters / 2 + i], co = load<Floats>(table + i * kRegisterLanes),
           si = load<Floats>(table + (kRegisters / 2 + i) * kRegisterLanes);
    store_floats(y + i * kRegisterLanes, a * co - b * si);
    store_floats(y + (kRegisters / 2 + i) * kRegisterLanes, b * co + a * si);
  }
}

// y = one head after `rms_norm_row`, if there is a norm, then `rope_head` of its first `turned` entries, to the same
// bits. `head_buffer` has space for one head and may be overwritten.
inline void norm_and_rope(const bf16 *x, const ip_norm &norm, const float *table, int64_t dim, int64_t turned,
                          int interleaved, bf16 *head_buffer, bf16 *y) {
  if (turned < dim) {
    if (norm.weight) rms_norm_row(x, nullptr, norm, dim, nullptr, head_buffer), x = head_buffer;
    rope_head(x, table, turned, interleaved, y);
    memcpy(y + turned, x + turned, (size_t)(dim - turned) * sizeof(bf16));
    return;
  }
  if (!interleaved && dim == 64) return norm_and_rope_in_registers<64>(x, norm, table, y);
  if (!interleaved && dim == 128) return norm_and_rope_in_registers<128>(x, norm, table, y);
  if (norm.weight) rms_norm_row(x, nullptr, norm, dim, nullptr, head_buffer), x = head_buffer;
  rope_head(x, table, dim, interleaved, y);
}

// `rms_norm_row_after` of m rows: rows of x are ldx entries apart, r, s and y are [m, d], dense; r and s may be null.
// Every thread of the team calls it; complete after the next `barrier`.
inline void rms_norm(Team &team, const ip_norm &after, const bf16 *x, int64_t ldx, const bf16 *r, const ip_norm &norm,
                     int64_t m, int64_t d, bf16 *s, bf16 *y) {
  team.for_each_chunk(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      rms_norm_row_after(after, x + i * ldx, r ? r + i * d : nullptr, norm, d, s ? s + i * d : nullptr, y + i * d);
  });
}

// y [m, d] = `activation_mul_row` of m rows [gate | up] of 2 d entries, which are ldx apart. Every thread of the team
// calls it; complete after the next `barrier`.
inline void activation_mul(Team &team, const bf16 *x, int64_t ldx, int64_t m, int64_t d, int32_t f,
                           const ip_gate_limits &limits, bf16 *y) {
  team.for_each_chunk(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) activation_mul_row(x + i * ldx, x + i * ldx + d, d, f, limits, y + i * d);
  });
}

// y [m, heads, dim], dense, = `rope_head` of every head of m rows: x [m, heads, dim] with strides of rows and heads;
// row i has position positions[i], a row of `table` [positions, dim]. Every thread of the team calls it; complete after
// the next `barrier`.
inline void rope(Team &team, const bf16 *x, int64_t row_stride, int64_t head_stride, const float *table,
                 const int64_t *positions, int64_t m, int64_t heads, int64_t dim, int interleaved, bf16 *y) {
  team.for_each_chunk(m, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      for (int64_t h = 0; h < heads; h++)
        rope_head(x + i * row_stride + h * head_stride, table + positions[i] * dim, dim, interleaved,
                  y + (i * heads + h) * dim);
  });
}

}  // namespace
