"""Kernels composed from torch's own operators, rank 10: what a backend declares before it has anything faster.

They run wherever torch has the operators (2.5 or newer), on any KV layout, because they look into a cache only through
`LayerKV.read` and `LayerKV.write`.
"""

from __future__ import annotations

from inferplane.kernels.composed import attention, basic, compressed, moe, sparse
from inferplane.types import Kernel


def composed_kernels() -> list[Kernel]:
    """Every composed kernel. Pure: nothing is imported beyond torch, nothing is allocated."""
    return [*basic.KERNELS, *attention.KERNELS, *moe.KERNELS, *sparse.KERNELS, *compressed.KERNELS]


__all__ = ["composed_kernels"]
