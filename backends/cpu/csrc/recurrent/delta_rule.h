// The gated delta rule, token by token for any number of them: so a prompt gives the same bits however it is cut. A
// block of columns of a head's state stays in the first-level cache while a sequence's tokens pass, and a token takes as
// many multiplications as it does in chunks, which only products of matrices on tiles, in bf16, would do faster.
#pragma once
#include "recurrent/sequences.h"

namespace {

// Inputs, results and states of a step. before and after: [rows, heads, k_dim, v_dim]; y: [tokens, heads, v_dim].
struct DeltaRuleArgs {
  ip_delta_rule rule;
  ip_head_rows q, k, v;
  const float *before;
  float *after;
  bf16 *y;
  const float *decays;  // of rows of the states by channel, [tokens, heads, k_dim]; null: a head has one
  int64_t ld_decays;
};
// What a token does to a head's state: the factor of what remains, 1 if each row has its own, and the share of the
// correction.
struct DeltaRuleGates {
  float remains, beta;
};

constexpr int kStateRegisters = 4;  // registers of columns in a block of a state
constexpr int64_t kStateColumns = kStateRegisters * kRegisterLanes;

// out[0 .. n] = x / sqrt(the sum of squares + 1e-6) * factor.
inline void normalize_head(const bf16 *x, int64_t n, float factor, float *out) {
  Floats squares = {};
  for_each_register(n, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
    Floats v = load_floats(x + c, m);
    squares = fma(v, v, squares);
  });
  factor *= 1.0f / __builtin_sqrtf(sum_lanes(squares) + 1e-6f);
  for_each_register(n, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
    store_floats(out + c, load_floats(x + c, m) * factor, m);
  });
}

// A token's query and key after their norms; by channel also what remains of each row of the state, and what recalls from
// it: the key times that. Else `recall` is the key.
struct TokenInputs {
  float *query, *key, *remains, *recall;
};

// One token for R registers of columns of a state with k_dim rows, which are ld apart: `to`, which may be `from`, is the
// state after it, y its result. v: the value.
template <int R, bool kByChannel>
inline void delta_rule_token(const float *from, int64_t ld_from, float *to, int64_t ld_to, int64_t k_dim,
                             const TokenInputs &x, const Floats *v, DeltaRuleGates gates, Floats *y) {
  Floats even[R] = {}, odd[R] = {}, change[R];  // two sums: chains of additions half as long
  int64_t i = 0;
  for (; i + 2 <= k_dim; i += 2) {
    Floats a = splat_floats(x.recall[i]), b = splat_floats(x.recall[i + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      even[r] = fma(a, load<Floats>(from + i * ld_from + r * kRegisterLanes), even[r]);
      odd[r] = fma(b, load<Floats>(from + (i + 1) * ld_from + r * kRegisterLanes), odd[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    if (i < k_dim)
      even[r] = fma(splat_floats(x.recall[i]), load<Floats>(from + i * ld_from + r * kRegisterLanes), even[r]);
    change[r] = gates.beta * (v[r] - gates.remains * (even[r] + odd[r]));
    y[r] = Floats{};
  }
  for (i = 0; i < k_dim; i++) {
    Floats a = splat_floats(x.key[i]), b = splat_floats(x.query[i]);
    float remains = kByChannel ? x.remains[i] : gates.remains;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      Floats s = fma(a, change[r], remains * load<Floats>(from + i * ld_from + r * kRegisterLanes));
      store(to + i * ld_to + r * kRegisterLanes, s);
      y[r] = fma(b, s, y[r]);
    }
  }
}

// All tokens of a sequence for columns first .. first + n of a head's state, which are R registers; gates(t, h) are
// those of row t.
template <int R, class Gates>
inline void delta_rule_columns(const DeltaRuleArgs &args, const LiveRows &rows, int64_t h, int64_t first, int64_t n,
                               const float *before, float *after, Gates gates) {
  constexpr int64_t kColumns = R * kRegisterLanes;
  int64_t k_dim = args.rule.k_dim, v_dim = args.rule.v_dim, group = h / (args.rule.heads / args.rule.groups);
  float scale = 1.0f / __builtin_sqrtf((float)k_dim);
  float *own = workspace(kRecurrentState)->reserve<float>(k_dim * kColumns);
  float *inputs = workspace(kRecurrentInputs)->reserve<float>(4 * k_dim);
  TokenInputs x = {inputs, inputs + k_dim, inputs + 2 * k_dim, inputs + (args.decays ? 3 : 1) * k_dim};
  const float *from = before + first;
  int64_t ld_from = v_dim;
  bool whole = n == kColumns;
  if (rows.begins || !whole) {
    memset(own, 0, (size_t)(k_dim * kColumns) * sizeof(float));
    for (int64_t i = 0; i < k_dim && !rows.begins; i++)
      memcpy(own + i * kColumns, from + i * v_dim, (size_t)n * sizeof(float));
    from = own, ld_from = kColumns;
  }
  for (int64_t i = 0; i < rows.count; i++) {
    int64_t t = rows.begin + i;
    normalize_head(head_at(args.q, t, group), k_dim, scale, x.query);
    normalize_head(head_at(args.k, t, group), k_dim, 1.0f, x.key);
    if (args.decays) {
      const float *decays = args.decays + t * args.ld_decays + h * k_dim;
      for_each_register(k_dim, [&](int64_t c, int64_t m) __attribute__((always_inline)) {
        Floats remains = vexp(load_floats(decays + c, m));
        store_floats(x.remains + c, remains, m);
        store_floats(x.recall + c, remains * load_floats(x.key + c, m), m);
      });
    }
    Floats v[R], y[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      v[r] = load_floats(head_at(args.v, t, h) + first + r * kRegisterLanes, n - r * kRegisterLanes);
    bool to_result = whole && i + 1 == rows.count;
    float *to = to_result ? after + first : own;
    int64_t ld_to = to_result ? v_dim : kColumns;
    if (args.decays)
      delta_rule_token<R, true>(from, ld_from, to, ld_to, k_dim, x, v, gates(t, h), y);
    else
      delta_rule_token<R, false>(from, ld_from, to, ld_to, k_dim, x, v, gates(t, h), y);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
      store_floats(args.y + (t * args.rule.heads + h) * v_dim + first + r * kRegisterLanes, y[r], n - r * kRegisterLanes);
    from = to, ld_from = ld_to;
  }
  for (int64_t i = 0; i < k_dim && !whole; i++)
    memcpy(after + first + i * v_dim, own + i * kColumns, (size_t)n * sizeof(float));
}

// y and the states after the step. Every thread of the team calls it; complete after the next `barrier`.
template <class Gates>
inline void gated_delta_rule(Team &team, const DeltaRuleArgs &args, const ip_sequences &s, Gates gates) {
  int64_t heads = args.rule.heads, v_dim = args.rule.v_dim, state = args.rule.k_dim * v_dim;
  int64_t blocks = (v_dim + kStateColumns - 1) / kStateColumns;
  team.for_each_chunk(s.sequences * heads * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t sequence = i / (heads * blocks), h = i / blocks % heads, first = i % blocks * kStateColumns;
      int64_t n = min64(kStateColumns, v_dim - first);
      const float *before = args.before + (row_before(s, sequence) * heads + h) * state;
      float *after = args.after + (row_after(s, sequence) * heads + h) * state;
      LiveRows rows = live_rows(s, sequence);
      if (!rows.count) {
        for (int64_t r = 0; r < args.rule.k_dim && before != after; r++)
          memcpy(after + r * v_dim + first, before + r * v_dim + first, (size_t)n * sizeof(float));
        continue;
      }
      switch ((n + kRegisterLanes - 1) / kRegisterLanes) {
        case 1: delta_rule_columns<1>(args, rows, h, first, n, before, after, gates); break;
        case 2: delta_rule_columns<2>(args, rows, h, first, n, before, after, gates); break;
        case 3: delta_rule_columns<3>(args, rows, h, first, n, before, after, gates); break;
        default: delta_rule_columns<4>(args, rows, h, first, n, before, after, gates);
      }
    }
  });
}

}  // namespace
