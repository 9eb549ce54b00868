"""Kernels for Kunlun cards: for now those composed from torch's own operators."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    return composed_kernels()
