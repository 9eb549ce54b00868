"""Latent attention: FlashMLA's call for few tokens, flash attention over expanded latents for many.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, attention/backends/mla_v1.py, attention/ops/flashmla.py, and
csrc/src/mha_fwd_kvcache_mla.cpp for its limits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.latents import expand_latents, fold_query, unfold_result
from inferplane.kernels.fused.needs import FLASH_MLA_HEAD_SIZES, PLAIN_KV_B, declare_fused
from inferplane.kernels.fused.operands import cumulative_lengths, one_sequence_per_token
from inferplane.plugin import Batch, Kernels, LayerKV, latents
from inferplane_gcu.kernels.attention import flash_attention
from inferplane_gcu.kernels.when import FLASH, OPERATORS
from inferplane_gcu.kvcache import PAGED

cache_ops, flashmla = torch.ops._C_cache_ops, torch.ops._flashmla_C
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_gcu", kv_layouts=(PAGED,))


def _has_supported_dims(op: Any) -> bool:
    return (op.dims.latent + op.dims.rope) % 8 == 0 and op.dims.latent % 32 == 0


@fused("mla_absorbed", ("entries in eights, latents in 32s", _has_supported_dims), features=OPERATORS)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """_flashmla_C::fwd_kvcache_mla, with each token as a sequence of its own that ends with it, as vllm-gcu does."""
    q, (lens, tables) = fold_query(view, q_nope, q_rope)[:, None], one_sequence_per_token(batch)
    cache, width = latents(kv)[:, :, None], view.dims.latent
    mid = flashmla.fwd_kvcache_mla(q, cache, width, lens, tables, view.scale, False, None, None, None, None)[0]
    return unfold_result(view, mid[:, 0])


@fused(
    "mla_expanded",
    FLASH_MLA_HEAD_SIZES,
    PLAIN_KV_B,
    features=(*OPERATORS, *FLASH),
    capture_safe=False,
    needs_host_lens=True,
)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather the latents, expand them, attend; values are padded to the keys' width, which flash attention wants."""
    d, lens, cache = view.dims, batch.lens().seq_lens, latents(kv)
    key_starts = cumulative_lengths(lens, q_nope.device)
    dense = q_nope.new_empty(sum(lens), d.latent + d.rope)
    cache_ops.gather_cache(cache, dense, batch.block_tables, key_starts, len(lens), torch.zeros_like(batch.seq_lens))
    keys, values = expand_latents(view, dense)
    out = flash_attention(
        torch.cat((q_nope, q_rope), -1),
        keys,
        values,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_tokens,
        cu_seqlens_k=key_starts,
        max_seqlen_k=batch.max_seq_tokens,
        softmax_scale=view.scale,
    )
    return out[..., : d.value].contiguous()
