"""The two backends of family "xpu", each in a file of its own: Intel's and Kunlun's stacks have nothing in common."""

from __future__ import annotations

from inferplane_xpu.intel import IntelBackend
from inferplane_xpu.kunlun import KunlunBackend

__all__ = ["IntelBackend", "KunlunBackend"]
