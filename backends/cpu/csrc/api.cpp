// The C interface: which instruction sets there are, which one is in use, and the calls passed on to it.
#include <cpuid.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pack.h"
#include "table.h"

int64_t *ip_phase_ns = nullptr;
void (*ip_thread_begins)() = nullptr;
int64_t ip_asked_near = 2048;

namespace {

// A program must ask the kernel for the tiles' state before it uses them (Linux: arch_prctl, ARCH_REQ_XCOMP_PERM).
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  const long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &a, &b, &c, &d); }
};

unsigned long long enabled_state() {
  Cpuid one(1, 0);
  if (!(one.c & bit_OSXSAVE)) return 0;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (unsigned long long)high << 32 | low;
}

struct Found {
  const Table *tables[4];
  int count = 0;
  char names[64] = "";
  const Table *current = nullptr;

  Found() {
    Cpuid one(1, 0), seven(7, 0), more(7, 1);
    unsigned long long state = enabled_state();
    bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6, tiles = (state & 0x60000) == 0x60000;
    bool avx2 = ymm && (seven.b & bit_AVX2) && (one.c & bit_FMA) && (one.c & bit_F16C);
    bool avx512 = avx2 && zmm && (seven.b & bit_AVX512F) && (seven.b & bit_AVX512BW) && (seven.b & bit_AVX512DQ) &&
                  (seven.b & bit_AVX512VL);
    bool bf16 = avx512 && (more.a & (1u << 5)) && (seven.c & (1u << 11));
    bool amx = bf16 && tiles && (seven.d & (1u << 24)) && (seven.d & (1u << 22)) &&
               (seven.d & (1u << 25)) && may_use_tiles();
    if (avx2) add(&table_avx2);
    if (avx512) add(&table_avx512);
    if (bf16) add(&table_avx512_bf16);
    if (amx) add(&table_amx);
    if (count) current = tables[count - 1];
    unsigned family = (one.a >> 8 & 15) + (one.a >> 20 & 255);
    // On Zen 5 as far as the first time (quant.h), which makes the second one cost nothing.
    if (Cpuid(0, 0).b == signature_AMD_ebx && family == 0x1a) ip_asked_near = 8192;
  }
  void add(const Table *t) {
    if (count) strcat(names, " ");
    strcat(names, t->name);
    tables[count++] = t;
  }
};

Found &found() {
  static Found f;
  return f;
}

const Table &now() { return *found().current; }

}  // namespace

extern "C" {

const int32_t *ip_struct_bytes(void) {
  static const int32_t bytes[] = {sizeof(ip_matrix),  sizeof(ip_cache), sizeof(ip_batch),    sizeof(ip_latent),
                                  sizeof(ip_experts), sizeof(ip_layer), sizeof(ip_sampling), sizeof(ip_step),
                                  sizeof(ip_model),   sizeof(ip_model_io)};
  return bytes;
}

int ip_num_kinds(void) { return IP_KINDS; }

const char *ip_available_isas(void) { return found().names; }
const char *ip_current_isa(void) { return found().current ? found().current->name : ""; }
void ip_set_thread_init(void (*begins)(void)) { ip_thread_begins = begins; }
int ip_num_threads(void) {
  if (ip_thread_begins) ip_thread_begins();
  return omp_get_max_threads();
}

int ip_select_isa(const char *name) {
  Found &f = found();
  for (int i = 0; i < f.count; i++)
    if (!strcmp(f.tables[i]->name, name)) {
      f.current = f.tables[i];
      return 0;
    }
  return -1;
}

const char *ip_time_phases(int64_t *ns) {
  ip_phase_ns = ns;
  return "begin attn_norm project enter attend out mlp_norm mlp down embed norm head";
}

int64_t ip_packed_bytes(const ip_matrix *w) { return packed_bytes(*w); }
void ip_pack_weight(const ip_matrix *w, const int8_t *values, uint8_t *out) { pack(*w, values, out); }

void ip_linear(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  now().linear(w, x, ldx, m, y, ldy, wide);
}

int ip_linear_prefill(const ip_matrix *w, const ip_bf16 *x, int64_t ldx, int64_t m, void *y, int64_t ldy, int wide) {
  return now().linear_many(w, x, ldx, m, y, ldy, wide);
}

void ip_dequantize_rows(const ip_matrix *w, int64_t first, int64_t last, ip_bf16 *out) { now().expand(w, first, last, out); }

void ip_gather_rows(const ip_matrix *w, const int64_t *ids, int64_t count, ip_bf16 *out) { now().rows(w, ids, count, out); }

void ip_rms_norm(const ip_bf16 *x, int64_t ldx, const ip_bf16 *r, const ip_bf16 *weight, float eps, int64_t m, int64_t d,
                 ip_bf16 *s, ip_bf16 *y) {
  now().rms_norm(x, ldx, r, weight, eps, m, d, s, y);
}

void ip_silu_mul(const ip_bf16 *x, int64_t ldx, int64_t m, int64_t d, ip_bf16 *y) { now().silu_mul(x, ldx, m, d, y); }

void ip_rope(const ip_bf16 *x, int64_t row_stride, int64_t head_stride, const float *table, const int64_t *positions,
             int64_t m, int64_t heads, int64_t dim, int interleaved, ip_bf16 *y) {
  now().rope(x, row_stride, head_stride, table, positions, m, heads, dim, interleaved, y);
}

void ip_attention(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t v_dim, float scale, int64_t window, ip_bf16 *out) {
  now().attention(q, batch, cache, heads, kv_heads, dim, v_dim, scale, window, out);
}

int ip_attention_prefill(const ip_bf16 *q, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t kv_heads,
                      int64_t dim, int64_t v_dim, float scale, int64_t window, ip_bf16 *out) {
  return now().attention_many(q, batch, cache, heads, kv_heads, dim, v_dim, scale, window, out);
}

void ip_mla(const ip_bf16 *q_nope, const int64_t *nope_strides, const ip_bf16 *q_rope, const int64_t *rope_strides,
            const ip_matrix *kv_b, const ip_batch *batch, const ip_cache *cache, int64_t heads, int64_t nope, int64_t rope,
            int64_t value, int64_t latent, float scale, ip_bf16 *out) {
  now().mla(q_nope, nope_strides, q_rope, rope_strides, kv_b, batch, cache, heads, nope, rope, value, latent, scale,
            out);
}

int ip_moe(const ip_matrix *gate_up, const ip_matrix *down, int64_t experts, const ip_bf16 *x, int64_t ldx, int64_t m,
           const int64_t *ids, const float *weights, int64_t top, ip_bf16 *out) {
  return now().moe(gate_up, down, experts, x, ldx, m, ids, weights, top, out);
}

int ip_decoder_layers(const ip_layer *const *layers, const ip_cache *caches, int64_t count, const ip_step *step,
                      const ip_bf16 *x, const ip_bf16 *residual, ip_bf16 *out, ip_bf16 *out_residual) {
  return now().decoder_layers(layers, caches, count, step, x, residual, out, out_residual);
}

int ip_model_step(const ip_model *model, const ip_cache *caches, const ip_step *step, const ip_model_io *ends) {
  return now().model_step(model, caches, step, ends);
}

void ip_decoder_layer(const ip_layer *layer, const ip_step *step, const ip_bf16 *x, const ip_bf16 *residual,
                      ip_bf16 *out, ip_bf16 *out_residual) {
  now().decoder_layer(layer, step, x, residual, out, out_residual);
}

void ip_route_experts(const ip_experts *x, const float *logits, int64_t m, int64_t *ids, float *weights) {
  now().route(x, logits, m, ids, weights);
}

void ip_sample(const ip_sampling *asked, int64_t *tokens) { now().sample(asked, tokens); }

int64_t ip_read_memory(const void *data, int64_t bytes) { return now().read(data, bytes); }

}  // extern "C"
