"""Checks that most operators share, and the attention kernels that the wheel holds.

`LIFTED` lets float32 in where the vendor takes 16-bit floats only: with that one check lifted a model's tokens can be
compared with another device's exactly.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tests.vendors.emulator import require

LIFTED = os.environ.get("INFERPLANE_EMULATED_FLOAT32") == "1"
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
INT32 = torch.int32
BLOCKS = (16, 32, 64)

_COMPILED = json.loads(Path(__file__).with_name("binary.json").read_text(encoding="utf-8"))["attention"]
PREFILL = {tuple(entry) for entry in _COMPILED["prefill"]}
"""(head size, blocks, causal, window) of the kernels for many query tokens."""
DECODE = {tuple(entry) for entry in _COMPILED["decode"]}
"""(query heads a tile, head size, tokens a block, window) of the kernels for single tokens."""


def bucket(dim: int, sizes: set[int]) -> int:
    """The smallest compiled size that holds a head; 0 when none does."""
    return min((size for size in sizes if size >= dim), default=0)


def half(**tensors: torch.Tensor) -> None:
    """All are of one 16-bit dtype."""
    same(HALF if not LIFTED else FLOATS, "float16 or bfloat16", **tensors)


def floats(**tensors: torch.Tensor) -> None:
    """All are of one float dtype."""
    same(FLOATS, "float16, bfloat16 or float32", **tensors)


def same(allowed: tuple[torch.dtype, ...], words: str, **tensors: torch.Tensor) -> None:
    found = {t.dtype for t in tensors.values()}
    require(len(found) == 1, f"{', '.join(tensors)} have one dtype, got {', '.join(sorted(map(str, found)))}")
    require(found <= set(allowed), f"{', '.join(tensors)} are {words}, got {found}")


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


def absent(**values: object) -> None:
    for name, value in values.items():
        require(value is None, f"{name} is not emulated")
