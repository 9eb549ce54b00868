"""Kernels of the cpu backend: native ones, sampling of its own, and those composed from torch's operators, which are
oneDNN and MKL underneath.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_cpu.kernels import attention, layer, linear, moe, rowwise, sampling
from inferplane_cpu.kernels import torch_batch_invariant as fixed


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    native = [*linear.KERNELS, *rowwise.KERNELS, *attention.KERNELS, *moe.KERNELS, *layer.KERNELS]
    return [*native, *sampling.KERNELS, *composed_kernels(), *fixed.KERNELS]
