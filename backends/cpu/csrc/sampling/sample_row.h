// Choosing tokens from rows of logits; what is chosen is said in core/inferplane/ops/sampling.py, weights in weigh.h.
//
// A row belongs to one thread, and is read from the core's cache after the first pass over it:
//
//   1. largest logits: of the row, and of each lane of each piece, which tell later passes what to skip;
//   2. without cuts, sums of weights by piece; then one piece is looked into;
//   3. with a small top-k, the k-th largest of the lanes' maxima bounds what can be among the k largest: those alone are
//      sorted;
//   4. with other cuts, selection by sampling (Floyd and Rivest, 1975): what the cuts leave is a head of the tokens by
//      rank, and its end and the token drawn are each expected in a narrow band of logits. One pass sums the weights
//      above each band and lists the tokens in it. A band that turns out to lie wrong is moved, and the pass repeated:
//      the guess decides how long it takes, never what is drawn.
#pragma once
#include "guess.h"

namespace {

constexpr int64_t kPiece = 1024;  // tokens; a multiple of what is sampled
constexpr int64_t kFlush = 8;     // pieces whose weights a lane adds up in 31 bits
constexpr int64_t kShort = 64;    // a list of so many is always found by sorting

// floor(uniform * total) for a multiple of 2^-24.
inline int64_t share_of(int64_t total, float uniform) {
  int64_t times = min64((int64_t)(uniform * 0x1p24f), (1 << 24) - 1);
  return (int64_t)((unsigned __int128)total * (uint64_t)times >> 24);
}

struct Asked {
  float temperature, top_p, min_p, uniform;
  int64_t top_k;
};

constexpr int64_t kMoved = -2;   // no token: a band was moved
constexpr float kSlack = 0.01f;  // far more than rounding can take from a bound

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
    for (int64_t p = 0; p < pieces_; p++) {
      if (!nan_ && !any(p, top_)) continue;
      for (int64_t i = p * kPiece; i < end_of(p); i += kWide) {
        V x = at(i);
        if (uint32_t found = lanes(nan_ ? (N)(x != x) : (N)(x == top_))) return i + __builtin_ctz(found);
      }
    }
    return 0;
  }

  int64_t draw(const Asked &a, bool cuts) {
    if (a.temperature <= 0 || nan_ || !(top_ > -INFINITY && top_ < INFINITY)) return likeliest();
    const Heat heat(top_, a.temperature);
    if (!cuts) return draw_by_id(heat, a.uniform);
    bool few = a.top_k > 0 && a.top_k <= max64(kShort, pieces_ * kWide / 4);
    return few ? draw_of_first(heat, a, min64(a.top_k, tokens_)) : draw_by_rank(heat, a);
  }

 private:
  V at(int64_t i) const { return logits_at(logits_ + i, tokens_ - i); }

  bool any(int64_t piece, float least) const { return lanes(at_least(largest_[piece], all(least))); }
  int64_t end_of(int64_t piece) const { return min64((piece + 1) * kPiece, tokens_); }

  int64_t weight_of_piece(const Heat &heat, int64_t p) const {
    Sum sum;
    for (int64_t i = p * kPiece; i < end_of(p); i += kWide) sum.add(heat.weigh(at(i)));
    return sum.total();
  }

  int64_t draw_by_id(const Heat heat, float uniform) const {
    int64_t *sums = scratch(16)->get<int64_t>(pieces_), total = 0;
    float least = heat.least_of(kWeightless);
    for (int64_t p = 0; p < pieces_; p++)
      total += sums[p] = any(p, least) ? weight_of_piece(heat, p) : 0;
    int64_t share = share_of(total, uniform), p = 0;
    while (p < pieces_ - 1 && share >= sums[p]) share -= sums[p++];
    for (int64_t i = p * kPiece; i < tokens_; i += kWide) {
      int64_t w[kWide];
      heat.weigh(at(i)).put(w);
      for (int l = 0; l < kWide; l++) {
        if (share < w[l]) return i + l;
        share -= w[l];
      }
    }
    return tokens_ - 1;
  }

  // Tokens i + l for the bits l of `found`, behind `count` members; returns how many there are then.
  int64_t append(const Heat &heat, Member *members, int64_t count, uint32_t found, int64_t i) const {
    V x = at(i);
    int64_t w[kWide];
    heat.weigh(x).put(w);
    for (; found; found &= found - 1) {
      int l = __builtin_ctz(found);
      if (i + l < tokens_) members[count++] = {place_of(x[l], i + l), w[l]};
    }
    return count;
  }

  // Of the first `k` tokens by rank.
  int64_t draw_of_first(const Heat &heat, const Asked &a, int64_t k) const {
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
          if (uint32_t found = lanes((N)(at(i) >= bound))) count = append(heat, members, count, found, i);
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

  // Each cut leaves so many of the first tokens by rank: the least counts.
  int64_t draw_by_rank(const Heat &heat, const Asked &a) const {
    // What min-p takes away weighs too where top-p asks for a share of all.
    bool all = a.top_p < 1 || a.min_p <= 0 || a.min_p >= 1;
    float least = heat.least_of(all ? kWeightless : fmaxf(kWeightless, logf(a.min_p) - kSlack));
    Band bands[3];
    int64_t room = tokens_ + 2 * kWide;
    float *logits = scratch(18)->get<float>(3 * room);
    int32_t *ids = scratch(19)->get<int32_t>(3 * room);
    for (int b = 0; b < 3; b++) bands[b].inside = {logits + b * room, ids + b * room, 0};
    bool number = counts(a);
    int asked = guess(heat, a, least, bands);
    for (;;) {
      Whole whole = asked == 1            ? pass<1, false>(heat, a.min_p, least, bands)
                    : asked == 3          ? pass<3, true>(heat, a.min_p, least, bands)
                    : number              ? pass<2, true>(heat, a.min_p, least, bands)
                                          : pass<2, false>(heat, a.min_p, least, bands);
      int64_t token = find_in(heat, a, least, bands, whole);
      if (token != kMoved) return token;
    }
  }

  bool counts(const Asked &a) const { return a.top_k > 0 && a.top_k < tokens_; }

  // Bands for the end by number, for the end by weight, each if it is asked for, and for the token to be drawn; returns
  // how many.
  int guess(const Heat &heat, const Asked &a, float least, Band *bands) const {
    float *some = scratch(23)->get<float>(pieces_ * (kPiece / kEvery));
    int64_t count = 0;
    V lowest = all(heat.top);
    for (int64_t p = 0; p < pieces_; p++)
      if (any(p, least))
        for (int64_t i = p * kPiece + p * 5 % kEvery * kWide; i + kWide <= end_of(p); i += kEvery * kWide) {
          V x = at(i);
          lowest = smaller(x, lowest);
          store(some + count, x < largest_[p] ? x : all(-INFINITY));  // the lanes' maxima are known
          count += kWide;
        }
    float low = heat.top;
    for (int l = 0; l < kWide; l++) low = fminf(low, lowest[l]);
    Guess guess(heat, fmaxf(low, least));
    guess.sampled(some, count);
    guess.known((const float *)largest_, pieces_ * kWide);
    guess.add_up();
    int asked = 0;
    float whole = guess.weight(), share = fminf(fmaxf(a.top_p, 0), 1);
    if (counts(a)) {
      float most = guess.tokens();
      guess.place(bands[asked++], true, fminf((float)a.top_k / most, 1), most);
      whole = guess.weight_of_first((float)a.top_k);
    }
    if (a.top_p < 1) guess.place(bands[asked++], false, share, whole);
    float enough = a.min_p > 0 ? guess.weight_above(logf(a.min_p)) : whole;
    if (enough < share * whole) whole = enough, share = 1;
    guess.place(bands[asked++], false, share * a.uniform, whole);
    for (int b = 0; b < asked; b++) bands[b].low = fmaxf(bands[b].low, least);
    return asked;
  }

  struct Whole {
    int64_t weight = 0, enough = 0;  // of all, and of those that min-p leaves
  };

  // Fills the bands, the number of tokens above being that of the first one only.
  template <int kBands, bool kNumber>
  Whole pass(const Heat heat, float min_p, float least, Band *bands) const {
    const V leaves = all(ceilf(min_p * 0x1p40f) * 0x1p-20f);
    Sum sum, enough, under[kBands];
    Whole whole;
    int32_t *ids[kBands];
    int64_t inside[kBands], above[kBands], number = 0, pieces = 0;
    V low[kBands], high[kBands];
#pragma GCC unroll 3
    for (int b = 0; b < kBands; b++) {
      ids[b] = bands[b].inside.ids, inside[b] = above[b] = 0;
      low[b] = all(bands[b].low), high[b] = all(bands[b].high);
    }
    auto flush = [&] {
      int64_t weight = sum.total();
      whole.weight += weight, whole.enough += enough.total();
#pragma GCC unroll 3
      for (int b = 0; b < kBands; b++) above[b] += weight - under[b].total(), under[b] = Sum();
      sum = enough = Sum();
    };
    for (int64_t p = 0; p < pieces_; p++) {
      if (!any(p, least)) continue;
      if (++pieces % kFlush == 0) flush();
      N id = first_ids() + (int32_t)(p * kPiece);
      for (int64_t i = p * kPiece; i < end_of(p); i += kWide, id += kWide) {
        V x = at(i), scaled = heat.scaled(x);
        Weights w(scaled);
        sum.add(w);
        if (min_p > 0) enough.add(w, at_least(scaled, leaves));
#pragma GCC unroll 3
        for (int b = 0; b < kBands; b++) {
          Where less = less_than(x, high[b]), in = at_least(x, low[b], less);
          under[b].add(w, less);
          if (kNumber && b == 0) number += kWide - __builtin_popcount(lanes(less));
          pack(ids[b] + inside[b], id, in);
          inside[b] += __builtin_popcount(lanes(in));
        }
      }
    }
    flush();
#pragma GCC unroll 3
    for (int b = 0; b < kBands; b++) bands[b].inside.count = inside[b], bands[b].above = {b ? 0 : number, above[b]};
    return whole;
  }

  // The token to be drawn; kMoved if a band had to be moved.
  int64_t find_in(const Heat &heat, const Asked &a, float least, Band *bands, const Whole &whole) const {
    int64_t kept = whole.weight;
    if (counts(a)) {
      Found last = find_in<true>(heat, *bands++, a.top_k - 1, least);
      if (last.token == kMoved) return kMoved;
      if (last.token >= 0) kept = last.upto.weight;  // otherwise fewer have a weight
    }
    if (a.top_p < 1) {
      int64_t reach = (int64_t)((float)kept * a.top_p);
      bool matters = a.min_p <= 0 || reach < whole.enough;  // otherwise min-p leaves less
      if (matters && reach > 0 && reach < kept) {
        Found last = find_in<false>(heat, *bands, reach - 1, least);
        if (last.token == kMoved) return kMoved;
        kept = last.upto.weight;
      }
      if (reach <= 0) kept = 0;
      bands++;
    }
    if (a.min_p > 0) kept = min64(kept, whole.enough);
    kept = max64(kept, (int64_t)1 << 40);  // the first one stays
    return find_in<false>(heat, *bands, share_of(kept, a.uniform), least).token;
  }

  // As `find`; kMoved, and the band to fill, if the token is not in this one.
  template <bool kNumber>
  Found find_in(const Heat &heat, Band &b, int64_t share, float least) const {
    if (b.above.much<kNumber>() > share) {
      b.low = b.high, b.high = INFINITY;
      return {kMoved, {}};
    }
    for (int64_t i = 0; i < b.inside.count; i++) b.inside.logits[i] = widened(logits_[b.inside.ids[i]]);
    Found found = find<kNumber>(b.inside, heat, b.above, share);
    if (found.token >= 0 || b.low <= least) return found;
    b.high = b.low, b.low = least;
    return {kMoved, {}};
  }

  const T *logits_;
  int64_t tokens_, pieces_;
  V *largest_;
  float top_ = -INFINITY;
  uint32_t nan_ = 0;
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
