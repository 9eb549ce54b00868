"""Portable kernels in Triton, rank 50: for any device with a Triton backend, and for Triton's interpreter.

They name no device; tile sizes are arguments (`Tiles`, `Products`). Nothing here imports Triton: targets are dotted
names, imported when a kernel has been chosen. A backend that declares them states the feature "triton" (present, or
absent with a reason) and names those of its KV layouts that are core's paged storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from inferplane.kernels.triton.matmul_kernels import FLOATS, FOLDER, HALF, matrix_kernels
from inferplane.kernels.triton.tiles import Launch, Product, Products, Tiles
from inferplane.types import RANK_PORTABLE, Context, Kernel, When

FEATURE = "triton"
"""The feature that these kernels need: a Triton that compiles for the device."""

SMALL = Tiles()
EIGHT_BIT_ERROR = 0.08
"""Error of `mla_expanded` in 8 bits: where one key outweighs the others, a result is one weight times one value, both
in FP8, and each may be off by 1/16.
"""
ROTATED_BLOCKS = ("blocks of 16 to 256 entries", lambda op: 16 <= op.block <= 256)


def triton_kernels(kv_layouts: Sequence[str], tiles: Callable[[Any, Context], Tiles] = SMALL.prepare) -> list[Kernel]:
    """All portable kernels but the matrix products (`matrix_kernels`). Pure: nothing is imported beyond torch, nothing
    is allocated.

    Args:
        kv_layouts: names of the backend's layouts that are made by `paged_layout`; the attention kernels read these.
        tiles: `(op, context)` -> tile sizes, called when a kernel is linked; by default small ones that fit anywhere.
    """
    plain = When(FLOATS, features=(FEATURE,))
    decode = replace(plain, step_kinds=("decode",))
    eight_bit = When(HALF, kv_layouts=tuple(kv_layouts), features=(FEATURE, "fp8", "int8-dot"))
    cached = When(FLOATS, kv_layouts=tuple(kv_layouts), features=(FEATURE,))

    scored = replace(cached, extensions=("attention.sinks", "attention.softcap"))
    normed = ("rms_norm.offset",)

    def kernel(op: str, where: str, when: When, **options: Any) -> Kernel:
        defaults: dict[str, Any] = {"prepare": tiles, "capture_safe": True, "batch_invariant": True}
        return Kernel(op, "triton", f"{FOLDER}.{where}", when, RANK_PORTABLE, **{**defaults, **options})

    return [
        kernel("rms_norm", "rowwise:rms_norm", replace(plain, extensions=normed)),
        kernel("add_rms_norm", "rowwise:add_rms_norm", replace(plain, extensions=normed)),
        kernel("silu_mul", "activations:silu_mul", plain),
        kernel("activation_mul", "activations:activation_mul", plain),
        kernel("activation", "activations:activation", plain),
        kernel("rope", "kv_write:rope", plain),
        kernel("causal_conv1d", "recurrent.conv:causal_conv1d", decode),
        kernel("gated_delta_rule", "recurrent.delta_rule:gated_delta_rule", decode),
        kernel("selective_scan", "recurrent.scan:selective_scan", decode),
        kernel("layer_norm", "rowwise:layer_norm", plain),
        kernel("partial_rope", "kv_write:partial_rope", plain),
        kernel("gated_rms_norm", "recurrent.rows:gated_rms_norm", plain),
        kernel("delta_rule_gates", "recurrent.rows:delta_rule_gates", plain),
        kernel("sample", "sampling:sample", plain),
        kernel("kv_write", "kv_write:kv_write", cached),
        kernel("mla_kv_write", "kv_write:mla_kv_write", cached),
        kernel("index_key_write", "kv_write:index_key_write", cached),
        kernel("rotate_index_keys", "sparse.index_scores:rotate_index_keys", replace(plain, needs=(ROTATED_BLOCKS,))),
        kernel("index_select", "sparse.selection:index_select", cached),
        kernel("norm_rope_write", "norm_rope_write:norm_rope_write", replace(cached, extensions=normed)),
        kernel("mla_norm_rope_write", "norm_rope_write:mla_norm_rope_write", cached),
        kernel("attention", "attention:attention", scored),
        # The products around these two are torch's own, which may add in another order for another number of rows.
        kernel("mla_absorbed", "mla:mla_absorbed", cached, batch_invariant=False),
        kernel("sparse_mla_absorbed", "sparse.attention:sparse_mla_absorbed", cached, batch_invariant=False),
        kernel("sparse_mla_expanded", "sparse.attention:sparse_mla_expanded", cached, batch_invariant=False),
        kernel(
            "mla_expanded", "mla:mla_expanded", cached, batch_invariant=False, capture_safe=False, needs_host_lens=True,
        ),
        Kernel(
            "mla_expanded", "triton_8bit", f"{FOLDER}.mla_8bit:mla_expanded", eight_bit, RANK_PORTABLE, prepare=tiles,
            needs_host_lens=True, extra_error=EIGHT_BIT_ERROR, note="int8 scores and FP8 values",
        ),
    ]  # fmt: skip


__all__ = ["FEATURE", "Launch", "Product", "Products", "Tiles", "matrix_kernels", "triton_kernels"]
