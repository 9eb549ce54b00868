"""What a choice says beside its reason: activations that are not quantized, a KV cache that no kernel reads, a dtype in
which no kernel computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from inferplane.binding.choice import Choice
from inferplane.ops import Op
from inferplane.types import RANK_COMPOSED, Context, Kernel


def note_activation_quant(op: Op, choice: Choice, kernels: Sequence[Kernel]) -> None:
    """Record whether the activation quantization that the checkpoint requests is applied.

    Args:
        op: the op.
        choice: its choice, which is changed.
        kernels: all kernels of the op.
    """
    requested = op.activation_quants() - {""}
    if not requested or (choice.binds_children and not choice.own_hot):
        return
    if choice.kernel is not None and choice.kernel.quantizes_activations_to in requested:
        format = choice.kernel.quantizes_activations_to
        choice.why += f"; quantizes activations to {format}, as requested"
        return
    able = {k.name for k in kernels if k.quantizes_activations_to in requested}
    lost = next((f"{r.kernel} is not chosen: {r.reason}" for r in choice.rejected if r.kernel in able), "")
    choice.activation_quant_skipped = lost or f"no kernel of {op.name} quantizes them"


def note_cache_dtype(op: Op, choice: Choice, kernels: Sequence[Kernel], ctx: Context, formats: Collection[str]) -> None:
    """Record that an op runs on torch because a faster kernel does not read the dtype of the KV cache.

    Args:
        op: the op.
        choice: its choice, which is changed.
        kernels: those of the op that may be chosen, the one with the highest rank first.
        ctx: what they may depend on.
        formats: in which the op's weights reach them.
    """
    layouts = [ctx.layouts[r] for r in op.kv_requests() if r in ctx.layouts]
    dtypes = sorted({x.kv_dtype for x in layouts} - {"auto"})
    if not dtypes or not choice.runs_on_torch or choice.decided_by == "pin":
        return
    any_layout = replace(ctx, layouts={})
    for kernel in kernels:
        able = kernel.rank > RANK_COMPOSED and kernel.when.kv_layouts and not kernel.is_less_precise_than(op)
        if able and not kernel.refusals(op, any_layout, formats):
            choice.kv_dtype_unread = f"{kernel.name} reads no KV cache in {', '.join(dtypes)}"
            choice.why += f"; {choice.kv_dtype_unread}"
            return


def note_dtype(op: Op, choice: Choice, kernels: Sequence[Kernel], ctx: Context, formats: Collection[str]) -> None:
    """Record that an op runs on torch because a faster kernel does not compute in the plan's dtype.

    Args: those of `note_cache_dtype`.
    """
    if not choice.runs_on_torch or choice.decided_by == "pin":
        return
    able = [k for k in kernels if k.rank > RANK_COMPOSED and not k.is_less_precise_than(op)]
    for dtype in (torch.bfloat16, torch.float16):
        other = replace(ctx, dtype=dtype)
        if dtype != ctx.dtype and any(not kernel.refusals(op, other, formats) for kernel in able):
            choice.faster_dtype = str(dtype).removeprefix("torch.")
            return
