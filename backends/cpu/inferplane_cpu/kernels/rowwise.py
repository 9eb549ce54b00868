"""Norms, activations and rotary positions on native kernels."""

from __future__ import annotations

import math
from typing import Any

import torch

from inferplane.plugin import RANK_PORTABLE, Kernels, When
from inferplane_cpu.native import ACTIVATIONS, library
from inferplane_cpu.structs import GateLimits, Norm

KERNELS = Kernels()


def _has_bf16_weight(op: Any) -> bool:
    norm = getattr(op, "norm", op)
    return norm.weight.dtype in (None, torch.bfloat16)


def _has_float32_table(op: Any) -> bool:
    return op.table.dtype is torch.float32


BF16 = When(dtypes=(torch.bfloat16,), features=("native",))
NORM = When(
    dtypes=(torch.bfloat16,),
    features=("native",),
    needs=(("a bfloat16 weight", _has_bf16_weight),),
    extensions=("rms_norm.offset",),
)
ACTIVATION = When(
    dtypes=(torch.bfloat16,),
    features=("native",),
    needs=(("silu, gelu, gelu_tanh or relu2", lambda op: op.function in ACTIVATIONS),),
    extensions=("activation_mul.limit", "activation_mul.limits_input"),
)
ROPE = When(dtypes=(torch.bfloat16,), features=("native",), needs=(("a float32 table", _has_float32_table),))


def native_norm(norm: Any) -> Norm:
    """An RMS norm as the library reads it; its weight must outlive the description."""
    return Norm(norm.weight.data_ptr(), norm.eps, norm.offset)


def activation_of(act: Any) -> int:
    """The activation function of an op `silu_mul` or `activation_mul`, one of `ACTIVATIONS`."""
    return ACTIVATIONS[getattr(act, "function", "silu")]


def gate_limits(op: Any) -> GateLimits | None:
    """The limits of an op `activation_mul` or `moe_experts` as the library reads them; None if it has none."""
    if op.limit is None:
        return None
    return GateLimits(*((op.limit, math.inf) if op.limits_input else (math.inf, op.limit)), op.limit)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, D]` with entries side by side; a view where there is one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@KERNELS("rms_norm", "native", when=NORM, rank=RANK_PORTABLE, batch_invariant=True)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """Row by row, sums in one order."""
    rows, y = _as_rows(x), torch.empty(x.shape, dtype=x.dtype)
    m, d = rows.shape
    library().ip_rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        None,
        view.once("inferplane_cpu.norm", native_norm, view),
        m,
        d,
        None,
        y.data_ptr(),
    )
    return y


@KERNELS("add_rms_norm", "native", when=NORM, rank=RANK_PORTABLE, batch_invariant=True)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and norm in one pass."""
    rows = _as_rows(x)
    m, d = rows.shape
    y = torch.empty(m, d, dtype=x.dtype)
    s = x if residual is None else torch.empty(m, d, dtype=x.dtype)
    other = None if residual is None else residual.contiguous()
    library().ip_rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        None if other is None else other.data_ptr(),
        view.once("inferplane_cpu.norm", native_norm, view.norm),
        m,
        d,
        None if other is None else s.data_ptr(),
        y.data_ptr(),
    )
    return y, s


def _activation_mul(function: int, limits: GateLimits | None, x: torch.Tensor) -> torch.Tensor:
    rows = _as_rows(x)
    m, d = rows.shape[0], rows.shape[1] // 2
    y = torch.empty(*x.shape[:-1], d, dtype=x.dtype)
    library().ip_activation_mul(rows.data_ptr(), rows.stride(0), m, d, function, limits, y.data_ptr())
    return y


@KERNELS("silu_mul", "native", when=BF16, rank=RANK_PORTABLE, batch_invariant=True)
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    return _activation_mul(ACTIVATIONS["silu"], None, x)


@KERNELS("activation_mul", "native", when=ACTIVATION, rank=RANK_PORTABLE, batch_invariant=True)
def activation_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once."""
    limits = view.once("inferplane_cpu.limits", gate_limits, view)
    return _activation_mul(ACTIVATIONS[view.function], limits, x)


@KERNELS("rope", "native", when=ROPE, rank=RANK_PORTABLE, batch_invariant=True)
def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """In float32, rounded once; heads may be strided."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    m, heads, dim = x.shape
    y = torch.empty(m, heads, dim, dtype=x.dtype)
    library().ip_rope(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        view.table.data_ptr(),
        positions.data_ptr(),
        m,
        heads,
        dim,
        view.interleaved,
        y.data_ptr(),
    )
    return y
