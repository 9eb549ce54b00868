"""Kernels for Enflame GCUs: vllm-gcu's operators, and torch's own on the GCU for the rest."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_gcu.kernels import attention, basic, mla, moe


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. torch.ops looks the vendor's operators up when they are called."""
    return [*basic.KERNELS, *attention.KERNELS, *mla.KERNELS, *moe.KERNELS, *composed_kernels()]
