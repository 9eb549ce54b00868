// The index of the largest logit of a row whose pieces are computed in any order by any thread. `ip_model_step` keeps
// one per row and thread and merges them; the result is that of LogitsRow::argmax in sample_row.h.
#pragma once
#include <math.h>

#include "runtime/vectors.h"

namespace {

class alignas(64) Argmax {  // of one thread; no two threads write to one cache line
 public:
  // Takes the logits of tokens j .. j + n, logits[0 .. n], into account.
  void add(int64_t j, int64_t n, const float *logits) {
    F32x16 most = splat(-INFINITY);
    I32x16 nans = {};
    int64_t c = 0;
    for (; c + kLanes <= n; c += kLanes) {
      F32x16 x = load<F32x16>(logits + c);
      nans |= x != x;
      most = x > most ? x : most;
    }
    float top = -INFINITY;
    for (int l = 0; l < kLanes; l++) top = most[l] > top ? most[l] : top;
    bool nan = sum_lanes(nans) != 0;
    for (; c < n; c++) nan |= logits[c] != logits[c], top = logits[c] > top ? logits[c] : top;
    if (nan) {
      for (c = 0; logits[c] == logits[c];) c++;
      nan_id_ = min64(nan_id_, j + c);
    } else if (top > largest_ || (top == largest_ && j < largest_id_)) {
      for (c = 0; logits[c] != top;) c++;
      add(top, j + c);
    }
  }

  // Takes the result of another thread into account.
  void add(const Argmax &other) {
    nan_id_ = min64(nan_id_, other.nan_id_);
    add(other.largest_, other.largest_id_);
  }

  // The id of the first NaN if there is one, else of the first of the largest logits, among all that were added.
  int64_t token() const { return nan_id_ < kNoToken ? nan_id_ : largest_id_; }

 private:
  static constexpr int64_t kNoToken = INT64_MAX;

  // Takes one logit that is not NaN into account; `at` is its token's id.
  void add(float top, int64_t at) {
    if (top == largest_)
      largest_id_ = min64(largest_id_, at);
    else if (top > largest_)
      largest_ = top, largest_id_ = at;
  }

  float largest_ = -INFINITY;
  int64_t largest_id_ = kNoToken, nan_id_ = kNoToken;
};

}  // namespace
