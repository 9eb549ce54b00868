"""FlashMLA: latent attention of few query tokens over blocks of 64.

Source: flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA at 02fe0d02.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import find_function
from inferplane_cuda.kernels.providers.latents import fold_query, unfold_result

PARAMETERS = (
    "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
    "softmax_scale", "causal",
)  # fmt: skip


def prepare(op: Any, ctx: Any) -> tuple[Any, Any]:
    """The library's two functions."""
    metadata = find_function("flash_mla", "get_mla_metadata", ())
    return metadata, find_function("flash_mla", "flash_mla_with_kvcache", PARAMETERS)


def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_absorbed`. The library takes the same number of query tokens for every sequence: shorter ones are
    padded before their own tokens, since a query's position is counted from the sequence's end.
    """
    metadata, attend = view.prepared
    q, w_v = fold_query(view, q_nope, q_rope)
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
        k_cache=kv.view_blocks()[0].flatten(2)[:, :, None],  # type: ignore[attr-defined]
        block_table=batch.block_tables,
        cache_seqlens=batch.seq_lens,
        head_dim_v=view.dims.latent,
        tile_scheduler_metadata=plan,
        num_splits=splits,
        softmax_scale=view.scale,
        causal=True,
    )[0].reshape(sequences * most, heads, -1)
    return unfold_result(out if rows is None else out[rows], w_v)
