"""Latent attention: the kernel for single tokens over latents, and attention over expanded latents for many.

Source: vllm-project/vllm-xpu-kernels at 4543b580, tests/flash_attn/test_mla_decode.py for the call over latents,
csrc/flash_attn/flash_api.cpp for its limit of query heads, csrc/cache.cpp for write and gather.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.kernels.fused.latents import expand_latents, fold_query, unfold_result
from inferplane.kernels.fused.needs import PLAIN_KV_B, declare_fused
from inferplane.kernels.fused.operands import cumulative_lengths
from inferplane.plugin import Batch, Kernels, LayerKV, latents
from inferplane_xpu.intel.kernels.attention import scales_of, varlen
from inferplane_xpu.intel.kernels.lengths import AttentionSequences, single_tokens
from inferplane_xpu.intel.kernels.when import LATENT_HEADS, MATRIX
from inferplane_xpu.intel.kvcache import PAGED

cache_ops = torch.ops._C_cache_ops
KERNELS = Kernels()
fused = partial(declare_fused, KERNELS, provider="vllm_xpu", kv_layouts=(PAGED,), features=MATRIX)
LATENT, ROTATED = 512, 64
"""Entries of a latent and of its rotated part, for which the kernel was compiled."""


def _has_supported_latents(op: Any) -> bool:
    return (op.dims.latent, op.dims.rope) == (LATENT, ROTATED)


def _has_full_head_groups(op: Any) -> bool:
    return op.dims.heads <= LATENT_HEADS or op.dims.heads % LATENT_HEADS == 0


ABSORBED = (
    ("latents of 512 + 64 entries", _has_supported_latents),
    ("query heads in eights, or fewer", _has_full_head_groups),
)


@fused("mla_absorbed", *ABSORBED)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """varlen_fwd with the latents as keys and their first 512 entries as values. It takes eight query heads a sequence:
    more become further sequences.
    """
    d, tokens = view.dims, q_nope.shape[0]
    q = fold_query(view, q_nope, q_rope)
    cache, groups = latents(kv)[:, :, None], max(1, d.heads // LATENT_HEADS)
    grouped = q.view(tokens * groups, d.heads // groups, -1)
    at, values = single_tokens(batch, groups), cache[..., : d.latent]
    mid = varlen(grouped, cache, values, at, view.scale, scales=scales_of(kv))
    return unfold_result(view, mid.view(tokens, d.heads, d.latent))


EXPANDED_WIDTHS = (64, 128, 192, 256)
"""Head sizes for which causal attention without blocks was compiled (symbols of the wheel, as in `when`)."""


def _has_expanded_width(op: Any) -> bool:
    width = op.dims.nope + op.dims.rope
    return op.dims.value <= width and width in EXPANDED_WIDTHS


EXPANDED = (("heads of 64, 128, 192 or 256 entries, and no wider values", _has_expanded_width), PLAIN_KV_B)


@fused("mla_expanded", *EXPANDED, capture_safe=False, needs_host_lens=True)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather the latents, expand them, attend; values are padded to the keys' width, in which the result comes."""
    d, lens, cache = view.dims, batch.lens().seq_lens, latents(kv)
    key_starts = cumulative_lengths(lens, q_nope.device)
    dense = q_nope.new_empty(sum(lens), d.latent + d.rope)
    cache_ops.gather_cache(cache, dense, batch.block_tables, key_starts, len(lens), None)
    return attend_expanded(view, q_nope, q_rope, batch, dense, key_starts)


def attend_expanded(
    view: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    batch: Batch,
    dense: torch.Tensor,
    key_starts: torch.Tensor,
) -> torch.Tensor:
    """Attention over gathered latents.

    Args:
        view, q_nope, q_rope, batch: as the op `mla_expanded` gets them.
        dense: latents and their rotated parts of all sequences, one behind the other, `[keys, 576]`.
        key_starts: where each sequence's begin, int32 `[B + 1]`.
    """
    d = view.dims
    keys, values = expand_latents(view, dense)
    most = max(2, batch.max_query_tokens)
    out = varlen(
        torch.cat((q_nope, q_rope), -1),
        keys,
        values,
        AttentionSequences(batch.query_start, key_starts, batch.block_tables, most, batch.max_seq_tokens),
        view.scale,
        paged=False,
    )
    return out[..., : d.value].contiguous()
