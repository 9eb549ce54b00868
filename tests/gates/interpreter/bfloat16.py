"""Triton's interpreter (3.6 to 3.9) computes with the bits of bfloat16 as if they were whole numbers, and cuts float32
off instead of rounding it, to bfloat16 and to FP8. This makes it compute as devices do: widen, compute in float32, and
round to nearest even.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle


def is_bfloat16(handle) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def widen(handle):
    if not is_bfloat16(handle):
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def widen_fp8(handle):
    """The interpreter reads NaN as 480."""
    if handle.dtype.scalar != tl.float8e4nv:
        return handle
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8))
    return Handle(bits.view(torch.float8_e4m3fn).float().numpy(), tl.float32)


def rounded(values: np.ndarray):
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Handle(np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)


def _widening(method, operands: int):
    """`method` of the interpreter's builder, its first operands widened and a float32 result rounded back."""

    def widened(self, *args):
        if not any(is_bfloat16(a) for a in args[:operands]):
            return method(self, *args)
        result = method(self, *(widen(a) for a in args[:operands]), *args[operands:])
        return rounded(result.data) if result.data.dtype == np.float32 else result

    return widened


def _rounding(method):
    """`method(source, type)`, but float32 to bfloat16 rounds."""

    def cast(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return rounded(source.data)
        if source.dtype.scalar == tl.float32 and target.scalar == tl.float8e4nv:
            codes = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return Handle(codes.view(torch.uint8).numpy(), tl.float8e4nv)
        return method(self, source, target)

    return cast


def _dot(method):
    def dot(self, a, b, d, *options):
        a, b = widen_fp8(a), widen_fp8(b)
        if not (is_bfloat16(a) or is_bfloat16(b)):
            return method(self, a, b, d, *options)
        product = np.matmul(widen(a).data, widen(b).data) + d.data
        return Handle(product.astype(d.data.dtype), d.dtype.scalar)

    return dot


def repair() -> None:
    """Once a process, before a kernel runs."""
    builder = interpreter.InterpreterBuilder
    builder.binary_op = _widening(builder.binary_op, 2)
    builder.unary_op = _widening(builder.unary_op, 1)
    builder.create_dot = _dot(builder.create_dot)
    builder.cast_impl = _rounding(builder.cast_impl)
    builder.create_fp_trunc = _rounding(builder.create_fp_trunc)
