// Products of a weight of any kind with few rows of activations, on all threads of the team: y = x w^T + bias. The
// layers of few tokens (model/) and isa_entries.h call it; it chooses between the products for bf16, FP8, int8, int6,
// int4, MXFP4 and W8A8 weights.
#pragma once
#include "products/w8a8.h"
#include "products/fp8.h"
#include "products/quantize_narrow.h"

namespace {

constexpr int64_t kMaxRowsAtOnce = 64;  // rows of activations that are multiplied at a time
constexpr int64_t kChunkBytes = 65536;  // bytes of a weight that a thread takes at a time
// And of one read row by row, which is slower in small pieces (decision 30).
constexpr int64_t kStreamedChunkBytes = 1048576;
// And of a weight that meets activations of 16 bits (decision 39), and of either half of a weight [gate | up].
#if defined(INFERPLANE_AMX)
constexpr int64_t kPanelChunkBytes = 65536, kGatedChunkBytes = 65536;
#else
constexpr int64_t kPanelChunkBytes = 262144, kGatedChunkBytes = 262144;
#endif

// Whether the weight is stored as rows of bf16 (kinds IP_BF16 and IP_BF16_REORDERABLE).
inline bool is_bf16(const ip_matrix &w) { return w.kind == IP_BF16 || w.kind == IP_BF16_REORDERABLE; }

// Whether a product with m rows reads w row by row (`dot_streamed`) in place of tiles: only on AMX, for kind
// IP_BF16_REORDERABLE, at most kMaxRowByRowRows rows and at least kMinStreamColumns columns. Called once per call, with
// all of the call's rows, and once per expert.
inline bool streams_row_by_row(const ip_matrix &w, int64_t m) {
  return kDotOnTiles && w.kind == IP_BF16_REORDERABLE && m <= kMaxRowByRowRows && w.k >= kMinStreamColumns;
}

// Bytes of one row of the weight, at least 1; scales do not count.
inline int64_t weight_row_bytes(const ip_matrix &w) {
  return max64(1, is_bf16(w) ? w.k * 2 : is_in_panels(w) ? columns_bytes(w, round_up(w.k, 16)) / 16 : w.k);
}

// Weight rows per chunk of `Team::for_each_chunk`: about kChunkBytes of w (kPanelChunkBytes of int8, int6, int4 and
// MXFP4, kStreamedChunkBytes if `row_by_row`, the result of `streams_row_by_row`), but at most a quarter of a thread's even share of the rows; rounded up to a multiple
// of 16, so with few rows a thread gets fewer than four chunks.
inline int64_t rows_per_chunk(const ip_matrix &w, bool row_by_row, int threads) {
  int64_t most = round_up((w.n + threads * 4 - 1) / (threads * 4), 16);
  int64_t panels = is_in_panels(w) && w.kind != IP_W8A8 ? kPanelChunkBytes : kChunkBytes;
  return max64(16, min64(round_up((row_by_row ? kStreamedChunkBytes : panels) / weight_row_bytes(w), 16), most));
}

// Gate rows per chunk for `count` weights [gate | up] with `inner` gate rows each, where a chunk takes as many up rows
// too: about kGatedChunkBytes of each half (half of kStreamedChunkBytes if `row_by_row`, the result of
// `streams_row_by_row`), but at most a quarter of a thread's even share; chunks of one weight are of one size, a
// multiple of 16 rows. Going from one half to the other loses the processor's prefetched stream (Zen 5: about half a
// microsecond), so these chunks are larger than those of `rows_per_chunk`. Tiles read 16 rows side by side, or 64 in
// large chunks, which is slower (26 GB/s; with 16 rows 28).
inline int64_t gated_rows_per_chunk(const ip_matrix &w, bool row_by_row, int64_t inner, int64_t count, int threads) {
  int64_t bytes = row_by_row ? kStreamedChunkBytes / 2 : kGatedChunkBytes;
  int64_t most = max64(16, min64(bytes / weight_row_bytes(w), inner * count / (threads * 4)));
  int64_t chunks = (inner + most - 1) / most;
  return round_up((inner + chunks - 1) / chunks, 16);
}

// The first row of the chunk that this thread takes first, of `total` rows in chunks of `chunk` rows, unless another
// thread has taken it; -1 if the thread has no chunks of its own.
inline int64_t first_row_of_thread(const Team &team, int64_t total, int64_t chunk) {
  int64_t row = team.first_chunk((total + chunk - 1) / chunk) * chunk;
  return row < total ? row : -1;
}

// Rows of activations in the form that the product with a kind of weight reads; the other forms are empty.
struct Activations {
  ActivationRows rows;
  Int16Activations q;
  Int8Activations bytes;
};

// out[i * ldo + j - first] = sum over all columns of w[j, .] x[i, .], for weight rows j first .. last and all rows i of
// x: float32, scales applied, without bias, overwritten. For kinds in panels, `first` is a multiple of 16. Computed by
// the calling thread, for a weight of any kind; x is `lay_out_activations` for w.
inline void multiply_rows(const ip_matrix &w, int64_t first, int64_t last, const Activations &x, float *out,
                          int64_t ldo) {
  if (is_bf16(w)) {
    const bf16 *rows = (const bf16 *)w.data + first * w.ld;
    bool row_by_row = kDotOnTiles && !x.rows.pairs;
    (row_by_row ? dot_streamed : dot)(rows, w.ld, last - first, w.k, x.rows, 0, out, ldo);
  } else if (w.kind == IP_FP8) {
    fp8_dot(w, first, last - first, x.rows, out, ldo, workspace(kWeightTile));
  } else if (w.kind == IP_W8A8) {
    w8a8_dot(w, first, last, x.bytes, out, ldo);
  } else {
    for (int64_t j = first; j < last; j += kLanes) {
      if (w.kind == IP_INT8 && w.group == 16)
        multiply_panel<IP_INT8, true>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.kind == IP_INT8)
        multiply_panel<IP_INT8>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.kind == IP_INT6)
        multiply_panel<IP_INT6, true>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.kind == IP_MXFP4 && w.group == 16)
        multiply_panel<IP_MXFP4, true>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.kind == IP_MXFP4 && w.input != IP_INPUT_INT16)
        multiply_panel<IP_MXFP4, false, true>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.kind == IP_MXFP4)
        multiply_panel<IP_MXFP4>(w, j / kLanes, x.q, out + j - first, ldo);
      else if (w.input != IP_INPUT_INT16)
        multiply_panel<IP_INT4, false, true>(w, j / kLanes, x.q, out + j - first, ldo);
      else
        multiply_panel<IP_INT4>(w, j / kLanes, x.q, out + j - first, ldo);
    }
  }
}

// Lays out m rows of w.k activations, where row(i) points to row i, in the form that products with w read: bf16, int16
// or int8. They are in workspaces of the calling thread, valid until its next call; each thread lays out its own copy,
// which is cheaper than a barrier. `first` is the row of w that the thread probably reads first; of kinds in panels it
// is prefetched meanwhile; -1: none. `row_by_row` is the result of `streams_row_by_row`.
template <class RowAt>
inline Activations lay_out_activations(const ip_matrix &w, int64_t m, int64_t first, bool row_by_row, RowAt row) {
  if (w.kind == IP_W8A8) {
    Int8Activations bytes = reserve_int8(workspace(kQuantizedRows), m, w);
    for (int64_t i = 0; i < m; i++) quantize_row(bytes, i, row(i), w.k);
    return {{}, {}, bytes};
  }
  Activations activations = {lay_out_rows(workspace(kActivationRows), m, w.k, row, !row_by_row), {}, {}};
  if (w.input != IP_INPUT_INT16)
    activations.q = quantize_narrow(workspace(kQuantizedRows), activations.rows, w);
  else if (is_in_panels(w))
    activations.q = quantize_int16(workspace(kQuantizedRows), activations.rows, w,
                      first < 0 ? nullptr : (const char *)w.data + first / kPanelRows * panel_bytes(w));
  return activations;
}

// Multiplies every row of x, where row(i) points to row i < m, with every row of w. The thread that computed them calls
// store_sums(i, j, n, sums): sums[0 .. n] are the results of row i for weight rows j .. j + n, in float32 without bias;
// it may change them. Every thread of the team calls it; all is stored after the next `barrier`.
template <class RowAt, class Store>
inline void multiply(Team &team, const ip_matrix &w, int64_t m, RowAt row, Store store_sums) {
  bool row_by_row = streams_row_by_row(w, m);
  int64_t chunk = rows_per_chunk(w, row_by_row, team.count);
  for (int64_t i0 = 0; i0 < m; i0 += kMaxRowsAtOnce) {
    int64_t tile = min64(kMaxRowsAtOnce, m - i0);
    Activations activations = lay_out_activations(w, tile, first_row_of_thread(team, w.n, chunk), row_by_row,
                                                  [&](int64_t i) { return row(i0 + i); });
    team.for_each_chunk(w.n, chunk, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += chunk) {
        int64_t n = min64(chunk, last - j);
        float *out = workspace(kProductSums)->reserve<float>(tile * (chunk + kLanes));
        multiply_rows(w, j, j + n, activations, out, chunk);
        for (int64_t i = 0; i < tile; i++) store_sums(i0 + i, j, n, out + i * chunk);
      }
    });
  }
}

// Adds the bias of weight rows j .. j + n to sums[0 .. n]; nothing if w has no bias.
inline void add_bias(const ip_matrix &w, int64_t j, int64_t n, float *sums) {
  if (!w.bias) return;
  for (int64_t c = 0; c < n; c++) sums[c] += bf16_to_float(w.bias[j + c]);
}

// to[0 .. n] = sums[0 .. n], rounded to bf16.
inline void store_bf16(bf16 *to, const float *sums, int64_t n) {
  for (int64_t c = 0; c < n; c += kLanes) store_bf16x16(to + c, load_f32x16(sums + c, n - c), n - c);
}

// y[i * ldy + j] = x w^T + bias, overwritten, for m rows i of x, which are ldx entries apart, and all w.n rows j of w;
// `out_is_float`: y is float32, else bf16. Every thread of the team calls it; y is complete after the next `barrier`.
inline void linear(Team &team, const ip_matrix &w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy,
                   int out_is_float) {
  multiply(
      team, w, m, [&](int64_t i) { return x + i * ldx; },
      [&](int64_t i, int64_t j, int64_t n, float *sums) {
        add_bias(w, j, n, sums);
        if (out_is_float)
          memcpy((float *)y + i * ldy + j, sums, (size_t)n * sizeof(float));
        else
          store_bf16((bf16 *)y + i * ldy + j, sums, n);
      });
}

// out[0 .. k] = row `row` of a weight of any kind in bf16, with its scales; a row of bf16 is copied.
inline void dequantize_row(const ip_matrix &w, int64_t row, bf16 *out) {
  if (is_bf16(w)) {
    memcpy(out, (const bf16 *)w.data + row * w.ld, (size_t)w.k * sizeof(bf16));
  } else if (w.kind == IP_FP8) {
    int64_t blocks = (w.k + kFp8Block - 1) / kFp8Block;
    fp8_row_to_bf16((const uint8_t *)w.data + row * w.ld, w.k, out);
    for (int64_t c = 0; c < w.k; c += kLanes)
      store_bf16x16(out + c, load_f32x16(out + c, w.k - c) * w.scale[row / w.group * blocks + c / kFp8Block], w.k - c);
  } else {
    for (int64_t g = 0; g * group_size(w) < w.k; g++) {
      float scale = panel_scale(w, row / kLanes, g)[row % kLanes];
      float minimum = panel_minimum(w, row / kLanes, g)[row % kLanes];
      for (int64_t c = g * group_size(w); c < min64(w.k, (g + 1) * group_size(w)); c++)
        out[c] = float_to_bf16((float)unpack_entry(w, row, c) * scale + minimum);
    }
  }
}

// `dequantize_row`, then times `factor` and rounded again.
inline void dequantize_row_times(const ip_matrix &w, int64_t row, float factor, bf16 *out) {
  dequantize_row(w, row, out);
  if (factor == 1.0f) return;
  for (int64_t c = 0; c < w.k; c += kLanes)
    store_bf16x16(out + c, load_f32x16(out + c, w.k - c) * factor, w.k - c);
}

// out [last - first, k], dense, = rows first .. last of a weight of any kind in bf16, with their scales. Every thread
// of the team calls it; `out` is complete after the next `barrier`.
inline void dequantize_rows(Team &team, const ip_matrix &w, int64_t first, int64_t last, bf16 *out) {
  team.for_each_chunk(last - first, 8, [&](int64_t a, int64_t b) {
    for (int64_t r = a; r < b; r++) dequantize_row(w, first + r, out + r * w.k);
  });
}

}  // namespace
