// What a call of layers spends on each of its parts, counted by the thread that made it while somebody asks for it.
#pragma once
#include <time.h>

#include "team.h"

extern int64_t *ip_phase_ns;  // api.cpp; null: nobody asks

namespace {

// In the order of `ip_time_phases`.
enum Phase { kBegin, kAttnNorm, kProject, kEnter, kAttend, kOut, kMlpNorm, kMlp, kDown, kEmbed, kNorm, kHead };

class Phases {
 public:
  explicit Phases(bool counts) : ns_(counts ? ip_phase_ns : nullptr), last_(ns_ ? now() : 0) {}
  // All since the one before belongs to `phase`.
  void end(Phase phase) {
    if (!ns_) return;
    int64_t t = now();
    ns_[phase] += t - last_;
    last_ = t;
  }

 private:
  static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
  }
  int64_t *ns_, last_;
};

}  // namespace
