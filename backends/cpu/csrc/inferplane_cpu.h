// The native kernels' C interface: plain pointers and sizes, no torch. Python calls it through ctypes.
//
// Activations are bfloat16 rows (uint16_t), row-major; `ld*` are strides between rows in entries. Every function
// splits its work over the OpenMP team that torch uses, returns when all of it is done, and computes a row in the same
// order of operations whatever the other rows are, but where it says otherwise: results are batch-invariant on one
// instruction set.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint16_t ip_bf16;

enum ip_kind {
  IP_BF16 = 0,  // data: bf16 [n, k] row-major, ld entries a row
  IP_INT8 = 1,  // data: 16-row panels of unsigned bytes (value + 128), see quant.h
  IP_INT4 = 2,  // data: 16-row panels of nibbles (value + 8), see quant.h
  IP_W8A8 = 4,  // as IP_INT8 with one scale a row; activations are rounded to 8 bits a row
  IP_FP8 = 3,   // data: e4m3 bytes [n, k] row-major; scale: float [ceil(n / group), ceil(k / 128)]
  // As IP_BF16, for products whose sums may have another order with few rows of activations than with many, where that
  // reads memory faster: then a row's result depends on how many come with it.
  IP_BF16_REORDERABLE = 5,
  IP_KINDS = 6,
};

// A weight [n, k]; y = x w^T.
typedef struct {
  int32_t kind;
  // IP_INT8, IP_INT4: columns that share a scale, a multiple of 32 up to 128; 0: one scale a row. IP_FP8: rows that do.
  int32_t group;
  int64_t n, k, ld;
  const void *data;
  const float *scale;   // IP_INT8, IP_INT4: [ceil(n / 16), groups, 16]; IP_FP8: by blocks
  const ip_bf16 *half;  // IP_INT8, IP_INT4: the scales as float16, used where `scale` is null
  const ip_bf16 *bias;  // [n] or null
} ip_matrix;

// A paged cache: entry of slot s is entries + s * stride; a token's slot is table[pos / block] * block + pos % block.
// Entries are bf16, or int8 where there are scales: those of slot s are scales + s * groups, one a head, or one for so many
// entries of a latent.
typedef struct {
  void *k, *v;  // of latents v is k
  int64_t k_stride, v_stride;
  float *k_scale, *v_scale;  // or null
  int64_t k_groups, v_groups;
  int32_t block;
} ip_cache;

// A ragged step: sequence b's query tokens are rows start[b] .. start[b + 1]; lens[b] tokens with them, 0: padding.
typedef struct {
  const int32_t *start, *lens, *tables;
  int64_t sequences, table_width;
} ip_batch;

// Latent attention, as in DeepSeek-V2: c = q_a x where q_a.n is not 0, and q = q_b norm(c), else q = q_b x; a head of q is
// [nope | rope], of kv_b [nope | value] rows; the cache keeps [norm(latent) | rotated rope].
typedef struct {
  ip_matrix q_a, q_b, kv_a, kv_b;  // kv_b bf16, rows side by side, FP8, INT8 or INT4
  const ip_bf16 *q_a_norm, *kv_a_norm;
  int64_t nope, rope, value, latent;
  float q_a_eps, kv_a_eps;
} ip_latent;

// Routed experts: which `top` of them by scores of the router's logits, and their matrices.
typedef struct {
  ip_matrix router;
  const float *bias;  // [experts], added to the scores where experts are chosen; or null
  const ip_matrix *gate_up, *down;
  int64_t experts, top, groups, top_groups;
  float factor;
  int32_t sigmoid, best_two, renormalize;  // scores; how groups are ranked; whether weights are divided by their sum
} ip_experts;

// A decoder layer: pre-norm; grouped-query or latent attention; a gated MLP, experts, or both, whose results are added.
// Rows of qkv: q then k then v; of gate_up: gate then up.
typedef struct {
  ip_matrix qkv, o, gate_up, down;
  const ip_bf16 *attn_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  const float *rope;                                      // [positions, 2, head_dim / 2]
  int64_t heads, kv_heads, head_dim, window;
  float attn_eps, mlp_eps, q_eps, k_eps, scale;
  int32_t interleaved;
  // Quantized weights and attention's weights may be rounded to bf16 where many tokens come: faster, and then a row's
  // result depends on how many come with it.
  int32_t rounded;
  const ip_latent *latent;    // null: grouped queries; else qkv and the norms of q and k are not read, kv_heads is 1
  const ip_experts *routed;   // null: none; else gate_up and down are of the shared experts, none where gate_up.n is 0
} ip_layer;

// Rows of logits whose next tokens are wanted, and what each row asks for. Null where no row asks: `uniform` when all take
// the likeliest token, the three cuts together when there are none.
typedef struct {
  const void *logits;  // float, or bf16 when `half`: [rows, vocab], ld entries a row
  int32_t half;
  int64_t ld, rows, vocab;
  const float *temperature, *top_p, *min_p, *uniform;
  const int64_t *top_k;
} ip_sampling;

// What a step brings to every layer, and one layer's cache. Slots of -1 are not written.
typedef struct {
  ip_batch batch;
  ip_cache cache;
  const int64_t *positions, *slots;
  int64_t tokens;
} ip_step;

// A language model: rows of `embed`, layers in turn, a norm, and the head.
typedef struct {
  const ip_layer *const *layers;
  int64_t count;
  ip_matrix embed, head;  // the same weight where they share one
  const ip_bf16 *norm;
  float eps;
} ip_model;

// What a model's step begins with and what it gives: token ids [tokens]; the `wanted` rows whose logits are asked for
// (null: all); their logits [wanted, head.n]; the likeliest token of each, int64 [wanted], as ip_sample chooses it, or
// null; and hidden [tokens, width], what the last norm gives.
typedef struct {
  const int64_t *ids, *rows;
  int64_t wanted;
  float *logits;
  int64_t *likeliest;
  ip_bf16 *hidden;
} ip_model_io;

// Bytes of the structs above in the order matrix, cache, batch, latent, experts, layer, sampling, step, model, ends, so that
// a caller can tell whether it means the same ones.
const int32_t *ip_struct_bytes(void);
// IP_KINDS as it was when the library was built.
int ip_num_kinds(void);

// -- instruction sets

// Names of those this processor can run, best last, separated by spaces; "" without AVX2.
const char *ip_available_isas(void);
// The one in use.
const char *ip_current_isa(void);
// Use another; 0 when done, -1 when this processor or build lacks it.
int ip_select_isa(const char *name);
// Called once in every thread that calls, before it asks OpenMP for its number of threads; null: nothing is.
void ip_set_thread_init(void (*begins)(void));
// Threads of the team that a call now would use.
int ip_num_threads(void);

// -- products

// y[i, :] = x[i, :] w^T + bias for m rows; y float32 when `wide`, else bf16.
void ip_linear(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide);
// As ip_linear, for many rows and weights of every kind, quantized ones rounded to bf16 but on AVX2; 1 when it was done, 0
// where this instruction set has nothing better than the caller.
int ip_linear_prefill(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide);
// Rows first .. last of a weight as bf16 [last - first, k].
void ip_dequantize_rows(const ip_matrix *w, int64_t first, int64_t last, ip_bf16 *out);
// Rows ids[0 .. count] of a weight as bf16 [count, k]; zeros where it has no such row.
void ip_gather_rows(const ip_matrix *w, const int64_t *ids, int64_t count, ip_bf16 *out);
// Canonical int8 entries [n, k] (int4: -8 .. 7) to panels; `out` has ip_packed_bytes(w) bytes.
int64_t ip_packed_bytes(const ip_matrix *w);
void ip_pack_weight(const ip_matrix *w, const int8_t *values, uint8_t *out);

// -- row by row

// s = x + r (r may be null; then s may be null too); y = s / rms(s) * weight.
void ip_rms_norm(const ip_bf16 *x, int64_t ldx, const ip_bf16 *r, const ip_bf16 *weight, float eps, int64_t m, int64_t d,
                 ip_bf16 *s, ip_bf16 *y);
// y = silu(x[:, :d]) * x[:, d:]
void ip_silu_mul(const ip_bf16 *x, int64_t ldx, int64_t m, int64_t d, ip_bf16 *y);
// Rotate heads of `dim` entries: x [m, heads, dim] with strides, table float32 [positions, 2, dim / 2].
void ip_rope(const ip_bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
             int64_t m, int64_t heads, int64_t dim, int interleaved, ip_bf16 *y);

// -- attention

// q [tokens, heads, dim], out [tokens, heads, v_dim]; window 0: all.
void ip_attention(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t v_dim, float scale, int64_t window, ip_bf16 *out);
// Absorbed latent attention: q_nope [tokens, heads, nope] and q_rope [tokens, heads, rope] with strides, kv_b
// [heads * (nope + value), latent] in bf16, FP8, INT8 or INT4; out [tokens, heads, value].
void ip_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope, const int64_t *rope_strides,
            const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope, int64_t rope,
            int64_t value, int64_t latent, float scale, ip_bf16 *out);

// The same for many query tokens a sequence, with attention's weights rounded to bf16 but on AVX2; sequences with few come
// first. 1 when it was done, 0 where this instruction set has nothing better than the caller, or the sizes do not suit it.
int ip_attention_prefill(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                      int64_t dim, int64_t v_dim, float scale, int64_t window, ip_bf16 *out);

// -- experts

// x [m, d], ids int64 and weights float [m, top]; gate_up and down one matrix an expert; out bf16 [m, d].
// 0 when done, -1 when an id is none of 0 .. experts - 1: then nothing is read or written.
int ip_moe(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_bf16 *x, int64_t ldx, int64_t m,
           const int64_t *ids, const float *weights, int64_t top, ip_bf16 *out);

// Which experts each token goes to: logits [m, experts]; ids and weights [m, top]. Only what routing wants of `x` is read.
void ip_route_experts(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights);

// -- choosing tokens

// One token a row.
void ip_sample(const ip_sampling *asked, int64_t *tokens);

// -- measuring

// Reads every byte of `bytes` (a multiple of 64) at `data`, 64-byte aligned, and returns what says that it did.
int64_t ip_read_memory(const void *data, int64_t bytes);
// Names of the parts of a layer and of a model around its layers, separated by spaces. From now on each call of layers adds
// to ns[part] the nanoseconds that its calling thread spent on it, waiting included; null: no longer.
const char *ip_time_phases(int64_t *ns);

// -- layers

// x and residual [tokens, width] (residual may be null) to out and out_residual, which may not overlap them.
void ip_decoder_layer(const ip_layer *layer, const ip_step *step, const ip_bf16 *x, const ip_bf16 *residual,
                      ip_bf16 *out, ip_bf16 *out_residual);
// As ip_decoder_layer of each in turn, each with its own cache (that of `step` is not read) and the results of the one
// before, for few tokens and layers of one size; 1 when it was done, 0 where it is not for them.
int ip_decoder_layers(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step,
                      const ip_bf16 *x, const ip_bf16 *residual, ip_bf16 *out, ip_bf16 *out_residual);

// A whole step of few tokens, with the very results of its parts in turn; 1 when it was done, 0 where it is not for so many
// tokens or such layers, -1 when an id or a row is out of range or more rows are asked for than it takes: then nothing is
// written.
int ip_model_step(const ip_model *model, const ip_cache *caches, const ip_step *step, const ip_model_io *ends);

#ifdef __cplusplus
}
#endif
