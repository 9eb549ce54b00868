"""Portable kernels in Triton, rank 50: for any device with a Triton backend, and for Triton's interpreter.

They name no device; tile sizes are arguments (`Tiles`). Nothing here imports Triton: targets are dotted names, imported
when a kernel has been chosen. A backend that offers them states the feature "triton" (present, or absent with a reason)
and the names of those of its KV layouts that are core's paged storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.kernels.triton.matmul_kernels import matrix_kernels
from inferplane.kernels.triton.tiles import Launch, Product, Products, Tiles
from inferplane.types import RANK_PORTABLE, Context, Kernel, When

FEATURE = "triton"
"""What a device must have for these kernels: a Triton that compiles for it."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
SMALL = Tiles()
EIGHT_BIT_ERROR = 0.08
"""Where one key outweighs the others, two FP8 numbers make a result, weight and value; each may be off by 1/16."""
FOLDER = "inferplane.kernels.triton"


def triton_kernels(kv_layouts: Sequence[str], tiles: Callable[[Any, Context], Tiles] = SMALL.prepare) -> list[Kernel]:
    """All of them. Pure: nothing is imported beyond torch, nothing is allocated.

    Args:
        kv_layouts: names of the layouts, made by `paged_layout`, that the attention kernels may look into.
        tiles: `(op, context)` -> tile sizes, asked when a kernel is linked; by default small ones that fit anywhere.
    """
    plain = When(FLOATS, features=(FEATURE,))
    eight_bit = When(HALF, kv_layouts=tuple(kv_layouts), features=(FEATURE, "fp8", "int8-dot"))
    cached = When(FLOATS, kv_layouts=tuple(kv_layouts), features=(FEATURE,))

    def kernel(op: str, where: str, when: When, **options: Any) -> Kernel:
        usual: dict[str, Any] = {"prepare": tiles, "capture_safe": True, "batch_invariant": True}
        return Kernel(op, "triton", f"{FOLDER}.{where}", when, RANK_PORTABLE, **{**usual, **options})

    return [
        kernel("rms_norm", "rows:rms_norm", plain),
        kernel("add_rms_norm", "rows:add_rms_norm", plain),
        kernel("silu_mul", "rows:silu_mul", plain),
        kernel("quantize", "rows:quantize", plain),
        kernel("rope", "cache:rope", plain),
        kernel("sample", "sampling:sample", plain),
        kernel("kv_write", "cache:kv_write", cached),
        kernel("mla_kv_write", "cache:mla_kv_write", cached),
        kernel("norm_rope_write", "enter:norm_rope_write", cached),
        kernel("mla_norm_rope_write", "enter:mla_norm_rope_write", cached),
        kernel("attention", "attention:attention", cached),
        # The products around these two are torch's own, which may add in another order for another number of rows.
        kernel("mla_absorbed", "mla:mla_absorbed", cached, batch_invariant=False),
        kernel(
            "mla_expanded", "mla:mla_expanded", cached, batch_invariant=False, capture_safe=False, needs_host_lens=True,
        ),
        Kernel(
            "mla_expanded", "triton_8bit", f"{FOLDER}.eight_bit:mla_expanded", eight_bit, RANK_PORTABLE, prepare=tiles,
            needs_host_lens=True, extra_error=EIGHT_BIT_ERROR, note="int8 scores and FP8 values",
        ),
    ]  # fmt: skip


__all__ = ["FEATURE", "Launch", "Product", "Products", "Tiles", "matrix_kernels", "triton_kernels"]
