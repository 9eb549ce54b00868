"""What of a DCU most functions check, and which DCU is emulated."""

from __future__ import annotations

import os

from tests.vendors.checks import HALF, INT32, LIFTED, absent, contiguous, dtype, half, shape

ARCH = os.environ.get("INFERPLANE_EMULATED_ARCH", "gfx936")
BLOCK = 64

__all__ = ["ARCH", "BLOCK", "HALF", "INT32", "LIFTED", "absent", "contiguous", "dtype", "half", "shape"]
