// Mixture of experts: the gated MLPs of the chosen experts, summed per token with the router's weights. Only chosen
// experts are read, each by all tokens that chose it; a token's results are summed in the order of its choices. The
// decoder layer and isa_entries.h call it.
#pragma once
#include "products/linear.h"
#include "model/rowwise.h"

namespace {

constexpr int64_t kMaxMoeTokens = 256;  // tokens at a time, which bounds the memory for results of single experts

// Some of the (token, choice) pairs of one expert.
struct MoeTask {
  int64_t expert, first, count;  // pairs order[first .. first + count]
};

// The arguments, and what `plan_moe` makes of them. gate_up and down are arrays of one matrix per expert.
struct MoeArgs {
  const ip_matrix *gate_up, *down;
  int64_t experts, tokens, top, inner, width;
  const bf16 *x;
  int64_t ldx;
  const int64_t *ids;  // [tokens, top], each of 0 .. experts - 1
  const float *weights;
  bf16 *out;  // [tokens, width]
  const ip_clamped_gate *clamped;  // of gate_up whose rows alternate; null: silu, rows are gate, then up
  // Made by plan_moe.
  int64_t *order;  // pairs (token * top + choice), sorted by expert
  MoeTask *tasks;
  int64_t count;
  bf16 *hidden;  // [pairs, inner]
  float *results;  // [pairs, width]
  ip_gate_limits limits = kNoLimits;  // of gates that are not clamped
};

// Reserves the memory that `plan_moe` and the products fill, in `s`, for moe.tokens tokens; the leading thread calls
// it.
inline void reserve_moe(MoeArgs &moe, Workspace s[4]) {
  int64_t pairs = moe.tokens * moe.top;
  moe.order = s[0].reserve<int64_t>(pairs + moe.experts + 1);
  moe.tasks = s[1].reserve<MoeTask>(pairs + 1);
  moe.hidden = s[2].reserve<bf16>(pairs * moe.inner);
  moe.results = s[3].reserve<float>(pairs * moe.width);
}

// Fills moe.order, moe.tasks and moe.count from moe.ids: sorts the pairs by expert and makes tasks of at most
// kMaxRowsAtOnce pairs of one expert. One thread calls it.
inline void plan_moe(MoeArgs &moe) {
  int64_t pairs = moe.tokens * moe.top, *starts = moe.order + pairs;
  memset(starts, 0, (size_t)(moe.experts + 1) * sizeof(int64_t));
  for (int64_t p = 0; p < pairs; p++) starts[moe.ids[p] + 1]++;
  for (int64_t e = 0; e < moe.experts; e++) starts[e + 1] += starts[e];
  moe.count = 0;
  for (int64_t e = 0; e < moe.experts; e++)
    for (int64_t p = starts[e]; p < starts[e + 1]; p += kMaxRowsAtOnce)
      moe.tasks[moe.count++] = {e, p, min64(kMaxRowsAtOnce, starts[e + 1] - p)};
  for (int64_t p = 0; p < pairs; p++) moe.order[starts[moe.ids[p]]++] = p;
}

// Whether a product of w with the average number of pairs per task goes through it row by row (`streams_row_by_row`);
// it decides the size of chunks only.
inline bool mostly_row_by_row(const MoeArgs &moe, const ip_matrix &w) {
  return streams_row_by_row(w, moe.tokens * moe.top / max64(1, moe.count));
}

// to[c] = the gated result of pairs[2 c] and pairs[2 c + 1], for n of them, as `ip_clamped_gate` defines it.
inline void clamp_gate(const float *pairs, int64_t n, const ip_clamped_gate &by, bf16 *to) {
  const Floats most = splat_floats(by.limit), least = -most;
  for (int64_t c = 0; c < n; c += kRegisterLanes) {
    float gates[kRegisterLanes] = {}, ups[kRegisterLanes] = {};
    int64_t have = min64(kRegisterLanes, n - c);
    for (int64_t l = 0; l < have; l++) gates[l] = pairs[2 * (c + l)], ups[l] = pairs[2 * (c + l) + 1];
    Floats gate = load<Floats>(gates), up = load<Floats>(ups);
    gate = gate > most ? most : gate;
    up = up > most ? most : up, up = up < least ? least : up;
    store_floats(to + c, (up + 1.0f) * (gate / (1.0f + vexp(gate * -by.alpha))), have);
  }
}

// moe.hidden [pairs, inner] = the gated result of every pair (token * top + choice), with its expert's gate_up:
// silu(x gate^T) * (x up^T) within moe.limits, or as moe.clamped says. Every thread of the team calls it; complete after the next
// `barrier`.
inline void moe_gate_up(Team &team, const MoeArgs &moe) {
  int64_t laid_task = -1, laid_token = -1;  // a token that is alone with several experts is laid out once
  Activations laid = {};
  int64_t chunk =
      gated_rows_per_chunk(moe.gate_up[0], mostly_row_by_row(moe, moe.gate_up[0]), moe.inner, moe.count, team.count);
  int64_t chunks = (moe.inner + chunk - 1) / chunk;
  // Panels begin at multiples of 16 rows; if the up rows do not, all rows are taken at once.
  bool straddles = !moe.clamped && is_in_panels(moe.gate_up[0]) && moe.inner % kLanes;
  if (straddles) chunk = round_up(moe.inner, 16), chunks = 1;
  team.for_each_chunk(moe.count * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const MoeTask &t = moe.tasks[u / chunks];
      const ip_matrix &w = moe.gate_up[t.expert];
      int64_t token = t.count == 1 ? moe.order[t.first] / moe.top : -1;
      if (token < 0 ? laid_task != u / chunks : laid_token != token) {
        laid = lay_out_activations(w, t.count, u % chunks * chunk * (moe.clamped ? 2 : 1),
                       streams_row_by_row(w, t.count),
                       [&](int64_t r) { return moe.x + moe.order[t.first + r] / moe.top * moe.ldx; });
        laid_task = u / chunks, laid_token = token;
      }
      int64_t j = u % chunks * chunk, n = min64(chunk, moe.inner - j);
      int64_t ld = straddles ? round_up(w.n, 16) : chunk;
      float *gate = workspace(kProductSums)->reserve<float>(2 * t.count * (ld + kLanes)),
            *up = gate + t.count * (ld + kLanes);
      if (moe.clamped) {
        multiply_rows(w, 2 * j, 2 * (j + n), laid, gate, 2 * ld);
        for (int64_t i = 0; i < t.count; i++) {
          add_bias(w, 2 * j, 2 * n, gate + i * 2 * ld);
          clamp_gate(gate + i * 2 * ld, n, *moe.clamped, moe.hidden + moe.order[t.first + i] * moe.inner + j);
        }
        continue;
      }
      if (straddles) {
        multiply_rows(w, 0, w.n, laid, gate, ld);
        up = gate + moe.inner;
      } else {
        multiply_rows(w, j, j + n, laid, gate, ld);
        multiply_rows(w, moe.inner + j, moe.inner + j + n, laid, up, ld);
      }
      for (int64_t i = 0; i < t.count; i++) {
        bf16 *to = moe.hidden + moe.order[t.first + i] * moe.inner + j;
        add_bias(w, j, n, gate + i * ld), add_bias(w, moe.inner + j, n, up + i * ld);
        for (int64_t c = 0; c < n; c += kRegisterLanes)
          store_floats(to + c,
                       multiply_gate(load_floats(gate + i * ld + c, n - c), load_floats(up + i * ld + c, n - c), IP_SILU,
                                     moe.limits),
                       n - c);
      }
    }
  });
}

// moe.results [pairs, width] = hidden down^T of every pair in float32, with its expert's down and its bias, without
// weights. Every thread of the team calls it; complete after the next `barrier`.
inline void moe_down(Team &team, const MoeArgs &moe) {
  int64_t laid_task = -1;
  Activations laid = {};
  int64_t down_chunk = rows_per_chunk(moe.down[0], mostly_row_by_row(moe, moe.down[0]), team.count);
  int64_t down_chunks = (moe.width + down_chunk - 1) / down_chunk;
  team.for_each_chunk(moe.count * down_chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const MoeTask &t = moe.tasks[u / down_chunks];
      const ip_matrix &w = moe.down[t.expert];
      if (laid_task != u / down_chunks) {
        laid = lay_out_activations(w, t.count, u % down_chunks * down_chunk, streams_row_by_row(w, t.count),
                       [&](int64_t r) { return moe.hidden + moe.order[t.first + r] * moe.inner; });
        laid_task = u / down_chunks;
      }
      int64_t j = u % down_chunks * down_chunk, n = min64(down_chunk, moe.width - j);
      float *sums = workspace(kProductSums)->reserve<float>(t.count * (down_chunk + kLanes));
      multiply_rows(w, j, j + n, laid, sums, down_chunk);
      for (int64_t i = 0; i < t.count; i++) {
        add_bias(w, j, n, sums + i * down_chunk);
        memcpy(moe.results + moe.order[t.first + i] * moe.width + j, sums + i * down_chunk, (size_t)n * sizeof(float));
      }
    }
  });
}

// moe.out [tokens, width] = the sum of each token's results times moe.weights, in the order of its choices, rounded to
// bf16; `shared_result` [tokens, width] is added to that unless it is null. Every thread of the team calls it; complete
// after the next `barrier`.
inline void moe_sum(Team &team, const MoeArgs &moe, const bf16 *shared_result) {
  team.for_each_chunk(moe.tokens, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      for (int64_t c = 0; c < moe.width; c += kLanes) {
        F32x16 acc = F32x16{};
        for (int64_t j = 0; j < moe.top; j++)
          acc = fma(splat(moe.weights[t * moe.top + j]),
                    load_f32x16(moe.results + (t * moe.top + j) * moe.width + c, moe.width - c), acc);
        if (shared_result)
          acc = bf16_to_f32(f32_to_bf16(acc)) + load_f32x16(shared_result + t * moe.width + c, moe.width - c);
        store_bf16x16(moe.out + t * moe.width + c, acc, moe.width - c);
      }
  });
}

// All steps of the planned experts without shared ones, with the barriers between them. Every thread of the team calls
// it; moe.out is complete after the next `barrier`.
inline void moe(Team &team, const MoeArgs &moe) {
  moe_gate_up(team, moe);
  team.barrier();
  moe_down(team, moe);
  team.barrier();
  moe_sum(team, moe, nullptr);
}

}  // namespace
