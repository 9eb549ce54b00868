// The selection of sparse attention: scores of all keys that a query sees, and the positions of the largest ones.
// `index_select_entry` is `ip_index_select` of inferplane_cpu.h. A score is the sum over heads of w relu(q k), in
// float32: heads are the lanes of registers, so that nothing is added across lanes until all heads are done. Keys of 8
// bits are converted to bf16 first, scales applied, as reading the cache gives them.
#pragma once
#include "attention/kv_entries.h"

namespace {

constexpr int64_t kIndexSpan = 256;  // keys that one thread scores at a time
constexpr int64_t kIndexTokens = 8;  // query tokens of a sequence that meet a span of keys together
constexpr int64_t kIndexRows = 256;  // query tokens whose scores are in memory at a time, at most
constexpr int64_t kIndexScoreFloats = 1 << 22;  // the same of scores, unless one task has more
constexpr int kIndexKeys = 4;  // keys that are in registers at a time
#if defined(__AVX512F__)
constexpr int kIndexRegisters = 4;  // registers of heads
#else
constexpr int kIndexRegisters = 2;
#endif

// What is scored: q [tokens, heads, dim], w [tokens, heads]; `dim` is even.
struct IndexArgs {
  const bf16 *q;
  const float *w;
  KvEntries k;
  int64_t heads, dim, top, block, rate;
  int32_t *out;  // [tokens, top]
  int64_t registers() const { return (heads + kRegisterLanes - 1) / kRegisterLanes; }
  // Entries of a token's queries as lanes: a pair of bf16 numbers, or a float.
#if defined(__AVX512BF16__)
  int64_t lanes_per_token() const { return dim / 2 * registers() * kRegisterLanes; }
#else
  int64_t lanes_per_token() const { return dim * registers() * kRegisterLanes; }
#endif
};

// Query tokens of one sequence: rows of q, the first one's position, and where their scores and units of work are. A
// key stands for `rate` tokens; a query sees those of which it sees the last token.
struct IndexTask {
  int64_t row, tokens, position, rate;
  const int32_t *table;
  int64_t first_lane_row;  // the first token's row of query lanes
  float *scores;  // [tokens, stride]
  int64_t stride, first_unit, units;  // a unit is a span of keys; none if every query chooses all that it sees
  int64_t keys() const { return keys_of(tokens - 1); }
  int64_t keys_of(int64_t token) const { return (position + token + 1) / rate; }
};

// lanes = the queries of token `row` with heads as lanes, zeros where there are no more heads; weights alike.
inline void lay_out_index_queries(const IndexArgs &args, int64_t row, uint32_t *lanes, float *weights) {
  const int64_t padded = args.registers() * kRegisterLanes;
  for (int64_t h = 0; h < padded; h++) {
    const bf16 *q = args.q + (row * args.heads + h) * args.dim;
    weights[h] = h < args.heads ? args.w[row * args.heads + h] : 0;
#if defined(__AVX512BF16__)
    for (int64_t p = 0; p < args.dim / 2; p++)
      lanes[p * padded + h] = h < args.heads ? (uint32_t)q[2 * p] | (uint32_t)q[2 * p + 1] << 16 : 0;
#else
    for (int64_t c = 0; c < args.dim; c++) lanes[c * padded + h] = h < args.heads ? (uint32_t)q[c] << 16 : 0;
#endif
  }
}

// sums[i] += the lanes of w relu(q k_i) of R registers of heads from `first` on, for kIndexKeys keys.
template <int R>
inline void add_head_scores(const IndexArgs &args, const uint32_t *lanes, const float *weights, int64_t first,
                            const bf16 *const *keys, Floats sums[kIndexKeys]) {
  const int64_t row = args.registers() * kRegisterLanes;
  const uint32_t *q = lanes + first * kRegisterLanes;
  Floats all[kIndexKeys][R] = {};
#if defined(__AVX512BF16__)
  for (int64_t p = 0; p < args.dim / 2; p++, q += row) {
    __m512bh v[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) v[r] = (__m512bh)_mm512_loadu_si512(q + r * kRegisterLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kIndexKeys; i++) {
      int32_t pair;
      memcpy(&pair, keys[i] + 2 * p, sizeof pair);
      const __m512bh k = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) all[i][r] = (Floats)_mm512_dpbf16_ps((__m512)all[i][r], v[r], k);
    }
  }
#else
  for (int64_t c = 0; c < args.dim; c++, q += row) {
    Floats v[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) v[r] = load<Floats>(q + r * kRegisterLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kIndexKeys; i++) {
      const Floats k = splat_floats(bf16_to_float(keys[i][c]));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) all[i][r] = fma(v[r], k, all[i][r]);
    }
  }
#endif
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const Floats w = load<Floats>(weights + (first + r) * kRegisterLanes);
#pragma GCC unroll 4
    for (int i = 0; i < kIndexKeys; i++) sums[i] = fma(all[i][r] > 0.0f ? all[i][r] : Floats{}, w, sums[i]);
  }
}

// scores[i] of the first n keys of a span, and of up to kIndexKeys - 1 more, for one token.
inline void score_keys(const IndexArgs &args, const uint32_t *lanes, const float *weights, const bf16 *const *keys,
                       int64_t n, float *scores) {
  for (int64_t i = 0; i < n; i += kIndexKeys) {
    Floats sums[kIndexKeys] = {};
    const bf16 *at[kIndexKeys];
    for (int64_t j = 0; j < kIndexKeys; j++) at[j] = keys[min64(i + j, n - 1)];
    int64_t r = 0, count = args.registers();
    for (; r + kIndexRegisters <= count; r += kIndexRegisters)
      add_head_scores<kIndexRegisters>(args, lanes, weights, r, at, sums);
    for (; r < count; r++) add_head_scores<1>(args, lanes, weights, r, at, sums);
    for (int64_t j = 0; j < kIndexKeys; j++) scores[i + j] = sum_lanes(sums[j]);
  }
}

// The scores of a task's tokens with the keys of one span.
inline void score_span(const IndexArgs &args, const IndexTask &t, int64_t span, const uint32_t *lanes,
                       const float *weights) {
  const int64_t begin = span * kIndexSpan, n = min64(kIndexSpan, t.keys() - begin);
  const bf16 *keys[kIndexSpan];
  bf16 *converted = workspace(kEntriesInBf16)->reserve<bf16>(args.k.is_bf16() ? 0 : kIndexSpan * args.dim);
  for (int64_t i = 0; i < n; i++) {
    int64_t slot = (int64_t)t.table[(begin + i) / args.block] * args.block + (begin + i) % args.block;
    keys[i] = args.k.bf16_entries() + slot * args.k.stride;
    if (args.k.is_bf16()) continue;
    keys[i] = converted + i * args.dim;
    dequantize_entries(args.k, slot, 0, args.dim, converted + i * args.dim);
  }
  const int64_t padded = args.registers() * kRegisterLanes;
  for (int64_t i = 0; i < t.tokens; i++)
    score_keys(args, lanes + (t.first_lane_row + i) * args.lanes_per_token(), weights + (t.first_lane_row + i) * padded,
               keys, n, t.scores + i * t.stride + begin);
}

// A number whose order among unsigned integers is that of a score among floats; 0 and -0 have the same.
inline uint32_t order_of_score(float score) {
  score += 0.0f;
  uint32_t bits;
  memcpy(&bits, &score, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// out[0 .. top] = the positions of the `top` largest of n scores, ascending, then -1; of equal ones the first. Finds
// the least of them by its bits, the upper eleven, the next eleven, the last ten.
inline void choose_positions(const float *scores, int64_t n, int64_t top, int32_t *out) {
  if (n <= top) {
    for (int64_t i = 0; i < top; i++) out[i] = i < n ? (int32_t)i : -1;
    return;
  }
  uint32_t *orders = workspace(kIndexOrders)->reserve<uint32_t>(n);
  for (int64_t i = 0; i < n; i++) orders[i] = order_of_score(scores[i]);
  constexpr int kShifts[] = {21, 10, 0};
  constexpr uint32_t kBins[] = {2048, 2048, 1024};
  int64_t left = top;  // of those whose upper bits are `least`
  uint32_t least = 0;
  for (int pass = 0; pass < 3; pass++) {
    int32_t counts[2048] = {};
    const int shift = kShifts[pass];
    const uint32_t mask = kBins[pass] - 1;
    for (int64_t i = 0; i < n; i++)
      if (pass == 0 || orders[i] >> kShifts[pass - 1] == least) counts[orders[i] >> shift & mask]++;
    uint32_t bin = mask;
    for (; counts[bin] < left; bin--) left -= counts[bin];
    least = least << (pass == 0 ? 0 : kShifts[pass - 1] - shift) | bin;
  }
  int64_t found = 0;
  for (int64_t i = 0; found < top; i++) {
    const bool equal = orders[i] == least && left > 0;
    out[found] = (int32_t)i;
    found += orders[i] > least || equal, left -= equal;
  }
}

// Scores and chooses for some tasks: three parts, with barriers in between. Every thread of the team calls it.
inline void select_tasks(Team &team, const IndexArgs &args, const IndexTask *tasks, int64_t count, uint32_t *lanes,
                         float *weights) {
  const IndexTask &last_task = tasks[count - 1];
  const int64_t padded = args.registers() * kRegisterLanes, units = last_task.first_unit + last_task.units;
  team.for_each_chunk(count, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++)
      for (int64_t i = 0; tasks[n].units && i < tasks[n].tokens; i++) {
        int64_t row = tasks[n].first_lane_row + i;
        lay_out_index_queries(args, tasks[n].row + i, lanes + row * args.lanes_per_token(), weights + row * padded);
      }
  });
  team.barrier();
  team.for_each_chunk(units, 1, [&](int64_t first, int64_t last) {
    const IndexTask *t = tasks;
    for (int64_t unit = first; unit < last; unit++) {
      while (unit >= t->first_unit + t->units) t++;
      score_span(args, *t, unit - t->first_unit, lanes, weights);
    }
  });
  team.barrier();
  team.for_each_chunk(count, 1, [&](int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++)
      for (int64_t i = 0; i < tasks[n].tokens; i++)
        choose_positions(tasks[n].scores + i * tasks[n].stride, tasks[n].keys_of(i), args.top,
                         args.out + (tasks[n].row + i) * args.top);
  });
}

// `ip_index_select`, with as many tasks at a time as `kIndexRows` and `kIndexScoreFloats` allow.
void index_select_entry(const bf16 *q, const float *w, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                        int64_t dim, int64_t top, int64_t rate, int32_t *out) {
  const IndexArgs args = {q, w, key_entries(*cache, dim), heads, dim, top, cache->block, rate, out};
  const int64_t rows = min64(kIndexRows, batch->start[batch->sequences]);
  IndexTask *tasks = workspace(kIndexTasks)->reserve<IndexTask>(rows);
  int64_t count = 0, tokens = 0, floats = 0, units = 0;
  auto run = [&] {
    if (!count) return;
    float *scores = workspace(kIndexScores)->reserve<float>(floats);
    for (int64_t n = 0; n < count; n++) {
      tasks[n].scores = scores;
      scores += tasks[n].units ? tasks[n].tokens * tasks[n].stride : 0;
    }
    uint32_t *lanes = workspace(kIndexLanes)->reserve<uint32_t>(tokens * args.lanes_per_token());
    float *weights = workspace(kIndexWeights)->reserve<float>(tokens * args.registers() * kRegisterLanes);
    run_on_team(floats * heads * dim / 4, [&](Team &team) { select_tasks(team, args, tasks, count, lanes, weights); });
    count = tokens = floats = units = 0;
  };
  for (int64_t b = 0; b < batch->sequences; b++) {
    const int64_t n = batch->start[b + 1] - batch->start[b];
    for (int64_t t = 0; t < n && batch->lens[b]; t += kIndexTokens) {
      IndexTask task = {batch->start[b] + t, min64(kIndexTokens, n - t), batch->lens[b] - n + t, rate,
                        batch->tables + b * batch->table_width, tokens, nullptr, 0, units, 0};
      task.stride = round_up(task.keys(), kLanes);
      task.units = task.keys() > top ? (task.keys() + kIndexSpan - 1) / kIndexSpan : 0;
      const int64_t more = task.units ? task.tokens * task.stride : 0;
      if (tokens + task.tokens > kIndexRows || (count && floats + more > kIndexScoreFloats)) {
        run();
        task.first_lane_row = task.first_unit = 0;
      }
      tasks[count++] = task;
      tokens += task.tokens, floats += more, units += task.units;
    }
  }
  run();
}

}  // namespace
