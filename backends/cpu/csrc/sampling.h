// Choosing tokens from rows of logits; what is chosen is said in core/inferplane/ops/sampling.py.
//
// A token's weight is floor(2^40 exp((logit - top) / temperature)). Weights are integers, so their sums do not depend on
// an order; they are computed again where they are needed, which costs less than keeping them. A row belongs to one
// thread, and is read from the core's cache after the first pass over it:
//
//   1. largest logits: of the row, and of each lane of each piece, which tell later passes what to skip;
//   2. without cuts, sums of weights by piece; then one piece is looked into;
//   3. with top-k, the k-th largest of the lanes' maxima bounds what can be among the k largest: those alone are sorted;
//   4. with top-p or min-p, sums of weights by interval of logits; then one interval for each question is sorted.
#pragma once
#include <algorithm>
#include <math.h>

#include "linear.h"

namespace {

constexpr int64_t kPiece = 1024;  // tokens: halves of their weights, at most 2^20 each, add up in 31 bits
constexpr int kBins = 2048;       // intervals of logits; their sums stay in the nearest cache
constexpr float kWeightless = -27.75f;         // exp of it is less than 2^-40
constexpr float kSlack = 0.01f, kRounding = 0x1p-20f;  // far more than rounding can take from a bound

// One register of logits; the compiler does less well with two.
#ifdef __AVX512DQ__
constexpr int kWide = 16;
typedef F V;
typedef I N;
inline V larger(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one of them is NaN
inline uint32_t lanes(N mask) { return _mm512_movepi32_mask((__m512i)mask); }
#else
constexpr int kWide = 8;
typedef float V __attribute__((vector_size(32)));
typedef int32_t N __attribute__((vector_size(32)));
inline V larger(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
inline uint32_t lanes(N mask) { return (uint32_t)_mm256_movemask_ps((__m256)mask); }
inline V fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline V round_even(V a) { return (V)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#endif
typedef int32_t HalfN __attribute__((vector_size(kWide * 2)));
typedef int64_t L __attribute__((vector_size(kWide * 4)));
typedef uint16_t Short __attribute__((vector_size(kWide * 2)));

inline V all(float x) { return x - V{}; }

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

// 2^20 exp(x) for x <= 0, to about 2 units in the last place; what is less than 2^-79 is that. Cephes' polynomial.
inline V exp_scaled(V x) {
  x = larger(x, all(-69.0f));
  V n = round_even(x * 1.44269504088896341f);
  V r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  V y = all(1.9875691500e-4f);
  y = fma(y, r, all(1.3981999507e-3f));
  y = fma(y, r, all(8.3334519073e-3f));
  y = fma(y, r, all(4.1665795894e-2f));
  y = fma(y, r, all(1.6666665459e-1f));
  y = fma(y, r, all(5.0000001201e-1f));
  y = fma(y, r * r, r) + 1.0f;
  return y * (V)((__builtin_convertvector(n, N) + (127 + 20)) << 23);
}

// floor(uniform * total) for a multiple of 2^-24.
inline int64_t share_of(int64_t total, float uniform) {
  int64_t times = min64((int64_t)(uniform * 0x1p24f), (1 << 24) - 1);
  return (int64_t)((unsigned __int128)total * (uint64_t)times >> 24);
}

struct Weights {  // high * 2^20 + low
  N high, low;
  void put(int64_t *out) const {
    HalfN parts[4];
    memcpy(parts, &high, sizeof high);
    memcpy(parts + 2, &low, sizeof low);
    for (int i = 0; i < 2; i++)
      store(out + i * (kWide / 2),
            (L)((__builtin_convertvector(parts[i], L) << 20) + __builtin_convertvector(parts[2 + i], L)));
  }
  int64_t sum() const {
    int64_t each[kWide], total = 0;
    put(each);
    for (int64_t w : each) total += w;
    return total;
  }
};

struct Member {
  uint64_t place;  // by falling logit, then by id
  int64_t weight;
  bool operator<(const Member &other) const { return place < other.place; }
  int64_t token() const { return (int64_t)(place & 0xffffffff); }
};

inline uint64_t place_of(float logit, int64_t token) {
  float one_zero = logit + 0.0f;
  uint32_t bits;
  memcpy(&bits, &one_zero, 4);
  uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return (uint64_t)~rising << 32 | (uint64_t)token;
}

struct Asked {
  float temperature, top_p, min_p, uniform;
  int64_t top_k;
};

template <class T>
class Row {
 public:
  Row(const T *logits, int64_t tokens)
      : logits_(logits), tokens_(tokens), pieces_((tokens + kPiece - 1) / kPiece),
        largest_(scratch(15)->get<V>(pieces_)) {
    V most = all(-INFINITY);
    N nan = {};
    for (int64_t p = 0; p < pieces_; p++) {
      V here = all(-INFINITY);
      for (int64_t i = p * kPiece, last = min64(i + kPiece, tokens_); i < last; i += kWide) {
        V x = at(i);
        nan |= x != x;
        here = larger(x, here);
      }
      largest_[p] = here;
      most = larger(here, most);
    }
    for (int l = 0; l < kWide; l++) top_ = most[l] > top_ ? most[l] : top_;
    nan_ = lanes(nan);
  }

  // The id of the largest logit, the lowest of equals; of the first NaN if there is one.
  int64_t likeliest() const {
    for (int64_t i = 0; i < tokens_; i += kWide) {
      V x = at(i);
      if (uint32_t found = lanes(nan_ ? (N)(x != x) : (N)(x == top_))) return i + __builtin_ctz(found);
    }
    return 0;
  }

  int64_t draw(const Asked &a, bool cuts) {
    if (a.temperature <= 0 || nan_ || !(top_ > -INFINITY && top_ < INFINITY)) return likeliest();
    degrees_ = a.temperature, inverse_ = 1 / a.temperature;
    usual_ = degrees_ > 1e-6f && degrees_ < 1e6f;
    if (!cuts) return draw_by_id(a.uniform);
    return a.top_k > 0 ? draw_of_first(a, min64(a.top_k, tokens_)) : draw_by_rank(a);
  }

 private:
  V at(int64_t i) const { return logits_at(logits_ + i, tokens_ - i); }

  // (logit - top) / temperature, rounded after the subtraction and as a division rounds, for less.
  V below(V x) const {
    // A temperature beyond all sense brings the bound below among the weights: there it applies to the quotient.
    if (!usual_) return larger((x - top_) / degrees_, all(-1e30f));
    V distance = larger(x - top_, all(-1e30f));
    V quotient = distance * inverse_;
    return fma(fma(-quotient, all(degrees_), distance), all(inverse_), quotient);
  }

  static Weights weigh(V below) {
    V share = exp_scaled(below);
    N high = __builtin_convertvector(share, N);
    V rest = (share - __builtin_convertvector(high, V)) * 0x1p20f;
    return {high, __builtin_convertvector(rest, N)};
  }

  // A logit that every one with `below` >= lowest exceeds.
  float least_of(float lowest) const {
    float reach = lowest * degrees_;
    return top_ + reach - (fabsf(top_) + fabsf(reach)) * 1e-5f;
  }
  bool any(int64_t piece, float least) const { return lanes((N)(largest_[piece] >= least)); }
  int64_t end_of(int64_t piece) const { return min64((piece + 1) * kPiece, tokens_); }

  int64_t weight_of_piece(int64_t p) const {
    Weights sum = {};
    for (int64_t i = p * kPiece; i < end_of(p); i += kWide) {
      Weights w = weigh(below(at(i)));
      sum.high += w.high, sum.low += w.low;
    }
    return sum.sum();
  }

  int64_t draw_by_id(float uniform) const {
    int64_t *sums = scratch(16)->get<int64_t>(pieces_), total = 0;
    for (int64_t p = 0; p < pieces_; p++)
      total += sums[p] = any(p, least_of(kWeightless)) ? weight_of_piece(p) : 0;
    int64_t share = share_of(total, uniform), p = 0;
    while (p < pieces_ - 1 && share >= sums[p]) share -= sums[p++];
    for (int64_t i = p * kPiece; i < tokens_; i += kWide) {
      int64_t w[kWide];
      weigh(below(at(i))).put(w);
      for (int l = 0; l < kWide; l++) {
        if (share < w[l]) return i + l;
        share -= w[l];
      }
    }
    return tokens_ - 1;
  }

  // Tokens i + l for the bits l of `found`, behind `count` members; returns how many there are then.
  int64_t append(Member *members, int64_t count, uint32_t found, int64_t i) const {
    V x = at(i);
    int64_t w[kWide];
    weigh(below(x)).put(w);
    for (; found; found &= found - 1) {
      int l = __builtin_ctz(found);
      if (i + l < tokens_) members[count++] = {place_of(x[l], i + l), w[l]};
    }
    return count;
  }

  // Of the first `k` tokens by rank.
  int64_t draw_of_first(const Asked &a, int64_t k) const {
    float bound = -INFINITY;
    if (k <= pieces_ * kWide) {
      float *maxima = scratch(16)->get<float>(pieces_ * kWide), *kth = maxima + k - 1;
      memcpy(maxima, largest_, (size_t)(pieces_ * kWide) * sizeof(float));
      std::nth_element(maxima, kth, maxima + pieces_ * kWide, [](float x, float y) { return x > y; });
      bound = *kth;
    }
    Member *members = scratch(17)->get<Member>(tokens_);
    int64_t count = 0;
    for (int64_t p = 0; p < pieces_; p++)
      if (any(p, bound))
        for (int64_t i = p * kPiece; i < end_of(p); i += kWide)
          if (uint32_t found = lanes((N)(at(i) >= bound))) count = append(members, count, found, i);
    if (count > k) std::nth_element(members, members + k, members + count);
    std::sort(members, members + k);
    int64_t total = 0, upto = 0, kept = 0;
    for (int64_t i = 0; i < k; i++) total += members[i].weight;
    int64_t reach = a.top_p >= 1 ? total : (int64_t)((float)total * a.top_p);
    for (int64_t i = 0; i < k; i++) {
      int64_t &w = members[i].weight, before = upto;
      upto += w;
      if (i && (before >= reach || (float)w < a.min_p * 0x1p40f)) w = 0;
      kept += w;
    }
    int64_t share = share_of(kept, a.uniform), i = 0;
    while (i < k - 1 && share >= members[i].weight) share -= members[i++].weight;
    return members[i].token();
  }

  // Of a head that top-p and min-p leave.
  int64_t draw_by_rank(const Asked &a) {
    // Tokens of at most a weight w have together at most tokens * w: those that top-p needs are heavier than the w with
    // which this is all that it may leave out, and all weights together are more than the lanes' maxima.
    float some = 0;
    for (int64_t p = 0; p < pieces_; p++) {
      V w = exp_scaled(below(largest_[p])) * 0x1p-20f;
      for (int l = 0; l < kWide; l++) some += w[l];
    }
    float rare = fmaxf((1 - a.top_p - kRounding) * some / (float)tokens_, a.min_p);
    lowest_ = rare > 0 && rare < 1 ? fmaxf(kWeightless, logf(rare) - kSlack) : kWeightless;
    // Flat rows lie close together; what is lighter than the cube of the mean shares the last interval.
    scale_ = (float)kBins / fmaxf(1e-6f, fminf(-lowest_, 3 * logf((float)tokens_ / some)));
    least_ = least_of(a.top_p < 1 || a.min_p <= 0 ? kWeightless : lowest_);
    int64_t enough = 0, total = spread(a.min_p * 0x1p40f, enough), there = 0;
    for (int i = 0; i < kBins; i++) there += sums_[i];
    int64_t kept = a.top_p < 1 || a.min_p <= 0 ? total : there;
    if (a.top_p < 1) {
      int64_t reach = min64((int64_t)((float)total * a.top_p), there);
      kept = reach > 0 ? find(reach - 1).upto : 0;
    }
    if (a.min_p > 0) kept = min64(kept, enough);
    return find(share_of(min64(max64(kept, (int64_t)1 << 40), there), a.uniform)).token;
  }

  // Sums of weights by interval, of what is not below `lowest_`. Returns the sum of all weights in pieces that reach
  // `least_`; `enough`: of those that have at least the weight `least`.
  int64_t spread(float least, int64_t &enough) {
    sums_ = scratch(16)->get<int64_t>(kBins);
    memset(sums_, 0, kBins * sizeof(int64_t));
    intervals_ = scratch(18)->get<uint16_t>(pieces_ * kPiece);
    int64_t total = 0, w[kWide];
    int32_t to[kWide];
    for (int64_t p = 0; p < pieces_; p++) {
      if (!any(p, least_)) continue;
      Weights sum = {};
      for (int64_t i = p * kPiece; i < end_of(p); i += kWide) {
        V b = below(at(i));
        Weights each = weigh(b);
        sum.high += each.high, sum.low += each.low;
        N in = b >= lowest_;
        N interval = __builtin_convertvector(-larger(b * scale_, all(1.0f - (float)kBins)), N) | ~in;
        store(intervals_ + i, (Short)__builtin_convertvector(interval, Short));
        uint32_t found = lanes(in);
        if (!found) continue;
        each.put(w);
        store(to, interval);
        if (found == (1u << kWide) - 1 && least <= 0) {
          for (int l = 0; l < kWide; l++) sums_[to[l]] += w[l];
          continue;
        }
        for (; found; found &= found - 1) {
          int l = __builtin_ctz(found);
          sums_[to[l]] += w[l];
          enough += (float)w[l] >= least ? w[l] : 0;
        }
      }
      total += sum.sum();
    }
    return total;
  }

  struct Found {
    int64_t token, upto;
  };

  // The first token by rank up to which there is more weight than `share`, and how much there is.
  Found find(int64_t share) const {
    int64_t upto = 0, count = 0;
    int wanted = 0;
    while (wanted < kBins - 1 && upto + sums_[wanted] <= share) upto += sums_[wanted++];
    Member *members = scratch(17)->get<Member>(tokens_);
    for (int64_t p = 0; p < pieces_; p++)
      if (any(p, least_))
        for (int64_t i = p * kPiece; i < end_of(p); i += kWide) {
          N interval = __builtin_convertvector(load<Short>(intervals_ + i), N);
          if (uint32_t found = lanes((N)(interval == wanted))) count = append(members, count, found, i);
        }
    if (!std::is_sorted(members, members + count)) std::sort(members, members + count);
    for (int64_t i = 0; i < count; i++)
      if ((upto += members[i].weight) > share) return {members[i].token(), upto};
    return {likeliest(), upto};
  }

  const T *logits_;
  int64_t tokens_, pieces_;
  V *largest_;
  float top_ = -INFINITY, degrees_ = 1, inverse_ = 1, lowest_ = 0, least_ = 0, scale_ = 0;
  bool usual_ = true;
  uint32_t nan_ = 0;
  int64_t *sums_ = nullptr;
  uint16_t *intervals_ = nullptr;
};

template <class T>
inline void sample(Team &team, const ip_sampling &s, int64_t *tokens) {
  team.each(s.rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      Asked a = {0, 1, 0, 0, 0};
      bool cuts = s.top_k && s.top_p && s.min_p;
      if (s.uniform) a.temperature = s.temperature[i], a.uniform = s.uniform[i];
      if (cuts) a.top_k = s.top_k[i], a.top_p = s.top_p[i], a.min_p = s.min_p[i];
      tokens[i] = Row<T>((const T *)s.logits + i * s.ld, s.vocab).draw(a, cuts);
    }
  });
}

}  // namespace
