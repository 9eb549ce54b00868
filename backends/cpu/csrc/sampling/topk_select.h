// Finds, in an unsorted list of tokens, the one where the cumulative weight (top-p) or the count (top-k) passes the
// cutoff, in descending order of logits. Among equal logits the lower id comes first. The tokens are counted by interval of logits, and those of one interval are counted again, until
// so few are left that sorting them costs nothing. sample_row.h calls `find_token` on each band.
#pragma once
#include <algorithm>

#include "sampling/token_weights.h"

namespace {

constexpr int kIntervals = 1024;  // intervals of logits; their sums stay in the first-level cache
constexpr int64_t kMaxSorted = 32;  // a list of at most this many is sorted

// A list of `count` tokens in no order: their logits and ids.
struct TokenList {
  float *logits;
  int32_t *ids;
  int64_t count;

  // Appends the marked lanes of logits x and ids; there must be space for a whole register after the last token.
  void add(Floats x, Ints id, Mask marked) {
    compress_store(logits + count, x, marked);
    compress_store(ids + count, id, marked);
    count += __builtin_popcount(mask_bits(marked));
  }
};

// How many tokens, and the sum of their weights.
struct RankTotals {
  int64_t tokens = 0, weight = 0;
  // BY_NUMBER: how many tokens; else the sum of their weights.
  template <bool BY_NUMBER>
  int64_t amount() const {
    return BY_NUMBER ? tokens : weight;
  }
};

// A token and the totals up to it.
struct RankedToken {
  int64_t token;  // -1: none of the list
  RankTotals totals;  // of the tokens up to this one, included
};

// A token in a sorted list.
struct RankedEntry {
  uint64_t rank_key;  // orders by descending logit, then by id
  int64_t weight;
  bool operator<(const RankedEntry &other) const { return rank_key < other.rank_key; }
  int64_t token() const { return (int64_t)(rank_key & 0xffffffff); }
};

// The key that orders tokens by rank: a higher logit, then a lower id, gives a smaller key (-0 and 0 are equal); its
// lower 32 bits are the id.
inline uint64_t rank_key_of(float logit, int64_t token) {
  float one_zero = logit + 0.0f;
  uint32_t bits;
  memcpy(&bits, &one_zero, 4);
  uint32_t rising = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return (uint64_t)~rising << 32 | (uint64_t)token;
}

// Numbers `count` intervals of equal width from the largest logit `top` (interval 0) down to `low`; `count` is the
// number of what lies below the last interval.
struct Intervals {
  float top, low, scale;
  int count;
  Intervals(float top, float low, int count)
      : top(top), low(low), scale((float)(count - 1) / (top - low)), count(count) {}
  // Whether the width is a number that divides the logits: `top` and `low` are neither too close together nor too far
  // apart.
  bool are_usable() const { return scale > 0 && scale < INFINITY; }
  // The number of each lane's interval, 0 .. count.
  Ints number_of(Floats x) const {
    Floats at = fma(min_floats(top - x, splat_floats(FLT_MAX)), splat_floats(scale), splat_floats(0.5f));
    return __builtin_convertvector(min_floats(at, splat_floats((float)count)), Ints);
  }
};

// At most kIntervals intervals, one per four tokens, between the smallest and the largest logit of a list. It
// overwrites a register of logits after the list's last token.
inline Intervals intervals_of_list(const TokenList &list) {
  for (int l = 0; l < kRegisterLanes; l++) list.logits[list.count + l] = list.logits[0];
  Floats least = splat_floats(list.logits[0]), most = least;
  for (int64_t i = 0; i < list.count; i += kRegisterLanes) {
    Floats x = load<Floats>(list.logits + i);
    least = min_floats(x, least), most = max_floats(x, most);
  }
  for (int l = 1; l < kRegisterLanes; l++) least[0] = fminf(least[0], least[l]), most[0] = fmaxf(most[0], most[l]);
  return Intervals(most[0], least[0], (int)min64(kIntervals, list.count / 4));  // rounding adds less than half of one
}

// The list's tokens with their weights, sorted by rank: list.count entries in this thread's workspace kRankedTokens.
inline RankedEntry *sort_by_rank(const TokenList &list, const Softmax &softmax) {
  RankedEntry *entries = workspace(kRankedTokens)->reserve<RankedEntry>(list.count + kRegisterLanes);
  for (int64_t i = 0; i < list.count; i += kRegisterLanes) {
    int64_t w[kRegisterLanes];
    softmax.weights(load<Floats>(list.logits + i)).store_to(w);
    for (int64_t l = i; l < min64(i + kRegisterLanes, list.count); l++)
      entries[l] = {rank_key_of(list.logits[l], list.ids[l]), w[l - i]};
  }
  if (!std::is_sorted(entries, entries + list.count)) std::sort(entries, entries + list.count);
  return entries;
}

// The result of `find_token` for a list whose logits are equal and which stands in the order of ids.
template <bool BY_NUMBER>
RankedToken find_among_equals(const TokenList &list, const Softmax &softmax, RankTotals before, int64_t share) {
  int64_t w[kRegisterLanes];
  softmax.weights(splat_floats(list.logits[0])).store_to(w);
  int64_t each = BY_NUMBER ? 1 : w[0], left = share - before.amount<BY_NUMBER>(),
          at = each > 0 ? left / each : list.count;
  if (at >= list.count) return {-1, before};
  return {list.ids[at], {before.tokens + at + 1, before.weight + (at + 1) * w[0]}};
}

// The first token by rank at which `before` and the tokens of the list up to it, included, come to more than `share`:
// in number (BY_NUMBER) or in weight. `before` totals what precedes the list. The result has the totals up to that
// token; token -1 if the list ends earlier. The list's contents are overwritten.
template <bool BY_NUMBER>
RankedToken find_token(TokenList list, const Softmax &softmax, RankTotals before, int64_t share) {
  while (list.count > kMaxSorted) {
    const Intervals intervals = intervals_of_list(list);
    if (intervals.top == intervals.low) return find_among_equals<BY_NUMBER>(list, softmax, before, share);
    if (!intervals.are_usable()) break;  // too close together, or too far apart, to be divided
    RankTotals *sums = workspace(kIntervalSums)->reserve<RankTotals>(kIntervals);
    memset((void *)sums, 0, (size_t)intervals.count * sizeof(RankTotals));
    for (int64_t i = 0; i < list.count; i += kRegisterLanes) {
      Floats x = load<Floats>(list.logits + i);
      int64_t w[kRegisterLanes];
      int32_t to[kRegisterLanes];
      softmax.weights(x).store_to(w);
      store(to, intervals.number_of(x));
      for (int64_t l = 0, n = min64(kRegisterLanes, list.count - i); l < n; l++) {
        sums[to[l]].weight += w[l];
        if (BY_NUMBER) sums[to[l]].tokens++;
      }
    }
    int interval = 0;
    for (; interval < intervals.count; interval++) {
      RankTotals totals = {before.tokens + sums[interval].tokens, before.weight + sums[interval].weight};
      if (totals.amount<BY_NUMBER>() > share) break;
      before = totals;
    }
    if (interval == intervals.count) return {-1, before};
    TokenList left = {list.logits, list.ids, 0};
    for (int64_t i = 0; i < list.count; i += kRegisterLanes) {
      Floats x = load<Floats>(list.logits + i);
      Ints id = load<Ints>(list.ids + i);
      left.add(x, id, (Mask)(equal(intervals.number_of(x), Ints{} + interval) & mask_of_first_lanes(list.count - i)));
    }
    list = left;
  }
  const RankedEntry *entries = sort_by_rank(list, softmax);
  for (int64_t i = 0; i < list.count; i++) {
    before.tokens++, before.weight += entries[i].weight;
    if (before.amount<BY_NUMBER>() > share) return {entries[i].token(), before};
  }
  return {-1, before};
}

}  // namespace
