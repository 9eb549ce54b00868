"""Functions of intel_extension_for_pytorch's last release for GPUs, behind everything else that is fused.

It is archived, and its calls are known from others' use alone: norms, activation, and attention over blocks.

Source: vllm-project/vllm, vllm/_ipex_ops.py as of its last release with that extension.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import ADD_NORM_WEIGHT, NORM_WEIGHT, declare_fused
from inferplane.kernels.fused.vllm_kernels import ONE_WIDTH
from inferplane.plugin import Batch, Kernels, LayerKV
from inferplane_xpu.intel.kernels.when import RANK_LEGACY
from inferplane_xpu.intel.kvcache import PAGED
from inferplane_xpu.library import Library

functional = Library("intel_extension_for_pytorch.llm.functional")
paged = Library("intel_extension_for_pytorch.llm.modules.PagedAttention")
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="ipex", features=("ipex",), rank=RANK_LEGACY, capture_safe=False)


@fused("rms_norm", NORM_WEIGHT)
def rms_norm(view: Any, x: torch.Tensor) -> torch.Tensor:
    """llm.functional.rms_norm."""
    out: torch.Tensor = functional.rms_norm(x.contiguous(), view.weight, view.eps)
    return out


@fused("add_rms_norm", ADD_NORM_WEIGHT)
def add_rms_norm(view: Any, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """llm.functional.add_rms_norm, whose first argument becomes the sum; the first layer has no sum."""
    if residual is None:
        return rms_norm(view.norm, x), x
    total = residual.clone(memory_format=torch.contiguous_format)
    return functional.add_rms_norm(total, x.contiguous(), view.norm.weight, None, view.norm.eps, True), total


@fused("silu_mul")
def silu_mul(view: Any, x: torch.Tensor) -> torch.Tensor:
    """llm.functional.silu_mul of the two halves."""
    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    out: torch.Tensor = functional.silu_mul(gate, up)
    return out


@fused("kv_write", ONE_WIDTH, kv_layouts=(PAGED,))
def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """llm.modules.PagedAttention.reshape_and_cache_flash."""
    keys, values = kv.view_blocks()  # type: ignore[attr-defined]
    paged.reshape_and_cache_flash(k.contiguous(), v.contiguous(), keys, values, batch.slots, "auto", 1.0, 1.0)


def _has_one_width(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim in (64, 96, 128, 192, 256)


@fused("attention", ("heads of 64, 96, 128, 192 or 256 entries", _has_one_width), kv_layouts=(PAGED,))
def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """llm.modules.PagedAttention.flash_attn_varlen_func, causal, all sequences in one call."""
    keys, values = kv.view_blocks()  # type: ignore[attr-defined]
    left, right = (-1, -1) if view.kv.window is None else (view.kv.window - 1, 0)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    paged.flash_attn_varlen_func(
        out, q.contiguous(), keys, values, batch.query_start, batch.seq_lens, batch.max_query_tokens,
        batch.max_seq_tokens, view.scale, True, batch.block_tables, None, softcap=0.0, window_size_left=left,
        window_size_right=right, k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    return out
