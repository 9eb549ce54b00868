// Decoder layers of few tokens in one call. isa_entries.h calls it for `ip_decoder_layers` and `ip_model_step`.
#pragma once
#include "model/layer_buffers.h"

namespace {

// Whether the layers' width, heads, window and head size (or latents) are equal, so that one plan of attention and one
// set of buffers serve both.
bool have_same_shape(const ip_layer &a, const ip_layer &b) {
  if (a.o.n != b.o.n || a.heads != b.heads || a.kv_heads != b.kv_heads || a.window != b.window) return false;
  if (!a.latent || !b.latent) return !a.latent && !b.latent && a.head_dim == b.head_dim;
  return a.latent->latent == b.latent->latent && a.latent->rope == b.latent->rope;
}

// Layers in one call, each with its own cache and the results of the layer before it. The leading thread constructs it
// before the team starts, which reserves the buffers and plans attention.
struct LayerSequence {
  const ip_layer *const *layers;
  const ip_cache *caches;
  int64_t count;
  const ip_step *step;
  LayerBuffers shared;
  AttentionPlan plan;

  // Entries of a row between layers.
  int64_t width() const { return layers[0]->o.n; }
  // The work of all layers, as `run_on_team` counts it.
  int64_t work() const { return count * estimate_layer_work(*layers[0], step->tokens); }

  // Whether the layers can be one call: at most kMaxDecodeRows tokens, layers of one shape (`have_same_shape`), and
  // caches of one block size.
  static bool supports(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step) {
    if (step->tokens > kMaxDecodeRows) return false;
    for (int64_t i = 1; i < count; i++)
      if (!have_same_shape(*layers[0], *layers[i]) || caches[i].block != caches[0].block) return false;
    return true;
  }

  LayerSequence(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step)
      : layers(layers),
        caches(caches),
        count(count),
        step(step),
        shared(reserve_layer_buffers(layers, count, step->tokens)) {
    clear_attention_results(*layers[0], step->tokens, shared);
    plan = plan_attention(layer_attention_args(*layers[0], caches[0], shared), step->batch, team_size(),
                          workspace(kAttentionTasks));
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
      residual = decoder_layer(team, *layers[i], *step, caches[i], x, residual, to, last ? out_residual : nullptr,
                               buffers, layer_attention_args(*layers[i], caches[i], shared), plan, phases);
      x = to;
    }
    return residual;
  }
};

}  // namespace
