"""Mistakes that are easily made with Hygon's functions."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from inferplane_dcu import vendor
from inferplane_dcu.kernels import attention, mla, mla_fp8
from tests.vendors.mistakes import Change, Mistake, at, by, swap, with_


def with_mass(real: Any, *args: Any, **kwargs: Any) -> Any:
    """Two results are taken from a function that gives the output alone."""
    out, _mass = real(*args, **{**kwargs, "return_softmax_lse": True})
    return out


def wrong(
    words: str, function: vendor.VendorFunction, change: Change, kernel: str, sample: str, caught: str
) -> Mistake:
    """A wrong call of a function of the vendor's, in the newest module that has it."""
    where = sys.modules[function.modules[0]], function.name
    return Mistake(words, where, None, partial(change, getattr(*where)), kernel, sample, caught)


TOKENS, PROMPTS, PAGED = "flash_attn:attention_tokens", "flash_attn:attention_prompts", "flash_attn:attention_paged"
EXPERTS, INT8_EXPERTS = "lightop:moe_experts", "lightop:moe_experts_w8a8"
FP8_LATENTS = "flash_mla:mla_absorbed_fp8"
WRITE, LATENT_WRITE, FP8_WRITE = (attention, "hcu"), (mla, "hcu"), (mla_fp8, "hcu")
MISTAKES = [
    Mistake("K and V exchanged", WRITE, "reshape_and_cache", swap(0, 1), "hcu_ops:kv_write", "decode", ""),
    Mistake("slots in int32", WRITE, "reshape_and_cache", at(4, lambda s: s.int()), "hcu_ops:kv_write", "decode",
            "slot_mapping is torch.int64"),
    Mistake("values not turned", WRITE, "reshape_and_cache", at(3, lambda v: v.transpose(2, 3).contiguous()),
            "hcu_ops:kv_write", "decode", ""),
    Mistake("a cache in int8 requested", LATENT_WRITE, "concat_and_cache_mla", at(4, lambda s: "int8"),
            "hcu_ops:mla_kv_write", "decode", "kv_cache_dtype"),
    wrong("norm and sum exchanged", vendor.ADD_RMS_NORM, swap(0, 1), "lightop:add_rms_norm", "t3_d64", ""),
    wrong("result behind the input", vendor.SILU_MUL, swap(0, 1), "lightop:silu_mul", "t3_i64", ""),
    wrong("a norm as in training", vendor.RMS_NORM, at(3, lambda t: True), "lightop:rms_norm", "t3_d64", "trained"),
    wrong("sines before cosines", vendor.ROPE, at(4, lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
          "lightop:rope", "half", ""),
    wrong("the other pairs", vendor.ROPE, at(5, lambda neox: not neox), "lightop:rope", "half", ""),
    wrong("a table in float32", vendor.ROPE, at(4, lambda t: t.float()), "lightop:rope", "half", "have one dtype"),
    wrong("the key's norm for the query", vendor.NORM_ROPE, swap(6, 7), "lightop:norm_rope_write", "qk_norm", ""),
    wrong("weights turned", vendor.W8A8, at(1, lambda w: w.t().contiguous()), "lightop:linear_w8a8", "int8_act",
          "b has shape"),
    wrong("rows and columns exchanged", vendor.W8A8, swap(5, 6), "lightop:linear_w8a8", "int8_act", "has shape"),
    wrong("scales without their column", vendor.W8A8, at(3, lambda s: s[:, 0]), "lightop:linear_w8a8", "int8_act",
          "scale_b has shape"),
    wrong("the factor left to others", vendor.GATE, at(7, lambda flag: False), "lightop:moe_route", "v3", ""),
    wrong("groups and those that stay exchanged", vendor.GATE, swap(2, 3), "lightop:moe_route", "v3", ""),
    wrong("ids in int64", vendor.EXPERTS_ALIGN, at(0, lambda ids: ids.long()), EXPERTS, "t13",
          "topk_ids is torch.int32"),
    wrong("places not filled", vendor.EXPERTS_ALIGN, at(3, torch.zeros_like), EXPERTS, "t13", "is filled with"),
    wrong("other blocks than the product's", vendor.EXPERTS_ALIGN, at(2, lambda n: n // 2), EXPERTS, "t13", ""),
    wrong("experts not in Marlin's order", vendor.EXPERTS_PRODUCT, at(1, lambda w: w.roll(1, -1)), EXPERTS,
          "t13", ""),
    wrong("pairs as tokens", vendor.EXPERTS_PRODUCT, at(7, lambda k: 1), EXPERTS, "t13", "output has shape"),
    wrong("weights left out", vendor.EXPERTS_PRODUCT, at(3, lambda w: None), EXPERTS, "t13", ""),
    wrong("half of the sum", vendor.EXPERTS_SUM, with_(factor=0.5), EXPERTS, "t13", ""),
    wrong("input behind the result", vendor.EXPERTS_ACT, swap(0, 1), EXPERTS, "t13", "output has shape"),
    wrong("all tokens of a draft as one sequence", vendor.FLASH_TOKENS, at(0, lambda q: q.transpose(0, 1)), TOKENS,
          "decode", "q has shape"),
    wrong("lengths counted without the token", vendor.FLASH_TOKENS, by(cache_seqlens=lambda n: n - 1), TOKENS,
          "decode", ""),
    wrong("a scale of 1", vendor.FLASH_TOKENS, with_(softmax_scale=1.0), TOKENS, "decode", ""),
    wrong("an LSE requested of paged attention", vendor.FLASH_TOKENS, with_mass, TOKENS, "decode_d128_mqa", ""),
    wrong("a window requested of paged attention", vendor.FLASH_TOKENS, with_(window_size=[19, 0]), TOKENS, "decode",
          "left out of account"),
    wrong("plain blocks", vendor.FLASH_PROMPTS, at(1, lambda k: k.transpose(1, 2)), PROMPTS, "prefill",
          "must be contiguous"),
    wrong("plain blocks, said so", vendor.FLASH_PROMPTS, with_(is_prefix_cache=False), PROMPTS, "prefill",
          "are not emulated"),
    wrong("another version", vendor.FLASH_PROMPTS, with_(fa_version=3), PROMPTS, "prefill", "fa_version is 2"),
    wrong("a window of one more", vendor.FLASH_PROMPTS, by(window_size=lambda w: [w[0] + 1, 0]), PROMPTS,
          "window_prefill", ""),
    wrong("keyword of the other function", vendor.FLASH_PAGED, with_(is_prefix_cache=True), PAGED, "prefill",
          "is_prefix_cache"),
    wrong("the longest sequence too short", vendor.FLASH_PAGED, with_(max_seqlen_k=1), PAGED, "prefill",
          "max_seqlen_k is at least"),
    wrong("a schedule for one head", vendor.MLA_PLAN, at(1, lambda heads: 1), "flash_mla:mla_absorbed", "v3_dims",
          "a schedule for"),
    wrong("a schedule for other lengths", vendor.MLA_PLAN, at(0, lambda n: n + 1), "flash_mla:mla_absorbed",
          "v3_dims", "a schedule for these lengths"),
    wrong("queries and keys' lengths exchanged", vendor.FLASH, swap(3, 4), "flash_attn:mla_expanded", "v3_dims",
          "ends with"),
    wrong("int8 experts row by row", vendor.INT8_EXPERTS_PRODUCT, at(1, lambda w: w.view(6, -1, w.shape[1] * 64)),
          INT8_EXPERTS, "int8_tiles", "b_qweight has shape"),
    wrong("int8 experts by tiles of 16", vendor.INT8_EXPERTS_PRODUCT,
          at(1, lambda w: w.view(*w.shape[:2], -1, 4, 16).transpose(2, 3).reshape(w.shape)), INT8_EXPERTS, "int8_tiles",
          ""),
    wrong("scales of experts without their column", vendor.INT8_EXPERTS_PRODUCT, at(4, lambda s: s[..., 0]),
          INT8_EXPERTS, "int8_tiles", "b_scale has shape"),
    wrong("rows of pairs in place of tokens and experts", vendor.INT8_EXPERTS_PRODUCT, at(2, lambda y: y.flatten(0, 1)),
          INT8_EXPERTS, "int8_tiles", "output has shape"),
    wrong("int8 experts' weights left out", vendor.INT8_EXPERTS_PRODUCT, at(5, lambda w: None), INT8_EXPERTS,
          "int8_tiles", ""),
    wrong("torch's dtype", vendor.INT8_EXPERTS_CONFIG, at(9, lambda t: f"torch.{t}"), INT8_EXPERTS, "int8_tiles",
          "Triton's name"),
    Mistake("latents in FP8 written as they are", FP8_WRITE, "concat_and_cache_mla", at(4, lambda s: "auto"),
            "hcu_ops:mla_kv_write_fp8", "v3_decode", "have one dtype"),
    Mistake("another scale for latents", FP8_WRITE, "concat_and_cache_mla", at(5, lambda s: s * 3),
            "hcu_ops:mla_kv_write_fp8", "v3_decode", ""),
    wrong("a schedule for 16 bits", vendor.MLA_FP8, by(tile_scheduler_metadata=lambda t: -t), FP8_LATENTS, "v3_dims",
          "a schedule for"),
    wrong("latents in FP8 without their scale", vendor.MLA_FP8, with_(k_scale=None), FP8_LATENTS, "v3_dims",
          "one element in one dimension"),
    wrong("a scale without a dimension", vendor.MLA_FP8, by(k_scale=lambda s: s[0]), FP8_LATENTS, "v3_dims",
          "one element in one dimension"),
    wrong("the other FP8", vendor.MLA_FP8, with_(kv_cache_dtype="fp8_e5m2"), FP8_LATENTS, "v3_dims", "'fp8_e4m3'"),
    wrong("FP8 by its short name", vendor.MLA_FP8, with_(kv_cache_dtype="fp8"), FP8_LATENTS, "v3_dims", "'fp8_e4m3'"),
    wrong("latents as bytes", vendor.MLA_FP8, by(k_cache=lambda c: c.view(torch.uint8)), FP8_LATENTS, "v3_dims",
          "k_cache is torch.float8_e4m3fn"),
]  # fmt: skip
