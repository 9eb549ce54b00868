// The structs of the native kernels' C interface; conventions and functions are in inferplane_cpu.h, and
// inferplane_cpu/structs.py mirrors this file.
#pragma once
#include <stdint.h>

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
  // data: as IP_INT4, but nibbles are entries of MXFP4 or NVFP4 (e2m1; the highest bit is the sign). Each stands for
  // twice its value, an integer from -12 to 12.
  IP_MXFP4 = 6,
  // data: panels of 16 rows of entries of 6 bits (value + 32), groups of 16 columns, see products/weight_panels.h
  IP_INT6 = 7,
  IP_KINDS = 8,  // how many kinds there are
};

// What products round activations to, with a weight in panels of nibbles: 16 bits, which changes no result by more than
// rounding it to bf16 does; int8 or int4 with one scale per row; e2m1 with a power of two per 32 columns (MXFP4).
enum ip_input { IP_INPUT_INT16 = 0, IP_INPUT_INT8 = 1, IP_INPUT_INT4 = 2, IP_INPUT_MXFP4 = 3 };

// Activation functions: x / (1 + exp(-x)), GELU by the error function and by tanh, max(x, 0)^2.
enum ip_activation { IP_SILU = 0, IP_GELU = 1, IP_GELU_TANH = 2, IP_RELU2 = 3 };

// A weight [n, k].
typedef struct {
  int32_t kind;
  // IP_INT8, IP_INT4, IP_MXFP4: columns that share a scale, a multiple of 32 up to 128, or 16 but with IP_INT4; 0: one
  // scale per row. IP_INT6: 16. IP_FP8: rows that share one.
  int32_t group;
  int64_t n, k, ld;
  const void *data;
  const float *scale;  // IP_INT8, IP_INT6, IP_INT4, IP_MXFP4: [ceil(n / 16), groups, 16]; IP_FP8: by blocks
  const ip_bf16 *scale_f16;  // kinds in panels: the same as float16, used if `scale` is null
  const ip_bf16 *bias;  // [n] or null
  // IP_MXFP4: scales that are powers of two as the exponent bits of float32, used if `scale` is null.
  const uint8_t *scale_exponent;
  // Kinds in panels: scales as integers [ceil(n / 16), groups, 16] times a unit in float16 per 256 columns
  // [ceil(n / 16), ceil(k / 256), 16], used if all others are null.
  const int8_t *scale_code;
  const ip_bf16 *scale_unit;
  // IP_INT8, IP_INT6, IP_INT4 with groups of columns: a number per group that is added to each of its values, in one of
  // the forms of scales; all null: none. Entries of IP_INT4 with minimums are 0 .. 15.
  const float *minimum;
  const ip_bf16 *minimum_f16;
  const int8_t *minimum_code;
  const ip_bf16 *minimum_unit;
  int32_t input;  // IP_INPUT_INT16 .., of IP_INT4 and IP_MXFP4 without minimums; IP_INPUT_MXFP4: groups of 32 columns
} ip_matrix;

// How entries of a cache lie: bf16; int8, or FP8 e4m3, with scales; 4 bits in groups with a scale and a minimum in
// float16, two entries in a byte, the first in the low half; or so the differences of keys from the first key of 16
// slots, which is int8. The layouts are those of inferplane.kvcache.
enum { IP_KV_BF16, IP_KV_INT8, IP_KV_FP8, IP_KV_INT4, IP_KV_INT4_DIFFERENCES };

// One layer's paged KV cache. Position p of a sequence is in slot table[p / block] * block + p % block, where `table`
// is the sequence's block table; the entries of slot s begin with entry s * k_stride. Scales of int8 and FP8 of slot s
// begin at k_scale + s * k_groups: one per head, or one per group of a latent's entries. Of 4 bits, entries, ranges and
// first keys of span s and head h lie s * k_stride + h * k_head bytes behind those of the first ones, and k_groups entries
// share a range.
//
// Of a layer with a mixer: k is the inputs of its convolution, v the states of its recurrence or null (ip_recurrent_block).
typedef struct {
  void *k, *v;  // k == v: latents
  int64_t k_stride, v_stride;
  float *k_scale, *v_scale;  // or null
  int64_t k_groups, v_groups;
  int32_t block;  // slots per block
  int32_t k_kind, v_kind;  // IP_KV_BF16 ..
  const ip_bf16 *k_ranges, *v_ranges;  // or null; float16
  const int8_t *first;  // [dim] of a span and head, or null
  const float *first_scale;  // [slots / 16, heads]
  int64_t k_head, v_head;
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

// Limits of a gated result f(g) u: f reads at most `input`, f's result is at most `output`, and u at most `other` in
// magnitude. Infinity: none.
typedef struct {
  float input, output, other;
} ip_gate_limits;

// How routers score: softmax(x), 1 / (1 + exp(-x)), sqrt(ln(1 + exp(x))).
enum ip_score { IP_SOFTMAX = 0, IP_SIGMOID = 1, IP_SQRT_SOFTPLUS = 2 };

// Routed experts: a router, how it chooses `top` of the experts, and one matrix per expert.
typedef struct {
  ip_matrix router;
  const float *bias;  // [experts], added to the scores for choosing only; or null
  const ip_matrix *gate_up, *down;  // [experts]
  int64_t experts, top;
  int64_t groups, top_groups;  // experts are chosen from the best `top_groups` of `groups` equal groups
  float factor;  // multiplies all weights
  int32_t score;  // one of ip_score
  int32_t best_two, renormalize;  // a group ranks by its best two experts, else its best; weights are divided by their sum
  const ip_clamped_gate *clamped;  // or null: IP_SILU, and rows of gate_up are gate, then up
  float least_sum, sum_eps;  // their sum is at least the one, and the other is added to it
} ip_experts;

// Hyper-connections of `streams` streams (at most 8) of `width` entries, as the ops hyper_collapse, hyper_pre and
// hyper_head have them.
typedef struct {
  const float *fn, *base, *scale;  // fn [rows, streams * width], base [rows]: 2 streams + streams^2 rows; head: streams
  int64_t streams, width;
  float norm_eps, eps, sinkhorn_eps;
  int32_t iterations;  // of `sinkhorn`; 0: logits are written as they are
  int32_t head;  // streams become one, and nothing else
  int32_t wide;  // streams and results are float32, else bf16
} ip_hyper;

// The sequences of a step and where their states are: rows of a tensor of states. Query tokens of sequence b are rows
// start[b] .. start[b + 1] without those whose slot is -1, which are padding; lens[b] is its length with these tokens. A
// sequence with as many tokens as its length begins: its states before are zeros, whatever is stored. States of a
// sequence without tokens stay as they are.
typedef struct {
  const int32_t *start, *lens;
  const int64_t *slots;  // [tokens]
  const int64_t *read, *write;  // [sequences], rows of the states before and after; null: sequence b has row b
  int64_t sequences;
} ip_sequences;

// Heads of tokens: head h of token t begins at data + t * row + h * head.
typedef struct {
  const ip_bf16 *data;
  int64_t row, head;
} ip_head_rows;

// A causal convolution, each channel by itself, and SiLU after it or nothing.
typedef struct {
  const ip_bf16 *weight;  // [size, channels]: the oldest input first
  const ip_bf16 *bias;  // [channels] or null
  int64_t channels, size;
  int32_t silu;
} ip_convolution;

// The gated delta rule; each of `groups` heads of q and k serves heads / groups heads of v.
typedef struct {
  int64_t groups, heads, k_dim, v_dim;
  int32_t by_channel;  // a head has k_dim decays, one for each row of its state, else one
} ip_delta_rule;

// Mamba-2's scan, as op selective_scan has it; each of `groups` of b and c serves heads / groups heads.
typedef struct {
  const float *a_log, *dt_bias, *skip;  // [heads]
  int64_t groups, heads, dim, size;
  float dt_min, dt_max;
} ip_scan;

// An RMS norm over each of `groups` equal parts of a row, times SiLU of a gate, or its sigmoid, before it or after it.
typedef struct {
  const float *weight;  // null: there is no norm, but the gate
  int64_t groups;
  float eps;
  int32_t gate_first;
  int32_t sigmoid;
} ip_norm_with_gate;

// Mixers of recurrent layers, as the ops gated_delta_net, mamba2_mixer, short_conv and kimi_delta_attention have them.
enum ip_mixer_kind { IP_DELTA_NET = 0, IP_MAMBA2 = 1, IP_SHORT_CONV = 2, IP_KIMI_DELTA = 3 };
typedef struct {
  ip_matrix proj, gates, o;  // gates: of the delta net, and b of Kimi's; n is 0 in others
  ip_matrix low, decay_up, gate_up;  // fg_a, f_b and g_b of Kimi's; n is 0 in others
  ip_convolution conv;
  ip_delta_rule rule;  // of the delta net and of Kimi's, with a_log and dt_bias
  ip_scan scan;  // of Mamba-2
  ip_norm_with_gate norm;  // of all but the short convolution
  const float *a_log, *dt_bias;  // [heads]; dt_bias [heads, k_dim] if the rule is by channel
  const float *factors;  // [proj.n], of Mamba-2's projection; or null
  int32_t kind;
  int32_t grouped;  // rows of the delta net's proj and gates are ordered by heads of keys
} ip_mixer;

// A decoder layer: pre-norm; grouped-query or latent attention, or a mixer; then a gated MLP, experts, or both, whose results are
// added. Rows of qkv are q, then k, then v; rows of gate_up are gate, then up. There may be norms after attention and
// after the MLP, before their results are added.
typedef struct {
  ip_matrix qkv, o, gate_up, down;
  ip_norm attn_norm, attn_after, mlp_norm, mlp_after;  // *_after may be none
  ip_norm q_norm, k_norm;  // may be none
  const float *rope;  // [positions, 2, rope_dim / 2]: cosines, sines
  int64_t heads, kv_heads, head_dim;
  int64_t rope_dim;  // the first entries of a head, which are rotated; 0: all
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
  const ip_mixer *mixer;  // or null: attention. If set, nothing of attention is read, and `o` is the mixer's
  // Rows of qkv are q and the gate of each head in turn, then k, then v; attention's results are multiplied by the
  // sigmoids of gates.
  int32_t output_gate;
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
  ip_sequences sequences;  // of layers with a mixer
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
