"""Ops by operators that have the call form of vLLM's, which several vendors' libraries took over.

Each function takes the vendor's operator as `call` and the op's arguments. Such operators write their results into
arguments, some into their inputs; inputs are copied here, since an op leaves its inputs unchanged.

Source: vllm-project/vllm, csrc/torch_bindings.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.kernels.fused.operands import unit_scale
from inferplane.plugin import Batch

CACHE_DTYPE = "auto"
"""Value of `kv_cache_dtype`: store entries in the cache's own dtype."""
CACHE_FP8 = "fp8"
"""The same: divide entries by their scale, clamp them to 448, and store them in E4M3."""


def rms_norm(call: Callable[..., object], norm: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `rms_norm` by `call(out, x, weight, eps)` over contiguous rows; `norm` is the op's view. Returns a new
    tensor.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    call(out, x, norm.weight, norm.eps)
    return out


def add_rms_norm(
    call: Callable[..., object], norm: Any, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `add_rms_norm` by `call(x, residual, weight, eps)`, which turns its first argument into the norm and its
    second into the sum; `norm` is the view of the norm inside the op.
    """
    y, total = x.clone(memory_format=torch.contiguous_format), residual.clone(memory_format=torch.contiguous_format)
    call(y, total, norm.weight, norm.eps)
    return y, total


def silu_mul(call: Callable[..., object], x: torch.Tensor) -> torch.Tensor:
    """The op `silu_mul` by `call(out, x)`: SiLU of the first half of the columns times the second, in a new tensor."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    call(out, x.contiguous())
    return out


def kv_write(
    call: Callable[..., object],
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    cache_dtype: str = CACHE_DTYPE,
    scales: Sequence[torch.Tensor] = (),
) -> None:
    """The op `kv_write` by `call(k, v, keys, values, slots, kv_cache_dtype, k_scale, v_scale)`, which skips slot -1.
    `scales`, float32 `[1]` of K and of V, are 1 where there are none.
    """
    k_scale, v_scale = scales or [unit_scale(k.device)] * 2
    call(k.contiguous(), v.contiguous(), *cache, batch.slots, cache_dtype, k_scale, v_scale)


def mla_kv_write(
    call: Callable[..., object],
    latent: torch.Tensor,
    k_rope: torch.Tensor,
    cache: torch.Tensor,
    batch: Batch,
    cache_dtype: str = CACHE_DTYPE,
    scale: torch.Tensor | None = None,
) -> None:
    """The op `mla_kv_write` by `call(latent, k_rope, cache, slots, kv_cache_dtype, scale)`, which skips slot -1.
    `scale`, float32 `[1]`, is 1 where there is none.
    """
    scale = unit_scale(latent.device) if scale is None else scale
    call(latent.contiguous(), k_rope.contiguous(), cache, batch.slots, cache_dtype, scale)
