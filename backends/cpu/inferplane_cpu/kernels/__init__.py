"""Kernels of the cpu backend: native ones, sampling of its own, and those composed from torch's operators, which are
oneDNN and MKL underneath.
"""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_cpu.kernels import (
    attention,
    compressed_attention,
    hyper,
    layer,
    linear,
    model,
    moe,
    recurrent,
    recurrent_block,
    rowwise,
    sampling,
    sparse_attention,
    torch_batch_invariant,
)


def kernels() -> list[Kernel]:
    """Every kernel this backend declares."""
    native = [
        *linear.KERNELS,
        *linear.HEAD_KERNELS,
        *rowwise.KERNELS,
        *attention.KERNELS,
        *sparse_attention.KERNELS,
        *compressed_attention.KERNELS,
        *moe.KERNELS,
        *hyper.KERNELS,
        *recurrent.KERNELS,
        *recurrent_block.KERNELS,
        *layer.KERNELS,
        *model.KERNELS,
    ]
    return [*native, *sampling.KERNELS, *composed_kernels(), *torch_batch_invariant.KERNELS]
