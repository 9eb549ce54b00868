// What a call of decoder layers needs besides the layers: buffers, the arguments of attention, an estimate of work.
// isa_entries.h and layer_sequence.h call it, on the calling thread, before the team starts.
#pragma once
#include "model/decoder_layer.h"

namespace {

// Columns of the dense MLP between its products, which is its number of gate rows; 0 if the layer has none.
int64_t inner_size(const ip_layer &layer) { return layer.gate_up.n / 2; }

// Reserves buffers in this thread's workspaces for `count` layers with m tokens in one call, each as large as the
// largest layer needs it; the layers share them, except for attn_output (2 * round_up(m * width, 16) entries per layer)
// and num_tasks (one per layer). They are not cleared.
LayerBuffers reserve_layer_buffers(const ip_layer *const *layers, int64_t count, int64_t m) {
  int64_t width = layers[0]->o.n, heads = 0;
  int64_t first = 0, q = 0, wide = 0, inner = 0, q_rank = 0, all = 0, latent = 0;
  LayerBuffers buffers = {};
  buffers.moe.tokens = m, buffers.moe.width = width;
  for (int64_t i = 0; i < count; i++) {
    const ip_layer &layer = *layers[i];
    heads = max64(heads, layer.heads);
    wide = max64(wide, layer.o.k), inner = max64(inner, inner_size(layer));
    if (layer.latent) {
      q_rank = max64(q_rank, layer.latent->q_a.n), latent = layer.latent->latent, all = latent + layer.latent->rope;
      first = max64(first, all), q = max64(q, layer.latent->q_b.n);
    } else {
      first = max64(first, layer.qkv.n), q = max64(q, layer.heads * layer.head_dim);
    }
    if (!layer.routed) continue;
    buffers.moe.experts = max64(buffers.moe.experts, layer.routed->experts),
    buffers.moe.top = max64(buffers.moe.top, layer.routed->top);
    buffers.moe.inner = max64(buffers.moe.inner, layer.routed->down->k);
  }
  bf16 **each[] = {&buffers.attn_input, &buffers.mlp_input, &buffers.attn_residual, &buffers.qkv,
                   &buffers.q,          &buffers.mixed,     &buffers.mlp_hidden,    &buffers.q_latent,
                   &buffers.folded,     &buffers.latents,   &buffers.shared,        &buffers.attn_output};
  int64_t rows[] = {width, max64(width, q_rank), width, first, q, wide, inner, q_rank, heads * all, heads * latent,
                    buffers.moe.experts ? width : 0, 0};
  int64_t size = 0;
  for (int64_t n : rows) size += round_up(m * n, kLanes);
  buffers.mixer = reserve_mixer_buffers(count, [&](int64_t i) { return layers[i]->mixer; }, m, workspace(kMixerRows));
  bf16 *at = workspace(kLayerRows)->reserve<bf16>(size + count * 2 * round_up(m * width, kLanes));
  for (int i = 0; i < 12; i++) {
    *each[i] = at;
    at += round_up(m * rows[i], kLanes);
  }
  if (!buffers.moe.experts) return buffers;
  buffers.logits = workspace(kRouterLogits)->reserve<float>(m * (buffers.moe.experts + buffers.moe.top));
  buffers.weights = buffers.logits + m * buffers.moe.experts;
  buffers.ids = workspace(kExpertIds)->reserve<int64_t>(m * buffers.moe.top + count);
  buffers.num_tasks = buffers.ids + m * buffers.moe.top;
  reserve_moe(buffers.moe, workspace(kExpertPairs));
  return buffers;
}

// The arguments of a layer's attention, unless it has a mixer: from buffers.q to buffers.mixed, or for latents from buffers.folded to
// buffers.latents.
AttentionArgs layer_attention_args(const ip_layer &layer, const ip_cache &cache, const LayerBuffers &buffers) {
  if (layer.mixer) return {};
  if (layer.latent) {
    int64_t latent = layer.latent->latent, dim = latent + layer.latent->rope;
    return attention_args(cache, buffers.folded, layer.heads, 1, dim, latent, 0, layer.scale, buffers.latents);
  }
  AttentionArgs args = attention_args(cache, buffers.q, layer.heads, layer.kv_heads, layer.head_dim, layer.head_dim,
                                      layer.window, layer.scale, buffers.mixed);
  args.sinks = layer.sinks, args.softcap = layer.softcap;
  return args;
}

// The plan of a layer's attention, an empty one if it has a mixer; `s` as in `plan_attention`.
AttentionPlan plan_layer_attention(const ip_layer &layer, const AttentionArgs &args, const ip_batch &batch,
                                   Workspace s[2]) {
  return layer.mixer ? AttentionPlan{} : plan_attention(args, batch, team_size(), s);
}

// Writes zeros to the results of attention, [m, heads * v_dim]: attention skips padded rows, and what follows must not
// read memory that was never written.
void clear_attention_results(const ip_layer &layer, int64_t m, const LayerBuffers &buffers) {
  int64_t wide = layer.latent ? layer.heads * layer.latent->latent : layer.o.k;
  memset(layer.latent ? buffers.latents : buffers.mixed, 0, (size_t)(m * wide) * sizeof(bf16));
}

// The work of one layer with m tokens, as `run_on_team` counts it; attention over the cache is not included.
int64_t estimate_layer_work(const ip_layer &layer, int64_t m) {
  int64_t projection = layer.mixer ? layer.mixer->proj.n * layer.mixer->proj.k : layer.latent ? layer.latent->q_b.n * layer.latent->q_b.k : layer.qkv.n * layer.qkv.k;
  int64_t moe = layer.routed ? layer.routed->top * layer.routed->down->k * layer.o.n : 0;
  return m * (projection + layer.o.k * layer.o.n + 3 * (inner_size(layer) * layer.o.n + moe)) / 4;
}

}  // namespace
