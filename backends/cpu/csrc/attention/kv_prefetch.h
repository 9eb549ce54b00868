// Rows of the cache on their way while something else is done.
#pragma once
#include "kept.h"

namespace {

// Keys first .. last of a sequence, each with `n` entries from `from` on. They lie apart, so the processor does not foresee
// them, and asking for many at once waits for each other: they are asked for one by one, between what is computed.
class Fetch {
 public:
  Fetch() = default;
  Fetch(const Kept &k, const int32_t *table, int64_t block, int64_t first, int64_t last, int64_t from, int64_t n)
      : table_(table + first / block), left_(max64(0, last - first)), run_(block - first % block), block_(block) {
    int64_t size = k.coded() ? 1 : sizeof(bf16);
    data_ = (const char *)k.data + from * size, row_ = k.stride * size, bytes_ = n * size;
    if (left_) at_ = data_ + (*table_ * block + first % block) * row_;
  }

  bool left() const { return left_ > 0; }

  // The next `bytes` of them, in fours of lines; what was asked for too much is asked for less the next time.
  inline __attribute__((always_inline)) void some(int64_t bytes) {
    for (owed_ += bytes; owed_ > 0 && left_ > 0;) {
      const char *at = at_ + line_;
#pragma GCC unroll 4
      for (int line = 0; line < 256; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
      owed_ -= min64(256, bytes_ - line_), line_ += 256;
      if (line_ < bytes_) continue;
      line_ = 0, left_--, run_--, at_ += row_;
      if (run_ == 0 && left_ > 0) run_ = block_, at_ = data_ + *++table_ * block_ * row_;
    }
  }

 private:
  const int32_t *table_ = nullptr;
  int64_t left_ = 0, run_ = 0, block_ = 0, row_ = 0, bytes_ = 0, line_ = 0, owed_ = 0;
  const char *data_ = nullptr, *at_ = nullptr;
};

// What is on its way: the keys of a span, then its values, then the keys that are read after them.
struct Ahead {
  Fetch keys, values, next;
  inline __attribute__((always_inline)) void some(int64_t bytes) {
    if (keys.left())
      keys.some(bytes);
    else if (values.left())
      values.some(bytes);
    else
      next.some(bytes);
  }
};

}  // namespace
