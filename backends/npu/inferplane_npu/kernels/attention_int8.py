"""Cache writes and attention over paged K and V in int8, with a scale a token and head.

npu_fused_infer_attention_score reads such a cache for single queries alone: on Atlas A2 and A3 its page has no
quantized paged cache for longer ones. So drafts are presented as sequences of their own, and a prompt's keys and values
are expanded before it attends to them, as vllm-ascend does with its int8 cache, which has a scale a channel.

Source: pages of npu_dynamic_quant, npu_scatter_pa_kv_cache, npu_fused_infer_attention_score and its v2, whose section
on single queries has the shapes of the scales, in Ascend/op-plugin at 517f2e7d; for the 950 the first attention's page
at 09fca6f6; vllm-ascend at 182b75ea, attention_v1.py (AscendC8AttentionBackendImpl).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.kernels.fused.operands import one_sequence_per_token
from inferplane.plugin import Batch, Kernels
from inferplane_npu.graphs import attend, lengths_by_token
from inferplane_npu.kernels.attention import BAND, HEADS, RIGHT_DOWN_CAUSAL, attend_single, causal_mask
from inferplane_npu.kernels.when import OnNpu
from inferplane_npu.kvcache import BLOCK_TOKENS, INT8_ALIGNMENT, ND_128_INT8, NpuInt8KV

npu = torch.ops.npu
KERNELS = Kernels()
fused = partial(
    declare_fused, KERNELS, provider="torch_npu", when=OnNpu, features=("fused-infer",), kv_layouts=(ND_128_INT8,)
)


def _has_int8_dims(op: Any) -> bool:
    return op.kv.dim == op.kv.v_dim and op.kv.dim % INT8_ALIGNMENT == 0 and op.kv.dim <= 512


DIMS = ("K and V of one width, a multiple of 32 up to 512", _has_int8_dims)


@fused("kv_write")
def kv_write_int8(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> None:
    """npu_dynamic_quant of each token and head, npu_scatter_pa_kv_cache, and the scales by torch."""
    (keys, key_scales), (values, value_scales) = npu.npu_dynamic_quant(k), npu.npu_dynamic_quant(v)
    slots = kv.real(batch.slots)
    npu.npu_scatter_pa_kv_cache(keys.contiguous(), values.contiguous(), kv.first, kv.second, slots, cache_mode="Norm")
    kv.write_scales(slots, key_scales, value_scales)


@fused("attention", HEADS, DIMS, ("no window", lambda op: op.kv.window is None), needs_host_lens=True)
def attention_int8(view: Any, q: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> torch.Tensor:
    """Sequences with few tokens in one call, each token alone; the others one by one."""
    return _attend(view, q, batch, kv)


@fused(
    "attention",
    HEADS,
    DIMS,
    ("a window", lambda op: op.kv.window is not None),
    capture_safe=False,
    needs_host_lens=True,
)
def attention_int8_window(view: Any, q: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> torch.Tensor:
    """As `attention_int8`, with masks that depend on the lengths."""
    return _attend(view, q, batch, kv)


def _attend(view: Any, q: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> torch.Tensor:
    few, many = batch.split()
    if few is None:
        return _attend_prompts(view, q, batch if many is None else many, kv)
    if many is None:
        return _attend_tokens(view, q, few, kv)
    n = few.tokens
    return torch.cat((_attend_tokens(view, q[:n], few, kv), _attend_prompts(view, q[n:], many, kv)))


def _attend_tokens(view: Any, q: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> torch.Tensor:
    """Each token as a sequence of its own that ends with it."""
    lens, tables = batch.once("inferplane_npu.tokens", one_sequence_per_token, batch)
    lengths = batch.once("inferplane_npu.token_lengths", lengths_by_token, batch.lens())["actual_seq_lengths_kv"]
    if view.kv.window is not None:
        return attend_single(view, q, lens, lengths, tables, kv)
    k, v = kv.flat()
    return attend(
        batch,
        q[:, None],
        k,
        v,
        by_token=True,
        actual_seq_lengths_kv=lengths,
        block_table=tables,
        num_heads=view.heads,
        num_key_value_heads=view.kv.heads,
        scale=view.scale,
        input_layout="BSND",
        block_size=BLOCK_TOKENS,
        **kv.antiquant(),
    )[:, 0]


def _attend_prompts(view: Any, q: torch.Tensor, batch: Batch, kv: NpuInt8KV) -> torch.Tensor:
    """Each sequence's keys and values, expanded to the plan's dtype, without the blocks before its window."""
    out, window = torch.empty_like(q), view.kv.window
    band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
    for a, b, n, table in batch.rows():
        skipped = view.kv.blocks_before_window(b - a, n, BLOCK_TOKENS)
        keys, values = kv.read(table[skipped:], n - skipped * BLOCK_TOKENS)
        out[a:b] = npu.npu_fused_infer_attention_score(
            q[None, a:b],
            keys[None],
            values[None],
            atten_mask=causal_mask(q.device),
            actual_seq_lengths=[b - a],
            actual_seq_lengths_kv=[len(keys)],
            num_heads=view.heads,
            num_key_value_heads=view.kv.heads,
            scale=view.scale,
            input_layout="BSND",
            sparse_mode=RIGHT_DOWN_CAUSAL if window is None else BAND,
            **band,
        )[0][0]
    return out
