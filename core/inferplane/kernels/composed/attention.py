"""Attention by torch's scaled_dot_product_attention, sequence by sequence, over any KV layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.padding import pad_rows, round_up_rows
from inferplane.ops import hidden_pairs
from inferplane.types import Batch, Kernels, LayerKV, When

KERNELS = Kernels()
ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """One sequence's attention over `[heads, tokens, width]`, in a shape of few; KV heads serve groups of query heads.

    Args:
        q: queries.
        k: keys; rows beyond those that `seen` has are padding already.
        v: values, as many.
        seen: `[queries, keys]`, True where a query looks; None: everywhere, or below the diagonal.
        causal: query i looks at the keys up to i; then there are as many of both.
        scale: of the scores.
    """
    m, n = q.shape[1], k.shape[1]
    if q.dtype is not torch.float32:
        real = n if seen is None else seen.shape[1]
        rows, keys = round_up_rows(m), round_up_rows(n)
        if not causal and keys > real:
            seen = q.new_ones(m, real, dtype=torch.bool) if seen is None else seen
            seen = F.pad(seen, (0, keys - real, 0, rows - m))
        elif seen is not None:
            seen = F.pad(seen, (0, 0, 0, rows - m))
        q, k, v = F.pad(q, (0, 0, 0, rows - m)), F.pad(k, (0, 0, 0, keys - n)), F.pad(v, (0, 0, 0, keys - n))
    grouped = q.shape[0] != k.shape[0]
    mask = None if causal else seen
    o = F.scaled_dot_product_attention(
        q[None], k[None], v[None], mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return o[0, :, :m]


@KERNELS("kv_write", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def kv_write(p: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The cache's own write."""
    kv.write(batch.slots, k, v)


@KERNELS("mla_kv_write", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def mla_kv_write(p: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The cache's own write."""
    kv.write(batch.slots, torch.cat((latent, k_rope), -1))


@KERNELS("attention", "torch_sdpa", when=ANY, needs_host_lens=True)
def attention(p: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """One call a sequence. With few query tokens the query heads of a group become rows of one product."""
    h, g, window = p.heads, p.kv.heads, p.kv.window
    out = q.new_empty(q.shape[0], h, p.kv.v_dim)
    for a, b, n, table in batch.rows():
        m = b - a
        gone = p.kv.blocks_before_window(m, n, kv.block_tokens)
        n -= gone * kv.block_tokens
        k, v = (t.to(q.dtype).transpose(0, 1) for t in kv.read(table[gone:], n))
        seen = None if m == 1 and (window is None or window >= n) else ~hidden_pairs(m, n, window, q.device)
        if m <= 8:
            rows = q[a:b].view(m, g, h // g, -1).permute(1, 0, 2, 3).reshape(g, m * (h // g), -1)
            mask = None if seen is None else seen.repeat_interleave(h // g, 0)
            o = attend(rows, k, v, mask, causal=False, scale=p.scale)
            out[a:b] = o.view(g, m, h // g, -1).permute(1, 0, 2, 3).reshape(m, h, -1)
        else:
            whole = m == n and window is None
            o = attend(q[a:b].transpose(0, 1), k, v, seen, causal=whole, scale=p.scale)
            out[a:b] = o.transpose(0, 1)
    return out


def expand_and_attend(
    p: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    batch: Batch,
    kv: LayerKV,
    expand: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Expand K and V of each sequence, pad V to K's width (one fused call serves equal widths only), attend.

    Args:
        p: a view of `mla_expanded`; the others: as its call.
        expand: `kv_b` of latents `[n, R]`, rows strided; `[n or more, H (N + V)]`, where further rows are padding.
    """
    d = p.dims
    q = torch.cat((q_nope, q_rope), -1)
    out = q.new_empty(q.shape[0], d.heads, d.value)
    for a, b, n, table in batch.rows():
        latent, k_rope = kv.read(table, n)[0].to(q.dtype).split((d.latent, d.rope), -1)
        expanded = expand(latent)
        count = expanded.shape[0]
        k_nope, v = expanded.view(count, d.heads, -1).split((d.nope, d.value), -1)
        k_rope = F.pad(k_rope, (0, 0, 0, count - n))
        k = torch.cat((k_nope, k_rope[:, None].expand(count, d.heads, d.rope)), -1)
        width = d.nope + d.rope
        v = F.pad(v, (0, width - d.value)) if d.value < width else v
        whole = b - a == n and d.value <= width
        seen = None if whole else ~hidden_pairs(b - a, n, None, q.device)
        o = attend(q[a:b].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen, causal=whole, scale=p.scale)
        out[a:b] = o.transpose(0, 1)[..., : d.value]
    return out


@KERNELS("mla_expanded", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_expanded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """See `expand_and_attend`; in 16 bits latents are expanded in a shape of few."""

    def expand(latent: torch.Tensor) -> torch.Tensor:
        return F.linear(latent if latent.dtype is torch.float32 else pad_rows(latent), p.kv_b.weight)

    return expand_and_attend(p, q_nope, q_rope, batch, kv, expand)


@KERNELS("mla_absorbed", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Fold `kv_b` (as views, never copied) into the query, attend to the latents with all heads as rows, unfold."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    mid = q.new_empty(q.shape[0], d.heads, d.latent)
    for a, b, n, table in batch.rows():
        c = kv.read(table, n)[0].to(q.dtype)[None]
        m = b - a
        mask = None if m == 1 else (~hidden_pairs(m, n, None, q.device)).repeat_interleave(d.heads, 0)
        # V is the first part of K; passing K whole keeps the widths equal, which the fused call wants.
        o = attend(q[a:b].reshape(1, m * d.heads, -1), c, c, mask, causal=False, scale=p.scale)
        mid[a:b] = o.view(m, d.heads, -1)[..., : d.latent]
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
