"""Kernels of the cpu backend: sampling of its own; else those composed from torch's operators, which are oneDNN and
MKL underneath.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_cpu.kernels import sampling


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    return [*sampling.KERNELS, *composed_kernels()]
