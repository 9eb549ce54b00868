"""Calls in the form of vLLM's operators, which several vendors' libraries have taken over.

They write into tensors that they are given, some into their inputs, which are copied here: an op leaves its inputs as
they are.

Source: vllm-project/vllm, csrc/torch_bindings.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inferplane.kernels.fused.operands import one
from inferplane.plugin import Batch

AS_IT_IS = "auto"
"""Value of `kv_cache_dtype`: what the cache holds already."""


def rms_norm(call: Callable[..., object], norm: Any, x: torch.Tensor) -> torch.Tensor:
    """By `call(out, x, weight, eps)` over contiguous rows."""
    x = x.contiguous()
    out = torch.empty_like(x)
    call(out, x, norm.weight, norm.eps)
    return out


def add_rms_norm(
    call: Callable[..., object], norm: Any, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and sum, by `call(x, residual, weight, eps)`: its first argument becomes the norm and its second the sum."""
    y, total = x.clone(memory_format=torch.contiguous_format), residual.clone(memory_format=torch.contiguous_format)
    call(y, total, norm.weight, norm.eps)
    return y, total


def silu_mul(call: Callable[..., object], x: torch.Tensor) -> torch.Tensor:
    """By `call(out, x)`: SiLU of the first half times the second."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    call(out, x.contiguous())
    return out


def kv_write(
    call: Callable[..., object],
    k: torch.Tensor,
    v: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
) -> None:
    """By `call(k, v, keys, values, slots, kv_cache_dtype, k_scale, v_scale)`, which skips slot -1."""
    scale = one(k.device)
    call(k.contiguous(), v.contiguous(), *cache, batch.slots, AS_IT_IS, scale, scale)


def mla_kv_write(
    call: Callable[..., object], latent: torch.Tensor, k_rope: torch.Tensor, cache: torch.Tensor, batch: Batch
) -> None:
    """By `call(latent, k_rope, cache, slots, kv_cache_dtype, scale)`, which skips slot -1."""
    call(latent.contiguous(), k_rope.contiguous(), cache, batch.slots, AS_IT_IS, one(latent.device))
