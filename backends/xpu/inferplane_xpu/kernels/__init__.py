"""Kernels of family "xpu": for now, on either, those composed from torch's own operators."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel


def intel_kernels() -> list[Kernel]:
    """Every kernel the Intel backend declares."""
    return composed_kernels()


def kunlun_kernels() -> list[Kernel]:
    """Every kernel the Kunlun backend declares."""
    return composed_kernels()
