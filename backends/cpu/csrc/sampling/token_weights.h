// Registers of logits, and the weights of tokens: floor(2^40 exp((logit - top) / temperature)).
//
// Weights are integers, so their sums do not depend on an order; they are computed again where they are needed, which
// costs less than keeping them. Every instruction set computes the same ones.
#pragma once
#include <float.h>
#include <math.h>

#include "linear.h"

namespace {

constexpr float kWeightless = -27.75f;  // exp of it is less than 2^-40
constexpr float kFar = -40.0f;          // where all that is further down is put

// Marks of a register's lanes.
#ifdef __AVX512DQ__
typedef __mmask16 Where;
inline V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one of them is NaN
inline V smaller(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }  // b where one of them is NaN
inline Where at_least(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ); }
inline Where at_least(V a, V b, Where of) { return _mm512_mask_cmp_ps_mask(of, (__m512)a, (__m512)b, _CMP_GE_OQ); }
inline Where less_than(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
inline Where equal(N a, N b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
inline N first_ids() { return N{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
inline Where first_lanes(int64_t n) { return (Where)(n >= kWide ? 0xffff : (1 << n) - 1); }
inline uint32_t lanes(Where marked) { return marked; }
inline uint32_t lanes(N marked) { return _mm512_movepi32_mask((__m512i)marked); }
inline N add_where(Where marked, N sum, N x) {
  return (N)_mm512_mask_add_epi32((__m512i)sum, marked, (__m512i)sum, (__m512i)x);
}
inline N look_up(N at, N table) { return (N)_mm512_permutexvar_epi32((__m512i)at, (__m512i)table); }
// Marked lanes to the front; what is behind them is lost.
inline void pack(float *p, V x, Where marked) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(marked, (__m512)x)); }
inline void pack(int32_t *p, N x, Where marked) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(marked, (__m512i)x));
}
#else
typedef N Where;
inline V larger(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
inline V smaller(V a, V b) { return (V)_mm256_min_ps((__m256)a, (__m256)b); }
inline Where at_least(V a, V b) { return (N)(a >= b); }
inline Where at_least(V a, V b, Where of) { return (N)(a >= b) & of; }
inline Where less_than(V a, V b) { return (N)(a < b); }
inline Where equal(N a, N b) { return a == b; }
inline N first_ids() { return N{0, 1, 2, 3, 4, 5, 6, 7}; }
inline Where first_lanes(int64_t n) { return first_ids() < (int32_t)min64(n, kWide); }
inline uint32_t lanes(Where marked) { return (uint32_t)_mm256_movemask_ps((__m256)marked); }
inline N add_where(Where marked, N sum, N x) { return sum + (x & marked); }
inline N look_up(N at, N table) { return (N)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)at); }
template <class T, class R>
inline void pack(T *p, R x, Where marked) {
  for (uint32_t found = lanes(marked); found; found &= found - 1) *p++ = x[__builtin_ctz(found)];
}
#endif
typedef uint32_t Bits __attribute__((vector_size(kWide * 4)));
typedef int32_t HalfN __attribute__((vector_size(kWide * 2)));
typedef int64_t L __attribute__((vector_size(kWide * 4)));
typedef uint16_t Short __attribute__((vector_size(kWide * 2)));

inline float widened(float x) { return x; }
inline float widened(bf16 x) { return widen1(x); }

// A register of logits, -inf behind the end.
inline V logits_at(const float *p, int64_t n) {
  if (n >= kWide) return load<V>(p);
  V v = all(-INFINITY);
  memcpy(&v, p, (size_t)n * sizeof(float));
  return v;
}
inline V logits_at(const bf16 *p, int64_t n) {
  Short v = (Short{} + 1) * (bf16)0xff80;
  memcpy(&v, p, (size_t)min64(n, kWide) * sizeof(bf16));
  return (V)(__builtin_convertvector(v, N) << 16);
}

constexpr N kEighths = {0x49800000, 0x497b95c2, 0x497837f0, 0x4975fed7, 0x497504f3, 0x4975672a, 0x497744fd, 0x497ac0c7,
#ifdef __AVX512DQ__
                        0x49800000, 0x497b95c2, 0x497837f0, 0x4975fed7, 0x497504f3, 0x4975672a, 0x497744fd, 0x497ac0c7
#endif
};

// 2^20 exp(x) for x from about kFar to 0, to within 2^-22 of it: 2^(k/8) from a table, whose entries lack
// what adding k to the exponent brings into their fractions, times a polynomial of the remainder.
inline V exp_scaled(V x) {
  const V magic = all(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for fractions
  V k = fma(x, all(11.5415603f), magic);  // 8 / ln 2
  V r = fma(k - magic, all(-8.6643397808e-2f), x);
  V y = fma(r, all(1.6664297879e-1f), all(5.0006479025e-1f));
  y = fma(y, r * r, r);
  V power = (V)((Bits)look_up((N)k, kEighths) + ((Bits)k << 20));  // lanes of no token hold anything, and may wrap
  return fma(power, y, power);
}

struct Weights {  // high * 2^20 + low
  N high, low;
  explicit Weights(V scaled) {  // of 2^20 exp
    high = __builtin_convertvector(scaled, N);
    low = __builtin_convertvector((scaled - __builtin_convertvector(high, V)) * 0x1p20f, N);
  }
  void put(int64_t *out) const {
    HalfN parts[4];
    memcpy(parts, &high, sizeof high);
    memcpy(parts + 2, &low, sizeof low);
    for (int i = 0; i < 2; i++)
      store(out + i * (kWide / 2),
            (L)((__builtin_convertvector(parts[i], L) << 20) + __builtin_convertvector(parts[2 + i], L)));
  }
};

// Sums of weights, each lane its own: of at most 2^11 of them, which add up in 31 bits.
struct Sum {
  N high = {}, low = {};
  void add(const Weights &w) { high += w.high, low += w.low; }
  void add(const Weights &w, Where marked) {
    high = add_where(marked, high, w.high), low = add_where(marked, low, w.low);
  }
  int64_t total() const {
    int64_t upper = 0, lower = 0;
    for (int l = 0; l < kWide; l++) upper += high[l], lower += low[l];
    return (upper << 20) + lower;
  }
};

// How logits of a row become weights.
struct Heat {
  float top, degrees, inverse, far;
  bool one, usual;
  Heat(float top, float degrees)
      : top(top), degrees(degrees), inverse(1 / degrees), far(degrees * kFar), one(degrees == 1),
        usual(degrees > 1e-6f && degrees < 1e6f) {}

  // (logit - top) / temperature, rounded after the subtraction and as a division rounds, for less; not below kFar.
  V below(V x) const {
    V distance = x - top;
    // A temperature beyond all sense brings the bound among the weights: there it applies to the quotient.
    if (!usual) return larger(distance / degrees, all(kFar));
    distance = larger(distance, all(far));
    if (one) return distance;
    V quotient = distance * inverse;
    return fma(fma(-quotient, all(degrees), distance), all(inverse), quotient);
  }
  V scaled(V x) const { return exp_scaled(below(x)); }
  Weights weigh(V x) const { return Weights(scaled(x)); }

  // A logit that every one with `below` >= lowest exceeds.
  float least_of(float lowest) const {
    float reach = lowest * degrees;
    return fmaxf(top + reach - (fabsf(top) + fabsf(reach)) * 1e-5f, -FLT_MAX);
  }
};

}  // namespace
