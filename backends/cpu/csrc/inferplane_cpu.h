// The C interface of the native kernels: plain pointers and sizes, neither torch nor Python. The cpu backend calls it
// through ctypes (inferplane_cpu/structs.py and native.py mirror structs and signatures); api.cpp implements it.
//
// Conventions. A product is y[m, n] = x[m, k] w[n, k]^T. Activations are bfloat16 rows (uint16_t), row-major; `ld*` and
// `*stride*` are distances in entries, not bytes. The caller owns all memory and keeps it alive during a call; a struct
// only points to memory. A function splits its work over the OpenMP team that torch uses and returns when all of it is
// done. On one instruction set it computes a row in the same order of operations for any number of other rows (results
// are batch-invariant), unless a comment says otherwise. Functions that return nothing cannot fail and do not check
// arguments.
#pragma once
#include "structs.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes in bytes of the structs matrix, cache, batch, norm, latent, clamped_gate, gate_limits, experts, hyper, layer, sampling, step,
// layer_steps, logit_scale, model, model_io, sequences, head_rows,
// convolution, delta_rule, scan, norm_with_gate, mixer, in this order, so that a caller can check that it
// declares the same ones. The array is static.
const int32_t *ip_struct_bytes(void);
// IP_KINDS of the library, for the same purpose.
int ip_num_kinds(void);
// Number of the functions' signatures, which grows with every change of one: a caller of another number must not call.
#define IP_SIGNATURES 10
int ip_signatures(void);

// -- instruction sets and threads

// Names of the instruction sets that this processor and this build have, best last, separated by spaces; "" without
// AVX2.
const char *ip_available_isas(void);
// The one in use: at first the best.
const char *ip_current_isa(void);
// Uses another one from now on, in all threads. Returns 0; -1 if there is none of this name.
int ip_select_isa(const char *name);
// Sets a function that is called once in every thread that calls the library, before the library reads from OpenMP the
// number of threads; null: none.
void ip_set_thread_init(void (*init)(void));
// How many threads a call from this thread would use.
int ip_num_threads(void);

// -- products

// y[i * ldy + j] = x w^T + bias, overwritten, for m rows of x, which are ldx apart, and all w.n columns of y; y is
// float32 if `wide` is not 0, else bf16.
void ip_linear(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide);
// Computes ip_linear for many rows, faster. Except on AVX2, quantized weights are rounded to bf16, so results may
// differ from ip_linear's (W8A8 weights excepted). Returns 1; 0 if this instruction set has no such product, and y is
// not written.
int ip_linear_prefill(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide);
// out [last - first, k], dense, = rows first .. last of a weight of any kind in bf16, with their scales.
void ip_dequantize_rows(const ip_matrix *w, int64_t first, int64_t last, ip_bf16 *out);
// out [count, k], dense, = rows ids[0 .. count] of a weight of any kind in bf16, times `factor`, rounded again; zeros
// for an id that is no row.
void ip_gather_rows(const ip_matrix *w, const int64_t *ids, int64_t count, float factor, ip_bf16 *out);
// logits[0 .. count], changed in place.
void ip_scale_logits(const ip_logit_scale *scale, float *logits, int64_t count);
// How many bytes `data` of a weight in panels has; reads kind, group, n and k of w.
int64_t ip_packed_bytes(const ip_matrix *w);
// Writes int8 entries [n, k] (int4: -8 .. 7, or 0 .. 15 with minimums; int6: -32 .. 31) as panels to `out`,
// ip_packed_bytes(w) bytes. Returns 1; 0 if w is IP_MXFP4 or IP_INT6 and an entry is none that it has.
int ip_pack_weight(const ip_matrix *w, const int8_t *values, uint8_t *out);

// -- row by row

// s = x + r; y = norm(s), for m rows of d entries: rows of x are ldx apart, r, s and y are dense. r may be
// null (s is x), and then s may be null too.
void ip_rms_norm(const ip_bf16 *x, int64_t ldx, const ip_bf16 *r, const ip_norm *norm, int64_t m, int64_t d, ip_bf16 *s,
                 ip_bf16 *y);
// y[m, d] = f(x[:, :d]) * x[:, d:], f one of ip_activation; rows of x are ldx apart, y is dense. `limits`, null: none.
void ip_activation_mul(const ip_bf16 *x, int64_t ldx, int64_t m, int64_t d, int activation,
                       const ip_gate_limits *limits, ip_bf16 *y);
// y[m, heads, dim], dense, = x with each head rotated by its row's position, positions[i]; table: [positions, 2, dim /
// 2], cosines then sines. `interleaved`: entries 2c and 2c + 1 are a pair; 0: c and c + dim / 2.
void ip_rope(const ip_bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
             int64_t m, int64_t heads, int64_t dim, int interleaved, ip_bf16 *y);

// -- attention

// Causal attention of q [tokens, heads, dim] over the cache, which holds these tokens already; out [tokens, heads,
// v_dim]. `window`: keys that a token sees, itself included; 0: all. `sinks` [heads]: one more score of each softmax,
// whose weight falls on no value; null: none. `softcap` c: a score s counts as c tanh(s / c); 0: as it is. Rows of
// padding are not written.
void ip_attention(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t v_dim, float scale, int64_t window, const float *sinks, float softcap,
                  ip_bf16 *out);
// Computes ip_attention for many query tokens per sequence, faster; sequences with at most 8 query tokens come first in
// the batch. Except on AVX2, attention's weights are rounded to bf16. Returns 1; 0 if this instruction set or these
// sizes have no such attention, and `out` is not written.
int ip_attention_prefill(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                         int64_t kv_heads, int64_t dim, int64_t v_dim, float scale, int64_t window,
                         const float *sinks, float softcap, ip_bf16 *out);
// Absorbed latent attention: q_nope [tokens, heads, nope] and q_rope [tokens, heads, rope] with strides of rows and
// heads; kv_b [heads * (nope + value), latent] in bf16, FP8, INT8 or INT4; out [tokens, heads, value].
void ip_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope, const int64_t *rope_strides,
            const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope,
            int64_t rope, int64_t value, int64_t latent, float scale, ip_bf16 *out);
// out [tokens, top] = the positions of the `top` largest scores that each query sees, ascending, then -1; of equal
// scores the lower positions. A score is the sum over heads h of w[h] max(0, q[h] k), in float32; q [tokens, heads,
// dim], w [tokens, heads], both dense; `dim` is even. The cache has one key a slot, k == v, in bf16, int8 or FP8. A key
// stands for `rate` tokens: lengths count tokens, tables and positions keys. Rows of padding are not written.
void ip_index_select(const ip_bf16 *q, const float *w, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                     int64_t dim, int64_t top, int64_t rate, int32_t *out);
// ip_mla over the entries at chosen [tokens, top] alone: positions in a row's sequence, then -1.
void ip_sparse_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope,
                   const int64_t *rope_strides, const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache,
                   int64_t heads, int64_t nope, int64_t rope, int64_t value, int64_t latent, float scale,
                   const int32_t *chosen, int64_t top, ip_bf16 *out);

// -- recurrent layers

// The ops of the same names. States before and after are rows of tensors, as ip_sequences says; rows that are written
// may not be among those that another sequence reads. Any number of tokens is computed one after another, so a prompt
// gives the same bits however it is cut. Rows of padding are not written.
//
// y [tokens, channels], dense, from rows of x, which are ldx apart; states: [rows, channels, size - 1].
void ip_causal_conv1d(const ip_convolution *conv, const ip_sequences *s, const ip_bf16 *x, int64_t ldx,
                      const ip_bf16 *before, ip_bf16 *after, ip_bf16 *y);
// decay and beta from rows of a and b: each [tokens, heads], or decay [tokens, heads, channels] with a rate a head, if
// channels is not 0; dt_bias has an entry for each decay of a token.
void ip_delta_rule_gates(const float *a_log, const float *dt_bias, const ip_bf16 *a, int64_t lda, const ip_bf16 *b,
                         int64_t ldb, int64_t tokens, int64_t heads, int64_t channels, float *decay, float *beta);
// Rows of decay have heads entries, or heads * k_dim if the rule is by channel.
// y [tokens, heads, v_dim] from qkv[0], [1] and [2]: q and k of `groups` heads, v of `heads`; states: [rows, heads,
// k_dim, v_dim].
void ip_gated_delta_rule(const ip_delta_rule *rule, const ip_sequences *s, const ip_head_rows *qkv, const float *decay,
                         int64_t ld_decay, const float *beta, int64_t ld_beta, const float *before, float *after,
                         ip_bf16 *y);
// y [tokens, heads, d] = x after the norm and its gate, each head by itself.
void ip_gated_norm(const ip_norm_with_gate *norm, const ip_head_rows *x, const ip_head_rows *gate, int64_t tokens,
                   int64_t heads, int64_t d, ip_bf16 *y);
// y [tokens, heads, dim] from xbc[0], [1] and [2]: x of `heads` heads of dim entries, b and c of `groups` of size
// entries; dt [tokens, heads], rows dt_row apart; states: [rows, heads, dim, size].
void ip_selective_scan(const ip_scan *scan, const ip_sequences *s, const ip_head_rows *xbc, const ip_bf16 *dt,
                       int64_t dt_row, const float *before, float *after, ip_bf16 *y);

// The whole block of few tokens: out [tokens, o.n] from x [tokens, proj.k], both dense. States are read and written
// where they are: conv_states [rows, channels, size - 1]; states as those of the rule or the scan, or null.
void ip_recurrent_block(const ip_mixer *mixer, const ip_sequences *s, const ip_bf16 *x, ip_bf16 *conv_states,
                        float *states, ip_bf16 *out);

// -- experts

// out[m, d] = per token, the sum of its `top` experts' gated MLPs times `weights`. gate_up and down have one matrix per
// expert; ids and weights are [m, top]; `clamped` as in ip_experts; `limits` of gates without it, null: none. Returns 0;
// -1 if an id is none of 0 .. experts - 1, and out is not written.
int ip_moe(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_clamped_gate *clamped,
           const ip_gate_limits *limits, const ip_bf16 *x, int64_t ldx, int64_t m, const int64_t *ids,
           const float *weights, int64_t top, ip_bf16 *out);
// Chooses the experts of m tokens from logits [m, experts]: writes ids and weights [m, top]. Of `x` it reads neither
// the router nor the experts' matrices. x->experts is at most 1024.
void ip_route_experts(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights);

// Writes weights [m, top] as ip_route_experts does, of experts that are given: ids [m, top], each of 0 .. experts - 1.
void ip_expert_weights(const ip_experts *x, const float *logits, int64_t m, const int64_t *ids, float *weights);

// -- hyper-connections

// The ops of the same names, of x [tokens, streams, width], dense. Writes y [tokens, width], post [tokens, streams] and
// mix [tokens, streams, streams]; a head writes y alone.
void ip_hyper_pre(const ip_hyper *hyper, const void *x, int64_t tokens, void *y, float *post, float *mix);
// out [tokens, streams, width] from y [tokens, width] and what ip_hyper_pre read and wrote; reads the sizes and `wide`
// of `hyper`.
void ip_hyper_post(const ip_hyper *hyper, const void *y, const void *x, const float *post, const float *mix,
                   int64_t tokens, void *out);
// m [count, n, n], changed in place.
void ip_sinkhorn(float *m, int64_t count, int64_t n, int64_t iterations, float eps);

// -- sampling

// Draws one token per row, by params, into tokens [rows].
void ip_sample(const ip_sampling *params, int64_t *tokens);

// -- measuring

// Reads `bytes` (a multiple of 64) at `data`, 64-byte aligned, and returns a number that depends on all of them.
int64_t ip_read_memory(const void *data, int64_t bytes);
// From now on each call of layers adds to ns[phase] the nanoseconds that its calling thread spent in each phase,
// waiting included; null: no longer. Returns the names of the phases, separated by spaces.
const char *ip_time_phases(int64_t *ns);

// -- layers

// Computes a decoder layer: x and residual [tokens, width] (residual may be null) to out and out_residual, which may
// not overlap them. Keys and values are written to the step's cache.
void ip_decoder_layer(const ip_layer *layer, const ip_step *step, const ip_bf16 *x, const ip_bf16 *residual,
                      ip_bf16 *out, ip_bf16 *out_residual);
// Computes `count` layers one after the other in one call, with the results of ip_decoder_layer: layer i uses caches[i]
// (the step's cache is not read) and the results of the layer before it. out and out_residual are those of the last
// layer; out_residual may be null. Returns 1; 0 for more than 8 tokens, layers of different sizes, or more than 8 pairs
// of windows and steps, and nothing is written.
int ip_decoder_layers(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_layer_steps *steps,
                      const ip_bf16 *x, const ip_bf16 *residual, ip_bf16 *out, ip_bf16 *out_residual);
// A model's step of at most 8 tokens: embedding, layers, norm, head; the same bits as its parts called one by one.
// Returns 1; 0 where ip_decoder_layers returns 0; -1 if an id or a row is out of range or num_rows is larger than 8.
// Unless it returns 1, nothing is written.
int ip_model_step(const ip_model *model, const ip_cache *caches, const ip_layer_steps *steps, const ip_model_io *io);

#ifdef __cplusplus
}
#endif
