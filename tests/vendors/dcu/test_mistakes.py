"""Mistakes that are easily made with Hygon's functions, made on purpose: each is caught by the emulator, because the
call breaks a limit, or by the op's oracle, because the numbers are wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane_dcu import vendor
from inferplane_dcu.kernels import attention, mla
from tests.vendors.dcu import chip
from tests.vendors.dcu.emulated import EMULATOR
from tests.vendors.emulator import Meddled
from tests.vendors.mistakes import judged, swapped, with_

pytestmark = pytest.mark.skipif(
    chip.LIFTED or chip.ARCH != "gfx936", reason="in the vendor's dtypes, on gfx936: without INFERPLANE_EMULATED_..."
)


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        words: what is done wrong.
        function: what is called wrongly: a function of the vendor's, or the name of an operator of hcu_ops.
        change: `(real, *args, **kwargs)` -> result of the wrong call.
        kernel: the kernel that makes the call. sample: of its op.
        caught: a part of what is said of it.
    """

    words: str
    function: vendor.VendorFunction | str
    change: Callable[..., Any]
    kernel: str
    sample: str
    caught: str


def at(i: int, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with a positional argument changed."""
    return lambda real, *args, **kwargs: real(*args[:i], value(args[i]), *args[i + 1 :], **kwargs)


def as_if(name: str, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with a keyword argument changed."""
    return lambda real, *args, **kwargs: real(*args, **{**kwargs, name: value(kwargs[name])})


def with_mass(real: Any, *args: Any, **kwargs: Any) -> Any:
    """Two results are taken from a function that gives the output alone."""
    out, _mass = real(*args, **{**kwargs, "return_softmax_lse": True})
    return out


TOKENS, PROMPTS, PAGED = "flash_attn:attention_tokens", "flash_attn:attention_prompts", "flash_attn:attention_paged"
EXPERTS = "lightop:moe_experts"
MISTAKES = [
    Mistake("K and V exchanged", "reshape_and_cache", swapped(0, 1), "hcu_ops:kv_write", "decode", ""),
    Mistake("slots in int32", "reshape_and_cache", at(4, lambda s: s.int()), "hcu_ops:kv_write", "decode",
            "slot_mapping is torch.int64"),
    Mistake("values not turned", "reshape_and_cache", at(3, lambda v: v.transpose(2, 3).contiguous()),
            "hcu_ops:kv_write", "decode", ""),
    Mistake("a cache in int8 asked for", "concat_and_cache_mla", at(4, lambda s: "int8"), "hcu_ops:mla_kv_write",
            "decode", "kv_cache_dtype"),
    Mistake("norm and sum exchanged", vendor.ADD_RMS_NORM, swapped(0, 1), "lightop:add_rms_norm", "t3_d64", ""),
    Mistake("result behind the input", vendor.SILU_MUL, swapped(0, 1), "lightop:silu_mul", "t3_i64", ""),
    Mistake("a norm as in training", vendor.RMS_NORM, at(3, lambda t: True), "lightop:rms_norm", "t3_d64", "trained"),
    Mistake("sines before cosines", vendor.ROPE, at(4, lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
            "lightop:rope", "half", ""),
    Mistake("the other pairs", vendor.ROPE, at(5, lambda neox: not neox), "lightop:rope", "half", ""),
    Mistake("a table in float32", vendor.ROPE, at(4, lambda t: t.float()), "lightop:rope", "half", "have one dtype"),
    Mistake("the key's norm for the query", vendor.NORM_ROPE, swapped(6, 7), "lightop:norm_rope_write", "qk_norm", ""),
    Mistake("weights turned", vendor.W8A8, at(1, lambda w: w.t().contiguous()), "lightop:linear_w8a8", "int8_act",
            "b has shape"),
    Mistake("rows and columns exchanged", vendor.W8A8, swapped(5, 6), "lightop:linear_w8a8", "int8_act", "has shape"),
    Mistake("scales without their column", vendor.W8A8, at(3, lambda s: s[:, 0]), "lightop:linear_w8a8", "int8_act",
            "scale_b has shape"),
    Mistake("the factor left to others", vendor.GATE, at(7, lambda flag: False), "lightop:moe_route", "v3", ""),
    Mistake("groups and those that stay exchanged", vendor.GATE, swapped(2, 3), "lightop:moe_route", "v3", ""),
    Mistake("ids in int64", vendor.EXPERTS_ALIGN, at(0, lambda ids: ids.long()), EXPERTS, "t13",
            "topk_ids is torch.int32"),
    Mistake("places not filled", vendor.EXPERTS_ALIGN, at(3, torch.zeros_like), EXPERTS, "t13", "is filled with"),
    Mistake("other blocks than the product's", vendor.EXPERTS_ALIGN, at(2, lambda n: n // 2), EXPERTS, "t13", ""),
    Mistake("experts not in Marlin's order", vendor.EXPERTS_PRODUCT, at(1, lambda w: w.roll(1, -1)), EXPERTS,
            "t13", ""),
    Mistake("pairs as tokens", vendor.EXPERTS_PRODUCT, at(7, lambda k: 1), EXPERTS, "t13", "output has shape"),
    Mistake("weights left out", vendor.EXPERTS_PRODUCT, at(3, lambda w: None), EXPERTS, "t13", ""),
    Mistake("half of the sum", vendor.EXPERTS_SUM, with_(factor=0.5), EXPERTS, "t13", ""),
    Mistake("input behind the result", vendor.EXPERTS_ACT, swapped(0, 1), EXPERTS, "t13", "output has shape"),
    Mistake("all tokens of a draft as one sequence", vendor.FLASH_TOKENS, at(0, lambda q: q.transpose(0, 1)), TOKENS,
            "decode", "q has shape"),
    Mistake("lengths counted without the token", vendor.FLASH_TOKENS, as_if("cache_seqlens", lambda n: n - 1), TOKENS,
            "decode", ""),
    Mistake("a scale of 1", vendor.FLASH_TOKENS, with_(softmax_scale=1.0), TOKENS, "decode", ""),
    Mistake("an LSE asked of paged attention", vendor.FLASH_TOKENS, with_mass, TOKENS, "decode_d128_mqa", ""),
    Mistake("a window asked of paged attention", vendor.FLASH_TOKENS, with_(window_size=[19, 0]), TOKENS, "decode",
            "left out of account"),
    Mistake("plain blocks", vendor.FLASH_PROMPTS, at(1, lambda k: k.transpose(1, 2)), PROMPTS, "prefill",
            "must be contiguous"),
    Mistake("plain blocks, said so", vendor.FLASH_PROMPTS, with_(is_prefix_cache=False), PROMPTS, "prefill",
            "are not emulated"),
    Mistake("another version", vendor.FLASH_PROMPTS, with_(fa_version=3), PROMPTS, "prefill", "fa_version is 2"),
    Mistake("a window of one more", vendor.FLASH_PROMPTS, as_if("window_size", lambda w: [w[0] + 1, 0]), PROMPTS,
            "window_prefill", ""),
    Mistake("keyword of the other function", vendor.FLASH_PAGED, with_(is_prefix_cache=True), PAGED, "prefill",
            "is_prefix_cache"),
    Mistake("the longest sequence too short", vendor.FLASH_PAGED, with_(max_seqlen_k=1), PAGED, "prefill",
            "max_seqlen_k is at least"),
    Mistake("a schedule for one head", vendor.MLA_PLAN, at(1, lambda heads: 1), "flash_mla:mla_absorbed", "v3_dims",
            "a schedule for"),
    Mistake("a schedule for other lengths", vendor.MLA_PLAN, at(0, lambda n: n + 1), "flash_mla:mla_absorbed",
            "v3_dims", "a schedule for these lengths"),
    Mistake("queries and keys' lengths exchanged", vendor.FLASH, swapped(3, 4), "flash_attn:mla_expanded", "v3_dims",
            "ends with"),
]  # fmt: skip


def planted(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call made wrongly from now on."""
    monkeypatch.setattr(EMULATOR, "listeners", [])  # a mistake is no call of the backend's
    if isinstance(mistake.function, str):
        for module in (attention, mla):
            monkeypatch.setattr(module, "hcu", Meddled(module.hcu, {mistake.function: mistake.change}))
        return
    name, module = mistake.function.name, sys.modules[mistake.function.modules[0]]
    meddled = Meddled(module, {name: mistake.change})
    monkeypatch.setattr(module, name, getattr(meddled, name))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.words.replace(" ", "_"))
def test_is_caught(mistake, monkeypatch):
    said = lambda: judged("dcu", torch.bfloat16, mistake.kernel, mistake.sample)  # noqa: E731
    assert not said(), "the kernel itself is right"
    planted(mistake, monkeypatch)
    found = said()
    assert found, "nothing was said"
    assert mistake.caught in found, found
