// A layer's cached keys, values or latents, in one of the kinds of structs.h: writing them, and reading them in bf16.
// Layers write, attention reads.
//
// If few query rows meet a key in int8, the query rows are rounded to 16-bit integers (an error of 2^-16 of a row's
// largest entry) and multiplied with entries as they lie, exactly; scales are applied to the sums (int8_scores.h). In
// all other cases entries are converted to bf16 first, once for all rows: without their scale, which is exact, or with
// it.
#pragma once
#include "attention/fp8_rows.h"
#include "products/linear.h"

namespace {

// Slots whose keys are differences from the first of them, and entries of such keys that share a scale and a minimum.
constexpr int64_t kSpanSlots = 16, kDifferenceGroup = 16;

// K, V or latents: entries of slot s begin with entry s * stride, its scales at scale + s * groups. Of 4 bits a span of
// slots and a head lie together: see `SpanOfHead`; `groups` entries, 16 or 32, share a range.
struct KvEntries {
  void *data;
  float *scale;
  int64_t stride, groups, group_size;  // `group_size` entries share a scale of int8 or FP8
  int32_t kind = IP_KV_BF16;
  const bf16 *ranges = nullptr;  // float16
  const int8_t *first = nullptr;
  const float *first_scale = nullptr;  // of each span and head
  int64_t head = 0;  // bytes from one head of a span to the next, which is `stride` from span to span
  bool is_bf16() const { return kind == IP_KV_BF16; }
  bool is_int8() const { return kind == IP_KV_INT8; }
  bool in_spans() const { return kind == IP_KV_INT4 || kind == IP_KV_INT4_DIFFERENCES; }
  bool has_scales() const { return kind == IP_KV_INT8 || kind == IP_KV_FP8; }
  int64_t bytes_of(int64_t entries) const {
    return is_bf16() ? entries * (int64_t)sizeof(bf16) : has_scales() ? entries : entries / 2;
  }
  bf16 *bf16_entries() const { return (bf16 *)data; }
  int8_t *int8_entries() const { return (int8_t *)data; }
};

// The keys of a cache, `entries` per slot for all its KV heads together; for latents, the latents.
inline KvEntries key_entries(const ip_cache &c, int64_t entries) {
  return {c.k, c.k_scale, c.k_stride, c.k_groups, c.k_scale ? entries / c.k_groups : 0, c.k_kind, c.k_ranges, c.first,
          c.first_scale, c.k_head};
}
// The values of a cache, `entries` per slot for all its KV heads together.
inline KvEntries value_entries(const ip_cache &c, int64_t entries) {
  return {c.v, c.v_scale, c.v_stride, c.v_groups, c.v_scale ? entries / c.v_groups : 0, c.v_kind, c.v_ranges,
          nullptr, nullptr, c.v_head};
}

// Where the entries of 4 bits of a span and head are. Of keys, 64 bytes are sixteen slots of four bytes, of values sixteen
// entries of four slots (inferplane.kvcache.int4_spans). Ranges, float16: of each group the scales of the sixteen slots,
// then their minimums.
struct SpanOfHead {
  const uint8_t *bytes;
  const bf16 *ranges;
  const int8_t *first;  // the first key, or null
  SpanOfHead(const KvEntries &k, int64_t span, int64_t head) {
    const int64_t at = span * k.stride + head * k.head;
    bytes = (const uint8_t *)k.data + at, ranges = (const bf16 *)((const char *)k.ranges + at);
    first = k.first ? k.first + at : nullptr;
  }
};

// Writes x[0 .. n], whole groups, to a slot and head of entries of 4 bits: of keys, the differences from the first one
// of the span, which is written too if the slot is that. The numbers are those of `Int4Keys` and `Int4Entries` of
// inferplane.kvcache.int4: scales and minimums saturate, and what is not finite makes its group so.
inline void write_int4(const KvEntries &k, int64_t slot, int64_t head, const bf16 *x, int64_t n) {
  const SpanOfHead at(k, slot / kSpanSlots, head);
  const int64_t in_span = slot % kSpanSlots;
  uint8_t *to = (uint8_t *)at.bytes + (k.kind == IP_KV_INT4 ? in_span / 4 * 2 * n + in_span % 4 : in_span * 4);
  F32x16 scale_of_first = {};
  if (at.first) {
    float *scale = (float *)k.first_scale + slot / kSpanSlots * (k.stride / k.head) + head;
    if (in_span == 0) *scale = quantize_int8_row(x, n, (int8_t *)at.first).scale;
    scale_of_first = splat(*scale);
  }
  for (int64_t c = 0; c < n; c += 32) {
    float values[32];
    uint8_t entries[32];
    for (int64_t i = 0; i < 32; i += 16) {
      F32x16 v = load_f32x16(x + c + i, 16);
      store(values + i, at.first ? v - load_f32x16(at.first + c + i, 16) * scale_of_first : v);
    }
    for (int64_t g = 0; g < 32; g += k.groups) {
      float least = values[g], most = values[g], all = 0;
      for (int64_t i = g; i < g + k.groups; i++) {
        least = values[i] < least ? values[i] : least, most = values[i] > most ? values[i] : most;
        all += values[i] * 0;
      }
      if (all != all && least - least == 0 && most - most == 0) least = most = all;  // a NaN that is not the first one
      const float limit = 65504.0f;
      const float minimum = least - least != 0 ? least : least < -limit ? -limit : least > limit ? limit : least;
      __m128i range = _mm_cvtps_ph(_mm_setr_ps((most - least) / 15.0f, minimum, 0, 0), _MM_FROUND_TO_NEAREST_INT);
      uint16_t bits[8];
      memcpy(bits, &range, sizeof bits);
      if (bits[0] == 0) bits[0] = 0x3c00;  // 1
      bf16 *pair = (bf16 *)at.ranges + (c + g) / k.groups * 2 * kSpanSlots + in_span;
      pair[0] = bits[0], pair[kSpanSlots] = bits[1];
      const __m128 rounded = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)bits));
      for (int64_t i = g; i < g + k.groups; i += 16) {
        F32x16 step = round_even((load<F32x16>(values + i) - rounded[1]) / rounded[0]);
        for (int e = 0; e < 16; e++) entries[i + e] = (uint8_t)(step[e] > 0 ? step[e] < 15 ? step[e] : 15 : 0);
      }
    }
    for (int i = 0; i < 16; i++)
      if (k.kind == IP_KV_INT4)
        to[c * 2 + i * 4] = (uint8_t)(entries[i] | entries[16 + i] << 4);
      else
        to[c * 8 + i / 4 * 64 + i % 4] = (uint8_t)(entries[i / 4 * 8 + i % 4] | entries[i / 4 * 8 + 4 + i % 4] << 4);
  }
}

// Writes x[0 .. n] to entries first .. first + n of a slot. If there are scales, they are whole groups, and each group's
// scale is written too: its largest magnitude becomes 127, or 448 in FP8, and a group of zeros has scale 1. Of 4 bits,
// they are a head's, and a span's first key is written before the others.
inline void write_entries(const KvEntries &k, int64_t slot, int64_t first, const bf16 *x, int64_t n) {
  if (k.in_spans()) return write_int4(k, slot, first / n, x, n);
  if (!k.has_scales()) {
    memcpy(k.bf16_entries() + slot * k.stride + first, x, (size_t)n * sizeof(bf16));
    return;
  }
  for (int64_t g = 0; g < n; g += k.group_size) {
    int64_t at = first + g;
    int8_t *to = k.int8_entries() + slot * k.stride + at;
    k.scale[slot * k.groups + at / k.group_size] = k.is_int8() ? quantize_int8_row(x + g, k.group_size, to).scale
                                                               : quantize_fp8_row(x + g, k.group_size, (uint8_t *)to);
  }
}

// out[c] = from[c] in bf16 for n int8 entries, without their scale, exactly.
inline void int8_to_bf16(const int8_t *from, int64_t n, bf16 *out) {
  for (int64_t c = 0; c < n; c += kLanes) store_bf16x16(out + c, load_f32x16(from + c, n - c), n - c);
}

// out[0 .. n] = entries first .. first + n of a slot of FP8 entries in bf16, scales applied.
inline void dequantize_fp8(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  constexpr int64_t kStep = 64;
  const uint8_t *from = (const uint8_t *)k.data + slot * k.stride + first;
  const float *scale = k.scale + slot * k.groups + first / k.group_size;
  bf16 plain[kStep];
  for (int64_t c = 0, end = k.group_size - first % k.group_size; c < n; end += k.group_size) {
    F32x16 scale_of_group = splat(*scale++);
    for (int64_t last = min64(n, end); c < last;) {
      int64_t count = min64(kStep, last - c);
      fp8_row_to_bf16(from + c, count, plain);
      for (int64_t i = 0; i < count; i += kLanes)
        store_bf16x16(out + c + i, load_f32x16(plain + i, count - i) * scale_of_group, count - i);
      c += count;
    }
  }
}

// The values of sixteen numbers 0 .. 15 that have one range, in float32: range[0] times the number plus range[kSpanSlots].
inline F32x16 int4_values(const bf16 *range) {
  __m128 scale_and_minimum = _mm_cvtph_ps(_mm_cvtsi32_si128(range[0] | range[kSpanSlots] << 16));
  const F32x16 numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return numbers * scale_and_minimum[0] + scale_and_minimum[1];
}

// entries[0], entries[1] = 32 numbers of a slot: `from` has those of sixteen slots of keys.
inline void int4_entries_of_key(const uint8_t *from, int64_t slot, __m128i entries[2]) {
  int32_t quads[4];
  for (int i = 0; i < 4; i++) memcpy(quads + i, from + i * 64 + slot * 4, 4);
  const __m128i low_bits = _mm_set1_epi8(15), x = _mm_setr_epi32(quads[0], quads[1], quads[2], quads[3]);
  __m128i low = _mm_and_si128(x, low_bits), high = _mm_and_si128(_mm_srli_epi16(x, 4), low_bits);
  entries[0] = _mm_unpacklo_epi32(low, high), entries[1] = _mm_unpackhi_epi32(low, high);
}
// The same of values: `from` has those of four slots, and `slot` is one of them.
inline void int4_entries_of_value(const uint8_t *from, int64_t slot, __m128i entries[2]) {
  const __m128i low_byte = _mm_set1_epi32(255), count = _mm_cvtsi64_si128(8 * slot), low_bits = _mm_set1_epi8(15);
  __m128i lanes[4];
  for (int i = 0; i < 4; i++)
    lanes[i] = _mm_and_si128(_mm_srl_epi32(_mm_loadu_si128((const __m128i *)(from + 16 * i)), count), low_byte);
  __m128i x = _mm_packus_epi16(_mm_packus_epi32(lanes[0], lanes[1]), _mm_packus_epi32(lanes[2], lanes[3]));
  entries[0] = _mm_and_si128(x, low_bits), entries[1] = _mm_and_si128(_mm_srli_epi16(x, 4), low_bits);
}

// out[0 .. n] = the n entries, a multiple of 32, of head first / n of a slot of 4-bit entries in bf16; of keys, their
// differences. Each value is looked up in a table of its group's sixteen.
inline void int4_entries_to_bf16(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  const SpanOfHead at(k, slot / kSpanSlots, first / n);
  const int64_t in_span = slot % kSpanSlots;
  const uint8_t *from = at.bytes;
  const bf16 *ranges = at.ranges + in_span;
  if (k.kind == IP_KV_INT4) from += in_span / 4 * 2 * n;
  for (int64_t c = 0; c < n; c += 32) {
    __m128i entries[2];
    if (k.kind == IP_KV_INT4)
      int4_entries_of_value(from + c * 2, in_span % 4, entries);
    else
      int4_entries_of_key(from + c * 8, in_span, entries);
    const bf16 *range = ranges + c / k.groups * 2 * kSpanSlots;
    U16x16 table[2];
    table[0] = f32_to_bf16(int4_values(range));
    table[1] = k.groups == 16 ? f32_to_bf16(int4_values(range + 2 * kSpanSlots)) : table[0];
#if defined(__AVX512BW__)
    __m512i tables = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)table[0]), (__m256i)table[1], 1);
    __m512i index = _mm512_cvtepu8_epi16(_mm256_set_m128i(entries[1], entries[0]));
    index = _mm512_or_si512(index, _mm512_inserti64x4(__m512i{}, _mm256_set1_epi16(16), 1));
    _mm512_storeu_si512(out + c, _mm512_permutexvar_epi16(index, tables));
#else
    for (int half = 0; half < 2; half++) {
      __m128i parts[2];
      memcpy(parts, &table[half], sizeof parts);
      const __m128i low_bytes = _mm_set1_epi16(255);
      __m128i low = _mm_packus_epi16(_mm_and_si128(parts[0], low_bytes), _mm_and_si128(parts[1], low_bytes));
      __m128i high = _mm_packus_epi16(_mm_srli_epi16(parts[0], 8), _mm_srli_epi16(parts[1], 8));
      low = _mm_shuffle_epi8(low, entries[half]), high = _mm_shuffle_epi8(high, entries[half]);
      _mm_storeu_si128((__m128i *)(out + c + half * 16), _mm_unpacklo_epi8(low, high));
      _mm_storeu_si128((__m128i *)(out + c + half * 16 + 8), _mm_unpackhi_epi8(low, high));
    }
#endif
  }
}

// out[0 .. n] = the n entries, a multiple of 32, of head first / n of a slot of 4-bit entries in bf16: each group's
// scale and minimum applied, and the first key of the span added to differences.
inline void dequantize_int4(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  if (k.kind == IP_KV_INT4) return int4_entries_to_bf16(k, slot, first, n, out);
  const int64_t span = slot / kSpanSlots, in_span = slot % kSpanSlots;
  const SpanOfHead at(k, span, first / n);
  const F32x16 scale = splat(k.first_scale[span * (k.stride / k.head) + first / n]);
  for (int64_t c = 0; c < n; c += 32) {
    alignas(16) uint8_t entries[32];
    int4_entries_of_key(at.bytes + c * 8, in_span, (__m128i *)entries);
    for (int64_t g = c; g < c + 32; g += kDifferenceGroup) {
      float values[16], found[16];
      store(values, int4_values(at.ranges + g * 2 + in_span));
      for (int i = 0; i < 16; i++) found[i] = values[entries[g - c + i]];
      store_bf16x16(out + g, load<F32x16>(found) + load_f32x16(at.first + g, 16) * scale);
    }
  }
}

// out[0 .. n] = entries first .. first + n of a slot of int8 entries in bf16, scales applied.
inline void dequantize_int8(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
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

// out[0 .. n] = entries first .. first + n of a slot in bf16, of a cache that is not bf16; of 4 bits, those of a head.
inline void dequantize_entries(const KvEntries &k, int64_t slot, int64_t first, int64_t n, bf16 *out) {
  if (k.is_int8())
    dequantize_int8(k, slot, first, n, out);
  else if (k.kind == IP_KV_FP8)
    dequantize_fp8(k, slot, first, n, out);
  else
    dequantize_int4(k, slot, first, n, out);
}

}  // namespace
