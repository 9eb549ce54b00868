// Latent attention with the up-projection folded into the query and the output ("absorbed").
#pragma once
#include "attend.h"

namespace {

constexpr int64_t kFoldAhead = 32;  // lines of a panel of kv_b that are on their way
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

// Rows first .. first + n of kv_b in bf16: where they lie, or expanded from FP8.
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

// Tokens whose query is folded while a line of kv_b is at hand.
#ifdef __AVX512F__
constexpr int kFoldTokens = 4;
#else
constexpr int kFoldTokens = 1;
#endif
constexpr int kFoldColumns = 4;  // of a line of bytes, or of half a line of nibbles

// The sums of four registers' lanes, one after the other, always in the same tree.
inline void lane_sums(const V v[kFoldColumns], float *to) {
#ifdef __AVX512F__
  __m256 half[kFoldColumns];
  for (int e = 0; e < kFoldColumns; e++)
    half[e] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[e]), _mm512_extractf32x8_ps((__m512)v[e], 1));
#else
  const V *half = v;
#endif
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)half[0], (__m256)half[1]), _mm256_hadd_ps((__m256)half[2], (__m256)half[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

// sums[t, c] of MT tokens: q W_k for a head whose rows of kv_b stand in panels, of which a lane is a row: columns of a line
// are added up over the head's panels before lanes are. `by`: [group, panel, token, 16], an entry of the query times the
// row's scale; `less`: [group, token], what takes the entries' offset out of a sum.
template <int KIND, int MT>
inline void fold_panels(const ip_matrix &w, const uint8_t *head, int64_t panels, int64_t next, const float *by,
                        const float *less, int64_t tokens, float *sums, int64_t row) {
  constexpr int kParts = kLanes / kWide;
  const int64_t stride = panel_bytes(w), per_line = line_columns(w);
  for (int64_t line = 0; line * 64 < stride; line++) {
    const int64_t g = w.group ? line * per_line / w.group : 0;
    const int64_t soon = (line + kFoldAhead) * 64 < stride ? kFoldAhead * 64 : next + kFoldAhead * 64 - stride;
    constexpr int kHalves = KIND == IP_INT4 ? 2 : 1;
    for (int h = 0; h < kHalves; h++) {
      V sum[MT][kFoldColumns];
#pragma GCC unroll 4
      for (int t = 0; t < MT; t++)
#pragma GCC unroll 4
        for (int e = 0; e < kFoldColumns; e++) sum[t][e] = V{};
      for (int64_t p = 0; p < panels; p++) {
        const uint8_t *at = head + p * stride + line * 64;
        if (!h) _mm_prefetch((const char *)at + soon, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
          N v = load<N>(at + part * kWide * 4);
          V x[MT];
#pragma GCC unroll 4
          for (int t = 0; t < MT; t++) x[t] = load<V>(by + ((g * panels + p) * tokens + t) * kLanes + part * kWide);
#pragma GCC unroll 4
          for (int e = 0; e < kFoldColumns; e++) {
            N entry = KIND == IP_INT8 ? v >> 8 * e & 255 : v >> (8 * e + 4 * h) & 15;
            V value = __builtin_convertvector(entry, V);
#pragma GCC unroll 4
            for (int t = 0; t < MT; t++) sum[t][e] = fma(x[t], value, sum[t][e]);
          }
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < MT; t++) {
        float *to = sums + t * row + line * per_line + h * kFoldColumns;
        lane_sums(sum[t], to);
        _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_set1_ps(less[g * tokens + t])));
      }
    }
  }
}
template <int KIND, int MT = kFoldTokens>
inline void fold_some(const ip_matrix &w, const uint8_t *head, int64_t panels, int64_t next, const float *by,
                      const float *less, int64_t tokens, float *sums, int64_t row) {
  if constexpr (MT > 1)
    if (tokens < MT) return fold_some<KIND, MT - 1>(w, head, panels, next, by, less, tokens, sums, row);
  fold_panels<KIND, MT>(w, head, panels, next, by, less, tokens, sums, row);
}

// sums[t, c]: q_nope[t0 + t, h] W_k[h] for n tokens, kv_b in panels; their rows that are no part of W_k[h] count nothing.
inline void fold_head(const Mla &m, int64_t h, int64_t t0, int64_t n, float *sums, int64_t row) {
  const ip_matrix &w = m.kv_b;
  int64_t from = h * (m.nope + m.value), first = from / kPanel, panels = (from + m.nope + kPanel - 1) / kPanel - first;
  int64_t groups = scale_groups(w), padded = panels * kPanel;
  float *by = scratch(2)->get<float>(groups * n * padded), *less = scratch(3)->get<float>(groups * n);
  bf16 *q = scratch(4)->get<bf16>(n * padded);
  memset(q, 0, (size_t)(n * padded) * sizeof(bf16));
  for (int64_t t = 0; t < n; t++)
    memcpy(q + t * padded + from % kPanel, m.q_nope + (t0 + t) * m.nope_row + h * m.nope_head, (size_t)m.nope * sizeof(bf16));
  for (int64_t g = 0; g < groups; g++)
    for (int64_t t = 0; t < n; t++) {
      F all = {};
      for (int64_t p = 0; p < panels; p++) {
        F each = load16(q + t * padded + p * kPanel) * scale_of(w, first + p, g);
        store(by + ((g * panels + p) * n + t) * kLanes, each);
        all = all + each;
      }
      less[g * n + t] = (float)-offset_of(w) * sum(all);
    }
  const uint8_t *head = (const uint8_t *)w.data + first * panel_bytes(w);
  int64_t next = h + 1 < m.heads ? (m.nope + m.value) / kPanel * panel_bytes(w) : 0;
  if (whole_bytes(w))
    fold_some<IP_INT8>(w, head, panels, next, by, less, n, sums, row);
  else
    fold_some<IP_INT4>(w, head, panels, next, by, less, n, sums, row);
}

// folded[t, h] = [q_nope[t, h] W_k[h] | q_rope[t, h]]; put(t, from, to) writes the latter.
template <class Put>
inline void mla_fold(Team &team, const Mla &m, Put put) {
  auto folded_row = [&](int64_t t, int64_t h, const float *sums) {
    bf16 *to = m.folded + (t * m.heads + h) * (m.latent + m.rope);
    put_bf16(to, sums, m.latent);
    put(t, m.q_rope + t * m.rope_row + h * m.rope_head, to + m.latent);
  };
  team.each(m.heads, 1, [&](int64_t first, int64_t last) {
    if (in_panels(m.kv_b)) {
      int64_t row = groups_of(m.kv_b) * group_of(m.kv_b);
      float *sums = scratch(8)->get<float>(kFoldTokens * row);
      for (int64_t h = first; h < last; h++)
        for (int64_t t0 = 0; t0 < m.tokens; t0 += kFoldTokens) {
          int64_t n = min64(kFoldTokens, m.tokens - t0);
          fold_head(m, h, t0, n, sums, row);
          for (int64_t t = 0; t < n; t++) folded_row(t0 + t, h, sums + t * row);
        }
      return;
    }
    float *sums = scratch(8)->get<float>(round_up(m.latent, kLanes));
    for (int64_t h = first; h < last; h++) {
      const bf16 *w = kv_b_rows(m, h * (m.nope + m.value), m.nope);
      for (int64_t t = 0; t < m.tokens; t++) {
        const bf16 *q = m.q_nope + t * m.nope_row + h * m.nope_head;
        memset(sums, 0, (size_t)round_up(m.latent, kLanes) * sizeof(float));
        int64_t n = 0;
        for (; t && n + kFoldRows <= m.nope; n += kFoldRows)
          add_rows<kFoldRows>(w + n * m.latent, m.latent, q + n, m.latent, sums);
        // From memory row by row, a stream that processors foresee; in narrow columns over all rows, with the sums in
        // registers, it came at less than a third of the speed.
        for (; n < m.nope; n++) add_rows<1>(w + n * m.latent, m.latent, q + n, m.latent, sums);
        folded_row(t, h, sums);
      }
    }
  });
}

// out[t, h] = mixed[t, h] W_v[h]^T
inline void mla_unfold(Team &team, const Mla &m) {
  team.each(m.heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t h = first; h < last; h++)
      for (int64_t t0 = 0; t0 < m.tokens; t0 += kRowTile) {
        int64_t n = min64(kRowTile, m.tokens - t0), from = h * (m.nope + m.value) + m.nope, before = 0, width = m.value;
        auto row = [&](int64_t t) { return m.mixed + ((t0 + t) * m.heads + h) * m.latent; };
        if (in_panels(m.kv_b)) before = from % kPanel, width = round_up(before + m.value, kPanel);
        float *sums = scratch(7)->get<float>(n * width + kLanes);
        if (in_panels(m.kv_b))
          products(m.kv_b, from - before, from - before + width, lay_out(m.kv_b, n, from - before, false, row), sums, width);
        else
          dot(kv_b_rows(m, from, m.value), m.latent, m.value, m.latent, rows_of(scratch(0), n, m.latent, row), 0, sums,
              width);
        for (int64_t t = 0; t < n; t++)
          put_bf16(m.out + ((t0 + t) * m.heads + h) * m.value, sums + t * width + before, m.value);
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
