// The likeliest token of a row of logits whose pieces come in any order, from any thread; as Row::likeliest in
// sampling.h.
#pragma once
#include <math.h>

#include "vec.h"

namespace {

class alignas(64) Likeliest {  // of one thread: no two write to a line
 public:
  // Logits of tokens j .. j + n.
  void take(int64_t j, int64_t n, const float *logits) {
    F most = splat(-INFINITY);
    I nans = {};
    int64_t c = 0;
    for (; c + kLanes <= n; c += kLanes) {
      F x = load<F>(logits + c);
      nans |= x != x;
      most = x > most ? x : most;
    }
    float top = -INFINITY;
    for (int l = 0; l < kLanes; l++) top = most[l] > top ? most[l] : top;
    bool nan = sum(nans) != 0;
    for (; c < n; c++) nan |= logits[c] != logits[c], top = logits[c] > top ? logits[c] : top;
    if (nan) {
      for (c = 0; logits[c] == logits[c];) c++;
      nan_ = min64(nan_, j + c);
    } else if (top > top_ || (top == top_ && j < at_)) {
      for (c = 0; logits[c] != top;) c++;
      take(top, j + c);
    }
  }

  void take(const Likeliest &other) {
    nan_ = min64(nan_, other.nan_);
    take(other.top_, other.at_);
  }

  // The first NaN if there is one, else the first of the largest.
  int64_t token() const { return nan_ < kNone ? nan_ : at_; }

 private:
  static constexpr int64_t kNone = INT64_MAX;

  void take(float top, int64_t at) {
    if (top == top_)
      at_ = min64(at_, at);
    else if (top > top_)
      top_ = top, at_ = at;
  }

  float top_ = -INFINITY;
  int64_t at_ = kNone, nan_ = kNone;
};

}  // namespace
