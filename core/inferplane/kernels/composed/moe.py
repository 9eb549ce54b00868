"""Mixture of experts: tokens gathered by expert, two products each, scattered back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.padding import pad_rows
from inferplane.ops import MoERoute
from inferplane.types import Kernels, When

KERNELS = Kernels()
ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))


@KERNELS("moe_route", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def moe_route(view: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `moe_route` by its own body, which is nothing but torch operators on the device already."""
    return MoERoute.__call__(view, logits)


@KERNELS("moe_experts", "torch", when=ANY)
def moe_experts(view: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The op `moe_experts`: pairs of token and expert are sorted by expert, so that each expert's rows are one slice
    and only chosen experts are read; two products per expert; results are added up by token in float32. Waits for the
    device, to know how many rows each expert has.
    """
    _tokens, k = ids.shape
    order = ids.flatten().argsort(stable=True)
    token = torch.div(order, k, rounding_mode="floor")
    elsewhere, *counts = torch.bincount(ids.flatten() + 1, minlength=view.gate_up.shape[0] + 1).tolist()
    rows, scale = x[token], weights.flatten()[order]
    out = torch.zeros_like(x, dtype=torch.float32)
    start = elsewhere  # pairs of experts on other ranks, whose id is -1, come first
    for e, n in enumerate(counts):
        if not n:
            continue
        part = slice(start, start + n)
        gate, up = F.linear(pad_rows(rows[part]), view.gate_up[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, view.down[e])[:n]
        out.index_add_(0, token[part], y.float() * scale[part, None])
        start += n
    return out.to(x.dtype)
