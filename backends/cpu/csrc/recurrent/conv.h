// The causal convolution of recurrent layers: each channel by itself, along a sequence.
#pragma once
#include "recurrent/sequences.h"

namespace {

constexpr int64_t kConvChannels = 256;  // that a thread takes at a time: rows of them are streams of eight cache lines

// y[0 .. n] of one token = f(bias + the sum over i of weight[i] * inputs[i]) for channels first .. first + n. SIZE is
// conv.size, or 0: any.
template <int SIZE>
inline void convolve_row(const ip_convolution &conv, int64_t first, int64_t n, const bf16 *const *inputs, bf16 *y) {
  int64_t size = SIZE ? SIZE : conv.size;
  for_each_register(n, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
    Floats sum = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < size; i++)
      sum = fma(load_floats(inputs[i] + c, m), load_floats(conv.weight + i * conv.channels + first + c, m), sum);
    if (conv.bias) sum += load_floats(conv.bias + first + c, m);
    store_floats(y + c, conv.silu ? silu(sum) : sum, m);
  });
}

// Channels first .. first + n, at most kConvChannels, of one sequence. `before` and `after` are its states.
inline void convolve_channels(const ip_convolution &conv, const LiveRows &rows, int64_t first, int64_t n, const bf16 *x,
                              int64_t ldx, const bf16 *before, bf16 *after, bf16 *y) {
  int64_t tail = conv.size - 1;
  before += first * tail, after += first * tail;
  if (!rows.count) {
    if (before != after) memcpy(after, before, (size_t)(n * tail) * sizeof(bf16));
    return;
  }
  bf16 *past = workspace(kRecurrentInputs)->reserve<bf16>(tail * kConvChannels);
  const bf16 **inputs = workspace(kRecurrentPointers)->reserve<const bf16 *>(conv.size);
  for (int64_t i = 0; i < tail; i++)
    for (int64_t c = 0; c < n; c++) past[i * kConvChannels + c] = rows.begins ? 0 : before[c * tail + i];
  // The inputs of token t, counted from the first of this step.
  auto input = [&](int64_t t) { return t < 0 ? past + (t + tail) * kConvChannels : x + (rows.begin + t) * ldx + first; };
  auto convolve = conv.size == 4 ? convolve_row<4> : conv.size == 3 ? convolve_row<3> : convolve_row<0>;
  for (int64_t t = 0; t < rows.count; t++) {
    for (int64_t i = 0; i <= tail; i++) inputs[i] = input(t - tail + i);
    convolve(conv, first, n, inputs, y + (rows.begin + t) * conv.channels + first);
  }
  for (int64_t i = 0; i < tail; i++) {
    const bf16 *last = input(rows.count - tail + i);
    for (int64_t c = 0; c < n; c++) after[c * tail + i] = last[c];
  }
}

// y [tokens, channels], dense, and the states after the step, from rows of x, which are ldx apart, and the states before
// it; as `ip_causal_conv1d`. Before the channels first .. first + n of a sequence are computed, the thread calls
// begin(rows, first, n), which may fill them in x, and afterwards finish(rows, first, n). Every thread of the team calls
// it; complete after the next `barrier`.
template <class Begin, class Finish>
inline void causal_conv1d(Team &team, const ip_convolution &conv, const ip_sequences &s, const bf16 *x, int64_t ldx,
                          const bf16 *before, bf16 *after, bf16 *y, Begin begin, Finish finish) {
  int64_t blocks = (conv.channels + kConvChannels - 1) / kConvChannels, state = conv.channels * (conv.size - 1);
  team.for_each_chunk(s.sequences * blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      int64_t sequence = i / blocks, channel = i % blocks * kConvChannels;
      int64_t n = min64(kConvChannels, conv.channels - channel);
      LiveRows rows = live_rows(s, sequence);
      begin(rows, channel, n);
      convolve_channels(conv, rows, channel, n, x, ldx, before + row_before(s, sequence) * state,
                        after + row_after(s, sequence) * state, y);
      finish(rows, channel, n);
    }
  });
}
inline void causal_conv1d(Team &team, const ip_convolution &conv, const ip_sequences &s, const bf16 *x, int64_t ldx,
                          const bf16 *before, bf16 *after, bf16 *y) {
  auto nothing = [](const LiveRows &, int64_t, int64_t) {};
  causal_conv1d(team, conv, s, x, ldx, before, after, y, nothing, nothing);
}

}  // namespace
