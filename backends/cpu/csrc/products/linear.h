// A weight of any kind times rows of activations, shared by the team.
#pragma once
#include "bytes.h"
#include "fp8.h"

namespace {

constexpr int64_t kRowTile = 64;       // rows of activations at a time
constexpr int64_t kChunkBytes = 65536; // weights a thread takes at a time
constexpr int64_t kTurnBytes = 1048576;  // and of those read in turn, which is slower in small pieces (decision 30)
#if defined(INFERPLANE_AMX)
constexpr int64_t kGatedBytes = 65536;  // and of either half of two that belong together
#else
constexpr int64_t kGatedBytes = 262144;
#endif

inline Scratch *scratch(int which) {
  static thread_local Scratch all[32];
  return &all[which];
}

inline bool is_bf16(const ip_matrix &w) { return w.kind == IP_BF16 || w.kind == IP_BF16_REORDERABLE; }

// Whether products with m rows go through w row after row in place of tiles (dot.h). Asked once a call, of all
// its rows, and once for each expert.
inline bool in_turn(const ip_matrix &w, int64_t m) {
  return kDotOnTiles && w.kind == IP_BF16_REORDERABLE && m <= kInTurn && w.k >= kMinStreamColumns;
}

inline int64_t row_bytes(const ip_matrix &w) {
  return max64(1, is_bf16(w) ? w.k * 2 : w.kind == IP_INT4 ? w.k / 2 : w.k);
}

inline int64_t chunk_rows(const ip_matrix &w, bool turn, int threads) {
  int64_t most = round_up((w.n + threads * 4 - 1) / (threads * 4), 16);
  return max64(16, min64(round_up((turn ? kTurnBytes : kChunkBytes) / row_bytes(w), 16), most));
}

// Of the gate's rows, and as many of the other half's, of `inner` in each of `count` weights. Going from one half to the
// other costs what a processor has foreseen (Zen 5: some half a microsecond), so these are larger, and of one size. Tiles
// read 16 rows side by side, or 64 where there are so many: that is slower (26 GB/s, with 16 rows 28).
inline int64_t gated_rows(const ip_matrix &w, bool turn, int64_t inner, int64_t count, int threads) {
  int64_t bytes = turn ? kTurnBytes / 2 : kGatedBytes;
  int64_t most = max64(16, min64(bytes / row_bytes(w), inner * count / (threads * 4)));
  int64_t chunks = (inner + most - 1) / most;
  return round_up((inner + chunks - 1) / chunks, 16);
}

// The row that a thread takes first of `total` in chunks, unless another has; -1 where it has no chunks of its own.
inline int64_t first_row(const Team &team, int64_t total, int64_t chunk) {
  int64_t row = team.first_of((total + chunk - 1) / chunk) * chunk;
  return row < total ? row : -1;
}

struct Laid {
  Rows rows;
  Quantized q;
  Bytes bytes;
};

// float32 results of weight rows first .. last for all of x: out[i * ldo + j - first].
inline void products(const ip_matrix &w, int64_t first, int64_t last, const Laid &x, float *out, int64_t ldo) {
  if (is_bf16(w)) {
    const bf16 *rows = (const bf16 *)w.data + first * w.ld;
    bool turn = kDotOnTiles && !x.rows.pairs;
    (turn ? dot_stream : dot)(rows, w.ld, last - first, w.k, x.rows, 0, out, ldo);
  } else if (w.kind == IP_FP8) {
    fp8_dot(w, first, last - first, x.rows, out, ldo, scratch(5));
  } else if (w.kind == IP_W8A8) {
    bytes_dot(w, first, last, x.bytes, out, ldo);
  } else {
    for (int64_t j = first; j < last; j += kLanes) {
      if (w.kind == IP_INT8)
        quant_panel<IP_INT8>(w, j / kLanes, x.q, out + j - first, ldo);
      else
        quant_panel<IP_INT4>(w, j / kLanes, x.q, out + j - first, ldo);
    }
  }
}

// Activations as the products with `w` want them; each thread lays out its own, which is cheaper than a barrier. `first`
// is the row of w that the thread is likely to read first, -1 for none; `turn` is `in_turn`.
template <class RowAt>
inline Laid lay_out(const ip_matrix &w, int64_t m, int64_t first, bool turn, RowAt row) {
  if (w.kind == IP_W8A8) {
    Bytes bytes = bytes_in(scratch(2), m, w);
    for (int64_t i = 0; i < m; i++) fill_bytes(bytes, i, row(i), w.k);
    return {{}, {}, bytes};
  }
  Laid laid = {rows_of(scratch(0), m, w.k, row, !turn), {}, {}};
  if (w.kind == IP_INT8 || w.kind == IP_INT4)
    laid.q = quantize(scratch(2), laid.rows, w,
                      first < 0 ? nullptr : (const char *)w.data + first / kPanel * panel_bytes(w));
  return laid;
}

// Every row of x times every row of w; `put(i, j, n, sums)` receives n results of row i from column j on.
template <class RowAt, class Put>
inline void multiply(Team &team, const ip_matrix &w, int64_t m, RowAt row, Put put) {
  bool turn = in_turn(w, m);
  int64_t chunk = chunk_rows(w, turn, team.count);
  for (int64_t i0 = 0; i0 < m; i0 += kRowTile) {
    int64_t tile = min64(kRowTile, m - i0);
    Laid laid = lay_out(w, tile, first_row(team, w.n, chunk), turn, [&](int64_t i) { return row(i0 + i); });
    team.each(w.n, chunk, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += chunk) {
        int64_t n = min64(chunk, last - j);
        float *out = scratch(7)->get<float>(tile * (chunk + kLanes));
        products(w, j, j + n, laid, out, chunk);
        for (int64_t i = 0; i < tile; i++) put(i0 + i, j, n, out + i * chunk);
      }
    });
  }
}

inline void add_bias(const ip_matrix &w, int64_t j, int64_t n, float *sums) {
  if (!w.bias) return;
  for (int64_t c = 0; c < n; c++) sums[c] += widen1(w.bias[j + c]);
}

inline void put_bf16(bf16 *to, const float *sums, int64_t n) {
  for (int64_t c = 0; c < n; c += kLanes) store16(to + c, load_f(sums + c, n - c), n - c);
}

inline void linear(Team &team, const ip_matrix &w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy,
                   int wide) {
  multiply(
      team, w, m, [&](int64_t i) { return x + i * ldx; },
      [&](int64_t i, int64_t j, int64_t n, float *sums) {
        add_bias(w, j, n, sums);
        if (wide)
          memcpy((float *)y + i * ldy + j, sums, (size_t)n * sizeof(float));
        else
          put_bf16((bf16 *)y + i * ldy + j, sums, n);
      });
}

// A weight's row in bf16.
inline void expand_row(const ip_matrix &w, int64_t row, bf16 *out) {
  if (is_bf16(w)) {
    memcpy(out, (const bf16 *)w.data + row * w.ld, (size_t)w.k * sizeof(bf16));
  } else if (w.kind == IP_FP8) {
    int64_t blocks = (w.k + kBlock - 1) / kBlock;
    fp8_widen((const uint8_t *)w.data + row * w.ld, w.k, out);
    for (int64_t c = 0; c < w.k; c += kLanes)
      store16(out + c, load16(out + c, w.k - c) * w.scale[row / w.group * blocks + c / kBlock], w.k - c);
  } else {
    for (int64_t g = 0; g * group_of(w) < w.k; g++) {
      float scale = scale_of(w, row / kLanes, g)[row % kLanes];
      for (int64_t c = g * group_of(w); c < min64(w.k, (g + 1) * group_of(w)); c++)
        out[c] = narrow1((float)quant_entry(w, row, c) * scale);
    }
  }
}

inline void expand(Team &team, const ip_matrix &w, int64_t first, int64_t last, bf16 *out) {
  team.each(last - first, 8, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) expand_row(w, first + r, out + r * w.k);
  });
}

}  // namespace
