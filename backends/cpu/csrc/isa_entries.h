// The functions of one instruction set; a file for each includes this with its own compiler flags.
#pragma once
#include "layer.h"
#include "likeliest.h"
#include "linear.h"
#include "mla.h"
#include "moe.h"
#include "rowwise.h"
#include "sampling.h"
#include "table.h"
#include "tiles.h"
#include "layer_bytes.h"
#if defined(INFERPLANE_MANY)
#include "layer_many.h"
#endif

namespace {

int linear_many_entry(const ip_matrix *w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  if (w->kind == IP_W8A8) {
    Bytes bytes = bytes_in(scratch(20), m, *w);
    in_parallel(w->n * w->k / 8 * m, [&](Team &team) { bytes_linear(team, *w, bytes, x, ldx, y, ldy, wide); });
    return 1;
  }
#if defined(INFERPLANE_MANY)
  PanelsOf panels = panels_in(scratch(16), m, w->k);
  in_parallel(w->n * w->k / 4 * m, [&](Team &team) {
    fill_panels(team, panels, w->k, [&](int64_t i) { return x + i * ldx; });
    team.barrier();
    gemm_rows(team, *w, panels, y, ldy, wide);
  });
  return 1;
#else
  (void)w, (void)x, (void)ldx, (void)m, (void)y, (void)ldy, (void)wide;
  return 0;
#endif
}

void linear_entry(const ip_matrix *w, const bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  // The same bits, where no row of the weight is left over from the tiles.
  bool same = w->kind == IP_W8A8 || (kDotOnTiles && is_bf16(*w) && w->n % 16 == 0);
  if (m > kRowTile && same && linear_many_entry(w, x, ldx, m, y, ldy, wide)) return;
  in_parallel(w->n * w->k / 4 * m, [&](Team &team) { linear(team, *w, x, ldx, m, y, ldy, wide); });
}

void expand_entry(const ip_matrix *w, int64_t first, int64_t last, bf16 *out) {
  in_parallel((last - first) * w->k, [&](Team &team) { expand(team, *w, first, last, out); });
}

void rows_entry(const ip_matrix *w, const int64_t *ids, int64_t count, bf16 *out) {
  in_parallel(count * w->k, [&](Team &team) {
    team.each(count, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        if (ids[i] >= 0 && ids[i] < w->n)
          expand_row(*w, ids[i], out + i * w->k);
        else
          memset(out + i * w->k, 0, (size_t)w->k * sizeof(bf16));
      }
    });
  });
}

void rms_norm_entry(const bf16 *x, int64_t ldx, const bf16 *r, const bf16 *weight, float eps, int64_t m, int64_t d,
                    bf16 *s, bf16 *y) {
  in_parallel(m * d / 4, [&](Team &team) { rms_norm(team, x, ldx, r, weight, eps, m, d, s, y); });
}

void silu_mul_entry(const bf16 *x, int64_t ldx, int64_t m, int64_t d, bf16 *y) {
  in_parallel(m * d / 2, [&](Team &team) { silu_mul(team, x, ldx, m, d, y); });
}

void rope_entry(const bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
                int64_t m, int64_t heads, int64_t dim, int interleaved, bf16 *y) {
  in_parallel(m * heads * dim / 4, [&](Team &team) {
    rope(team, x, row_stride, head_stride, table, positions, m, heads, dim, interleaved, y);
  });
}

int64_t keys_in(const ip_batch &b) {
  int64_t keys = 0;
  for (int64_t i = 0; i < b.sequences; i++) keys += (b.start[i + 1] - b.start[i]) * b.lens[i];
  return keys;
}

void attention_entry(const bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t v_dim, float scale, int64_t window, bf16 *out) {
  Attend a = attend_on(*cache, q, heads, kv_heads, dim, v_dim, window, scale, out);
  int64_t work = keys_in(*batch) * heads * (dim + v_dim) / 4;
  AttendPlan plan = plan_attention(a, *batch, work < 16384 ? 1 : team_size(), scratch(10));
  in_parallel(work, [&](Team &team) { attend(team, a, plan); });
}

int attention_many_entry(const bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                         int64_t dim, int64_t v_dim, float scale, int64_t window, bf16 *out) {
#if defined(INFERPLANE_MANY)
  Attend a = attend_on(*cache, q, heads, kv_heads, dim, v_dim, window, scale, out);
  if (!attends_many(a)) return 0;
  ManyPlan many = plan_many(*batch, kv_heads, team_size(), scratch(17));
  ip_batch few = *batch;
  few.sequences = many.few;
  AttendPlan plan = plan_attention(a, few, team_size(), scratch(10));
  in_parallel(keys_in(*batch) * heads * (dim + v_dim) / 4, [&](Team &team) {
    attend(team, a, plan);
    attend_many(team, a, many);
  });
  return 1;
#else
  (void)q, (void)batch, (void)cache, (void)heads, (void)kv_heads, (void)dim, (void)v_dim, (void)scale, (void)window;
  (void)out;
  return 0;
#endif
}

void mla_entry(const bf16 *q_nope, const int64_t *nope_strides, const bf16 *q_rope, const int64_t *rope_strides,
               const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope,
               int64_t rope, int64_t value, int64_t latent, float scale, bf16 *out) {
  int64_t tokens = batch->start[batch->sequences], dim = latent + rope;
  bf16 *folded = scratch(12)->get<bf16>(tokens * heads * dim), *mixed = scratch(13)->get<bf16>(tokens * heads * latent);
  Mla m = {q_nope, q_rope, nope_strides[0], nope_strides[1], rope_strides[0], rope_strides[1], *kv_b, heads,
           nope,   rope,   value,           latent,          tokens,          folded,          mixed, out};
  Attend a = attend_on(*cache, folded, heads, 1, dim, latent, 0, scale, mixed);
  int64_t work = keys_in(*batch) * heads * dim / 4 + tokens * heads * latent * (nope + value) / 4;
  AttendPlan plan = plan_attention(a, *batch, work < 16384 ? 1 : team_size(), scratch(10));
  // Padded rows are not attended to: nothing must be read of them that was never written.
  memset(mixed, 0, (size_t)(tokens * heads * latent) * sizeof(bf16));
  in_parallel(work, [&](Team &team) { mla(team, m, a, plan); });
}

int moe_entry(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const bf16 *x, int64_t ldx, int64_t m,
              const int64_t *ids, const float *weights, int64_t top, bf16 *out) {
  for (int64_t p = 0; p < m * top; p++)
    if (ids[p] < 0 || ids[p] >= experts) return -1;
  int64_t inner = down->k, width = down->n;
  for (int64_t t = 0; t < m; t += kMoeTokens) {
    Moe part = {gate_up, down, experts, min64(kMoeTokens, m - t), top, inner, width, x + t * ldx, ldx, ids + t * top,
                weights + t * top, out + t * width, nullptr, nullptr, 0, nullptr, nullptr};
    reserve_moe(part, scratch(24));
    plan_moe(part);
    in_parallel(part.tokens * top * inner * width / 2, [&](Team &team) { moe(team, part); });
  }
  return 0;
}

void route_entry(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights) {
  in_parallel(m * x->experts * x->top, [&](Team &team) {
    team.each(m, 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) route(*x, logits + i * x->experts, ids + i * x->top, weights + i * x->top);
    });
  });
}

int64_t inner_of(const ip_layer &l) { return l.gate_up.n / 2; }

// Buffers for `count` layers of few tokens in one call, or for one layer, each as large as the largest of them wants it.
LayerBuffers layer_buffers(const ip_layer *const *layers, int64_t count, int64_t m) {
  int64_t width = layers[0]->o.n, heads = layers[0]->heads;
  int64_t first = 0, q = 0, wide = 0, inner = 0, low = 0, all = 0, latent = 0;
  LayerBuffers b = {};
  b.moe.tokens = m, b.moe.width = width;
  for (int64_t i = 0; i < count; i++) {
    const ip_layer &l = *layers[i];
    wide = max64(wide, l.o.k), inner = max64(inner, inner_of(l));
    if (l.latent) {
      low = max64(low, l.latent->q_a.n), latent = l.latent->latent, all = latent + l.latent->rope;
      first = max64(first, all), q = max64(q, l.latent->q_b.n);
    } else {
      first = max64(first, l.qkv.n), q = max64(q, l.heads * l.head_dim);
    }
    if (!l.routed) continue;
    b.moe.experts = max64(b.moe.experts, l.routed->experts), b.moe.top = max64(b.moe.top, l.routed->top);
    b.moe.inner = max64(b.moe.inner, l.routed->down->k);
  }
  bf16 **each[] = {&b.h, &b.h2, &b.s, &b.qkv, &b.q, &b.mixed, &b.act, &b.low, &b.folded, &b.latents, &b.shared, &b.y};
  int64_t rows[] = {width,       max64(width, low), width, first, q, wide, inner, low, heads * all, heads * latent,
                    b.moe.experts ? width : 0, 0};
  int64_t size = 0;
  for (int64_t n : rows) size += round_up(m * n, kLanes);
  bf16 *at = scratch(20)->get<bf16>(size + count * 2 * round_up(m * width, kLanes));
  for (int i = 0; i < 12; i++) {
    *each[i] = at;
    at += round_up(m * rows[i], kLanes);
  }
  if (!b.moe.experts) return b;
  b.logits = scratch(28)->get<float>(m * (b.moe.experts + b.moe.top));
  b.weights = b.logits + m * b.moe.experts;
  b.ids = scratch(29)->get<int64_t>(m * b.moe.top + count);
  b.tasks = b.ids + m * b.moe.top;
  reserve_moe(b.moe, scratch(24));
  return b;
}

Attend attend_of(const ip_layer &l, const ip_cache &cache, const LayerBuffers &b) {
  if (l.latent) {
    int64_t latent = l.latent->latent, dim = latent + l.latent->rope;
    return attend_on(cache, b.folded, l.heads, 1, dim, latent, 0, l.scale, b.latents);
  }
  return attend_on(cache, b.q, l.heads, l.kv_heads, l.head_dim, l.head_dim, l.window, l.scale, b.mixed);
}

// Padded rows are not attended to: nothing must be read of them that was never written.
void clear_attended(const ip_layer &l, int64_t m, const LayerBuffers &b) {
  int64_t wide = l.latent ? l.heads * l.latent->latent : l.o.k;
  memset(l.latent ? b.latents : b.mixed, 0, (size_t)(m * wide) * sizeof(bf16));
}

int64_t layer_work(const ip_layer &l, int64_t m) {
  int64_t enter = l.latent ? l.latent->q_b.n * l.latent->q_b.k : l.qkv.n * l.qkv.k;
  int64_t moe = l.routed ? l.routed->top * l.routed->down->k * l.o.n : 0;
  return m * (enter + l.o.k * l.o.n + 3 * (inner_of(l) * l.o.n + moe)) / 4;
}

void decoder_layer_entry(const ip_layer *l, const ip_step *step, const bf16 *x, const bf16 *residual, bf16 *out,
                         bf16 *out_residual) {
  Phases phases(true);
  int64_t m = step->tokens;
  LayerBuffers b = layer_buffers(&l, 1, m);
  Attend a = attend_of(*l, step->cache, b);
  clear_attended(*l, m, b);
#if defined(INFERPLANE_MANY)
  if (l->rounded && !l->latent && !l->routed && m > kRowTile && attends_many(a) && l->qkv.kind == IP_W8A8) {
    LayerBytes bytes = layer_bytes_in(scratch(21), m, *l);
    ManyPlan many = plan_many(step->batch, l->kv_heads, team_size(), scratch(17));
    ip_batch few = step->batch;
    few.sequences = many.few;
    AttendPlan plan = plan_attention(a, few, team_size(), scratch(10));
    in_parallel(layer_work(*l, m), [&](Team &team) {
      Phases counted = team.id == 0 ? phases : Phases(false);
      counted.end(kBegin);
      layer_bytes(team, *l, *step, x, residual, out, out_residual, b, a, plan, many, bytes, counted);
    });
    return;
  }
  if (l->rounded && !l->latent && !l->routed && m > kRowTile && attends_many(a)) {
    ManyBuffers many = {panels_in(scratch(16), m, l->qkv.k), panels_in(scratch(21), m, l->o.k),
                        panels_in(scratch(22), m, l->down.k),
                        plan_many(step->batch, l->kv_heads, team_size(), scratch(17))};
    ip_batch few = step->batch;
    few.sequences = many.plan.few;
    AttendPlan plan = plan_attention(a, few, team_size(), scratch(10));
    in_parallel(layer_work(*l, m), [&](Team &team) {
      Phases counted = team.id == 0 ? phases : Phases(false);
      counted.end(kBegin);
      layer_many(team, *l, *step, x, residual, out, out_residual, b, a, plan, many, counted);
    });
    return;
  }
#endif
  AttendPlan plan = plan_attention(a, step->batch, team_size(), scratch(10));
  in_parallel(layer_work(*l, m), [&](Team &team) {
    Phases counted = team.id == 0 ? phases : Phases(false);
    counted.end(kBegin);
    layer(team, *l, *step, step->cache, x, residual, out, out_residual, b, a, plan, counted);
  });
}

// Whether one plan of attention serves both, and one width.
bool alike(const ip_layer &a, const ip_layer &b) {
  if (a.o.n != b.o.n || a.heads != b.heads || a.kv_heads != b.kv_heads || a.window != b.window) return false;
  if (!a.latent || !b.latent) return !a.latent && !b.latent && a.head_dim == b.head_dim;
  return a.latent->latent == b.latent->latent && a.latent->rope == b.latent->rope;
}

// Layers of few tokens in one call, each with its own cache and the results of the one before.
struct Chain {
  const ip_layer *const *layers;
  const ip_cache *caches;
  int64_t count;
  const ip_step *step;
  LayerBuffers shared;
  AttendPlan plan;

  int64_t width() const { return layers[0]->o.n; }
  int64_t work() const { return count * layer_work(*layers[0], step->tokens); }

  // Whether they can be one: few tokens, and layers of one size.
  static bool fits(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step) {
    if (step->tokens > kMaxDecodeRows) return false;
    for (int64_t i = 1; i < count; i++)
      if (!alike(*layers[0], *layers[i]) || caches[i].block != caches[0].block) return false;
    return true;
  }

  Chain(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step)
      : layers(layers), caches(caches), count(count), step(step), shared(layer_buffers(layers, count, step->tokens)) {
    clear_attended(*layers[0], step->tokens, shared);
    plan = plan_attention(attend_of(*layers[0], caches[0], shared), step->batch, team_size(), scratch(10));
  }

  // As `layer`, for all of them.
  const bf16 *run(Team &team, const bf16 *x, const bf16 *residual, bf16 *out, bf16 *out_residual, Phases &phases) const {
    int64_t rows = round_up(step->tokens * width(), kLanes);
    for (int64_t i = 0; i < count; i++) {
      bool last = i + 1 == count;
      LayerBuffers b = shared;
      b.y += 2 * i * rows;
      if (b.tasks) b.tasks += i;
      bf16 *to = last ? out : b.y + rows;
      residual = layer(team, *layers[i], *step, caches[i], x, residual, to, last ? out_residual : nullptr, b,
                       attend_of(*layers[i], caches[i], shared), plan, phases);
      x = to;
    }
    return residual;
  }
};

int decoder_layers_entry(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step,
                         const bf16 *x, const bf16 *residual, bf16 *out, bf16 *out_residual) {
  if (!Chain::fits(layers, caches, count, step)) return 0;
  Phases phases(true);
  Chain chain(layers, caches, count, step);
  in_parallel(chain.work(), [&](Team &team) {
    Phases counted = team.id == 0 ? phases : Phases(false);
    counted.end(kBegin);
    chain.run(team, x, residual, out, out_residual, counted);
  });
  return 1;
}

int model_step_entry(const ip_model *model, const ip_cache *caches, const ip_step *step, const ip_model_io *ends) {
  if (!Chain::fits(model->layers, caches, model->count, step)) return 0;
  if (ends->wanted > kMaxDecodeRows) return -1;  // some row more than once
  for (int64_t i = 0; i < step->tokens; i++)
    if (ends->ids[i] < 0 || ends->ids[i] >= model->embed.n) return -1;
  for (int64_t i = 0; i < ends->wanted && ends->rows; i++)
    if (ends->rows[i] < 0 || ends->rows[i] >= step->tokens) return -1;
  Phases phases(true);
  Chain chain(model->layers, caches, model->count, step);
  int64_t m = step->tokens, width = chain.width();
  bf16 *x = scratch(30)->get<bf16>(2 * m * width), *out = x + m * width;
  Likeliest *found = scratch(31)->get<Likeliest>(team_size() * kMaxDecodeRows);
  for (int64_t i = 0; i < team_size() * kMaxDecodeRows; i++) found[i] = {};
  in_parallel(chain.work(), [&](Team &team) {
    Phases counted = team.id == 0 ? phases : Phases(false);
    Likeliest *mine = found + team.id * kMaxDecodeRows;
    counted.end(kBegin);
    team.each(m, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) expand_row(model->embed, ends->ids[i], x + i * width);
    });
    team.barrier();
    counted.end(kEmbed);
    const bf16 *residual = chain.run(team, x, nullptr, out, nullptr, counted);
    Normed last = add_norm(team, out, residual, model->norm, model->eps, m, width, nullptr, nullptr, 18);
    if (team.id == 0) memcpy(ends->hidden, last.y, (size_t)(m * width) * sizeof(bf16));
    counted.end(kNorm);
    multiply(
        team, model->head, ends->wanted, [&](int64_t i) { return last.y + (ends->rows ? ends->rows[i] : i) * width; },
        [&](int64_t i, int64_t j, int64_t n, float *sums) {
          add_bias(model->head, j, n, sums);
          memcpy(ends->logits + i * model->head.n + j, sums, (size_t)n * sizeof(float));
          mine[i].take(j, n, sums);
        });
    team.barrier();
    counted.end(kHead);
  });
  for (int64_t i = 0; i < ends->wanted && ends->likeliest; i++) {
    for (int t = 1; t < team_size(); t++) found[i].take(found[t * kMaxDecodeRows + i]);
    ends->likeliest[i] = found[i].token();
  }
  return 1;
}

void sample_entry(const ip_sampling *asked, int64_t *tokens) {
  in_parallel(asked->rows > 1 ? asked->rows * asked->vocab : 0, [&](Team &team) {  // a row is one thread's
    if (asked->half)
      sample<bf16>(team, *asked, tokens);
    else
      sample<float>(team, *asked, tokens);
  });
}

int64_t read_entry(const void *data, int64_t bytes) {
  int64_t total = 0;
  in_parallel(bytes, [&](Team &team) {
    U all[4] = {};
    team.each(bytes / 64, kChunkBytes / 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const char *at = (const char *)data + i * 64;
        _mm_prefetch(at + 2048, _MM_HINT_T0);
        all[i & 3] |= load<U>(at);
      }
    });
    U any = all[0] | all[1] | all[2] | all[3];
    for (int l = 0; l < kLanes; l++) __atomic_fetch_or(&total, (int64_t)any[l], __ATOMIC_RELAXED);
  });
  return total;
}

}  // namespace

extern const Table TABLE = {NAME,           linear_entry,   linear_many_entry, expand_entry, rows_entry,
                            rms_norm_entry, silu_mul_entry, rope_entry,        attention_entry,
                            attention_many_entry, mla_entry, moe_entry, route_entry,        decoder_layer_entry, decoder_layers_entry,
                            model_step_entry, sample_entry,   read_entry};
