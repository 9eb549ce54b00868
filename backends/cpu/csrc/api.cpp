// The C interface of inferplane_cpu.h: detects the instruction sets of this processor, selects one, and passes every
// call on to its table of kernels.
#include <cpuid.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "products/weight_panels.h"
#include "runtime/kernel_table.h"

int64_t *ip_phase_ns = nullptr;
void (*ip_thread_init)() = nullptr;
int64_t ip_l1_prefetch_bytes = 2048;

namespace {

// Asks the operating system for the tiles' state, which a program must do before it uses tiles (Linux: arch_prctl,
// ARCH_REQ_XCOMP_PERM). Returns whether it was granted; false on other systems.
bool request_tile_permission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  const long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

// The result of one CPUID leaf.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};

// The register states that the operating system saves, as the bits of XCR0; 0 if it does not tell.
unsigned long long enabled_state() {
  Cpuid one(1, 0);
  if (!(one.c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (unsigned long long)high << 32 | low;
}

// The instruction sets that this processor and this build have, best last, and the one in use.
struct SupportedIsas {
  const KernelTable *tables[4];
  int count = 0;
  char names[64] = "";
  const KernelTable *current = nullptr;

  SupportedIsas() {
    Cpuid one(1, 0), seven(7, 0), seven_one(7, 1);
    unsigned long long state = enabled_state();
    bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    bool avx2 = ymm && (seven.b & bit_AVX2) && (one.c & bit_FMA) && (one.c & bit_F16C);
    bool avx512 = avx2 && zmm && (seven.b & bit_AVX512F) && (seven.b & bit_AVX512BW) && (seven.b & bit_AVX512DQ) &&
                  (seven.b & bit_AVX512VL);
    bool bf16 = avx512 && (seven_one.a & (1u << 5)) && (seven.c & (1u << 11));
    bool amx = bf16 && tiles && (seven.d & (1u << 24)) && (seven.d & (1u << 22)) &&
               (seven.d & (1u << 25)) && request_tile_permission();
    if (avx2) add(&table_avx2);
    if (avx512) add(&table_avx512);
    if (bf16) add(&table_avx512_bf16);
    if (amx) add(&table_amx);
    if (count) current = tables[count - 1];
    unsigned family = (one.a >> 8 & 15) + (one.a >> 20 & 255);
    // On Zen 5 both prefetches then ask for the same line (panel_products.h), so the second one costs nothing.
    if (Cpuid(0, 0).b == signature_AMD_ebx && family == 0x1a) ip_l1_prefetch_bytes = 8192;
  }
  // Appends an instruction set, better than those before it.
  void add(const KernelTable *t) {
    if (count) strcat(names, " ");
    strcat(names, t->name);
    tables[count++] = t;
  }
};

// Detected at the first call.
SupportedIsas &supported_isas() {
  static SupportedIsas f;
  return f;
}

// The table in use. There must be one: ip_available_isas is not "".
const KernelTable &kernels() { return *supported_isas().current; }

}  // namespace

extern "C" {

const int32_t *ip_struct_bytes(void) {
  static const int32_t bytes[] = {sizeof(ip_matrix),  sizeof(ip_cache), sizeof(ip_batch), sizeof(ip_norm),
                                  sizeof(ip_latent),  sizeof(ip_clamped_gate), sizeof(ip_gate_limits), sizeof(ip_experts), sizeof(ip_hyper),
                                  sizeof(ip_layer),
                                  sizeof(ip_sampling), sizeof(ip_step), sizeof(ip_layer_steps), sizeof(ip_logit_scale),
                                  sizeof(ip_model), sizeof(ip_model_io), sizeof(ip_sequences), sizeof(ip_head_rows),
                                  sizeof(ip_convolution), sizeof(ip_delta_rule), sizeof(ip_scan),
                                  sizeof(ip_norm_with_gate), sizeof(ip_mixer)};
  return bytes;
}

int ip_num_kinds(void) { return IP_KINDS; }

int ip_signatures(void) { return IP_SIGNATURES; }

const char *ip_available_isas(void) { return supported_isas().names; }
const char *ip_current_isa(void) { return supported_isas().current ? supported_isas().current->name : ""; }
void ip_set_thread_init(void (*init)(void)) { ip_thread_init = init; }
int ip_num_threads(void) {
  if (ip_thread_init) ip_thread_init();
  return omp_get_max_threads();
}

int ip_select_isa(const char *name) {
  SupportedIsas &f = supported_isas();
  for (int i = 0; i < f.count; i++)
    if (!strcmp(f.tables[i]->name, name)) {
      f.current = f.tables[i];
      return 0;
    }
  return -1;
}

const char *ip_time_phases(int64_t *ns) {
  ip_phase_ns = ns;
  return "begin attn_norm project rope_cache attend out mlp_norm mlp down embed norm head";
}

int64_t ip_packed_bytes(const ip_matrix *w) { return packed_weight_bytes(*w); }
int ip_pack_weight(const ip_matrix *w, const int8_t *values, uint8_t *out) { return pack_weight(*w, values, out); }

void ip_linear(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  kernels().linear(w, x, ldx, m, y, ldy, wide);
}

int ip_linear_prefill(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  return kernels().linear_prefill(w, x, ldx, m, y, ldy, wide);
}

void ip_dequantize_rows(const ip_matrix *w, int64_t first, int64_t last, ip_bf16 *out) {
  kernels().dequantize_rows(w, first, last, out);
}

void ip_gather_rows(const ip_matrix *w, const int64_t *ids, int64_t count, float factor, ip_bf16 *out) {
  kernels().gather_rows(w, ids, count, factor, out);
}

void ip_scale_logits(const ip_logit_scale *scale, float *logits, int64_t count) {
  kernels().scale_logits(scale, logits, count);
}

void ip_rms_norm(const ip_bf16 *x, int64_t ldx, const ip_bf16 *r, const ip_norm *norm, int64_t m, int64_t d, ip_bf16 *s,
                 ip_bf16 *y) {
  kernels().rms_norm(x, ldx, r, norm, m, d, s, y);
}

void ip_activation_mul(const ip_bf16 *x, int64_t ldx, int64_t m, int64_t d, int activation,
                       const ip_gate_limits *limits, ip_bf16 *y) {
  kernels().activation_mul(x, ldx, m, d, activation, limits, y);
}

void ip_rope(const ip_bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
             int64_t m, int64_t heads, int64_t dim, int interleaved, ip_bf16 *y) {
  kernels().rope(x, row_stride, head_stride, table, positions, m, heads, dim, interleaved, y);
}

void ip_attention(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t v_dim, float scale, int64_t window, const float *sinks, float softcap,
                  ip_bf16 *out) {
  kernels().attention(q, batch, cache, heads, kv_heads, dim, v_dim, scale, window, sinks, softcap, out);
}

int ip_attention_prefill(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                         int64_t kv_heads, int64_t dim, int64_t v_dim, float scale, int64_t window,
                         const float *sinks, float softcap, ip_bf16 *out) {
  return kernels().attention_prefill(q, batch, cache, heads, kv_heads, dim, v_dim, scale, window, sinks, softcap, out);
}

void ip_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope, const int64_t *rope_strides,
            const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope,
            int64_t rope, int64_t value, int64_t latent, float scale, ip_bf16 *out) {
  kernels().mla(q_nope, nope_strides, q_rope, rope_strides, kv_b, batch, cache, heads, nope, rope, value, latent, scale,
            out);
}

void ip_index_select(const ip_bf16 *q, const float *w, const ip_batch *batch, const ip_cache *cache, int64_t heads,
                     int64_t dim, int64_t top, int64_t rate, int32_t *out) {
  kernels().index_select(q, w, batch, cache, heads, dim, top, rate, out);
}

void ip_sparse_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope,
                   const int64_t *rope_strides, const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache,
                   int64_t heads, int64_t nope, int64_t rope, int64_t value, int64_t latent, float scale,
                   const int32_t *chosen, int64_t top, ip_bf16 *out) {
  kernels().sparse_mla(q_nope, nope_strides, q_rope, rope_strides, kv_b, batch, cache, heads, nope, rope, value, latent,
                       scale, chosen, top, out);
}

int ip_moe(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_clamped_gate *clamped,
           const ip_gate_limits *limits, const ip_bf16 *x, int64_t ldx, int64_t m, const int64_t *ids,
           const float *weights, int64_t top, ip_bf16 *out) {
  return kernels().moe(gate_up, down, experts, clamped, limits, x, ldx, m, ids, weights, top, out);
}

int ip_decoder_layers(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_layer_steps *steps,
                      const ip_bf16 *x, const ip_bf16 *residual, ip_bf16 *out, ip_bf16 *out_residual) {
  return kernels().decoder_layers(layers, caches, count, steps, x, residual, out, out_residual);
}

int ip_model_step(const ip_model *model, const ip_cache *caches, const ip_layer_steps *steps, const ip_model_io *io) {
  return kernels().model_step(model, caches, steps, io);
}

void ip_decoder_layer(const ip_layer *layer, const ip_step *step, const ip_bf16 *x, const ip_bf16 *residual,
                      ip_bf16 *out, ip_bf16 *out_residual) {
  kernels().decoder_layer(layer, step, x, residual, out, out_residual);
}

void ip_route_experts(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights) {
  kernels().route_experts(x, logits, m, ids, weights);
}

void ip_expert_weights(const ip_experts *x, const float *logits, int64_t m, const int64_t *ids, float *weights) {
  kernels().expert_weights(x, logits, m, ids, weights);
}

void ip_hyper_pre(const ip_hyper *hyper, const void *x, int64_t tokens, void *y, float *post, float *mix) {
  kernels().hyper_pre(hyper, x, tokens, y, post, mix);
}

void ip_hyper_post(const ip_hyper *hyper, const void *y, const void *x, const float *post, const float *mix,
                   int64_t tokens, void *out) {
  kernels().hyper_post(hyper, y, x, post, mix, tokens, out);
}

void ip_sinkhorn(float *m, int64_t count, int64_t n, int64_t iterations, float eps) {
  kernels().sinkhorn(m, count, n, iterations, eps);
}

void ip_sample(const ip_sampling *params, int64_t *tokens) { kernels().sample(params, tokens); }

void ip_causal_conv1d(const ip_convolution *conv, const ip_sequences *s, const ip_bf16 *x, int64_t ldx,
                      const ip_bf16 *before, ip_bf16 *after, ip_bf16 *y) {
  kernels().causal_conv1d(conv, s, x, ldx, before, after, y);
}

void ip_delta_rule_gates(const float *a_log, const float *dt_bias, const ip_bf16 *a, int64_t lda, const ip_bf16 *b,
                         int64_t ldb, int64_t tokens, int64_t heads, int64_t channels, float *decay, float *beta) {
  kernels().delta_rule_gates(a_log, dt_bias, a, lda, b, ldb, tokens, heads, channels, decay, beta);
}

void ip_gated_delta_rule(const ip_delta_rule *rule, const ip_sequences *s, const ip_head_rows *qkv, const float *decay,
                         int64_t ld_decay, const float *beta, int64_t ld_beta, const float *before, float *after,
                         ip_bf16 *y) {
  kernels().gated_delta_rule(rule, s, qkv, decay, ld_decay, beta, ld_beta, before, after, y);
}

void ip_gated_norm(const ip_norm_with_gate *norm, const ip_head_rows *x, const ip_head_rows *gate, int64_t tokens,
                   int64_t heads, int64_t d, ip_bf16 *y) {
  kernels().gated_norm(norm, x, gate, tokens, heads, d, y);
}

void ip_selective_scan(const ip_scan *scan, const ip_sequences *s, const ip_head_rows *xbc, const ip_bf16 *dt,
                       int64_t dt_row, const float *before, float *after, ip_bf16 *y) {
  kernels().selective_scan(scan, s, xbc, dt, dt_row, before, after, y);
}

void ip_recurrent_block(const ip_mixer *mixer, const ip_sequences *s, const ip_bf16 *x, ip_bf16 *conv_states,
                        float *states, ip_bf16 *out) {
  kernels().recurrent_block(mixer, s, x, conv_states, states, out);
}

int64_t ip_read_memory(const void *data, int64_t bytes) { return kernels().read_memory(data, bytes); }

}  // extern "C"
