"""Latent attention: the FlashMLA fork for few tokens, flash attention over expanded latents for many.

Sources: HYGON-AI/vllm-plugin-das, v1/attention/ops/flashmla.py, which calls the fork as FlashMLA itself is called
(blocks of 64 tokens, latents of 512 + 64), and its patch of concat_and_cache_mla; the flash attention fork's
flash_attn_interface.py.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.plugin import Batch, Kernels, LayerKV, latents
from inferplane_dcu import vendor
from inferplane_dcu.kernels.attention import OPERATORS, hcu
from inferplane_dcu.kernels.when import RANK_FUSED, each_token_alone, one, only, with_
from inferplane_dcu.kvcache import BLOCK_TOKENS, PAGED

KERNELS = Kernels()
LATENT, ROTARY = 512, 64
"""Entries of a latent and of its rotated key: FlashMLA knows no others."""


@KERNELS(
    "mla_kv_write",
    "hcu_ops",
    rank=RANK_FUSED,
    when=with_(features=OPERATORS, kv_layouts=(PAGED,)),
    capture_safe=True,
)
def mla_kv_write(p: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """hcu_ops::concat_and_cache_mla; it skips slot -1."""
    hcu.concat_and_cache_mla(
        latent.contiguous(), k_rope.contiguous(), latents(kv), batch.slots, "auto", one(latent.device)
    )


def _absorbed_dims(op: Any) -> bool:
    return (op.dims.latent, op.dims.rope) == (LATENT, ROTARY)


@KERNELS(
    "mla_absorbed",
    "flash_mla",
    rank=RANK_FUSED,
    when=with_(
        vendor.MLA_PLAN,
        vendor.MLA,
        kv_layouts=(PAGED,),
        needs=((f"latents of {LATENT} + {ROTARY}", _absorbed_dims),),
    ),
    prepare=vendor.found_once(vendor.MLA_PLAN, vendor.MLA),
    capture_safe=True,
)
def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Fold `kv_b` into the query, attend with each token as a sequence of its own, unfold."""
    plan, attend = p.prepared
    d, tokens = p.dims, q_nope.shape[0]
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    lens, tables = each_token_alone(batch, tokens)
    schedule, splits = plan(lens, d.heads, 1)
    cache = latents(kv)[:, :, None]
    out = attend(
        q[:, None], cache, tables, lens, d.latent, schedule, splits, softmax_scale=p.scale, causal=True
    )  # fmt: skip
    return torch.bmm(only(out)[:, 0].transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1).contiguous()


def _expanded_dims(op: Any) -> bool:
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width <= 256 and width % 8 == 0


def _plain_kv_b(op: Any) -> bool:
    return op.kv_b.act is None and op.kv_b.out_dtype is None and op.kv_b.bias is None


@KERNELS(
    "mla_expanded",
    "flash_attn",
    rank=RANK_FUSED,
    when=with_(
        vendor.FLASH,
        kv_layouts=(PAGED,),
        needs=(
            ("heads of at most 256 entries, in eights, and no wider values", _expanded_dims),
            ("a plain kv_b without bias", _plain_kv_b),
        ),
    ),
    prepare=vendor.found_once(vendor.FLASH),
    needs_host_lens=True,
)
def mla_expanded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather the latents, expand them, attend; values are padded to the keys' width, which flash attention wants."""
    d, lens = p.dims, batch.lens().seq_lens
    ends = torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(q_nope.device)
    latent, k_rope = _gathered(latents(kv), batch.block_tables, lens).split((d.latent, d.rope), -1)
    k_nope, v = F.linear(latent, p.kv_b.weight).view(-1, d.heads, d.nope + d.value).split((d.nope, d.value), -1)
    out = p.prepared(
        torch.cat((q_nope, q_rope), -1),
        torch.cat((k_nope, k_rope[:, None].expand(-1, d.heads, -1)), -1),
        F.pad(v, (0, d.nope + d.rope - d.value)),
        batch.query_start,
        ends,
        batch.max_query_tokens,
        batch.max_seq_tokens,
        softmax_scale=p.scale,
        causal=True,
    )
    return only(out)[..., : d.value].contiguous()


def _gathered(cache: torch.Tensor, tables: torch.Tensor, lens: tuple[int, ...]) -> torch.Tensor:
    """Entries of every sequence, one behind the other."""
    parts = [cache.index_select(0, table[: -(-n // BLOCK_TOKENS)]).flatten(0, 1)[:n] for table, n in zip(tables, lens)]
    return torch.cat(parts)
