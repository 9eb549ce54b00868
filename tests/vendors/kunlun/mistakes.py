"""Mistakes that are easily made with kunlun_ops' functions."""

from __future__ import annotations

import torch

from inferplane_xpu.kunlun.kernels import attention, basic, mla, moe, quant
from tests.vendors.mistakes import Mistake, at, by, swap

ROWS, ATTENTION, EXPERTS, PRODUCTS = (basic, "kunlun"), (attention, "kunlun"), (moe, "kunlun"), (quant, "kunlun")
DECODE = (ATTENTION, "speculative_attention")
PREFILL = (ATTENTION, "prefill_attention")
LATENT = ((mla, "kunlun"), "paged_attention")
MISTAKES = [
    Mistake("a norm's weight in the plan's dtype", ROWS, "rmsnorm", at(1, lambda w: w.bfloat16()),
            "kunlun_ops:rms_norm", "t3_d64", "weight is torch.float32"),
    Mistake("strided rows", ROWS, "rmsnorm", at(0, lambda x: x.repeat(1, 2)[:, : x.shape[1]]),
            "kunlun_ops:rms_norm", "strided", "x must be contiguous"),
    Mistake("norm and sum exchanged", ROWS, "add_rmsnorm",
            lambda real, *args, output, residual_output, **given: real(
                *args, output=residual_output, residual_output=output, **given),
            "kunlun_ops:add_rms_norm", "t3_d64", ""),
    Mistake("a table in float32", ROWS, "rotary_embedding", by(cos_sin_cache=lambda t: t.float()),
            "kunlun_ops:rope", "half", "have one dtype"),
    Mistake("the other pairs", ROWS, "rotary_embedding", by(is_neox=lambda neox: not neox),
            "kunlun_ops:rope", "half", ""),
    Mistake("K and V exchanged", ATTENTION, "reshape_and_cache_flash", swap(0, 1),
            "kunlun_ops:kv_write", "decode", ""),
    Mistake("padding left to the write", ATTENTION, "reshape_and_cache_flash", at(4, lambda s: s - 10**6),
            "kunlun_ops:kv_write", "decode", "slots lie in"),
    Mistake("tokens before heads", ATTENTION, "reshape_and_cache_flash",
            at(2, lambda c: c.transpose(1, 2).contiguous()), "kunlun_ops:kv_write", "decode", "key_cache has shape"),
    Mistake("the other layout requested", ATTENTION, "reshape_and_cache_flash", by(BLHD_LAYOUT=lambda flag: True),
            "kunlun_ops:kv_write", "decode", "BLHD_LAYOUT"),
    Mistake("prefill scaled as others are", *PREFILL, by(alpha=lambda alpha: 128**-0.5),
            "kunlun_ops:attention_many", "prefill_d128", ""),
    Mistake("lengths instead of running sums", *PREFILL,
            by(context_kvlen_lod_cpu=lambda lod: lod.diff(prepend=lod[:1]),
               context_kvlen_lod_xpu=lambda lod: lod.diff(prepend=lod[:1])),
            "kunlun_ops:attention_many", "chunks", "running sum"),
    Mistake("the host's lengths of another step", *PREFILL, by(context_kvlen_lod_cpu=lambda lod: lod * 2),
            "kunlun_ops:attention_many", "prefill_d128", "are equal"),
    Mistake("what is cached forgotten", *PREFILL,
            by(context_kvlen_lod_cpu=lambda lod: torch.tensor([0, 65, 77], dtype=torch.int32),
               context_kvlen_lod_xpu=lambda lod: torch.tensor([0, 65, 77], dtype=torch.int32)),
            "kunlun_ops:attention_many", "prefill_d128", ""),
    Mistake("decode scaled as prefill is", *DECODE, by(scale=lambda scale: scale * 8),
            "kunlun_ops:attention_few", "decode", ""),
    Mistake("lengths before the token", *DECODE,
            by(context_lens_cpu=lambda n: n - 1, context_lens_xpu=lambda n: n - 1),
            "kunlun_ops:attention_few", "decode", ""),
    Mistake("lengths in int64", *DECODE, by(context_lens_xpu=lambda n: n.long()),
            "kunlun_ops:attention_few", "decode", "context_lens_xpu is torch.int32"),
    Mistake("an upper bound that is none", *DECODE, by(max_context_len=lambda n: 3),
            "kunlun_ops:attention_few", "decode", "max_context_len is at least"),
    Mistake("the rotated part alone as q_r", *LATENT, by(q_r=lambda q: q[..., 512:].contiguous()),
            "kunlun_ops:mla_absorbed", "v3_dims", "q_r is x once more"),
    Mistake("latents without their head", *LATENT, at(2, lambda cache: cache[:, 0]),
            "kunlun_ops:mla_absorbed", "v3_dims", "k_cache has shape"),
    Mistake("ids and weights exchanged", EXPERTS, "moe_softmax_topk_norm", swap(1, 2),
            "kunlun_ops:moe_route", "mixtral", "weights is torch.float32"),
    Mistake("a factor that is not passed on", EXPERTS, "moe_sigmoid_group_topk_norm", by(scale=lambda scale: 1.0),
            "kunlun_ops:moe_route_grouped", "v3", ""),
    Mistake("scales where maxima are expected", EXPERTS, "moe_fc",
            by(w_perchannel_max=lambda m: m if m is None else m / 127), "kunlun_ops:moe_experts_w8a8", "int8_row", ""),
    Mistake("ids in int64", EXPERTS, "moe_fc", by(sorted_tokens_idx=lambda ids: ids.long()),
            "kunlun_ops:moe_experts", "t13", "sorted_tokens_idx is torch.int32"),
    Mistake("rows left in the order of tokens", EXPERTS, "moe_post",
            at(1, lambda places: torch.arange(places.numel(), dtype=torch.int32).view_as(places)),
            "kunlun_ops:moe_experts", "t13", ""),
    Mistake("scales instead of maxima", PRODUCTS, "matmul", by(w_pc_max=lambda m: m / 127),
            "kunlun_ops:linear_w8a8", "int8_act", ""),
    Mistake("weights turned", PRODUCTS, "matmul", by(w=lambda w: w.t().contiguous()),
            "kunlun_ops:linear_w8a8", "int8_act", "w has shape"),
    Mistake("columns in the other order", PRODUCTS, "awq_gemm",
            by(w=lambda w: ((w >> 4) & 0x0F0F0F0F) | ((w & 0x0F0F0F0F) << 4)),
            "kunlun_ops:linear_w4a16", "int4_group", "", torch.float16),
    Mistake("the vendor's fast order", PRODUCTS, "awq_gemm", by(align_type=lambda kind: 1),
            "kunlun_ops:linear_w4a16", "int4_group", "align_type 1", torch.float16),
    Mistake("zero points of signed numbers", PRODUCTS, "awq_gemm", by(zeros=torch.zeros_like),
            "kunlun_ops:linear_w4a16", "int4_group", "", torch.float16),
]  # fmt: skip
