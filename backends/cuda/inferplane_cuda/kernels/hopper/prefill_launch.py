"""Calls of attention ops with many query tokens as launches of `prefill`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton

from inferplane.kernels.triton.mla import EXPANDED_BYTES, gather_latents
from inferplane.plugin import Batch, LayerKV
from inferplane_cuda.kernels.hopper.mla_launch import LOG2_E, tma_descriptor
from inferplane_cuda.kernels.hopper.prefill import prefill


def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `attention` for heads of 128 over a paged bfloat16 cache."""
    tokens, heads, _ = q.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    k, v = (tma_descriptor(e.view(e.shape[0], -1), 64, 128) for e in kv.entries)  # type: ignore[attr-defined]
    queries = tma_descriptor(q.view(tokens, -1), 128, 128)
    grid = (triton.cdiv(batch.max_query_tokens, 128), heads, len(batch.seq_lens))
    prefill[grid](
        queries, queries, k, v, k, batch.block_tables, batch.query_start, batch.seq_lens, batch.seq_lens, out,
        view.scale * LOG2_E, batch.block_tables.stride(0), out.stride(0), 0,
        GROUPED=heads // view.kv.heads, ROPE=0, PAGED=True, STEP=128, VALUES_AT=0, STAGES=2, num_warps=4,
    )  # fmt: skip
    return out


def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_expanded` for heads of 128 + 64 entries and values of 128, a few heads at a time."""
    d, tokens = view.dims, q_nope.shape[0]
    q_nope, q_rope = q_nope.contiguous(), q_rope.contiguous()
    latents, before = gather_latents(view, q_nope, batch, kv)
    weight = view.kv_b.weight.view(d.heads, d.nope + d.value, d.latent)
    out = q_nope.new_empty(tokens, d.heads, d.value)
    queries = tma_descriptor(q_nope.view(tokens, -1), 128, 128)
    rope_queries = tma_descriptor(q_rope.view(tokens, -1), 128, 64)
    at_once = max(1, min(d.heads, EXPANDED_BYTES // (latents.shape[0] * 512)))
    for head in range(0, d.heads, at_once):
        heads = min(at_once, d.heads - head)
        expanded = tma_descriptor(F.linear(latents[:, : d.latent], weight[head : head + heads].flatten(0, 1)), 64, 128)
        grid = (triton.cdiv(batch.max_query_tokens, 128), heads, len(batch.seq_lens))
        prefill[grid](
            queries, rope_queries, expanded, expanded, tma_descriptor(latents, 64, 64), batch.block_tables,
            batch.query_start, batch.seq_lens, before, out,
            view.scale * LOG2_E, batch.block_tables.stride(0), out.stride(0), head,
            GROUPED=1, ROPE=64, PAGED=False, STEP=256, VALUES_AT=128, STAGES=2, num_warps=4,
        )  # fmt: skip
    return out
