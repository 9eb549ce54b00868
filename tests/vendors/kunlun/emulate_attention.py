"""Attention over blocks with heads before tokens.

Meaning and limits: the calls in baidu/vLLM-Kunlun at 09869ee7 (v1/attention/backends/kunlun_attn.py, ops/paged_attn.py,
ops/attention/flashmla.py) with the comments beside them, and its issue 477.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tests.vendors.emulator import Implementations, require
from tests.vendors.kunlun import chip
from tests.vendors.semantics import check_running_sums, hidden_keys, read_paged, softmax_v

IMPLEMENTATIONS = emulates = Implementations()
BLOCKS = (16, 64, 128)
"""Block sizes that users of the vendor's run with."""


def _tokens(cache: torch.Tensor, table: torch.Tensor, tokens: int) -> torch.Tensor:
    """A sequence's tokens `[tokens, G, D]`; what its last block holds behind them is not looked at."""
    return read_paged(cache.transpose(1, 2), table, 0, tokens)


def _caches(k: torch.Tensor, v: torch.Tensor, heads: int, dim: int) -> None:
    chip.contiguous(k=k, v=v)
    require(k.dim() == 4 and k.shape[2] in BLOCKS, f"a cache is [blocks, heads, 16, 64 or 128, D], got {list(k.shape)}")
    require(k.shape == v.shape, f"k and v have one shape, got {[*k.shape]} and {[*v.shape]}")
    require(k.shape[3] == dim and dim in chip.HEAD_SIZES, f"heads of {k.shape[3]} entries for queries of {dim}")
    require(heads % k.shape[1] == 0, f"{heads} heads on {k.shape[1]} KV heads")


def _table(block_table: torch.Tensor, rows: int) -> None:
    chip.dtype(chip.INT32, block_table=block_table)
    chip.contiguous(block_table=block_table)
    chip.shape("block_table", block_table, rows, None)


@emulates("kunlun_ops::prefill_attention")
def prefill_attention(
    q, k, v, out, is_causal, context_qlen_lod_cpu, context_qlen_lod_xpu, is_prefix_cache, alpha, block_table,
    context_kvlen_lod_cpu, context_kvlen_lod_xpu, alibi_slopes, softmax_lse, swa_left, swa_right, sink,
):  # fmt: skip
    """Scores are q k^T alpha / sqrt(D); the causal mask begins at the lower right corner."""
    for name, value in (("alibi_slopes", alibi_slopes), ("softmax_lse", softmax_lse), ("sink", sink)):
        chip.absent(name, value)
    require(swa_left == -1 and swa_right == -1, "whether a window counts the token itself is not documented")
    require(is_causal and is_prefix_cache and block_table is not None, "causal attention over blocks is emulated")
    require(context_kvlen_lod_cpu is not None and context_kvlen_lod_xpu is not None, "blocks need context_kvlen_lod")
    chip.half(q=q, k=k, v=v, out=out)
    chip.contiguous(q=q, out=out)
    chip.shape("q", q, None, None, None)
    chip.shape("out", out, *q.shape)
    _caches(k, v, q.shape[1], q.shape[2])
    chip.twins("context_qlen_lod", context_qlen_lod_cpu, context_qlen_lod_xpu)
    chip.twins("context_kvlen_lod", context_kvlen_lod_cpu, context_kvlen_lod_xpu)
    starts = check_running_sums("context_qlen_lod", context_qlen_lod_cpu, q.shape[0])
    ends = check_running_sums("context_kvlen_lod", context_kvlen_lod_cpu, int(context_kvlen_lod_cpu[-1]))
    require(len(starts) == len(ends), f"{len(starts) - 1} sequences of queries, {len(ends) - 1} of keys")
    _table(block_table, len(starts) - 1)
    for b, ((a, z), (first, last)) in enumerate(zip(pairwise(starts), pairwise(ends))):
        count, n = z - a, last - first
        require(0 < count <= n, f"a sequence brings tokens that it has, got {count} of {n}")
        require(n <= block_table.shape[1] * k.shape[2], f"{n} tokens in {block_table.shape[1]} blocks")
        keys, values = (_tokens(t, block_table[b], n) for t in (k, v))
        hidden = hidden_keys(count, 0, n, -1)
        out[a:z] = softmax_v(q[a:z], keys, values, hidden, alpha * q.shape[2] ** -0.5).to(out.dtype)


@emulates("kunlun_ops::speculative_attention")
def speculative_attention(
    out, q, k_cache, v_cache, context_lens_cpu, context_lens_xpu, batch_num, qlen, max_context_len, head_num, head_dim,
    scale, kv_head_num, block_size, max_num_blocks_per_seq, block_tables, max_window_size, sink,
):  # fmt: skip
    """One token a sequence: q `[1, B, H, D]`, out `[B, H, D]`. It fails with 1024 sequences and more."""
    chip.absent("sink", sink)
    require(max_window_size == -1, "whether a window counts the token itself is not documented")
    require(qlen == 1, "one token a sequence is emulated")
    require(0 < batch_num < 1024, f"fewer than 1024 sequences, got {batch_num}")
    chip.half(out=out, q=q, k_cache=k_cache, v_cache=v_cache)
    chip.contiguous(out=out, q=q)
    chip.shape("q", q, 1, batch_num, head_num, head_dim)
    chip.shape("out", out, batch_num, head_num, head_dim)
    _caches(k_cache, v_cache, head_num, head_dim)
    chip.shape("k_cache", k_cache, None, kv_head_num, block_size, head_dim)
    lens = chip.twins("context_lens", context_lens_cpu, context_lens_xpu)
    require(len(lens) == batch_num and min(lens) > 0, f"{batch_num} lengths above 0, got {lens}")
    require(max(lens) <= max_context_len, f"max_context_len is at least {max(lens)}, got {max_context_len}")
    _table(block_tables, batch_num)
    chip.shape("block_tables", block_tables, batch_num, max_num_blocks_per_seq)
    for b, n in enumerate(lens):
        keys, values = (_tokens(t, block_tables[b], n) for t in (k_cache, v_cache))
        out[b] = softmax_v(q[0, b : b + 1], keys, values, None, scale)[0].to(out.dtype)


@emulates("kunlun_ops::paged_attention")
def paged_attention(
    out, x, k_cache, v_cache, block_tables, context_lens_cpu, context_lens_xpu, is_context, is_causal, vo_head_dim,
    kv_lora_rank, qk_rope_head_dim, softmax_scale, q_r,
):  # fmt: skip
    """The form for latents: keys are whole entries of the cache, values their first kv_lora_rank; q is given twice."""
    chip.absent("v_cache", v_cache)
    require(not is_context and is_causal and vo_head_dim == -1, "the form for latents, one token a sequence")
    require((kv_lora_rank, qk_rope_head_dim) == (512, 64), f"512 + 64, got {kv_lora_rank} + {qk_rope_head_dim}")
    require(q_r is not None and q_r.data_ptr() == x.data_ptr() and q_r.shape == x.shape, "q_r is x once more")
    chip.half(out=out, x=x, k_cache=k_cache)
    chip.contiguous(out=out, x=x, k_cache=k_cache)
    batch, heads = x.shape[0], x.shape[2]
    chip.shape("x", x, batch, 1, heads, kv_lora_rank + qk_rope_head_dim)
    chip.shape("out", out, batch, 1, heads, kv_lora_rank)
    chip.shape("k_cache", k_cache, None, 1, chip.LATENT_BLOCK, kv_lora_rank + qk_rope_head_dim)
    lens = chip.twins("context_lens", context_lens_cpu, context_lens_xpu)
    require(len(lens) == batch and min(lens) > 0, f"{batch} lengths above 0, got {lens}")
    _table(block_tables, batch)
    for b, n in enumerate(lens):
        keys = _tokens(k_cache, block_tables[b], n)
        out[b] = softmax_v(x[b], keys, keys[..., :kv_lora_rank], None, softmax_scale).to(out.dtype)
