"""Mistakes that are easily made with torch-npu's operators, by the series on which they are made."""

from __future__ import annotations

import torch

from inferplane_npu import graphs, kvcache
from inferplane_npu.kernels import (
    attention,
    attention_int8,
    basic,
    hyper,
    mla,
    moe,
    quant,
    recurrent,
    sparse,
    sparse_blocks,
)
from inferplane_npu.kvcache import NpuKV
from tests.vendors.mistakes import Mistake, at, by, swap, with_
from tests.vendors.npu import chip

SINKS = "npu_fused_infer_attention_score_v2"
TOKENS, CHUNKS, CONVOLUTION = "npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule", "npu_fused_causal_conv1d"
FUSED, SCATTER, GROUPED = "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_grouped_matmul"


def steps(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values)]


def sums(values: list[int]) -> list[int]:
    return torch.tensor(values).cumsum(0).tolist()


def wider_window(real, *args, **kwargs):
    wider = {"pre_tokens": kwargs["pre_tokens"] + 1} if kwargs.get("sparse_mode") == 4 else {}
    return real(*args, **{**kwargs, **wider})


def call_by_name(real, x):
    return real(x=x)


def other_result(real, *args):
    y, rstd, s = real(*args)
    return y, s, rstd.expand_as(y).to(y.dtype)


def swap_halves(real, x):
    return real(torch.cat(x.chunk(2, -1)[::-1], -1))


def heads_first(real, k, v, k_cache, v_cache, slots, **kwargs):
    real(k, v, k_cache.transpose(1, 2), v_cache.transpose(1, 2), slots, **kwargs)


def ragged(real, q, *args, **kwargs):
    return real(q.flatten(0, 1), *args, **{**kwargs, "input_layout": "TND"})


def pack_by_rows(real, weight):
    return real(weight.t().contiguous()).t().contiguous()


def exchange_scales(real, *args, **kwargs):
    key, value = kwargs["key_antiquant_scale"], kwargs["value_antiquant_scale"]
    return real(*args, **{**kwargs, "key_antiquant_scale": value, "value_antiquant_scale": key})


def columns_first(real, rows, weights, **kwargs):
    return real(rows, [w.transpose(1, 2).contiguous() for w in weights], **kwargs)


def ragged_int8(real, q, *args, **kwargs):
    lens = kwargs["actual_seq_lengths_kv"]
    return real(
        q[:, 0], *args, **{**kwargs, "input_layout": "TND", "actual_seq_lengths": list(range(1, len(lens) + 1))}
    )


def plain_entries(real, x):
    return x, real(x)[1]


def transpose_columns(weight):
    return weight.t().contiguous()


RAGGED, BY_SEQUENCE = "torch_npu:attention_ragged", "torch_npu:attention_by_sequence"
INT8, W8A8 = "torch_npu:attention_int8", "torch_npu:moe_experts_w8a8"
ATTENTION, GRAPHS, CACHE = (attention, "npu"), (graphs, "npu"), (kvcache, "npu")
ROWS, LATENT, EXPERTS, PRODUCTS = (basic, "npu"), (mla, "npu"), (moe, "npu"), (quant, "npu")
RECURRENCES, INT8_CACHE = (recurrent, "npu"), (attention_int8, "npu")
CHOSEN, BLOCKS, HYPER = (sparse, "npu"), (sparse_blocks, "npu"), (hyper, "npu")
INDEXER, QUANT_INDEXER, PROLOGUE = "npu_lightning_indexer", "npu_quant_lightning_indexer", "npu_mla_prolog_v3"
SPARSE, SPARSE_INT8 = "npu_sparse_flash_attention", "npu_kv_quant_sparse_flash_attention"
INDEX_SELECT, INDEXER_INT8 = "torch_npu:index_select", "torch_npu:lightning_indexer_rotated_int8"
MISTAKES = {
    "910b": [
        Mistake("the default cache mode, which is NZ", ATTENTION, SCATTER, with_(cache_mode=None),
                "torch_npu:kv_write", "mixed", "key_cache has shape"),
        Mistake("K and V exchanged", ATTENTION, SCATTER, swap(2, 3), "torch_npu:kv_write", "decode", ""),
        Mistake("blocks of heads first", ATTENTION, SCATTER, heads_first, "torch_npu:kv_write", "decode",
                "must be contiguous"),
        Mistake("query lengths not cumulative", GRAPHS, FUSED, by(actual_seq_lengths=steps), RAGGED, "prefill_d128",
                "cumulative"),
        Mistake("lengths of a paged cache cumulative", GRAPHS, FUSED, by(actual_seq_lengths_kv=sums), RAGGED,
                "prefill_d128", ""),
        Mistake("the default scale, which is 1", GRAPHS, FUSED, with_(scale=None), RAGGED, "decode_d128_mqa", ""),
        Mistake("no mask", GRAPHS, FUSED, with_(sparse_mode=0, atten_mask=None), RAGGED, "prefill_d128", ""),
        Mistake("a mask of queries by keys", GRAPHS, FUSED, by(atten_mask=lambda mask: mask[:77, :142].contiguous()),
                RAGGED, "prefill_d128", "atten_mask is [2048, 2048]"),
        Mistake("a mask with ones where keys are seen", GRAPHS, FUSED, by(atten_mask=lambda mask: 1 - mask), RAGGED,
                "prefill_d128", "1 above the diagonal"),
        Mistake("causal from the upper left corner", GRAPHS, FUSED, with_(sparse_mode=2), RAGGED, "prefill_d128", ""),
        Mistake("another block size", GRAPHS, FUSED, with_(block_size=64), RAGGED, "decode_d128_mqa", "block_size 64"),
        Mistake("KV heads left out", GRAPHS, FUSED, with_(num_key_value_heads=None), RAGGED, "decode_d128_mqa", ""),
        Mistake("a window one token too wide", ATTENTION, FUSED, wider_window, BY_SEQUENCE, "window_prefill", ""),
        Mistake("TND with heads of 64", ATTENTION, FUSED, ragged, BY_SEQUENCE, "prefill", "TND takes heads of 128"),
        Mistake("scales of keys and values exchanged", GRAPHS, FUSED, exchange_scales, INT8, "decode_d128_mqa", ""),
        Mistake("scales of int8 keys left out", GRAPHS, FUSED, with_(key_antiquant_scale=None), INT8, "decode_d128_mqa",
                "int8 keys and values need key_antiquant_scale"),
        Mistake("one mode of int8 for keys alone", GRAPHS, FUSED, with_(value_antiquant_mode=None), INT8,
                "decode_d128_mqa", "antiquant modes (5, 0)"),
        Mistake("scales of tokens by heads", GRAPHS, FUSED, by(key_antiquant_scale=lambda s: s.mT.contiguous()), INT8,
                "decode_d128_mqa", "key_antiquant_scale has shape"),
        Mistake("drafts as longer queries of an int8 cache", GRAPHS, FUSED, ragged_int8, INT8, "decode_d128_mqa",
                "for single queries"),
        Mistake("int8 entries written as bytes of bfloat16", INT8_CACHE, "npu_dynamic_quant", plain_entries,
                "torch_npu:kv_write_int8", "decode", "key, value and caches have one dtype"),
        Mistake("the rotated part of the key forgotten", GRAPHS, FUSED, with_(key_rope=None),
                "torch_npu:mla_absorbed", "v3_dims", "come together"),
        Mistake("dense lengths not cumulative", LATENT, FUSED, by(actual_seq_lengths_kv=lambda n: [1, *steps(n)]),
                "torch_npu:mla_expanded", "v3_dims", "TND needs lengths"),
        Mistake("no output dtype, so int8", PRODUCTS, "npu_quant_matmul", with_(output_dtype=None),
                "torch_npu:linear_w8a8", "int8_act", "int8"),
        Mistake("a keyword that only the page has", PRODUCTS, "npu_dynamic_quant", call_by_name,
                "torch_npu:linear_w8a8", "int8_act", "missing value for argument 'input'"),
        Mistake("scales in float32", PRODUCTS, "npu_weight_quant_batchmatmul", at(2, lambda s: s.float()),
                "torch_npu:linear_w8a16", "int8_row", "have one dtype"),
        Mistake("the group size left out", PRODUCTS, "npu_weight_quant_batchmatmul", lambda real, *a: real(*a[:7]),
                "torch_npu:linear_w4a16", "int4_group", "a scale a column"),
        Mistake("int4 packed along the wrong dimension", PRODUCTS, "npu_convert_weight_to_int4pack", pack_by_rows,
                "torch_npu:linear_w4a16", "int4_group", ""),
        Mistake("experts' weights turned", EXPERTS, GROUPED, columns_first, "torch_npu:moe_experts", "t13",
                "weight [E, K, N]"),
        Mistake("scales of experts in float32", EXPERTS, GROUPED, by(scale=lambda s: [s[0].float()]), W8A8, "int8_row",
                "for a result of torch.bfloat16"),
        Mistake("no output dtype, so that of int8", EXPERTS, GROUPED, with_(output_dtype=None), W8A8, "int8_row",
                "without output_dtype"),
        Mistake("scales of tokens left out", EXPERTS, GROUPED, with_(per_token_scale=None), W8A8, "int8_row",
                "have scale and per_token_scale"),
        Mistake("counts where sums are expected", EXPERTS, GROUPED, with_(group_list_type=0), "torch_npu:moe_experts",
                "t13", "group_list adds up"),
        Mistake("counts not requested", EXPERTS, "npu_moe_init_routing_v2", with_(expert_tokens_num_flag=False),
                "torch_npu:moe_experts", "t13", "group_list is an int64 tensor"),
        Mistake("groups judged by their best expert", EXPERTS, "npu_moe_gating_top_k", with_(group_select_mode=0),
                "torch_npu:moe_route", "v3", ""),
        Mistake("the sum taken for the second result", ROWS, "npu_add_rms_norm", other_result,
                "torch_npu:add_rms_norm", "t3_d64", ""),
        Mistake("cosines and sines exchanged", ROWS, "npu_rotary_mul", swap(1, 2), "torch_npu:rope", "half", ""),
        Mistake("the default pairs, which are halves", ROWS, "npu_rotary_mul",
                lambda real, x, c, s, mode: real(x, c, s), "torch_npu:rope_interleaved", "interleaved", ""),
        Mistake("sinks forgotten", ATTENTION, SINKS, with_(learnable_sink=None), "torch_npu:attention_with_sinks",
                "sinks_decode", "TND takes heads of 128"),
        Mistake("a window one token too wide, with sinks", ATTENTION, SINKS, wider_window,
                "torch_npu:attention_with_sinks", "sinks_window", ""),
        Mistake("gates and ups in halves", EXPERTS, "npu_clipped_swiglu", with_(interleaved=False),
                "torch_npu:clamped_experts", "t13", ""),
        Mistake("a clamp without the 1 that is added", EXPERTS, "npu_clipped_swiglu", with_(bias=0.0),
                "torch_npu:clamped_experts", "t13", ""),
        Mistake("biases in bfloat16", EXPERTS, GROUPED, by(bias=lambda b: [b[0].bfloat16()]),
                "torch_npu:clamped_experts", "t13", "bias is torch.float32"),
        Mistake("one state for all tokens", RECURRENCES, TOKENS, by(ssm_state_indices=lambda i: i * 0),
                "torch_npu:gated_delta_rule_bf16", "d128_decode", ""),
        Mistake("what remains of a state, not its logarithm", RECURRENCES, TOKENS, by(g=lambda g: g.exp()),
                "torch_npu:gated_delta_rule_bf16", "d128_decode", ""),
        Mistake("gate and up exchanged", ROWS, "npu_swiglu", swap_halves, "torch_npu:silu_mul", "t3_i64", ""),
        Mistake("query lengths of the indexer not cumulative", CHOSEN, INDEXER,
                by(actual_seq_lengths_query=lambda n: n.diff(prepend=n[:1] * 0)), INDEX_SELECT, "v32_decode",
                "last length of queries"),
        Mistake("lengths without the step's own token", CHOSEN, SPARSE, by(actual_seq_lengths_kv=lambda n: n - 1),
                "torch_npu:sparse_mla_absorbed", "v32_heads", "positions outside"),
        Mistake("the default number of chosen tokens", CHOSEN, INDEXER, with_(sparse_count=None), INDEX_SELECT,
                "v32_decode", ""),
        Mistake("weights of heads forgotten", CHOSEN, INDEXER, at(2, torch.ones_like), INDEX_SELECT, "v32_decode", ""),
        Mistake("what an indexer found taken as it is", (sparse, "complete"), None,
                lambda found, batch, top: found[:, 0], INDEX_SELECT, "v32_decode", ""),
        Mistake("index keys into neighbouring slots", CHOSEN, "npu_scatter_nd_update_", at(1, lambda i: i ^ 1),
                "torch_npu:index_key_write", "v32_decode", ""),
        Mistake("the default mode of sparse attention", CHOSEN, SPARSE, with_(attention_mode=None),
                "torch_npu:sparse_mla_absorbed", "v32_dims", "attention_mode is 2"),
        Mistake("rotated parts of chosen keys in another order", (sparse, "even_first"), None, lambda x: x,
                "torch_npu:sparse_mla_absorbed", "v32_dims", "error"),
        Mistake("padding before chosen tokens", CHOSEN, SPARSE, at(3, lambda i: i.flip(-1).contiguous()),
                "torch_npu:sparse_mla_absorbed", "v32_heads", "stands behind what is"),
        Mistake("tiles of half the size", CHOSEN, SPARSE_INT8, with_(tile_size=64),
                "torch_npu:sparse_mla_absorbed_int8", "v32_dims", "tiles of 128"),
        Mistake("a mode of scales for keys alone", CHOSEN, SPARSE_INT8, at(6, lambda mode: 0),
                "torch_npu:sparse_mla_absorbed_int8", "v32_dims", "modes 2, 2 and 1"),
        Mistake("factors of heads in float32", BLOCKS, QUANT_INDEXER, at(2, torch.Tensor.float), INDEXER_INT8,
                "v32_spread", "weights are float16"),
        Mistake("scales of index keys in float32", BLOCKS, QUANT_INDEXER, at(4, torch.Tensor.float), INDEXER_INT8,
                "v32_spread", "keys are float16"),
        Mistake("rotation by no matrix of the width", BLOCKS, "npu_rotate_quant", at(1, lambda m: m[:64]),
                INDEXER_INT8, "v32_spread", "rotation has shape"),
        Mistake("a prologue's weights turned", BLOCKS, PROLOGUE, at(1, transpose_columns),
                "torch_npu:sparse_mla_block_128", "v32_rank", "must have the NZ format"),
        Mistake("a prologue's cosines and sines exchanged", BLOCKS, PROLOGUE, swap(7, 8),
                "torch_npu:sparse_mla_block_128", "v32_rank", ""),
        Mistake("no normed query requested", BLOCKS, PROLOGUE, with_(query_norm_flag=False),
                "torch_npu:sparse_mla_block_128", "v32_rank", "is not emulated"),
        Mistake("padding that reaches the operator", (NpuKV, "real"), None, lambda kv, slots: slots,
                "torch_npu:kv_write", "decode", "lies in [0, "),
        Mistake("rotated parts in different orders", (mla, "even_first"), None, lambda x: x, "torch_npu:mla_absorbed",
                "v3_dims", "error"),
    ],
    "310p": [
        Mistake("a cache of the NZ shape without its format", CACHE, "npu_format_cast", lambda real, t, format: t,
                "atb:kv_write_nz", "decode", "must have the NZ format"),
        Mistake("positions rotated in three dimensions", ROWS, "npu_rotary_mul",
                lambda real, x, c, s: real(x[0], c[0], s[0])[None], "torch_npu:rope_128", "strided", "4 dimensions"),
    ],
    "950": [
        Mistake("activations in int8 beside weights in FP8", PRODUCTS, "npu_dynamic_quant", with_(dst_type=None),
                "torch_npu:linear_fp8", "fp8_row_act", "x1 and x2 are int8"),
        Mistake("experts' activations in int8 beside FP8", EXPERTS, "npu_dynamic_quant", with_(dst_type=torch.int8),
                "torch_npu:moe_experts_fp8", "fp8_row", "x and weight have one dtype"),
        Mistake("states of keys by values", RECURRENCES, CHUNKS, by(initial_state=lambda s: s.mT.contiguous()),
                "torch_npu:gated_delta_rule", "d128", ""),
        Mistake("taps by channels", RECURRENCES, CONVOLUTION, at(1, lambda w: w.t().contiguous()),
                "torch_npu:causal_conv1d", "c128_mixed", "weight has shape"),
        Mistake("states without spare rows", RECURRENCES, CONVOLUTION, at(2, lambda s: s[:, -2:].contiguous()),
                "torch_npu:causal_conv1d", "c128_decode", "states of more than"),
        Mistake("a copy written over, not the input", RECURRENCES, f"{CONVOLUTION}_v2",
                at(0, lambda x: x.clone()), "torch_npu:short_conv", "c128_mixed", ""),
        Mistake("no count of the tokens before", RECURRENCES, CONVOLUTION, by(num_computed_tokens=lambda n: n * 0),
                "torch_npu:causal_conv1d", "c128_mixed", ""),
        Mistake("weights of heads in float32", CHOSEN, INDEXER, at(2, torch.Tensor.float),
                "torch_npu:index_select_half", "v32_decode", "weights in torch.float32"),
        Mistake("streams mixed by the transposed matrix", HYPER, "npu_mhc_post", at(1, lambda mix: mix.mT),
                "torch_npu:hyper_post", "t13", ""),
        Mistake("scales and biases of streams exchanged", HYPER, "npu_mhc_pre", swap(2, 3),
                "torch_npu:hyper_collapse", "t13", "alpha has 2 or 3"),
        Mistake("one iteration alone", HYPER, "npu_mhc_sinkhorn", with_(num_iters=1), "torch_npu:hyper_pre", "t13",
                ""),
        Mistake("no output dtype, in FP8", PRODUCTS, "npu_quant_matmul", with_(output_dtype=None),
                "torch_npu:linear_fp8", "fp8_row_act", "not torch.int8"),
    ],
}[chip.ARCH]  # fmt: skip
