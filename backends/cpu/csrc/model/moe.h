// Mixture of experts: only chosen experts are read, each by all the tokens that chose it; sums in each token's order.
#pragma once
#include "linear.h"
#include "rowwise.h"

namespace {

constexpr int64_t kMoeTokens = 256;  // tokens at a time, which bounds the memory for results of single experts

// Some of the (token, choice) pairs of one expert.
struct MoeTask {
  int64_t expert, first, count;  // pairs order[first .. first + count]
};

struct Moe {
  const ip_matrix *gate_up, *down;
  int64_t experts, tokens, top, inner, width;
  const bf16 *x;
  int64_t ldx;
  const int64_t *ids;  // each of 0 .. experts - 1
  const float *weights;
  bf16 *out;  // [tokens, width]
  // made by plan_moe
  int64_t *order;  // pairs (token * top + choice) by expert
  MoeTask *tasks;
  int64_t count;
  bf16 *hidden;    // [pairs, inner]
  float *results;  // [pairs, width]
};

inline void reserve_moe(Moe &m, Scratch s[4]) {
  int64_t pairs = m.tokens * m.top;
  m.order = s[0].get<int64_t>(pairs + m.experts + 1);
  m.tasks = s[1].get<MoeTask>(pairs + 1);
  m.hidden = s[2].get<bf16>(pairs * m.inner);
  m.results = s[3].get<float>(pairs * m.width);
}

inline void plan_moe(Moe &m) {
  int64_t pairs = m.tokens * m.top, *starts = m.order + pairs;
  memset(starts, 0, (size_t)(m.experts + 1) * sizeof(int64_t));
  for (int64_t p = 0; p < pairs; p++) starts[m.ids[p] + 1]++;
  for (int64_t e = 0; e < m.experts; e++) starts[e + 1] += starts[e];
  m.count = 0;
  for (int64_t e = 0; e < m.experts; e++)
    for (int64_t p = starts[e]; p < starts[e + 1]; p += kRowTile)
      m.tasks[m.count++] = {e, p, min64(kRowTile, starts[e + 1] - p)};
  for (int64_t p = 0; p < pairs; p++) m.order[starts[m.ids[p]]++] = p;
}

// Whether most products with these experts go through them row after row.
inline bool mostly_in_turn(const Moe &m, const ip_matrix &w) { return in_turn(w, m.tokens * m.top / max64(1, m.count)); }

// The hidden entries of every pair.
inline void moe_gate_up(Team &team, const Moe &m) {
  int64_t laid_task = -1, laid_token = -1;  // a token that is alone with several experts is laid out once
  Laid laid = {};
  int64_t chunk = gated_rows(m.gate_up[0], mostly_in_turn(m, m.gate_up[0]), m.inner, m.count, team.count);
  int64_t chunks = (m.inner + chunk - 1) / chunk;
  // Panels begin at multiples of 16 rows; where the up rows do not, all rows are taken at once.
  bool straddles = in_panels(m.gate_up[0]) && m.inner % kLanes;
  if (straddles) chunk = round_up(m.inner, 16), chunks = 1;
  team.each(m.count * chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const MoeTask &t = m.tasks[u / chunks];
      const ip_matrix &w = m.gate_up[t.expert];
      int64_t token = t.count == 1 ? m.order[t.first] / m.top : -1;
      if (token < 0 ? laid_task != u / chunks : laid_token != token) {
        laid = lay_out(w, t.count, u % chunks * chunk, in_turn(w, t.count),
                       [&](int64_t r) { return m.x + m.order[t.first + r] / m.top * m.ldx; });
        laid_task = u / chunks, laid_token = token;
      }
      int64_t j = u % chunks * chunk, n = min64(chunk, m.inner - j);
      int64_t ld = straddles ? round_up(w.n, 16) : chunk;
      float *gate = scratch(7)->get<float>(2 * t.count * (ld + kLanes)), *up = gate + t.count * (ld + kLanes);
      if (straddles) {
        products(w, 0, w.n, laid, gate, ld);
        up = gate + m.inner;
      } else {
        products(w, j, j + n, laid, gate, ld);
        products(w, m.inner + j, m.inner + j + n, laid, up, ld);
      }
      for (int64_t i = 0; i < t.count; i++) {
        bf16 *to = m.hidden + m.order[t.first + i] * m.inner + j;
        for (int64_t c = 0; c < n; c += kWide)
          store_v(to + c, silu(load_v(gate + i * ld + c, n - c)) * load_v(up + i * ld + c, n - c), n - c);
      }
    }
  });
}

inline void moe_down(Team &team, const Moe &m) {
  int64_t laid_task = -1;
  Laid laid = {};
  int64_t down_chunk = chunk_rows(m.down[0], mostly_in_turn(m, m.down[0]), team.count);
  int64_t down_chunks = (m.width + down_chunk - 1) / down_chunk;
  team.each(m.count * down_chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const MoeTask &t = m.tasks[u / down_chunks];
      const ip_matrix &w = m.down[t.expert];
      if (laid_task != u / down_chunks) {
        laid = lay_out(w, t.count, u % down_chunks * down_chunk, in_turn(w, t.count),
                       [&](int64_t r) { return m.hidden + m.order[t.first + r] * m.inner; });
        laid_task = u / down_chunks;
      }
      int64_t j = u % down_chunks * down_chunk, n = min64(down_chunk, m.width - j);
      float *sums = scratch(7)->get<float>(t.count * (down_chunk + kLanes));
      products(w, j, j + n, laid, sums, down_chunk);
      for (int64_t i = 0; i < t.count; i++)
        memcpy(m.results + m.order[t.first + i] * m.width + j, sums + i * down_chunk, (size_t)n * sizeof(float));
    }
  });
}

// The tokens' sums, rounded; `more` [tokens, width] is added to them, or null.
inline void moe_sum(Team &team, const Moe &m, const bf16 *more) {
  team.each(m.tokens, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++)
      for (int64_t c = 0; c < m.width; c += kLanes) {
        F acc = F{};
        for (int64_t j = 0; j < m.top; j++)
          acc = fma(splat(m.weights[t * m.top + j]), load_f(m.results + (t * m.top + j) * m.width + c, m.width - c), acc);
        if (more) acc = widen(narrow(acc)) + load16(more + t * m.width + c, m.width - c);
        store16(m.out + t * m.width + c, acc, m.width - c);
      }
  });
}

inline void moe(Team &team, const Moe &m) {
  moe_gate_up(team, m);
  team.barrier();
  moe_down(team, m);
  team.barrier();
  moe_sum(team, m, nullptr);
}

}  // namespace
