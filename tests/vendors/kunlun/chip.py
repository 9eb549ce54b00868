"""What of the P800 most operators check."""

from __future__ import annotations

import torch

from tests.vendors.checks import HALF, INT32, LIFTED, absent, contiguous, dtype, half, shape
from tests.vendors.emulator import require

BLOCK, LATENT_BLOCK = 16, 64
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
CLUSTERS = 12


def twins(name: str, host: torch.Tensor, card: torch.Tensor) -> list[int]:
    """Lengths that are given twice, on the host and on the card: int32, and equal."""
    dtype(INT32, **{f"{name}_cpu": host, f"{name}_xpu": card})
    require(torch.equal(host, card), f"{name}_cpu and {name}_xpu are equal, got {host.tolist()} and {card.tolist()}")
    values: list[int] = host.tolist()
    return values


__all__ = [
    "BLOCK", "CLUSTERS", "HALF", "HEAD_SIZES", "INT32", "LATENT_BLOCK", "LIFTED", "absent", "contiguous", "dtype",
    "half", "shape", "twins",
]  # fmt: skip
