// Draws a token from each row of logits, as core/inferplane/ops/sampling.py defines it, with the weights of
// token_weights.h. isa_entries.h calls `sample`. A row belongs to one thread, and is read from the core's cache after
// the first pass over it:
//
//   1. the largest logits: of the row, and of each lane of each piece, which tell later passes what to skip;
//   2. without top-k, top-p and min-p: sums of weights by piece; then the token is found in one piece;
//   3. with a small top-k: the k-th largest of the lanes' maxima bounds what can be among the k largest, and only those
//      are sorted;
//   4. otherwise: selection by sampling (Floyd and Rivest, 1975). The filters leave the first tokens by rank, and their
//      end and the token drawn are each expected in a narrow band of logits (cutoff_estimate.h). One pass sums the
//      weights above each band and lists the tokens in it. A band that turns out to be wrong is moved, and the pass is
//      repeated: the estimate decides how long it takes, never what is drawn.
#pragma once
#include "sampling/cutoff_estimate.h"

namespace {

constexpr int64_t kPieceTokens = 1024;  // tokens of a piece; a multiple of what is sampled
constexpr int64_t kFlushPieces = 8;  // after this many pieces a lane's sums, of 31 bits, are flushed
constexpr int64_t kMaxSortedTopK = 64;  // a top-k up to this one is always found by sorting

// floor(uniform * total), exactly, from 0 to total - 1; `uniform` is from 0 to below 1 and a multiple of 2^-24.
inline int64_t scale_by_uniform(int64_t total, float uniform) {
  int64_t times = min64((int64_t)(uniform * 0x1p24f), (1 << 24) - 1);
  return (int64_t)((unsigned __int128)total * (uint64_t)times >> 24);
}

// The sampling parameters of one row; top_p 1, min_p 0 and top_k 0 filter nothing.
struct SamplingParams {
  float temperature, top_p, min_p, uniform;
  int64_t top_k;
};

constexpr int64_t kBandMoved = -2;  // in place of a token: a band was moved
constexpr float kBoundSlack = 0.01f;  // far more than rounding can change a bound by

// One row of `tokens` logits, of type float or bf16. The constructor makes the first pass.
template <class T>
class LogitsRow {
 public:
  LogitsRow(const T *logits, int64_t tokens)
      : logits_(logits), tokens_(tokens), pieces_((tokens + kPieceTokens - 1) / kPieceTokens),
        largest_(workspace(kLaneMaxima)->reserve<Floats>(pieces_)) {
    Floats most = splat_floats(-INFINITY);
    Ints nan = {};
    for (int64_t p = 0; p < pieces_; p++) {
      Floats here = splat_floats(-INFINITY);
      for (int64_t i = p * kPieceTokens, last = min64(i + kPieceTokens, tokens_); i < last; i += kRegisterLanes) {
        Floats x = at(i);
        nan |= x != x;
        here = max_floats(x, here);
      }
      largest_[p] = here;
      most = max_floats(here, most);
    }
    for (int l = 0; l < kRegisterLanes; l++) top_ = most[l] > top_ ? most[l] : top_;
    nan_ = mask_bits(nan);
  }

  // The id of the largest logit, the lowest of equals; of the first NaN if there is one.
  int64_t argmax() const {
    for (int64_t p = 0; p < pieces_; p++) {
      if (!nan_ && !piece_reaches(p, top_)) continue;
      for (int64_t i = p * kPieceTokens; i < end_of_piece(p); i += kRegisterLanes) {
        Floats x = at(i);
        if (uint32_t found = mask_bits(nan_ ? (Ints)(x != x) : (Ints)(x == top_))) return i + __builtin_ctz(found);
      }
    }
    return 0;
  }

  // The id of the token drawn; that of `argmax` if the temperature is 0 or less, the row has NaN, or its largest logit
  // is infinite. `has_filters`: top-k, top-p or min-p may be set; false: they are ignored.
  int64_t draw(const SamplingParams &a, bool has_filters) {
    if (a.temperature <= 0 || nan_ || !(top_ > -INFINITY && top_ < INFINITY)) return argmax();
    const Softmax softmax(top_, a.temperature);
    if (!has_filters) return draw_by_id(softmax, a.uniform);
    bool top_k_is_small = a.top_k > 0 && a.top_k <= max64(kMaxSortedTopK, pieces_ * kRegisterLanes / 4);
    return top_k_is_small ? draw_from_top_k(softmax, a, min64(a.top_k, tokens_)) : draw_by_rank(softmax, a);
  }

 private:
  // A register of logits from token i on; -inf after the row's end.
  Floats at(int64_t i) const { return load_logits(logits_ + i, tokens_ - i); }

  // Whether a logit of the piece with this number is at least `least`; from the maxima of the first pass.
  bool piece_reaches(int64_t piece, float least) const {
    return mask_bits(greater_equal(largest_[piece], splat_floats(least)));
  }
  int64_t end_of_piece(int64_t piece) const { return min64((piece + 1) * kPieceTokens, tokens_); }

  // The sum of the weights of a piece's tokens.
  int64_t weight_of_piece(const Softmax &softmax, int64_t p) const {
    WeightSum sum;
    for (int64_t i = p * kPieceTokens; i < end_of_piece(p); i += kRegisterLanes) sum.add(softmax.weights(at(i)));
    return sum.total();
  }

  // Draws from all tokens, in the order of their ids: the first token at which the sum of weights exceeds `uniform` of
  // all.
  int64_t draw_by_id(const Softmax softmax, float uniform) const {
    int64_t *sums = workspace(kIntervalSums)->reserve<int64_t>(pieces_), total = 0;
    float least = softmax.lowest_logit(kMinExponent);
    for (int64_t p = 0; p < pieces_; p++)
      total += sums[p] = piece_reaches(p, least) ? weight_of_piece(softmax, p) : 0;
    int64_t share = scale_by_uniform(total, uniform), p = 0;
    while (p < pieces_ - 1 && share >= sums[p]) share -= sums[p++];
    for (int64_t i = p * kPieceTokens; i < tokens_; i += kRegisterLanes) {
      int64_t w[kRegisterLanes];
      softmax.weights(at(i)).store_to(w);
      for (int l = 0; l < kRegisterLanes; l++) {
        if (share < w[l]) return i + l;
        share -= w[l];
      }
    }
    return tokens_ - 1;
  }

  // Appends tokens i + l, for the bits l of `found`, with weights to members[0 .. count]; returns how many there are
  // then.
  int64_t append(const Softmax &softmax, RankedEntry *members, int64_t count, uint32_t found, int64_t i) const {
    Floats x = at(i);
    int64_t w[kRegisterLanes];
    softmax.weights(x).store_to(w);
    for (; found; found &= found - 1) {
      int l = __builtin_ctz(found);
      if (i + l < tokens_) members[count++] = {rank_key_of(x[l], i + l), w[l]};
    }
    return count;
  }

  // Draws from the first k tokens by rank, filtered by top-p and min-p; k is at most the row's number of tokens.
  int64_t draw_from_top_k(const Softmax &softmax, const SamplingParams &a, int64_t k) const {
    float bound = -INFINITY;
    if (k <= pieces_ * kRegisterLanes) {
      float *maxima = workspace(kIntervalSums)->reserve<float>(pieces_ * kRegisterLanes), *kth = maxima + k - 1;
      memcpy(maxima, largest_, (size_t)(pieces_ * kRegisterLanes) * sizeof(float));
      std::nth_element(maxima, kth, maxima + pieces_ * kRegisterLanes, [](float x, float y) { return x > y; });
      bound = *kth;
    }
    RankedEntry *members = workspace(kRankedTokens)->reserve<RankedEntry>(tokens_);
    int64_t count = 0;
    for (int64_t p = 0; p < pieces_; p++)
      if (piece_reaches(p, bound))
        for (int64_t i = p * kPieceTokens; i < end_of_piece(p); i += kRegisterLanes)
          if (uint32_t found = mask_bits((Ints)(at(i) >= bound))) count = append(softmax, members, count, found, i);
    if (count > k) std::nth_element(members, members + k, members + count);
    std::sort(members, members + k);
    int64_t total = 0, upto = 0, remaining = 0;
    for (int64_t i = 0; i < k; i++) total += members[i].weight;
    int64_t reach = a.top_p >= 1 ? total : (int64_t)((float)total * a.top_p);
    for (int64_t i = 0; i < k; i++) {
      int64_t &w = members[i].weight, before = upto;
      upto += w;
      if (i && (before >= reach || (float)w < a.min_p * 0x1p40f)) w = 0;
      remaining += w;
    }
    int64_t share = scale_by_uniform(remaining, a.uniform), i = 0;
    while (i < k - 1 && share >= members[i].weight) share -= members[i++].weight;
    return members[i].token();
  }

  // Draws with bands, for every combination of filters. Each filter leaves some number of the first tokens by rank; the
  // smallest counts.
  int64_t draw_by_rank(const Softmax &softmax, const SamplingParams &a) const {
    // The weight of what min-p removes counts too if top-p is a share of all.
    bool all = a.top_p < 1 || a.min_p <= 0 || a.min_p >= 1;
    float least = softmax.lowest_logit(all ? kMinExponent : fmaxf(kMinExponent, logf(a.min_p) - kBoundSlack));
    Band bands[3];
    int64_t capacity = tokens_ + 2 * kRegisterLanes;
    float *logits = workspace(kBandLogits)->reserve<float>(3 * capacity);
    int32_t *ids = workspace(kBandIds)->reserve<int32_t>(3 * capacity);
    for (int b = 0; b < 3; b++) bands[b].inside = {logits + b * capacity, ids + b * capacity, 0};
    bool has_top_k_band = limits_top_k(a);
    int num_bands = place_bands(softmax, a, least, bands);
    for (;;) {
      Totals totals = num_bands == 1   ? sum_and_collect<1, false>(softmax, a.min_p, least, bands)
                      : num_bands == 3 ? sum_and_collect<3, true>(softmax, a.min_p, least, bands)
                      : has_top_k_band ? sum_and_collect<2, true>(softmax, a.min_p, least, bands)
                                       : sum_and_collect<2, false>(softmax, a.min_p, least, bands);
      int64_t token = find_in(softmax, a, least, bands, totals);
      if (token != kBandMoved) return token;
    }
  }

  // Whether top-k removes tokens of this row.
  bool limits_top_k(const SamplingParams &a) const { return a.top_k > 0 && a.top_k < tokens_; }

  // Estimates and sets bands[0 ..]: if limits_top_k, one for the last token of top-k; if top_p < 1, one for the last
  // token of top-p; and one for the token to be drawn. Returns how many. No band begins below the logit `least`.
  int place_bands(const Softmax &softmax, const SamplingParams &a, float least, Band *bands) const {
    float *some = workspace(kSampledLogits)->reserve<float>(pieces_ * (kPieceTokens / kSampleEvery));
    int64_t count = 0;
    Floats lowest = splat_floats(softmax.top);
    for (int64_t p = 0; p < pieces_; p++)
      if (piece_reaches(p, least))
        for (int64_t i = p * kPieceTokens + p * 5 % kSampleEvery * kRegisterLanes;
             i + kRegisterLanes <= end_of_piece(p); i += kSampleEvery * kRegisterLanes) {
          Floats x = at(i);
          lowest = min_floats(x, lowest);
          store(some + count, x < largest_[p] ? x : splat_floats(-INFINITY));  // the lanes' maxima are known
          count += kRegisterLanes;
        }
    float low = softmax.top;
    for (int l = 0; l < kRegisterLanes; l++) low = fminf(low, lowest[l]);
    CutoffEstimate estimate(softmax, fmaxf(low, least));
    estimate.add_sampled(some, count);
    estimate.add_known((const float *)largest_, pieces_ * kRegisterLanes);
    estimate.accumulate();
    int num_bands = 0;
    float totals = estimate.weight(), share = fminf(fmaxf(a.top_p, 0), 1);
    if (limits_top_k(a)) {
      float most = estimate.tokens();
      estimate.place_band(bands[num_bands++], true, fminf((float)a.top_k / most, 1), most);
      totals = estimate.weight_of_first((float)a.top_k);
    }
    if (a.top_p < 1) estimate.place_band(bands[num_bands++], false, share, totals);
    float above_min_p = a.min_p > 0 ? estimate.weight_above(logf(a.min_p)) : totals;
    if (above_min_p < share * totals) totals = above_min_p, share = 1;
    estimate.place_band(bands[num_bands++], false, share * a.uniform, totals);
    for (int b = 0; b < num_bands; b++) bands[b].low = fmaxf(bands[b].low, least);
    return num_bands;
  }

  struct Totals {
    int64_t weight = 0, above_min_p = 0;  // the weight of all tokens, and of those that min-p leaves
  };

  // One pass over the row: returns the sums of all weights and of those that min-p leaves, and sets for each of kBands
  // bands `above`, the totals of tokens above it, and the ids (not the logits) of the tokens in it. above.tokens is
  // counted for the first band only, if BY_NUMBER. Pieces without a logit of at least `least` are skipped.
  template <int kBands, bool BY_NUMBER>
  Totals sum_and_collect(const Softmax softmax, float min_p, float least, Band *bands) const {
    const Floats leaves = splat_floats(ceilf(min_p * 0x1p40f) * 0x1p-20f);
    WeightSum sum, above_min_p, under[kBands];
    Totals totals;
    int32_t *ids[kBands];
    int64_t inside[kBands], above[kBands], number = 0, pieces = 0;
    Floats low[kBands], high[kBands];
#pragma GCC unroll 3
    for (int b = 0; b < kBands; b++) {
      ids[b] = bands[b].inside.ids, inside[b] = above[b] = 0;
      low[b] = splat_floats(bands[b].low), high[b] = splat_floats(bands[b].high);
    }
    auto flush = [&] {
      int64_t weight = sum.total();
      totals.weight += weight, totals.above_min_p += above_min_p.total();
#pragma GCC unroll 3
      for (int b = 0; b < kBands; b++) above[b] += weight - under[b].total(), under[b] = WeightSum();
      sum = above_min_p = WeightSum();
    };
    for (int64_t p = 0; p < pieces_; p++) {
      if (!piece_reaches(p, least)) continue;
      if (++pieces % kFlushPieces == 0) flush();
      Ints id = lane_numbers() + (int32_t)(p * kPieceTokens);
      for (int64_t i = p * kPieceTokens; i < end_of_piece(p); i += kRegisterLanes, id += kRegisterLanes) {
        Floats x = at(i), scaled = softmax.scaled(x);
        Weights w(scaled);
        sum.add(w);
        if (min_p > 0) above_min_p.add(w, greater_equal(scaled, leaves));
#pragma GCC unroll 3
        for (int b = 0; b < kBands; b++) {
          Mask less = less_than(x, high[b]), in = greater_equal(x, low[b], less);
          under[b].add(w, less);
          if (BY_NUMBER && b == 0) number += kRegisterLanes - __builtin_popcount(mask_bits(less));
          compress_store(ids[b] + inside[b], id, in);
          inside[b] += __builtin_popcount(mask_bits(in));
        }
      }
    }
    flush();
#pragma GCC unroll 3
    for (int b = 0; b < kBands; b++) bands[b].inside.count = inside[b], bands[b].above = {b ? 0 : number, above[b]};
    return totals;
  }

  // The token to be drawn, from the bands that `sum_and_collect` filled; kBandMoved if a band had to be moved, then
  // that pass must be repeated.
  int64_t find_in(const Softmax &softmax, const SamplingParams &a, float least, Band *bands,
                  const Totals &totals) const {
    int64_t remaining = totals.weight;
    if (limits_top_k(a)) {
      RankedToken last = find_in<true>(softmax, *bands++, a.top_k - 1, least);
      if (last.token == kBandMoved) return kBandMoved;
      if (last.token >= 0) remaining = last.totals.weight;  // otherwise fewer tokens have a weight
    }
    if (a.top_p < 1) {
      int64_t reach = (int64_t)((float)remaining * a.top_p);
      bool matters = a.min_p <= 0 || reach < totals.above_min_p;  // otherwise min-p leaves less
      if (matters && reach > 0 && reach < remaining) {
        RankedToken last = find_in<false>(softmax, *bands, reach - 1, least);
        if (last.token == kBandMoved) return kBandMoved;
        remaining = last.totals.weight;
      }
      if (reach <= 0) remaining = 0;
      bands++;
    }
    if (a.min_p > 0) remaining = min64(remaining, totals.above_min_p);
    remaining = max64(remaining, (int64_t)1 << 40);  // the first token always stays
    return find_in<false>(softmax, *bands, scale_by_uniform(remaining, a.uniform), least).token;
  }

  // `find_token` in the tokens of band b, by number (BY_NUMBER) or weight. If the token is not in the band, it moves
  // the band up or down and returns kBandMoved; -1 if the band reaches `least` and the row has no such token.
  template <bool BY_NUMBER>
  RankedToken find_in(const Softmax &softmax, Band &b, int64_t share, float least) const {
    if (b.above.amount<BY_NUMBER>() > share) {
      b.low = b.high, b.high = INFINITY;
      return {kBandMoved, {}};
    }
    for (int64_t i = 0; i < b.inside.count; i++) b.inside.logits[i] = to_float(logits_[b.inside.ids[i]]);
    RankedToken found = find_token<BY_NUMBER>(b.inside, softmax, b.above, share);
    if (found.token >= 0 || b.low <= least) return found;
    b.high = b.low, b.low = least;
    return {kBandMoved, {}};
  }

  const T *logits_;
  int64_t tokens_, pieces_;
  Floats *largest_;
  float top_ = -INFINITY;
  uint32_t nan_ = 0;
};

// tokens[i] = the token drawn from row i of s, for all rows; T is the logits' type, float or bf16. A row belongs to one
// thread. Every thread of the team calls it; complete after the next `barrier`.
template <class T>
inline void sample(Team &team, const ip_sampling &s, int64_t *tokens) {
  team.for_each_chunk(s.rows, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      SamplingParams a = {0, 1, 0, 0, 0};
      bool has_filters = s.top_k && s.top_p && s.min_p;
      if (s.uniform) a.temperature = s.temperature[i], a.uniform = s.uniform[i];
      if (has_filters) a.top_k = s.top_k[i], a.top_p = s.top_p[i], a.min_p = s.min_p[i];
      tokens[i] = LogitsRow<T>((const T *)s.logits + i * s.ld, s.vocab).draw(a, has_filters);
    }
  });
}

}  // namespace
