"""Latent attention: the FlashMLA fork for few tokens, flash attention over expanded latents for many.

Sources: HYGON-AI/vllm-plugin-das, v1/attention/ops/flashmla.py, which calls the fork as FlashMLA itself is called
(blocks of 64 tokens, latents of 512 + 64), and its patch of concat_and_cache_mla; the flash attention fork's
flash_attn_interface.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused import vllm_calls
from inferplane.kernels.fused.latents import expand_latents, fold_query, unfold_result
from inferplane.kernels.fused.needs import FLASH_MLA_HEAD_SIZES, PLAIN_KV_B
from inferplane.kernels.fused.operands import cumulative_lengths, one_sequence_per_token
from inferplane.plugin import Batch, Kernels, LayerKV, latents
from inferplane_dcu import vendor
from inferplane_dcu.kernels.attention import OPERATORS, hcu
from inferplane_dcu.kernels.when import declare, only
from inferplane_dcu.kvcache import BLOCK_TOKENS, PAGED

KERNELS = Kernels()
fused = partial(declare, KERNELS, provider="hcu_ops")
LATENT, ROTARY = 512, 64
"""Entries of a latent and of its rotated key: FlashMLA knows no others."""


@fused("mla_kv_write", features=OPERATORS, kv_layouts=(PAGED,))
def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """hcu_ops::concat_and_cache_mla; it skips slot -1."""
    vllm_calls.mla_kv_write(hcu.concat_and_cache_mla, latent, k_rope, latents(kv), batch)


def _has_supported_dims(op: Any) -> bool:
    return (op.dims.latent, op.dims.rope) == (LATENT, ROTARY)


DIMS = (f"latents of {LATENT} + {ROTARY}", _has_supported_dims)


@fused(
    "mla_absorbed",
    vendor.MLA_PLAN,
    vendor.MLA,
    provider="flash_mla",
    kv_layouts=(PAGED,),
    needs=(DIMS,),
)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Fold `kv_b` into the query, attend with each token as a sequence of its own, unfold."""
    plan, attend = view.prepared
    q, (lens, tables) = fold_query(view, q_nope, q_rope), one_sequence_per_token(batch)
    schedule, splits = plan(lens, view.dims.heads, 1)
    cache = latents(kv)[:, :, None]
    out = attend(
        q[:, None], cache, tables, lens, view.dims.latent, schedule, splits, softmax_scale=view.scale, causal=True
    )  # fmt: skip
    return unfold_result(view, only(out)[:, 0])


@fused(
    "mla_expanded",
    vendor.FLASH,
    provider="flash_attn",
    kv_layouts=(PAGED,),
    needs=(FLASH_MLA_HEAD_SIZES, PLAIN_KV_B),
    capture_safe=False,
    needs_host_lens=True,
)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather the latents, expand them, attend; values are padded to the keys' width, which flash attention wants."""
    lens = batch.lens().seq_lens
    return attend_expanded(view, q_nope, q_rope, batch, gather_latents(latents(kv), batch.block_tables, lens))


def attend_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, dense: torch.Tensor
) -> torch.Tensor:
    """flash_attn_varlen_func over gathered latents.

    Args:
        view, q_nope, q_rope, batch: as the op `mla_expanded` gets them.
        dense: latents and their rotated keys of all sequences, one behind the other, `[keys, 576]`.
    """
    lens = batch.lens().seq_lens
    keys, values = expand_latents(view, dense)
    out = view.prepared(
        torch.cat((q_nope, q_rope), -1),
        keys,
        values,
        batch.query_start,
        cumulative_lengths(lens, q_nope.device),
        batch.max_query_tokens,
        batch.max_seq_tokens,
        softmax_scale=view.scale,
        causal=True,
    )
    return only(out)[..., : view.dims.value].contiguous()


def gather_latents(cache: torch.Tensor, tables: torch.Tensor, lens: tuple[int, ...]) -> torch.Tensor:
    """Entries of every sequence, one behind the other."""
    parts = [cache.index_select(0, table[: -(-n // BLOCK_TOKENS)]).flatten(0, 1)[:n] for table, n in zip(tables, lens)]
    return torch.cat(parts)
