"""Linear layers, the output head and quantized embeddings on native kernels, for weights of every format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.padding import pad_rows
from inferplane.plugin import PLAIN, RANK_PORTABLE, Batch, Kernels, When
from inferplane_cpu.kernels.narrow_inputs import NARROW_INPUTS
from inferplane_cpu.kernels.packing import (
    INT8_ROW_FORMATS,
    MAX_INT8_COLUMNS,
    PANEL_FORMATS,
    adapt_matrices,
    multiply_panels,
    prepare_any_order,
    prepare_int8_activations,
)
from inferplane_cpu.kernels.panel_storage import PACKING
from inferplane_cpu.native import FASTER_THAN_ONEDNN, current_instruction_set, library
from inferplane_cpu.structs import Matrix

KERNELS, HEAD_KERNELS = Kernels(), Kernels()
RANK_BATCH_INVARIANT = RANK_PORTABLE - 10
"""Kernels whose rows never depend on each other, where those that do not promise it are faster."""
FEW_ROWS = 32
"""With more rows a product is bound by arithmetic, and oneDNN's is faster."""


def _has_plain_activations(op: Any) -> bool:
    return op.activation_quant is None and op.out_dtype in (None, torch.bfloat16, torch.float32)


def _has_bf16_weight(op: Any) -> bool:
    return op.weight.dtype in (None, torch.bfloat16)


NEEDS = (
    ("plain activations, and a bfloat16 or float32 result", _has_plain_activations),
    ("a bfloat16 weight", _has_bf16_weight),
)
STORED = When((torch.bfloat16,), (PLAIN, "fp8_block"), features=("native",), needs=NEEDS)
PACKED = When((torch.bfloat16,), PANEL_FORMATS, features=("native",), needs=NEEDS)
INT8_ACTIVATION_ERROR = 0.03
"""What rounding activations to 8 bits per row adds to the error of a result, relative to the largest."""
INT8_ACTIVATIONS = dict(
    quantizes_activations_to="int8",
    extra_error=INT8_ACTIVATION_ERROR,
    note="activations quantized to int8",
    prepare=prepare_int8_activations,
)
"""Options of kernels that round activations to 8 bits."""


def fits_int8_sums(weight: Any) -> bool:
    """Whether sums over a weight's columns fit 32 bits."""
    return bool(weight.shape[-1] <= MAX_INT8_COLUMNS)


def _takes_int8_activations(op: Any) -> bool:
    act, wide = op.activation_quant, op.out_dtype not in (None, torch.bfloat16, torch.float32)
    return not wide and (act is None or (act.format == "int8" and act.group == 0))


FEW_COLUMNS = (f"at most {MAX_INT8_COLUMNS} columns", lambda op: fits_int8_sums(op.weight))
INT8_INPUT = When(
    (torch.bfloat16,),
    INT8_ROW_FORMATS,
    features=("native",),
    needs=(
        ("activations in int8 with a scale a token, or unquantized", _takes_int8_activations),
        NEEDS[1],
        FEW_COLUMNS,
    ),
)
HEAD = When((torch.bfloat16,), (PLAIN, "fp8_block"), features=("native",), needs=NEEDS[1:])
PACKED_HEAD = When((torch.bfloat16,), PANEL_FORMATS, features=("native",), needs=NEEDS[1:])
PACKED_ROWS = When(
    (torch.bfloat16,), PANEL_FORMATS, features=("native",), needs=(("one rank", lambda op: op.reduce is None),)
)
WEIGHT = {"weight": PACKING}


def multiply(w: Matrix, x: torch.Tensor, wide: bool) -> torch.Tensor:
    """`x w^T`: `[T, n]` in float32 when `wide`, else in bf16."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = x.new_empty(x.shape[0], w.n, dtype=torch.float32 if wide else torch.bfloat16)
    library().ip_linear(w, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), w.n, wide)
    return y


def matrix_of(view: Any) -> Matrix:
    """A site's matrix as its kernel wants it, described once."""
    found: Matrix = view.once("inferplane_cpu.matrix", _describe, view)[0]
    return found


def _describe(view: Any) -> Any:
    return adapt_matrices(view.prepared, view.weight, getattr(view, "bias", None))


def multiply_on_tiles(w: Matrix, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compute `y = x w^T + bias` on tiles, in bf16 or float32; returns whether there are tiles for it.

    Quantized weights are rounded to bf16, but on AVX2.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    wide = y.dtype is torch.float32
    return bool(library().ip_linear_prefill(w, x.data_ptr(), x.stride(0), x.shape[0], y.data_ptr(), w.n, wide))


def multiply_many_rows(view: Any, x: torch.Tensor, bias: torch.Tensor | None, any_number: bool = False) -> torch.Tensor:
    """`x w^T + bias` in bf16: on tiles by the native product, else by oneDNN.

    On AVX-512 without AMX oneDNN's product with a bf16 weight is the faster one (Zen 4, 512 and 2,048 rows), unless it
    is compiled for this number of rows alone: with `any_number` of them there will be others.
    """
    w, plain = matrix_of(view), isinstance(view.weight, torch.Tensor)
    y = x.new_empty(x.shape[0], w.n)
    if (not plain or any_number or current_instruction_set() in FASTER_THAN_ONEDNN) and multiply_on_tiles(w, x, y):
        return y
    if plain:
        return F.linear(pad_rows(x), view.weight, bias)[: x.shape[0]]
    return multiply_panels(w, x, bias)


def select_logit_rows(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows that want logits."""
    return x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)


def _multiply_rows(view: Any, x: torch.Tensor) -> torch.Tensor:
    return multiply(matrix_of(view), x, view.out_dtype is torch.float32)


@KERNELS("linear", "native", when=STORED, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def linear_batch_invariant(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Every row by the native product, whatever their number."""
    return _multiply_rows(view, x)


@KERNELS("linear", "native", when=STORED, rank=RANK_PORTABLE, prepare=prepare_any_order)
def linear(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Few rows by the native product, many by the faster of `multiply_many_rows`, on the same weight."""
    if x.shape[0] <= FEW_ROWS or view.out_dtype is torch.float32:
        return _multiply_rows(view, x)
    return multiply_many_rows(view, x, view.bias)


@KERNELS("linear", "native", when=PACKED, packs=WEIGHT, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def linear_panels_batch_invariant(view: Any, x: torch.Tensor) -> torch.Tensor:
    """As `linear_batch_invariant`, for weights of 8 and 4 bits."""
    return _multiply_rows(view, x)


@KERNELS("linear", "native", when=PACKED, packs=WEIGHT, rank=RANK_PORTABLE)
def linear_panels(view: Any, x: torch.Tensor) -> torch.Tensor:
    """As `linear`, for weights of 8 and 4 bits; for many rows they are expanded some rows at a time."""
    return linear(view, x)


@KERNELS(
    "linear", "native", when=INT8_INPUT, packs=WEIGHT, rank=RANK_PORTABLE, batch_invariant=True, **INT8_ACTIVATIONS
)
def linear_w8a8(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Weights and activations in 8 bits, summed exactly: a row is the same bits on every instruction set."""
    return _multiply_rows(view, x)


def _multiply_narrow(name: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A kernel of this name: exact sums of a group of columns, so that a row is the same bits among any others."""

    def linear_narrow(view: Any, x: torch.Tensor) -> torch.Tensor:
        return _multiply_rows(view, x)

    linear_narrow.__name__ = name
    return linear_narrow


for narrow in NARROW_INPUTS:
    KERNELS(
        "linear",
        "native",
        when=When((torch.bfloat16,), narrow.weights, features=("native",), needs=(narrow.needs, NEEDS[1])),
        packs=WEIGHT,
        rank=RANK_PORTABLE,
        batch_invariant=True,
        **narrow.options(),
    )(_multiply_narrow(f"linear_{narrow.name}"))


@KERNELS("embedding", "native", when=PACKED_ROWS, packs=WEIGHT, rank=RANK_PORTABLE, batch_invariant=True)
def embedding_panels(view: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a weight of 8 or 4 bits that a head shares, each the dequantized one rounded once."""
    return gather_rows(matrix_of(view), ids, 1.0)


def gather_rows(w: Matrix, ids: torch.Tensor, factor: float) -> torch.Tensor:
    """Rows `ids` of a weight in bf16, times `factor` and rounded again."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, w.k, dtype=torch.bfloat16)
    library().ip_gather_rows(w, ids.data_ptr(), ids.numel(), factor, out.data_ptr())
    return out


@HEAD_KERNELS("lm_head", "native", when=HEAD, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def lm_head_batch_invariant(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The rows that want logits by the native product, in float32."""
    return multiply(matrix_of(view), select_logit_rows(x, batch), True)


@HEAD_KERNELS("lm_head", "native", when=HEAD, rank=RANK_PORTABLE, prepare=prepare_any_order)
def lm_head(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Few rows by the native product, in float32; many by the faster of `multiply_many_rows`, widened."""
    rows = select_logit_rows(x, batch)
    if rows.shape[0] <= FEW_ROWS:
        return multiply(matrix_of(view), rows, True)
    return multiply_many_rows(view, rows, None).float()


@HEAD_KERNELS("lm_head", "native", when=PACKED_HEAD, packs=WEIGHT, rank=RANK_BATCH_INVARIANT, batch_invariant=True)
def lm_head_panels_batch_invariant(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `lm_head_batch_invariant`, for weights of 8 and 4 bits."""
    return lm_head_batch_invariant(view, x, batch)


@HEAD_KERNELS("lm_head", "native", when=PACKED_HEAD, packs=WEIGHT, rank=RANK_PORTABLE)
def lm_head_panels(view: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """As `lm_head`, for weights of 8 and 4 bits."""
    return lm_head(view, x, batch)
