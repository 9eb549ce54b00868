"""Cache writes and attention over K and V in int8 with static scales: the vendor's paged attention for few tokens, its
flash attention over dequantized entries for many.

The operators take a scale and a zero point of K and of V as numbers of the host. What they do with them is not
published; with zero points of 0 the scale of vLLM's cache is left: entries are stored divided by it. The start-up check
holds what is written against the layout's own entries.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, csrc/torch_bindings.cpp for the schemas, attention/ops/paged_attn.py for
the choice between paged_attention_v1 and v2 and for what v2 needs beside, attention/backends/xformers.py for the calls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import FLASH_HEAD_SIZES, declare_fused
from inferplane.kernels.fused.operands import cumulative_lengths, one_sequence_per_token
from inferplane.plugin import Batch, Kernels
from inferplane_gcu.kernels.attention import NO_WINDOW, flash_attention
from inferplane_gcu.kernels.when import FLASH, OPERATORS
from inferplane_gcu.kvcache import BLOCK_TOKENS, STATIC_INT8, PiecesKV

vllm, cache_ops = torch.ops._C, torch.ops._C_cache_ops
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, kv_layouts=(STATIC_INT8,))
CACHE_DTYPE = "int8"
NO_ZERO_POINTS = 0.0, 0.0
DENSE = (0, 0, 0, 64, 0)
"""The first rank, and blocks of sparse attention as vLLM's defaults have them, where there is none."""
PARTITION, LONGEST, ENOUGH = 512, 8192, 512
"""Tokens of a partition, and up to which length so many heads of all sequences need none."""


@fused("kv_write", provider="vllm_gcu", features=OPERATORS)
def kv_write_int8(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: PiecesKV) -> None:
    """_C_cache_ops::reshape_and_cache, which quantizes; it skips slot -1."""
    scales = *kv.scale_values, *NO_ZERO_POINTS
    cache_ops.reshape_and_cache(k.contiguous(), v.contiguous(), *kv.view_blocks(), batch.slots, CACHE_DTYPE, *scales)


def _is_few(op: Any) -> bool:
    return op.queries == "few" and op.kv.window is None


@fused("attention", ("few query tokens, no window", _is_few), provider="vllm_gcu", features=OPERATORS)
def attention_few_int8(view: Any, q: torch.Tensor, batch: Batch, kv: PiecesKV) -> torch.Tensor:
    """_C::paged_attention_v1, or v2 where sequences are long and few; each token is a sequence that ends with it."""
    lens, tables = one_sequence_per_token(batch)
    q, longest = q.contiguous(), batch.max_seq_tokens
    out, (tokens, heads, dim) = torch.empty_like(q), q.shape
    parts = -(-longest // PARTITION)
    call = (
        q, *kv.view_blocks(), view.kv.heads, view.scale, tables, lens, BLOCK_TOKENS, longest, None, CACHE_DTYPE,
        *kv.scale_values, *DENSE, *NO_ZERO_POINTS, None,
    )  # fmt: skip
    if longest <= LONGEST and (parts == 1 or tokens * heads > ENOUGH):
        vllm.paged_attention_v1(out, *call, None)
        return out
    sums = torch.empty(tokens, heads, parts, dtype=torch.float32, device=q.device)
    vllm.paged_attention_v2(out, sums, torch.empty_like(sums), q.new_empty(tokens, heads, parts, dim), *call)
    return out


def _is_many(op: Any) -> bool:
    return op.queries == "many"


@fused(
    "attention",
    ("many query tokens", _is_many),
    FLASH_HEAD_SIZES,
    provider="flash_attn",
    features=FLASH,
    capture_safe=False,
    needs_host_lens=True,
)
def attention_many_int8(view: Any, q: torch.Tensor, batch: Batch, kv: PiecesKV) -> torch.Tensor:
    """Flash attention over the entries of all sequences, one behind the other, which torch dequantizes."""
    lens, window = batch.lens().seq_lens, view.kv.window
    found = [kv.read(table, n) for table, n in zip(batch.block_tables, lens, strict=True)]
    keys, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return flash_attention(
        q.contiguous(),
        keys,
        values,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_tokens,
        cu_seqlens_k=cumulative_lengths(lens, q.device),
        max_seqlen_k=batch.max_seq_tokens,
        softmax_scale=view.scale,
        window_size=list(NO_WINDOW if window is None else (window - 1, 0)),
    )
