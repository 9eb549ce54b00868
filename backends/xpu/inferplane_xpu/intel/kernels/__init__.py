"""Kernels for Intel GPUs: the operators of vllm-xpu-kernels, torch's own on packed weights, what Intel's archived
extension still serves, and for the rest what is composed from torch's operators on the GPU.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_xpu.intel.kernels import attention, basic, legacy, mla, moe, products


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. torch.ops looks the vendor's operators up when they are called."""
    return [
        *basic.KERNELS,
        *attention.KERNELS,
        *mla.KERNELS,
        *moe.KERNELS,
        *products.KERNELS,
        *legacy.KERNELS,
        *composed_kernels(),
    ]
