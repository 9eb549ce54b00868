"""Attention over blocks of K and V.

One operator, `varlen_fwd`, holds two families of kernels: one for single tokens, which shares a sequence's keys among
work groups, and one for many query tokens. Few query tokens go to the first, each as a sequence of its own that ends
with it, as the vendor does for drafts.

Source: vllm-project/vllm-xpu-kernels, csrc/flash_attn/flash_api.cpp at 4543b580, and
flash_attn_interface.py of its wheel 0.1.16.2.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.plugin import Batch, Kernels, LayerKV, StaticKV, When
from inferplane_xpu.intel.kernels.lengths import AttentionSequences, single_tokens
from inferplane_xpu.intel.kernels.when import MATRIX, is_decode_compiled, is_prefill_compiled
from inferplane_xpu.intel.kvcache import PAGED

flash = torch.ops._vllm_fa2_C
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_xpu", kv_layouts=(PAGED,), features=MATRIX)
WITH_SINKS = partial(When, extensions=("attention.sinks",))
NO_WINDOW = (-1, -1)
KVScales = tuple[torch.Tensor | None, torch.Tensor | None]
NO_SCALES: KVScales = (None, None)


def scales_of(kv: LayerKV) -> KVScales:
    """The scales of K and of V, float32 `[1]`; of latents twice the same. Blocks in FP8 need both: the kernels for many
    queries read them without a check that they are there.
    """
    return (kv.scales[0], kv.scales[-1]) if isinstance(kv, StaticKV) else NO_SCALES


@functools.cache
def _query_scales() -> tuple[None, ...]:
    """No scale of queries, if the operator has a place for one: releases before 0.1.14 have none."""
    names = {argument.name for argument in flash.varlen_fwd.default._schema.arguments}
    return (None,) if "q_scale" in names else ()


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: AttentionSequences,
    scale: float,
    *,
    paged: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    scales: KVScales = NO_SCALES,
) -> torch.Tensor:
    """_vllm_fa2_C::varlen_fwd: causal, no dropout, slopes or caps, splits as the vendor chooses them.

    Args:
        q: `[T, H, D]`. k, v: blocks `[blocks, 64, G, D]`, or `[keys, G, D]` where not `paged`; `at.lens` then holds
            running sums.
        at: the sequences. scale: of the scores. window: how many last tokens a query sees, itself included.
        sinks: `[H]` in the dtype of `q`, or None.
        scales: of blocks in FP8 (`scales_of`).
    """
    left, right = NO_WINDOW if window is None else (window - 1, 0)
    causal = at.max_query_tokens > 1
    # The offsets of keys are read only without blocks; with them any int32 tensor will do.
    keys, lens, tables = (at.query_start, at.lens, at.tables) if paged else (at.lens, None, None)
    out: torch.Tensor = flash.varlen_fwd(
        q, k, v, None, at.query_start, keys, lens, None, tables, None, at.max_query_tokens, at.max_seq_tokens, 0.0,
        *_query_scales(), *scales, scale, sinks, False, causal, left, right, 0.0, False, None, None, False,
        None, None,
    )[0]  # fmt: skip
    return out


def _has_sinks(op: Any) -> bool:
    return op.sinks is not None


def _has_one_width(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim


def _has_few_queries(op: Any) -> bool:
    group = op.heads // op.kv.heads
    return (
        op.queries == "few"
        and _has_one_width(op)
        and is_decode_compiled(op.kv.dim, group, op.kv.window, sinks=_has_sinks(op))
    )


def _has_many_queries(op: Any) -> bool:
    return (
        op.queries == "many"
        and _has_one_width(op)
        and is_prefill_compiled(op.kv.dim, op.kv.window, sinks=_has_sinks(op))
    )


FEW = ("few query tokens, and a head size, group, window and sinks that were compiled for them", _has_few_queries)
MANY = ("many query tokens, and a head size, window and sinks that were compiled for them", _has_many_queries)


@fused("attention", FEW, when=WITH_SINKS)
def attention_few(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The kernels for single tokens."""
    keys, values = kv.view_blocks()  # type: ignore[attr-defined]
    return varlen(
        q.contiguous(),
        keys,
        values,
        single_tokens(batch),
        view.scale,
        window=view.kv.window,
        sinks=view.sinks,
        scales=scales_of(kv),
    )


@fused("attention", MANY, when=WITH_SINKS)
def attention_many(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The kernels for many query tokens; a largest size of 1 would send the call to the others."""
    keys, values = kv.view_blocks()  # type: ignore[attr-defined]
    most = max(2, batch.max_query_tokens)
    at = AttentionSequences(batch.query_start, batch.seq_lens, batch.block_tables, most, batch.max_seq_tokens)
    window, sinks = view.kv.window, view.sinks
    return varlen(q.contiguous(), keys, values, at, view.scale, window=window, sinks=sinks, scales=scales_of(kv))
