// Hyper-connections: how a block reads one stream made of several, and how they go on. Arithmetic is in float32, in one
// order for a token whatever comes with it; streams are bf16 or float32. A function `x_entry` is `ip_x` of
// inferplane_cpu.h.
#pragma once
#include "runtime/thread_team.h"

namespace {

constexpr int64_t kMaxStreams = 8;
constexpr int64_t kHyperTokens = 4;  // tokens that are multiplied with one read of a row
constexpr int64_t kHyperColumns = 1024;  // entries of a stream that a thread takes at a time

// Rows of fn, of which each token has a product.
inline int64_t hyper_rows(const ip_hyper &hyper) {
  return hyper.head ? hyper.streams : hyper.streams * (hyper.streams + 2);
}

// One iteration: rows of m [n, n] divided by their sums plus eps, unless `columns_alone`; then columns by theirs.
inline __attribute__((always_inline)) void normalize_matrix(float *m, int64_t n, float eps, bool columns_alone) {
  if (!columns_alone)
    for (int64_t i = 0; i < n; i++) {
      float sum = 0;
      for (int64_t j = 0; j < n; j++) sum += m[i * n + j];
      for (int64_t j = 0; j < n; j++) m[i * n + j] /= sum + eps;
    }
  for (int64_t j = 0; j < n; j++) {
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += m[i * n + j];
    for (int64_t i = 0; i < n; i++) m[i * n + j] /= sum + eps;
  }
}

// m [n, n] becomes doubly stochastic in place, as the op `sinkhorn` defines it. By the calling thread.
inline void sinkhorn(float *m, int64_t n, int64_t iterations, float eps) {
  for (int64_t i = 0; i < n; i++) {
    float *row = m + i * n, top = row[0], sum = 0;
    for (int64_t j = 1; j < n; j++) top = row[j] > top ? row[j] : top;
    for_each_register(n, [&](int64_t c, int64_t have) { store_floats(row + c, vexp(load_floats(row + c, have) - top), have); });
    for (int64_t j = 0; j < n; j++) sum += row[j];
    for (int64_t j = 0; j < n; j++) row[j] = row[j] / sum + eps;
  }
  for (int64_t i = 0; i < iterations; i++)
    if (n == 4)
      normalize_matrix(m, 4, eps, i == 0);
    else
      normalize_matrix(m, n, eps, i == 0);
}

// sums[t * ld] = row times x[t] for COUNT tokens of n entries, `n` apart; SQUARES: x[t] times itself, and no row.
template <int COUNT, bool SQUARES, class T>
inline void multiply_streams(const float *row, const T *x, int64_t n, float *sums, int64_t ld) {
  Floats even[COUNT] = {}, odd[COUNT] = {};
  int64_t c = 0;
  for (; c + 2 * kRegisterLanes <= n; c += 2 * kRegisterLanes) {
#pragma GCC unroll 4
    for (int t = 0; t < COUNT; t++) {
      Floats a = load_floats(x + t * n + c), b = load_floats(x + t * n + c + kRegisterLanes);
      even[t] = fma(a, SQUARES ? a : load_floats(row + c), even[t]);
      odd[t] = fma(b, SQUARES ? b : load_floats(row + c + kRegisterLanes), odd[t]);
    }
  }
  for (; c < n; c += kRegisterLanes)
#pragma GCC unroll 4
    for (int t = 0; t < COUNT; t++) {
      Floats a = load_floats(x + t * n + c, n - c);
      even[t] = fma(a, SQUARES ? a : load_floats(row + c, n - c), even[t]);
    }
  for (int t = 0; t < COUNT; t++) sums[t * ld] = sum_lanes(even[t] + odd[t]);
}

// The same, of `row`, or of squares if it is null.
template <int COUNT, class T>
inline void multiply_row(const float *row, const T *x, int64_t n, float *sums, int64_t ld) {
  if (row)
    multiply_streams<COUNT, false>(row, x, n, sums, ld);
  else
    multiply_streams<COUNT, true>(row, x, n, sums, ld);
}

// sums [tokens, rows + 1] = the products of each token's streams with the rows of fn, then the sum of their squares.
// Every thread of the team calls it; complete after the next `barrier`.
template <class T>
inline void project_streams(Team &team, const ip_hyper &hyper, const T *x, int64_t tokens, float *sums) {
  int64_t rows = hyper_rows(hyper), n = hyper.streams * hyper.width, ld = rows + 1;
  int64_t blocks = (tokens + kHyperTokens - 1) / kHyperTokens;
  team.for_each_chunk(blocks * ld, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      int64_t t = u / ld * kHyperTokens, r = u % ld, count = min64(kHyperTokens, tokens - t);
      const float *row = r < rows ? hyper.fn + r * n : nullptr;
      float *to = sums + t * ld + r;
      if (count == kHyperTokens)
        multiply_row<kHyperTokens>(row, x + t * n, n, to, ld);
      else
        for (int64_t i = 0; i < count; i++) multiply_row<1>(row, x + (t + i) * n, n, to + i * ld, ld);
    }
  });
}

// to[0 .. n] = factor * sigmoid(w inverse scale + base) + eps.
inline void stream_factors(const float *w, float inverse, float scale, const float *base, int64_t n, float factor,
                           float eps, float *to) {
  for_each_register(n, [&](int64_t c, int64_t have) {
    Floats v = load_floats(w + c, have) * inverse * scale + load_floats(base + c, have);
    store_floats(to + c, factor / (1.0f + vexp(-v)) + eps, have);
  });
}

// `ip_hyper_pre`; `sums` has space for each token's products and one number more. Every thread of the team calls it;
// complete after the next `barrier`.
template <class T>
inline void hyper_pre(Team &team, const ip_hyper &hyper, const T *x, int64_t tokens, float *sums, T *y, float *post,
                      float *mix) {
  project_streams(team, hyper, x, tokens, sums);
  team.barrier();
  int64_t n = hyper.streams, width = hyper.width, rows = hyper_rows(hyper);
  int64_t pieces = (width + kHyperColumns - 1) / kHyperColumns;
  team.for_each_chunk(tokens * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      int64_t t = u / pieces, begin = u % pieces * kHyperColumns, end = min64(width, begin + kHyperColumns);
      const float *w = sums + t * (rows + 1);
      float pre[kLanes], inverse = 1.0f / __builtin_sqrtf(w[rows] / (float)(n * width) + hyper.norm_eps);
      stream_factors(w, inverse, hyper.scale[0], hyper.base, n, 1.0f, hyper.eps, pre);
      const T *from = x + t * n * width;
      for (int64_t c = begin; c < end; c += kRegisterLanes) {
        Floats sum = {};
        for (int64_t s = 0; s < n; s++) sum = fma(splat_floats(pre[s]), load_floats(from + s * width + c, end - c), sum);
        store_floats(y + t * width + c, sum, end - c);
      }
      if (begin || hyper.head) continue;
      stream_factors(w + n, inverse, hyper.scale[1], hyper.base + n, n, 2.0f, 0.0f, post + t * n);
      float *logits = mix + t * n * n;
      for (int64_t i = 0; i < n * n; i++) logits[i] = w[2 * n + i] * inverse * hyper.scale[2] + hyper.base[2 * n + i];
      if (hyper.iterations) sinkhorn(logits, n, hyper.iterations, hyper.sinkhorn_eps);
    }
  });
}

// `ip_hyper_post`. Every thread of the team calls it; complete after the next `barrier`.
template <class T>
inline void hyper_post(Team &team, const ip_hyper &hyper, const T *y, const T *x, const float *post, const float *mix,
                       int64_t tokens, T *out) {
  int64_t n = hyper.streams, width = hyper.width, pieces = (width + kHyperColumns - 1) / kHyperColumns;
  team.for_each_chunk(tokens * pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      int64_t t = u / pieces, begin = u % pieces * kHyperColumns, end = min64(width, begin + kHyperColumns);
      for (int64_t c = begin; c < end; c += kRegisterLanes) {
        Floats streams[kMaxStreams], result = load_floats(y + t * width + c, end - c);
        for (int64_t s = 0; s < n; s++) streams[s] = load_floats(x + (t * n + s) * width + c, end - c);
        for (int64_t k = 0; k < n; k++) {
          Floats sum = splat_floats(post[t * n + k]) * result;
          for (int64_t s = 0; s < n; s++) sum = fma(splat_floats(mix[(t * n + s) * n + k]), streams[s], sum);
          store_floats(out + (t * n + k) * width + c, sum, end - c);
        }
      }
    }
  });
}

// `ip_hyper_pre`: y, post and mix of streams; of a head y alone.
void hyper_pre_entry(const ip_hyper *hyper, const void *x, int64_t tokens, void *y, float *post, float *mix) {
  float *sums = workspace(kHyperSums)->reserve<float>(tokens * (hyper_rows(*hyper) + 1));
  run_on_team(tokens * hyper_rows(*hyper) * hyper->streams * hyper->width, [&](Team &team) {
    if (hyper->wide)
      hyper_pre(team, *hyper, (const float *)x, tokens, sums, (float *)y, post, mix);
    else
      hyper_pre(team, *hyper, (const bf16 *)x, tokens, sums, (bf16 *)y, post, mix);
  });
}

// `ip_hyper_post`: the streams behind a block.
void hyper_post_entry(const ip_hyper *hyper, const void *y, const void *x, const float *post, const float *mix,
                      int64_t tokens, void *out) {
  run_on_team(tokens * hyper->streams * hyper->width / 2, [&](Team &team) {
    if (hyper->wide)
      hyper_post(team, *hyper, (const float *)y, (const float *)x, post, mix, tokens, (float *)out);
    else
      hyper_post(team, *hyper, (const bf16 *)y, (const bf16 *)x, post, mix, tokens, (bf16 *)out);
  });
}

// `ip_sinkhorn`: m [count, n, n], changed in place.
void sinkhorn_entry(float *m, int64_t count, int64_t n, int64_t iterations, float eps) {
  run_on_team(count * n * n * iterations, [&](Team &team) {
    team.for_each_chunk(count, 8, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) sinkhorn(m + i * n * n, n, iterations, eps);
    });
  });
}

}  // namespace
