"""Mixture of experts: tokens gathered by expert, two products each, scattered back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.padding import pad_rows
from inferplane.ops import MoERoute, clamp_gate
from inferplane.ops.forms.activation import ACTIVATIONS, multiply_gate
from inferplane.types import Kernels, When

KERNELS = Kernels()
ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))
EXPERTS = ("moe_experts.act", "moe_experts.limit", "moe_experts.limits_input")
ROUTING = ("moe_route.least_sum", "moe_route.jitter", "moe_route.sum_eps", "moe_route.sqrtsoftplus")


@KERNELS("moe_route", "torch", when=replace(ANY, extensions=ROUTING), capture_safe=True, batch_invariant=True)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `moe_route` by its own body, which is nothing but torch operators on the device already."""
    return MoERoute.__call__(view, logits)


@KERNELS("moe_experts", "torch", when=replace(ANY, extensions=EXPERTS))
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `moe_experts`. Waits for the device, to know how many rows each expert has."""
    limits = {"limit": view.limit, "limits_input": view.limits_input}
    return multiply_experts(view.gate_up, view.down, x, weights, ids, act=view.act, **limits)


def multiply_experts(
    gate_up: Any,
    down: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    act: str = "",
    limit: float | None = None,
    limits_input: bool = False,
) -> torch.Tensor:
    """Experts one after the other: pairs of token and expert are sorted by expert, so that each expert's rows are one
    slice and only chosen experts are read; two products per expert; results are added up by token in float32.

    Args:
        gate_up: of which an index gives an expert's rows `[2 I, H]`, or `[I, H]` with `act`; has `shape`.
        down: of which an index gives an expert's rows `[H, I]`.
        x: `[T, H]`.
        weights: of each token's experts, `[T, k]`.
        ids: those experts, `[T, k]`.
        act: see `MoEExperts`; so `limit` and `limits_input`. Left out, gates have silu and no bounds.

    Returns:
        `[T, H]`.
    """

    def compute_expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        h = F.linear(rows, gate_up[e])
        if act:
            return F.linear(ACTIVATIONS[act](h), down[e])
        gate, up = h.chunk(2, -1)
        return F.linear(multiply_gate("silu", gate, up, limit, limits_input), down[e])

    return _by_expert(x, weights, ids, gate_up.shape[0], compute_expert)


@KERNELS("clamped_experts", "torch", when=ANY)
def clamped_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `clamped_experts`, as `moe_experts`; what is clamped is not rounded before."""

    def compute_expert(e: int, rows: torch.Tensor) -> torch.Tensor:
        h = F.linear(rows, view.gate_up[e], view.gate_up_bias[e])
        bias = None if view.down_bias is None else view.down_bias[e]
        return F.linear(clamp_gate(h.float(), view.alpha, view.limit).to(x.dtype), view.down[e], bias)

    return _by_expert(x, weights, ids, view.gate_up.shape[0], compute_expert)


def _by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    experts: int,
    compute_expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum over a token's experts, which are computed one after the other, each for its rows (padded)."""
    _tokens, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    token = torch.div(order, k, rounding_mode="floor")
    elsewhere, *counts = torch.bincount(ids.flatten() + 1, minlength=experts + 1).tolist()
    rows, scale = x[token], weights.flatten()[order]
    out = torch.zeros_like(x, dtype=torch.float32)
    start = elsewhere  # pairs of experts on other ranks, whose id is -1, come first
    for e, n in enumerate(counts):
        if not n:
            continue
        part = slice(start, start + n)
        y = compute_expert(e, pad_rows(rows[part]))[:n]
        out.index_add_(0, token[part], y.float() * scale[part, None])
        start += n
    return out.to(x.dtype)
