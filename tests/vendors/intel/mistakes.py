"""Mistakes that are easily made with vllm-xpu-kernels' operators."""

from __future__ import annotations

import torch

from inferplane.kernels.fused import vllm_kernels
from inferplane_xpu.intel.kernels import attention, fp8_cache, mla, moe, products
from tests.vendors.mistakes import Mistake, at, swap


def whole(batch, groups=1):
    """Sequences as they are, declared to be single tokens."""
    return attention.AttentionSequences(batch.query_start, batch.seq_lens, batch.block_tables, 1, batch.max_seq_tokens)


ROWS, WRITE, FLASH = (vllm_kernels, "vllm"), (vllm_kernels, "cache_ops"), (attention, "flash")
FP8_WRITE = (fp8_cache, "cache_ops")
MISTAKES = [
    Mistake("K and V exchanged", WRITE, "reshape_and_cache_flash", swap(0, 1), "vllm_xpu:kv_write", "decode", ""),
    Mistake("slots in int32", WRITE, "reshape_and_cache_flash", at(4, lambda s: s.int()),
            "vllm_xpu:kv_write", "decode", "slot_mapping is torch.int64"),
    Mistake("heads before tokens in blocks", WRITE, "reshape_and_cache_flash", at(2, lambda c: c.transpose(1, 2)),
            "vllm_xpu:kv_write", "decode", "key_cache has shape"),
    Mistake("a cache in FP8 requested", WRITE, "reshape_and_cache_flash", at(5, lambda s: "fp8"),
            "vllm_xpu:kv_write", "decode", "a cache in 'fp8'"),
    Mistake("a cache in int8 requested", WRITE, "reshape_and_cache_flash", at(5, lambda s: "int8"),
            "vllm_xpu:kv_write", "decode", "Unsupported data type of kv cache"),
    Mistake("FP8 written as it is", FP8_WRITE, "reshape_and_cache_flash", at(5, lambda s: "auto"),
            "vllm_xpu:kv_write_fp8", "decode", "have one dtype"),
    Mistake("FP8 written with the largest entry as its scale", FP8_WRITE, "reshape_and_cache_flash",
            at(7, lambda s: s * 3), "vllm_xpu:kv_write_fp8", "decode", ""),
    Mistake("scales a token", FP8_WRITE, "concat_and_cache_mla", at(5, lambda s: s.expand(3).contiguous()),
            "vllm_xpu:mla_kv_write_fp8", "v3_decode", "is one float32"),
    Mistake("FP8 read without scales", FLASH, "varlen_fwd", at(14, lambda s: None),
            "vllm_xpu:attention_few_fp8", "decode", "requires both k_scale and v_scale"),
    Mistake("FP8 of a prompt read without scales", FLASH, "varlen_fwd", at(15, lambda s: None),
            "vllm_xpu:attention_many_fp8", "prefill_d128", "requires both k_scale and v_scale"),
    Mistake("scales in bfloat16", FLASH, "varlen_fwd", at(14, lambda s: s.bfloat16()),
            "vllm_xpu:attention_few_fp8", "decode", "is one float32"),
    Mistake("another scale for keys than they were written with", FLASH, "varlen_fwd", at(14, lambda s: s * 2),
            "vllm_xpu:attention_few_fp8", "decode", ""),
    Mistake("another scale for latents as values", FLASH, "varlen_fwd", at(15, lambda s: s * 2),
            "vllm_xpu:mla_absorbed_fp8", "v3_heads", ""),
    Mistake("rows of latents that name the wrong sequence", FP8_WRITE, "gather_and_maybe_dequant_cache",
            at(4, torch.zeros_like), "vllm_xpu:mla_expanded_fp8", "scaled", "names the sequence of each row"),
    Mistake("norm and sum exchanged", ROWS, "fused_add_rms_norm", swap(0, 1), "vllm_xpu:add_rms_norm", "t3_d64", ""),
    Mistake("result behind the input", ROWS, "rms_norm", swap(0, 1), "vllm_xpu:rms_norm", "t3_d64", ""),
    Mistake("sines before cosines", ROWS, "rotary_embedding", at(4, lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
            "vllm_xpu:rope", "half", ""),
    Mistake("the other pairs", ROWS, "rotary_embedding", at(5, lambda neox: not neox), "vllm_xpu:rope", "half", ""),
    Mistake("a table in float32", ROWS, "rotary_embedding", at(4, lambda t: t.float()),
            "vllm_xpu:rope", "half", "have one dtype"),
    Mistake("lengths without the step's own tokens", FLASH, "varlen_fwd", at(6, lambda n: n - 1),
            "vllm_xpu:attention_few", "decode", ""),
    Mistake("lengths of queries, not their sums", FLASH, "varlen_fwd", at(4, lambda s: s.diff(prepend=s[:1])),
            "vllm_xpu:attention_many", "prefill_d128", "running sum"),
    Mistake("a scale of 1", FLASH, "varlen_fwd", at(16, lambda s: 1.0), "vllm_xpu:attention_many", "prefill_d128", ""),
    Mistake("no mask", FLASH, "varlen_fwd", at(19, lambda c: False), "vllm_xpu:attention_many", "prefill_d128", ""),
    Mistake("a window of one token more", FLASH, "varlen_fwd", at(20, lambda n: n + 1),
            "vllm_xpu:attention_few", "window_decode", ""),
    Mistake("the longest sequence too short", FLASH, "varlen_fwd", at(11, lambda n: 1),
            "vllm_xpu:attention_many", "prefill_d128", "max_seqlen_k is at least"),
    Mistake("sinks forgotten", FLASH, "varlen_fwd", at(17, lambda s: None), "vllm_xpu:attention_many",
            "sinks_window", ""),
    Mistake("sinks in float32", FLASH, "varlen_fwd", at(17, lambda s: s.float()), "vllm_xpu:attention_few",
            "sinks_decode", "have one dtype"),
    Mistake("the other activation's limit", (moe, "vllm"), "swigluoai_and_mul", at(3, lambda limit: 7.0),
            "vllm_xpu:clamped_experts", "t1", ""),
    Mistake("no biases", (moe, "xpu"), "cutlass_grouped_gemm_interface", at(4, lambda b: None),
            "vllm_xpu:clamped_experts", "t1", ""),
    Mistake("experts' weights turned", (moe, "xpu"), "cutlass_grouped_gemm_interface",
            at(2, lambda b: b.transpose(1, 2).contiguous()), "vllm_xpu:moe_experts", "t13", "ptr_B is"),
    Mistake("counts that begin anywhere", (moe, "moe"), "remap_hidden_states", at(5, lambda n: n + 1),
            "vllm_xpu:moe_experts", "t13", "begins with zeros"),
    Mistake("rows summed without their weights", (moe, "moe"), "moe_gather", at(2, torch.ones_like),
            "vllm_xpu:moe_experts", "t13", ""),
    Mistake("halves of int4 bytes exchanged", (moe, "xpu"), "cutlass_grouped_gemm_interface",
            at(2, lambda b: ((b & 15) << 4) | ((b >> 4) & 15)), "vllm_xpu:moe_experts_int4", "int4_group", ""),
    Mistake("scores by another function", (moe, "moe"), "grouped_topk", at(7, lambda f: 1 - f),
            "vllm_xpu:moe_route_grouped", "v3", ""),
    Mistake("int4 words with N the fastest", (products, "xpu"), "int4_gemm_w4a16", at(1, lambda b: b.contiguous()),
            "vllm_xpu:linear_int4", "int4_group", "NT format"),
    Mistake("scales a row of outputs", (products, "xpu"), "int4_gemm_w4a16", at(3, lambda s: s.t().contiguous()),
            "vllm_xpu:linear_int4", "int4_group", "B_scale has shape"),
    Mistake("zero points of 0", (products, "xpu"), "int4_gemm_w4a16", at(4, lambda z: z * 0),
            "vllm_xpu:linear_int4", "int4_group", ""),
    Mistake("zero points of torch's in bytes without sign", (products, "aten"),
            "_weight_int4pack_mm_with_scales_and_zeros", at(4, lambda z: z.view(torch.uint8)),
            "torch_xpu:linear_int4pack", "int4_group", "qZeros is torch.int8"),
    Mistake("blocks of an FP8 weight turned", (products, "xpu"), "fp8_gemm_w8a16", at(2, lambda s: s.t().contiguous()),
            "vllm_xpu:linear_fp8", "fp8_blocks", ""),
    Mistake("activations quantized by rows under blocks", (products, "xpu"), "fp8_gemm",
            at(3, lambda s: s[:, :1].contiguous()), "vllm_xpu:linear_fp8_act", "fp8_act", "of the weight"),
    Mistake("drafts left together", (attention, "single_tokens"), None, whole,
            "vllm_xpu:attention_few", "drafts", "max_seqlen_q is at least"),
    Mistake("all heads of a token as one sequence of latents", (mla, "LATENT_HEADS"), None, 16,
            "vllm_xpu:mla_absorbed", "v3_heads", "not compiled"),
    Mistake("as many experts a token as there are", (moe, "_pad_to_compiled"), None,
            lambda weights, ids: (weights, ids), "vllm_xpu:moe_experts", "t13", "Unsupported TopK value 3"),
]  # fmt: skip
