"""Mistakes that are easily made with vllm-gcu's operators, made on purpose: each is caught by the emulator, because the
call breaks a limit, or by the op's oracle, because the numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane_gcu.kernels import attention, basic, mla, moe
from tests.vendors.emulator import Meddled
from tests.vendors.gcu import chip
from tests.vendors.gcu.emulated import EMULATOR
from tests.vendors.mistakes import judged, swapped, with_

pytestmark = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        words: what is done wrong.
        where: the module and the name in it that is meddled with.
        operator: the operator that is called wrongly.
        change: `(real, *args, **kwargs)` -> result of the wrong call.
        kernel: the kernel that makes the call. sample: of its op.
        caught: a part of what is said of it.
    """

    words: str
    where: tuple[Any, str]
    operator: str
    change: Callable[..., Any]
    kernel: str
    sample: str
    caught: str


def at(i: int, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with a positional argument changed."""
    return lambda real, *args: real(*args[:i], value(args[i]), *args[i + 1 :])


ROWS = (basic, "vllm")
MISTAKES = [
    Mistake("K and V exchanged", (attention, "cache_ops"), "reshape_and_cache_flash", swapped(0, 1),
            "vllm_gcu:kv_write", "decode", ""),
    Mistake("slots in int32", (attention, "cache_ops"), "reshape_and_cache_flash", at(4, lambda s: s.int()),
            "vllm_gcu:kv_write", "decode", "slot_mapping is torch.int64"),
    Mistake("a cache in int8 asked for", (attention, "cache_ops"), "reshape_and_cache_flash", at(5, lambda s: "int8"),
            "vllm_gcu:kv_write", "decode", "kv_cache_dtype"),
    Mistake("blocks of heads first", (attention, "cache_ops"), "reshape_and_cache_flash",
            at(2, lambda c: c.transpose(1, 2)), "vllm_gcu:kv_write", "decode", "must be contiguous"),
    Mistake("norm and sum exchanged", ROWS, "fused_add_rms_norm", swapped(0, 1),
            "vllm_gcu:add_rms_norm", "t3_d64", ""),
    Mistake("result behind the input", ROWS, "rms_norm", swapped(0, 1), "vllm_gcu:rms_norm", "t3_d64", ""),
    Mistake("sines before cosines", ROWS, "rotary_embedding", at(4, lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
            "vllm_gcu:rope", "half", ""),
    Mistake("the other pairs", ROWS, "rotary_embedding", at(5, lambda neox: not neox), "vllm_gcu:rope", "half", ""),
    Mistake("a table in float32", ROWS, "rotary_embedding", at(4, lambda t: t.float()),
            "vllm_gcu:rope", "half", "have one dtype"),
    Mistake("weight-only weights turned", ROWS, "weight_only_quant", at(2, lambda w: w.t().contiguous()),
            "vllm_gcu:linear_w8a16", "int8_row", "input has shape"),
    Mistake("groups of 128", ROWS, "weight_only_quant", at(5, lambda g: 128),
            "vllm_gcu:linear_w8a16", "int8_row", "group_size 128"),
    Mistake("ids in int64", (moe, "moe"), "moe_align_block_size", at(0, lambda ids: ids.long()),
            "vllm_gcu:moe_experts", "t13", "topk_ids is torch.int32"),
    Mistake("blocks of 16 pairs", (moe, "vllm"), "fused_moe_kernel", at(10, lambda n: 16),
            "vllm_gcu:moe_experts", "t13", "block_size is 64"),
    Mistake("weights multiplied in twice", (moe, "vllm"), "fused_moe_kernel", at(8, lambda flag: True),
            "vllm_gcu:moe_experts", "t13", ""),
    Mistake("no bias, which is another judgement of groups", (moe, "vllm"), "fused_grouped_topk", at(7, lambda b: None),
            "vllm_gcu:moe_route_grouped", "v3", ""),
    Mistake("lengths counted from the cache's end", (mla, "flashmla"), "fwd_kvcache_mla", at(3, lambda n: n - 1),
            "vllm_gcu:mla_absorbed", "v3_dims", ""),
]  # fmt: skip

FLASH_MISTAKES = [
    ("a scale of 1", with_(softmax_scale=1.0), ""),
    ("lengths of queries, not their sums", with_(cu_seqlens_q=torch.tensor([3, 1], dtype=torch.int32)), "running sum"),
    ("another version", with_(fa_version=3), "fa_version is 2"),
    ("the longest sequence too short", with_(max_seqlen_k=1), "max_seqlen_k is at least"),
    ("keyword of the cuda build", with_(scheduler_metadata=0), "scheduler_metadata"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.words.replace(" ", "_"))
def test_is_caught(mistake, monkeypatch):
    said = lambda: judged("gcu", torch.bfloat16, mistake.kernel, mistake.sample)  # noqa: E731
    assert not said(), "the kernel itself is right"
    monkeypatch.setattr(EMULATOR, "listeners", [])  # a mistake is no call of the backend's
    monkeypatch.setattr(*mistake.where, Meddled(getattr(*mistake.where), {mistake.operator: mistake.change}))
    found = said()
    assert found, "nothing was said"
    assert mistake.caught in found, found


@pytest.mark.parametrize(("words", "change", "caught"), FLASH_MISTAKES, ids=lambda v: v if isinstance(v, str) else "")
def test_is_caught_in_flash_attention(words, change, caught, monkeypatch):
    real = attention.flash_attention
    monkeypatch.setattr(EMULATOR, "listeners", [])

    def flash_attention(q, k, v, **call):
        function = torch.ops.flash_attn__vllm_flash_attn.flash_attn_varlen_func
        return change(function, q, k, v, causal=True, **{"fa_version": 2, **call})

    monkeypatch.setattr(attention, "flash_attention", flash_attention)
    found = judged("gcu", torch.bfloat16, "flash_attn:attention", "prefill_d128")
    monkeypatch.setattr(attention, "flash_attention", real)
    assert not judged("gcu", torch.bfloat16, "flash_attn:attention", "prefill_d128")
    assert found, "nothing was said"
    assert caught in found, found
