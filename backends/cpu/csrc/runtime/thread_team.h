// Threads that share one call: the OpenMP team, chunks that each takes from a share of its own and then from the others',
// waiting that gives the core up after a short while, and memory that each thread keeps for the next call.
#pragma once
#include <omp.h>
#include <stdlib.h>

#include "crowd.h"
#include "vec.h"

extern void (*ip_thread_begins)();  // api.cpp; may be null

namespace {

constexpr int kSpins = 4000;  // about 50 us of waiting before the core is offered to others

constexpr int kShares = 32;  // with more threads, several start in the same share

// A line for each share: one that all write to would go from core to core with every chunk. `taken` is of one part of the
// call: its number, and how many chunks were taken from the share's beginning and from its end. `done` are the chunks that
// the share's threads have done in the whole call. `core` is where the share's first thread computes; -1: not yet.
struct Shared {
  struct alignas(64) Share {
    uint64_t taken = 0;
    int64_t done = 0;
    int core = -1;
  } shares[kShares];
  int64_t begun_ns;
};

class Team {
 public:
  const int id, count;
  Team(Shared *shared, int id, int count)
      : id(id), count(count), shared_(shared), shares_(count < kShares ? count : kShares) {
    if (count == 1) return;
    asked_ = __rdtsc(), since_ns_ = now_ns();
    enter(core_now());
    if (since_ns_ - shared->begun_ns > kHeldUpNs) spread();
  }

  // Calls f(first, last) for chunks of 0 .. total. A thread takes the chunks of its share in their order, so that what it
  // reads is one stream, which processors foresee: in turns with others, what came of itself or was asked for ahead was
  // another's. Who has none left takes from the ends of others'. Every thread of the team makes the same calls in the same
  // order.
  template <class Fn>
  void each(int64_t total, int64_t chunk, Fn f) {
    if (count == 1) {
      if (total > 0) f((int64_t)0, total);
      return;
    }
    while (total / chunk >= kMostChunks) chunk *= 2;
    int64_t chunks = (total + chunk - 1) / chunk, even = chunks / shares_, more = chunks % shares_;
    int64_t *done = &shared_->shares[id % shares_].done;
    planned_ += chunks, part_++;
    for (int i = 0, s = id % shares_; i < shares_; i++, s = s + 1 < shares_ ? s + 1 : 0) {
      int64_t begin = s * even + min64(s, more), own = even + (s < more), n;
      while ((n = take(shared_->shares[s].taken, own, i == 0)) >= 0) {
        int64_t first = (begin + n) * chunk;
        f(first, min64(first + chunk, total));
        __atomic_fetch_add(done, 1, __ATOMIC_RELEASE);
        offer();
      }
    }
  }

  // The chunk of so many that this thread takes first, if nobody has taken it.
  int64_t first_of(int64_t chunks) const {
    int64_t s = id % shares_;
    return s * (chunks / shares_) + min64(s, chunks % shares_);
  }

  // All chunks of the calls before it are done, and seen, when it returns. It waits for work, not for threads: one
  // that lost its core between two chunks holds nobody up, and finds later that everything was done.
  void barrier() {
    if (count == 1) return;
    int i = 0;
    for (; done() < planned_; i++) {
      if (i < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
    if (i > kSpins) since_ns_ = now_ns();  // others have had the core
  }

 private:
  static constexpr int kBits = 20;
  static constexpr int64_t kMostChunks = (int64_t)1 << kBits;

  // A chunk of a share of `own`, from its beginning or its end; -1: none is left of it, or this part is over.
  int64_t take(uint64_t &taken, int64_t own, bool from_beginning) const {
    uint64_t now = __atomic_load_n(&taken, __ATOMIC_RELAXED);
    while (true) {
      uint64_t part = now >> 2 * kBits, base = part == part_ ? now : part_ << 2 * kBits;
      int64_t first = base >> kBits & (kMostChunks - 1), last = base & (kMostChunks - 1);
      if (part > part_ || first + last >= own) return -1;
      uint64_t next = base + (from_beginning ? (uint64_t)kMostChunks : 1);
      if (__atomic_compare_exchange_n(&taken, &now, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return from_beginning ? first : own - 1 - last;
    }
  }

  // The core to whatever else wants it, now and then, while this thread holds no chunk.
  void offer() {
    uint64_t cycles = __rdtsc();
    if (cycles - asked_ < kAskCycles) return;
    asked_ = cycles;
    int64_t now = now_ns();
    if (now - since_ns_ < offer_after_ns()) return;
    sched_yield();
    since_ns_ = now_ns();
    enter(core_now());
    if (since_ns_ - now > kHeldUpNs) spread();
  }

  void enter(int core) {
    if (id < shares_) __atomic_store_n(&shared_->shares[id].core, core, __ATOMIC_RELAXED);
  }

  // To a core where no other of the team's first threads was last, if one of them is on this thread's.
  void spread() {
    int cores[kShares], mine = core_now(), together = 0;
    for (int s = 0; s < shares_; s++) {
      cores[s] = s == id ? mine : __atomic_load_n(&shared_->shares[s].core, __ATOMIC_RELAXED);
      together += s != id && mine >= 0 && cores[s] == mine;
    }
    if (together && leave(cores, shares_)) enter(core_now());
  }

  int64_t done() const {
    int64_t all = 0;
    for (int s = 0; s < shares_; s++) all += __atomic_load_n(&shared_->shares[s].done, __ATOMIC_ACQUIRE);
    return all;
  }

  Shared *shared_;
  int shares_;
  int64_t planned_ = 0;
  uint64_t part_ = 0, asked_ = 0;
  int64_t since_ns_ = 0;  // when the core was offered last
};

// Threads of a team that this thread would lead. OpenMP keeps that number for each thread, and torch sets it in a thread
// only when it is first asked there.
inline int team_size() {
  static thread_local bool begun = false;
  if (!begun) {
    begun = true;
    if (ip_thread_begins) ip_thread_begins();
  }
  return omp_get_max_threads();
}

// Runs f(team) on every thread of the team.
template <class Fn>
inline void in_parallel(int64_t work, Fn f) {
  // A few microseconds of work are done sooner by one thread than by waking another.
  int threads = work < 16384 ? 1 : team_size();
  if (threads == 1 || omp_in_parallel()) {
    Team team(nullptr, 0, 1);
    f(team);
    return;
  }
  Shared shared;
  shared.begun_ns = now_ns();
#pragma omp parallel num_threads(threads)
  {
    Team team(&shared, omp_get_thread_num(), omp_get_num_threads());
    f(team);
  }
}

// Grows, never shrinks; contents do not survive growing. A thread's own, so nothing is allocated in a usual call.
class Scratch {
 public:
  template <class T>
  T *get(int64_t count) {
    size_t bytes = (size_t)round_up(count * (int64_t)sizeof(T) + 64, 64);
    if (bytes > size_) {
      free(data_);
      if (posix_memalign(&data_, 64, bytes)) abort();
      size_ = bytes;
    }
    return (T *)data_;
  }
  ~Scratch() { free(data_); }

 private:
  void *data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace
