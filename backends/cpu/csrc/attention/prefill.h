// Products and attention of many tokens, by what the instruction set has: tiles of bf16 pairs, or float32. AVX-512 without
// products of pairs has neither: oneDNN's serve there.
#pragma once

#if defined(__AVX512BF16__)
#define INFERPLANE_MANY
#include "attend_many.h"
#elif !defined(__AVX512F__)
#define INFERPLANE_MANY
#include "attend_floats.h"
#endif
