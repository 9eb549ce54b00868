// Logits times a factor and softly capped, as models define it. `ip_model_step` calls it for the logits that a thread
// has just computed, `ip_scale_logits` for all.
#pragma once
#include "runtime/vectors.h"

namespace {

// logits[0 .. n], changed in place. By the calling thread.
inline void scale_logits(const ip_logit_scale &scale, float *logits, int64_t n) {
  if (scale.factor == 1.0f && scale.cap == 0.0f) return;
  for (int64_t c = 0; c < n; c += kRegisterLanes) {
    Floats s = load_floats(logits + c, n - c) * scale.factor;
    store_floats(logits + c, scale.cap != 0.0f ? soft_cap(s, scale.cap) : s, n - c);
  }
}

}  // namespace
