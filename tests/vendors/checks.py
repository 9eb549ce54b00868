"""Checks that most operators of most vendors share.

`LIFTED` lets float32 in where the vendor takes 16-bit floats only: with that one check lifted a model's tokens can be
compared with another device's exactly.
"""

from __future__ import annotations

import os

import torch

from tests.vendors.emulator import require

LIFTED = os.environ.get("INFERPLANE_EMULATED_FLOAT32") == "1"
HALF = (torch.float16, torch.bfloat16)
INT32 = torch.int32


def half(**tensors: torch.Tensor) -> None:
    """All are of one 16-bit dtype."""
    allowed = (*HALF, torch.float32) if LIFTED else HALF
    found = {t.dtype for t in tensors.values()}
    require(len(found) == 1, f"{', '.join(tensors)} have one dtype, got {', '.join(sorted(map(str, found)))}")
    require(found <= set(allowed), f"{', '.join(tensors)} are float16 or bfloat16, got {found}")


def dtype(want: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.dtype is want, f"{name} is {want}, got {tensor.dtype}")


def contiguous(**tensors: torch.Tensor | None) -> None:
    """All that are given are."""
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), f"{name} must be contiguous")


def shape(name: str, tensor: torch.Tensor, *want: int | None) -> None:
    """None stands for any size."""
    fits = tensor.dim() == len(want) and all(w is None or w == n for w, n in zip(want, tensor.shape))
    expected = ", ".join("any" if w is None else str(w) for w in want)
    require(fits, f"{name} has shape [{expected}], got {list(tensor.shape)}")


def absent(name: str, tensor: torch.Tensor | None) -> None:
    require(tensor is None, f"{name} is not emulated")
