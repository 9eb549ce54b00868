"""Kernels that work row by row, in float32 whatever comes in: RMS norm, quantizing."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import is_dependent, launch_options, wait_then_allow_next
from inferplane.kernels.triton.quantized_results import QuantizedActivation, find_quantized, keep_quantized

FP8_MAX = 448.0


@triton.jit
def round_half_even(x):
    """Each entry rounded to the nearest whole number, ties to even, for |x| below 2^22; by addition alone, so that
    every device has it.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_fp8_bits(x):
    """float32 within +-448, or NaN -> the bits of float8_e4m3fn, rounded to nearest even, uint8.

    Done in integers, so that devices without the format, and Triton's interpreter, give the same bits as the others.
    """
    bits = x.to(tl.uint32, bitcast=True)  # without a sign: rounding up NaN's largest bits would overflow
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = round_half_even(tl.abs(x) * 512.0).to(tl.int32).to(tl.uint32, bitcast=True)  # below 2^-6 the step is 2^-9
    code = tl.where(magnitude < (121 << 23), small, tl.minimum(normal, 0x7F))  # 448 is 0x7E, NaN 0x7F
    return (sign | code).to(tl.uint8)


@triton.jit
def larger_or_nan(a, b):
    """The larger number; NaN if one of them is NaN, which `tl.max` drops."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """The largest magnitude of float32 numbers along an axis; NaN if one of them is NaN."""
    return tl.reduce(tl.abs(x), AXIS, larger_or_nan)


@triton.jit
def quant_scale(amax, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a group whose largest magnitude is `amax`: `amax / LIMIT`, rounded up to a power of two with
    POWER_OF_TWO; 1 where that is 0; NaN and infinity remain. LIMIT is the largest number of the format.
    """
    scale = tl.div_rn(amax, amax * 0 + LIMIT)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)
        scale = rounded.to(tl.float32, bitcast=True)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def quantize_entries(x, scale, FP8: tl.constexpr, KEEP_NAN: tl.constexpr = False):
    """Quantize entries: `x / scale`, clamped to the format, as float8_e4m3fn bits (uint8) with FP8, else as int8.

    With KEEP_NAN, NaN remains in FP8. Without, it becomes a number: the scale of `largest_magnitude` is NaN.
    """
    y = tl.div_rn(x, scale)
    if FP8:
        nan: tl.constexpr = tl.PropagateNan.ALL if KEEP_NAN else tl.PropagateNan.NONE
        return to_fp8_bits(tl.minimum(tl.maximum(y, -448.0, nan), 448.0, nan))
    else:
        return round_half_even(tl.minimum(tl.maximum(y, -127.0), 127.0)).to(tl.int8)


@triton.jit
def store_quantized_row(
    y, values, scales, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """Quantize row number `row`, held as `y` `[BLOCK]`, with a scale per GROUP columns, and store it in `values` and
    `scales`: in FP8, else in int8.

    The first WIDTH entries of `y` count, the others are 0.
    """
    column = tl.arange(0, BLOCK)
    groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
    scale = quant_scale(largest_magnitude(groups, 1), 448.0 if FP8 else 127.0, False)
    code = tl.reshape(quantize_entries(groups, scale[:, None], FP8), (BLOCK,))
    tl.store(values + row * WIDTH + column, code, mask=column < WIDTH)
    count: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales + row * count + group, scale, mask=group < count)


@triton.jit
def _norm(
    x, residual, weight, out, total, values, scales, eps, heads, x_outer, x_inner, r_outer,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    FP8: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `row` norms one row, of `x + residual` with RESIDUAL, whose sum it stores in `total`.

    OFFSET is added to the weight. PLAIN: the normed row is stored in `out`. GROUP > 0: its quantized form is stored in
    `values` and `scales`.
    """
    wait_then_allow_next(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = (row // heads) * x_outer + (row % heads) * x_inner
    h = tl.load(x + source + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        h += tl.load(residual + row * r_outer + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * WIDTH + column, h.to(total.dtype.element_ty), mask=inside)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0:
        factor += OFFSET
    y = h * factor
    if PLAIN:
        tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)
    if GROUP > 0:
        store_quantized_row(y.to(out.dtype.element_ty).to(tl.float32), values, scales, row, WIDTH, BLOCK, GROUP, FP8)


@triton.jit
def _layer_norm(
    x, weight, bias, out, eps, heads, x_outer, x_inner,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Program `row` stores one row without its mean, over its deviation, times the weight. BY_HEAD: each head has a row
    of weights. OFFSET is added to the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = x + (row // heads) * x_outer + (row % heads) * x_inner
    h = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    h = tl.where(inside, h - tl.sum(h, 0) / WIDTH, 0.0)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    place = column + ((row % heads) * WIDTH if BY_HEAD else 0)
    h *= tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if bias is not None:
        h += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, h.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantize(
    x, values, scales, x_outer, width, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, STATIC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program `(row, group)` quantizes one group of a row. STATIC: by the one scale that `scales` holds for all rows;
    else by the scale that the group's largest entry gives, which is stored.
    """
    wait_then_allow_next(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = group * GROUP + within
    inside = (within < GROUP) & (column < width)
    h = tl.load(x + row * x_outer + column, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        tl.store(values + row * width + column, quantize_entries(h, h * 0 + tl.load(scales), FP8, True), mask=inside)
    else:
        scale = quant_scale(largest_magnitude(h, 0), 448.0 if FP8 else 127.0, False)
        tl.store(values + row * width + column, quantize_entries(h, scale, FP8), mask=inside)
        tl.store(scales + row * groups + group, scale)


def warps_for(block: int) -> int:
    """How many warps a program should have that holds `block` entries of a row: 1 to 16."""
    return max(1, min(16, block // 512))


def row_layout(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """How a kernel walks the rows of `x`: `x` with contiguous rows (a copy if need be), the number of rows per step of
    its first dimension, and the strides of its first and of its second dimension.
    """
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, (x.stride(0) if x.dim() == 2 else 0), 0


def allocate_quantized(like: torch.Tensor, width: int, group: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors, not initialized, for quantized rows: values `[T, width]`, in FP8 or int8, and float32 scales
    `[T, ceil(width / group)]`. T and the device are those of `like`.
    """
    values = like.new_empty(like.shape[0], width, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    return values, like.new_empty(like.shape[0], triton.cdiv(width, group), dtype=torch.float32)


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """Quantized values as kernels store them: FP8 as its bits (uint8), int8 unchanged; not copied."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    quantize: str = "",
    group: int = 128,
    keep: bool = False,
    ahead: bool = False,
    offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """RMS norm of `x`, or of `x + residual`; optionally quantized in the same kernel. One launch; the inputs do not
    change.

    Args:
        x: `[..., D]`, with a residual or quantizing `[T, D]`.
        weight: `[D]`.
        eps: added to the mean of squares.
        residual: `[T, D]`, or None.
        quantize: "" (none), "fp8" or "int8".
        group: columns per scale, a power of two; 0 for the whole row.
        keep: return the normed rows too where they are quantized, for readers that want them plain.
        ahead: launch before the launch in front has ended (`dependent_launch.py`).
        offset: added to the weight.

    Returns:
        The normed rows, or their values and scales as the op `quantize` gives them, or all three; with a residual, the
            sum comes last.
    """
    width = x.shape[-1]
    x, heads, outer, inner = row_layout(x)
    rows = x.numel() // width if width else 0
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    total = x if residual is None else torch.empty_like(out)
    values, scales = allocate_quantized(x, width, group or width, quantize == "fp8") if quantize else (out, out)
    block = max(triton.next_power_of_2(width), group if quantize else 16)
    if rows:
        _norm[(rows,)](
            x, x if residual is None else residual, weight, out, total, as_bits(values), scales, eps, heads, outer,
            inner, 0 if residual is None else residual.stride(0),
            WIDTH=width, BLOCK=block, RESIDUAL=residual is not None, OFFSET=offset,
            GROUP=(group or block) if quantize else 0, FP8=quantize == "fp8", PLAIN=keep or not quantize,
            num_warps=warps_for(block), **launch_options(ahead),
        )  # fmt: skip
    made = (*([out] if keep else []), values, scales) if quantize else (out,)
    return made if residual is None else (*made, total)


def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `rms_norm`, one program per row."""
    return rms_norm_quantize(x, view.weight, view.eps, ahead=is_dependent(view), offset=view.offset)[0]


def layer_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `layer_norm`, one program per row."""
    width = x.shape[-1]
    x, heads, outer, inner = row_layout(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x.numel() // width if width else 0
    block = max(16, triton.next_power_of_2(width))
    if rows:
        _layer_norm[(rows,)](
            x, view.weight, view.bias, out, view.eps, heads, outer, inner,
            WIDTH=width, BLOCK=block, OFFSET=view.offset, BY_HEAD=view.weight.dim() > 1, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm`, sum and norm in one pass; the norm reads the sum before it is rounded.

    Where the readers want the norm quantized, its quantized form is made in the same pass and kept for them
    (`keep_quantized`).
    """
    norm, quant, ahead = view.norm, view.output_quant, is_dependent(view)
    format, group = ("", 0) if quant is None else (quant.format, quant.group)
    y, *quantized = rms_norm_quantize(x, norm.weight, norm.eps, residual, format, group, True, ahead, norm.offset)
    total = x if residual is None else quantized.pop()
    if format:
        keep_quantized(y, QuantizedActivation(format, group, *quantized))
    return y, total


def quantize_rows(x: torch.Tensor, format: str, group: int, ahead: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and float32 scales of `x` `[T, K]`: those that the kernel which computed `x` left, without a launch, else
    made here, one program per row and group.

    Args:
        x: rows in the plan's dtype.
        format: "fp8" or "int8".
        group: columns that share a scale; 0 for the whole row.
        ahead: launch before the launch in front has ended (`dependent_launch.py`).
    """
    found = find_quantized(x, format, group)
    if found is not None:
        return found.values, found.scales
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    group = group or width
    groups = triton.cdiv(width, group)
    values, scales = allocate_quantized(x, width, group, format == "fp8")
    block = max(16, triton.next_power_of_2(group))
    if rows:
        _quantize[(rows, groups)](
            x, as_bits(values), scales, x.stride(0), width, groups,
            GROUP=group, BLOCK=block, FP8=format == "fp8", STATIC=False, num_warps=warps_for(block),
            **launch_options(ahead),
        )  # fmt: skip
    return values, scales


def quantize_by_scale(x: torch.Tensor, scale: torch.Tensor, ahead: bool = False) -> torch.Tensor:
    """`x` `[T, K]` in FP8 by one given scale `[1]` for all entries, as a static scale of a checkpoint; entries too
    large for it become the format's largest number. `ahead`: see `dependent_launch.py`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    values = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    block = min(1024, max(16, triton.next_power_of_2(width)))
    if rows:
        _quantize[(rows, triton.cdiv(width, block))](
            x, as_bits(values), scale, x.stride(0), width, 1,
            GROUP=block, BLOCK=block, FP8=True, STATIC=True, num_warps=warps_for(block), **launch_options(ahead),
        )  # fmt: skip
    return values
