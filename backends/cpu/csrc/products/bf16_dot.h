// Rows of bf16 weights times a few rows of bf16 activations, summed in float32.
//
// Every instruction set has one order of operations for a result, whatever the number of rows, so results are
// batch-invariant: `dot`. With AMX that is the tiles' order; `dot_stream` has another one there, for weights of the kind
// IP_BF16_REORDERABLE. Activations are laid out once a call (`Rows`), weights are read where they lie, row-major.
#pragma once
#include "team.h"

#if defined(INFERPLANE_AMX)
#include "amx.h"
#endif

namespace {

#if defined(INFERPLANE_AMX)
constexpr bool kDotOnTiles = true;  // `dot` sums in the order of tiles.h
#else
constexpr bool kDotOnTiles = false;
#endif
constexpr int kStep = 32;  // entries that a step of the sums takes
constexpr int64_t kMinStreamColumns = 512;  // columns of a row that is worth bringing near
constexpr int64_t kAhead = 8192;  // bytes of a weight that are on their way

// m rows of activations as the products want them.
struct Rows {
  int64_t m, k, padded;  // columns, and rounded up to kStep
  const bf16 *x;         // [m, padded], zeros behind k
  const float *split;    // [m, padded]: of each 32 entries the 16 even ones, then the odd ones
  const uint32_t *pairs; // AMX: tiles of 16 rows, see amx.h
};

// `row(i)` points to the entries of row i; `tiles`: they are for `dot` where it takes tiles.
template <class RowAt>
inline Rows rows_of(Scratch scratch[2], int64_t m, int64_t k, RowAt row, bool tiles = kDotOnTiles) {
  Rows r = {m, k, round_up(k, kStep), nullptr, nullptr, nullptr};
  bf16 *x = scratch[0].get<bf16>(m * r.padded);
  for (int64_t i = 0; i < m; i++) {
    memcpy(x + i * r.padded, row(i), (size_t)k * sizeof(bf16));
    memset(x + i * r.padded + k, 0, (size_t)(r.padded - k) * sizeof(bf16));
  }
  r.x = x;
#if defined(INFERPLANE_AMX)
  if (!tiles) return r;
  uint32_t *pairs = scratch[1].get<uint32_t>(m * r.padded / 2);
  amx_pairs(x, m, r.padded, pairs);
  r.pairs = pairs;
#elif !defined(__AVX512BF16__)
  float *split = scratch[1].get<float>(m * r.padded);
  for (int64_t i = 0; i < m * r.padded; i += kStep) {
    U both = load<U>(x + i);
    store(split + i, (F)(both << 16));
    store(split + i + kLanes, (F)(both & 0xffff0000u));
  }
  r.split = split;
#endif
  (void)tiles;
  return r;
}

// Partial sums. GCC keeps the 64-byte vectors of F in memory where registers have 32 bytes, so AVX2 has its own.
#if defined(__AVX512F__)
typedef F Partial;
#else
typedef __m256 Partial;
#endif

// What is asked for while rows of w are read: nothing; the rows behind them, since rows side by side are more streams than
// the processor foresees; or what lies kAhead behind, since what it foresees ends at a page.
enum Ask { kNothing, kNextRows, kBehind };

// out[i * ldo + j] = sum over columns first .. first + width of w[j, .] x[i, .], for NR rows of w and MT of x.
template <int NR, int MT, Ask ASK>
inline void dot_tile(const bf16 *w, int64_t ldw, int64_t width, const Rows &x, int64_t i0, int64_t first, float *out,
                     int64_t ldo) {
  Partial acc[NR][MT] = {};
  int64_t whole = width / kStep * kStep;
  bf16 tail[NR][kStep];
  if (whole < width)
    for (int r = 0; r < NR; r++) {
      memset(tail[r], 0, sizeof tail[r]);
      memcpy(tail[r], w + r * ldw + whole, (size_t)(width - whole) * sizeof(bf16));
    }
  auto step = [&](int64_t c, const bf16 *const *at) __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
    __m512bh v[NR];
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++) v[r] = (__m512bh)_mm512_loadu_si512(at[r]);
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      __m512bh b = (__m512bh)_mm512_loadu_si512(x.x + (i0 + i) * x.padded + first + c);
#pragma GCC unroll 8
      for (int r = 0; r < NR; r++) acc[r][i] = (F)_mm512_dpbf16_ps((__m512)acc[r][i], v[r], b);
    }
#elif defined(__AVX512F__)
    F low[NR], high[NR];
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++) {
      U both = load<U>(at[r]);
      low[r] = (F)(both << 16);
      high[r] = (F)(both & 0xffff0000u);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      const float *b = x.split + (i0 + i) * x.padded + first + c;
      F even = load<F>(b), odd = load<F>(b + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < NR; r++) acc[r][i] = fma(high[r], odd, fma(low[r], even, acc[r][i]));
    }
#else
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m256 low[NR], high[NR];
#pragma GCC unroll 8
      for (int r = 0; r < NR; r++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(at[r] + half * 16));
        low[r] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        high[r] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000u)));
      }
#pragma GCC unroll 8
      for (int i = 0; i < MT; i++) {
        const float *b = x.split + (i0 + i) * x.padded + first + c + half * 8;
        __m256 even = _mm256_loadu_ps(b), odd = _mm256_loadu_ps(b + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < NR; r++)
          acc[r][i] = _mm256_fmadd_ps(high[r], odd, _mm256_fmadd_ps(low[r], even, acc[r][i]));
      }
    }
#endif
  };
  const bf16 *at[NR];
  for (int64_t c = 0; c < whole; c += kStep) {
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++) {
      at[r] = w + r * ldw + c;
      if (ASK == kNextRows) _mm_prefetch((const char *)(at[r] + NR * ldw), _MM_HINT_T1);
      if (ASK == kBehind) _mm_prefetch((const char *)at[r] + kAhead, _MM_HINT_T1);
    }
    step(c, at);
  }
  if (whole < width) {
    for (int r = 0; r < NR; r++) at[r] = tail[r];
    step(whole, at);
  }
#if defined(__AVX512F__)
  if constexpr (NR == 4) {
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++)
      _mm_storeu_ps(out + (i0 + i) * ldo, sums_of_four(acc[0][i], acc[1][i], acc[2][i], acc[3][i]));
    return;
  }
#endif
  for (int r = 0; r < NR; r++)
    for (int i = 0; i < MT; i++) out[(i0 + i) * ldo + r] = sum(acc[r][i]);
}

// Rows i .. i + rows of x, of which there are at most MT.
template <int NR, int MT, Ask ASK>
inline void dot_tiles(const bf16 *w, int64_t ldw, int64_t width, const Rows &x, int64_t i, int64_t rows, int64_t first,
                      float *out, int64_t ldo) {
  if constexpr (MT > 1)
    if (rows < MT) return dot_tiles<NR, MT - 1, ASK>(w, ldw, width, x, i, rows, first, out, ldo);
  dot_tile<NR, MT, ASK>(w, ldw, width, x, i, first, out, ldo);
}

template <int NR, int MT, Ask ASK>
inline void dot_rows(const bf16 *w, int64_t ldw, int64_t width, const Rows &x, int64_t first, float *out, int64_t ldo) {
  int64_t tiles = (x.m + MT - 1) / MT, rows = (x.m + tiles - 1) / tiles;
  for (int64_t i = 0; i < x.m; i += rows)
    dot_tiles<NR, MT, ASK>(w, ldw, width, x, i, min64(rows, x.m - i), first, out, ldo);
}

// As `dot`.
template <int NR, int MT, Ask ASK>
inline void dot_block(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const Rows &x, int64_t first, float *out,
                      int64_t ldo) {
  int64_t j = 0, whole = n / NR * NR;
  for (; j < whole; j += NR) dot_rows<NR, MT, ASK>(w + j * ldw, ldw, width, x, first, out + j, ldo);
  for (j = whole; j < n; j++) dot_rows<1, MT, ASK>(w + j * ldw, ldw, width, x, first, out + j, ldo);
}

#if defined(__AVX512BF16__)
constexpr int kDotTile = 6;
#elif defined(__AVX512F__)
constexpr int kDotTile = 4;
#else
constexpr int kDotTile = 2;
#endif

// As `dot`, without tiles: for few rows of w at a time and few of x, where setting up tiles costs more than it saves.
inline void dot_few(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const Rows &x, int64_t first, float *out,
                    int64_t ldo) {
  dot_block<4, kDotTile, kNothing>(w, ldw, n, width, x, first, out, ldo);
}

#if defined(INFERPLANE_AMX)
constexpr Ask kInTurnAsks = kBehind;  // 31 to 36 of 37 GB/s; tiles, which want sixteen rows side by side, have 29 at most
#else
constexpr Ask kInTurnAsks = kNothing;  // Zen 4 and 5
#endif
constexpr int64_t kInTurn = 2;  // rows of x at most

// As `dot_few`, for long rows of w that come from memory. With one or two rows of x the sums are done sooner than the
// bytes come: then one row of w after the other is what the processor foresees best.
inline void dot_stream(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const Rows &x, int64_t first, float *out,
                       int64_t ldo) {
#if defined(__AVX512BF16__)
  if (x.m <= kInTurn) return dot_block<1, kInTurn, kInTurnAsks>(w, ldw, n, width, x, first, out, ldo);
#endif
  dot_block<4, kDotTile, kNextRows>(w, ldw, n, width, x, first, out, ldo);
}

// out[i * ldo + j] for n rows w[j] and all rows x[i], over `width` columns of x that begin at `first` (a multiple of
// kStep); w begins at its own column 0.
inline void dot(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const Rows &x, int64_t first, float *out,
                int64_t ldo) {
  int64_t j = 0;
#if defined(INFERPLANE_AMX)
  j = amx_dot(w, ldw, n, width, x.pairs, x.m, x.padded, first, out, ldo);
#endif
  if (j == n) return;
  if (width >= kMinStreamColumns)
    dot_stream(w + j * ldw, ldw, n - j, width, x, first, out + j, ldo);
  else
    dot_few(w + j * ldw, ldw, n - j, width, x, first, out + j, ldo);
}

}  // namespace
