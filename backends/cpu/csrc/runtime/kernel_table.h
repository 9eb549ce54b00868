// The table of kernels of one instruction set. isa_entries.h fills one table per instruction set, from the same sources
// compiled with other flags; api.cpp picks a table and calls through it. A field has the signature of the function
// `ip_<field>` of inferplane_cpu.h.
#pragma once
#include "inferplane_cpu.h"

struct KernelTable {
  const char *name;
  decltype(&ip_linear) linear;
  decltype(&ip_linear_prefill) linear_prefill;
  decltype(&ip_dequantize_rows) dequantize_rows;
  decltype(&ip_gather_rows) gather_rows;
  decltype(&ip_scale_logits) scale_logits;
  decltype(&ip_rms_norm) rms_norm;
  decltype(&ip_activation_mul) activation_mul;
  decltype(&ip_rope) rope;
  decltype(&ip_attention) attention;
  decltype(&ip_attention_prefill) attention_prefill;
  decltype(&ip_mla) mla;
  decltype(&ip_moe) moe;
  decltype(&ip_route_experts) route_experts;
  decltype(&ip_decoder_layer) decoder_layer;
  decltype(&ip_decoder_layers) decoder_layers;
  decltype(&ip_model_step) model_step;
  decltype(&ip_sample) sample;
  decltype(&ip_read_memory) read_memory;
  decltype(&ip_causal_conv1d) causal_conv1d;
  decltype(&ip_delta_rule_gates) delta_rule_gates;
  decltype(&ip_gated_delta_rule) gated_delta_rule;
  decltype(&ip_gated_norm) gated_norm;
  decltype(&ip_selective_scan) selective_scan;
  decltype(&ip_recurrent_block) recurrent_block;
  decltype(&ip_index_select) index_select;
  decltype(&ip_sparse_mla) sparse_mla;
  decltype(&ip_expert_weights) expert_weights;
  decltype(&ip_hyper_pre) hyper_pre;
  decltype(&ip_hyper_post) hyper_post;
  decltype(&ip_sinkhorn) sinkhorn;
};

extern const KernelTable table_avx2, table_avx512, table_avx512_bf16, table_amx;
