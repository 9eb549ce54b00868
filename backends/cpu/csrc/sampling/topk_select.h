// A few tokens in no order, and which of them is the one at a share of their weights, or of their number, by rank: by
// falling logit, then by id. They are counted by interval of logits, and those of one interval counted again, until there
// are so few that sorting them costs nothing.
#pragma once
#include <algorithm>

#include "weigh.h"

namespace {

constexpr int kBins = 1024;      // intervals; their sums stay in the nearest cache
constexpr int64_t kSorted = 32;  // so few are sorted

struct Few {
  float *logits;
  int32_t *ids;
  int64_t count;

  // Marked lanes; behind the last one there has to be room for a register.
  void add(V x, N id, Where marked) {
    pack(logits + count, x, marked);
    pack(ids + count, id, marked);
    count += __builtin_popcount(lanes(marked));
  }
};

// How many tokens, and the sum of their weights.
struct Upto {
  int64_t tokens = 0, weight = 0;
  template <bool kNumber>
  int64_t much() const {
    return kNumber ? tokens : weight;
  }
};

struct Found {
  int64_t token;  // -1: none of them
  Upto upto;      // its own included
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

// Numbers of intervals, from the largest logit down; `count` for what lies below the last one.
struct Intervals {
  float top, low, scale;
  int count;
  Intervals(float top, float low, int count)
      : top(top), low(low), scale((float)(count - 1) / (top - low)), count(count) {}
  bool any() const { return scale > 0 && scale < INFINITY; }
  N of(V x) const {
    V at = fma(smaller(top - x, all(FLT_MAX)), all(scale), all(0.5f));
    return __builtin_convertvector(smaller(at, all((float)count)), N);
  }
};

// The smallest and the largest.
inline Intervals intervals_of(const Few &few) {
  for (int l = 0; l < kWide; l++) few.logits[few.count + l] = few.logits[0];
  V least = all(few.logits[0]), most = least;
  for (int64_t i = 0; i < few.count; i += kWide) {
    V x = load<V>(few.logits + i);
    least = smaller(x, least), most = larger(x, most);
  }
  for (int l = 1; l < kWide; l++) least[0] = fminf(least[0], least[l]), most[0] = fmaxf(most[0], most[l]);
  return Intervals(most[0], least[0], (int)min64(kBins, few.count / 4));  // rounding adds less than half of one
}

// Those few tokens by rank, with their weights.
inline Member *sorted(const Few &few, const Heat &heat) {
  Member *members = scratch(17)->get<Member>(few.count + kWide);
  for (int64_t i = 0; i < few.count; i += kWide) {
    int64_t w[kWide];
    heat.weigh(load<V>(few.logits + i)).put(w);
    for (int64_t l = i; l < min64(i + kWide, few.count); l++) members[l] = {place_of(few.logits[l], few.ids[l]), w[l - i]};
  }
  if (!std::is_sorted(members, members + few.count)) std::sort(members, members + few.count);
  return members;
}

// As `find`, of tokens of one logit, which stand in the order of their ids.
template <bool kNumber>
Found find_of_equals(const Few &few, const Heat &heat, Upto before, int64_t share) {
  int64_t w[kWide];
  heat.weigh(all(few.logits[0])).put(w);
  int64_t each = kNumber ? 1 : w[0], left = share - before.much<kNumber>(), at = each > 0 ? left / each : few.count;
  if (at >= few.count) return {-1, before};
  return {few.ids[at], {before.tokens + at + 1, before.weight + (at + 1) * w[0]}};
}

// The first token by rank up to which there is more than `share`, where `before` is what there is before these few; they
// are not the same afterwards.
template <bool kNumber>
Found find(Few few, const Heat &heat, Upto before, int64_t share) {
  while (few.count > kSorted) {
    const Intervals intervals = intervals_of(few);
    if (intervals.top == intervals.low) return find_of_equals<kNumber>(few, heat, before, share);
    if (!intervals.any()) break;  // too close together, or too far apart, to tell how far
    Upto *sums = scratch(16)->get<Upto>(kBins);
    memset((void *)sums, 0, (size_t)intervals.count * sizeof(Upto));
    for (int64_t i = 0; i < few.count; i += kWide) {
      V x = load<V>(few.logits + i);
      int64_t w[kWide];
      int32_t to[kWide];
      heat.weigh(x).put(w);
      store(to, intervals.of(x));
      for (int64_t l = 0, n = min64(kWide, few.count - i); l < n; l++) {
        sums[to[l]].weight += w[l];
        if (kNumber) sums[to[l]].tokens++;
      }
    }
    int wanted = 0;
    for (; wanted < intervals.count; wanted++) {
      Upto upto = {before.tokens + sums[wanted].tokens, before.weight + sums[wanted].weight};
      if (upto.much<kNumber>() > share) break;
      before = upto;
    }
    if (wanted == intervals.count) return {-1, before};
    Few left = {few.logits, few.ids, 0};
    for (int64_t i = 0; i < few.count; i += kWide) {
      V x = load<V>(few.logits + i);
      N id = load<N>(few.ids + i);
      left.add(x, id, (Where)(equal(intervals.of(x), N{} + wanted) & first_lanes(few.count - i)));
    }
    few = left;
  }
  const Member *members = sorted(few, heat);
  for (int64_t i = 0; i < few.count; i++) {
    before.tokens++, before.weight += members[i].weight;
    if (before.much<kNumber>() > share) return {members[i].token(), before};
  }
  return {-1, before};
}

}  // namespace
