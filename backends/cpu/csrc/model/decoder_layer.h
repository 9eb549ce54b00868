// A whole decoder layer of any kind: one team, a barrier where results are shared.
//
// Each step rounds to bf16 where the smaller kernels do, and uses their functions: a row's result is that of the layer
// composed of them, to the last bit.
#pragma once
#include "mla.h"
#include "moe.h"
#include "phases.h"
#include "route.h"
#include "rowwise.h"

namespace {

constexpr int64_t kMaxDecodeRows = 8;  // so few rows are normed by every thread for itself, which is cheaper than a barrier

struct LayerBuffers {
  bf16 *h, *h2, *s, *qkv, *q, *mixed, *y, *act;  // [m, ...], shared by the team, each written once
  bf16 *low, *folded, *latents;                  // latent attention: c; queries and results in latents
  bf16 *shared;                                  // experts: the shared ones' result
  float *logits, *weights;
  int64_t *ids, *tasks;                          // `tasks`: how many, an entry of its own for every layer of a call
  Moe moe;                                       // its buffers
};

// out[i, j] = silu(gate) * up, both rounded to bf16 first; `inner` is a multiple of 16.
inline void gated(Team &team, const ip_matrix &w, const bf16 *x, int64_t m, bf16 *out) {
  bool turn = in_turn(w, m);
  int64_t inner = w.n / 2, width = w.k, chunk = gated_rows(w, turn, inner, 1, team.count);
  for (int64_t i0 = 0; i0 < m; i0 += kRowTile) {
    int64_t tile = min64(kRowTile, m - i0);
    Laid laid = lay_out(w, tile, first_row(team, inner, chunk), turn, [&](int64_t i) { return x + (i0 + i) * width; });
    team.each(inner, chunk, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += chunk) {
        int64_t n = min64(chunk, last - j);
        float *gate = scratch(7)->get<float>(2 * tile * (chunk + kLanes)), *up = gate + tile * (chunk + kLanes);
        products(w, j, j + n, laid, gate, chunk);
        products(w, inner + j, inner + j + n, laid, up, chunk);
        for (int64_t i = 0; i < tile; i++)
          for (int64_t c = 0; c < n; c += kWide) {
            V a = rounded(load<V>(gate + i * chunk + c)), b = rounded(load<V>(up + i * chunk + c));
            store_v(out + (i0 + i) * inner + j + c, silu(a) * b);
          }
      }
    });
  }
}

// Head h of token t, of q, then k, then v: its norm where there is one, rotation, and K and V to the cache.
inline void enter_head(const ip_layer &l, const ip_step &step, const ip_cache &cache, const bf16 *qkv, int64_t t, int64_t h,
                       bf16 *q) {
  int64_t d = l.head_dim, slot = step.slots[t];
  const bf16 *from = qkv + (t * (l.heads + 2 * l.kv_heads) + h) * d;
  const float *table = l.rope + step.positions[t] * d;
  bf16 *room = scratch(4)->get<bf16>(d);
  if (h < l.heads) {
    norm_and_rope(from, l.q_norm, l.q_eps, table, d, l.interleaved, room, q + (t * l.heads + h) * d);
  } else if (slot >= 0 && h < l.heads + l.kv_heads) {
    bf16 *turned = scratch(14)->get<bf16>(d);
    norm_and_rope(from, l.k_norm, l.k_eps, table, d, l.interleaved, room, turned);
    keep(keys_of(cache, l.kv_heads * d), slot, (h - l.heads) * d, turned, d);
  } else if (slot >= 0) {
    keep(values_of(cache, l.kv_heads * d), slot, (h - l.heads - l.kv_heads) * d, from, d);
  }
}

inline void enter(Team &team, const ip_layer &l, const ip_step &step, const ip_cache &cache, const bf16 *qkv, bf16 *q) {
  int64_t all = l.heads + 2 * l.kv_heads;
  team.each(step.tokens * all, 8, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) enter_head(l, step, cache, qkv, u / all, u % all, q);
  });
}

// What `enter` does, and attention: head by head by one thread where that can be, which saves a barrier.
inline void enter_and_attend(Team &team, const ip_layer &l, const ip_step &step, const ip_cache &cache, const bf16 *qkv,
                             bf16 *q, const Attend &a, const AttendPlan &plan, const Expected &soon, Phases &phases) {
  if (plan.whole) {
    int64_t group = l.heads / l.kv_heads;
    attend(team, a, plan, [&](const AttendTask &task, int64_t g) {
      for (int64_t t = task.first; t < task.first + task.tokens; t++) {
        for (int64_t h = g * group; h < (g + 1) * group; h++) enter_head(l, step, cache, qkv, t, h, q);
        enter_head(l, step, cache, qkv, t, l.heads + g, q);
        enter_head(l, step, cache, qkv, t, l.heads + l.kv_heads + g, q);
      }
    }, soon);
  } else {
    enter(team, l, step, cache, qkv, q);
    team.barrier();
    phases.end(kEnter);
    attend(team, a, plan);
  }
  team.barrier();
  phases.end(kAttend);
}

// s = x + r, y = norm(s): by each thread for itself when there are few rows, else shared out, with a barrier.
struct Normed {
  const bf16 *y, *s;
};
inline Normed add_norm(Team &team, const bf16 *x, const bf16 *r, const bf16 *weight, float eps, int64_t m, int64_t d,
                       bf16 *s, bf16 *y, int own) {
  if (m > kMaxDecodeRows) {
    rms_norm(team, x, d, r, weight, eps, m, d, r ? s : nullptr, y);
    team.barrier();
    return {y, r ? s : x};
  }
  bf16 *mine = scratch(own)->get<bf16>(2 * m * d);
  for (int64_t i = 0; i < m; i++)
    rms_norm_row(x + i * d, r ? r + i * d : nullptr, weight, eps, d, r ? mine + (m + i) * d : nullptr, mine + i * d);
  return {mine, r ? mine + m * d : x};
}

// Latent attention, from the normed x to `mixed`.
inline void attend_latents(Team &team, const ip_layer &l, const ip_step &step, const ip_cache &cache, const bf16 *x,
                           const LayerBuffers &b, const Attend &a, const AttendPlan &plan, Phases &phases) {
  const ip_latent &t = *l.latent;
  int64_t m = step.tokens, width = l.o.n, low = t.q_a.n, all = t.latent + t.rope;
  linear(team, low ? t.q_a : t.q_b, x, width, m, low ? b.low : b.q, low ? low : t.q_b.n, 0);
  linear(team, t.kv_a, x, width, m, b.qkv, all, 0);
  team.barrier();
  phases.end(kProject);
  team.each(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      if (low) rms_norm_row(b.low + i * low, nullptr, t.q_a_norm, t.q_a_eps, low, nullptr, b.h2 + i * low);
      if (step.slots[i] < 0) continue;
      bf16 *made = scratch(14)->get<bf16>(all);
      rms_norm_row(b.qkv + i * all, nullptr, t.kv_a_norm, t.kv_a_eps, t.latent, nullptr, made);
      rope_head(b.qkv + i * all + t.latent, l.rope + step.positions[i] * t.rope, t.rope, l.interleaved, made + t.latent);
      keep(keys_of(cache, all), step.slots[i], 0, made, all);
    }
  });
  if (low) {
    team.barrier();
    linear(team, t.q_b, b.h2, low, m, b.q, t.q_b.n, 0);
    team.barrier();
  }
  phases.end(kEnter);
  int64_t head = t.nope + t.rope;
  Mla mla = {b.q,      b.q + t.nope, l.heads * head, head,     l.heads * head, head,      t.kv_b, l.heads, t.nope,
             t.rope,   t.value,      t.latent,       m,        b.folded,       b.latents, b.mixed};
  mla_fold(team, mla, [&](int64_t i, const bf16 *from, bf16 *to) {
    rope_head(from, l.rope + step.positions[i] * t.rope, t.rope, l.interleaved, to);
  });
  team.barrier();
  attend(team, a, plan);
  team.barrier();
  mla_unfold(team, mla);
  team.barrier();
  phases.end(kAttend);
}

// Experts and what all tokens share, from the normed x to `out`.
inline void experts(Team &team, const ip_layer &l, int64_t m, const bf16 *x, const LayerBuffers &b, bf16 *out,
                    Phases &phases) {
  const ip_experts &r = *l.routed;
  int64_t width = l.o.n;
  bool shared = l.gate_up.n > 0;
  linear(team, r.router, x, width, m, b.logits, r.experts, 1);
  if (shared) gated(team, l.gate_up, x, m, b.act);
  team.barrier();
  Moe moe = b.moe;
  moe.gate_up = r.gate_up, moe.down = r.down, moe.experts = r.experts, moe.tokens = m, moe.top = r.top;
  moe.inner = r.down->k, moe.width = width, moe.x = x, moe.ldx = width;
  moe.ids = b.ids, moe.weights = b.weights, moe.out = out;
  team.each(1, 1, [&](int64_t, int64_t) {
    for (int64_t i = 0; i < m; i++) route(r, b.logits + i * r.experts, b.ids + i * r.top, b.weights + i * r.top);
    plan_moe(moe);
    *b.tasks = moe.count;
  });
  team.barrier();
  moe.count = *b.tasks;
  moe_gate_up(team, moe);
  if (shared) linear(team, l.down, b.act, l.down.k, m, b.shared, width, 0);
  team.barrier();
  phases.end(kMlp);
  moe_down(team, moe);
  team.barrier();
  moe_sum(team, moe, shared ? b.shared : nullptr);
}

// Returns the residual as this thread has it, for the layer that follows. Layers that follow each other in one call need x
// and `out` that are no other layer's: a thread that was held up goes on from them. All else may be used again, since who
// finds work to do in a part knows that nobody has left it. `out_residual` may be null where rows are few.
inline const bf16 *layer(Team &team, const ip_layer &l, const ip_step &step, const ip_cache &cache, const bf16 *x,
                         const bf16 *residual, bf16 *out, bf16 *out_residual, const LayerBuffers &b, const Attend &a,
                         const AttendPlan &plan, Phases &phases) {
  int64_t m = step.tokens, width = l.o.n;
  Normed first = add_norm(team, x, residual, l.attn_norm, l.attn_eps, m, width, b.s, b.h, 18);
  phases.end(kAttnNorm);
  if (l.latent) {
    attend_latents(team, l, step, cache, first.y, b, a, plan, phases);
  } else {
    linear(team, l.qkv, first.y, width, m, b.qkv, l.qkv.n, 0);
    Expected soon;
    if (plan.whole) soon = expect(team, a, plan);
    team.barrier();
    phases.end(kProject);
    enter_and_attend(team, l, step, cache, b.qkv, b.q, a, plan, soon, phases);
  }
  linear(team, l.o, b.mixed, l.o.k, m, b.y, width, 0);
  team.barrier();
  phases.end(kOut);
  Normed second = add_norm(team, b.y, first.s, l.mlp_norm, l.mlp_eps, m, width, out_residual, b.h2, 19);
  if (m <= kMaxDecodeRows && out_residual && team.id == 0) memcpy(out_residual, second.s, (size_t)(m * width) * sizeof(bf16));
  phases.end(kMlpNorm);
  if (l.routed) {
    experts(team, l, m, second.y, b, out, phases);
  } else {
    gated(team, l.gate_up, second.y, m, b.act);
    team.barrier();
    phases.end(kMlp);
    linear(team, l.down, b.act, l.down.k, m, out, width, 0);
  }
  team.barrier();
  phases.end(kDown);
  return second.s;
}

}  // namespace
