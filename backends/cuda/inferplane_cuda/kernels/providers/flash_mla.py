"""FlashMLA: latent attention of few query tokens over blocks of 64.

Source: flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA at 02fe0d02.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import looked_up
from inferplane_cuda.kernels.providers.latents import fold, unfold

TAKES = (
    "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
    "softmax_scale", "causal",
)  # fmt: skip


def prepare(op: Any, ctx: Any) -> tuple[Any, Any]:
    """The library's two functions."""
    return looked_up("flash_mla", "get_mla_metadata", ()), looked_up("flash_mla", "flash_mla_with_kvcache", TAKES)


def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The library wants as many query tokens of every sequence: shorter ones are given room before their own, since a
    query's place is counted from the sequence's end.
    """
    metadata, attend = p.prepared
    q, w_v = fold(p, q_nope, q_rope)
    tokens, heads, _ = q.shape
    sequences, most = len(batch.seq_lens), batch.max_query_tokens
    rows = None
    if tokens != sequences * most:
        token = torch.arange(tokens, device=q.device)
        sequence = torch.searchsorted(batch.query_start[1:], token, right=True).clamp(max=sequences - 1)
        rows = (sequence + 1) * most - batch.query_start[1:].long()[sequence] + token
        q = q.new_zeros(sequences * most, *q.shape[1:]).index_copy_(0, rows, q)
    plan, splits = metadata(batch.seq_lens, most * heads, 1)
    out = attend(
        q=q.view(sequences, most, heads, -1),
        k_cache=kv.blocked()[0].flatten(2)[:, :, None],  # type: ignore[attr-defined]
        block_table=batch.block_tables,
        cache_seqlens=batch.seq_lens,
        head_dim_v=p.dims.latent,
        tile_scheduler_metadata=plan,
        num_splits=splits,
        softmax_scale=p.scale,
        causal=True,
    )[0].reshape(sequences * most, heads, -1)
    return unfold(out if rows is None else out[rows], w_v)
