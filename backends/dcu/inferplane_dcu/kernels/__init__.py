"""Kernels for Hygon DCUs: the vendor's fused functions, portable Triton, and torch's own operators for the rest."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.kernels.triton import Launch, Tiles, triton_kernels
from inferplane.plugin import Kernel
from inferplane_dcu.kernels import attention, basic, mla, mla_fp8, moe, moe_int8
from inferplane_dcu.kvcache import PAGED

TILES = Tiles(
    prefill=Launch(32, 16, 4, 1), decode=Launch(16, 16, 4, 1), mla=Launch(16, 16, 4, 1), sparse=Launch(16, 16, 4, 1),
    index=Launch(16, 16, 4, 1),
)  # fmt: skip
"""A program may have 64 KiB of shared memory and waves have 64 lanes; in attention, Hygon's build of Triton takes at
most 16 keys per iteration (FlagGems issue 3819). One stage: shared memory holds no second.
"""


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. The vendor's functions are looked up when a kernel is linked."""
    own = [*basic.KERNELS, *attention.KERNELS, *mla.KERNELS, *mla_fp8.KERNELS, *moe.KERNELS, *moe_int8.KERNELS]
    return [*own, *triton_kernels((PAGED, f"{PAGED}_int8"), TILES.prepare), *composed_kernels()]
