// Cores that something else wants too. The system takes a core away in the middle of a chunk, and then all other threads
// wait for that chunk: so a thread offers its core between two chunks before that happens. And two threads of a team that
// the system has put on one core, to leave another to a process that is bound to it, part again.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <time.h>

namespace {

constexpr int64_t kSliceNs = 2800000;     // Linux lets each of those that compute run for so long at most, in whole ticks
constexpr uint64_t kAskCycles = 1 << 20;  // how often a clock is asked, which takes longer than counting cycles
constexpr int64_t kHeldUpNs = 100000;     // nobody is away for so long who has a core alone

inline int64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// After how long a core is offered: half a slice, which leaves each of two half of the core. Measured on Linux 6.18 with
// 250 ticks a second, so after 2 ms: offered after 1 ms, ours kept a quarter; after 3 ms three eighths.
inline int64_t offer_after_ns() {
  static const int64_t after = [] {
    int64_t tick = 4000000;
#ifdef CLOCK_MONOTONIC_COARSE
    struct timespec t;
    if (!clock_getres(CLOCK_MONOTONIC_COARSE, &t) && t.tv_sec == 0 && t.tv_nsec >= 100000) tick = t.tv_nsec;
#endif
    return (kSliceNs + tick - 1) / tick * tick / 2;
  }();
  return after;
}

#ifdef __linux__
inline int core_now() { return sched_getcpu(); }

// Moves this thread to a core that is none of these and that it may use; false: there is none. Whether somebody else
// computes there is not known.
inline bool leave(const int *cores, int count) {
  cpu_set_t allowed, rest;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return false;
  rest = allowed;
  for (int i = 0; i < count; i++)
    if (cores[i] >= 0 && cores[i] < CPU_SETSIZE) CPU_CLR(cores[i], &rest);
  if (!CPU_COUNT(&rest) || sched_setaffinity(0, sizeof rest, &rest)) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);  // it stays there for now, and may be moved again
  return true;
}
#else
inline int core_now() { return -1; }
inline bool leave(const int *, int) { return false; }
#endif

}  // namespace
