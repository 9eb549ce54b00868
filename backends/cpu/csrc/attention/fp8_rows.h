// Quantization of a row to FP8 (e4m3) entries of the KV cache, as core's paged storage defines it
// (inferplane/kvcache/paged.py). kv_entries.h writes them.
#pragma once
#include "products/quantize_activations.h"

namespace {

constexpr float kLargestFp8 = 448.0f;

// The bits of e4m3 numbers for sixteen floats, rounded to even; beyond 448 they saturate, NaN stays NaN.
inline I32x16 floats_to_fp8_bits(F32x16 v) {
  I32x16 sign = (I32x16)v >> 24 & 0x80, size = (I32x16)v & 0x7fffffff, largest = I32x16{} + 0x43e00000;
  I32x16 limited = size > largest ? largest : size;
  I32x16 normal = (limited + 0x7ffff + (limited >> 20 & 1) - (120 << 23)) >> 20;
  I32x16 small = __builtin_convertvector(round_even((F32x16)limited * 512.0f), I32x16);  // multiples of 2^-9
  I32x16 bits = limited < 0x3c800000 ? small : normal;  // 2^-6
  return sign | (size > 0x7f800000 ? (I32x16{} + 0x7f) : bits);
}

// to[c] = x[c] / scale, rounded to even, for n entries. Returns scale, which is the largest magnitude / 448, or 1 for a
// row of zeros.
inline float quantize_fp8_row(const bf16 *x, int64_t n, uint8_t *to) {
  float scale = largest_magnitude(x, n) / kLargestFp8;
  if (scale == 0) scale = 1;
  for (int64_t c = 0; c < n; c += kLanes)
    store_int8((int8_t *)(to + c), floats_to_fp8_bits(load_f32x16(x + c, n - c) / scale), n - c);
  return scale;
}

}  // namespace
