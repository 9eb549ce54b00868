"""Checks that most operators share.

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
BLOCK, LATENT_BLOCK = 16, 64
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
CLUSTERS = 12


def half(**tensors: torch.Tensor) -> None:
    """All are of one 16-bit dtype."""
    allowed = (*HALF, torch.float32) if LIFTED else HALF
    found = {t.dtype for t in tensors.values()}
    require(len(found) == 1, f"{', '.join(tensors)} have one dtype, got {', '.join(sorted(map(str, found)))}")
    require(found <= set(allowed), f"{', '.join(tensors)} are float16 or bfloat16, got {found}")


def dtype(want: torch.dtype, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.dtype is want, f"{name} is {want}, got {tensor.dtype}")


def contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.is_contiguous(), f"{name} must be contiguous")


def shape(name: str, tensor: torch.Tensor, *want: int | None) -> None:
    """None stands for any size."""
    fits = tensor.dim() == len(want) and all(w is None or w == n for w, n in zip(want, tensor.shape))
    told = ", ".join("any" if w is None else str(w) for w in want)
    require(fits, f"{name} has shape [{told}], got {list(tensor.shape)}")


def absent(name: str, tensor: torch.Tensor | None) -> None:
    require(tensor is None, f"{name} is not emulated")


def twins(name: str, host: torch.Tensor, card: torch.Tensor) -> list[int]:
    """Lengths that are given twice, on the host and on the card: int32, and equal."""
    dtype(INT32, **{f"{name}_cpu": host, f"{name}_xpu": card})
    require(torch.equal(host, card), f"{name}_cpu and {name}_xpu are equal, got {host.tolist()} and {card.tolist()}")
    values: list[int] = host.tolist()
    return values


def running(name: str, host: torch.Tensor, card: torch.Tensor, last: int | None) -> list[int]:
    """A running sum that begins with 0 ("lod")."""
    values = twins(name, host, card)
    require(values[0] == 0 and values == sorted(values), f"{name} is a running sum that begins with 0, got {values}")
    require(last is None or values[-1] == last, f"{name} ends with {last} rows, got {values[-1]}")
    return values
