"""Attention by torch's scaled_dot_product_attention, sequence by sequence, over any KV layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops import hidden_pairs
from inferplane.types import Batch, Kernels, LayerKV, When

KERNELS = Kernels()
ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))


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
            o = F.scaled_dot_product_attention(rows[None], k[None], v[None], mask, scale=p.scale)[0]
            out[a:b] = o.view(g, m, h // g, -1).permute(1, 0, 2, 3).reshape(m, h, -1)
        else:
            whole = m == n and window is None
            o = F.scaled_dot_product_attention(
                q[a:b].transpose(0, 1)[None],
                k[None],
                v[None],
                None if whole else seen,
                is_causal=whole,
                scale=p.scale,
                enable_gqa=True,
            )[0]
            out[a:b] = o.transpose(0, 1)
    return out


@KERNELS("mla_expanded", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_expanded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Expand K and V of each sequence, pad V to K's width (one fused call serves equal widths only), attend."""
    d = p.dims
    q = torch.cat((q_nope, q_rope), -1)
    out = q.new_empty(q.shape[0], d.heads, d.value)
    for a, b, n, table in batch.rows():
        latent, k_rope = kv.read(table, n)[0].to(q.dtype).split((d.latent, d.rope), -1)
        k_nope, v = F.linear(latent, p.kv_b.weight).view(n, d.heads, -1).split((d.nope, d.value), -1)
        k = torch.cat((k_nope, k_rope[:, None].expand(n, d.heads, d.rope)), -1)
        width = d.nope + d.rope
        v = F.pad(v, (0, width - d.value)) if d.value < width else v
        whole = b - a == n and d.value <= width
        o = F.scaled_dot_product_attention(
            q[a:b].transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            None if whole else ~hidden_pairs(b - a, n, None, q.device),
            is_causal=whole,
            scale=p.scale,
        )[0]
        out[a:b] = o.transpose(0, 1)[..., : d.value]
    return out


@KERNELS("mla_absorbed", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Fold `kv_b` (as views, never copied) into the query, attend to the latents with all heads as rows, unfold."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    mid = q.new_empty(q.shape[0], d.heads, d.latent)
    for a, b, n, table in batch.rows():
        c = kv.read(table, n)[0].to(q.dtype)[None, None]
        m = b - a
        mask = None if m == 1 else (~hidden_pairs(m, n, None, q.device)).repeat_interleave(d.heads, 0)
        # V is the first part of K; passing K whole keeps the widths equal, which the fused call wants.
        o = F.scaled_dot_product_attention(q[a:b].reshape(1, 1, m * d.heads, -1), c, c, mask, scale=p.scale)
        mid[a:b] = o.view(m, d.heads, -1)[..., : d.latent]
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
