"""Attention by torch's scaled_dot_product_attention, one call per sequence, over any KV layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.padding import pad_rows, round_up_rows
from inferplane.ops import mask_pairs
from inferplane.types import Batch, Kernels, LayerKV, When

KERNELS = Kernels()
ANY = When(dtypes=(torch.float32, torch.bfloat16, torch.float16))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """One sequence's attention; in 16 bits it is padded, so that there are few distinct shapes (`padding`).

    Args:
        q: queries `[heads, queries, width]`.
        k: keys `[KV heads, keys, width]`, each for a group of query heads; rows beyond those of `seen` are padding.
        v: values `[KV heads, keys, width]`.
        seen: `[queries, keys]`, True where a query attends to a key; None: to all keys, or to those before it.
        causal: query i attends to keys up to i; then there are as many keys as queries.
        scale: factor of the scores.
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
def kv_write(view: Any, k: torch.Tensor, v: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `kv_write` by the cache's own write, whatever its layout."""
    kv.write(batch.slots, k, v)


@KERNELS("mla_kv_write", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def mla_kv_write(view: Any, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `mla_kv_write` by the cache's own write: a token's latent with its rotated key behind it."""
    kv.write(batch.slots, torch.cat((latent, k_rope), -1))


@KERNELS("attention", "torch_sdpa", when=replace(ANY, extensions=("attention.chunk",)), needs_host_lens=True)
def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `attention` by one call per sequence, over the keys and values read from the cache, without blocks before
    the window. With at most 8 query tokens, the query heads that share a KV head become rows of one product.
    """
    h, g, window, chunk = view.heads, view.kv.heads, view.kv.window, view.chunk
    out = q.new_empty(q.shape[0], h, view.kv.v_dim)
    for a, b, n, table in batch.rows():
        m = b - a
        skipped = view.kv.blocks_before_window(m, n, kv.block_tokens)
        n -= skipped * kv.block_tokens
        k, v = (t.to(q.dtype).transpose(0, 1) for t in kv.read(table[skipped:], n))
        sees_all = m == 1 and chunk is None and (window is None or window >= n)
        seen = None if sees_all else ~mask_pairs(m, n, window, q.device, chunk, skipped * kv.block_tokens)
        if m <= 8:
            rows = q[a:b].view(m, g, h // g, -1).permute(1, 0, 2, 3).reshape(g, m * (h // g), -1)
            mask = None if seen is None else seen.repeat_interleave(h // g, 0)
            o = attend(rows, k, v, mask, causal=False, scale=view.scale)
            out[a:b] = o.view(g, m, h // g, -1).permute(1, 0, 2, 3).reshape(m, h, -1)
        else:
            causal = m == n and window is None
            o = attend(q[a:b].transpose(0, 1), k, v, seen, causal=causal, scale=view.scale)
            out[a:b] = o.transpose(0, 1)
    return out


MAX_SCORES = 2**24
"""Scores that `attention_forms` holds at a time, in float32: 64 MiB."""


def _has_other_scores(op: Any) -> bool:
    return op.sinks is not None or op.softcap is not None


OTHER_SCORES = When(
    dtypes=ANY.dtypes,
    needs=(("sinks or a soft cap", _has_other_scores),),
    extensions=("attention.sinks", "attention.softcap"),
)


@KERNELS("attention", "torch_scores", when=OTHER_SCORES, needs_host_lens=True)
def attention_forms(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `attention` with sinks or a soft cap, which torch's fused call does not have: scores, softmax and sums in
    float32, query rows in parts whose scores fit `MAX_SCORES`, each with the keys that its window can see.
    """
    h, g, window = view.heads, view.kv.heads, view.kv.window
    sinks = None if view.sinks is None else view.sinks.float().view(g, h // g, 1, 1)
    out = q.new_empty(q.shape[0], h, view.kv.v_dim)
    for a, b, n, table in batch.rows():
        skipped = view.kv.blocks_before_window(b - a, n, kv.block_tokens)
        n -= skipped * kv.block_tokens
        k, v = (t.float().transpose(0, 1)[:, None] for t in kv.read(table[skipped:], n))  # [g, 1, n, d]
        hidden = mask_pairs(b - a, n, window, q.device)
        step = max(1, MAX_SCORES // (h * n))
        for first in range(0, b - a, step):
            last = min(first + step, b - a)
            low = 0 if window is None else max(0, n - (b - a) + first - window + 1)
            high = n - (b - a) + last
            rows = q[a + first : a + last].float().view(last - first, g, h // g, -1).permute(1, 2, 0, 3)
            s = rows @ k[:, :, low:high].transpose(-1, -2) * view.scale
            if view.softcap is not None:
                s = torch.tanh(s / view.softcap) * view.softcap
            s = s.masked_fill(hidden[first:last, low:high], -torch.inf)
            if sinks is not None:
                s = torch.cat((s, sinks.expand(-1, -1, last - first, 1)), -1)
            o = s.softmax(-1)[..., : high - low] @ v[:, :, low:high]
            out[a + first : a + last] = o.permute(2, 0, 1, 3).reshape(last - first, h, -1).to(q.dtype)
    return out


def expand_and_attend(
    view: Any,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    batch: Batch,
    kv: LayerKV,
    expand: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The op `mla_expanded`: per sequence, expand K and V, pad V to K's width (one fused call takes one width), attend.

    Args:
        view: of an `mla_expanded` kernel; the other arguments are those of its call.
        expand: multiplies latents `[n, R]`, whose rows are strided, by `kv_b`: `[n or more, H (N + V)]`; rows beyond n
            are padding.
    """
    d = view.dims
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
        causal = b - a == n and d.value <= width
        seen = None if causal else ~mask_pairs(b - a, n, None, q.device)
        o = attend(q[a:b].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen, causal=causal, scale=view.scale)
        out[a:b] = o.transpose(0, 1)[..., : d.value]
    return out


@KERNELS("mla_expanded", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_expanded` by `expand_and_attend`; in 16 bits, latents are padded before they are expanded."""

    def expand(latent: torch.Tensor) -> torch.Tensor:
        return F.linear(latent if latent.dtype is torch.float32 else pad_rows(latent), view.kv_b.weight)

    return expand_and_attend(view, q_nope, q_rope, batch, kv, expand)


@KERNELS("mla_absorbed", "torch_sdpa", when=ANY, needs_host_lens=True)
def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_absorbed`: fold `kv_b` (as views, never copied) into the query, attend to the cached latents with all
    heads as rows of one product, one call per sequence, unfold.
    """
    d = view.dims
    w_k, w_v = view.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    mid = q.new_empty(q.shape[0], d.heads, d.latent)
    for a, b, n, table in batch.rows():
        c = kv.read(table, n)[0].to(q.dtype)[None]
        m = b - a
        mask = None if m == 1 else (~mask_pairs(m, n, None, q.device)).repeat_interleave(d.heads, 0)
        # V is the first part of K; passing K for V keeps the widths equal, as the fused call requires.
        o = attend(q[a:b].reshape(1, m * d.heads, -1), c, c, mask, causal=False, scale=view.scale)
        mid[a:b] = o.view(m, d.heads, -1)[..., : d.latent]
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
