"""Kernels for Kunlun cards: functions of kunlun_ops and xspeedgate_ops, and torch's own on the card for the rest."""

from __future__ import annotations

from inferplane.kernels.composed import composed_kernels
from inferplane.plugin import Kernel
from inferplane_xpu.kunlun.kernels import attention, basic, mla, moe, quant


def kernels() -> list[Kernel]:
    """Every kernel this backend declares. The vendor's libraries are imported when they are first called."""
    return [
        *basic.KERNELS,
        *attention.KERNELS,
        *mla.KERNELS,
        *moe.KERNELS,
        *quant.KERNELS,
        *composed_kernels(),
    ]
