"""What of the S60 most operators check."""

from __future__ import annotations

from tests.vendors.checks import HALF, INT32, LIFTED, absent, contiguous, dtype, half, shape

BLOCK = 64

__all__ = ["BLOCK", "HALF", "INT32", "LIFTED", "absent", "contiguous", "dtype", "half", "shape"]
