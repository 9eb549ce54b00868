// The C interface of the native kernels: plain pointers and sizes, neither torch nor Python. The cpu backend calls it
// through ctypes (inferplane_cpu/native.py mirrors the structs and signatures); api.cpp implements it.
//
// Conventions. A product is y[m, n] = x[m, k] w[n, k]^T. Activations are bfloat16 rows (uint16_t), row-major; `ld*` and
// `*stride*` are distances in entries, not bytes. The caller owns all memory and keeps it alive during a call; a struct
// only points to memory. A function splits its work over the OpenMP team that torch uses and returns when all of it is
// done. On one instruction set it computes a row in the same order of operations for any number of other rows (results
// are batch-invariant), unless a comment says otherwise. Functions that return nothing cannot fail and do not check
// arguments.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t ip_bf16;

// How a weight is stored.
enum ip_kind {
  IP_BF16 = 0,  // data: bf16 [n, k] row-major, rows ld entries apart
  IP_INT8 = 1,  // data: panels of 16 rows of unsigned bytes (value + 128), see products/weight_panels.h
  IP_INT4 = 2,  // data: panels of 16 rows of nibbles (value + 8)
  IP_W8A8 = 4,  // as IP_INT8 with one scale per row; products quantize activations to int8 with one scale per row
  IP_FP8 = 3,  // data: e4m3 bytes [n, k] row-major, ld bytes a row; scale: float [ceil(n / group), ceil(k / 128)]
  // As IP_BF16, for products whose summation order may depend on the number of rows, where that reads memory faster:
  // then a row's result depends on how many rows come with it.
  IP_BF16_REORDERABLE = 5,
  // data: as IP_INT4, but nibbles are MXFP4's entries (e2m1; the highest bit is the sign). Each stands for twice its
  // value, an integer from -12 to 12.
  IP_MXFP4 = 6,
  IP_KINDS = 7,  // how many kinds there are
};

// Activation functions: x / (1 + exp(-x)), GELU by the error function and by tanh, max(x, 0)^2.
enum ip_activation { IP_SILU = 0, IP_GELU = 1, IP_GELU_TANH = 2, IP_RELU2 = 3 };

// A weight [n, k].
typedef struct {
  int32_t kind;
  // IP_INT8, IP_INT4, IP_MXFP4: columns that share a scale, a multiple of 32 up to 128; 0: one scale per row. IP_FP8:
  // rows that share one.
  int32_t group;
  int64_t n, k, ld;
  const void *data;
  const float *scale;  // IP_INT8, IP_INT4, IP_MXFP4: [ceil(n / 16), groups, 16]; IP_FP8: by blocks
  const ip_bf16 *scale_f16;  // IP_INT8, IP_INT4: the same as float16, used if `scale` is null
  const ip_bf16 *bias;  // [n] or null
  // IP_MXFP4: scales that are powers of two as the exponent bits of float32, used if `scale` is null.
  const uint8_t *scale_exponent;
} ip_matrix;

// One layer's paged KV cache. Position p of a sequence is in slot table[p / block] * block + p % block, where `table`
// is the sequence's block table; the entries of slot s begin at k + s * k_stride. Entries are bf16, or int8 if there
// are scales; those of slot s begin at k_scale + s * k_groups: one per head, or one per group of a latent's entries.
typedef struct {
  void *k, *v;  // k == v: latents
  int64_t k_stride, v_stride;
  float *k_scale, *v_scale;  // or null
  int64_t k_groups, v_groups;
  int32_t block;  // slots per block
} ip_cache;

// A ragged batch: query tokens of sequence b are rows start[b] .. start[b + 1]. lens[b] is its length with these
// tokens; 0: padding. `tables` [sequences, table_width] are block tables.
typedef struct {
  const int32_t *start, *lens, *tables;
  int64_t sequences, table_width;
} ip_batch;

// An RMS norm: y = x / sqrt(mean(x^2) + eps) * (weight + offset). weight null: there is no norm.
typedef struct {
  const ip_bf16 *weight;
  float eps, offset;
} ip_norm;

// Latent attention, as in DeepSeek-V2. Queries are q_b norm(q_a x), or q_b x if q_a.n is 0; a head of them is [nope |
// rope] entries. A head of kv_b is [nope | value] rows of `latent` columns. The cache keeps [norm(latent) | rotated
// rope] per token.
typedef struct {
  ip_matrix q_a, q_b, kv_a, kv_b;  // kv_b: bf16 without gaps between rows, FP8, INT8 or INT4
  ip_norm q_a_norm, kv_a_norm;
  int64_t nope, rope, value, latent;
} ip_latent;

// A clamped gate of experts, as op clamped_experts has it: rows of gate_up alternate, gate, up, gate, up, ..., and the
// gated result of g and u is (clamp(u, -limit, limit) + 1) g' / (1 + exp(-alpha g')), g' = min(g, limit).
typedef struct {
  float alpha, limit;
} ip_clamped_gate;

// Routed experts: a router, how it chooses `top` of the experts, and one matrix per expert.
typedef struct {
  ip_matrix router;
  const float *bias;  // [experts], added to the scores for choosing only; or null
  const ip_matrix *gate_up, *down;  // [experts]
  int64_t experts, top;
  int64_t groups, top_groups;  // experts are chosen from the best `top_groups` of `groups` equal groups
  float factor;  // multiplies all weights
  // Scores are sigmoids (else a softmax); a group ranks by its best two experts (else its best one); weights are
  // divided by their sum.
  int32_t sigmoid, best_two, renormalize;
  const ip_clamped_gate *clamped;  // or null: IP_SILU, and rows of gate_up are gate, then up
} ip_experts;

// A decoder layer: pre-norm; grouped-query or latent attention; then a gated MLP, experts, or both, whose results are
// added. Rows of qkv are q, then k, then v; rows of gate_up are gate, then up. There may be norms after attention and
// after the MLP, before their results are added.
typedef struct {
  ip_matrix qkv, o, gate_up, down;
  ip_norm attn_norm, attn_after, mlp_norm, mlp_after;  // *_after may be none
  ip_norm q_norm, k_norm;  // may be none
  const float *rope;  // [positions, 2, head_dim / 2]: cosines, sines
  int64_t heads, kv_heads, head_dim;
  int64_t window;  // keys that a token sees, itself included; 0: all
  float scale;
  int32_t interleaved;  // rotary pairs are neighbours, else half a head apart
  // With many tokens, quantized weights and attention's weights may be rounded to bf16, which is faster; then a row's
  // result depends on how many rows come with it.
  int32_t rounded;
  int32_t activation;  // of the gated MLP that all tokens take; ip_experts says which one experts have
  float softcap;  // of grouped queries' attention, as in ip_attention
  const float *sinks;  // [heads], or null: the same
  const ip_latent *latent;  // or null: grouped queries. If set, kv_heads is 1, and qkv, q_norm and k_norm are not read
  const ip_experts *routed;  // or null: no experts. If set, gate_up and down are the shared experts; gate_up.n 0: none
} ip_layer;

// Rows of logits, and how a token is drawn from each; arrays have one entry per row. `uniform` null: all rows take the
// largest logit. top_p, min_p and top_k are null together: no row uses them.
typedef struct {
  const void *logits;  // [rows, vocab], float, or bf16 if is_bf16; rows ld entries apart
  int32_t is_bf16;
  int64_t ld, rows, vocab;
  const float *temperature, *top_p, *min_p, *uniform;  // uniform: the random number from 0 to 1 that decides
  const int64_t *top_k;
} ip_sampling;

// What one step brings to every layer, and one layer's cache.
typedef struct {
  ip_batch batch;
  ip_cache cache;
  const int64_t *positions, *slots;  // [tokens]; slot -1: the token is not written to the cache
  int64_t tokens;
} ip_step;

// The steps of layers that are computed in one call: they differ in slots, block tables and caches alone. Layer i has
// step steps[number[i]], or steps[0] if `number` is null.
typedef struct {
  const ip_step *const *steps;
  const int32_t *number;
} ip_layer_steps;

// What is done with logits: each is multiplied by `factor`; then a logit s becomes cap tanh(s / cap), unless cap is 0.
typedef struct {
  float factor, cap;
} ip_logit_scale;

// A language model: rows of `embed` times a factor, rounded to bf16 before and after, the layers one after the other, a
// norm, and the head.
typedef struct {
  const ip_layer *const *layers;
  int64_t count;
  ip_matrix embed, head;  // equal if the model ties them
  ip_norm norm;
  float embed_factor;
  ip_logit_scale logit_scale;
} ip_model;

// Inputs and outputs of a model's step.
typedef struct {
  const int64_t *ids;  // in: [tokens], token ids
  const int64_t *rows;  // in: [num_rows], the tokens whose logits are computed; null: all
  int64_t num_rows;
  float *logits;  // out: [num_rows, head.n]
  int64_t *argmax;  // out: [num_rows], what ip_sample draws without `uniform`; or null
  ip_bf16 *hidden;  // out: [tokens, width], the results of the last norm
} ip_model_io;

// Sizes in bytes of the structs matrix, cache, batch, norm, latent, clamped_gate, experts, layer, sampling, step,
// layer_steps, logit_scale, model, model_io, in this order, so that a caller can check that it declares the same ones. The array is static.
const int32_t *ip_struct_bytes(void);
// IP_KINDS of the library, for the same purpose.
int ip_num_kinds(void);
// Number of the functions' signatures, which grows with every change of one: a caller of another number must not call.
#define IP_SIGNATURES 5
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
// Writes int8 entries [n, k] (int4: -8 .. 7) as panels to `out`, ip_packed_bytes(w) bytes. Returns 1; 0 if w is
// IP_MXFP4 and an entry is none that it has.
int ip_pack_weight(const ip_matrix *w, const int8_t *values, uint8_t *out);

// -- row by row

// s = x + r; y = norm(s), for m rows of d entries: rows of x are ldx apart, r, s and y are dense. r may be
// null (s is x), and then s may be null too.
void ip_rms_norm(const ip_bf16 *x, int64_t ldx, const ip_bf16 *r, const ip_norm *norm, int64_t m, int64_t d, ip_bf16 *s,
                 ip_bf16 *y);
// y[m, d] = f(x[:, :d]) * x[:, d:], f one of ip_activation; rows of x are ldx apart, y is dense.
void ip_activation_mul(const ip_bf16 *x, int64_t ldx, int64_t m, int64_t d, int activation, ip_bf16 *y);
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

// -- experts

// out[m, d] = per token, the sum of its `top` experts' gated MLPs times `weights`. gate_up and down have one matrix per
// expert; ids and weights are [m, top]; `clamped` as in ip_experts. Returns 0; -1 if an id is none of 0 .. experts - 1,
// and out is not written.
int ip_moe(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_clamped_gate *clamped,
           const ip_bf16 *x, int64_t ldx, int64_t m, const int64_t *ids, const float *weights, int64_t top,
           ip_bf16 *out);
// Chooses the experts of m tokens from logits [m, experts]: writes ids and weights [m, top]. Of `x` it reads neither
// the router nor the experts' matrices. x->experts is at most 1024.
void ip_route_experts(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights);

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
