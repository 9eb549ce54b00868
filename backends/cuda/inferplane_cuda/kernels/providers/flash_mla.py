"""FlashMLA: latent attention of few query tokens over blocks of 64, and of any number over chosen tokens.

Of its sparse functions only the one over bfloat16 rows is used: `flash_mla_with_kvcache` takes indices only over a
cache of 656 bytes a token, which no layout here has.

Source: flash_mla/flash_mla_interface.py of deepseek-ai/FlashMLA at 02fe0d02; sparse attention at 9241ae3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.providers import find_function
from inferplane_cuda.kernels.providers.latents import fold_query, unfold_result

PARAMETERS = (
    "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
    "softmax_scale", "causal",
)  # fmt: skip
SPARSE_PARAMETERS = ("q", "kv", "indices", "sm_scale", "d_v")
HEADS = 64
"""Query heads that sparse attention takes, or twice as many."""


def prepare(op: Any, ctx: Any) -> tuple[Any, Any]:
    """The library's two functions."""
    metadata = find_function("flash_mla", "get_mla_metadata", ())
    return metadata, find_function("flash_mla", "flash_mla_with_kvcache", PARAMETERS)


def prepare_sparse(op: Any, ctx: Any) -> Any:
    """The library's function for chosen tokens."""
    return find_function("flash_mla", "flash_mla_sparse_fwd", SPARSE_PARAMETERS)


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


def _list_slots(chosen: torch.Tensor, batch: Batch, block_tokens: int) -> torch.Tensor:
    """The slots of chosen positions, int32 `[T, K]`; -1 stays."""
    token = torch.arange(chosen.shape[0], device=chosen.device)
    sequence = torch.searchsorted(batch.query_start[1:], token, right=True).clamp(max=len(batch.seq_lens) - 1)
    block = batch.block_tables[sequence].gather(1, (chosen.clamp(min=0) // block_tokens).long())
    return torch.where(chosen < 0, -1, block * block_tokens + chosen % block_tokens).int()


def _attend_chosen(
    view: Any,
    kv_b: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    kv: Any,
) -> torch.Tensor:
    """The library takes rows of all tokens' entries, and 64 or 128 heads: those that lack are zeros."""
    d = view.dims
    q, w_v = fold_query(view, q_nope, q_rope, kv_b)
    entries = kv.view_blocks()[0].flatten(2).flatten(0, 1)[:, None]
    slots = _list_slots(chosen, batch, kv.block_tokens)[:, None]
    q = F.pad(q, (0, 0, 0, -d.heads % HEADS))
    out = view.prepared(q=q, kv=entries, indices=slots, sm_scale=view.scale, d_v=d.latent)[0]
    return unfold_result(out[:, : d.heads], w_v)


def sparse_mla_absorbed(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_absorbed` by the library's function for many tokens, which does not split what one reads."""
    return _attend_chosen(view, view.kv_b, q_nope, q_rope, chosen, batch, kv)


def sparse_mla_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_expanded`, which the library computes in its other form."""
    return _attend_chosen(view, view.kv_b.weight, q_nope, q_rope, chosen, batch, kv)
