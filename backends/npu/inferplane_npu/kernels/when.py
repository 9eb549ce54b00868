"""When the vendor's kernels may be used, and where a second way ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from inferplane.plugin import Context, When

RANK_ALTERNATIVE = 65
"""A second way to the same result, taken where the first is refused, or by a pin."""


class OnNpu(When):
    """As `When`; also refuses bfloat16 on a series that is without it."""

    def refusals(self, op: Any, ctx: Context, formats: Iterable[str]) -> list[str]:
        """See `When.refusals`."""
        out = super().refusals(op, ctx, formats)
        return out + ctx.features.lacking(("bf16",)) if ctx.dtype is torch.bfloat16 else out
