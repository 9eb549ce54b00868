"""Activation functions by entries, and times the other half of a gated MLP's row, in float32 whatever comes in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import is_dependent, launch_options, wait_then_allow_next
from inferplane.kernels.triton.rowwise import (
    allocate_quantized,
    as_bits,
    largest_magnitude,
    quant_scale,
    quantize_entries,
    warps_for,
)

MAX_QUANTIZED_COLUMNS = 16384
"""Widest row of a gated MLP that one program can hold in registers, gate and up, to quantize it with one scale."""
FUNCTIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4}
"""Activation functions by the names of op `activation_mul`: FUNCTION of the kernels."""
MAX_COLUMNS = 1024
"""Columns of a program whose results need no scale of the whole row."""


@triton.jit
def activate(x, FUNCTION: tl.constexpr):
    """The activation function of number FUNCTION (`FUNCTIONS`) of float32 entries."""
    if FUNCTION == 1:
        return x / (1.0 + tl.exp(-x))
    elif FUNCTION == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == 3:  # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u))
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return y * y


@triton.jit
def clamp_gate(gate, up, alpha, limit):
    """`(u + 1) g sigmoid(alpha g)` of float32 entries: g, the gate, clamped from above; u, `up`, from both sides."""
    g = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    u = tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL)
    return (u + 1.0) * g / (1.0 + tl.exp(-alpha * g))


@triton.jit
def _activate(
    x, out, x_outer, width, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Program `(row, columns)` stores the activation of BLOCK columns."""
    wait_then_allow_next(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y = activate(tl.load(x + row * x_outer + column, mask=inside, other=0.0).to(tl.float32), FUNCTION)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activation_mul(
    x, out, values, scales, x_outer, width,
    BLOCK: tl.constexpr, FUNCTION: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(row, columns)` stores `f(gate) * up` of BLOCK columns: plain if GROUP is 0, else quantized."""
    wait_then_allow_next(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_outer + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_outer + width + column, mask=inside, other=0.0).to(tl.float32)
    y = activate(gate, FUNCTION) * up
    if GROUP == 0:
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
    else:
        groups = tl.reshape(y.to(out.dtype.element_ty).to(tl.float32), (BLOCK // GROUP, GROUP))
        scale = quant_scale(largest_magnitude(groups, 1), 448.0 if FP8 else 127.0, False)
        code = tl.reshape(quantize_entries(groups, scale[:, None], FP8), (BLOCK,))
        tl.store(values + row * width + column, code, mask=inside)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * tl.cdiv(width, GROUP) + group, scale, mask=group < tl.cdiv(width, GROUP))


def activation_mul_quantize(
    x: torch.Tensor, quantize: str = "", group: int = 128, ahead: bool = False, function: str = "silu"
) -> tuple[torch.Tensor, ...]:
    """`f(x[:, :I]) * x[:, I:]`, optionally quantized in the same kernel. One launch; `x` does not change.

    Args:
        x: gate and up side by side, `[T, 2 I]`.
        quantize: "" (none), "fp8" or "int8".
        group: columns per scale, a power of two; 0 for the whole row, of at most `MAX_QUANTIZED_COLUMNS`.
        ahead: launch before the launch in front has ended (`dependent_launch.py`).
        function: f, one of `FUNCTIONS`.

    Returns:
        `[T, I]`, or its values and scales as the op `quantize` gives them, in a tuple.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    values, scales = allocate_quantized(x, width, group or width, quantize == "fp8") if quantize else (out, out)
    whole = max(triton.next_power_of_2(width), group if quantize else 16, 16)
    block = whole if quantize and not group else min(MAX_COLUMNS, whole)
    if rows:
        _activation_mul[(rows, triton.cdiv(width, block))](
            x, out, as_bits(values), scales, x.stride(0), width, BLOCK=block, FUNCTION=FUNCTIONS[function],
            GROUP=(group or block) if quantize else 0, FP8=quantize == "fp8", num_warps=warps_for(block),
            **launch_options(ahead),
        )  # fmt: skip
    return (values, scales) if quantize else (out,)


def function_of(act: Any) -> str:
    """The activation function of a gated MLP, by its op `silu_mul` or `activation_mul`."""
    return getattr(act, "function", "silu")


def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `silu_mul`: `silu(gate) * up` of rows that hold gate and up side by side."""
    return activation_mul_quantize(x, ahead=is_dependent(view))[0]


def activation_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `activation_mul`: `f(gate) * up` of rows that hold gate and up side by side."""
    return activation_mul_quantize(x, ahead=is_dependent(view), function=view.function)[0]


def activation(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `activation`: `f(x)` by entries."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    out = x.new_empty(rows, width)
    block = min(MAX_COLUMNS, max(triton.next_power_of_2(width), 16))
    if rows:
        _activate[(rows, triton.cdiv(width, block))](
            x, out, x.stride(0), width, BLOCK=block, FUNCTION=FUNCTIONS[view.function], num_warps=warps_for(block),
            **launch_options(is_dependent(view)),
        )  # fmt: skip
    return out
