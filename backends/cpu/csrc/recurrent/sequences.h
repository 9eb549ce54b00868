// The sequences of a step as recurrences see them: which rows a sequence has, and where its states are.
#pragma once
#include "runtime/thread_team.h"

namespace {

// A sequence's rows of this step without padding, and whether it begins in this step: then its states before are zeros,
// whatever is stored.
struct LiveRows {
  int64_t begin, count;
  bool begins;
};
inline LiveRows live_rows(const ip_sequences &s, int64_t sequence) {
  int64_t begin = s.start[sequence], stop = s.start[sequence + 1], count = 0;
  while (begin < stop && s.slots[begin] < 0) begin++;
  while (begin + count < stop && s.slots[begin + count] >= 0) count++;
  return {begin, count, count > 0 && s.lens[sequence] == count};
}

// The row of the states that a sequence reads, and of those that it writes.
inline int64_t row_before(const ip_sequences &s, int64_t sequence) { return s.read ? s.read[sequence] : sequence; }
inline int64_t row_after(const ip_sequences &s, int64_t sequence) { return s.write ? s.write[sequence] : sequence; }

// log(1 + exp(x)).
inline float softplus(float x) {
  return (x > 0.0f ? x : 0.0f) + __builtin_log1pf(__builtin_expf(-__builtin_fabsf(x)));
}

// log(1 + exp(x)) of each lane, to about 2e-7 of the result. With s = u / (2 + u), log(1 + u) = 2 (s + s^3 / 3 + ...).
inline Floats softplus(Floats x) {
  Floats u = vexp(x > 0.0f ? -x : x), s = u / (2.0f + u), square = s * s, sum = splat_floats(1.0f / 15);
#pragma GCC unroll 7
  for (int n = 13; n > 0; n -= 2) sum = fma(sum, square, splat_floats(1.0f / (float)n));
  return (x > 0.0f ? x : Floats{}) + 2.0f * s * sum;
}

// Entries of head h of a token.
inline const bf16 *head_at(const ip_head_rows &rows, int64_t token, int64_t h) {
  return rows.data + token * rows.row + h * rows.head;
}

}  // namespace
