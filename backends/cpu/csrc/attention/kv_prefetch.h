// Prefetches rows of the KV cache in between computations. paged_attention.h decides what is read next and calls
// `prefetch(bytes)` for every few keys it computes.
#pragma once
#include "attention/kv_entries.h"

namespace {

// Keys first .. last of a sequence, `n` entries of each from `from` on. They lie apart, so the processor does not
// prefetch them by itself; and prefetching many at once stalls. So they are prefetched one by one, between what is
// computed.
class KvPrefetch {
 public:
  KvPrefetch() = default;
  // `table` is the sequence's block table, `block` the cache's block size. Nothing is prefetched yet.
  KvPrefetch(const KvEntries &k, const int32_t *table, int64_t block, int64_t first, int64_t last, int64_t from,
             int64_t n)
      : table_(table + first / block), keys_left_(max64(0, last - first)), block_left_(block - first % block),
        block_(block) {
    if (k.in_spans()) keys_left_ = 0;  // with VNNI int4_attention.h prefetches them; elsewhere nothing does
    data_ = (const char *)k.data + k.bytes_of(from), row_ = k.bytes_of(k.stride), bytes_ = k.bytes_of(n);
    if (keys_left_) at_ = data_ + (*table_ * block + first % block) * row_;
  }

  bool has_left() const { return keys_left_ > 0; }

  // Prefetches about the next `bytes`, four cache lines at a time, into the second-level cache; what was too much is
  // subtracted the next time. Nothing once all keys are prefetched.
  inline __attribute__((always_inline)) void prefetch(int64_t bytes) {
    for (budget_ += bytes; budget_ > 0 && keys_left_ > 0;) {
      const char *at = at_ + line_;
#pragma GCC unroll 4
      for (int line = 0; line < 256; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
      budget_ -= min64(256, bytes_ - line_), line_ += 256;
      if (line_ < bytes_) continue;
      line_ = 0, keys_left_--, block_left_--, at_ += row_;
      if (block_left_ == 0 && keys_left_ > 0) block_left_ = block_, at_ = data_ + *++table_ * block_ * row_;
    }
  }

 private:
  const int32_t *table_ = nullptr;
  int64_t keys_left_ = 0, block_left_ = 0, block_ = 0, row_ = 0, bytes_ = 0, line_ = 0, budget_ = 0;
  const char *data_ = nullptr, *at_ = nullptr;
};

// What is prefetched: the keys of a span, then its values, then the keys that are read after them. One call of
// `prefetch` prefetches from one of the three only.
struct PrefetchQueue {
  KvPrefetch keys, values, next_keys;
  inline __attribute__((always_inline)) void prefetch(int64_t bytes) {
    if (keys.has_left())
      keys.prefetch(bytes);
    else if (values.has_left())
      values.prefetch(bytes);
    else
      next_keys.prefetch(bytes);
  }
};

}  // namespace
