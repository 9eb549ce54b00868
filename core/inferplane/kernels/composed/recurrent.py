"""Recurrences by the bodies of their ops, for steps that a backend's kernel leaves to torch's operators.

They are no declared kernels: what runs by its body in every step is called a reference in `explain`.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.ops.recurrent.conv import CausalConv1d
from inferplane.ops.recurrent.delta_rule import NORM_EPS, GatedDeltaRule
from inferplane.types import Batch


def causal_conv1d(view: Any, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `causal_conv1d`: `[T, C]`, and the states `[B, C, k - 1]` after the step."""
    return CausalConv1d.__call__(view, x, batch, state)


def gated_delta_rule(
    view: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    batch: Batch,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `gated_delta_rule`: `[T, H, V]`, and the states float32 `[B, H, K, V]` after the step."""
    return GatedDeltaRule.__call__(view, q, k, v, decay, beta, batch, state)


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys `[..., K]` divided by their lengths, as that op's formula has them, in their dtype."""
    h = x.float()
    return (h * torch.rsqrt(h.square().sum(-1, keepdim=True) + NORM_EPS)).to(x.dtype)
