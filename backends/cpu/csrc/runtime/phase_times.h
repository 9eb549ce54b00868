// Time spent in each phase of a call of decoder layers. The calling thread counts, waiting included, and only after
// `ip_time_phases` has received an array; otherwise a phase costs one comparison. The layer kernels (model/) call it.
#pragma once
#include <time.h>

#include "runtime/thread_team.h"

extern int64_t *ip_phase_ns;  // api.cpp; nanoseconds by phase, or null: not measured

namespace {

// The phases, in the order of the names that `ip_time_phases` returns.
enum LayerPhase { kBegin, kAttnNorm, kProject, kRopeCache, kAttend, kOut, kMlpNorm, kMlp, kDown, kEmbed, kNorm, kHead };

// Adds the time of each phase to `ip_phase_ns`. `counts`: true for the timer of the calling thread (team.id 0); a timer
// with false, and every timer while `ip_phase_ns` is null, measures nothing.
class PhaseTimer {
 public:
  explicit PhaseTimer(bool counts) : ns_(counts ? ip_phase_ns : nullptr), last_(ns_ ? now() : 0) {}
  // Adds the time since the previous call (or the constructor) to `phase`.
  void end_phase(LayerPhase phase) {
    if (!ns_) return;
    int64_t t = now();
    ns_[phase] += t - last_;
    last_ = t;
  }

 private:
  // The monotonic clock, in nanoseconds.
  static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
  }
  int64_t *ns_, last_;
};

}  // namespace
