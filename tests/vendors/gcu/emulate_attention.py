"""Attention: Enflame's build of flash attention, and FlashMLA's call.

Meaning: FlashAttention 2's `flash_attn_varlen_func` with vLLM's additions (`seqused_k`, `block_table`, `out`), as
vllm-gcu at 7b5aaca9 calls it; limits of fwd_kvcache_mla from csrc/src/mha_fwd_kvcache_mla.cpp there.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.gcu import chip
from tests.vendors.semantics import check_running_sums, hidden_keys, latent_tokens, read_paged, softmax_v

IMPLEMENTATIONS = emulates = Implementations()


@emulates("flash_attn__vllm_flash_attn::flash_attn_varlen_func")
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k, seqused_k, softmax_scale, causal, window_size,
    block_table, out, return_softmax_lse, fa_version,
):  # fmt: skip
    """Ragged queries over dense keys, or over a cache in blocks; the causal mask begins at the lower right corner."""
    chip.half(q=q, k=k, v=v)
    require(fa_version == 2, f"fa_version is 2 on this chip, got {fa_version}")
    require(not return_softmax_lse, "return_softmax_lse is not emulated")
    chip.shape("q", q, None, None, None)
    heads, dim = q.shape[1:]
    require(dim % 8 == 0 and dim <= 256, f"heads have 8 to 256 entries in eights, got {dim}")
    require(
        k.shape == v.shape and k.shape[-1] == dim, f"q, k and v have one width, got {dim}, {[*k.shape]}, {[*v.shape]}"
    )
    require(heads % k.shape[-2] == 0, f"{heads} heads on {k.shape[-2]} KV heads")
    starts = check_running_sums("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    counts = [b - a for a, b in pairwise(starts)]
    require(max(counts) <= max_seqlen_q, f"max_seqlen_q is at least {max(counts)}, got {max_seqlen_q}")
    if block_table is None:
        chip.absent("seqused_k without blocks", seqused_k)
        require(cu_seqlens_k is not None, "dense keys need cu_seqlens_k")
        ends = check_running_sums("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        lens = [b - a for a, b in pairwise(ends)]
    else:
        require(cu_seqlens_k is None and seqused_k is not None, "a cache in blocks needs seqused_k, not cu_seqlens_k")
        chip.dtype(chip.INT32, seqused_k=seqused_k, block_table=block_table)
        require(block_table.stride(-1) == 1, "block_table has contiguous rows")
        chip.shape("k", k, None, chip.BLOCK, None, None)
        chip.shape("seqused_k", seqused_k, len(counts))
        chip.shape("block_table", block_table, len(counts), None)
        lens, ends = seqused_k.tolist(), []
    require(min(lens) >= 0, f"lengths are not negative, got {lens}")
    require(len(lens) == len(counts), f"{len(counts)} sequences of queries, {len(lens)} of keys")
    require(max(lens) <= max_seqlen_k, f"max_seqlen_k is at least {max(lens)}, got {max_seqlen_k}")
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = (-1, -1) if window_size is None else window_size
    require(causal and right in (-1, 0), "only causal attention is emulated")
    result = torch.zeros_like(q) if out is None else out
    chip.shape("out", result, *q.shape)
    for b, (count, n) in enumerate(zip(counts, lens)):
        first = 0 if left < 0 else max(0, n - count - left)
        if block_table is None:
            keys, values = (t[ends[b] + first : ends[b] + n] for t in (k, v))
        else:
            keys, values = (read_paged(t, block_table[b], first, n) for t in (k, v))
        hidden = hidden_keys(count, first, n, left)
        a = starts[b]
        result[a : a + count] = softmax_v(q[a : a + count], keys, values, hidden, scale).to(result.dtype)
    return result.clone() if out is not None else result


@emulates("_flashmla_C::fwd_kvcache_mla")
def fwd_kvcache_mla(
    q, kcache, head_size_v, seqlens_k, block_table, softmax_scale, is_causal, tile_scheduler_metadata, num_splits,
    descale_q, descale_k,
):  # fmt: skip
    """Values are the first head_size_v entries of the keys; vllm-gcu gives no schedule and no scales."""
    chip.absent("tile_scheduler_metadata", tile_scheduler_metadata)
    chip.absent("num_splits", num_splits)
    chip.absent("descale_q", descale_q)
    chip.absent("descale_k", descale_k)
    chip.half(q=q, kcache=kcache)
    chip.contiguous(q=q, kcache=kcache)
    require(q.shape[-1] % 8 == 0 and head_size_v % 32 == 0, f"sizes in 8 and 32, got {q.shape[-1]} and {head_size_v}")
    batch, tokens, _, dim = q.shape
    require(tokens == 1 and not is_causal, "one token a sequence is emulated")
    chip.shape("kcache", kcache, None, chip.BLOCK, 1, dim)
    chip.dtype(chip.INT32, seqlens_k=seqlens_k, block_table=block_table)
    chip.shape("seqlens_k", seqlens_k, batch)
    chip.shape("block_table", block_table, batch, None)
    require(bool((seqlens_k >= 0).all()), f"lengths are not negative, got {seqlens_k.tolist()}")
    return latent_tokens(q, kcache, block_table, seqlens_k, head_size_v, softmax_scale), make_open()
