"""Names of Gluon that differ between the versions of Triton that are served (3.6 and newer)."""

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


RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""After 3.6 `_reinterpret` lost its underscore."""


@gluon.jit
def as_fp8(memory, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """Shared memory of FP8 numbers' bits as these numbers."""
    if RENAMED:
        return memory.reinterpret(gl.float8e4nv, [ROWS, COLUMNS], layout)
    else:
        return memory._reinterpret(gl.float8e4nv, [ROWS, COLUMNS], layout)


@gluon.jit
def raised(bits):
    """bfloat16 of these bits (int16) times 2^120: bfloat16's exponent has a bias of 127, FP8's one of 7."""
    number = bits.to(gl.bfloat16, bitcast=True)
    return number * gl.full_like(number, 2.0**120)


__all__ = ["TensorDescriptor", "as_fp8", "barrier", "gl", "load_tile", "raised", "triton"]
