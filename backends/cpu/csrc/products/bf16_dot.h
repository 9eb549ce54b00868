// Products of bf16 weights with few rows of bf16 activations, summed in float32. linear.h calls it for weights,
// attention for scores (keys are the rows of a weight).
//
// `dot` sums a result in one order of operations on an instruction set, whatever the number of rows, so results are
// batch-invariant. With AMX that is the order of the tiles; `dot_streamed` has another order there, for weights of the
// kind IP_BF16_REORDERABLE. Activations are laid out once per call (`ActivationRows`); weights are read where they lie,
// row-major.
#pragma once
#include "runtime/thread_team.h"

#if defined(INFERPLANE_AMX)
#include "products/amx_dot.h"
#endif

namespace {

#if defined(INFERPLANE_AMX)
constexpr bool kDotOnTiles = true;  // `dot` sums in the order of tile_products.h
#else
constexpr bool kDotOnTiles = false;
#endif
constexpr int kColumnStep = 32;  // columns that one step of the sums takes
constexpr int64_t kMinStreamColumns = 512;  // a row with fewer columns is not worth prefetching
constexpr int64_t kPrefetchBytes = 8192;  // how far ahead of its use a weight is prefetched

// m rows of activations in the forms that the products read.
struct ActivationRows {
  int64_t m, k, padded;  // columns, and columns rounded up to kColumnStep
  const bf16 *x;  // [m, padded], zeros from column k on
  // Without bf16 products: [m, padded], of each 32 entries the 16 even ones, then the 16 odd ones.
  const float *even_odd;
  const uint32_t *pairs;  // AMX: tiles of 16 rows, see amx_dot.h
};

// Copies m rows of k entries, where row(i) points to row i, to `buffers` of this thread in the forms that
// `ActivationRows` lists, with zeros in columns k .. padded. `tiles`: false if the rows are for `dot_streamed` alone;
// true for `dot`, which on AMX needs `pairs` too. The result is valid until the buffers are reserved again.
template <class RowAt>
inline ActivationRows lay_out_rows(Workspace buffers[2], int64_t m, int64_t k, RowAt row, bool tiles = kDotOnTiles) {
  ActivationRows r = {m, k, round_up(k, kColumnStep), nullptr, nullptr, nullptr};
  bf16 *x = buffers[0].reserve<bf16>(m * r.padded);
  for (int64_t i = 0; i < m; i++) {
    memcpy(x + i * r.padded, row(i), (size_t)k * sizeof(bf16));
    memset(x + i * r.padded + k, 0, (size_t)(r.padded - k) * sizeof(bf16));
  }
  r.x = x;
#if defined(INFERPLANE_AMX)
  if (!tiles) return r;
  uint32_t *pairs = buffers[1].reserve<uint32_t>(m * r.padded / 2);
  amx_interleave_pairs(x, m, r.padded, pairs);
  r.pairs = pairs;
#elif !defined(__AVX512BF16__)
  float *even_odd = buffers[1].reserve<float>(m * r.padded);
  for (int64_t i = 0; i < m * r.padded; i += kColumnStep) {
    U32x16 both = load<U32x16>(x + i);
    store(even_odd + i, (F32x16)(both << 16));
    store(even_odd + i + kLanes, (F32x16)(both & 0xffff0000u));
  }
  r.even_odd = even_odd;
#endif
  return r;
}

// Partial sums of one result. GCC keeps the 64-byte vectors F32x16 in memory if registers have 32 bytes, so AVX2 has
// its own.
#if defined(__AVX512F__)
typedef F32x16 PartialSums;
#else
typedef __m256 PartialSums;
#endif

// What a product prefetches while it reads NR rows of w. kNoPrefetch: nothing. kPrefetchNextRows: the NR rows that
// follow, since rows side by side are more streams than the processor prefetches by itself. kPrefetchAhead: what lies
// kPrefetchBytes ahead in memory, since hardware prefetching ends at a page.
enum Prefetch { kNoPrefetch, kPrefetchNextRows, kPrefetchAhead };

// out[(i0 + i) * ldo + j] = sum over the columns c < width of w[j, c] x[i0 + i, first + c], overwritten, for exactly NR
// rows j of w, which are ldw entries apart, and exactly MT rows i of x from row i0 on. `first` is a column of x, a
// multiple of kColumnStep, that meets column 0 of w. Columns of w from `width` on are not read.
template <int NR, int MT, Prefetch PREFETCH>
inline void dot_tile(const bf16 *w, int64_t ldw, int64_t width, const ActivationRows &x, int64_t i0, int64_t first,
                     float *out, int64_t ldo) {
  PartialSums acc[NR][MT] = {};
  int64_t whole = width / kColumnStep * kColumnStep;
  bf16 tail[NR][kColumnStep];
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
      for (int r = 0; r < NR; r++) acc[r][i] = (F32x16)_mm512_dpbf16_ps((__m512)acc[r][i], v[r], b);
    }
#elif defined(__AVX512F__)
    F32x16 low[NR], high[NR];
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++) {
      U32x16 both = load<U32x16>(at[r]);
      low[r] = (F32x16)(both << 16);
      high[r] = (F32x16)(both & 0xffff0000u);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      const float *b = x.even_odd + (i0 + i) * x.padded + first + c;
      F32x16 even = load<F32x16>(b), odd = load<F32x16>(b + kLanes);
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
        const float *b = x.even_odd + (i0 + i) * x.padded + first + c + half * 8;
        __m256 even = _mm256_loadu_ps(b), odd = _mm256_loadu_ps(b + kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < NR; r++)
          acc[r][i] = _mm256_fmadd_ps(high[r], odd, _mm256_fmadd_ps(low[r], even, acc[r][i]));
      }
    }
#endif
  };
  const bf16 *at[NR];
  for (int64_t c = 0; c < whole; c += kColumnStep) {
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++) {
      at[r] = w + r * ldw + c;
      if (PREFETCH == kPrefetchNextRows) _mm_prefetch((const char *)(at[r] + NR * ldw), _MM_HINT_T1);
      if (PREFETCH == kPrefetchAhead) _mm_prefetch((const char *)at[r] + kPrefetchBytes, _MM_HINT_T1);
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
      _mm_storeu_ps(out + (i0 + i) * ldo, sum_lanes_of_four(acc[0][i], acc[1][i], acc[2][i], acc[3][i]));
    return;
  }
#endif
  for (int r = 0; r < NR; r++)
    for (int i = 0; i < MT; i++) out[(i0 + i) * ldo + r] = sum_lanes(acc[r][i]);
}

// One `dot_tile` for NR rows of w and `rows` rows of x from row i on; `rows` is known at run time, 1 .. MT. `first` and
// `out` are those of `dot_tile`.
template <int NR, int MT, Prefetch PREFETCH>
inline void dot_tile_of_rows(const bf16 *w, int64_t ldw, int64_t width, const ActivationRows &x, int64_t i,
                             int64_t rows, int64_t first, float *out, int64_t ldo) {
  if constexpr (MT > 1)
    if (rows < MT) return dot_tile_of_rows<NR, MT - 1, PREFETCH>(w, ldw, width, x, i, rows, first, out, ldo);
  dot_tile<NR, MT, PREFETCH>(w, ldw, width, x, i, first, out, ldo);
}

// `dot_tile` for NR rows of w and all rows of x, which are divided into tiles of nearly equal size, at most MT rows
// each.
template <int NR, int MT, Prefetch PREFETCH>
inline void dot_rows(const bf16 *w, int64_t ldw, int64_t width, const ActivationRows &x, int64_t first, float *out,
                     int64_t ldo) {
  int64_t tiles = (x.m + MT - 1) / MT, rows = (x.m + tiles - 1) / tiles;
  for (int64_t i = 0; i < x.m; i += rows)
    dot_tile_of_rows<NR, MT, PREFETCH>(w, ldw, width, x, i, min64(rows, x.m - i), first, out, ldo);
}

// The sums of `dot` for n rows of w and all rows of x: NR rows of w at a time, then the rows that are left one by one;
// at most MT rows of x at a time. Without AMX tiles.
template <int NR, int MT, Prefetch PREFETCH>
inline void dot_block(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const ActivationRows &x, int64_t first,
                      float *out, int64_t ldo) {
  int64_t j = 0, whole = n / NR * NR;
  for (; j < whole; j += NR) dot_rows<NR, MT, PREFETCH>(w + j * ldw, ldw, width, x, first, out + j, ldo);
  for (j = whole; j < n; j++) dot_rows<1, MT, PREFETCH>(w + j * ldw, ldw, width, x, first, out + j, ldo);
}

#if defined(__AVX512BF16__)
constexpr int kDotTileRows = 6;
#elif defined(__AVX512F__)
constexpr int kDotTileRows = 4;
#else
constexpr int kDotTileRows = 2;
#endif

// The sums of `dot` without AMX tiles and without prefetching: for few rows of w at a time and few rows of x, where
// configuring tiles costs more than it saves. Attention calls it for scores. On AMX the order of summation differs from
// that of `dot`.
inline void dot_without_tiles(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const ActivationRows &x,
                              int64_t first, float *out, int64_t ldo) {
  dot_block<4, kDotTileRows, kNoPrefetch>(w, ldw, n, width, x, first, out, ldo);
}

#if defined(INFERPLANE_AMX)
// 31 to 36 of 37 GB/s; tiles, which read sixteen rows side by side, reach at most 29.
constexpr Prefetch kRowByRowPrefetch = kPrefetchAhead;
#else
constexpr Prefetch kRowByRowPrefetch = kNoPrefetch;  // measured on Zen 4 and 5
#endif
constexpr int64_t kMaxRowByRowRows = 2;  // with more rows of x, tiles are faster

// The sums of `dot` without AMX tiles, for long rows of w that come from memory, which it prefetches. With one or two
// rows of x the sums are done sooner than the bytes arrive; then reading one row of w after the other is what the
// processor prefetches best (only with AVX512BF16); with more rows of x, four rows of w are read side by side.
inline void dot_streamed(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const ActivationRows &x, int64_t first,
                         float *out, int64_t ldo) {
#if defined(__AVX512BF16__)
  if (x.m <= kMaxRowByRowRows)
    return dot_block<1, kMaxRowByRowRows, kRowByRowPrefetch>(w, ldw, n, width, x, first, out, ldo);
#endif
  dot_block<4, kDotTileRows, kPrefetchNextRows>(w, ldw, n, width, x, first, out, ldo);
}

// out[i * ldo + j] = sum over the columns c < width of w[j, c] x[i, first + c], in float32, overwritten, for n rows j
// of w, which are ldw entries apart, and all rows i of x. `first` is a column of x, a multiple of kColumnStep; w points
// to the column that meets it. Computed by the calling thread alone; on AMX, whole tiles of 16 rows of w use tiles.
inline void dot(const bf16 *w, int64_t ldw, int64_t n, int64_t width, const ActivationRows &x, int64_t first,
                float *out, int64_t ldo) {
  int64_t j = 0;
#if defined(INFERPLANE_AMX)
  j = amx_dot(w, ldw, n, width, x.pairs, x.m, x.padded, first, out, ldo);
#endif
  if (j == n) return;
  if (width >= kMinStreamColumns)
    dot_streamed(w + j * ldw, ldw, n - j, width, x, first, out + j, ldo);
  else
    dot_without_tiles(w + j * ldw, ldw, n - j, width, x, first, out + j, ldo);
}

}  // namespace
