"""Kernels for Ascend NPUs: the vendor's fused operators, and torch's own on the NPU for the rest."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_npu.kernels import (
    attention,
    attention_int8,
    basic,
    hyper,
    mla,
    moe,
    quant,
    recurrent,
    sparse,
    sparse_blocks,
)


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. torch.ops looks the vendor's operators up when they are called."""
    return [
        *basic.KERNELS,
        *quant.KERNELS,
        *attention.KERNELS,
        *attention_int8.KERNELS,
        *mla.KERNELS,
        *sparse.KERNELS,
        *sparse_blocks.KERNELS,
        *hyper.KERNELS,
        *moe.KERNELS,
        *recurrent.KERNELS,
        *composed_kernels(),
    ]
