// Activations rounded to at most 8 bits, as `ip_matrix::input` says, for the products with nibbles (panel_products.h):
// the layout is that of 16 bits with zeros for the high bytes. linear.h calls `quantize_narrow` once per call and thread.
//
// The integers and scales are those of the op `quantize`, so sums of a group of columns are exact, and a row is the same
// bits on every instruction set.
#pragma once
#include "products/quantize_int16.h"

namespace {

// Lanes value / scale rounded to even, where `inverse` is 1 / scale: as a division rounds, for less.
inline Floats divide_and_round(Floats value, float scale, float inverse) {
  bool exact = scale > 1e-30f && scale < 1e30f;
  Floats q = value * inverse;
  q = exact ? fma(fma(-q, splat_floats(scale), value), splat_floats(inverse), q) : value / scale;
  return round_even(q);
}

// Lanes rounded to the nearest of 0, 1, 2, 3, 4, 6, 8 and 12 and their negatives, of two the one nearer to zero.
inline Floats round_to_e2m1(Floats value) {
  Ints sign = (Ints)value & (Ints)splat_floats(-0.0f);
  Floats size = (Floats)((Ints)value ^ sign);
  // A comparison is -1 where it holds.
  Ints found = (size > 0.5f) + (size > 1.5f) + (size > 2.5f) + (size > 3.5f) +
               ((size > 5.0f) + (size > 7.0f)) * 2 + (size > 10.0f) * 4;
  return (Floats)((Ints)__builtin_convertvector(-found, Floats) | sign);
}

// Half of the power of two of which `largest` is 3.5 to 7 times one, at least 2^-126: entries of e2m1 are twice their
// values.
inline float e2m1_scale(float largest) {
  int32_t bits;
  memcpy(&bits, &largest, 4);
  int32_t exponent = ((bits + (1 << 21)) >> 23) - 3;
  bits = (exponent < 1 ? 1 : exponent) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return scale;
}

// Quantizes all rows of x for products with w, whose `input` is not IP_INPUT_INT16, into `buffers` of the calling thread.
// Columns after the last become zeros.
inline Int16Activations quantize_narrow(Workspace buffers[3], const ActivationRows &x, const ip_matrix &w) {
  int64_t g = group_size(w), groups = num_groups(w), chunks = g / kLanes;
  int32_t *q = buffers[0].reserve<int32_t>(x.m * groups * chunks * 8), offset = (int32_t)entry_offset(w);
  float *scales = buffers[1].reserve<float>(x.m * groups);
  int32_t *correction = buffers[2].reserve<int32_t>(x.m * groups);
  const bool by_group = w.input == IP_INPUT_MXFP4;
  const float top = w.input == IP_INPUT_INT8 ? 127.0f : 7.5f;
  const Floats most = splat_floats(w.input == IP_INPUT_INT8 ? 127.0f : by_group ? 12.0f : 7.0f);
  for (int64_t i = 0; i < x.m; i++) {
    const bf16 *row = x.x + i * x.padded;
    float largest = by_group ? 0 : largest_magnitude(row, x.padded), scale = largest / top;
    for (int64_t b = 0; b < groups; b++) {
      int64_t at = b * x.m + i, columns = max64(0, min64(g, x.padded - b * g));
      if (by_group) largest = largest_magnitude(row + b * g, columns), scale = e2m1_scale(largest);
      if (largest == 0) scale = 1;
      scales[at] = largest < 3e38f ? scale : largest - largest;  // infinite or NaN: so is every result
      float inverse = 1 / scale;
      Ints all = {};
      for (int64_t c = 0; c < chunks; c++) {
        Floats value[kLanes / kRegisterLanes];
        for (int64_t r = 0; r < kLanes / kRegisterLanes; r++) {
          int64_t column = c * kLanes + r * kRegisterLanes;
          Floats v = column < columns ? load_floats(row + b * g + column) : Floats{};
          v = by_group ? round_to_e2m1(v * inverse) : divide_and_round(v, scale, inverse);
          value[r] = v > most ? most : v;
        }
        int64_t chunk = b * chunks + c;
        int32_t *to = q + (chunk / 2 * x.m + i) * 16 + chunk % 2 * 4;
        all += store_int16_quads(value, 1.0f, to, to + 8);
      }
      correction[at] = -offset * sum_lanes(all);
    }
  }
  return {x.m, groups, g, q, scales, correction, nullptr};
}

}  // namespace
