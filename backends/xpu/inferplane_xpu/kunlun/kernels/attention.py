"""Cache writes and attention over paged K and V by kunlun_ops.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/v1/attention/backends/kunlun_attn.py, and ops/paged_attn.py for the
head sizes; its issue 477 for the number of sequences.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.needs import declare_fused
from inferplane.plugin import Batch, Kernels, LayerKV
from inferplane_xpu.kunlun.kernels.lengths import lods, sequence_per_token
from inferplane_xpu.kunlun.kernels.when import KUNLUN
from inferplane_xpu.kunlun.kvcache import BHLD
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="kunlun_ops", kv_layouts=(BHLD,), features=KUNLUN)
HEAD_SIZES = (32, 64, 80, 96, 112, 120, 128, 192, 256, 512)
MOST_SEQUENCES = 1023
"""speculative_attention fails with 1024 and more."""


@fused("kv_write")
def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """kunlun_ops.reshape_and_cache_flash into blocks with heads before tokens."""
    keys, values = kv.parts  # type: ignore[attr-defined]
    slots = kv.real(batch.slots)  # type: ignore[attr-defined]
    kunlun.reshape_and_cache_flash(k.contiguous(), v.contiguous(), keys, values, slots, BLHD_LAYOUT=False)


NEEDS = (
    ("K and V of one width that the vendor lists", lambda op: op.kv.dim == op.kv.v_dim and op.kv.dim in HEAD_SIZES),
    ("no window: whether the vendor's counts the token itself is written nowhere", lambda op: op.kv.window is None),
)


@fused(
    "attention", *NEEDS, ("few query tokens", lambda op: op.queries == "few"), capture_safe=False, needs_host_lens=True
)
def attention_few(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """kunlun_ops.speculative_attention, each token as a sequence that ends with it; at most 1023 in a call."""
    keys, values = kv.parts  # type: ignore[attr-defined]
    s, q, out = sequence_per_token(batch), q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    for first in range(0, q.shape[0], MOST_SEQUENCES):
        some = slice(first, first + MOST_SEQUENCES)
        kunlun.speculative_attention(
            out=out[some],
            q=q[some][None],
            k_cache=keys,
            v_cache=values,
            context_lens_cpu=s.lens_cpu[some],
            context_lens_xpu=s.lens_xpu[some],
            batch_num=out[some].shape[0],
            qlen=1,
            max_context_len=batch.max_seq_tokens,
            head_num=q.shape[1],
            head_dim=q.shape[2],
            scale=view.scale,
            kv_head_num=keys.shape[1],
            block_size=keys.shape[2],
            max_num_blocks_per_seq=s.tables.shape[1],
            block_tables=s.tables[some],
        )
    return out


@fused(
    "attention",
    *NEEDS,
    ("many query tokens", lambda op: op.queries == "many"),
    capture_safe=False,
    needs_host_lens=True,
)
def attention_many(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """kunlun_ops.prefill_attention over the cache."""
    keys, values = kv.parts  # type: ignore[attr-defined]
    return prefill(q, keys, values, batch, batch.block_tables.contiguous(), view.scale)


def prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, tables: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of ragged queries over blocks. The function scales by 1 / sqrt(D) itself, then by alpha.

    Args:
        q: `[T, H, D]`.
        keys: `[blocks, G, block tokens, D]`. values: likewise.
        batch: its lengths.
        tables: int32 `[B, blocks]`.
        scale: of the scores.
    """
    starts, out = lods(batch), torch.empty_like(q, memory_format=torch.contiguous_format)
    kunlun.prefill_attention(
        q=q.contiguous(),
        k=keys,
        v=values,
        out=out,
        is_causal=True,
        is_prefix_cache=True,
        alpha=scale * math.sqrt(q.shape[-1]),
        block_table=tables,
        context_qlen_lod_cpu=starts.query_cpu,
        context_qlen_lod_xpu=starts.query_xpu,
        context_kvlen_lod_cpu=starts.kv_cpu,
        context_kvlen_lod_xpu=starts.kv_xpu,
    )
    return out
