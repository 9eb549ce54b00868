"""Kernels that call vLLM's operators by vLLM's own names, for libraries that register these operators for their device.

Source: vllm-project/vllm, csrc/torch_bindings.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls as forms
from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, NORM_WEIGHT
from inferplane.kernels.fused.operands import rotate_last_head_as_key
from inferplane.kernels.fused.packings import RopeTable
from inferplane.plugin import RANK_FUSED, Batch, Kernel, LayerKV, Packing, When, latents

vllm, cache_ops = torch.ops._C, torch.ops._C_cache_ops

ONE_WIDTH = ("K and V of one width", lambda op: op.kv.dim == op.kv.v_dim)
"""What the library's write requires: K and V have one stride of blocks."""


def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `rms_norm` by _C::rms_norm, over contiguous rows."""
    return forms.rms_norm(vllm.rms_norm, view, x)


def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm` by _C::fused_add_rms_norm; the first layer has no residual, so it calls _C::rms_norm."""
    if residual is None:
        return rms_norm(view.norm, x), x
    return forms.add_rms_norm(vllm.fused_add_rms_norm, view.norm, x, residual)


def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `silu_mul` by _C::silu_and_mul: SiLU of the first half of the columns times the second."""
    return forms.silu_mul(vllm.silu_and_mul, x)


def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `kv_write` by _C_cache_ops::reshape_and_cache_flash, which skips slot -1 (padding)."""
    forms.kv_write(cache_ops.reshape_and_cache_flash, k, v, kv.view_blocks(), batch)  # type: ignore[attr-defined]


def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `mla_kv_write` by _C_cache_ops::concat_and_cache_mla, which skips slot -1 (padding)."""
    forms.mla_kv_write(cache_ops.concat_and_cache_mla, latent, k_rope, latents(kv), batch)


def rope_kernel(requires_key: bool) -> Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]:
    """A kernel of `rope` by _C::rotary_embedding, which rotates queries and keys in place.

    Args:
        requires_key: whether the operator must be given a key; the last head then goes as the key.
    """

    def rope(view: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tokens, _, dim = x.shape
        table, neox = view.table.to_dtype(x.dtype), not view.interleaved
        if requires_key:
            return rotate_last_head_as_key(
                x, lambda rest, last: vllm.rotary_embedding(positions, rest, last, dim, table, neox)
            )
        out = x.clone(memory_format=torch.contiguous_format)
        vllm.rotary_embedding(positions, out.view(tokens, -1), None, dim, table, neox)
        return out

    return rope


def vllm_kernels(
    provider: str, dtypes: Sequence[torch.dtype], features: Sequence[str], kv_layout: str, *, rope_requires_key: bool
) -> list[Kernel]:
    """The kernels of a library with vLLM's operators, to be declared by its backend: norms, rotary positions,
    activation and cache writes. Pure: nothing is allocated.

    Args:
        provider: the kernels' provider.
        dtypes: of the activations that the library takes.
        features: that the device must have; they say that the library is loaded.
        kv_layout: name of the paged layout, `[blocks, tokens, heads, D]`, that the library writes.
        rope_requires_key: whether `rotary_embedding` must be given a key.
    """
    table = Packing(f"{provider}.rope_table", RopeTable)
    in_layout = {"kv_layouts": (kv_layout,)}
    rows: list[tuple[str, Callable[..., Any], dict[str, Any], dict[str, Packing]]] = [
        ("rms_norm", rms_norm, {"needs": (NORM_WEIGHT,)}, {}),
        ("add_rms_norm", add_rms_norm, {"needs": (ADD_NORM_WEIGHT,)}, {}),
        ("rope", rope_kernel(rope_requires_key), {}, {"table": table}),
        ("silu_mul", silu_mul, {}, {}),
        ("kv_write", kv_write, {**in_layout, "needs": (ONE_WIDTH,)}, {}),
        ("mla_kv_write", mla_kv_write, in_layout, {}),
    ]
    return [
        Kernel(
            op, provider, function, rank=RANK_FUSED, packs=packs, capture_safe=True,
            when=When(tuple(dtypes), features=tuple(features), **conditions),
        )
        for op, function, conditions, packs in rows
    ]  # fmt: skip
