"""Attention over paged K and V by Enflame's build of flash attention.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, attention/backends/flash_attn.py: `flash_attn_varlen_func` serves
prompts and single tokens alike, in one call a step.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from inferplane.kernels.fused.needs import FLASH_HEAD_SIZES, declare_fused
from inferplane.plugin import Batch, Kernels, LayerKV
from inferplane_gcu.kernels.when import FLASH
from inferplane_gcu.kvcache import PAGED

KERNELS = Kernels()
VERSION = 2
"""Value of `fa_version`."""
NO_WINDOW = (-1, -1)


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> torch.Tensor:
    """Enflame's function, imported when it is first called; causal, ragged queries."""
    function = importlib.import_module("flash_attn.vllm_flash_attn").flash_attn_varlen_func
    out: torch.Tensor = function(q, k, v, causal=True, fa_version=VERSION, **call)
    return out


@declare_fused(KERNELS, "attention", FLASH_HEAD_SIZES, provider="flash_attn", kv_layouts=(PAGED,), features=FLASH)
def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """All sequences in one call. A window of w tokens is the token and w - 1 before it."""
    keys, values = kv.view_blocks()  # type: ignore[attr-defined]
    window = view.kv.window
    return flash_attention(
        q.contiguous(),
        keys,
        values,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_tokens,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.max_seq_tokens,
        softmax_scale=view.scale,
        window_size=list(NO_WINDOW if window is None else (window - 1, 0)),
        block_table=batch.block_tables,
    )
