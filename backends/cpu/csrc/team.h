// Threads that share one call: the OpenMP team, chunks that are taken when a thread is free, waiting that gives the core
// up after a short while, and memory that each thread keeps for the next call.
#pragma once
#include <omp.h>
#include <sched.h>
#include <stdlib.h>

#include "vec.h"

extern void (*ip_thread_begins)();  // api.cpp; may be null

namespace {

constexpr int kSpins = 4000;  // about 50 us of waiting before the core is offered to others

// Work is counted over the whole call: chunks that were given out, and chunks that are done.
struct Shared {
  alignas(64) int64_t given = 0;
  alignas(64) int64_t done = 0;
};

class Team {
 public:
  const int id, count;
  Team(Shared *shared, int id, int count) : id(id), count(count), shared_(shared) {}

  // Calls f(first, last) for chunks of 0 .. total; who is free takes the next. Every thread of the team makes the same
  // calls in the same order.
  template <class Fn>
  void each(int64_t total, int64_t chunk, Fn f) {
    if (count == 1) {
      if (total > 0) f((int64_t)0, total);
      return;
    }
    int64_t begin = planned_;
    planned_ += (total + chunk - 1) / chunk;
    int64_t next = __atomic_load_n(&shared_->given, __ATOMIC_RELAXED);
    while (next < planned_) {
      if (!__atomic_compare_exchange_n(&shared_->given, &next, next + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
      int64_t first = (next - begin) * chunk;
      f(first, min64(first + chunk, total));
      __atomic_fetch_add(&shared_->done, 1, __ATOMIC_RELEASE);
      next = __atomic_load_n(&shared_->given, __ATOMIC_RELAXED);
    }
  }

  // All chunks of the calls before it are done, and seen, when it returns. It waits for work, not for threads: one
  // that lost its core between two chunks holds nobody up, and finds later that everything was done.
  void barrier() {
    if (count == 1) return;
    for (int i = 0; __atomic_load_n(&shared_->done, __ATOMIC_ACQUIRE) < planned_; i++) {
      if (i < kSpins)
        _mm_pause();
      else
        sched_yield();
    }
  }

 private:
  Shared *shared_;
  int64_t planned_ = 0;
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
  Shared shared;
  // A few microseconds of work are done sooner by one thread than by waking another.
  int threads = work < 16384 ? 1 : team_size();
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
