// A layer's cached keys, values or latents, in bf16 or in int8 with a scale for every group of a token's entries:
// writing them, and reading them in bf16. Layers write, attention reads.
//
// If few query rows meet a key, the query rows are rounded to 16-bit integers (an error of 2^-16 of a row's largest
// entry) and multiplied with int8 entries as they lie, exactly; scales are applied to the sums (int8_scores.h). If many
// rows do, entries are converted to bf16 first, once for all rows: without their scale, which is exact, or with it.
#pragma once
#include "products/linear.h"

namespace {

// K, V or latents: entries of slot s begin at data + s * stride, its scales at scale + s * groups; scale null: bf16.
struct KvEntries {
  void *data;
  float *scale;
  int64_t stride, groups, group_size;  // `group_size` entries share a scale
  bool is_int8() const { return scale; }
  bf16 *bf16_entries() const { return (bf16 *)data; }
  int8_t *int8_entries() const { return (int8_t *)data; }
};

// The keys of a cache, `entries` per slot for all its KV heads together; for latents, the latents.
inline KvEntries key_entries(const ip_cache &c, int64_t entries) {
  return {c.k, c.k_scale, c.k_stride, c.k_groups, c.k_scale ? entries / c.k_groups : 0};
}
// The values of a cache, `entries` per slot for all its KV heads together.
inline KvEntries value_entries(const ip_cache &c, int64_t entries) {
  return {c.v, c.v_scale, c.v_stride, c.v_groups, c.v_scale ? entries / c.v_groups : 0};
}

// Writes x[0 .. n] to entries first .. first + n of a slot, as bf16 or int8, whichever the cache keeps. For int8 they
// are whole groups, and each group's scale is written too: its largest magnitude becomes 127, and a group of zeros has
// scale 1.
inline void write_entries(const KvEntries &k, int64_t slot, int64_t first, const bf16 *x, int64_t n) {
  if (!k.is_int8()) {
    memcpy(k.bf16_entries() + slot * k.stride + first, x, (size_t)n * sizeof(bf16));
    return;
  }
  for (int64_t g = 0; g < n; g += k.group_size) {
    int64_t at = first + g;
    k.scale[slot * k.groups + at / k.group_size] =
        quantize_int8_row(x + g, k.group_size, k.int8_entries() + slot * k.stride + at).scale;
  }
}

// out[c] = from[c] in bf16 for n int8 entries, without their scale, exactly.
inline void int8_to_bf16(const int8_t *from, int64_t n, bf16 *out) {
  for (int64_t c = 0; c < n; c += kLanes) store_bf16x16(out + c, load_f32x16(from + c, n - c), n - c);
}

// out[0 .. n] = entries first .. first + n of a slot of int8 entries in bf16, scales applied.
inline void dequantize_entries(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  const int8_t *from = k.int8_entries() + slot * k.stride + first;
  const float *scale = k.scale + slot * k.groups + first / k.group_size;
  for (int64_t c = 0, end = k.group_size - first % k.group_size; c < n; end += k.group_size) {
    F32x16 scale_of_group = splat(*scale++);
    int64_t last = min64(n, end);
#ifdef __AVX512BF16__
    for (; c + 2 * kLanes <= last; c += 2 * kLanes)
      _mm512_storeu_si512(out + c,
                          (__m512i)_mm512_cvtne2ps_pbh((__m512)(load_f32x16(from + c + kLanes) * scale_of_group),
                                                       (__m512)(load_f32x16(from + c) * scale_of_group)));
#endif
    for (; c < last; c = min64(last, c + kLanes))
      store_bf16x16(out + c, load_f32x16(from + c, last - c) * scale_of_group, last - c);
  }
}

}  // namespace
