// Threads that share one call: the OpenMP team, chunks that are taken when a thread is free, a barrier that gives the
// core up after a short wait, and memory that each thread keeps for the next call.
#pragma once
#include <omp.h>
#include <sched.h>
#include <stdlib.h>

#include "vec.h"

namespace {

constexpr int kPhases = 48;  // counters a call may use
constexpr int kSpins = 4000; // about 50 us of waiting before the core is offered to others

struct Shared {
  alignas(64) volatile int64_t next[kPhases * 8] = {};  // a cache line a counter
  alignas(64) volatile int arrived = 0;
  alignas(64) volatile int round = 0;
};

class Team {
 public:
  const int id, count;
  Team(Shared *shared, int id, int count) : id(id), count(count), shared_(shared) {}

  // Everything before it by any thread is done, and seen, when it returns.
  void barrier() {
    if (count == 1) return;
    int round = __atomic_load_n(&shared_->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&shared_->arrived, 1, __ATOMIC_ACQ_REL) == count) {
      __atomic_store_n(&shared_->arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&shared_->round, round + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int i = 0; __atomic_load_n(&shared_->round, __ATOMIC_ACQUIRE) == round; i++) {
      if (i < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
  }

  // Calls f(first, last) for chunks of 0 .. total; who is free takes the next, so a thread that lost its core for a
  // while holds nobody up for long. Every thread of the team makes the same calls in the same order.
  template <class Fn>
  void each(int64_t total, int64_t chunk, Fn f) {
    int phase = phase_++ % kPhases;
    if (count == 1) {
      if (total > 0) f((int64_t)0, total);
      return;
    }
    volatile int64_t *next = &shared_->next[phase * 8];
    for (;;) {
      int64_t first = __atomic_fetch_add(next, chunk, __ATOMIC_RELAXED);
      if (first >= total) return;
      f(first, min64(first + chunk, total));
    }
  }

 private:
  Shared *shared_;
  int phase_ = 0;
};

// Runs f(team) on every thread of the team.
template <class Fn>
inline void in_parallel(int64_t work, Fn f) {
  Shared shared;
  // A few microseconds of work are done sooner by one thread than by waking another.
  int threads = work < 16384 ? 1 : omp_get_max_threads();
  if (threads == 1 || omp_in_parallel()) {
    Team team(&shared, 0, 1);
    f(team);
    return;
  }
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
