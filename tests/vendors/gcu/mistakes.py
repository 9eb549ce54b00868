"""Mistakes that are easily made with vllm-gcu's operators."""

from __future__ import annotations

import sys
from functools import partial

import torch

from inferplane.kernels.fused import vllm_kernels
from inferplane_gcu.kernels import attention_int8, int4, mla, moe, products
from tests.vendors.mistakes import Change, Mistake, at, swap, with_


def flash(words: str, change: Change, caught: str) -> Mistake:
    """A wrong call of Enflame's flash attention, in the module that has it."""
    where = sys.modules["flash_attn.vllm_flash_attn"], "flash_attn_varlen_func"
    wrong = partial(change, getattr(*where))
    return Mistake(words, where, None, wrong, "flash_attn:attention", "prefill_d128", caught)


def neighbours(data: torch.Tensor) -> torch.Tensor:
    """Bytes `[K / 2, N]` as they would be with columns 2 j and 2 j + 1 of a weight in one."""
    parts = data.unflatten(0, (-1, 64))
    entries = torch.cat((parts & 15, parts >> 4), 1).flatten(0, 1)
    return entries[::2] | entries[1::2] << 4


INT4 = (int4, "vllm")
INT8_WRITE, INT8_READ = (attention_int8, "cache_ops"), (attention_int8, "vllm")
ROWS, WRITE = (vllm_kernels, "vllm"), (vllm_kernels, "cache_ops")
MISTAKES = [
    Mistake("K and V exchanged", WRITE, "reshape_and_cache_flash", swap(0, 1),
            "vllm_gcu:kv_write", "decode", ""),
    Mistake("slots in int32", WRITE, "reshape_and_cache_flash", at(4, lambda s: s.int()),
            "vllm_gcu:kv_write", "decode", "slot_mapping is torch.int64"),
    Mistake("a cache in int8 requested", WRITE, "reshape_and_cache_flash", at(5, lambda s: "int8"),
            "vllm_gcu:kv_write", "decode", "kv_cache_dtype"),
    Mistake("blocks of heads first", WRITE, "reshape_and_cache_flash",
            at(2, lambda c: c.transpose(1, 2)), "vllm_gcu:kv_write", "decode", "must be contiguous"),
    Mistake("the inverse of a scale", INT8_WRITE, "reshape_and_cache", at(7, lambda s: 1 / s),
            "vllm_gcu:kv_write_int8", "decode", ""),
    Mistake("a zero point of unsigned entries", INT8_READ, "paged_attention_v1", at(20, lambda zero: 128.0),
            "vllm_gcu:attention_few_int8", "decode", ""),
    Mistake("a cache in 16 bits named", INT8_READ, "paged_attention_v1", at(11, lambda name: "auto"),
            "vllm_gcu:attention_few_int8", "decode", "kv_cache_dtype"),
    Mistake("query heads for KV heads", INT8_READ, "paged_attention_v1", at(4, lambda heads: 2 * heads),
            "vllm_gcu:attention_few_int8", "decode", ""),
    Mistake("values as they are written", INT8_READ, "paged_attention_v1",
            at(3, lambda v: v.transpose(2, 3).contiguous()),
            "vllm_gcu:attention_few_int8", "decode_d128_mqa", "value_cache has shape"),
    Mistake("norm and sum exchanged", ROWS, "fused_add_rms_norm", swap(0, 1),
            "vllm_gcu:add_rms_norm", "t3_d64", ""),
    Mistake("result behind the input", ROWS, "rms_norm", swap(0, 1), "vllm_gcu:rms_norm", "t3_d64", ""),
    Mistake("sines before cosines", ROWS, "rotary_embedding", at(4, lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
            "vllm_gcu:rope", "half", ""),
    Mistake("the other pairs", ROWS, "rotary_embedding", at(5, lambda neox: not neox), "vllm_gcu:rope", "half", ""),
    Mistake("a table in float32", ROWS, "rotary_embedding", at(4, lambda t: t.float()),
            "vllm_gcu:rope", "half", "have one dtype"),
    Mistake("weight-only weights turned", (products, "vllm"), "weight_only_quant", at(2, lambda w: w.t().contiguous()),
            "vllm_gcu:linear_w8a16", "int8_row", "input has shape"),
    Mistake("groups of 128", (products, "vllm"), "weight_only_quant", at(5, lambda g: 128),
            "vllm_gcu:linear_w8a16", "int8_row", "group_size 128"),
    Mistake("weights in int8 by rows", (products, "vllm"), "dot_bias_quant", at(2, lambda w: w.t().contiguous()),
            "vllm_gcu:linear_w8a8", "int8_row", "lhs has shape"),
    Mistake("scales of 16 bits", (products, "vllm"), "dot_bias_quant", at(3, lambda s: s.bfloat16()),
            "vllm_gcu:linear_w8a8", "int8_row", "scale is torch.float32"),
    Mistake("activations of 16 bits", (products, "vllm"), "dot_bias_quant", at(1, lambda x: x.bfloat16()),
            "vllm_gcu:linear_w8a8", "int8_row", "lhs is torch.int8"),
    Mistake("one scale for all rows", (products, "vllm"), "dynamic_scaled_int8_quant", at(2, lambda s: s[:1, 0]),
            "vllm_gcu:linear_w8a8", "int8_row", "scales has shape"),
    Mistake("scales of experts as rows", (moe, "vllm"), "fused_moe_quant_kernel",
            at(4, lambda s: s.transpose(1, 2).contiguous()),
            "vllm_gcu:moe_experts_w8a8", "int8_row", "B_scale has shape"),
    Mistake("no scales of activations", (moe, "vllm"), "fused_moe_quant_kernel", at(3, lambda s: None),
            "vllm_gcu:moe_experts_w8a8", "int8_row", "A"),
    Mistake("zero points before their scales", INT4, "gptq_gemm_gcu", swap(2, 3),
            "vllm_gcu:linear_w4a16", "int4_group", ""),
    Mistake("signed entries", INT4, "gptq_gemm_gcu", at(1, lambda w: w ^ 0x88),
            "vllm_gcu:linear_w4a16", "int4_group", ""),
    Mistake("neighbours in one byte", INT4, "gptq_gemm_gcu", at(1, neighbours),
            "vllm_gcu:linear_w4a16", "int4_group", ""),
    Mistake("weights in int4 turned", INT4, "gptq_gemm_gcu", at(1, lambda w: w.t().contiguous()),
            "vllm_gcu:linear_w4a16", "int4_group", "weight has shape"),
    Mistake("zero points of experts left out", (moe, "vllm"), "fused_moe_quant_kernel", at(6, lambda zero: None),
            "vllm_gcu:moe_experts_w4a16", "int4_group", "without zero points"),
    Mistake("ids in int64", (moe, "moe"), "moe_align_block_size", at(0, lambda ids: ids.long()),
            "vllm_gcu:moe_experts", "t13", "topk_ids is torch.int32"),
    Mistake("blocks of 16 pairs", (moe, "vllm"), "fused_moe_kernel", at(10, lambda n: 16),
            "vllm_gcu:moe_experts", "t13", "block_size is 64"),
    Mistake("weights multiplied in twice", (moe, "vllm"), "fused_moe_kernel", at(8, lambda flag: True),
            "vllm_gcu:moe_experts", "t13", ""),
    Mistake("scales in groups", (moe, "vllm"), "fused_moe_quant_kernel", at(5, lambda g: 128),
            "vllm_gcu:moe_experts_w8a16", "int8_row", "gs 128"),
    Mistake("scales in float32", (moe, "vllm"), "fused_moe_quant_kernel", at(4, lambda s: s.float()),
            "vllm_gcu:moe_experts_w8a16", "int8_row", "have one dtype"),
    Mistake("no bias, which is another judgement of groups", (moe, "vllm"), "fused_grouped_topk", at(7, lambda b: None),
            "vllm_gcu:moe_route_grouped", "v3", ""),
    Mistake("lengths counted from the cache's end", (mla, "flashmla"), "fwd_kvcache_mla", at(3, lambda n: n - 1),
            "vllm_gcu:mla_absorbed", "v3_dims", ""),
    flash("a scale of 1", with_(softmax_scale=1.0), ""),
    flash("lengths of queries, not their sums", with_(cu_seqlens_q=torch.tensor([3, 1], dtype=torch.int32)),
          "running sum"),
    flash("another version", with_(fa_version=3), "fa_version is 2"),
    flash("the longest sequence too short", with_(max_seqlen_k=1), "max_seqlen_k is at least"),
    flash("keyword of the cuda build", with_(scheduler_metadata=0), "scheduler_metadata"),
]  # fmt: skip
