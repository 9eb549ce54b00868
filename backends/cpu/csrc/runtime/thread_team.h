// The thread team of one call. Every kernel of a call runs on all threads of torch's OpenMP team: `run_on_team` starts
// them, `Team::for_each_chunk` shares work out in chunks, `Team::barrier` waits for work. A thread first takes the
// chunks of its own share and then those of other shares; a thread that waits yields its core after a short while.
#pragma once
#include <omp.h>

#include "runtime/oversubscription.h"
#include "runtime/vectors.h"
#include "runtime/workspace.h"

extern void (*ip_thread_init)();  // api.cpp; may be null

namespace {

constexpr int kSpinsBeforeYield = 4000;  // about 50 us of waiting before the core is yielded

constexpr int kMaxShares = 32;  // with more threads than this, several start in the same share

// State that the threads of one call share. Each share has a cache line of its own: a line that all threads write to
// would move from core to core with every chunk. `taken` packs the number of the current `for_each_chunk` call (its
// section) and how many chunks were taken from the share's beginning and from its end. `chunks_done` counts the chunks
// that the share's threads have done in the whole call. `core` is where the share's first thread runs; -1: not known
// yet.
struct TeamState {
  struct alignas(64) Share {
    uint64_t taken = 0;
    int64_t chunks_done = 0;
    int core = -1;
  } shares[kMaxShares];
  int64_t start_ns;
};

// One thread's view of the team. `id` is the thread's number, `count` the number of threads.
class Team {
 public:
  const int id, count;
  // Each thread of the call makes its own Team; `state` is shared by all of them, and null if `count` is 1. A thread
  // that starts more than kPreemptedNs after the call began moves to another core if another share's first thread is on
  // its core.
  Team(TeamState *state, int id, int count)
      : id(id), count(count), state_(state), shares_(count < kMaxShares ? count : kMaxShares) {
    if (count == 1) return;
    checked_cycles_ = __rdtsc(), yielded_ns_ = now_ns();
    publish_core(current_core());
    if (yielded_ns_ - state->start_ns > kPreemptedNs) leave_shared_core();
  }

  // Calls f(first, last) for parts of 0 .. total that cover it once: ranges of `chunk` entries (of more if there were
  // 2^20 chunks), the last one shorter, spread over the team; with one thread a single call f(0, total). Every thread
  // of the team must make the same calls in the same order. It does not wait for chunks of other threads: results of
  // all chunks are complete and visible after the next `barrier`. A thread takes the chunks of its own share in
  // ascending order, so that it reads one stream, which processors prefetch; if threads alternated, a thread's
  // processor would prefetch what another thread reads. A thread without chunks left takes from the ends of other
  // shares.
  template <class Fn>
  void for_each_chunk(int64_t total, int64_t chunk, Fn f) {
    if (count == 1) {
      if (total > 0) f((int64_t)0, total);
      return;
    }
    while (total / chunk >= kMaxChunks) chunk *= 2;
    int64_t chunks = (total + chunk - 1) / chunk, even = chunks / shares_, more = chunks % shares_;
    int64_t *chunks_done = &state_->shares[id % shares_].chunks_done;
    chunks_planned_ += chunks, section_++;
    for (int i = 0, s = id % shares_; i < shares_; i++, s = s + 1 < shares_ ? s + 1 : 0) {
      int64_t begin = s * even + min64(s, more), share_chunks = even + (s < more), n;
      while ((n = take_chunk(state_->shares[s].taken, share_chunks, i == 0)) >= 0) {
        int64_t first = (begin + n) * chunk;
        f(first, min64(first + chunk, total));
        __atomic_fetch_add(chunks_done, 1, __ATOMIC_RELEASE);
        yield_core();
      }
    }
  }

  // The number, from 0, of the chunk that this thread takes first when `for_each_chunk` has `chunks` chunks, unless
  // another thread has taken it already; `chunks` if this thread's share is empty.
  int64_t first_chunk(int64_t chunks) const {
    int64_t s = id % shares_;
    return s * (chunks / shares_) + min64(s, chunks % shares_);
  }

  // Returns when all chunks of the preceding calls are done and their results are visible to this thread. It waits for
  // work, not for threads: a thread that lost its core between two chunks delays no other, and finds later that all is
  // done.
  void barrier() {
    if (count == 1) return;
    int i = 0;
    for (; chunks_done() < chunks_planned_; i++) {
      if (i < kSpinsBeforeYield)
        _mm_pause();
      else
        sched_yield();
    }
    if (i > kSpinsBeforeYield) yielded_ns_ = now_ns();  // other processes have had the core meanwhile
  }

 private:
  static constexpr int kBits = 20;
  static constexpr int64_t kMaxChunks = (int64_t)1 << kBits;

  // Takes one chunk of a share that has `share_chunks` chunks and marks it in the share's `taken`, atomically.
  // `from_beginning` (the thread's own share): the first chunk left; else (another share) the last one left. Returns
  // the chunk's number in the share; -1 if none is left or if another thread is in a later section already.
  int64_t take_chunk(uint64_t &taken, int64_t share_chunks, bool from_beginning) const {
    uint64_t now = __atomic_load_n(&taken, __ATOMIC_RELAXED);
    while (true) {
      uint64_t section = now >> 2 * kBits, base = section == section_ ? now : section_ << 2 * kBits;
      int64_t first = base >> kBits & (kMaxChunks - 1), last = base & (kMaxChunks - 1);
      if (section > section_ || first + last >= share_chunks) return -1;
      uint64_t next = base + (from_beginning ? (uint64_t)kMaxChunks : 1);
      if (__atomic_compare_exchange_n(&taken, &now, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return from_beginning ? first : share_chunks - 1 - last;
    }
  }

  // Yields the core if this thread has computed for `yield_after_ns` since it last did; called after each chunk, while
  // this thread holds none. If it was away for more than kPreemptedNs, it also moves off a core that it shares.
  void yield_core() {
    uint64_t cycles = __rdtsc();
    if (cycles - checked_cycles_ < kClockCheckCycles) return;
    checked_cycles_ = cycles;
    int64_t now = now_ns();
    if (now - yielded_ns_ < yield_after_ns()) return;
    sched_yield();
    yielded_ns_ = now_ns();
    publish_core(current_core());
    if (yielded_ns_ - now > kPreemptedNs) leave_shared_core();
  }

  // Writes `core` to this thread's share, if this thread is the share's first one.
  void publish_core(int core) {
    if (id < shares_) __atomic_store_n(&state_->shares[id].core, core, __ATOMIC_RELAXED);
  }

  // If the first thread of another share last ran on this thread's core: moves this thread to a core on which none of
  // the shares' first threads ran last, if there is one.
  void leave_shared_core() {
    int cores[kMaxShares], mine = current_core(), sharing = 0;
    for (int s = 0; s < shares_; s++) {
      cores[s] = s == id ? mine : __atomic_load_n(&state_->shares[s].core, __ATOMIC_RELAXED);
      sharing += s != id && mine >= 0 && cores[s] == mine;
    }
    if (sharing && move_off_cores(cores, shares_)) publish_core(current_core());
  }

  // Chunks that all threads have finished since the call began, in all sections.
  int64_t chunks_done() const {
    int64_t all = 0;
    for (int s = 0; s < shares_; s++) all += __atomic_load_n(&state_->shares[s].chunks_done, __ATOMIC_ACQUIRE);
    return all;
  }

  TeamState *state_;
  int shares_;
  int64_t chunks_planned_ = 0;
  uint64_t section_ = 0, checked_cycles_ = 0;
  int64_t yielded_ns_ = 0;  // when the core was yielded last
};

// The number of threads of a team that this thread would lead. OpenMP keeps that number per thread, and torch sets it
// in a thread only when torch is first used there; so the first call in each thread calls the function of
// `ip_set_thread_init`.
inline int team_size() {
  static thread_local bool is_initialized = false;
  if (!is_initialized) {
    is_initialized = true;
    if (ip_thread_init) ip_thread_init();
  }
  return omp_get_max_threads();
}

// Runs f(team) once on every thread of the team and returns when all have finished; then all results are complete.
// `work` estimates bytes read or multiplications: below 16384, or inside another parallel region, f runs on this thread
// alone with team.count 1.
template <class Fn>
inline void run_on_team(int64_t work, Fn f) {
  // One thread does a few microseconds of work sooner than it wakes another.
  int threads = work < 16384 ? 1 : team_size();
  if (threads == 1 || omp_in_parallel()) {
    Team team(nullptr, 0, 1);
    f(team);
    return;
  }
  TeamState state;
  state.start_ns = now_ns();
#pragma omp parallel num_threads(threads)
  {
    Team team(&state, omp_get_thread_num(), omp_get_num_threads());
    f(team);
  }
}

}  // namespace
