// Latent attention (MLA) with the up-projection kv_b folded into the query and the output ("absorbed"): queries are
// taken to the latent space, attention runs on the cached latents, and results are projected to values. The decoder
// layer and isa_entries.h call it.
#pragma once
#include "attention/paged_attention.h"

namespace {

constexpr int64_t kFoldPrefetchLines = 32;  // lines of a panel of kv_b that are prefetched ahead
// Rows of kv_b that are folded at a time into a query after the first one, when they are in the cache.
constexpr int kFoldRows = 4;

// The arguments of folding and projecting; kv_b has `heads` times [nope | value] rows of `latent` columns.
struct MlaArgs {
  const bf16 *q_nope, *q_rope;
  int64_t nope_row, nope_head, rope_row, rope_head;  // strides of the queries
  ip_matrix kv_b;
  int64_t heads, nope, rope, value, latent, tokens;
  bf16 *folded;  // [tokens, heads, latent + rope]
  bf16 *mixed;  // [tokens, heads, latent]
  bf16 *out;  // [tokens, heads, value]
};

// Rows first .. first + n of kv_b [n, latent] in bf16, dense: a pointer to where they lie, or, expanded from FP8, to
// this thread's workspace kWeightTile. Not for panels.
inline const bf16 *load_kv_b_rows(const MlaArgs &mla, int64_t first, int64_t n) {
  if (mla.kv_b.kind == IP_BF16) return (const bf16 *)mla.kv_b.data + first * mla.kv_b.ld;
  bf16 *rows = workspace(kWeightTile)->reserve<bf16>(n * mla.latent);
  for (int64_t r = 0; r < n; r++) dequantize_row(mla.kv_b, first + r, rows + r * mla.latent);
  return rows;
}

// sums[c] += x[r] w[r * ld + c] for c < width and R rows r, in their order. `sums` has space for `width` rounded up to
// a multiple of 16.
template <int R>
inline void add_weighted_rows(const bf16 *w, int64_t ld, const bf16 *x, int64_t width, float *sums) {
  Floats factor[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) factor[r] = splat_floats(bf16_to_float(x[r]));
  for (int64_t c = 0; c < width; c += kRegisterLanes) {
    Floats sum = load<Floats>(sums + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      sum =
          fma(factor[r],
              width - c >= kRegisterLanes ? load_floats(w + r * ld + c) : load_floats(w + r * ld + c, width - c), sum);
    store(sums + c, sum);
  }
}

// Tokens whose queries are folded together while a line of kv_b is in a register.
#ifdef __AVX512F__
constexpr int kFoldTokens = 4;
#else
constexpr int kFoldTokens = 1;
#endif
constexpr int kFoldColumns = 4;  // columns of a line of bytes, or of half a line of nibbles

// to[e] = the sum of the lanes of v[e], for four registers, always added in the same tree.
inline void store_lane_sums(const Floats v[kFoldColumns], float *to) {
#ifdef __AVX512F__
  __m256 half[kFoldColumns];
  for (int e = 0; e < kFoldColumns; e++)
    half[e] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[e]), _mm512_extractf32x8_ps((__m512)v[e], 1));
#else
  const Floats *half = v;
#endif
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)half[0], (__m256)half[1]),
                                _mm256_hadd_ps((__m256)half[2], (__m256)half[3]));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

// sums[t * row + c] = q W_k, overwritten, for MT tokens t and all columns c of a head whose rows of kv_b stand in
// `panels` panels from `head` on. A lane is a row there, so columns of a line are added up over the head's panels, and
// their lanes last. `factors` [group, panel, token, 16] are entries of the query times scales of rows; `corrections`
// [group, token] remove the entries' offset from a sum. `tokens` is MT; `row` is the distance of rows of sums. `next`:
// bytes from this head to the next one, which is prefetched; 0: none. KIND is IP_INT8 or IP_INT4.
template <int KIND, int MT>
inline void fold_panel_columns(const ip_matrix &w, const uint8_t *head, int64_t panels, int64_t next,
                               const float *factors, const float *corrections, int64_t tokens, float *sums,
                               int64_t row) {
  constexpr int kParts = kLanes / kRegisterLanes;
  const int64_t stride = panel_bytes(w), per_line = columns_per_line(w);
  for (int64_t line = 0; line * 64 < stride; line++) {
    const int64_t g = w.group ? line * per_line / w.group : 0;
    const int64_t soon =
        (line + kFoldPrefetchLines) * 64 < stride ? kFoldPrefetchLines * 64 : next + kFoldPrefetchLines * 64 - stride;
    constexpr int kHalves = KIND == IP_INT4 ? 2 : 1;
    for (int h = 0; h < kHalves; h++) {
      Floats sum[MT][kFoldColumns];
#pragma GCC unroll 4
      for (int t = 0; t < MT; t++)
#pragma GCC unroll 4
        for (int e = 0; e < kFoldColumns; e++) sum[t][e] = Floats{};
      for (int64_t p = 0; p < panels; p++) {
        const uint8_t *at = head + p * stride + line * 64;
        if (!h) _mm_prefetch((const char *)at + soon, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int part = 0; part < kParts; part++) {
          Ints v = load<Ints>(at + part * kRegisterLanes * 4);
          Floats x[MT];
#pragma GCC unroll 4
          for (int t = 0; t < MT; t++)
            x[t] = load<Floats>(factors + ((g * panels + p) * tokens + t) * kLanes + part * kRegisterLanes);
#pragma GCC unroll 4
          for (int e = 0; e < kFoldColumns; e++) {
            Ints entry = KIND == IP_INT8 ? v >> 8 * e & 255 : v >> (8 * e + 4 * h) & 15;
            Floats value = __builtin_convertvector(entry, Floats);
#pragma GCC unroll 4
            for (int t = 0; t < MT; t++) sum[t][e] = fma(x[t], value, sum[t][e]);
          }
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < MT; t++) {
        float *to = sums + t * row + line * per_line + h * kFoldColumns;
        store_lane_sums(sum[t], to);
        _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_set1_ps(corrections[g * tokens + t])));
      }
    }
  }
}
// One `fold_panel_columns` for `tokens` tokens, a number known at run time, 1 .. MT.
template <int KIND, int MT = kFoldTokens>
inline void fold_panel_tokens(const ip_matrix &w, const uint8_t *head, int64_t panels, int64_t next,
                              const float *factors, const float *corrections, int64_t tokens, float *sums,
                              int64_t row) {
  if constexpr (MT > 1)
    if (tokens < MT)
      return fold_panel_tokens<KIND, MT - 1>(w, head, panels, next, factors, corrections, tokens, sums, row);
  fold_panel_columns<KIND, MT>(w, head, panels, next, factors, corrections, tokens, sums, row);
}

// sums[t * row + c] = q_nope[t0 + t, h] W_k[h], overwritten, for n tokens t, at most kFoldTokens, with kv_b in panels;
// `row` is num_groups * group_size of kv_b. Rows of the panels that are not of W_k[h] meet zeros. By the calling
// thread.
inline void fold_head(const MlaArgs &mla, int64_t h, int64_t t0, int64_t n, float *sums, int64_t row) {
  const ip_matrix &w = mla.kv_b;
  int64_t from = h * (mla.nope + mla.value), first = from / kPanelRows,
          panels = (from + mla.nope + kPanelRows - 1) / kPanelRows - first;
  int64_t groups = num_scale_groups(w), padded = panels * kPanelRows;
  float *factors = workspace(kFoldedFactors)->reserve<float>(groups * n * padded),
        *corrections = workspace(kFoldCorrections)->reserve<float>(groups * n);
  bf16 *q = workspace(kOneHead)->reserve<bf16>(n * padded);
  memset(q, 0, (size_t)(n * padded) * sizeof(bf16));
  for (int64_t t = 0; t < n; t++)
    memcpy(q + t * padded + from % kPanelRows, mla.q_nope + (t0 + t) * mla.nope_row + h * mla.nope_head,
           (size_t)mla.nope * sizeof(bf16));
  for (int64_t g = 0; g < groups; g++)
    for (int64_t t = 0; t < n; t++) {
      F32x16 all = {};
      for (int64_t p = 0; p < panels; p++) {
        F32x16 factor = load_f32x16(q + t * padded + p * kPanelRows) * panel_scale(w, first + p, g);
        store(factors + ((g * panels + p) * n + t) * kLanes, factor);
        all = all + factor;
      }
      corrections[g * n + t] = (float)-entry_offset(w) * sum_lanes(all);
    }
  const uint8_t *head = (const uint8_t *)w.data + first * panel_bytes(w);
  int64_t next = h + 1 < mla.heads ? (mla.nope + mla.value) / kPanelRows * panel_bytes(w) : 0;
  if (is_int8(w))
    fold_panel_tokens<IP_INT8>(w, head, panels, next, factors, corrections, n, sums, row);
  else
    fold_panel_tokens<IP_INT4>(w, head, panels, next, factors, corrections, n, sums, row);
}

// mla.folded[t, h] = [q_nope[t, h] W_k[h] | q_rope[t, h]] for all tokens and heads. store_rope(t, from, to) writes the
// second part: mla.rope entries from `from`, rotated or as they are, to `to`. Every thread of the team calls it;
// `folded` is complete after the next `barrier`.
template <class Store>
inline void fold_queries(Team &team, const MlaArgs &mla, Store store_rope) {
  auto folded_row = [&](int64_t t, int64_t h, const float *sums) {
    bf16 *to = mla.folded + (t * mla.heads + h) * (mla.latent + mla.rope);
    store_bf16(to, sums, mla.latent);
    store_rope(t, mla.q_rope + t * mla.rope_row + h * mla.rope_head, to + mla.latent);
  };
  team.for_each_chunk(mla.heads, 1, [&](int64_t first, int64_t last) {
    if (is_in_panels(mla.kv_b)) {
      int64_t row = num_groups(mla.kv_b) * group_size(mla.kv_b);
      float *sums = workspace(kScores)->reserve<float>(kFoldTokens * row);
      for (int64_t h = first; h < last; h++)
        for (int64_t t0 = 0; t0 < mla.tokens; t0 += kFoldTokens) {
          int64_t n = min64(kFoldTokens, mla.tokens - t0);
          fold_head(mla, h, t0, n, sums, row);
          for (int64_t t = 0; t < n; t++) folded_row(t0 + t, h, sums + t * row);
        }
      return;
    }
    float *sums = workspace(kScores)->reserve<float>(round_up(mla.latent, kLanes));
    for (int64_t h = first; h < last; h++) {
      const bf16 *w = load_kv_b_rows(mla, h * (mla.nope + mla.value), mla.nope);
      for (int64_t t = 0; t < mla.tokens; t++) {
        const bf16 *q = mla.q_nope + t * mla.nope_row + h * mla.nope_head;
        memset(sums, 0, (size_t)round_up(mla.latent, kLanes) * sizeof(float));
        int64_t n = 0;
        for (; t && n + kFoldRows <= mla.nope; n += kFoldRows)
          add_weighted_rows<kFoldRows>(w + n * mla.latent, mla.latent, q + n, mla.latent, sums);
        // Row by row, a stream from memory that processors prefetch; in narrow columns over all rows, with the sums in
        // registers, it ran at less than a third of the speed.
        for (; n < mla.nope; n++) add_weighted_rows<1>(w + n * mla.latent, mla.latent, q + n, mla.latent, sums);
        folded_row(t, h, sums);
      }
    }
  });
}

// mla.out[t, h] = mixed[t, h] W_v[h]^T for all tokens and heads. Every thread of the team calls it; `mixed` is
// complete; `out` is complete after the next `barrier`.
inline void project_values(Team &team, const MlaArgs &mla) {
  team.for_each_chunk(mla.heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t h = first; h < last; h++)
      for (int64_t t0 = 0; t0 < mla.tokens; t0 += kMaxRowsAtOnce) {
        int64_t n = min64(kMaxRowsAtOnce, mla.tokens - t0), from = h * (mla.nope + mla.value) + mla.nope, before = 0,
                width = mla.value;
        auto row = [&](int64_t t) { return mla.mixed + ((t0 + t) * mla.heads + h) * mla.latent; };
        if (is_in_panels(mla.kv_b)) before = from % kPanelRows, width = round_up(before + mla.value, kPanelRows);
        float *sums = workspace(kProductSums)->reserve<float>(n * width + kLanes);
        if (is_in_panels(mla.kv_b))
          multiply_rows(mla.kv_b, from - before, from - before + width,
                        lay_out_activations(mla.kv_b, n, from - before, false, row), sums, width);
        else
          dot(load_kv_b_rows(mla, from, mla.value), mla.latent, mla.value, mla.latent,
              lay_out_rows(workspace(kActivationRows), n, mla.latent, row), 0, sums, width);
        for (int64_t t = 0; t < n; t++)
          store_bf16(mla.out + ((t0 + t) * mla.heads + h) * mla.value, sums + t * width + before, mla.value);
      }
  });
}

// Latent attention: folds the queries, attends, projects to mla.out, with barriers in between. `args` and `plan` are
// those of attention in the latent space, from mla.folded to mla.mixed. Queries are rotated already. Every thread of
// the team calls it; `out` is complete after the next `barrier`.
inline void mla(Team &team, const MlaArgs &mla, const AttentionArgs &args, const AttentionPlan &plan) {
  fold_queries(team, mla,
               [&](int64_t, const bf16 *from, bf16 *to) { memcpy(to, from, (size_t)mla.rope * sizeof(bf16)); });
  team.barrier();
  attend(team, args, plan);
  team.barrier();
  project_values(team, mla);
}

}  // namespace
