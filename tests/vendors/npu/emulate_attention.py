"""Attention, as its pages describe it.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip
from tests.vendors.npu.emulate_cache import NZ, tokens_of

IMPLEMENTATIONS = emulates = Implementations()
MASK = 2048


def nz_to_nd(cache: torch.Tensor) -> torch.Tensor:
    """`[B, W / 16, S, 16]` as `[B, S, W]`."""
    return cache.transpose(1, 2).flatten(2)


def _check_mask(mask: torch.Tensor | None) -> None:
    require(mask is not None, "sparse modes 2, 3 and 4 need atten_mask")
    assert mask is not None
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is bool, int8 or uint8, got {mask.dtype}")
    chip.contiguous(atten_mask=mask)
    require(
        tuple(mask.shape[-2:]) == (MASK, MASK) and mask.numel() == MASK**2,
        f"atten_mask is [2048, 2048], got {list(mask.shape)}",
    )
    right = is_same_mask(mask.view(MASK, MASK).view(torch.int8), triangle(1, torch.int8))
    require(right, "atten_mask is 1 above the diagonal and 0 elsewhere")


@cache
def triangle(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A value above the diagonal, 0 elsewhere."""
    return torch.full((MASK, MASK), value, dtype=dtype).triu_(1)


def is_same_mask(mask: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the bytes are the same, eight by eight: a mask has four million entries and comes with every call."""
    return torch.equal(mask.contiguous().view(torch.int64), expected.view(torch.int64))


def hidden_keys(mode: int, queries: int, keys: int, pre: int, after: int) -> torch.Tensor | None:
    """Where scores do not count: counted from the upper left corner in mode 2, from the lower right in 3 and 4."""
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None]
    if mode == 2:
        return j > i - keys + queries
    if mode == 3:
        return j > i
    return (j > i + after) | (j < i - pre) if mode == 4 else None


def weigh_values(q, k, v, hidden, scale, sink=None):
    """q [S, N, D], k [K, G, D], v [K, G, V], sink [N]: float32 [S, N, V]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("snd,knd->nsk", q.float(), k) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:  # a key of its own, without a value
        column = sink.float()[:, None, None].expand(-1, q.shape[0], 1)
        return torch.einsum("nsk,knv->snv", torch.cat((scores, column), -1).softmax(-1)[..., :-1], v)
    return torch.einsum("nsk,knv->snv", scores.softmax(-1), v)


def _run_fused(
    query, key, value, *, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table, query_rope, key_rope,
    num_heads, scale, pre_tokens, next_tokens, input_layout, num_key_value_heads, sparse_mode, inner_precise,
    block_size, softmax_lse_flag, learnable_sink=None, key_antiquant_scale=None, value_antiquant_scale=None,
    key_antiquant_mode=0, value_antiquant_mode=0, **others,
):  # fmt: skip
    chip.runs_on("npu_fused_infer_attention_score", *chip.A2_A3)
    chip.unused(**others, softmax_lse_flag=softmax_lse_flag, inner_precise=inner_precise)
    require(input_layout in ("TND", "TND_NTD", "BSND"), f"input_layout {input_layout!r} is not emulated")
    chip.dtype("query", query, *chip.HALF)
    chip.contiguous(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    if key.dtype is torch.int8:
        modes = key_antiquant_mode, value_antiquant_mode
        _check_int8(query, key, value, key_antiquant_scale, value_antiquant_scale, modes, input_layout, block_table)
        require(query_rope is None and learnable_sink is None, "int8 with rope parts or sinks is not emulated")
    else:
        chip.same_dtype("query, key and value", query, key, value)
        chip.unused(key_antiquant_scale=key_antiquant_scale, value_antiquant_scale=value_antiquant_scale)
        chip.unused(key_antiquant_mode=key_antiquant_mode, value_antiquant_mode=value_antiquant_mode)
    require((query_rope is None) == (key_rope is None), "query_rope and key_rope come together")
    if query_rope is not None:
        chip.same_dtype("query and query_rope", query, query_rope)
        chip.shape("query_rope", query_rope, *query.shape[:-1], 64)
    ragged, paged = input_layout != "BSND", block_table is not None
    heads, kv_heads = num_heads, num_key_value_heads or num_heads
    require(query.shape[-2] == heads, f"query has {query.shape[-2]} heads, num_heads says {heads}")
    latent = query_rope is not None and query.shape[-1] == 512  # whose own section allows 128 heads on one
    require(heads % kv_heads == 0 and (latent or heads // kv_heads <= 64), f"{heads} heads on {kv_heads} KV heads")
    require(heads <= 256 and query.shape[-1] <= 512, f"at most 256 heads of 512, got {heads} of {query.shape[-1]}")
    starts = _query_starts(query, ragged, actual_seq_lengths)
    batch = len(starts) - 1
    single = not ragged and query.shape[1] == 1
    if paged:
        keys = _paged_lengths(
            actual_seq_lengths_kv, batch, block_table, key, block_size, ragged or query_rope is not None, single
        )
    elif not ragged:
        require(not single, "dense keys in BSND are emulated for longer queries only")
        require(key.dim() == 4 and key.shape[0] == batch, f"dense keys in BSND are [B, S, N, D], got {list(key.shape)}")
        chip.shape("key", key, None, None, kv_heads, None)
        keys = list(actual_seq_lengths_kv or [key.shape[1]] * batch)
        require(keys == [key.shape[1]] * batch, "dense keys shorter than S are not emulated")
    else:
        require(actual_seq_lengths_kv is not None and len(actual_seq_lengths_kv) == batch, "TND needs lengths of keys")
        require(list(actual_seq_lengths_kv) == sorted(actual_seq_lengths_kv), "lengths of dense keys are cumulative")
        keys = [b - a for a, b in pairwise([0, *actual_seq_lengths_kv])]
        require(actual_seq_lengths_kv[-1] == key.shape[0], f"the last length of keys is {key.shape[0]} rows")
    if learnable_sink is not None:
        _check_sink(learnable_sink, query, heads, input_layout)
    _check_dims(query, key, value, query_rope, key_rope, heads, kv_heads, input_layout, paged, learnable_sink)
    if sparse_mode in (2, 3, 4):
        _check_mask(atten_mask)
    else:
        require(sparse_mode == 0, f"sparse_mode {sparse_mode} is not emulated")
    require(query.shape[-1] != 512 or sparse_mode in (0, 3, 4), "latent queries take sparse modes 0, 3 and 4")
    q = query if query_rope is None else torch.cat((query, query_rope), -1)
    q = q if ragged else q.flatten(0, 1)
    out = torch.zeros(*q.shape[:2], _v_dim(value, kv_heads, paged), dtype=query.dtype)
    at = 0
    for b in range(batch):
        first, last = starts[b], starts[b + 1]
        n = keys[b]
        if not n:  # no keys: zeros
            continue
        k, v, rope = (
            _keys(t, paged, block_table[b] if paged else None, b if key.dim() == 4 else at, n, kv_heads)
            for t in (key, value, key_rope)
        )
        if key.dtype is torch.int8:
            scales = (
                tokens_of(s.transpose(1, 2), block_table[b], n) for s in (key_antiquant_scale, value_antiquant_scale)
            )
            k, v = (t.float() * scale[..., None] for t, scale in zip((k, v), scales))
        k = k if rope is None else torch.cat((k, rope), -1)
        if single and query_rope is None:
            hidden = _full_mask(atten_mask, b, n, block_table, block_size, sparse_mode)
        else:
            require(sparse_mode != 0 or atten_mask is None, "a whole mask is emulated for single queries only")
            hidden = hidden_keys(sparse_mode, last - first, n, pre_tokens, next_tokens)
        out[first:last] = weigh_values(q[first:last], k, v, hidden, scale, learnable_sink).to(out.dtype)
        at += n
    out = out.transpose(0, 1).contiguous() if input_layout == "TND_NTD" else out
    return out if ragged else out.view(*query.shape[:2], *out.shape[1:])


def _check_sink(sink, query, heads, layout) -> None:
    """Its section: TND and NTD_TND, values of at most 128 entries, and neither quantization nor a shared prefix."""
    require(layout == "TND", f"sinks are for TND, got {layout}")
    require(query.shape[-1] <= 128, f"with sinks values have at most 128 entries, got {query.shape[-1]}")
    chip.dtype("learnable_sink", sink, torch.bfloat16)
    chip.shape("learnable_sink", sink, heads)


def _check_int8(query, key, value, key_scale, value_scale, modes, layout, table) -> None:
    """Its section on single queries: int8 in a paged cache with float32 scales [blocks, KV_N, block size], mode 5. In
    longer ones a paged cache is not quantized, but for an NZ form of bfloat16 that is not emulated.
    """
    require(value.dtype is torch.int8, f"key and value are both int8, got {value.dtype}")
    require(layout == "BSND" and query.shape[1] == 1, "a quantized paged cache is for single queries")
    require(table is not None, "int8 keys are emulated in a paged cache only")
    require(modes == (5, 5), f"antiquant modes {modes} are not emulated")
    require(query.shape[-1] % 32 == 0 and key.shape[1] % 32 == 0, "int8 wants head and block sizes that 32 divides")
    heads = key.shape[2] // query.shape[-1]
    for name, scale in (("key_antiquant_scale", key_scale), ("value_antiquant_scale", value_scale)):
        require(scale is not None, f"int8 keys and values need {name}")
        require(scale.dtype is torch.float32, f"{name} is float32, got {scale.dtype}")
        chip.shape(name, scale, key.shape[0], heads, key.shape[1])
        chip.contiguous(**{name: scale})


def _query_starts(query, ragged, lengths) -> list[int]:
    if ragged:
        require(query.dim() == 3, f"TND queries have 3 dimensions, got {query.dim()}")
        require(lengths is not None and 0 < len(lengths) <= 4096, "TND needs 1 to 4096 query lengths")
        require(list(lengths) == sorted(lengths), f"query lengths in TND are cumulative, got {list(lengths)}")
        require(lengths[-1] == query.shape[0], f"the last query length is {query.shape[0]} rows, got {lengths[-1]}")
        return [0, *lengths]
    require(query.dim() == 4, f"BSND queries have 4 dimensions, got {query.dim()}")
    batch, tokens = query.shape[:2]
    if lengths is not None and tokens > 1:  # without effect for single queries
        require(list(lengths) == [tokens] * batch, "queries shorter than S are not emulated")
    return [b * tokens for b in range(batch + 1)]


def _paged_lengths(lengths, batch, table, key, block_size, by_16, single) -> list[int]:
    require(lengths is not None, "a paged cache needs actual_seq_lengths_kv")
    require(len(lengths) == batch, f"a length for each of {batch} sequences, got {len(lengths)}")
    chip.contiguous(block_table=table)
    require(table.dtype is torch.int32 and table.dim() == 2, "block_table is int32 [B, blocks]")
    require(table.shape[0] == batch, f"block_table has {batch} rows, got {table.shape[0]}")
    size = key.shape[3 if key.dim() == 5 else 1]
    require(block_size == size, f"block_size {block_size}, the cache's blocks hold {size}")
    if by_16:
        require(0 < size <= 1024 and size % 16 == 0, f"block_size is a multiple of 16 up to 1024, got {size}")
    elif single:
        require(0 < size <= 512 and size % 16 == 0, f"block_size is a multiple of 16 up to 512, got {size}")
    else:
        require(128 <= size <= 512 and size % 128 == 0, f"block_size is a multiple of 128 up to 512, got {size}")
    for b, n in enumerate(lengths):
        blocks = -(-n // size)
        require(0 <= n <= table.shape[1] * size, f"sequence {b} of {n} tokens, its table has {table.shape[1]} blocks")
        entries = table[b, :blocks].tolist()
        require(all(0 <= e < key.shape[0] for e in entries), f"sequence {b} names blocks outside of the cache")
    return list(lengths)


def _check_dims(query, key, value, query_rope, key_rope, heads, kv_heads, layout, paged, sink) -> None:
    dim = query.shape[-1]
    if dim == 512 and query_rope is not None:
        require(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"latent queries have a power of two of heads, got {heads}")
        require(kv_heads == 1, f"latents have one KV head, got {kv_heads}")
        require(paged, "latents are emulated in a paged cache only")
        if key.dim() == 5:
            size = key.shape[3]
            chip.shape("key", key, None, 1, 512 // NZ, size, NZ)
            chip.shape("key_rope", key_rope, key.shape[0], 1, 64 // NZ, size, NZ)
        else:
            chip.shape("key", key, None, None, 512)
            chip.shape("key_rope", key_rope, *key.shape[:2], 64)
        require(key.shape == value.shape, "key and value have one shape")
        return
    require(layout != "TND_NTD", "TND_NTD is for latents")
    k_dim = key.shape[-1] // kv_heads if paged else key.shape[-1]
    v_dim = _v_dim(value, kv_heads, paged)
    if paged:
        require(key.dim() == 3, f"a paged cache is [blocks, block_size, heads * D], got {list(key.shape)}")
    require(k_dim == dim, f"keys of {k_dim} entries for queries of {dim}")
    require(dim % 16 == 0, f"D is a multiple of 16, got {dim}")
    if query_rope is not None:
        require(dim == v_dim == 128, f"with rope parts heads have 128 entries, got {dim} and {v_dim}")
        chip.shape("key_rope", key_rope, *key.shape[:-1], 64)
    elif layout == "TND":
        # gpt-oss, with heads of 64 and sinks, is served in TND by vllm-ascend at 182b75ea, attention_v1.py.
        require(
            (dim, v_dim) in ((128, 128), (192, 128), (192, 192)) or (sink is not None and dim == v_dim == 64),
            f"TND takes heads of 128, or 192 with 128 or 192; got {dim} and {v_dim}",
        )
    else:
        require(key.shape == value.shape, "key and value have one shape")


def _v_dim(value, kv_heads, paged) -> int:
    if value.dim() == 5:
        return value.shape[2] * NZ
    return value.shape[-1] // kv_heads if paged else value.shape[-1]


def _keys(cache, paged, table, first, count, kv_heads) -> torch.Tensor | None:
    if cache is None:
        return None
    if not paged:
        return cache[first] if cache.dim() == 4 else cache[first : first + count]
    flat = nz_to_nd(cache[:, 0]) if cache.dim() == 5 else cache
    return tokens_of(flat, table, count).view(count, kv_heads, -1)


def _full_mask(mask, sequence, count, table, block_size, mode) -> torch.Tensor | None:
    """A single query without rope parts: sparse_mode means nothing, a mask must cover the whole table."""
    if mask is None or mode in (2, 3, 4):
        return None
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is bool, int8 or uint8, got {mask.dtype}")
    width = table.shape[1] * block_size
    require(mask.shape[-1] >= width, f"atten_mask covers block_table's {width} keys, got {mask.shape[-1]}")
    chip.contiguous(atten_mask=mask)
    return mask.reshape(table.shape[0], -1)[sequence, :count].bool()[None]


@emulates("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(**call):
    """Prefill and decode; the second result is a zero unless the log-sum-exp is requested."""
    return _run_fused(**call), make_open()  # the page says [1], the shape function [0]


@emulates("npu::npu_fused_infer_attention_score.out")
def fused_infer_attention_score_out(workspace, out, **call):
    """Into given results, with scratch memory."""
    require(workspace is None or workspace.dtype is torch.uint8, "workspace holds bytes")
    require(len(out) == 2, f"two results, got {len(out)}")
    result = _run_fused(**call)
    chip.shape("the result", out[0], *result.shape)
    out[0].copy_(result)
    out[1].zero_()
    return out[0], out[1]


@emulates("npu::_npu_fused_infer_attention_score_get_max_workspace")
def fused_infer_attention_score_workspace(**call):
    """Some bytes."""
    return torch.empty(64, dtype=torch.uint8)


V1_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}


@emulates("npu::npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(**call):
    """The same under other names, on the series of its page; it has sinks too."""
    chip.runs_on("npu_fused_infer_attention_score_v2", "910b", "910_93")
    return _run_fused(**{V1_NAMES.get(name, name): value for name, value in call.items()}), make_open()
