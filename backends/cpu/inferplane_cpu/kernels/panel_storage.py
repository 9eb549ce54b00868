"""The packings of panels, and how files hold them: the bytes that the kernels read, and the scales as they are."""

from __future__ import annotations

import math

import torch

from inferplane.plugin import KernelError, PackedStorage, Packing, StoredWeight
from inferplane_cpu import huge_pages
from inferplane_cpu.kernels.packing import (
    COLUMNS_WITH_UNITS,
    MAX_GROUP_COLUMNS,
    PANEL_ROWS,
    UNIT_COLUMNS,
    Panels,
    count_bytes,
    pack_mxfp4,
)
from inferplane_cpu.kernels.panel_bytes import count_panel_bytes
from inferplane_cpu.native import INT4, INT6, INT8, MXFP4

VERSION = "2"
"""Of the layout in csrc/products/weight_panels.h: grows with every change of what its bytes mean."""
DATA, KIND, COLUMNS = "data", "kind", "columns"
KINDS = {"int8": INT8, "int6": INT6, "int4": INT4, "mxfp4": MXFP4}
"""Kinds of panels by their names in files."""


def write_panels(panels: Panels) -> StoredWeight:
    """The tensors and facts of a file."""
    kind = next(name for name, kind in KINDS.items() if kind == panels.kind)
    return StoredWeight({DATA: panels.data, **panels.scales}, {KIND: kind, COLUMNS: panels.columns})


def read_panels(stored: StoredWeight, shape: tuple[int, ...]) -> Panels:
    """Panels of a weight `[n, k]` or `[experts, n, k]` over the tensors that were read; nothing is copied.

    Raises:
        KernelError: the tensors or facts are none of panels of this shape.
    """
    n, k = shape[-2:]
    experts = math.prod(shape[:-2])
    kind, columns = KINDS.get(str(stored.facts.get(KIND))), stored.facts.get(COLUMNS)
    if kind is None or type(columns) is not int or not _fits(kind, columns) or len(stored.facts) != 2:
        raise KernelError(f"Panels of {dict(stored.facts)}.", there_is=f"columns, and kinds {', '.join(KINDS)}")
    panels = Panels.__new__(Panels)
    panels.kind, panels.columns, panels.shape = kind, columns, (n, k)
    scales = dict(stored.tensors)
    panels.data = _check(DATA, scales.pop(DATA, None), (experts, count_bytes(kind, columns, n, k)), torch.uint8)
    groups = math.ceil(k / columns) if columns else 1
    groups += groups % 2 if columns == 16 else 0
    each = (experts, math.ceil(n / PANEL_ROWS), groups, PANEL_ROWS)
    units = (*each[:2], math.ceil(groups * columns / UNIT_COLUMNS), PANEL_ROWS)
    forms = {"_f16": (each, torch.float16), "": (each, torch.float32), "_code": (each, torch.int8)}
    forms |= {"_unit": (units, torch.float16), "_exponent": (each, torch.uint8)}
    widths: list[tuple[str, ...]] = [("_f16",), ("",)]
    widths += [("_exponent",)] if kind == MXFP4 else []
    widths += [("_code", "_unit")] if columns in COLUMNS_WITH_UNITS else []
    panels.scales = {}
    for name, known in (("scale", widths), ("minimum", [(), *(widths if columns and kind != MXFP4 else ())])):
        found = tuple(form for form in forms if f"{name}{form}" in scales)
        if found not in known:
            raise KernelError(f"Panels whose {name}s are {', '.join(found) or 'not there'}.", there_is=f"{known}")
        for field in (f"{name}{form}" for form in found):
            panels.scales[field] = _check(field, scales.pop(field), *forms[field.removeprefix(name)])
    if scales:
        raise KernelError(f"Panels with {', '.join(scales)}.")
    panels.point()
    return panels


def _fits(kind: int, columns: int) -> bool:
    """Whether the kernels know panels of a kind with so many columns in a group (0: a row is one)."""
    if kind == INT6 or columns == 16:
        return columns == 16 and kind != INT4
    return columns == 0 or (columns % 32 == 0 and 0 < columns <= MAX_GROUP_COLUMNS)


def _check(name: str, found: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if found is None or tuple(found.shape) != shape or found.dtype is not dtype or not found.is_contiguous():
        what = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
        raise KernelError(f"Panels with {what} for {name!r}.", there_is=f"{shape} {dtype}")
    return found


STORAGE = PackedStorage(VERSION, write_panels, read_panels, huge_pages.empty)
PACKING = Packing("native.panels", Panels, dense=True, storage=STORAGE, count_bytes=count_panel_bytes)
MXFP4_PACKING = Packing("native.mxfp4_panels", pack_mxfp4, dense=True, storage=STORAGE, count_bytes=count_panel_bytes)
