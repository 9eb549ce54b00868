"""Latent attention by kunlun_ops: its paged attention for few tokens, its prefill over expanded blocks for many.

Source: baidu/vLLM-Kunlun at 09869ee7, vllm_kunlun/ops/attention/flashmla.py and v1/attention/backends/mla/common.py,
flashmla.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from inferplane.kernels.fused.latents import expand_latents, fold_query, unfold_result
from inferplane.kernels.fused.needs import PLAIN_KV_B, declare_fused
from inferplane.plugin import Batch, Kernels, LayerKV
from inferplane_xpu.kunlun.kernels.attention import HEAD_SIZES, prefill
from inferplane_xpu.kunlun.kernels.lengths import sequence_per_token
from inferplane_xpu.kunlun.kernels.when import KUNLUN
from inferplane_xpu.kunlun.kvcache import LATENT, LATENT_BLOCK_TOKENS
from inferplane_xpu.library import Library

kunlun = Library("kunlun_ops")
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="kunlun_ops", kv_layouts=(LATENT,), features=KUNLUN)
LATENT_ENTRIES, ROTATED = 512, 64
"""The sizes that FlashMLA knows, and with it the vendor's operator."""
VALUES_ARE_LATENTS = -1
"""Value of `vo_head_dim`: the latent's size is an argument of its own."""


@fused("mla_kv_write")
def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """kunlun_ops.concat_and_cache_mla."""
    kunlun.concat_and_cache_mla(
        kv_c=latent.contiguous(),
        k_pe=k_rope.contiguous(),
        slot_mapping=kv.real(batch.slots),  # type: ignore[attr-defined]
        kv_cache=kv.parts[0][:, 0],  # type: ignore[attr-defined]
    )


@fused(
    "mla_absorbed",
    ("latents of 512 + 64", lambda op: (op.dims.latent, op.dims.rope) == (LATENT_ENTRIES, ROTATED)),
    capture_safe=False,
    needs_host_lens=True,
)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """kunlun_ops.paged_attention in its form for latents, each token as a sequence that ends with it."""
    d, q = view.dims, fold_query(view, q_nope, q_rope)[:, None]
    s, mid = sequence_per_token(batch), q.new_empty(q.shape[0], 1, d.heads, d.latent)
    kunlun.paged_attention(
        mid, q, kv.parts[0], None, s.tables, s.lens_cpu, s.lens_xpu, False, True,  # type: ignore[attr-defined]
        VALUES_ARE_LATENTS, d.latent, d.rope, view.scale, q_r=q,
    )  # fmt: skip
    return unfold_result(view, mid[:, 0])


class Blocks(NamedTuple):
    """Blocks that a step reads, sequence after sequence.

    Args:
        numbers: int64 `[n]`, in the cache.
        tables: int32 `[B, most blocks]`, the same blocks by their places in `numbers`.
    """

    numbers: torch.Tensor
    tables: torch.Tensor


def blocks(batch: Batch) -> Blocks:
    """The blocks of a step, computed once."""
    return batch.once("inferplane_xpu.kunlun.blocks", lambda: _compute_blocks(batch))


def _compute_blocks(batch: Batch) -> Blocks:
    counts = [-(-n // LATENT_BLOCK_TOKENS) for n in batch.lens().seq_lens]
    width, device = batch.block_tables.shape[1], batch.block_tables.device
    flat = torch.tensor([i * width + j for i, count in enumerate(counts) for j in range(count)], device=device)
    tables, first = torch.zeros(len(counts), max(counts), dtype=torch.int32), 0
    for i, count in enumerate(counts):
        tables[i, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    return Blocks(batch.block_tables.flatten()[flat].long(), tables.to(device))


def _has_expanded_dims(op: Any) -> bool:
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width and width in HEAD_SIZES


@fused(
    "mla_expanded",
    ("heads of a size that the vendor lists, and no wider values", _has_expanded_dims),
    PLAIN_KV_B,
    capture_safe=False,
    needs_host_lens=True,
)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Expand the step's blocks to blocks of keys and values, and attend over those; values are padded to the keys'
    width. The vendor itself attends to what is new and to chunks of what is old, and merges by their sums; blocks need
    no merging.
    """
    b = blocks(batch)
    both = expand_latents(view, kv.parts[0][b.numbers, 0])  # type: ignore[attr-defined]
    keys, values = (t.transpose(1, 2).contiguous() for t in both)
    out = prefill(torch.cat((q_nope, q_rope), -1), keys, values, batch, b.tables, view.scale)
    return out[..., : view.dims.value].contiguous()
