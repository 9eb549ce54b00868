// A decoder layer of any kind for few tokens, computed by one team with a barrier wherever results are shared.
// isa_entries.h calls it for one layer, layer_sequence.h for many in one call.
//
// Each step rounds to bf16 where the separate kernels do, and uses their functions: a row's result is that of the layer
// composed of those kernels, to the last bit.
#pragma once
#include "model/mla.h"
#include "model/moe.h"
#include "runtime/phase_times.h"
#include "model/expert_routing.h"
#include "model/rowwise.h"
#include "recurrent/mixer.h"

namespace {

// With no more rows, every thread norms all of them itself, which is cheaper than a barrier.
constexpr int64_t kMaxDecodeRows = 8;

// Intermediate results of a layer. layer_buffers.h reserves them.
struct LayerBuffers {
  // [m, ...], the team shares them, and each is written once.
  bf16 *attn_input, *mlp_input, *attn_residual, *qkv, *q, *mixed, *attn_output, *mlp_hidden;
  bf16 *q_latent, *folded, *latents;  // latent attention: the compressed query; queries and results in the latent space
  bf16 *shared;  // the shared experts' result
  float *logits, *weights;  // of the router [m, experts], of the chosen experts [m, top]
  int64_t *ids, *num_tasks;  // `num_tasks`: how many tasks the experts have; each layer of a call has its own entry
  MoeArgs moe;  // the experts' buffers
  MixerBuffers mixer;
};

// out [m, w.n / 2], dense, = f(x gate^T) * (x up^T) for m dense rows of x, both products rounded to bf16 first, f one
// of ip_activation; rows of w are gate, then up, each a multiple of 16. Every thread of the team calls it; complete
// after the next `barrier`.
inline void gate_up_activation_mul(Team &team, const ip_matrix &w, const bf16 *x, int64_t m, int32_t f, bf16 *out) {
  bool row_by_row = streams_row_by_row(w, m);
  int64_t inner = w.n / 2, width = w.k, chunk = gated_rows_per_chunk(w, row_by_row, inner, 1, team.count);
  for (int64_t i0 = 0; i0 < m; i0 += kMaxRowsAtOnce) {
    int64_t tile = min64(kMaxRowsAtOnce, m - i0);
    Activations laid = lay_out_activations(w, tile, first_row_of_thread(team, inner, chunk), row_by_row,
                                           [&](int64_t i) { return x + (i0 + i) * width; });
    team.for_each_chunk(inner, chunk, [&](int64_t first, int64_t last) {
      for (int64_t j = first; j < last; j += chunk) {
        int64_t n = min64(chunk, last - j);
        float *gate = workspace(kProductSums)->reserve<float>(2 * tile * (chunk + kLanes)),
              *up = gate + tile * (chunk + kLanes);
        multiply_rows(w, j, j + n, laid, gate, chunk);
        multiply_rows(w, inner + j, inner + j + n, laid, up, chunk);
        for (int64_t i = 0; i < tile; i++)
          for (int64_t c = 0; c < n; c += kRegisterLanes) {
            Floats a = round_to_bf16(load<Floats>(gate + i * chunk + c)),
                   b = round_to_bf16(load<Floats>(up + i * chunk + c));
            store_floats(out + (i0 + i) * inner + j + c, activate(a, f) * b);
          }
      }
    });
  }
}

// Heads of a row of a layer's first product: queries, with a gate after each if the layer has them, keys, values.
inline int64_t projected_heads(const ip_layer &layer) {
  return layer.heads * (layer.output_gate ? 2 : 1) + 2 * layer.kv_heads;
}

// Head h of token t of qkv [tokens, heads + 2 kv_heads, head_dim] (q, then k, then v heads; gates do not count, see
// `projected_heads`): q and k heads get their norm, if the layer has one, and their rotation. A q head is written to `q` [tokens, heads, head_dim]; k and v to the
// token's slot of the cache, or nowhere if the slot is -1. By the calling thread.
inline void rope_and_cache_head(const ip_layer &layer, const ip_step &step, const ip_cache &cache, const bf16 *qkv,
                                int64_t t, int64_t h, bf16 *q) {
  int64_t d = layer.head_dim, slot = step.slots[t];
  int64_t gates = layer.output_gate ? min64(h, layer.heads) : 0, turned = layer.rope_dim ? layer.rope_dim : d;
  const bf16 *from = qkv + (t * projected_heads(layer) + h + gates) * d;
  const float *table = layer.rope + step.positions[t] * turned;
  bf16 *head_buffer = workspace(kOneHead)->reserve<bf16>(d);
  if (h < layer.heads) {
    norm_and_rope(from, layer.q_norm, table, d, turned, layer.interleaved, head_buffer,
                  q + (t * layer.heads + h) * d);
  } else if (slot >= 0 && h < layer.heads + layer.kv_heads) {
    bf16 *rotated = workspace(kEntriesInBf16)->reserve<bf16>(d);
    norm_and_rope(from, layer.k_norm, table, d, turned, layer.interleaved, head_buffer, rotated);
    write_entries(key_entries(cache, layer.kv_heads * d), slot, (h - layer.heads) * d, rotated, d);
  } else if (slot >= 0) {
    write_entries(value_entries(cache, layer.kv_heads * d), slot, (h - layer.heads - layer.kv_heads) * d, from, d);
  }
}

// `rope_and_cache_head` for all heads of all tokens. Every thread of the team calls it; q and the cache are complete
// after the next `barrier`. Keys that are differences need the first one of their span, which may be of this step: one
// thread writes those of a head, in order.
inline void rope_and_cache(Team &team, const ip_layer &layer, const ip_step &step, const ip_cache &cache,
                           const bf16 *qkv, bf16 *q) {
  int64_t all = layer.heads + 2 * layer.kv_heads;
  team.for_each_chunk(step.tokens * all, 8, [&](int64_t first, int64_t last) {
    for (int64_t u = first; u < last; u++) {
      const int64_t t = u / all, h = u % all, key = h - layer.heads;
      if (cache.k_kind != IP_KV_INT4_DIFFERENCES || key < 0 || key >= layer.kv_heads)
        rope_and_cache_head(layer, step, cache, qkv, t, h, q);
      else if (t == key % step.tokens)
        for (int64_t i = 0; i < step.tokens; i++) rope_and_cache_head(layer, step, cache, qkv, i, h, q);
    }
  });
}

// `rope_and_cache`, then attention from `q` over the cache to args.out. If each sequence is one task, one thread does
// both, head by head, which saves a barrier; `prefetched` is then the result of `prefetch_first_unit`. Every thread of
// the team calls it; results are complete on return. Ends the phases kRopeCache (unless both are one) and kAttend.
inline void rope_cache_and_attend(Team &team, const ip_layer &layer, const ip_step &step, const ip_cache &cache,
                                  const bf16 *qkv, bf16 *q, const AttentionArgs &args, const AttentionPlan &plan,
                                  const PrefetchedUnit &prefetched, PhaseTimer &phases) {
  if (plan.one_task_per_sequence) {
    int64_t group = layer.heads / layer.kv_heads;
    attend(team, args, plan, [&](const AttentionTask &task, int64_t g) {
      for (int64_t t = task.first; t < task.first + task.tokens; t++) {
        for (int64_t h = g * group; h < (g + 1) * group; h++) rope_and_cache_head(layer, step, cache, qkv, t, h, q);
        rope_and_cache_head(layer, step, cache, qkv, t, layer.heads + g, q);
        rope_and_cache_head(layer, step, cache, qkv, t, layer.heads + layer.kv_heads + g, q);
      }
    }, prefetched);
  } else {
    rope_and_cache(team, layer, step, cache, qkv, q);
    team.barrier();
    phases.end_phase(kRopeCache);
    attend(team, args, plan);
  }
  team.barrier();
  phases.end_phase(kAttend);
}

// Multiplies the results of attention, mixed [m, heads, head_dim], by the sigmoids of the gates in qkv. Every thread of
// the team calls it; complete on return.
inline void apply_output_gates(Team &team, const ip_layer &layer, const bf16 *qkv, int64_t m, bf16 *mixed) {
  int64_t d = layer.head_dim, heads = layer.heads, all = projected_heads(layer);
  team.for_each_chunk(m * heads, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const bf16 *gate = qkv + (i / heads * all + 2 * (i % heads) + 1) * d;
      bf16 *y = mixed + i * d;
      for_each_register(d, [&](int64_t c, int64_t n) __attribute__((always_inline)) {
        store_floats(y + c, load_floats(y + c, n) / (1.0f + vexp(-load_floats(gate + c, n))), n);
      });
    }
  });
  team.barrier();
}

// Where the normed rows (y) and their input with the residual (s) are, both [m, d].
struct NormResult {
  const bf16 *y, *s;
};
// s = after(x) + r (r null: s is x; no norm `after`: x + r), y = norm(s), for m dense rows of d entries; returns where
// y and s are. At most kMaxDecodeRows rows: each thread computes all of them for itself, in its workspace `norm_slot`,
// and `s` and `y` are not written. More rows: the team shares them and writes `s` (if r is not null) and `y`, and waits
// at a barrier. Every thread of the team calls it; the result is complete for this thread on return.
inline NormResult add_norm(Team &team, const ip_norm &after, const bf16 *x, const bf16 *r, const ip_norm &norm,
                           int64_t m, int64_t d, bf16 *s, bf16 *y, int norm_slot) {
  if (m > kMaxDecodeRows) {
    rms_norm(team, after, x, d, r, norm, m, d, r ? s : nullptr, y);
    team.barrier();
    return {y, r ? s : x};
  }
  bf16 *mine = workspace(norm_slot)->reserve<bf16>(2 * m * d);
  for (int64_t i = 0; i < m; i++)
    rms_norm_row_after(after, x + i * d, r ? r + i * d : nullptr, norm, d, r ? mine + (m + i) * d : nullptr,
                       mine + i * d);
  return {mine, r ? mine + m * d : x};
}

// x = norm(x), for m dense rows of d entries that are complete; every thread of the team calls it, complete on return.
inline void norm_in_place(Team &team, const ip_norm &norm, bf16 *x, int64_t m, int64_t d) {
  rms_norm(team, {}, x, d, nullptr, norm, m, d, nullptr, x);
  team.barrier();
}

// Latent attention, from the normed x [tokens, width] to buffers.mixed [tokens, heads, value]: projections, norms,
// writing the cache, folded queries, attention, values. Tokens of slot -1 are not written to the cache. Every thread of
// the team calls it; results are complete on return.
inline void attend_latents(Team &team, const ip_layer &layer, const ip_step &step, const ip_cache &cache, const bf16 *x,
                           const LayerBuffers &buffers, const AttentionArgs &args, const AttentionPlan &plan,
                           PhaseTimer &phases) {
  const ip_latent &t = *layer.latent;
  int64_t m = step.tokens, width = layer.o.n, q_rank = t.q_a.n, all = t.latent + t.rope;
  linear(team, q_rank ? t.q_a : t.q_b, x, width, m, q_rank ? buffers.q_latent : buffers.q, q_rank ? q_rank : t.q_b.n,
         0);
  linear(team, t.kv_a, x, width, m, buffers.qkv, all, 0);
  team.barrier();
  phases.end_phase(kProject);
  team.for_each_chunk(m, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      if (q_rank)
        rms_norm_row(buffers.q_latent + i * q_rank, nullptr, t.q_a_norm, q_rank, nullptr,
                     buffers.mlp_input + i * q_rank);
      if (step.slots[i] < 0) continue;
      bf16 *entries = workspace(kEntriesInBf16)->reserve<bf16>(all);
      rms_norm_row(buffers.qkv + i * all, nullptr, t.kv_a_norm, t.latent, nullptr, entries);
      rope_head(buffers.qkv + i * all + t.latent, layer.rope + step.positions[i] * t.rope, t.rope, layer.interleaved,
                entries + t.latent);
      write_entries(key_entries(cache, all), step.slots[i], 0, entries, all);
    }
  });
  if (q_rank) {
    team.barrier();
    linear(team, t.q_b, buffers.mlp_input, q_rank, m, buffers.q, t.q_b.n, 0);
    team.barrier();
  }
  phases.end_phase(kRopeCache);
  int64_t head = t.nope + t.rope;
  MlaArgs mla = {buffers.q, buffers.q + t.nope, layer.heads * head, head, layer.heads * head, head, t.kv_b, layer.heads,
                 t.nope, t.rope, t.value, t.latent, m, buffers.folded, buffers.latents, buffers.mixed};
  fold_queries(team, mla, [&](int64_t i, const bf16 *from, bf16 *to) {
    rope_head(from, layer.rope + step.positions[i] * t.rope, t.rope, layer.interleaved, to);
  });
  team.barrier();
  attend(team, args, plan);
  team.barrier();
  project_values(team, mla);
  team.barrier();
  phases.end_phase(kAttend);
}

// out [m, width] = the routed experts' weighted sum plus the shared experts' MLP, if the layer has one, from the normed
// x [m, width]. One thread routes all tokens. Every thread of the team calls it; `out` is complete after the next
// `barrier`.
inline void run_experts(Team &team, const ip_layer &layer, int64_t m, const bf16 *x, const LayerBuffers &buffers,
                        bf16 *out, PhaseTimer &phases) {
  const ip_experts &r = *layer.routed;
  int64_t width = layer.o.n;
  bool shared = layer.gate_up.n > 0;
  linear(team, r.router, x, width, m, buffers.logits, r.experts, 1);
  if (shared) gate_up_activation_mul(team, layer.gate_up, x, m, layer.activation, buffers.mlp_hidden);
  team.barrier();
  MoeArgs moe = buffers.moe;
  moe.gate_up = r.gate_up, moe.down = r.down, moe.experts = r.experts, moe.tokens = m, moe.top = r.top;
  moe.inner = r.down->k, moe.width = width, moe.x = x, moe.ldx = width;
  moe.ids = buffers.ids, moe.weights = buffers.weights, moe.out = out, moe.clamped = r.clamped;
  team.for_each_chunk(1, 1, [&](int64_t, int64_t) {
    for (int64_t i = 0; i < m; i++)
      route_token(r, buffers.logits + i * r.experts, buffers.ids + i * r.top, buffers.weights + i * r.top);
    plan_moe(moe);
    *buffers.num_tasks = moe.count;
  });
  team.barrier();
  moe.count = *buffers.num_tasks;
  moe_gate_up(team, moe);
  if (shared) linear(team, layer.down, buffers.mlp_hidden, layer.down.k, m, buffers.shared, width, 0);
  team.barrier();
  phases.end_phase(kMlp);
  moe_down(team, moe);
  team.barrier();
  moe_sum(team, moe, shared ? buffers.shared : nullptr);
}

// Computes a layer: out and out_residual from x and residual, all [tokens, width]; residual may be null. out_residual
// may be null if tokens are at most kMaxDecodeRows. Every thread of the team calls it; all is complete on return,
// except for out_residual then, which thread 0 alone writes and which is complete when the call ends. Returns this
// thread's copy of the residual for the next layer. Layers that follow each other in one call need x and `out` that no
// other layer uses: a delayed thread still reads them. All other buffers may be used again, since a thread that finds
// work in a phase knows that all work of the phases before is done.
inline const bf16 *decoder_layer(Team &team, const ip_layer &layer, const ip_step &step, const ip_cache &cache,
                                 const bf16 *x, const bf16 *residual, bf16 *out, bf16 *out_residual,
                                 const LayerBuffers &buffers, const AttentionArgs &args, const AttentionPlan &plan,
                                 PhaseTimer &phases) {
  int64_t m = step.tokens, width = layer.o.n;
  NormResult first = add_norm(team, {}, x, residual, layer.attn_norm, m, width, buffers.attn_residual,
                              buffers.attn_input, kNormedRows);
  phases.end_phase(kAttnNorm);
  if (layer.mixer) {
    mix_tokens(team, *layer.mixer, step.sequences, first.y, (bf16 *)cache.k, (float *)cache.v, buffers.mixer);
    phases.end_phase(kAttend);
  } else if (layer.latent) {
    attend_latents(team, layer, step, cache, first.y, buffers, args, plan, phases);
  } else {
    linear(team, layer.qkv, first.y, width, m, buffers.qkv, layer.qkv.n, 0);
    PrefetchedUnit prefetched;
    if (plan.one_task_per_sequence) prefetched = prefetch_first_unit(team, args, plan);
    team.barrier();
    phases.end_phase(kProject);
    rope_cache_and_attend(team, layer, step, cache, buffers.qkv, buffers.q, args, plan, prefetched, phases);
    if (layer.output_gate) apply_output_gates(team, layer, buffers.qkv, m, buffers.mixed);
  }
  linear(team, layer.o, layer.mixer ? buffers.mixer.mixed : buffers.mixed, layer.o.k, m, buffers.attn_output, width, 0);
  team.barrier();
  phases.end_phase(kOut);
  NormResult second = add_norm(team, layer.attn_after, buffers.attn_output, first.s, layer.mlp_norm, m, width,
                               out_residual, buffers.mlp_input, kSecondNormedRows);
  if (m <= kMaxDecodeRows && out_residual && team.id == 0)
    memcpy(out_residual, second.s, (size_t)(m * width) * sizeof(bf16));
  phases.end_phase(kMlpNorm);
  if (layer.routed) {
    run_experts(team, layer, m, second.y, buffers, out, phases);
  } else {
    gate_up_activation_mul(team, layer.gate_up, second.y, m, layer.activation, buffers.mlp_hidden);
    team.barrier();
    phases.end_phase(kMlp);
    linear(team, layer.down, buffers.mlp_hidden, layer.down.k, m, out, width, 0);
  }
  team.barrier();
  if (layer.mlp_after.weight) norm_in_place(team, layer.mlp_after, out, m, width);
  phases.end_phase(kDown);
  return second.s;
}

}  // namespace
