// What each instruction set provides; the same functions as in inferplane_cpu.h, compiled once for each.
#pragma once
#include "inferplane_cpu.h"

struct Table {
  const char *name;
  decltype(&ip_linear) linear;
  decltype(&ip_linear_prefill) linear_many;
  decltype(&ip_dequantize_rows) expand;
  decltype(&ip_gather_rows) rows;
  decltype(&ip_rms_norm) rms_norm;
  decltype(&ip_silu_mul) silu_mul;
  decltype(&ip_rope) rope;
  decltype(&ip_attention) attention;
  decltype(&ip_attention_prefill) attention_many;
  decltype(&ip_mla) mla;
  decltype(&ip_moe) moe;
  decltype(&ip_route_experts) route;
  decltype(&ip_decoder_layer) decoder_layer;
  decltype(&ip_decoder_layers) decoder_layers;
  decltype(&ip_model_step) model_step;
  decltype(&ip_sample) sample;
  decltype(&ip_read_memory) read;
};

extern const Table table_avx2, table_avx512, table_avx512_bf16, table_amx;
