"""Weights as the native kernels read them: bf16 and FP8 where they lie, others in panels of 16 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from inferplane.kernels.composed.padding import pad_rows
from inferplane.plugin import Context, KernelError, QTensor
from inferplane_cpu import huge_pages
from inferplane_cpu.native import BF16, BF16_REORDERABLE, FP8, INT4, INT6, INT8, MXFP4, W8A8, library
from inferplane_cpu.structs import Matrix

PANEL_ROWS = 16
MAX_GROUP_COLUMNS = 128
LATENT_FORMATS = ("int8_row", "int8_group", "int8_group32", "int4_row", "int4_group", "int4_group32", "int4_group64")
"""Formats of panels that latent attention folds queries with: without minimums, groups of at least 32 columns."""
PANEL_FORMATS = (*LATENT_FORMATS, "int8_group16", "int4_min32", "int8_min16", "mxfp4", "nvfp4")
"""Formats that are packed in panels, once, at load."""
INT8_ROW_FORMATS = ("int8_row",)
"""Formats whose panels activations of 8 bits may meet (`with_int8_activations`)."""
MAX_INT8_COLUMNS = 65536
"""Sums of at most this many products of bytes fit 32 bits."""
UNIT_COLUMNS = 256
"""Columns that share a unit of scales which are integers."""
MAX_MULTIPLE = 128
"""From which integer on a unit is not divided further: multiples have 8 bits."""
COLUMNS_WITH_UNITS = (16, 32)
"""Columns of a group whose scales may be integers times a unit."""
SIX_BIT_COLUMNS = 16
"""Columns of a group whose entries of 8 bits are stored in 6 if they fit."""
E2M1_COLUMNS = (16, 32)
"""Columns of a group whose entries of 8 bits are stored in 4 if all are twice a value of e2m1."""
E2M1_ENTRIES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitudes of e2m1."""
NO_E2M1_ENTRIES = tuple(number for number in range(E2M1_ENTRIES[-1]) if number not in E2M1_ENTRIES)
"""The integers between them."""
ENTRIES_AT_ONCE = 2**20
"""Entries that are looked at together."""
PANELS_AT_ONCE = 1024
"""Panels whose scales are made integers at a time."""
EXPANDED_ROWS = 1024
"""Rows of a packed weight that are expanded at a time when many tokens are multiplied with it."""


class Panels:
    """A weight `[n, k]`, or a stack `[experts, n, k]`, of 8 bits, 4 bits, MXFP4 or NVFP4 in panels
    (csrc/products/weight_panels.h). Entries of 8 bits in groups of 16 columns take 6 if all are from -32 to 31, as
    those of GGUF's Q6_K, Q5_K, Q5_1 and Q2_K are, and 4 if all are entries of MXFP4 or NVFP4, in groups of 32 too;
    Q3_K's are. Scales of such entries that are powers of two take a byte, and so do scales in groups of 16 and 32
    columns that are small multiples of one number of float16 in each 256 columns. Others take 2 bytes where float16
    holds them, else 4; minimums are stored as scales are. No value changes.

    Args:
        q: the canonical weight; with scales a row or a group of columns, without zero points.
        kind: `MXFP4`, of which `q` must have the canonical integers; None: what `q` holds.

    Raises:
        KernelError: zero points, or other blocks or entries than the kernels know.
    """

    def __init__(self, q: QTensor, kind: int | None = None) -> None:
        n, k = q.shape[-2:]
        columns = q.block[1]
        experts = q.data.reshape(-1, n, k)
        kind = kind or _find_kind(q, experts)
        whole = columns >= k and q.minimum is None
        if q.minimum is not None and columns >= k and columns < 32:
            columns = 32  # a slice within one group
        fits = whole or (columns % 32 == 0 and columns <= MAX_GROUP_COLUMNS) or (columns == 16 and kind != INT4)
        if q.zero is not None or q.block[0] != 1 or not fits:
            raise KernelError(
                f"Panels of a weight with blocks of {q.block}{' and zero points' if q.zero is not None else ''}.",
                there_is="one scale a row, or one a group of 32, 64, 96 or 128 columns, or of 16 with 8 bits, without "
                "zero points; minimums with groups",
            )
        columns = 0 if whole else columns
        if columns == SIX_BIT_COLUMNS and kind == INT8 and _fits_six_bits(experts):
            kind = INT6
        self.scales: dict[str, torch.Tensor] = {}
        for name, numbers in (("scale", q.scale), ("minimum", q.minimum)):
            if numbers is not None:
                rows = _arrange(numbers.reshape(len(experts), n, -1), columns)
                found = _narrow_scales(rows, kind, name, columns)
                self.scales.update({field: huge_pages.copy(numbers) for field, numbers in found.items()})
        self.kind, self.columns, self.shape = kind, columns, (n, k)
        self.data = huge_pages.empty(len(experts), count_bytes(kind, columns, n, k))
        self.point()
        for matrix, values, data in zip(self.matrices, experts, self.data, strict=True):
            if not library().ip_pack_weight(matrix, values.contiguous().data_ptr(), data.data_ptr()):
                raise KernelError(
                    "MXFP4 panels of a weight with other entries.",
                    there_is="0, 1, 2, 3, 4, 6, 8, 12 and -1 to -12",
                )

    def point(self) -> None:
        """Make `matrices`, whose addresses are those of `data` and `scales`."""
        self.matrices = (Matrix * len(self.data))()
        for i, data in enumerate(self.data):
            pointers = {field: numbers[i].data_ptr() for field, numbers in self.scales.items()}
            self.matrices[i] = Matrix(self.kind, self.columns, *self.shape, 0, data=data.data_ptr(), **pointers)

    @property
    def nbytes(self) -> int:
        """Bytes of entries and scales."""
        return self.data.numel() + sum(numbers.nbytes for numbers in self.scales.values())


def count_bytes(kind: int, columns: int, n: int, k: int) -> int:
    """Bytes of the entries of one weight `[n, k]` in panels."""
    found: int = library().ip_packed_bytes(Matrix(kind, columns, n, k, 0))
    return found


def _arrange(numbers: torch.Tensor, columns: int) -> torch.Tensor:
    """Scales `[experts, n, groups]` as panels have them, `[experts, panels, groups, rows]`: zeros after the last row,
    and an even number of groups of 16."""
    n, groups = numbers.shape[1:]
    rows = torch.nn.functional.pad(numbers, (0, groups % 2 if columns == 16 else 0, 0, -n % PANEL_ROWS))
    return rows.unflatten(1, (-1, PANEL_ROWS)).transpose(2, 3).contiguous()


def _find_kind(q: QTensor, experts: torch.Tensor) -> int:
    """The kind that holds the entries `[experts, n, k]` of `q` in the fewest of 8 and 4 bits."""
    if q.bits == 4:
        return INT4
    is_grouped = q.block[1] in E2M1_COLUMNS and q.zero is None and q.minimum is None
    return MXFP4 if is_grouped and all(map(_fits_e2m1, experts)) else INT8


def _fits_e2m1(entries: torch.Tensor) -> bool:
    """Whether all entries, int8, are twice a value of e2m1. Most others are known by a few rows."""
    if entries.dtype is not torch.int8 or not entries.numel():
        return False
    for part in entries.split(max(1, ENTRIES_AT_ONCE // entries.shape[1])):
        least, most = part.aminmax()
        if int(least) < -E2M1_ENTRIES[-1] or int(most) > E2M1_ENTRIES[-1]:
            return False
        magnitudes = part.abs()
        if any(bool((magnitudes == number).any()) for number in NO_E2M1_ENTRIES):
            return False
    return True


def _fits_six_bits(entries: torch.Tensor) -> bool:
    """Whether signed integers of 6 bits hold all entries, int8."""
    if not entries.numel():
        return True
    least, most = entries.aminmax()
    return int(least) >= -32 and int(most) <= 31


def _narrow_scales(rows: torch.Tensor, kind: int, name: str, columns: int) -> dict[str, torch.Tensor]:
    """Scales or minimums in the fewest bytes that hold them exactly, by fields of `Matrix`.

    Args:
        rows: float32, as `_arrange` returns them.
        kind: of the matrix.
        name: "scale" or "minimum".
        columns: of a group; 0: one scale a row.
    """
    if kind == MXFP4:
        exponents = _take_exponents(rows)
        if exponents is not None:
            return {"scale_exponent": exponents}
    half = _narrow_to_half(rows)
    if half is not None:
        return {f"{name}_f16": half}
    found = _find_units(rows, UNIT_COLUMNS // columns) if columns in COLUMNS_WITH_UNITS else None
    return {name: rows} if found is None else {f"{name}_code": found[0], f"{name}_unit": found[1]}


def _find_units(rows: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales as products of integers of 8 bits and a unit in float16 per `groups` of them, or None if some are no such
    products.

    The unit is their greatest common divisor, or a fraction of it that float16 holds: significands of float32 are
    integers times a power of two.

    Args:
        rows: float32 `[experts, panels, all groups, rows]`.
        groups: neighbours that share a unit.

    Returns:
        int8 of the same shape, and float16 `[experts, panels, units, rows]`.
    """
    found = []
    for part in rows.split(PANELS_AT_ONCE, 1):
        if (units := _find_units_of(part, groups)) is None:
            return None
        found.append(units)
    return torch.cat([multiples for multiples, _ in found], 1), torch.cat([unit for _, unit in found], 1)


def _find_units_of(rows: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not bool(rows.isfinite().all()):
        return None
    all_groups = rows.shape[2]
    wide = torch.nn.functional.pad(rows, (0, 0, 0, -all_groups % groups)).unflatten(2, (-1, groups))
    fraction, exponent = torch.frexp(wide)
    low = exponent.masked_fill(fraction == 0, 1000).amin(3, keepdim=True)
    low = low.masked_fill(low == 1000, 0)
    integers = (fraction.abs() * 2.0**24).long() << (exponent - low).clamp(0, 20)  # of units of 2^(low - 24)
    divisor = integers[:, :, :, 0]
    for i in range(1, groups):
        divisor = torch.gcd(divisor, integers[:, :, :, i])
    divisor = divisor.clamp(min=1)
    multiples = integers // divisor[:, :, :, None]
    unit = torch.ldexp(divisor.float(), (low[:, :, :, 0] - 24).clamp(-200, 200))
    multiples = torch.where(fraction < 0, -multiples, multiples)
    factor = _find_fraction(unit)
    if factor is None:
        return None
    multiples, unit = multiples * factor[:, :, :, None], unit / factor
    inverted = (multiples > 127).any(3, keepdim=True)  # 128 times a unit is -128 times its negative
    multiples, unit = torch.where(inverted, -multiples, multiples), torch.where(inverted[:, :, :, 0], -unit, unit)
    if bool(((multiples > 127) | (multiples < -128)).any()) or not torch.equal(
        multiples.float() * unit[:, :, :, None], wide
    ):
        return None
    return multiples.to(torch.int8).flatten(2, 3)[:, :, :all_groups].contiguous(), unit.half().contiguous()


def _find_fraction(units: torch.Tensor) -> torch.Tensor | None:
    """The smallest integers by which units of float32 are divided to be numbers of float16; None if some have none."""
    factor = torch.zeros(units.shape, dtype=torch.int64)
    for tried in range(1, MAX_MULTIPLE):
        parts = units / tried
        fits = (parts.half().float() == parts) & (parts * tried == units)
        factor = torch.where((factor == 0) & fits, tried, factor)
        if bool(factor.all()):
            return factor
    return None


def _narrow_to_half(scales: torch.Tensor) -> torch.Tensor | None:
    """Scales in float16, or None if some of them would be others."""
    half = scales.half()
    return half if bool((half.float() == scales).all()) else None


def _take_exponents(scales: torch.Tensor) -> torch.Tensor | None:
    """The exponent bits of float32 scales as uint8, or None if some of them have other bits."""
    bits = scales.view(torch.int32)
    return None if bool((bits & ~(255 << 23)).any()) else (bits >> 23).to(torch.uint8)


def pack_mxfp4(q: QTensor) -> Panels:
    """The panels of a weight of format "mxfp4".

    Raises:
        KernelError: as `Panels`.
    """
    return Panels(q, MXFP4)


def matrices(weight: Any, bias: torch.Tensor | None = None) -> Any:
    """An array of `Matrix`, one an expert (one in all for `[n, k]`). It holds the weight, which is a tensor, an FP8
    `QTensor`, or `Panels`, and the bias, `[n]` or `[experts, n]`.

    Raises:
        KernelError: FP8 blocks of other than 128 columns.
    """
    found: Any
    if isinstance(weight, Panels):
        found = _array(list(weight.matrices))
    elif isinstance(weight, QTensor):
        if weight.block[1] != 128 or weight.zero is not None:
            raise KernelError(f"An FP8 weight with blocks of {weight.block}.", there_is="blocks of 128 columns")
        n, k = weight.shape[-2:]
        huge_pages.move_to_huge_pages(weight.data)
        pairs = list(zip(_stack(weight.data), _stack(weight.scale), strict=True))
        found = _array(
            [Matrix(FP8, weight.block[0], n, k, k, d.data_ptr(), s.data_ptr(), None, None) for d, s in pairs]
        )
    else:
        huge_pages.move_to_huge_pages(weight)
        found = _array([Matrix(BF16, 0, *w.shape, w.stride(0), w.data_ptr(), None, None, None) for w in _stack(weight)])
    if bias is not None:
        found = _array([Matrix.from_buffer_copy(m) for m in found])
        for matrix, row in zip(found, bias.view(len(found), -1), strict=True):
            matrix.bias = row.data_ptr()
    found.memory = weight, bias  # for as long as the array, or a matrix of it, is held
    return found


def with_int8_activations(found: Any) -> Any:
    """The same matrices for products that round activations to 8 bits per row (csrc/products/w8a8.h)."""
    return _of_kind(found, lambda kind: W8A8)


def with_input(found: Any, input: int) -> Any:
    """The same matrices, those of 4 bits for products that round activations to `input`, one of `ip_input`
    (csrc/products/quantize_narrow.h)."""
    matrices = [Matrix.from_buffer_copy(m) for m in found]
    for matrix in matrices:
        matrix.input = input if matrix.kind in (INT4, MXFP4) else matrix.input
    made: Any = _array(matrices)
    made.memory = found.memory
    return made


def with_any_order(found: Any) -> Any:
    """The same matrices for kernels that are not batch-invariant: bf16 may be summed in another order with few rows of
    activations than with many, where that reads memory faster (csrc/products/bf16_dot.h)."""
    return _of_kind(found, lambda kind: BF16_REORDERABLE if kind == BF16 else kind)


def _of_kind(found: Any, kind: Callable[[int], int]) -> Any:
    matrices = [Matrix.from_buffer_copy(m) for m in found]
    for matrix in matrices:
        matrix.kind = kind(matrix.kind)
    made: Any = _array(matrices)
    made.memory = found.memory
    return made


Adapt = Callable[[Any], Any] | None
"""`with_int8_activations`, `with_input`, `with_any_order` or none: what kernels prepare."""


def prepare_int8_activations(op: Any, ctx: Context) -> Adapt:
    """`prepare` of kernels that round activations to 8 bits."""
    return with_int8_activations


def prepare_input(input: int) -> Callable[[Any, Context], Adapt]:
    """`prepare` of kernels that round activations to `input`."""

    def prepare(op: Any, ctx: Context) -> Adapt:
        return partial(with_input, input=input)

    return prepare


def prepare_any_order(op: Any, ctx: Context) -> Adapt:
    """`prepare` of kernels that are not batch-invariant. Results in float32 are a router's, which is small, and whose
    last bits may choose another expert: it is summed in one order."""
    return None if getattr(op, "out_dtype", None) is torch.float32 else with_any_order


def adapt_matrices(adapt: Adapt, weight: Any, bias: torch.Tensor | None = None) -> Any:
    """A weight's `matrices`, as a kernel that prepared `adapt` reads them."""
    found = matrices(weight, bias)
    return found if adapt is None else adapt(found)


def expand_rows(w: Matrix, first: int, last: int) -> torch.Tensor:
    """Rows `first:last` of a weight of any kind in bf16, `[last - first, k]`."""
    out = torch.empty(last - first, w.k, dtype=torch.bfloat16)
    library().ip_dequantize_rows(w, first, last, out.data_ptr())
    return out


def multiply_panels(w: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x w^T + bias` by oneDNN for many rows of x: a quantized weight is expanded some rows at a time."""
    rows, x = x.shape[0], pad_rows(x)
    y = x.new_empty(x.shape[0], w.n)
    for first in range(0, w.n, EXPANDED_ROWS):
        last = min(w.n, first + EXPANDED_ROWS)
        part = None if bias is None else bias[first:last]
        y[:, first:last] = torch.nn.functional.linear(x, expand_rows(w, first, last), part)
    return y[:rows]


def _stack(t: torch.Tensor) -> Sequence[torch.Tensor]:
    return list(t) if t.dim() == 3 else [t]


def _array(found: Sequence[Matrix]) -> ctypes.Array[Matrix]:
    return (Matrix * len(found))(*found)
