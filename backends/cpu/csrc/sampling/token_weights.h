// Logits in registers, and the weights of tokens: floor(2^40 exp((logit - top) / temperature)). All sampling headers
// use it; prefill_float32.h uses `exp_scaled`.
//
// Weights are integers, so that their sums do not depend on the order; they are computed again wherever they are
// needed, which costs less than storing them. Every instruction set computes the same ones.
#pragma once
#include <float.h>
#include <math.h>

#include "products/linear.h"

namespace {

constexpr float kMinExponent = -27.75f;  // exp of it is less than 2^-40, a weight of 0
constexpr float kExponentFloor = -40.0f;  // smaller exponents are replaced by this one

// A mask of a register's lanes, with comparisons and selections. max_floats and min_floats give b if one of them is
// NaN. greater_equal with `of`: only lanes of that mask. mask_bits: bit l is lane l. masked_add: sum + x in marked
// lanes, else sum. permute: lane i is table[at[i] modulo the lanes].
#ifdef __AVX512DQ__
typedef __mmask16 Mask;
inline Floats max_floats(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats min_floats(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
inline Mask greater_equal(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
inline Mask greater_equal(Floats a, Floats b, Mask of) {
  return _mm512_mask_cmp_ps_mask(of, (__m512)a, (__m512)b, _CMP_GE_OQ);
}
inline Mask less_than(Floats a, Floats b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
inline Mask equal(Ints a, Ints b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Mask mask_of_first_lanes(int64_t n) { return (Mask)(n >= kRegisterLanes ? 0xffff : (1 << n) - 1); }
inline uint32_t mask_bits(Mask marked) { return marked; }
inline uint32_t mask_bits(Ints marked) { return _mm512_movepi32_mask((__m512i)marked); }
inline Ints masked_add(Mask marked, Ints sum, Ints x) {
  return (Ints)_mm512_mask_add_epi32((__m512i)sum, marked, (__m512i)sum, (__m512i)x);
}
inline Ints permute(Ints at, Ints table) { return (Ints)_mm512_permutexvar_epi32((__m512i)at, (__m512i)table); }
// Stores the marked lanes one after the other; what follows them in the register's width is undefined.
inline void compress_store(float *p, Floats x, Mask marked) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(marked, (__m512)x));
}
inline void compress_store(int32_t *p, Ints x, Mask marked) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(marked, (__m512i)x));
}
#else
typedef Ints Mask;
inline Floats max_floats(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
inline Floats min_floats(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
inline Mask greater_equal(Floats a, Floats b) { return (Ints)(a >= b); }
inline Mask greater_equal(Floats a, Floats b, Mask of) { return (Ints)(a >= b) & of; }
inline Mask less_than(Floats a, Floats b) { return (Ints)(a < b); }
inline Mask equal(Ints a, Ints b) { return a == b; }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7}; }
inline Mask mask_of_first_lanes(int64_t n) { return lane_numbers() < (int32_t)min64(n, kRegisterLanes); }
inline uint32_t mask_bits(Mask marked) { return (uint32_t)_mm256_movemask_ps((__m256)marked); }
inline Ints masked_add(Mask marked, Ints sum, Ints x) { return sum + (x & marked); }
inline Ints permute(Ints at, Ints table) { return (Ints)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)at); }
template <class T, class R>
inline void compress_store(T *p, R x, Mask marked) {
  for (uint32_t found = mask_bits(marked); found; found &= found - 1) *p++ = x[__builtin_ctz(found)];
}
#endif
typedef uint32_t UInts __attribute__((vector_size(kRegisterLanes * 4)));
typedef int32_t HalfInts __attribute__((vector_size(kRegisterLanes * 2)));
typedef int64_t Int64s __attribute__((vector_size(kRegisterLanes * 4)));
typedef uint16_t UShorts __attribute__((vector_size(kRegisterLanes * 2)));

// One logit in float32.
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bf16_to_float(x); }

// A register of logits from p on in float32, of which n are left in the row; -inf in the other lanes.
inline Floats load_logits(const float *p, int64_t n) {
  if (n >= kRegisterLanes) return load<Floats>(p);
  Floats v = splat_floats(-INFINITY);
  memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
}
inline Floats load_logits(const bf16 *p, int64_t n) {
  UShorts v = (UShorts{} + 1) * (bf16)0xff80;
  memcpy(&v, p, (size_t)min64(n, kRegisterLanes) * sizeof(bf16));
  return (Floats)(__builtin_convertvector(v, Ints) << 16);
}

// The bits of 2^20 2^(k / 8) for k from 0 to 7, less k << 20.
constexpr Ints kEighths = {0x49800000, 0x497b95c2, 0x497837f0, 0x4975fed7, 0x497504f3,
                           0x4975672a, 0x497744fd, 0x497ac0c7,
#ifdef __AVX512DQ__
                           0x49800000, 0x497b95c2, 0x497837f0, 0x4975fed7, 0x497504f3,
                           0x4975672a, 0x497744fd, 0x497ac0c7
#endif
};

// 2^20 exp(x) for x from about kExponentFloor to 0, to within 2^-22 of it: 2^(k/8) from a table, whose entries lack
// what adding k to the exponent brings into their fractions, times a polynomial of the remainder.
inline Floats exp_scaled(Floats x) {
  const Floats magic = splat_floats(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for fractions
  Floats k = fma(x, splat_floats(11.5415603f), magic);  // 8 / ln 2
  Floats r = fma(k - magic, splat_floats(-8.6643397808e-2f), x);
  Floats y = fma(r, splat_floats(1.6664297879e-1f), splat_floats(5.0006479025e-1f));
  y = fma(y, r * r, r);
  // Lanes without a token may hold anything, and may wrap.
  Floats power = (Floats)((UInts)permute((Ints)k, kEighths) + ((UInts)k << 20));
  return fma(power, y, power);
}

// Weights of a register of tokens: high * 2^20 + low. `scaled` is 2^20 exp of each lane.
struct Weights {
  Ints high, low;
  explicit Weights(Floats scaled) {  // of 2^20 exp
    high = __builtin_convertvector(scaled, Ints);
    low = __builtin_convertvector((scaled - __builtin_convertvector(high, Floats)) * 0x1p20f, Ints);
  }
  // Writes the weights as integers to out[0 .. kRegisterLanes].
  void store_to(int64_t *out) const {
    HalfInts parts[4];
    memcpy(parts, &high, sizeof high);
    memcpy(parts + 2, &low, sizeof low);
    for (int i = 0; i < 2; i++)
      store(out + i * (kRegisterLanes / 2), (Int64s)((__builtin_convertvector(parts[i], Int64s) << 20) +
                                                     __builtin_convertvector(parts[2 + i], Int64s)));
  }
};

// Sums of weights, per lane: of at most 2^11 weights, which add up in 31 bits. add: all lanes or the marked ones;
// total: over all lanes.
struct WeightSum {
  Ints high = {}, low = {};
  // Adds each lane of w to its sum.
  void add(const Weights &w) { high += w.high, low += w.low; }
  // Adds the marked lanes of w to their sums.
  void add(const Weights &w, Mask marked) {
    high = masked_add(marked, high, w.high), low = masked_add(marked, low, w.low);
  }
  // The sum of all lanes.
  int64_t total() const {
    int64_t upper = 0, lower = 0;
    for (int l = 0; l < kRegisterLanes; l++) upper += high[l], lower += low[l];
    return (upper << 20) + lower;
  }
};

// How the logits of a row become weights: their largest, and the temperature.
struct Softmax {
  float top, temperature, inverse, lowest_distance;
  bool is_one, is_moderate;
  Softmax(float top, float temperature)
      : top(top), temperature(temperature), inverse(1 / temperature), lowest_distance(temperature * kExponentFloor),
        is_one(temperature == 1), is_moderate(temperature > 1e-6f && temperature < 1e6f) {}

  // (logit - top) / temperature, rounded after the subtraction and as a division rounds, for less; at least
  // kExponentFloor.
  Floats exponent(Floats x) const {
    Floats distance = x - top;
    // An extreme temperature would move the bound into the range of weights; then the bound applies to the quotient.
    if (!is_moderate) return max_floats(distance / temperature, splat_floats(kExponentFloor));
    distance = max_floats(distance, splat_floats(lowest_distance));
    if (is_one) return distance;
    Floats quotient = distance * inverse;
    return fma(fma(-quotient, splat_floats(temperature), distance), splat_floats(inverse), quotient);
  }
  // 2^20 exp((logit - top) / temperature) of each lane.
  Floats scaled(Floats x) const { return exp_scaled(exponent(x)); }
  // floor(2^40 exp((logit - top) / temperature)) of each lane, as integers.
  Weights weights(Floats x) const { return Weights(scaled(x)); }

  // A bound that is below all logits whose `exponent` is at least `lowest`.
  float lowest_logit(float lowest) const {
    float reach = lowest * temperature;
    return fmaxf(top + reach - (fabsf(top) + fabsf(reach)) * 1e-5f, -FLT_MAX);
  }
};

}  // namespace
