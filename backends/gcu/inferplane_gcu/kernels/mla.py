"""Latent attention: FlashMLA's call for few tokens, flash attention over expanded latents for many.

Source: EnflameTechnology/vllm-gcu at 7b5aaca9, attention/backends/mla_v1.py, attention/ops/flashmla.py, and
csrc/src/mha_fwd_kvcache_mla.cpp for its limits.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, Kernels, LayerKV, When, latents
from inferplane_gcu.kernels.attention import cache_ops, flash_attention
from inferplane_gcu.kernels.when import FLASH, HALF, OPERATORS, RANK_FUSED, one
from inferplane_gcu.kvcache import PAGED

flashmla = torch.ops._flashmla_C
KERNELS = Kernels()


@KERNELS(
    "mla_kv_write",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(HALF, kv_layouts=(PAGED,), features=OPERATORS),
    capture_safe=True,
)
def mla_kv_write(p: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """_C_cache_ops::concat_and_cache_mla; it skips slot -1."""
    cache_ops.concat_and_cache_mla(
        latent.contiguous(), k_rope.contiguous(), latents(kv), batch.slots, "auto", one(latent.device)
    )


def _absorbed_dims(op: Any) -> bool:
    return (op.dims.latent + op.dims.rope) % 8 == 0 and op.dims.latent % 32 == 0


@KERNELS(
    "mla_absorbed",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(
        HALF,
        kv_layouts=(PAGED,),
        features=OPERATORS,
        needs=(("entries in eights, latents in 32s", _absorbed_dims),),
    ),
    capture_safe=True,
)
def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """_flashmla_C::fwd_kvcache_mla, with each token as a sequence of its own that ends with it, as vllm-gcu does."""
    d, tokens = p.dims, q_nope.shape[0]
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    lens, tables = batch.seq_lens, batch.block_tables
    if batch.max_query_tokens > 1:
        sequence = torch.repeat_interleave(batch.query_start.diff().long(), output_size=tokens)
        behind = batch.query_start[1:][sequence] - 1 - torch.arange(tokens, dtype=torch.int32, device=q.device)
        lens, tables = (lens[sequence] - behind).clamp_min(0), tables[sequence]  # padded sequences have no length
    cache = latents(kv)[:, :, None]
    mid = flashmla.fwd_kvcache_mla(q[:, None], cache, d.latent, lens, tables, p.scale, False, None, None, None, None)[0]
    return torch.bmm(mid[:, 0].transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1).contiguous()


def _expanded_dims(op: Any) -> bool:
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width <= 256 and width % 8 == 0


def _plain_kv_b(op: Any) -> bool:
    return op.kv_b.act is None and op.kv_b.out_dtype is None and op.kv_b.bias is None


@KERNELS(
    "mla_expanded",
    "vllm_gcu",
    rank=RANK_FUSED,
    when=When(
        HALF,
        kv_layouts=(PAGED,),
        features=(*OPERATORS, *FLASH),
        needs=(
            ("heads of at most 256 entries, in eights, and no wider values", _expanded_dims),
            ("a plain kv_b without bias", _plain_kv_b),
        ),
    ),
    needs_host_lens=True,
)
def mla_expanded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather the latents, expand them, attend; values are padded to the keys' width, which flash attention wants."""
    d, lens, cache = p.dims, batch.lens().seq_lens, latents(kv)
    ends = torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(q_nope.device)
    dense = q_nope.new_empty(sum(lens), d.latent + d.rope)
    cache_ops.gather_cache(cache, dense, batch.block_tables, ends, len(lens), torch.zeros_like(batch.seq_lens))
    latent, k_rope = dense.split((d.latent, d.rope), -1)
    k_nope, v = F.linear(latent, p.kv_b.weight).view(-1, d.heads, d.nope + d.value).split((d.nope, d.value), -1)
    out = flash_attention(
        torch.cat((q_nope, q_rope), -1),
        torch.cat((k_nope, k_rope[:, None].expand(-1, d.heads, -1)), -1),
        F.pad(v, (0, d.nope + d.rope - d.value)),
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_tokens,
        cu_seqlens_k=ends,
        max_seqlen_k=batch.max_seq_tokens,
        softmax_scale=p.scale,
    )
    return out[..., : d.value].contiguous()
