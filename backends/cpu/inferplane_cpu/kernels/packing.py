"""Weights as the native kernels read them: bf16 and FP8 where they lie, 8 and 4 bits and MXFP4 in panels of 16 rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.kernels.composed.padding import pad_rows
from inferplane.plugin import Context, KernelError, Packing, QTensor
from inferplane_cpu import huge_pages
from inferplane_cpu.native import BF16, BF16_REORDERABLE, FP8, INT4, INT8, MXFP4, W8A8, library
from inferplane_cpu.structs import Matrix

PANEL_ROWS = 16
MAX_GROUP_COLUMNS = 128
PANEL_FORMATS = ("int8_row", "int8_group", "int4_row", "int4_group", "int4_group32", "int4_group64")
"""Formats that are packed in panels, once, at load."""
INT8_ROW_FORMATS = ("int8_row",)
"""Formats whose panels activations of 8 bits may meet (`with_int8_activations`)."""
MAX_INT8_COLUMNS = 65536
"""Sums of at most this many products of bytes fit 32 bits."""
SCALE_FIELDS = {torch.float32: "scale", torch.float16: "scale_f16", torch.uint8: "scale_exponent"}
"""Fields of `Matrix` for scales of a dtype."""
EXPANDED_ROWS = 1024
"""Rows of a packed weight that are expanded at a time when many tokens are multiplied with it."""


class Panels:
    """A weight `[n, k]`, or a stack `[experts, n, k]`, of 8 bits, 4 bits or MXFP4 in panels
    (csrc/products/weight_panels.h). Scales of MXFP4 that are powers of two take a byte.

    Args:
        q: the canonical weight; symmetric, with scales a row or a group of columns.
        kind: `MXFP4`, of which `q` has the canonical integers; None: int8 or int4, as `q` says.

    Raises:
        KernelError: zero points, or other blocks or entries than the kernels know.
    """

    def __init__(self, q: QTensor, kind: int | None = None) -> None:
        n, k = q.shape[-2:]
        columns = q.block[1]
        whole = columns >= k
        if q.zero is not None or q.block[0] != 1 or not (whole or (columns % 32 == 0 and columns <= MAX_GROUP_COLUMNS)):
            raise KernelError(
                f"Panels of a weight with blocks of {q.block}{' and zero points' if q.zero is not None else ''}.",
                there_is="one scale a row, or one a group of 32, 64, 96 or 128 columns, without zero points",
            )
        experts = q.data.reshape(-1, n, k)
        scales = q.scale.reshape(len(experts), n, -1)
        rows = torch.nn.functional.pad(scales, (0, 0, 0, -n % PANEL_ROWS))
        rows = rows.unflatten(1, (-1, PANEL_ROWS)).transpose(2, 3).contiguous()  # [experts, panels, groups, rows]
        kind = kind or (INT4 if q.bits == 4 else INT8)
        narrow = _take_exponents(rows) if kind == MXFP4 else _narrow_to_half(rows)
        scale = rows if narrow is None else narrow
        self.scale = huge_pages.empty(scale.nbytes).view(scale.dtype).view(scale.shape).copy_(scale)
        field = SCALE_FIELDS[scale.dtype]
        shape = Matrix(kind, 0 if whole else columns, n, k, 0)
        self.data = huge_pages.empty(len(experts), library().ip_packed_bytes(shape))
        self.matrices = (Matrix * len(experts))()
        for i, values in enumerate(experts):
            pointers = {"data": self.data[i].data_ptr(), field: self.scale[i].data_ptr()}
            self.matrices[i] = Matrix(kind, shape.group, n, k, 0, **pointers)
            if not library().ip_pack_weight(self.matrices[i], values.contiguous().data_ptr(), self.data[i].data_ptr()):
                raise KernelError(
                    "MXFP4 panels of a weight with other entries.",
                    there_is="0, 1, 2, 3, 4, 6, 8, 12 and -1 to -12",
                )

    @property
    def nbytes(self) -> int:
        """Bytes of entries and scales."""
        return self.data.numel() + self.scale.numel() * self.scale.element_size()


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


PACKING = Packing("native.panels", Panels, dense=True)
MXFP4_PACKING = Packing("native.mxfp4_panels", pack_mxfp4, dense=True)


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
"""`with_int8_activations`, `with_any_order` or neither: what kernels prepare."""


def prepare_int8_activations(op: Any, ctx: Context) -> Adapt:
    """`prepare` of kernels that round activations to 8 bits."""
    return with_int8_activations


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
