"""The two backends of family "xpu", each in a folder of its own: Intel's and Kunlun's stacks have nothing in common."""

from __future__ import annotations

from inferplane_xpu.intel.backend import IntelBackend
from inferplane_xpu.kunlun.backend import KunlunBackend

__all__ = ["IntelBackend", "KunlunBackend"]
