// Chooses how products and attention of many tokens are computed: on tiles of bf16 pairs (prefill_tiles.h,
// gemm_tiles.h) if the instruction set has products of pairs, in float32 (prefill_float32.h, gemm_float32.h) on AVX2.
// AVX-512 without products of pairs has neither: there INFERPLANE_PREFILL is not defined, and the caller uses oneDNN.
//
// Both choices define the same names, so that the layers (model/prefill_layer.h) and isa_entries.h are written once:
// `ActivationPanels`, `reserve_panels`, `fill_panel`, `fill_panels`, `num_panels`: activations laid out for a product;
// `gemm_to_rows`: y = x w^T + bias; `gemm_activation_mul`: f(gate) * up, laid out for the next product;
// `attend_prefill`.
#pragma once

#if defined(__AVX512BF16__)
#define INFERPLANE_PREFILL
#include "attention/prefill_tiles.h"
#elif !defined(__AVX512F__)
#define INFERPLANE_PREFILL
#include "attention/prefill_float32.h"
#endif
