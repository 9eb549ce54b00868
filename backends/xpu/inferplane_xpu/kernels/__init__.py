"""Kernels of family "xpu": for now, on either, those composed from torch's own operators."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel


def declared_intel() -> list[Kernel]:
    """Every kernel declared for Intel GPUs."""
    return composed_kernels()


def declared_kunlun() -> list[Kernel]:
    """Every kernel declared for Kunlun cards."""
    return composed_kernels()
