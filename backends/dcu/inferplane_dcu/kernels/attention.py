"""Cache writes and attention over K and V, in the vendor's layout of heads and in plain blocks.

Blocks of heads (`dcu_heads_64`): the vendor's paged attention for single tokens, which knows no window and gives no
mass of the softmax (LSE), and its flash attention over the same blocks for everything else. Plain blocks (`paged_64`):
the vendor's other flash attention, one call a step.

Three paths of the fork are avoided, each behind the same name: vllm_flash_attn_with_kvcache ignores a window and
`causal`, and for several tokens a sequence knows one KV head only; vllm_flash_attn_varlen_func goes the same way where
every sequence brings the same 1 to 4 tokens and there is no window. So single tokens are all that the first gets, and
the second is called for more than 8 tokens or with a window.

Sources: the DCU fork's flash_attn_interface.py; HYGON-AI/vllm-plugin-das, v1/attention/backends/flash_attn.py and
csrc/torch_bindings.cpp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls
from inferplane.kernels.fused.needs import FLASH_HEAD_SIZES
from inferplane.kernels.fused.operands import one_sequence_per_token
from inferplane.kernels.fused.vllm_kernels import ONE_WIDTH
from inferplane.plugin import Batch, Kernels, LayerKV
from inferplane_dcu import vendor
from inferplane_dcu.chips import PAGED_PROMPTS
from inferplane_dcu.kernels.basic import TABLE
from inferplane_dcu.kernels.when import declare, only
from inferplane_dcu.kvcache import HEADS, PAGED

hcu = torch.ops.hcu_ops
KERNELS = Kernels()
fused = partial(declare, KERNELS, provider="flash_attn")
VERSION = 2
"""Value of `fa_version`: the fork asserts it."""
OPERATORS = (vendor.CACHE_OPERATORS,)


def _window(view: Any) -> list[int] | None:
    """A window of w tokens is the token and w - 1 before it."""
    return None if view.kv.window is None else [view.kv.window - 1, 0]


def _write(k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: Any) -> None:
    if kv.layout == HEADS:
        vllm_calls.kv_write(hcu.reshape_and_cache, k, v, (kv.keys, kv.values), batch)
    else:
        vllm_calls.kv_write(hcu.reshape_and_cache_flash, k, v, kv.view_blocks(), batch)


@fused("kv_write", provider="hcu_ops", features=OPERATORS, kv_layouts=(HEADS, PAGED), needs=(ONE_WIDTH,))
def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """hcu_ops::reshape_and_cache for blocks of heads, reshape_and_cache_flash for plain ones; slot -1 is skipped."""
    _write(k, v, batch, kv)


def _has_both_norms(op: Any) -> bool:
    norms = (op.q_norm, op.k_norm)
    return all(n is not None and n.weight.dtype is None for n in norms) and op.q_norm.eps == op.k_norm.eps


@fused(
    "norm_rope_write",
    vendor.NORM_ROPE,
    provider="lightop",
    features=OPERATORS,
    kv_layouts=(HEADS, PAGED),
    needs=(
        ("norms of queries and keys with one epsilon, weights in the plan's dtype", _has_both_norms),
        (ONE_WIDTH[0], lambda op: ONE_WIDTH[1](op.write)),
    ),
    packs={"rope.table": TABLE},
)
def norm_rope_write(
    view: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """rms_rotary_embedding_fuse, in place on copies, and the cache's write."""
    tokens, heads, dim = q.shape
    q, k = (t.clone(memory_format=torch.contiguous_format) for t in (q, k))
    view.prepared(
        batch.positions, q.view(tokens, -1), k.view(tokens, -1), dim, view.rope.table.to_dtype(q.dtype),
        not view.rope.interleaved, view.q_norm.weight, view.k_norm.weight, None, None, view.q_norm.eps,
    )  # fmt: skip
    _write(k, v, batch, kv)
    return q.view(tokens, heads, dim)


def _has_few_tokens_without_window(op: Any) -> bool:
    return op.queries == "few" and op.kv.window is None


@fused(
    "attention",
    vendor.FLASH_TOKENS,
    kv_layouts=(HEADS,),
    needs=(("at most 8 tokens a sequence, no window", _has_few_tokens_without_window),),
)
def attention_tokens(view: Any, q: torch.Tensor, batch: Batch, kv: Any) -> torch.Tensor:
    """Paged attention with each token as a sequence of its own."""
    lens, tables = one_sequence_per_token(batch)
    out = view.prepared(
        q.contiguous()[:, None], kv.keys, kv.values, cache_seqlens=lens, block_table=tables, softmax_scale=view.scale,
        causal=True,
    )  # fmt: skip
    return only(out)[:, 0]


def _has_many_tokens_or_window(op: Any) -> bool:
    return not _has_few_tokens_without_window(op)


@fused(
    "attention",
    vendor.FLASH_PROMPTS,
    features=(PAGED_PROMPTS,),
    kv_layouts=(HEADS,),
    needs=(("more than 8 tokens of a sequence, or a window", _has_many_tokens_or_window),),
)
def attention_prompts(view: Any, q: torch.Tensor, batch: Batch, kv: Any) -> torch.Tensor:
    """All sequences in one call, over blocks of heads."""
    out = view.prepared(
        q.contiguous(), kv.keys, kv.values, max_seqlen_q=batch.max_query_tokens, cu_seqlens_q=batch.query_start,
        max_seqlen_k=batch.max_seq_tokens, seqused_k=batch.seq_lens, softmax_scale=view.scale, causal=True,
        window_size=_window(view), block_table=batch.block_tables, is_prefix_cache=True, fa_version=VERSION,
    )  # fmt: skip
    return only(out)


@fused("attention", vendor.FLASH_PAGED, kv_layouts=(PAGED,), needs=(FLASH_HEAD_SIZES,))
def attention_paged(view: Any, q: torch.Tensor, batch: Batch, kv: Any) -> torch.Tensor:
    """All sequences in one call, over plain blocks."""
    keys, values = kv.view_blocks()
    out = view.prepared(
        q=q.contiguous(), k=keys, v=values, cu_seqlens_q=batch.query_start, max_seqlen_q=batch.max_query_tokens,
        max_seqlen_k=batch.max_seq_tokens, seqused_k=batch.seq_lens, softmax_scale=view.scale, causal=True,
        window_size=tuple(_window(view) or (-1, -1)), block_table=batch.block_tables,
    )  # fmt: skip
    return only(out)
