"""What of a DCU most functions check, and which DCU is emulated."""

from __future__ import annotations

import os

import pytest

from tests.vendors.checks import HALF, INT32, LIFTED, absent, contiguous, dtype, half, shape

ARCH = os.environ.get("INFERPLANE_EMULATED_ARCH", "gfx936")
BLOCK = 64
whole = pytest.mark.skipif(
    LIFTED or ARCH != "gfx936", reason="in the vendor's dtypes, on gfx936: without INFERPLANE_EMULATED_..."
)

__all__ = ["ARCH", "BLOCK", "HALF", "INT32", "LIFTED", "absent", "contiguous", "dtype", "half", "shape", "whole"]
