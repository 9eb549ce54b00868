"""Attention: one operator, behind it kernels for many query tokens and for single tokens.

Meaning: ref_paged_attn in flash_attn_interface.py of the wheel 0.1.16.2. Limits and the choice between the kernels:
vllm-project/vllm-xpu-kernels at 4543b580, csrc/flash_attn/flash_api.cpp, csrc/utils.h, csrc/xpu/attn; keys and values
in FP8 become the queries' dtype there, and their scales multiply scores and results. Which kernels
there are: the symbols of the wheel's libattn_kernels_xe_2.so (binary.json).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vendors import semantics
from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.intel import chip

IMPLEMENTATIONS = emulates = Implementations()
LATENT = 576
VALUES_OF_LATENTS = 512
ALIGNED_BYTES = 16


def _attend(q, k, v, hidden, scale, sinks):
    """A sequence without keys, which the vendor's code keeps from happening, gives what is no number."""
    if not k.shape[0]:
        return torch.full((*q.shape[:2], v.shape[-1]), torch.nan)
    return semantics.softmax_v(q, k, v, hidden, scale, sinks)


def _check_alignment(**tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        require(t.stride(-1) == 1, f"{name} has a contiguous last dimension")
        size = t.shape[-1] * (t.element_size() if t.dtype is not torch.float32 else 2)
        require(size % ALIGNED_BYTES == 0, f"the last dimension of {name} has whole 16 bytes, got {size}")


def _check_entries(q, k, v, block_table, k_scale, v_scale) -> tuple[float, float]:
    """Dtypes of queries, keys and values, and what the scales multiply scores and results by. Only the kernels for
    single tokens check the scales of FP8; those for many read them as they are.
    """
    if k.dtype not in chip.FP8:
        chip.half(q=q, k=k, v=v)
        chip.absent(k_scale=k_scale, v_scale=v_scale)
        return 1.0, 1.0
    chip.half(q=q)
    require(v.dtype is k.dtype, f"key and value must have the same dtype, got {k.dtype} and {v.dtype}")
    require(block_table is not None, "FP8 without blocks is not emulated")
    require(k_scale is not None and v_scale is not None, "FP8 KV cache requires both k_scale and v_scale")
    semantics.one_scale(k_scale=k_scale, v_scale=v_scale)
    return float(k_scale), float(v_scale)


def _check_blocks(k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> None:
    """check_paged_kv_cache_strides, and the sizes of blocks that there are."""
    chip.dtype(chip.INT32, block_table=block_table)
    require(block_table.stride(-1) == 1, "block_table has contiguous rows")
    require(k.dim() == v.dim() == 4, "a cache has blocks, tokens, heads and entries")
    require(k.shape[1] in chip.BLOCKS, f"blocks of 16, 32 or 64 tokens, got {k.shape[1]}")
    require(k.shape[:3] == v.shape[:3], f"K and V have the same blocks, got {list(k.shape)} and {list(v.shape)}")
    pages = [t.stride(0) / t.stride(1) for t in (k, v)]
    require(pages[0] == pages[1] and pages[0].is_integer(), f"K and V have one page stride in tokens, got {pages}")


def _compiled_prefill(dim: int, paged: bool, causal: bool, local: bool, sink: bool) -> None:
    causal = causal and not local  # a window to the left of the token says it all
    size = chip.bucket(dim, {entry[0] for entry in chip.PREFILL})
    found = (size, paged, causal, local) in (chip.SINK_PREFILL if sink else chip.PREFILL)
    require(found, f"not compiled: many queries, heads of {dim}, {paged=}, {causal=}, window={local}, {sink=}")


def _compiled_decode(dim: int, group: int, block: int, local: bool, sink: bool) -> None:
    size = chip.bucket(dim, {entry[1] for entry in chip.DECODE})
    found = (8 if group <= 8 else 16, size, block, local) in (chip.SINK_DECODE if sink else chip.DECODE)
    what = f"heads of {dim}, groups of {group}, {block=}, window={local}, {sink=}"
    require(found, f"not compiled: single queries, {what}")


@emulates("_vllm_fa2_C::varlen_fwd")
def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
    max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, return_softmax, gen, num_splits, mix_batch, splits_per_seq, work_list,
):  # fmt: skip
    """Ragged queries over dense keys or blocks; the causal mask begins at the lower right corner."""
    chip.absent(
        out=out, leftpad_k=leftpad_k, alibi_slopes=alibi_slopes, q_scale=q_scale, gen=gen,
        splits_per_seq=splits_per_seq, work_list=work_list,
    )  # fmt: skip
    plain = not (p_dropout or softcap or zero_tensors or return_softmax or mix_batch)
    require(plain, "dropout, caps, sums of scores and mixed batches are not emulated")
    _check_alignment(q=q, k=k, v=v)
    k_factor, v_factor = _check_entries(q, k, v, block_table, k_scale, v_scale)
    require(q.dim() == 3, f"queries are ragged, [T, heads, D], got {list(q.shape)}")
    (rows, heads, dim), kv_heads = q.shape, k.shape[-2]
    if softmax_sink is not None:
        chip.half(q=q, softmax_sink=softmax_sink)
        chip.shape("softmax_sink", softmax_sink, heads)
    require(k.shape[-1] == dim and heads % kv_heads == 0, f"keys {list(k.shape)} do not fit queries {list(q.shape)}")
    chip.contiguous(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    starts = semantics.check_running_sums("cu_seqlens_q", cu_seqlens_q, rows)
    counts = [b - a for a, b in pairwise(starts)]
    require(max(counts) <= max_seqlen_q, f"max_seqlen_q is at least {max(counts)}, got {max_seqlen_q}")
    paged = block_table is not None
    local = (window_size_left, window_size_right) != (-1, -1)
    require(not local or window_size_right == 0, "windows end with the token itself")
    if paged:
        _check_blocks(k, v, block_table)
        chip.dtype(chip.INT32, cu_seqlens_k=cu_seqlens_k)
        require(seqused_k is not None, "a cache in blocks needs seqused_k")
        chip.dtype(chip.INT32, seqused_k=seqused_k)
        chip.shape("seqused_k", seqused_k, len(counts))
        chip.shape("block_table", block_table, len(counts), None)
        lens, ends = seqused_k.tolist(), []
    else:
        chip.absent(seqused_k=seqused_k)
        ends = semantics.check_running_sums("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        lens = [b - a for a, b in pairwise(ends)]
    require(min(lens) >= 0, f"lengths are not negative, got {lens}")
    require(len(lens) == len(counts), f"{len(counts)} sequences of queries, {len(lens)} of keys")
    require(max(lens) <= max_seqlen_k, f"max_seqlen_k is at least {max(lens)}, got {max_seqlen_k}")
    single, sink = paged and max_seqlen_q <= 1, softmax_sink is not None
    if single:
        _compiled_decode(dim, heads // kv_heads, k.shape[1], local, sink)
        width = VALUES_OF_LATENTS if dim == LATENT else dim
        require(v.shape[-1] == width, f"values of {width} entries with keys of {dim}, got {v.shape[-1]}")
    else:
        _compiled_prefill(dim, paged, is_causal, local, sink)
        require(v.shape[-1] == dim, f"q, k and v have one width, got {dim} and {v.shape[-1]}")
    result = torch.zeros(rows, heads, v.shape[-1], dtype=q.dtype)
    for b, (count, n) in enumerate(zip(counts, lens)):
        first = max(0, n - count - window_size_left) if local else 0
        if paged:
            keys, values = (semantics.read_paged(t, block_table[b], first, n) for t in (k, v))
        else:
            keys, values = (t[ends[b] + first : ends[b] + n] for t in (k, v))
        keys, values = keys.to(q.dtype), values.to(q.dtype)
        masked = local or (is_causal and not single)
        hidden = semantics.hidden_keys(count, first, n, window_size_left) if masked else None
        a = starts[b]
        part = _attend(q[a : a + count], keys, values, hidden, softmax_scale * k_factor, softmax_sink)
        result[a : a + count] = part * v_factor
    return [result, make_open()]
