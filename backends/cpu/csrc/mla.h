// Latent attention with the up-projection folded into the query and the output ("absorbed").
#pragma once
#include "attend.h"

namespace {

constexpr int kFoldRows = 4;  // of kv_b that are folded at a time into queries after the first, for which it is near

struct Mla {
  const bf16 *q_nope, *q_rope;
  int64_t nope_row, nope_head, rope_row, rope_head;  // strides
  ip_matrix kv_b;
  int64_t heads, nope, rope, value, latent, tokens;
  bf16 *folded;  // [tokens, heads, latent + rope]
  bf16 *mixed;   // [tokens, heads, latent]
  bf16 *out;     // [tokens, heads, value]
};

// Rows first .. first + n of kv_b in bf16: where they lie, or expanded.
inline const bf16 *kv_b_rows(const Mla &m, int64_t first, int64_t n) {
  if (m.kv_b.kind == IP_BF16) return (const bf16 *)m.kv_b.data + first * m.kv_b.ld;
  bf16 *rows = scratch(5)->get<bf16>(n * m.latent);
  for (int64_t r = 0; r < n; r++) expand_row(m.kv_b, first + r, rows + r * m.latent);
  return rows;
}

// sums += x[r] times row r of w, for R rows in their order.
template <int R>
inline void add_rows(const bf16 *w, int64_t ld, const bf16 *x, int64_t width, float *sums) {
  V each[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) each[r] = all(widen1(x[r]));
  for (int64_t c = 0; c < width; c += kWide) {
    V sum = load<V>(sums + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      sum = fma(each[r], width - c >= kWide ? load_v(w + r * ld + c) : load_v(w + r * ld + c, width - c), sum);
    store(sums + c, sum);
  }
}

// folded[t, h] = [q_nope[t, h] W_k[h] | q_rope[t, h]]; put(t, from, to) writes the latter.
template <class Put>
inline void mla_fold(Team &team, const Mla &m, Put put) {
  team.each(m.heads, 1, [&](int64_t first, int64_t last) {
    float *sums = scratch(8)->get<float>(round_up(m.latent, kLanes));
    for (int64_t h = first; h < last; h++) {
      const bf16 *w = kv_b_rows(m, h * (m.nope + m.value), m.nope);
      for (int64_t t = 0; t < m.tokens; t++) {
        const bf16 *q = m.q_nope + t * m.nope_row + h * m.nope_head;
        bf16 *to = m.folded + (t * m.heads + h) * (m.latent + m.rope);
        memset(sums, 0, (size_t)round_up(m.latent, kLanes) * sizeof(float));
        int64_t n = 0;
        for (; t && n + kFoldRows <= m.nope; n += kFoldRows)
          add_rows<kFoldRows>(w + n * m.latent, m.latent, q + n, m.latent, sums);
        // From memory row by row, a stream that processors foresee; in narrow columns over all rows, with the sums in
        // registers, it came at less than a third of the speed.
        for (; n < m.nope; n++) add_rows<1>(w + n * m.latent, m.latent, q + n, m.latent, sums);
        for (int64_t c = 0; c < m.latent; c += kLanes) store16(to + c, load<F>(sums + c), m.latent - c);
        put(t, m.q_rope + t * m.rope_row + h * m.rope_head, to + m.latent);
      }
    }
  });
}

// out[t, h] = mixed[t, h] W_v[h]^T
inline void mla_unfold(Team &team, const Mla &m) {
  team.each(m.heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t h = first; h < last; h++)
      for (int64_t t0 = 0; t0 < m.tokens; t0 += kRowTile) {
        int64_t n = min64(kRowTile, m.tokens - t0);
        Rows x = rows_of(scratch(0), n, m.latent,
                         [&](int64_t t) { return m.mixed + ((t0 + t) * m.heads + h) * m.latent; });
        float *sums = scratch(7)->get<float>(n * m.value + kLanes);
        dot(kv_b_rows(m, h * (m.nope + m.value) + m.nope, m.value), m.latent, m.value, m.latent, x, 0, sums, m.value);
        for (int64_t t = 0; t < n; t++)
          put_bf16(m.out + ((t0 + t) * m.heads + h) * m.value, sums + t * m.value, m.value);
      }
  });
}

inline void mla(Team &team, const Mla &m, const Attend &a, const AttendPlan &plan) {
  mla_fold(team, m, [&](int64_t, const bf16 *from, bf16 *to) { memcpy(to, from, (size_t)m.rope * sizeof(bf16)); });
  team.barrier();
  attend(team, a, plan);
  team.barrier();
  mla_unfold(team, m);
}

}  // namespace
