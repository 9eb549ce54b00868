"""Which series of Ascend is emulated, and the checks that most of its operators share."""

from __future__ import annotations

import os

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.vendors.checks import HALF, INT32, LIFTED, contiguous, shape
from tests.vendors.emulator import require

ARCH = os.environ.get("INFERPLANE_EMULATED_ARCH", "910b")
FLOATS = (torch.float32, *HALF)
DTYPE = torch.float16 if ARCH == "310p" else torch.bfloat16
"""Of models that are tried on this series."""
A2_A3 = ("910b", "910_93", "950")
EVERY = (*A2_A3, "310p")
INNER_LIMIT = 65536


def runs_on(operator: str, *series: str) -> None:
    require(ARCH in series, f"{operator} is for {', '.join(series)}, not for {ARCH}")


def dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    if LIFTED and set(allowed) & set(HALF):
        allowed = (*allowed, torch.float32)
    if ARCH == "310p":
        allowed = tuple(d for d in allowed if d is not torch.bfloat16)
    require(tensor.dtype in allowed, f"{name} is {' or '.join(map(str, allowed))} on {ARCH}, got {tensor.dtype}")


def same_dtype(words: str, *tensors: torch.Tensor) -> None:
    found = {t.dtype for t in tensors}
    require(len(found) == 1, f"{words} have one dtype, got {', '.join(sorted(map(str, found)))}")


_IN_NZ: dict[int, StorageWeakRef] = {}


def put_in_nz(tensor: torch.Tensor) -> None:
    """From now on this tensor, and every view of it, counts as one of the NZ format."""
    storage = tensor.untyped_storage()
    _IN_NZ[storage._cdata] = StorageWeakRef(storage)


def in_nz(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        known = _IN_NZ.get(tensor.untyped_storage()._cdata)
        require(known is not None and not known.expired(), f"{name} must have the NZ format on {ARCH}")


def unused(**arguments: object) -> None:
    """Arguments whose meaning is not emulated: a kernel that passes one needs an emulator that knows it."""
    for name, value in arguments.items():
        require(value is None or value == 0 or value is False, f"{name}={value!r} is not emulated")


__all__ = ["HALF", "INT32", "LIFTED", "contiguous", "shape"]
