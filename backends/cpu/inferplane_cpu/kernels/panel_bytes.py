"""Bytes of weights in panels, before they are packed: by format, shape and what the checkpoint says of its types."""

from __future__ import annotations

import math
from typing import NamedTuple

from inferplane.plugin import Weight
from inferplane_cpu.kernels.packing import (
    COLUMNS_WITH_UNITS,
    MAX_GROUP_COLUMNS,
    PANEL_ROWS,
    SIX_BIT_COLUMNS,
    UNIT_COLUMNS,
)


class PanelForm(NamedTuple):
    """How a weight format lies in panels: bits of an entry, columns that share a scale (0: the row), minimums."""

    bits: int
    columns: int
    has_minimums: bool = False


FORM_OF = {
    "int8_row": PanelForm(8, 0),
    "int8_group": PanelForm(8, 128),
    "int8_group32": PanelForm(8, 32),
    "int8_group16": PanelForm(8, 16),
    "int8_min16": PanelForm(8, 16, has_minimums=True),
    "int4_row": PanelForm(4, 0),
    "int4_group": PanelForm(4, 128),
    "int4_group64": PanelForm(4, 64),
    "int4_group32": PanelForm(4, 32),
    "int4_min32": PanelForm(4, 32, has_minimums=True),
    "mxfp4": PanelForm(4, 32),
    "nvfp4": PanelForm(4, 16),
}


def count_panel_bytes(weight: Weight) -> int:
    """Bytes of a weight's `Panels` as far as its format and the checkpoint's type of it tell: scales are taken to fit
    float16 unless they are powers of two, or integers times a unit, as those of GGUF's K types.

    Args:
        weight: of one of `PANEL_FORMATS`.
    """
    *experts, n, k = weight.shape
    form, widths = FORM_OF[weight.format], weight.widths
    columns = 0 if form.columns >= k and not form.has_minimums else form.columns
    step = 32 if columns == SIX_BIT_COLUMNS else columns or MAX_GROUP_COLUMNS
    rows, padded = -(-n // PANEL_ROWS) * PANEL_ROWS, -(-k // step) * step
    is_narrow = columns == SIX_BIT_COLUMNS and widths is not None and widths.entry_bits <= 6
    groups = padded // columns if columns else 1
    if weight.format == "mxfp4":
        a_row = groups
    elif widths is not None and widths.has_unit_scales and columns in COLUMNS_WITH_UNITS:
        a_row = groups + 2 * -(-k // UNIT_COLUMNS)
    else:
        a_row = 2 * groups
    # Signed integers of 3 bits are entries of MXFP4 too, which has no minimums.
    is_e2m1 = is_narrow and widths is not None and widths.entry_bits <= 3 and not form.has_minimums
    bits = 4 if is_e2m1 else 6 if is_narrow else form.bits
    entries = padded * bits // 8
    return math.prod(experts) * rows * (entries + a_row * (2 if form.has_minimums else 1))
