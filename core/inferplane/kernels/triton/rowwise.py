"""Row by row: norms, activations, quantizing. Sums and roundings are float32, whatever comes in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.dependent_launch import asked, begin, how
from inferplane.kernels.triton.quantized_results import hand, handed

FP8_MAX = 448.0
INT8_MAX = 127.0
MOST_COLUMNS = 16384
"""Of rows that one program holds in registers, of a gated MLP twice."""


@triton.jit
def round_half_even(x):
    """Nearest whole number, ties to even, for |x| below 2^22. No device has to bring a function for it."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_fp8_bits(x):
    """float32 within +-448 -> the bits of float8_e4m3fn, rounded to nearest even, uint8.

    Whole-number arithmetic, so that devices without the format, and Triton's interpreter, agree with the others.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = round_half_even(tl.abs(x) * 512.0).to(tl.int32)  # below 2^-6 the step is 2^-9
    code = tl.where(magnitude < (121 << 23), small, tl.minimum(normal, 0x7E))
    return (sign | code).to(tl.uint8)


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """`amax / LIMIT`, rounded up to a power of two if asked for; 1 where that is 0."""
    scale = tl.div_rn(amax, amax * 0 + LIMIT)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def encoded(x, scale, FP8: tl.constexpr):
    """`x / scale` as float8_e4m3fn bits (uint8) or int8, within the format's limits."""
    y = tl.div_rn(x, scale)
    if FP8:
        return to_fp8_bits(tl.minimum(tl.maximum(y, -448.0), 448.0))
    else:
        return round_half_even(tl.minimum(tl.maximum(y, -127.0), 127.0)).to(tl.int8)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def store_codes(y, data, scales, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr):
    """Codes of a row `y` of BLOCK entries, WIDTH of which count and the others are 0: a scale for GROUP columns."""
    column = tl.arange(0, BLOCK)
    groups = tl.reshape(y, (BLOCK // GROUP, GROUP))
    scale = scale_of(tl.max(tl.abs(groups), 1), 448.0 if FP8 else 127.0, False)
    code = tl.reshape(encoded(groups, scale[:, None], FP8), (BLOCK,))
    tl.store(data + row * WIDTH + column, code, mask=column < WIDTH)
    count: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scales + row * count + group, scale, mask=group < count)


@triton.jit
def _norm(
    x, residual, weight, out, total, data, scales, eps, heads, x_outer, x_inner, r_outer,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One row; its result with PLAIN, and its codes where GROUP is not 0."""
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = (row // heads) * x_outer + (row % heads) * x_inner
    h = tl.load(x + source + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        h += tl.load(residual + row * r_outer + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * WIDTH + column, h.to(total.dtype.element_ty), mask=inside)
    h = h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    y = h * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if PLAIN:
        tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)
    if GROUP > 0:
        store_codes(y.to(out.dtype.element_ty).to(tl.float32), data, scales, row, WIDTH, BLOCK, GROUP, FP8)


@triton.jit
def _silu_mul(
    x, out, data, scales, x_outer, width,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_outer + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_outer + width + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    if GROUP == 0:
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
    else:
        groups = tl.reshape(y.to(out.dtype.element_ty).to(tl.float32), (BLOCK // GROUP, GROUP))
        scale = scale_of(tl.max(tl.abs(groups), 1), 448.0 if FP8 else 127.0, False)
        code = tl.reshape(encoded(groups, scale[:, None], FP8), (BLOCK,))
        tl.store(data + row * width + column, code, mask=inside)
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * tl.cdiv(width, GROUP) + group, scale, mask=group < tl.cdiv(width, GROUP))


@triton.jit
def _quantize(
    x, data, scales, x_outer, width, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, STATIC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """STATIC: `scales` holds one for all rows, which is taken."""
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = group * GROUP + within
    inside = (within < GROUP) & (column < width)
    h = tl.load(x + row * x_outer + column, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        tl.store(data + row * width + column, encoded(h, h * 0 + tl.load(scales), FP8), mask=inside)
    else:
        scale = scale_of(tl.max(tl.abs(h), 0), 448.0 if FP8 else 127.0, False)
        tl.store(data + row * width + column, encoded(h, scale, FP8), mask=inside)
        tl.store(scales + row * groups + group, scale)


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


def _rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """`x` with entries side by side, how many rows share its outer stride, and both strides in entries."""
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    if x.dim() == 3:
        return x, x.shape[1], x.stride(0), x.stride(1)
    return x, 1, (x.stride(0) if x.dim() == 2 else 0), 0


def codes_for(like: torch.Tensor, width: int, group: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for data and scales of rows of `width`, as many as `like` has."""
    data = like.new_empty(like.shape[0], width, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    return data, like.new_empty(like.shape[0], triton.cdiv(width, group), dtype=torch.float32)


def raw(data: torch.Tensor) -> torch.Tensor:
    """Codes as kernels store them: FP8 as its bits."""
    return data.view(torch.uint8) if data.dtype == torch.float8_e4m3fn else data


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    quantize: str = "",
    group: int = 128,
    keep: bool = False,
    ahead: bool = False,
) -> tuple[torch.Tensor, ...]:
    """RMS norm of `x`, or of `x + residual`, and optionally quantized while it is at hand.

    Args:
        x: `[..., D]`, with a residual or quantizing `[T, D]`.
        weight: `[D]`.
        eps: added to the mean of squares.
        residual: `[T, D]`, or None.
        quantize: "" (none), "fp8" or "int8".
        group: columns a scale, a power of two; 0 for the whole row.
        keep: also give the normed rows where they are quantized.
        ahead: see `ahead.py`.

    Returns:
        The normed rows, or their data and scales as the op `quantize` gives them, or all three; then the sum, with a
        residual.
    """
    width = x.shape[-1]
    x, heads, outer, inner = _rows_of(x)
    rows = x.numel() // width if width else 0
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    total = x if residual is None else torch.empty_like(out)
    data, scales = codes_for(x, width, group or width, quantize == "fp8") if quantize else (out, out)
    block = max(triton.next_power_of_2(width), group if quantize else 16)
    if rows:
        _norm[(rows,)](
            x, x if residual is None else residual, weight, out, total, raw(data), scales, eps, heads, outer, inner,
            0 if residual is None else residual.stride(0),
            WIDTH=width, BLOCK=block, RESIDUAL=residual is not None, GROUP=(group or block) if quantize else 0,
            FP8=quantize == "fp8", PLAIN=keep or not quantize, num_warps=_warps(block), **how(ahead),
        )  # fmt: skip
    made = (*([out] if keep else []), data, scales) if quantize else (out,)
    return made if residual is None else (*made, total)


def rms_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    """One program a row."""
    return norm(x, p.weight, p.eps, ahead=asked(p))[0]


def add_rms_norm(p: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and norm in one pass, and codes of the result where its readers would code it; the norm takes the sum before
    it is rounded.
    """
    y, *codes = norm(x, p.norm.weight, p.norm.eps, residual, p.codes, p.codes_group, keep=True, ahead=asked(p))
    total = x if residual is None else codes.pop()
    return hand(y, p.codes, p.codes_group, *codes) if p.codes else y, total


def gated(x: torch.Tensor, quantize: str = "", group: int = 128, ahead: bool = False) -> tuple[torch.Tensor, ...]:
    """`silu(x[:, :I]) * x[:, I:]` of `x` `[T, 2 I]`: `[T, I]`, or its data and scales; arguments as for `norm`, whole
    rows of at most `MOST_COLUMNS`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, width)
    data, scales = codes_for(x, width, group or width, quantize == "fp8") if quantize else (out, out)
    whole = max(triton.next_power_of_2(width), group if quantize else 16, 16)
    block = whole if quantize and not group else min(1024, whole)
    if rows:
        _silu_mul[(rows, triton.cdiv(width, block))](
            x, out, raw(data), scales, x.stride(0), width, BLOCK=block, GROUP=(group or block) if quantize else 0,
            FP8=quantize == "fp8", num_warps=_warps(block), **how(ahead),
        )  # fmt: skip
    return (data, scales) if quantize else (out,)


def silu_mul(p: Any, x: torch.Tensor) -> torch.Tensor:
    """Both halves of a row in one pass."""
    return gated(x, ahead=asked(p))[0]


def quantize(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One program a row and group; nothing to do where the codes were handed over with `x`."""
    found = handed(x, p.format, p.group)
    if found is not None:
        return found
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    group = p.group or width
    groups = triton.cdiv(width, group)
    data = x.new_empty(rows, width, dtype=torch.float8_e4m3fn if p.format == "fp8" else torch.int8)
    scales = x.new_empty(rows, groups, dtype=torch.float32)
    block = max(16, triton.next_power_of_2(group))
    if rows:
        _quantize[(rows, groups)](
            x, raw(data), scales, x.stride(0), width, groups,
            GROUP=group, BLOCK=block, FP8=p.format == "fp8", STATIC=False, num_warps=_warps(block), **how(asked(p)),
        )  # fmt: skip
    return data, scales


def by_scale(x: torch.Tensor, scale: torch.Tensor, ahead: bool = False) -> torch.Tensor:
    """FP8 codes of `x` `[T, K]` by one scale `[1]` for all; what is too large for it becomes the largest code."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    data = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    block = min(1024, max(16, triton.next_power_of_2(width)))
    if rows:
        _quantize[(rows, triton.cdiv(width, block))](
            x, raw(data), scale, x.stride(0), width, 1,
            GROUP=block, BLOCK=block, FP8=True, STATIC=True, num_warps=_warps(block), **how(ahead),
        )  # fmt: skip
    return data
