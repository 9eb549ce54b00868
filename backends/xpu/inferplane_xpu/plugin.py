"""Tells Inferplane that family "xpu" exists. The backends themselves are imported only when probed or chosen."""

from __future__ import annotations

from collections.abc import Callable

from inferplane.plugin import hookimpl

INFERPLANE_API = (1, 1)


@hookimpl
def inferplane_register_backends(register: Callable[[str, str], None]) -> None:
    """Register Intel GPUs and Kunlun cards, which share a family name and nothing else."""
    register("xpu:intel", "inferplane_xpu.intel.backend:IntelBackend")
    register("xpu:kunlun", "inferplane_xpu.kunlun.backend:KunlunBackend")


@hookimpl
def inferplane_register_kernels(register: Callable[[str, str], None]) -> None:
    """Register what is left of Intel's extension for processors."""
    register("cpu", "inferplane_xpu.intel.processors:kernels")
