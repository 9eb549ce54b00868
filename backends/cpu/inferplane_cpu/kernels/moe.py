"""Mixture of experts on native kernels: only chosen experts are read."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.kernels.composed.moe import moe_experts as moe_experts_torch
from inferplane.plugin import RANK_PORTABLE, Kernels, When
from inferplane_cpu.kernels.linear import RANK_FIXED, matrix
from inferplane_cpu.native import Matrix, library

KERNELS = Kernels()
FEW_ROWS = 256
"""With more tokens each expert has enough rows for oneDNN's products to be faster."""


def _in_bf16(op: Any) -> bool:
    return all(w.dtype in (None, torch.bfloat16) for w in (op.gate_up, op.down))


PLAIN = When(dtypes=(torch.bfloat16,), features=("native",), needs=(("bfloat16 weights", _in_bf16),))


def _stack(weight: torch.Tensor) -> Any:
    return (Matrix * weight.shape[0])(*(matrix(weight[e]) for e in range(weight.shape[0])))


@KERNELS("moe_experts", "native", when=PLAIN, rank=RANK_FIXED, batch_invariant=True)
def moe_experts_fixed(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each expert's gate and up, then its down, by all tokens that chose it; a token's sum in its own order."""
    stacks = p.__dict__.get("stacks")
    if stacks is None:
        stacks = p.stacks = _stack(p.gate_up), _stack(p.down)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    out = torch.empty_like(x)
    library().ip_moe(
        *stacks,
        len(stacks[0]),
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        ids.data_ptr(),
        weights.data_ptr(),
        ids.shape[1],
        out.data_ptr(),
    )
    return out


@KERNELS("moe_experts", "native", when=PLAIN, rank=RANK_PORTABLE)
def moe_experts(p: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Few tokens by native products, many by oneDNN's, on the same weights."""
    if x.shape[0] <= FEW_ROWS:
        return moe_experts_fixed(p, x, weights, ids)
    return moe_experts_torch(p, x, weights, ids)
