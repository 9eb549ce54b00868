"""Mistakes that are easily made with the vendor's functions, made on purpose: each is caught by the emulator, because
the call breaks a limit, or by the op's oracle, because the numbers are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane_xpu.kunlun.kernels import attention, basic, mla, moe, quant
from tests.vendors.emulator import Meddled
from tests.vendors.kunlun import chip
from tests.vendors.kunlun.emulated import EMULATOR
from tests.vendors.mistakes import judged, swapped

pytestmark = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Args:
        words: what is done wrong.
        where: the module whose calls are meddled with.
        function: what is called wrongly.
        change: `(real, *args, **kwargs)` -> result of the wrong call.
        kernel: the kernel that makes the call. sample: of its op.
        caught: a part of what is said of it.
        dtype: of the plan.
    """

    words: str
    where: Any
    function: str
    change: Callable[..., Any]
    kernel: str
    sample: str
    caught: str
    dtype: torch.dtype = torch.bfloat16


def by(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with keyword arguments changed."""
    return lambda real, *args, **given: real(*args, **{**given, **{k: f(given.get(k)) for k, f in changes.items()}})


def at(i: int, value: Callable[[Any], Any]) -> Callable[..., Any]:
    """The call with a positional argument changed."""
    return lambda real, *args, **given: real(*args[:i], value(args[i]), *args[i + 1 :], **given)


DECODE = (attention, "speculative_attention")
PREFILL = (attention, "prefill_attention")
LATENT = (mla, "paged_attention")
MISTAKES = [
    Mistake("a norm's weight in the plan's dtype", basic, "rmsnorm", at(1, lambda w: w.bfloat16()),
            "kunlun_ops:rms_norm", "t3_d64", "weight is torch.float32"),
    Mistake("strided rows", basic, "rmsnorm", at(0, lambda x: x.repeat(1, 2)[:, : x.shape[1]]),
            "kunlun_ops:rms_norm", "strided", "x must be contiguous"),
    Mistake("norm and sum exchanged", basic, "add_rmsnorm",
            lambda real, *args, output, residual_output, **given: real(
                *args, output=residual_output, residual_output=output, **given),
            "kunlun_ops:add_rms_norm", "t3_d64", ""),
    Mistake("a table in float32", basic, "rotary_embedding", by(cos_sin_cache=lambda t: t.float()),
            "kunlun_ops:rope", "half", "have one dtype"),
    Mistake("the other pairs", basic, "rotary_embedding", by(is_neox=lambda neox: not neox),
            "kunlun_ops:rope", "half", ""),
    Mistake("K and V exchanged", attention, "reshape_and_cache_flash", swapped(0, 1),
            "kunlun_ops:kv_write", "decode", ""),
    Mistake("padding left to the write", attention, "reshape_and_cache_flash", at(4, lambda s: s - 10**6),
            "kunlun_ops:kv_write", "decode", "slots lie in"),
    Mistake("tokens before heads", attention, "reshape_and_cache_flash",
            at(2, lambda c: c.transpose(1, 2).contiguous()), "kunlun_ops:kv_write", "decode", "key_cache has shape"),
    Mistake("the other layout asked for", attention, "reshape_and_cache_flash", by(BLHD_LAYOUT=lambda flag: True),
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
    Mistake("ids and weights exchanged", moe, "moe_softmax_topk_norm", swapped(1, 2),
            "kunlun_ops:moe_route", "mixtral", "weights is torch.float32"),
    Mistake("a factor that is not told", moe, "moe_sigmoid_group_topk_norm", by(scale=lambda scale: 1.0),
            "kunlun_ops:moe_route_grouped", "v3", ""),
    Mistake("ids in int64", moe, "moe_fc", by(sorted_tokens_idx=lambda ids: ids.long()),
            "kunlun_ops:moe_experts", "t13", "sorted_tokens_idx is torch.int32"),
    Mistake("rows left in the order of tokens", moe, "moe_post",
            at(1, lambda places: torch.arange(places.numel(), dtype=torch.int32).view_as(places)),
            "kunlun_ops:moe_experts", "t13", ""),
    Mistake("scales instead of maxima", quant, "matmul", by(w_pc_max=lambda m: m / 127),
            "kunlun_ops:linear_w8a8", "int8_act", ""),
    Mistake("weights turned", quant, "matmul", by(w=lambda w: w.t().contiguous()),
            "kunlun_ops:linear_w8a8", "int8_act", "w has shape"),
    Mistake("columns in the other order", quant, "awq_gemm",
            by(w=lambda w: ((w >> 4) & 0x0F0F0F0F) | ((w & 0x0F0F0F0F) << 4)),
            "kunlun_ops:linear_w4a16", "int4_group", "", torch.float16),
    Mistake("the vendor's fast order", quant, "awq_gemm", by(align_type=lambda kind: 1),
            "kunlun_ops:linear_w4a16", "int4_group", "align_type 1", torch.float16),
    Mistake("zero points of signed numbers", quant, "awq_gemm", by(zeros=torch.zeros_like),
            "kunlun_ops:linear_w4a16", "int4_group", "", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.words.replace(" ", "_"))
def test_is_caught(mistake, monkeypatch):
    said = lambda: judged("xpu:kunlun", mistake.dtype, mistake.kernel, mistake.sample)  # noqa: E731
    assert not said(), "the kernel itself is right"
    monkeypatch.setattr(EMULATOR, "listeners", [])  # a mistake is no call of the backend's
    monkeypatch.setattr(mistake.where, "kunlun", Meddled(mistake.where.kunlun, {mistake.function: mistake.change}))
    found = said()
    assert found, "nothing was said"
    assert mistake.caught in found, found


def test_sorting_for_few_pairs_is_not_asked_for_many(monkeypatch):
    """The other library's operator, which one of the vendor's calls takes up to 768 pairs only."""
    monkeypatch.setattr(moe, "FEW_PAIRS", 10**6)
    x, ids = torch.zeros(385, 32, dtype=torch.bfloat16), torch.zeros(385, 2, dtype=torch.int32)
    with pytest.raises(AssertionError, match="at most 768 pairs, got 770"):
        moe._sorted(x, ids, 4)
