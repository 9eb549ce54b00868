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


PAGED_HEADS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
"""attention/ops/paged_attn.py, get_supported_head_sizes."""
PARTITION, LONGEST = 512, 8192


def _attend_paged(
    out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
    alibi_slopes, kv_cache_dtype, k_scale, v_scale, blocksparse_vert_stride, k_zero, v_zero, out_scales,
) -> None:  # fmt: skip
    """One query token a sequence, over K in pieces of 16 bytes and V turned, in int8."""
    chip.absent("alibi_slopes", alibi_slopes)
    chip.absent("out_scales", out_scales)
    require(blocksparse_vert_stride <= 0, "block sparse attention is not supported for gcu")
    require(kv_cache_dtype == "int8", f"kv_cache_dtype {kv_cache_dtype!r} is not emulated")
    chip.half(out=out, query=query)
    chip.dtype(torch.int8, key_cache=key_cache, value_cache=value_cache)
    chip.dtype(chip.INT32, block_tables=block_tables, seq_lens=seq_lens)
    chip.contiguous(out=out, query=query, key_cache=key_cache, value_cache=value_cache, block_tables=block_tables)
    rows, heads, dim = query.shape
    require(dim in PAGED_HEADS, f"heads have {PAGED_HEADS} entries, got {dim}")
    require(block_size == chip.BLOCK and heads % num_kv_heads == 0, f"blocks of 64, {heads} heads on {num_kv_heads}")
    chip.shape("out", out, rows, heads, dim)
    chip.shape("key_cache", key_cache, None, num_kv_heads, dim // 16, chip.BLOCK, 16)
    chip.shape("value_cache", value_cache, key_cache.shape[0], num_kv_heads, dim, chip.BLOCK)
    chip.shape("seq_lens", seq_lens, rows)
    chip.shape("block_tables", block_tables, rows, None)
    lens = seq_lens.tolist()
    require(min(lens) >= 0 and max(lens) <= max_seq_len, f"max_seq_len is at least {max(lens)}, got {max_seq_len}")
    keys = (key_cache.float() - k_zero).mul(k_scale).permute(0, 3, 1, 2, 4).flatten(3)
    values = (value_cache.float() - v_zero).mul(v_scale).permute(0, 3, 1, 2)
    for i, n in enumerate(lens):
        k, v = (read_paged(t, block_tables[i], 0, n) for t in (keys, values))
        hidden = hidden_keys(1, 0, n, -1)
        out[i] = softmax_v(query[i : i + 1], k, v, hidden, scale)[0].to(out.dtype) if n else 0.0


@emulates("_C::paged_attention_v1")
def paged_attention_v1(
    out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
    alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
    blocksparse_block_size, blocksparse_head_sliding_step, k_zero, v_zero, out_scales, query_scales,
):  # fmt: skip
    """A sequence in one piece: short ones, as vllm-gcu chooses it."""
    chip.absent("query_scales", query_scales)
    require(max_seq_len <= LONGEST, f"at most {LONGEST} tokens, got {max_seq_len}")
    _attend_paged(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes, kv_cache_dtype, k_scale, v_scale, blocksparse_vert_stride, k_zero, v_zero, out_scales,
    )  # fmt: skip


@emulates("_C::paged_attention_v2")
def paged_attention_v2(
    out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
    block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks,
    blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step, k_zero, v_zero, out_scales,
):  # fmt: skip
    """The same in partitions of 512 tokens, whose results lie in tmp_out."""
    rows, heads, dim = query.shape
    parts = -(-max_seq_len // PARTITION)
    for name, t in (("exp_sums", exp_sums), ("max_logits", max_logits)):
        chip.shape(name, t, rows, heads, parts)
        chip.dtype(torch.float32, **{name: t})
    chip.shape("tmp_out", tmp_out, rows, heads, parts, dim)
    chip.half(tmp_out=tmp_out, query=query)
    _attend_paged(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes, kv_cache_dtype, k_scale, v_scale, blocksparse_vert_stride, k_zero, v_zero, out_scales,
    )  # fmt: skip


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
