"""Attention: the DCU forks of flash attention and of FlashMLA.

Meaning: FlashAttention 2's functions with the fork's additions, and the fork's own branches, as its
flash_attn_interface.py has them: which call goes to paged attention, what that leaves out of account, and that it gives
no LSE even where one is requested.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vendors.calls import make_open
from tests.vendors.dcu import chip
from tests.vendors.emulator import Implementations, require
from tests.vendors.semantics import check_running_sums, hidden_keys, latent_tokens, one_scale, read_paged, softmax_v

IMPLEMENTATIONS = emulates = Implementations()


def _widths(q, k, v):
    chip.half(q=q, k=k, v=v)
    chip.shape("q", q, None, None, None)
    dim = q.shape[-1]
    require(dim % 8 == 0 and dim <= 256, f"heads have 8 to 256 entries in eights, got {dim}")


def _plain(**unused):
    for name, value in unused.items():
        require(value is None or value == 0 or value == "auto", f"{name} is not emulated")


def _sequences(q, keys_of, cu_seqlens_q, max_seqlen_q, lens, max_seqlen_k, scale, left):
    """Ragged queries; `keys_of(b, first, n)` are keys and values first to n of a sequence."""
    starts = check_running_sums("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    counts = [b - a for a, b in pairwise(starts)]
    require(max(counts) <= max_seqlen_q, f"max_seqlen_q is at least {max(counts)}, got {max_seqlen_q}")
    require(len(lens) == len(counts), f"{len(counts)} sequences of queries, {len(lens)} of keys")
    require(max(lens) <= max_seqlen_k, f"max_seqlen_k is at least {max(lens)}, got {max_seqlen_k}")
    out = torch.zeros_like(q)
    for b, (count, n) in enumerate(zip(counts, lens)):
        first = 0 if left < 0 else max(0, n - count - left)
        keys, values = keys_of(b, first, n)
        a = starts[b]
        part = softmax_v(q[a : a + count], keys, values, hidden_keys(count, first, n, left), scale)
        out[a : a + count] = part.to(out.dtype)
    return out


def _tables(block_table, seqused_k, batch):
    require(block_table is not None and seqused_k is not None, "a cache in blocks needs block_table and seqused_k")
    chip.dtype(chip.INT32, seqused_k=seqused_k, block_table=block_table)
    chip.shape("seqused_k", seqused_k, batch)
    chip.shape("block_table", block_table, batch, None)
    require(int(seqused_k.min()) >= 0, "lengths are not negative")
    require(block_table.stride(-1) == 1, "block_table has contiguous rows")


def _left(window_size, causal):
    left, right = (-1, -1) if window_size is None else window_size
    require(causal and right in (-1, 0), "only causal attention is emulated")
    return left


@emulates("flash_attn::flash_attn_varlen_func")
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
    softcap, alibi_slopes, deterministic, return_attn_probs, q_descale, k_descale, v_descale, block_table, s_aux,
):  # fmt: skip
    """Dense keys, one sequence behind the other."""
    _plain(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic)
    _plain(return_attn_probs=return_attn_probs, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _plain(block_table=block_table, s_aux=s_aux)
    _widths(q, k, v)
    require(k.shape == v.shape and k.shape[-1] == q.shape[-1], f"one width, got {[*k.shape]} and {[*v.shape]}")
    ends = check_running_sums("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    return _sequences(
        q, lambda b, first, n: (k[ends[b] + first : ends[b] + n], v[ends[b] + first : ends[b] + n]), cu_seqlens_q,
        max_seqlen_q, [b - a for a, b in pairwise(ends)], max_seqlen_k, softmax_scale, _left(window_size, causal),
    )  # fmt: skip


@emulates("flash_attn::hg_flash_attn_varlen_func")
def hg_flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k, seqused_k, softmax_scale, causal, window_size,
    softcap, alibi_slopes, block_table, out, k_descale, v_descale, s_aux,
):  # fmt: skip
    """Plain blocks `[blocks, 64 or 128, heads, D]`."""
    _plain(softcap=softcap, alibi_slopes=alibi_slopes, k_descale=k_descale, v_descale=v_descale, s_aux=s_aux)
    _plain(cu_seqlens_k=cu_seqlens_k, out=out)
    _widths(q, k, v)
    require(k.dim() == 4 and k.shape[1] in (64, 128), f"blocks of 64 or 128 tokens, got {list(k.shape)}")
    require(k.shape == v.shape and k.shape[-1] == q.shape[-1], f"one width, got {[*k.shape]} and {[*v.shape]}")
    _tables(block_table, seqused_k, cu_seqlens_q.shape[0] - 1)
    return _sequences(
        q, lambda b, first, n: tuple(read_paged(t, block_table[b], first, n) for t in (k, v)), cu_seqlens_q,
        max_seqlen_q, seqused_k.tolist(), max_seqlen_k, softmax_scale, _left(window_size, causal),
    )  # fmt: skip


def _heads(q, k, v):
    dim = q.shape[-1]
    require(dim % 64 == 0 and dim <= 256, f"heads of 64, 128, 192 or 256 entries, got {dim}")
    chip.half(q=q, k=k, v=v)
    chip.contiguous(k=k, v=v)
    heads = k.shape[1]
    chip.shape("k", k, None, heads, chip.BLOCK, dim)
    chip.shape("v", v, None, heads, dim, chip.BLOCK)
    require(q.shape[-2] % heads == 0, f"{q.shape[-2]} heads on {heads} KV heads")
    return k.transpose(1, 2), v.permute(0, 3, 1, 2)


@emulates("flash_attn::vllm_flash_attn_varlen_func")
def vllm_flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k, q_v, dropout_p, softmax_scale, causal,
    window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table, return_softmax_lse, out,
    is_prefix_cache, scheduler_metadata, q_descale, k_descale, v_descale, kv_cache_dtype, fa_version, s_aux, is_bhsd,
):  # fmt: skip
    """Blocks of heads. Sequences of the same 1 to 4 tokens and no window: paged attention, which knows one KV head."""
    _plain(cu_seqlens_k=cu_seqlens_k, q_v=q_v, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    _plain(deterministic=deterministic, return_attn_probs=return_attn_probs, return_softmax_lse=return_softmax_lse)
    _plain(out=out, scheduler_metadata=scheduler_metadata, q_descale=q_descale, k_descale=k_descale)
    _plain(v_descale=v_descale, kv_cache_dtype=kv_cache_dtype, s_aux=s_aux, is_bhsd=is_bhsd)
    require(fa_version == 2, f"fa_version is 2, got {fa_version}")
    require(is_prefix_cache, "plain blocks, is_prefix_cache=False, are not emulated")
    require(chip.ARCH != "gfx928", "reported to be wrong on gfx928")
    chip.shape("q", q, None, None, None)
    keys, values = _heads(q, k, v)
    batch = cu_seqlens_q.shape[0] - 1
    _tables(block_table, seqused_k, batch)
    left = _left(window_size, causal)
    if max_seqlen_q * batch == q.shape[0] and 1 < max_seqlen_q < 5 and left < 0:
        require(k.shape[1] == 1, "sequences of the same 2 to 4 tokens want one KV head")
    return _sequences(
        q, lambda b, first, n: tuple(read_paged(t, block_table[b], first, n) for t in (keys, values)), cu_seqlens_q,
        max_seqlen_q, seqused_k.tolist(), max_seqlen_k, softmax_scale, left,
    )  # fmt: skip


@emulates("flash_attn::vllm_flash_attn_with_kvcache")
def vllm_flash_attn_with_kvcache(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, s_aux,
    return_softmax_lse, q_scale, k_scale, v_scale, kv_cache_dtype, out, max_seqlen_k, is_bhsd,
):  # fmt: skip
    """Blocks of heads, one token a sequence: the output alone, also where an LSE is requested; no window is seen."""
    _plain(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, softcap=softcap)
    _plain(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes, s_aux=s_aux, q_scale=q_scale, k_scale=k_scale)
    _plain(v_scale=v_scale, kv_cache_dtype=kv_cache_dtype, out=out, is_bhsd=is_bhsd, num_splits=num_splits)
    chip.shape("q", q, None, 1, None, None)
    require(list(window_size) == [-1, -1], "a window would be left out of account")
    keys, values = _heads(q, k_cache, v_cache)
    _tables(block_table, cache_seqlens, q.shape[0])
    result = torch.zeros_like(q)
    for b, n in enumerate(cache_seqlens.tolist()):
        if n:
            parts = (read_paged(t, block_table[b], 0, n) for t in (keys, values))
            result[b] = softmax_v(q[b], *parts, None, softmax_scale).to(q.dtype)
    return result


SCHEDULE = 8
"""Numbers of a schedule's row in FlashMLA."""


@emulates("flash_mla::get_mla_metadata")
def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    """A schedule, of which nothing is computed here but what it was made for: lengths and heads."""
    chip.dtype(chip.INT32, cache_seqlens=cache_seqlens)
    require(num_heads_k == 1, f"latents have one KV head, got {num_heads_k}")
    schedule = torch.full((1, SCHEDULE), num_heads_per_head_k, dtype=torch.int32)
    splits = torch.cat((torch.zeros(1, dtype=torch.int32), cache_seqlens.cumsum(0, dtype=torch.int32)))
    return schedule, splits


@emulates("flash_mla::get_mla_decoding_metadata_dense_fp8")
def get_mla_decoding_metadata_dense_fp8(cache_seqlens, num_heads_per_head_k, num_heads_k):
    """A schedule for latents in FP8, which is not that for 16 bits."""
    schedule, splits = get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)
    return -schedule, splits


@emulates("flash_mla::flash_mla_with_kvcache_quantization")
def flash_mla_with_kvcache_quantization(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal,
    k_scale, kv_cache_dtype,
):  # fmt: skip
    """Queries in 16 bits over latents in FP8, which are multiplied by their scale; not what gfx938 is called with."""
    require(chip.ARCH != "gfx938", "on gfx938 queries are in FP8 too")
    require(kv_cache_dtype == "fp8_e4m3", f"kv_cache_dtype is 'fp8_e4m3', got {kv_cache_dtype!r}")
    chip.half(q=q)
    chip.dtype(torch.float8_e4m3fn, k_cache=k_cache)
    require(k_scale is not None and list(k_scale.shape) == [1], "k_scale has one element in one dimension")
    one_scale(k_scale=k_scale)
    wide = (k_cache.float() * k_scale).to(q.dtype)
    return _over_latents(
        q, wide, block_table, cache_seqlens, head_dim_v, -tile_scheduler_metadata, num_splits, softmax_scale
    )


@emulates("flash_mla::flash_mla_with_kvcache")
def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale, causal
):
    """Values are the first 512 entries of the keys; the schedule must be of these lengths and heads."""
    return _over_latents(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale
    )


def _over_latents(q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, num_splits, softmax_scale):
    chip.half(q=q, k_cache=k_cache)
    chip.contiguous(q=q, k_cache=k_cache)
    require(q.shape[-1] == 576 and head_dim_v == 512, f"576 and 512 entries, got {q.shape[-1]} and {head_dim_v}")
    chip.shape("q", q, None, 1, None, None)
    batch, _, heads, dim = q.shape
    chip.shape("k_cache", k_cache, None, chip.BLOCK, 1, dim)
    _tables(block_table, cache_seqlens, batch)
    require(bool((schedule == heads).all()), f"a schedule for {heads} heads")
    require(num_splits.tolist() == [0, *cache_seqlens.cumsum(0).tolist()], "a schedule for these lengths")
    return latent_tokens(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale), make_open()
