"""Gluon under all supported versions of Triton (3.6 and newer), and bit tricks on numbers and registers."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Copy a box from global to shared memory, counted by a barrier; renamed after 3.6."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Wait for the other threads of this partition; renamed after 3.6."""


HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Triton after 3.6: `_reinterpret` lost its underscore."""


@gluon.jit
def as_fp8(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Shared memory of FP8 numbers' bits as these numbers."""
    if HAS_REINTERPRET:
        return memory.reinterpret(gl.float8e4nv, [ROWS, COLUMNS], layout)
    else:
        return memory._reinterpret(gl.float8e4nv, [ROWS, COLUMNS], layout)


@gluon.jit
def opaque(x):
    """`x`, hidden from the compiler: what follows from it is computed again instead of being kept in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def first_tile(tiles, step):
    """`tiles.index(0)`, by a number that is always 0, which the compiler cannot know: so it computes the addresses of a
    product's operands, one per instruction, where they are used, and does not keep them across the loop.
    """
    return tiles.index(step >> 31)


@gluon.jit
def raise_fp8_exponent(bits):
    """bfloat16 numbers of these bits (int16), times 2^120: bfloat16's exponent has a bias of 127, FP8's one of 7."""
    number = bits.to(gl.bfloat16, bitcast=True)
    return number * gl.full_like(number, 2.0**120)


@gluon.jit
def exponent_of(x):
    """The exponent n of powers of two 2^n in float32."""
    return (x.to(gl.int32, bitcast=True) >> 23) - 127


@gluon.jit
def power_of_two(n):
    """2^n in float32, n from -126 to 127."""
    return ((n + 127) << 23).to(gl.float32, bitcast=True)


__all__ = ["TensorDescriptor", "as_fp8", "barrier", "gl", "load_tile", "raise_fp8_exponent", "triton"]
