// The kernels of one instruction set as the functions of inferplane_cpu.h: each plans its work, starts the team and
// calls the headers of the folders. Each isa_*.cpp includes this file with its own compiler flags, ISA_NAME and
// ISA_TABLE; api.cpp calls through the table at the end. A function `x_entry` is `ip_x` of inferplane_cpu.h, which
// documents it.
//
// The folders, each of which includes only those before it: runtime (threads, memory, vectors), products (weights times
// activations), sampling (tokens from logits), attention (over the KV cache), model (layers, experts, routing),
// recurrent (convolutions, states).
#pragma once
#include "model/layer_sequence.h"
#include "runtime/kernel_table.h"
#include "sampling/argmax.h"
#include "sampling/sample_row.h"
#include "sampling/scale_logits.h"

#include "products/w8a8_gemm.h"

#include "attention/prefill.h"
#if defined(INFERPLANE_PREFILL)
#include "model/prefill_layer_narrow.h"
#include "model/prefill_layer_w8a8.h"

#include "model/prefill_layer.h"
#endif

#include "attention/index_select.h"
#include "model/hyper.h"
#include "model/sparse_mla.h"
#include "recurrent/entries.h"

namespace {

// `ip_linear_prefill`: y = x w^T + bias for many rows. Returns 0 without INFERPLANE_PREFILL, unless w is W8A8 or has
// narrow inputs, which every instruction set multiplies.
int linear_prefill_entry(const ip_matrix *w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  if (w->kind == IP_W8A8) {
    Int8Activations bytes = reserve_int8(workspace(kInt8Rows), m, *w);
    run_on_team(w->n * w->k / 8 * m, [&](Team &team) { w8a8_linear(team, *w, bytes, x, ldx, y, ldy, wide); });
    return 1;
  }
  if (w->input != IP_INPUT_INT16) {
    run_on_team(w->n * w->k / 4 * m, [&](Team &team) { linear(team, *w, x, ldx, m, y, ldy, wide); });
    return 1;
  }
#if defined(INFERPLANE_PREFILL)
  ActivationPanels panels = reserve_panels(workspace(kInputPanels), m, w->k);
  run_on_team(w->n * w->k / 4 * m, [&](Team &team) {
    fill_panels(team, panels, w->k, [&](int64_t i) { return x + i * ldx; });
    team.barrier();
    gemm_to_rows(team, *w, panels, y, ldy, wide);
  });
  return 1;
#else
  return 0;
#endif
}

// `ip_linear`: y = x w^T + bias; y in float32 if `wide`, else bf16. Complete on return, as all results of this file.
void linear_entry(const ip_matrix *w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  // For many rows, if that gives the same bits: it does if no row of the weight is left over from the tiles.
  bool same = w->kind == IP_W8A8 || (kDotOnTiles && is_bf16(*w) && w->n % 16 == 0);
  if (m > kMaxRowsAtOnce && same && linear_prefill_entry(w, x, ldx, m, y, ldy, wide)) return;
  run_on_team(w->n * w->k / 4 * m, [&](Team &team) { linear(team, *w, x, ldx, m, y, ldy, wide); });
}

// `ip_dequantize_rows`: rows first .. last of w in bf16 to `out` [last - first, k].
void dequantize_rows_entry(const ip_matrix *w, int64_t first, int64_t last, bf16 *out) {
  run_on_team((last - first) * w->k, [&](Team &team) { dequantize_rows(team, *w, first, last, out); });
}

// `ip_gather_rows`: rows ids[0 .. count] of w in bf16 times `factor` to `out` [count, k]; zeros for an id that is no
// row.
void gather_rows_entry(const ip_matrix *w, const int64_t *ids, int64_t count, float factor, bf16 *out) {
  run_on_team(count * w->k, [&](Team &team) {
    team.for_each_chunk(count, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        if (ids[i] >= 0 && ids[i] < w->n)
          dequantize_row_times(*w, ids[i], factor, out + i * w->k);
        else
          memset(out + i * w->k, 0, (size_t)w->k * sizeof(bf16));
      }
    });
  });
}

// `ip_scale_logits`: logits[0 .. count], changed in place.
void scale_logits_entry(const ip_logit_scale *scale, float *logits, int64_t count) {
  run_on_team(count * 2, [&](Team &team) {
    team.for_each_chunk(count, 4096, [&](int64_t first, int64_t last) {
      scale_logits(*scale, logits + first, last - first);
    });
  });
}

// `ip_rms_norm`: s = x + r, y = norm(s), for m rows of d entries.
void rms_norm_entry(const bf16 *x, int64_t ldx, const bf16 *r, const ip_norm *norm, int64_t m, int64_t d, bf16 *s,
                    bf16 *y) {
  run_on_team(m * d / 4, [&](Team &team) { rms_norm(team, {}, x, ldx, r, *norm, m, d, s, y); });
}

// `ip_activation_mul`: y [m, d] = f(x[:, :d]) * x[:, d:], within limits.
void activation_mul_entry(const bf16 *x, int64_t ldx, int64_t m, int64_t d, int activation,
                          const ip_gate_limits *limits, bf16 *y) {
  ip_gate_limits by = limits ? *limits : kNoLimits;
  run_on_team(m * d / 2, [&](Team &team) { activation_mul(team, x, ldx, m, d, activation, by, y); });
}

// `ip_rope`: y [m, heads, dim] = x with each head rotated by its row's position.
void rope_entry(const bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
                int64_t m, int64_t heads, int64_t dim, int interleaved, bf16 *y) {
  run_on_team(m * heads * dim / 4, [&](Team &team) {
    rope(team, x, row_stride, head_stride, table, positions, m, heads, dim, interleaved, y);
  });
}

// Estimates the keys that all query tokens of a batch see together: tokens times the sequence's length.
int64_t count_keys(const ip_batch &batch) {
  int64_t keys = 0;
  for (int64_t i = 0; i < batch.sequences; i++) keys += (batch.start[i + 1] - batch.start[i]) * batch.lens[i];
  return keys;
}

// `ip_attention`: causal attention of few query tokens over the paged cache, to `out` [tokens, heads, v_dim].
void attention_entry(const bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t v_dim, float scale, int64_t window, const float *sinks, float softcap,
                     bf16 *out) {
  AttentionArgs args = attention_args(*cache, q, heads, kv_heads, dim, v_dim, window, scale, out);
  args.sinks = sinks, args.softcap = softcap;
  int64_t work = count_keys(*batch) * heads * (dim + v_dim) / 4;
  AttentionPlan plan = plan_attention(args, *batch, work < 16384 ? 1 : team_size(), workspace(kAttentionTasks));
  run_on_team(work, [&](Team &team) { attend(team, args, plan); });
}

// `ip_attention_prefill`: attention of many query tokens; sequences with few of them, which come first, are computed by
// `attend`. Returns 0, with `out` not written, without INFERPLANE_PREFILL or if sizes do not suit (`can_prefill`).
int attention_prefill_entry(const bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                            int64_t kv_heads, int64_t dim, int64_t v_dim, float scale, int64_t window,
                            const float *sinks, float softcap, bf16 *out) {
#if defined(INFERPLANE_PREFILL)
  AttentionArgs args = attention_args(*cache, q, heads, kv_heads, dim, v_dim, window, scale, out);
  args.sinks = sinks, args.softcap = softcap;
  if (!can_prefill(args)) return 0;
  PrefillPlan prefill = plan_prefill(*batch, kv_heads, team_size(), workspace(kPrefillTasks));
  ip_batch decode = *batch;
  decode.sequences = prefill.num_decode;
  AttentionPlan plan = plan_attention(args, decode, team_size(), workspace(kAttentionTasks));
  run_on_team(count_keys(*batch) * heads * (dim + v_dim) / 4, [&](Team &team) {
    attend(team, args, plan);
    attend_prefill(team, args, prefill);
  });
  return 1;
#else
  return 0;
#endif
}

// `ip_mla`: absorbed latent attention, to `out` [tokens, heads, value]; padded rows become zeros.
void mla_entry(const bf16 *q_nope, const int64_t *nope_strides, const bf16 *q_rope, const int64_t *rope_strides,
               const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope,
               int64_t rope, int64_t value, int64_t latent, float scale, bf16 *out) {
  int64_t tokens = batch->start[batch->sequences], dim = latent + rope;
  bf16 *folded = workspace(kFoldedQueries)->reserve<bf16>(tokens * heads * dim),
       *mixed = workspace(kMixedLatents)->reserve<bf16>(tokens * heads * latent);
  MlaArgs m = {q_nope, q_rope, nope_strides[0], nope_strides[1], rope_strides[0], rope_strides[1], *kv_b, heads,
           nope,   rope,   value,           latent,          tokens,          folded,          mixed, out};
  AttentionArgs args = attention_args(*cache, folded, heads, 1, dim, latent, 0, scale, mixed);
  int64_t work = count_keys(*batch) * heads * dim / 4 + tokens * heads * latent * (nope + value) / 4;
  AttentionPlan plan = plan_attention(args, *batch, work < 16384 ? 1 : team_size(), workspace(kAttentionTasks));
  // Attention skips padded rows, and what follows must not read memory that was never written.
  memset(mixed, 0, (size_t)(tokens * heads * latent) * sizeof(bf16));
  run_on_team(work, [&](Team &team) { mla(team, m, args, plan); });
}

// `ip_moe`: routed experts, kMaxMoeTokens tokens at a time, to `out` [m, width]; -1, and nothing is written, if an id
// is none of 0 .. experts - 1.
int moe_entry(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_clamped_gate *clamped,
              const ip_gate_limits *limits, const bf16 *x, int64_t ldx, int64_t m, const int64_t *ids,
              const float *weights, int64_t top, bf16 *out) {
  for (int64_t p = 0; p < m * top; p++)
    if (ids[p] < 0 || ids[p] >= experts) return -1;
  int64_t inner = down->k, width = down->n;
  for (int64_t t = 0; t < m; t += kMaxMoeTokens) {
    MoeArgs part = {gate_up, down, experts, min64(kMaxMoeTokens, m - t), top, inner, width, x + t * ldx, ldx,
                    ids + t * top, weights + t * top, out + t * width, clamped, nullptr, nullptr, 0, nullptr, nullptr};
    if (limits) part.limits = *limits;
    reserve_moe(part, workspace(kExpertPairs));
    plan_moe(part);
    run_on_team(part.tokens * top * inner * width / 2, [&](Team &team) { moe(team, part); });
  }
  return 0;
}

// `ip_route_experts`: ids and weights [m, top] from router logits [m, experts].
void route_experts_entry(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights) {
  run_on_team(m * x->experts * x->top, [&](Team &team) {
    team.for_each_chunk(m, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++)
        route_token(*x, logits + i * x->experts, ids + i * x->top, weights + i * x->top);
    });
  });
}

// `ip_expert_weights`: weights [m, top] of experts that are given.
void expert_weights_entry(const ip_experts *x, const float *logits, int64_t m, const int64_t *ids, float *weights) {
  run_on_team(m * x->experts, [&](Team &team) {
    team.for_each_chunk(m, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        float *score = workspace(kRouterLogits)->reserve<float>(x->experts);
        expert_scores(logits + i * x->experts, x->experts, x->score, score);
        expert_weights(*x, score, ids + i * x->top, weights + i * x->top);
      }
    });
  });
}

// `ip_decoder_layer`: plans one layer and runs it. For many tokens of a layer that is `rounded`, with grouped queries
// and no experts, `prefill_layer` or, for W8A8 and narrow inputs, `prefill_layer_w8a8` and `prefill_layer_narrow`
// compute it; else `decoder_layer`.
void decoder_layer_entry(const ip_layer *layer, const ip_step *step, const bf16 *x, const bf16 *residual, bf16 *out,
                         bf16 *out_residual) {
  PhaseTimer phases(true);
  int64_t m = step->tokens;
  LayerBuffers buffers = reserve_layer_buffers(&layer, 1, m);
  AttentionArgs args = layer_attention_args(*layer, step->cache, buffers);
  clear_attention_results(*layer, m, buffers);
#if defined(INFERPLANE_PREFILL)
  bool on_tiles = layer->rounded && !layer->latent && !layer->routed && !layer->mixer && !layer->output_gate &&
                  m > kMaxRowsAtOnce && can_prefill(args);
  if (on_tiles && layer->qkv.kind == IP_W8A8) {
    Int8LayerInputs bytes = reserve_int8_inputs(workspace(kAttentionPanels), m, *layer);
    PrefillPlan prefill = plan_prefill(step->batch, layer->kv_heads, team_size(), workspace(kPrefillTasks));
    ip_batch decode = step->batch;
    decode.sequences = prefill.num_decode;
    AttentionPlan plan = plan_attention(args, decode, team_size(), workspace(kAttentionTasks));
    run_on_team(estimate_layer_work(*layer, m), [&](Team &team) {
      PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
      timer.end_phase(kBegin);
      prefill_layer_w8a8(team, *layer, *step, x, residual, out, out_residual, buffers, args, plan, prefill, bytes,
                         timer);
    });
    return;
  }
  if (on_tiles && layer->qkv.input != IP_INPUT_INT16) {
    PrefillPlan prefill = plan_prefill(step->batch, layer->kv_heads, team_size(), workspace(kPrefillTasks));
    ip_batch decode = step->batch;
    decode.sequences = prefill.num_decode;
    AttentionPlan plan = plan_attention(args, decode, team_size(), workspace(kAttentionTasks));
    run_on_team(estimate_layer_work(*layer, m), [&](Team &team) {
      PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
      timer.end_phase(kBegin);
      prefill_layer_narrow(team, *layer, *step, x, residual, out, out_residual, buffers, args, plan, prefill, timer);
    });
    return;
  }
  if (on_tiles) {
    PrefillBuffers prefill = {reserve_panels(workspace(kInputPanels), m, layer->qkv.k),
                              reserve_panels(workspace(kAttentionPanels), m, layer->o.k),
                              reserve_panels(workspace(kInnerPanels), m, layer->down.k),
                              plan_prefill(step->batch, layer->kv_heads, team_size(), workspace(kPrefillTasks))};
    ip_batch decode = step->batch;
    decode.sequences = prefill.plan.num_decode;
    AttentionPlan plan = plan_attention(args, decode, team_size(), workspace(kAttentionTasks));
    run_on_team(estimate_layer_work(*layer, m), [&](Team &team) {
      PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
      timer.end_phase(kBegin);
      prefill_layer(team, *layer, *step, x, residual, out, out_residual, buffers, args, plan, prefill, timer);
    });
    return;
  }
#endif
  AttentionPlan plan = plan_layer_attention(*layer, args, step->batch, workspace(kAttentionTasks));
  run_on_team(estimate_layer_work(*layer, m), [&](Team &team) {
    PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
    timer.end_phase(kBegin);
    decoder_layer(team, *layer, *step, step->cache, x, residual, out, out_residual, buffers, args, plan, timer);
  });
}

// `ip_decoder_layers`: a sequence of layers for few tokens; 0, and nothing is written, if it is not supported.
int decoder_layers_entry(const ip_layer *const *layers, const ip_cache *caches, int64_t count,
                         const ip_layer_steps *steps, const bf16 *x, const bf16 *residual, bf16 *out,
                         bf16 *out_residual) {
  if (!LayerSequence::supports(layers, caches, count, steps)) return 0;
  PhaseTimer phases(true);
  LayerSequence sequence(layers, caches, count, steps);
  run_on_team(sequence.work(), [&](Team &team) {
    PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
    timer.end_phase(kBegin);
    sequence.run(team, x, residual, out, out_residual, timer);
  });
  return 1;
}

// `ip_model_step`: embeds io->ids, runs all layers, the norm and the head for few tokens, and finds the largest logits.
// 0 if the layers are not supported, -1 if an id or row is out of range or io->num_rows exceeds kMaxDecodeRows; then
// nothing is written.
int model_step_entry(const ip_model *model, const ip_cache *caches, const ip_layer_steps *steps,
                     const ip_model_io *io) {
  if (!LayerSequence::supports(model->layers, caches, model->count, steps)) return 0;
  const ip_step *step = steps->steps[0];
  if (io->num_rows > kMaxDecodeRows) return -1;  // some row would be listed twice
  for (int64_t i = 0; i < step->tokens; i++)
    if (io->ids[i] < 0 || io->ids[i] >= model->embed.n) return -1;
  for (int64_t i = 0; i < io->num_rows && io->rows; i++)
    if (io->rows[i] < 0 || io->rows[i] >= step->tokens) return -1;
  PhaseTimer phases(true);
  LayerSequence sequence(model->layers, caches, model->count, steps);
  int64_t m = step->tokens, width = sequence.width();
  bf16 *x = workspace(kModelRows)->reserve<bf16>(2 * m * width), *out = x + m * width;
  Argmax *argmaxes = workspace(kArgmaxes)->reserve<Argmax>(team_size() * kMaxDecodeRows);
  for (int64_t i = 0; i < team_size() * kMaxDecodeRows; i++) argmaxes[i] = {};
  run_on_team(sequence.work(), [&](Team &team) {
    PhaseTimer timer = team.id == 0 ? phases : PhaseTimer(false);
    Argmax *own_argmaxes = argmaxes + team.id * kMaxDecodeRows;
    timer.end_phase(kBegin);
    team.for_each_chunk(m, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++)
        dequantize_row_times(model->embed, io->ids[i], model->embed_factor, x + i * width);
    });
    team.barrier();
    timer.end_phase(kEmbed);
    const bf16 *residual = sequence.run(team, x, nullptr, out, nullptr, timer);
    NormResult last = add_norm(team, {}, out, residual, model->norm, m, width, nullptr, nullptr, kNormedRows);
    if (team.id == 0) memcpy(io->hidden, last.y, (size_t)(m * width) * sizeof(bf16));
    timer.end_phase(kNorm);
    multiply(
        team, model->head, io->num_rows, [&](int64_t i) { return last.y + (io->rows ? io->rows[i] : i) * width; },
        [&](int64_t i, int64_t j, int64_t n, float *sums) {
          add_bias(model->head, j, n, sums);
          scale_logits(model->logit_scale, sums, n);
          memcpy(io->logits + i * model->head.n + j, sums, (size_t)n * sizeof(float));
          own_argmaxes[i].add(j, n, sums);
        });
    team.barrier();
    timer.end_phase(kHead);
  });
  for (int64_t i = 0; i < io->num_rows && io->argmax; i++) {
    for (int t = 1; t < team_size(); t++) argmaxes[i].add(argmaxes[t * kMaxDecodeRows + i]);
    io->argmax[i] = argmaxes[i].token();
  }
  return 1;
}

// `ip_sample`: draws one token per row of logits into `tokens`.
void sample_entry(const ip_sampling *params, int64_t *tokens) {
  run_on_team(params->rows > 1 ? params->rows * params->vocab : 0, [&](Team &team) {  // one thread draws a row's token
    if (params->is_bf16)
      sample<bf16>(team, *params, tokens);
    else
      sample<float>(team, *params, tokens);
  });
}

// `ip_read_memory`: reads all bytes on all threads and returns a number that depends on them (their bitwise or).
int64_t read_memory_entry(const void *data, int64_t bytes) {
  int64_t total = 0;
  run_on_team(bytes, [&](Team &team) {
    U32x16 all[4] = {};
    team.for_each_chunk(bytes / 64, kChunkBytes / 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const char *at = (const char *)data + i * 64;
        _mm_prefetch(at + 2048, _MM_HINT_T0);
        all[i & 3] |= load<U32x16>(at);
      }
    });
    U32x16 any = all[0] | all[1] | all[2] | all[3];
    for (int l = 0; l < kLanes; l++) __atomic_fetch_or(&total, (int64_t)any[l], __ATOMIC_RELAXED);
  });
  return total;
}

}  // namespace

extern const KernelTable ISA_TABLE = {
    ISA_NAME,         linear_entry,   linear_prefill_entry, dequantize_rows_entry, gather_rows_entry,
    scale_logits_entry, rms_norm_entry,   activation_mul_entry, rope_entry,     attention_entry,       attention_prefill_entry,
    mla_entry,        moe_entry,      route_experts_entry,  decoder_layer_entry,   decoder_layers_entry,
    model_step_entry, sample_entry,   read_memory_entry,    causal_conv1d_entry,   delta_rule_gates_entry,
    gated_delta_rule_entry, gated_norm_entry, selective_scan_entry, recurrent_block_entry,
    index_select_entry, sparse_mla_entry, expert_weights_entry, hyper_pre_entry, hyper_post_entry, sinkhorn_entry};
