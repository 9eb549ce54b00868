// Products of int8, int6, int4 and MXFP4 weights in panels (weight_panels.h) with 16-bit activations (quantize_int16.h),
// or of int4 and MXFP4 with narrower ones (quantize_narrow.h), exact in integers within a group of columns. linear.h
// calls `multiply_panel` for each panel of a thread's chunk.
//
// Rounding activations to 16 bits in groups of 32 to 128 columns is an error of 2^-16 of a group's largest entry, 1/128
// of what rounding the result to bf16 costs. Products and sums within a group are then exact in 32 bits, on every
// instruction set alike: with VNNI the 16 bits are two signed bytes (256 high + low), without it pairs of 16-bit
// products.
#pragma once
#include "products/panel_scales.h"
#include "products/quantize_int16.h"

// Api.cpp; how far ahead of its use a line of a weight is prefetched once more, into the first-level cache.
extern int64_t ip_l1_prefetch_bytes;

namespace {

// The sixteen entries of MXFP4 by their nibbles, with their offset: unsigned bytes.
inline __m128i mxfp4_entries() {
  return _mm_add_epi8(_mm_loadu_si128((const __m128i *)kMxfp4Entries), _mm_set1_epi8(kMxfp4Offset));
}

// A line of a panel: 64 bytes. Its low nibbles, or high nibbles, as bytes.
#if defined(__AVX512F__)
typedef U32x16 Line;
inline Line load_line(const uint8_t *p) { return load<U32x16>(p); }
inline Line low_nibbles(Line w) { return w & 0x0f0f0f0fu; }
inline Line high_nibbles(Line w) { return (w >> 4) & 0x0f0f0f0fu; }
inline Line upper_nibbles(Line w) { return w & 0xf0f0f0f0u; }  // the high nibbles times sixteen
// The unsigned entries of a line whose bytes are nibbles of a weight of kind KIND.
template <int KIND>
inline Line unsigned_entries(Line nibbles) {
  if (KIND != IP_MXFP4) return nibbles;
  return (Line)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(mxfp4_entries()), (__m512i)nibbles);
}
// Columns 4 * four .. 4 * four + 4 of the sixteen that three lines of IP_INT6 hold, as unsigned entries; TIMES_FOUR: the
// first and third four of them times four, which saves shifts.
template <bool TIMES_FOUR>
inline Line six_bit_entries(const uint8_t *lines, int four) {
  if (four == 1) return load_line(lines + 64) & 0x3f3f3f3fu;
  if (four != 3) {
    Line upper = load_line(lines + 64 * four);
    return TIMES_FOUR ? upper & 0xfcfcfcfcu : (upper >> 2) & 0x3f3f3f3fu;
  }
  return (load_line(lines) & 0x03030303u) | ((load_line(lines + 64) >> 4) & 0x0c0c0c0cu) |
         ((load_line(lines + 128) << 4) & 0x30303030u);
}
#else
struct Line {
  __m256i half[2];
};
inline Line load_line(const uint8_t *p) {
  return {{_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))}};
}
// Half of `six_bit_entries` below: of eight rows, whose bytes begin at `half` in the first line.
inline __m256i six_bit_half(const uint8_t *half, int four) {
  auto line = [&](int l) { return _mm256_loadu_si256((const __m256i *)(half + 64 * l)); };
  auto masked = [](__m256i v, int bits) { return _mm256_and_si256(v, _mm256_set1_epi8((char)bits)); };
  if (four == 1) return masked(line(1), 63);
  if (four != 3) return masked(_mm256_srli_epi16(line(four), 2), 63);
  __m256i low = masked(line(0), 3), middle = masked(_mm256_srli_epi16(line(1), 4), 12);
  return _mm256_or_si256(_mm256_or_si256(low, middle), masked(_mm256_slli_epi16(line(2), 4), 48));
}
// Columns 4 * four .. 4 * four + 4 of the sixteen that three lines of IP_INT6 hold, as unsigned entries.
template <bool TIMES_FOUR>
inline Line six_bit_entries(const uint8_t *lines, int four) {
  static_assert(!TIMES_FOUR, "entries are not multiplied on AVX2");
  return {{six_bit_half(lines, four), six_bit_half(lines + 32, four)}};
}
#endif

// Sums of sixteen weight rows times one row of activations over one group of columns, one lane per weight row, exact in
// integers. start_at: every lane starts at this number, a correction; total: the sums.
#if defined(__AVX512F__)
struct GroupSums {
#if defined(__AVX512VNNI__)
  I32x16 a, b;
  inline void start_at(int32_t start) { a = I32x16{}, b = (I32x16)_mm512_set1_epi32(start); }
  inline I32x16 total() const { return (a << 8) + b; }
#else
  I32x16 a;
  inline void start_at(int32_t start) { a = (I32x16)_mm512_set1_epi32(start); }
  inline I32x16 total() const { return a; }
#endif
  // Adds one line: four columns of sixteen weight rows as unsigned bytes, times four activations. `first` and `second`
  // are the activations' two numbers in `Int16Activations::quads`. NARROW: activations fit a byte.
  template <bool NARROW>
  inline void add(Line w, int32_t first, int32_t second) {
#if defined(__AVX512VNNI__)
    if (!NARROW) a = (I32x16)_mm512_dpbusd_epi32((__m512i)a, (__m512i)w, _mm512_set1_epi32(first));
    b = (I32x16)_mm512_dpbusd_epi32((__m512i)b, (__m512i)w, _mm512_set1_epi32(second));
#else
    __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)w, 8);
    a = a + (I32x16)_mm512_madd_epi16(even, _mm512_set1_epi32(first));
    a = a + (I32x16)_mm512_madd_epi16(odd, _mm512_set1_epi32(second));
#endif
  }
};

#else
// On AVX2: sums of sixteen weight rows times one row of activations over one group of columns, in two registers.
struct GroupSums {
  __m256i a[2];
  inline void start_at(int32_t start) { a[0] = a[1] = _mm256_set1_epi32(start); }
  // Adds one line: four columns of sixteen weight rows as unsigned bytes, times four activations. `first` and `second`
  // are the activations' two numbers in `Int16Activations::quads`: columns 0 and 2, then 1 and 3.
  template <bool NARROW>
  inline void add(Line w, int32_t first, int32_t second) {
    __m256i x = _mm256_set1_epi32(first), y = _mm256_set1_epi32(second), bytes = _mm256_set1_epi16(255);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_and_si256(w.half[i], bytes), x));
      a[i] = _mm256_add_epi32(a[i], _mm256_madd_epi16(_mm256_srli_epi16(w.half[i], 8), y));
      __asm__("" : "+x"(a[i]));  // as in multiply_panel_tile
    }
  }
  inline I32x16 total() const {
    I32x16 v;
    memcpy(&v, a, 64);
    return v;
  }
};
#endif

#if defined(__AVX512BF16__) && !defined(INFERPLANE_AMX)
// Measured on Zen 4 and 5. With at most this many rows of activations the processor prefetches bytes by itself, and
// prefetching them again is slower. It does not prefetch nibbles and entries of 6 bits, whose lines take more
// arithmetic. What is prefetched
// far ahead on Zen 4 comes as far as the second-level cache, so it is prefetched from there once more
// (ip_l1_prefetch_bytes); on Zen 5 that would cost a tenth of the speed.
constexpr int kHardwarePrefetchedRows = 2;
constexpr bool kPrefetchesTwice = true;
#else
constexpr int kHardwarePrefetchedRows = 0;
constexpr bool kPrefetchesTwice = false;
#endif
// Prefetches what follows `line` (kPrefetchBytes ahead, and ip_l1_prefetch_bytes ahead), or nothing, as measured above,
// for a weight of kind KIND and MT rows of activations.
template <int KIND, int MT>
inline void prefetch_line(const uint8_t *line) {
  if (is_byte_kind(KIND) && MT <= kHardwarePrefetchedRows) return;
  _mm_prefetch((const char *)line + kPrefetchBytes, _MM_HINT_T1);
  if (kPrefetchesTwice && KIND != IP_W8A8) _mm_prefetch((const char *)line + ip_l1_prefetch_bytes, _MM_HINT_T0);
}

#if defined(__AVX512VNNI__)
constexpr int kMaxTileRows = 8;  // rows of activations that one line is multiplied with while it is in a register
// With no more rows, each has two sums, since every addition to a single one waits for the last.
constexpr int kTwoSumRows = 2;
#else
constexpr int kMaxTileRows = 4, kTwoSumRows = 0;
#endif

#if defined(__AVX512F__)
// sums[i] += the minimums of groups first .. last, those of one unit, times rows i0 + i of x.
template <int MT>
inline void add_minimums(const PanelScales &minimums, const Int16Activations &x, int64_t i0, int64_t first, int64_t last,
                         F32x16 *sums) {
  F32x16 part[MT];
  for (int i = 0; i < MT; i++) part[i] = minimums.multiples ? F32x16{} : sums[i];
  for (int64_t g = first; g < last; g++) {
    F32x16 minimum = minimums.multiples ? minimums.multiples_of_group(g) : minimums.of_group(g);
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) part[i] = fma(minimum, splat(x.total[g * x.m + i0 + i]), part[i]);
  }
  for (int i = 0; i < MT; i++)
    sums[i] = minimums.multiples ? fma(part[i], minimums.unit_of_group(first), sums[i]) : part[i];
}

// out[(i0 + i) * ldo + j] = the 16 rows j of a panel (fewer if the weight ends) times rows i0 .. i0 + MT of x, over all
// columns, in float32 with scales applied, overwritten. KIND: IP_INT8, IP_INT6, IP_INT4 or IP_MXFP4, w's kind. HALF:
// groups have 16 columns, half of what one step of the activations holds; else they have a multiple of 32. NARROW: the
// activations' integers fit a byte.
template <int KIND, int MT, bool HALF, bool NARROW>
inline void multiply_panel_tile(const ip_matrix &w, int64_t panel, const Int16Activations &x, int64_t i0, float *out,
                                int64_t ldo) {
  const uint8_t *p = (const uint8_t *)w.data + panel * panel_bytes(w);
  const int32_t *q = x.quads + i0 * 16;
  const int64_t blocks = HALF ? 1 : x.group / kColumnStep;
  constexpr int lines = KIND == IP_INT6 ? kSixBitLines : (KIND == IP_INT8 ? 8 : 4) / (HALF ? 2 : 1);
  // `t` sums entries that are so many bits too high.
  constexpr bool two_sums = MT <= kTwoSumRows;
  constexpr int shifted = !two_sums ? 0 : KIND == IP_INT4 ? 4 : KIND == IP_INT6 ? 2 : 0;
  PanelScales scales = panel_scales(w, panel), minimums = panel_minimums(w, panel);
  const bool has_minimum = has_minimums(w), has_units = scales.multiples;
  const int64_t in_unit = ((int64_t)1 << scales.shift) - 1;  // the bits of a group's number within its unit
  F32x16 acc[MT], done[MT];  // of scales with units: sums of integers times sums, and what was multiplied by a unit
  for (int i = 0; i < MT; i++) acc[i] = done[i] = F32x16{};
  for (int64_t g = 0; g < x.groups; g++) {
    GroupSums s[MT], t[MT];
    const int64_t at = g * x.m + i0;
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      s[i].start_at(x.correction[at + i]);
      if (two_sums) t[i].start_at(0);
    }
    for (int64_t b = 0; b < blocks; b++, p += 64 * lines, q += HALF ? (g % 2 ? 16 * x.m - 4 : 4) : 16 * x.m) {
      // Reading a long panel evicts the activations from the first-level cache before the next panel reads them again.
      if (KIND == IP_INT8 && MT <= kHardwarePrefetchedRows) _mm_prefetch((const char *)(q + 8 * 16 * x.m), _MM_HINT_T0);
#pragma GCC unroll 8
      for (int l = 0; l < (KIND == IP_INT6 ? 4 : lines); l++) {
        Line line = KIND == IP_INT6 ? six_bit_entries<shifted != 0>(p, l) : load_line(p + 64 * l);
        if (l < lines) prefetch_line<KIND, MT>(p + 64 * l);
        if (KIND == IP_INT6) {
#pragma GCC unroll 8
          for (int i = 0; i < MT; i++) (two_sums && l % 2 == 0 ? t[i] : s[i]).template add<NARROW>(line, q[16 * i + l], q[16 * i + l + 8]);
        } else if (KIND == IP_INT8) {
#pragma GCC unroll 8
          for (int i = 0; i < MT; i++) (two_sums && l % 2 ? t[i] : s[i]).template add<NARROW>(line, q[16 * i + l], q[16 * i + l + 8]);
        } else {
          Line low = unsigned_entries<KIND>(low_nibbles(line)),
               high = shifted ? upper_nibbles(line) : unsigned_entries<KIND>(high_nibbles(line));
#pragma GCC unroll 8
          for (int i = 0; i < MT; i++) {
            s[i].template add<NARROW>(low, q[16 * i + 2 * l], q[16 * i + 2 * l + 8]);
            (two_sums ? t[i] : s[i]).template add<NARROW>(high, q[16 * i + 2 * l + 1], q[16 * i + 2 * l + 9]);
          }
        }
      }
    }
    F32x16 scale = has_units ? scales.multiples_of_group(g) : w.group ? scales.of_group(g) : splat(1.0f);
#pragma GCC unroll 8
    for (int i = 0; i < MT; i++) {
      I32x16 exact = s[i].total();
      if (two_sums) exact += t[i].total() >> shifted;
      acc[i] = fma(__builtin_convertvector(exact, F32x16), scale * x.scale[at + i], acc[i]);
    }
    if (has_units) {
      if ((g & in_unit) != in_unit && g + 1 < x.groups) continue;
      F32x16 unit = scales.unit_of_group(g);
#pragma GCC unroll 8
      for (int i = 0; i < MT; i++) done[i] = fma(acc[i], unit, done[i]), acc[i] = F32x16{};
      if (has_minimum) add_minimums<MT>(minimums, x, i0, g & ~in_unit, g + 1, done);
    } else if (has_minimum) {
      F32x16 minimum = minimums.of_group(g);
#pragma GCC unroll 8
      for (int i = 0; i < MT; i++) acc[i] = fma(minimum, splat(x.total[at + i]), acc[i]);
    }
  }
  F32x16 row = w.group ? splat(1.0f) : scales.of_group(0);
  int64_t have = min64(kLanes, w.n - panel * kLanes);
  for (int i = 0; i < MT; i++) store_f32x16(out + (i0 + i) * ldo, has_units ? done[i] : acc[i] * row, have);
}
#else
// The same function on AVX2, with explicit 32-byte registers, since GCC keeps vectors of 64 bytes in memory. With one
// row of activations, columns whose nibbles are the high ones of their bytes have sums of their own, sixteen times too
// large.
template <int KIND, int MT, bool HALF, bool NARROW>
inline void multiply_panel_tile(const ip_matrix &w, int64_t panel, const Int16Activations &x, int64_t i0, float *out,
                                int64_t ldo) {
  const uint8_t *p = (const uint8_t *)w.data + panel * panel_bytes(w);
  const int32_t *q = x.quads + i0 * 16;
  const int64_t blocks = HALF ? 1 : x.group / kColumnStep;
  constexpr int lines = KIND == IP_INT6 ? kSixBitLines : (KIND == IP_INT8 ? 8 : 4) / (HALF ? 2 : 1);
  constexpr bool separate_high = KIND == IP_INT4 && MT == 1;
  const __m256i mask = _mm256_set1_epi16(KIND == IP_INT4 ? 15 : 255), upper = _mm256_set1_epi16(240);
  const __m256i entries_of = _mm256_broadcastsi128_si256(mxfp4_entries()), nibble = _mm256_set1_epi8(15);
  PanelScales scales = panel_scales(w, panel), minimums = panel_minimums(w, panel);
  const bool has_minimum = has_minimums(w);
  __m256 acc[MT][2];
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) acc[i][0] = acc[i][1] = __m256{};
  for (int64_t g = 0; g < x.groups; g++) {
    __m256i s[MT][2], t[2] = {__m256i{}, __m256i{}};
    const int64_t at = g * x.m + i0;
#pragma GCC unroll 4
    for (int i = 0; i < MT; i++) s[i][0] = s[i][1] = _mm256_set1_epi32(x.correction[at + i]);
    for (int64_t b = 0; b < blocks; b++, p += 64 * lines, q += HALF ? (g % 2 ? 16 * x.m - 4 : 4) : 16 * x.m) {
#pragma GCC unroll 8
      for (int l = 0; l < (KIND == IP_INT6 ? 4 : lines); l++) {
        if (l < lines) prefetch_line<KIND, MT>(p + 64 * l);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          __m256i v = KIND == IP_INT6 ? six_bit_half(p + 32 * h, l)
                                      : _mm256_loadu_si256((const __m256i *)(p + 64 * l + 32 * h));
          __m256i high = v;
          if (KIND == IP_MXFP4) {
            high = _mm256_shuffle_epi8(entries_of, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
            v = _mm256_shuffle_epi8(entries_of, _mm256_and_si256(v, nibble));
          }
          __m256i odd = _mm256_srli_epi16(v, 8);
          auto add = [](__m256i sum, __m256i entries, int32_t pair) __attribute__((always_inline)) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(entries, _mm256_set1_epi32(pair)));
            __asm__("" : "+x"(sum));  // or GCC adds products up in a tree, for which there are too few registers
            return sum;
          };
          __m256i a = _mm256_and_si256(v, mask), c = KIND == IP_INT4 ? _mm256_and_si256(odd, mask) : odd, e, d;
          if (KIND == IP_MXFP4) e = _mm256_and_si256(high, mask), d = _mm256_srli_epi16(high, 8);
          if (KIND == IP_INT4) {
            e = _mm256_and_si256(separate_high ? v : _mm256_srli_epi16(v, 4), separate_high ? upper : mask);
            d = separate_high ? _mm256_and_si256(odd, upper) : _mm256_srli_epi16(v, 12);
          }
#pragma GCC unroll 4
          for (int i = 0; i < MT; i++) {
            const int32_t *of = q + 16 * i + (has_nibbles(KIND) ? 2 * l : l);
            s[i][h] = add(add(s[i][h], a, of[0]), c, of[8]);
            if (has_nibbles(KIND))
              (separate_high ? t[h] : s[i][h]) = add(add(separate_high ? t[h] : s[i][h], e, of[1]), d, of[9]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      __m256 scale = w.group ? scales.eight_of_group(g, h) : _mm256_set1_ps(1);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) {
        if (separate_high) s[i][h] = _mm256_add_epi32(s[i][h], _mm256_srai_epi32(t[h], 4));
        __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale[at + i]));
        acc[i][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[i][h]), by, acc[i][h]);
      }
      if (!has_minimum) continue;
      __m256 minimum = minimums.eight_of_group(g, h);
#pragma GCC unroll 4
      for (int i = 0; i < MT; i++) acc[i][h] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.total[at + i]), acc[i][h]);
    }
  }
  F32x16 row = w.group ? splat(1.0f) : scales.of_group(0);
  int64_t have = min64(kLanes, w.n - panel * kLanes);
#pragma GCC unroll 4
  for (int i = 0; i < MT; i++) {
    __m256 sums[2] = {acc[i][0], acc[i][1]};
    store_f32x16(out + (i0 + i) * ldo, load<F32x16>(sums) * row, have);
  }
}
#endif

// One `multiply_panel_tile` for `rows` rows of x from row i on; `rows` is known at run time, 1 .. MT.
template <int KIND, bool HALF, bool NARROW, int MT = kMaxTileRows>
inline void multiply_panel_rows(const ip_matrix &w, int64_t panel, const Int16Activations &x, int64_t i, int64_t rows,
                                float *out, int64_t ldo) {
  if constexpr (MT > 1)
    if (rows < MT) return multiply_panel_rows<KIND, HALF, NARROW, MT - 1>(w, panel, x, i, rows, out, ldo);
  multiply_panel_tile<KIND, MT, HALF, NARROW>(w, panel, x, i, out, ldo);
}

// `multiply_panel_tile` for all rows of x: out[i * ldo + j] for 16 rows j of the panel. The rows of x are divided into
// tiles of nearly equal size, at most kMaxTileRows.
template <int KIND, bool HALF = false, bool NARROW = false>
inline void multiply_panel(const ip_matrix &w, int64_t panel, const Int16Activations &x, float *out, int64_t ldo) {
  int64_t tiles = (x.m + kMaxTileRows - 1) / kMaxTileRows, rows = (x.m + tiles - 1) / tiles;
  for (int64_t i = 0; i < x.m; i += rows)
    multiply_panel_rows<KIND, HALF, NARROW>(w, panel, x, i, min64(rows, x.m - i), out, ldo);
}

}  // namespace
