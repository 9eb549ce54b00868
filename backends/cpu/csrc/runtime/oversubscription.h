// Yielding on shared cores: a clock, when to yield, and how to leave a core. thread_team.h and the tests call it. The
// system preempts a thread in the middle of a chunk if another process wants its core, and then all other threads wait
// for that chunk; so a thread yields its core between two chunks, before that happens. Two threads of a team that the
// system has put on one core, to leave another core to a process that is bound to it, are separated again.
#pragma once
#include <sched.h>
#include <stdint.h>
#include <time.h>

namespace {

// Linux lets each runnable thread of a shared core run for at most this long, in whole ticks.
constexpr int64_t kTimeSliceNs = 2800000;
constexpr uint64_t kClockCheckCycles = 1 << 20;  // how often the clock is read, which takes longer than counting cycles
constexpr int64_t kPreemptedNs = 100000;  // longer than any interruption on an uncontended core

// The monotonic clock, in nanoseconds.
inline int64_t now_ns() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// How long a thread computes before it yields its core, in nanoseconds: half a time slice, which leaves each of two
// processes half of the core. Measured on Linux 6.18 with 250 ticks a second, where it is 2 ms: a thread that yielded
// after 1 ms kept a quarter of the core; after 3 ms, three eighths.
inline int64_t yield_after_ns() {
  static const int64_t after = [] {
    int64_t tick = 4000000;
#ifdef CLOCK_MONOTONIC_COARSE
    struct timespec t;
    if (!clock_getres(CLOCK_MONOTONIC_COARSE, &t) && t.tv_sec == 0 && t.tv_nsec >= 100000) tick = t.tv_nsec;
#endif
    return (kTimeSliceNs + tick - 1) / tick * tick / 2;
  }();
  return after;
}

#ifdef __linux__
// The number of the core that this thread runs on; -1 where the system does not tell.
inline int current_core() { return sched_getcpu(); }

// Moves this thread to a core that it may use and that is not among cores[0 .. count] (negative numbers are ignored).
// Its set of allowed cores is the same afterwards. Returns false, and changes nothing, if there is no such core;
// outside of Linux always. It does not check whether another process computes on the new core.
inline bool move_off_cores(const int *cores, int count) {
  cpu_set_t allowed, rest;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return false;
  rest = allowed;
  for (int i = 0; i < count; i++)
    if (cores[i] >= 0 && cores[i] < CPU_SETSIZE) CPU_CLR(cores[i], &rest);
  if (!CPU_COUNT(&rest) || sched_setaffinity(0, sizeof rest, &rest)) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);  // it stays on the new core for now, and may be moved again
  return true;
}
#else
inline int current_core() { return -1; }
inline bool move_off_cores(const int *, int) { return false; }
#endif

}  // namespace
