"""Linear layers and the output head on native kernels: bf16 weights as they lie in memory, a row at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import RANK_PORTABLE, Batch, Kernels, When
from inferplane_cpu.native import BF16, Matrix, library

KERNELS = Kernels()
RANK_FIXED = RANK_PORTABLE - 10
"""Kernels whose rows never depend on each other, but whose large products oneDNN does faster."""
FEW_ROWS = 32
"""With more rows a product is bound by arithmetic, and oneDNN's is faster."""


def _usual(op: Any) -> bool:
    return op.act is None and op.out_dtype in (None, torch.bfloat16, torch.float32)


def _in_bf16(op: Any) -> bool:
    return op.weight.dtype in (None, torch.bfloat16)


USUAL = When(
    dtypes=(torch.bfloat16,),
    features=("native",),
    needs=(("plain activations, and a bfloat16 or float32 result", _usual), ("a bfloat16 weight", _in_bf16)),
)
HEAD = When(dtypes=(torch.bfloat16,), features=("native",), needs=(("a bfloat16 weight", _in_bf16),))


def matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """A bf16 weight `[n, k]` as the library reads it; rows may be strided."""
    n, k = weight.shape
    return Matrix(
        BF16, 0, n, k, weight.stride(0), weight.data_ptr(), None, None, bias.data_ptr() if bias is not None else None
    )


def multiply(w: Matrix, x: torch.Tensor, wide: bool) -> torch.Tensor:
    """`x w^T`: `[T, n]` in float32 when `wide`, else in bf16."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = x.new_empty(x.shape[0], w.n, dtype=torch.float32 if wide else torch.bfloat16)
    library().ip_linear(w, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), w.n, wide)
    return y


def _matrix_of(p: Any) -> Matrix:
    """The site's matrix, described once and kept on its view."""
    found = p.__dict__.get("matrix")
    if found is None:
        found = p.matrix = matrix(p.weight, getattr(p, "bias", None))
    return found


@KERNELS("linear", "native", when=USUAL, rank=RANK_FIXED, batch_invariant=True)
def linear_fixed(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Every row by the native product, whatever their number."""
    return multiply(_matrix_of(p), x, p.out_dtype is torch.float32)


@KERNELS("linear", "native", when=USUAL, rank=RANK_PORTABLE)
def linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Few rows by the native product, many by oneDNN's, on the same weight."""
    if x.shape[0] <= FEW_ROWS or p.out_dtype is torch.float32:
        return multiply(_matrix_of(p), x, p.out_dtype is torch.float32)
    return F.linear(x, p.weight, p.bias)


@KERNELS("lm_head", "native", when=HEAD, rank=RANK_FIXED, batch_invariant=True)
def lm_head_fixed(p: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows that want logits by the native product, in float32."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    return multiply(_matrix_of(p), rows, True)


@KERNELS("lm_head", "native", when=HEAD, rank=RANK_PORTABLE)
def lm_head(p: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Few rows by the native product, in float32; many by oneDNN's, widened."""
    rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
    if rows.shape[0] <= FEW_ROWS:
        return multiply(_matrix_of(p), rows, True)
    return F.linear(rows, p.weight).float()
