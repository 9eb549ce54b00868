// Decoder layers of few tokens in one call. isa_entries.h calls it for `ip_decoder_layers` and `ip_model_step`.
#pragma once
#include "model/layer_buffers.h"

namespace {

// Whether the heads and head size (or latents) of layers with attention are equal, so that one set of buffers serves
// both, and one plan of attention if their windows and steps are equal too.
bool have_same_attention(const ip_layer &a, const ip_layer &b) {
  if (a.heads != b.heads || a.kv_heads != b.kv_heads) return false;
  if (!a.latent || !b.latent) return !a.latent && !b.latent && a.head_dim == b.head_dim;
  return a.latent->latent == b.latent->latent && a.latent->rope == b.latent->rope;
}

// Layers in one call, each with its own cache and the results of the layer before it. The leading thread constructs it
// before the team starts, which reserves the buffers and plans attention.
struct LayerSequence {
  const ip_layer *const *layers;
  const ip_cache *caches;
  int64_t count;
  const ip_layer_steps *steps;
  const ip_step *step;  // of the first layer
  LayerBuffers shared;
  // Of the layers whose window and step are those of layer `first`.
  struct Plan {
    int64_t first;
    AttentionPlan of;
  } plans[kMaxAttentionPlans];
  int num_plans = 0;
  AttentionPlan no_plan;  // of layers with a mixer

  // The step of layer i.
  static const ip_step &step_of(const ip_layer_steps &steps, int64_t i) {
    return *steps.steps[steps.number ? steps.number[i] : 0];
  }
  // Whether layers i and j see the same keys of the same blocks.
  static bool share_plan(const ip_layer *const *layers, const ip_layer_steps &steps, int64_t i, int64_t j) {
    return layers[i]->window == layers[j]->window && &step_of(steps, i) == &step_of(steps, j);
  }
  // The plan of layer i.
  const AttentionPlan &plan_of(int64_t i) const {
    if (layers[i]->mixer) return no_plan;
    int p = 0;
    while (!share_plan(layers, *steps, i, plans[p].first)) p++;
    return plans[p].of;
  }

  // Entries of a row between layers.
  int64_t width() const { return layers[0]->o.n; }
  // The work of all layers, as `run_on_team` counts it.
  int64_t work() const {
    int64_t all = 0;
    for (int64_t i = 0; i < count; i++) all += estimate_layer_work(*layers[i], step->tokens);
    return all;
  }
  // The first layer with attention; 0 if there is none.
  static int64_t first_with_attention(const ip_layer *const *layers, int64_t count) {
    for (int64_t i = 0; i < count; i++)
      if (!layers[i]->mixer) return i;
    return 0;
  }

  // Whether the layers can be one call: at most kMaxDecodeRows tokens, layers of one width, those with attention of one
  // shape (`have_same_attention`) with caches of one block size, and at most kMaxAttentionPlans pairs of a window and a
  // step.
  static bool supports(const ip_layer *const *layers, const ip_cache *caches, int64_t count,
                       const ip_layer_steps *steps) {
    if (step_of(*steps, 0).tokens > kMaxDecodeRows) return false;
    int num_plans = 0;
    int64_t first[kMaxAttentionPlans], like = first_with_attention(layers, count);
    for (int64_t i = 0; i < count; i++) {
      if (layers[i]->o.n != layers[0]->o.n) return false;
      if (layers[i]->mixer) continue;
      if (!have_same_attention(*layers[like], *layers[i]) || caches[i].block != caches[like].block) return false;
      int p = 0;
      while (p < num_plans && !share_plan(layers, *steps, i, first[p])) p++;
      if (p == kMaxAttentionPlans) return false;
      if (p == num_plans) first[num_plans++] = i;
    }
    return true;
  }

  LayerSequence(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_layer_steps *steps)
      : layers(layers),
        caches(caches),
        count(count),
        steps(steps),
        step(&step_of(*steps, 0)),
        shared(reserve_layer_buffers(layers, count, step->tokens)) {
    clear_attention_results(*layers[first_with_attention(layers, count)], step->tokens, shared);
    for (int64_t i = 0; i < count; i++) {
      if (layers[i]->mixer) continue;
      int p = 0;
      while (p < num_plans && !share_plan(layers, *steps, i, plans[p].first)) p++;
      if (p < num_plans) continue;
      plans[num_plans++] = {i, plan_attention(layer_attention_args(*layers[i], caches[i], shared),
                                              step_of(*steps, i).batch, team_size(), workspace(kLayerTasks + 2 * p))};
    }
  }

  // Computes all layers, each from the results of the one before it: x and residual [tokens, width] (residual may be
  // null) to out and out_residual (may be null) of the last layer. Every thread of the team calls it; `out` is complete
  // on return, out_residual when the call ends. Returns this thread's copy of the last residual [tokens, width].
  const bf16 *run(Team &team, const bf16 *x, const bf16 *residual, bf16 *out, bf16 *out_residual,
                  PhaseTimer &phases) const {
    int64_t rows = round_up(step->tokens * width(), kLanes);
    for (int64_t i = 0; i < count; i++) {
      bool last = i + 1 == count;
      LayerBuffers buffers = shared;
      buffers.attn_output += 2 * i * rows;
      if (buffers.num_tasks) buffers.num_tasks += i;
      bf16 *to = last ? out : buffers.attn_output + rows;
      residual = decoder_layer(team, *layers[i], step_of(*steps, i), caches[i], x, residual, to,
                               last ? out_residual : nullptr, buffers,
                               layer_attention_args(*layers[i], caches[i], shared), plan_of(i), phases);
      x = to;
    }
    return residual;
  }
};

}  // namespace
