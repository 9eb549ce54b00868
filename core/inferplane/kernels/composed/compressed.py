"""Attention of one KV head, and the compressors beside it, by torch's operators, one sequence at a time, over any KV
layout. Scores, gates and sums are in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.attention import ANY, MAX_SCORES
from inferplane.ops import hide_others, list_lasts, mask_entries, mask_pairs, rotate_blocks
from inferplane.types import Batch, CompressedCache, CompressorCache, Kernels, LayerKV

KERNELS = Kernels()
FEW_ROWS = 8
"""Query rows of a sequence for which chosen entries are gathered; for more, others are masked."""
PART_ROWS = 128
"""Query rows that read the entries of all their windows together."""


@KERNELS("entry_write", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def entry_write(view: Any, entries: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `entry_write` by the cache's own write."""
    kv.write(batch.for_entries(kv).slots, entries.reshape(-1, *view.kv.entry_shapes[0]))


def attend_rows(view: Any, q: torch.Tensor, c: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Query rows of one sequence, in parts whose scores fit `MAX_SCORES`.

    Args:
        view: has `scale` and `sinks`.
        q: `[Q, H, D]`. c: float32 `[n, D]`, or `[Q, n, D]` where each row has its own.
        hidden: bool `[Q, n]`.
    """
    heads, n = q.shape[1], c.shape[-2]
    sinks, parts = view.sinks.float()[None, :, None], []
    step = q.shape[0] if c.dim() > 2 else max(1, MAX_SCORES // (heads * n))
    for rows, others in zip(q.split(step), hidden.split(step)):
        x = rows.float()
        if c.dim() > 2:
            s = torch.bmm(x, c.transpose(1, 2)) * view.scale
        else:
            s = (x.flatten(0, 1) @ c.t()).view(-1, heads, n) * view.scale
        s = s.masked_fill_(others[:, None], -torch.inf)
        p = F.softmax(torch.cat((s, sinks.expand(len(rows), -1, 1)), -1), -1)[..., :n]
        parts.append(torch.bmm(p, c) if c.dim() > 2 else (p.flatten(0, 1) @ c).view(-1, heads, c.shape[-1]))
    return torch.cat(parts).to(q.dtype)


def attend_windows(
    view: Any,
    q: torch.Tensor,
    c: torch.Tensor,
    far: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `attend_rows`, in parts of `PART_ROWS` rows, each of which reads its own windows alone.

    Args:
        view: as of `attend_rows`, with the cache request `kv`.
        q: `[Q, H, D]`, of the last Q tokens. c: float32 `[n, D]`, the last tokens' entries.
        far: float32 `[m, D]`, entries of no window, or None. others: bool `[Q, m]`, where they are hidden.
    """
    rows, n, window = q.shape[0], c.shape[0], view.kv.window
    hidden, parts = mask_pairs(rows, n, window, q.device), []
    step = rows if window is None else PART_ROWS
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        near = slice(0 if window is None else max(0, n - rows + start + 1 - window), n - rows + stop)
        keys, unseen = c[near], hidden[start:stop, near]
        if far is not None and others is not None:
            keys, unseen = torch.cat((keys, far)), torch.cat((unseen, others[start:stop]), -1)
        parts.append(attend_rows(view, q[start:stop], keys, unseen))
    return torch.cat(parts)


@KERNELS("shared_kv_attention", "torch", when=ANY, needs_host_lens=True)
def shared_kv_attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `shared_kv_attention`: all heads of a part of the rows are rows of one product. Rows of padding are 0."""
    out = torch.zeros_like(q)
    for a, b, n, table in batch.rows():
        skipped = view.kv.blocks_before_window(b - a, n, kv.block_tokens)
        left = n - skipped * kv.block_tokens
        out[a:b] = attend_windows(view, q[a:b], kv.read(table[skipped:], left)[0].float())
    return out


@KERNELS("compressed_attention", "torch", when=ANY, needs_host_lens=True)
def compressed_attention(
    view: Any, q: torch.Tensor, chosen: torch.Tensor | None, batch: Batch, cache: CompressedCache
) -> torch.Tensor:
    """The op `compressed_attention`: of few rows each gathers the entries that it chose; of many rows all read the same
    entries, with a mask. Rows of padding are zero.
    """
    near, far = batch.for_table(cache.window.table), batch.for_table(cache.compressed.entries.table)
    window, entries, out = cache.window.kv, cache.compressed.entries.kv, torch.zeros_like(q)
    near_tables, far_tables, rate = near.block_tables, far.for_entries(entries).block_tables, view.compressed.rate
    for i, (a, b, n) in batch.list_spans():
        skipped = view.kv.blocks_before_window(b - a, n, window.block_tokens)
        left, count = n - skipped * window.block_tokens, n // rate
        c = window.read(near_tables[i, skipped:], left)[0].float()
        if not count:
            out[a:b] = attend_windows(view, q[a:b], c)
            continue
        e = entries.read(far_tables[i], count)[0].float()
        if chosen is None or count <= view.top:
            out[a:b] = attend_windows(view, q[a:b], c, e, mask_entries(b - a, n, rate, q.device))
        elif b - a > FEW_ROWS:
            out[a:b] = attend_windows(view, q[a:b], c, e, hide_others(chosen[a:b], count))
        else:
            taken = chosen[a:b].long()
            hidden = torch.cat((mask_pairs(b - a, left, view.kv.window, q.device), taken < 0), -1)
            keys = torch.cat((c.expand(b - a, -1, -1), e[taken.clamp(min=0)]), 1)
            out[a:b] = attend_rows(view, q[a:b], keys, hidden)
    return out


@KERNELS("compress_rows", "torch", when=ANY, needs_host_lens=True, batch_invariant=True)
def compress_rows(view: Any, rows: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `compress_rows`: all entries of a sequence at once. A sequence that completes none reads nothing."""
    d, span = view.dims, view.kv.window
    bias, out = view.bias.float(), rows.new_zeros(rows.shape[0], d.dim)
    for a, b, n, table in batch.rows():
        lasts = list_lasts(b - a, n, d.rate)
        if not lasts:
            continue
        skipped = view.kv.blocks_before_window(b - a, n, kv.block_tokens)
        first = skipped * kv.block_tokens
        stored = kv.read(table[skipped:], n - first)[0].float()
        place = torch.tensor(lasts, device=rows.device)[:, None] + torch.arange(1 - span, 1, device=rows.device)
        missing = (place < 0)[..., None]
        v, g = stored[(place - first).clamp(min=0)].split(d.series, -1)
        if d.overlaps:
            v, g = (torch.cat((x[:, : d.rate, : d.dim], x[:, d.rate :, d.dim :]), 1) for x in (v, g))
            g = g + torch.cat((bias[:, : d.dim], bias[:, d.dim :]))
        else:
            g = g + bias
        p = g.masked_fill(missing, -torch.inf).softmax(1)
        out[b - n + torch.tensor(lasts, device=rows.device)] = (p * v.masked_fill(missing, 0)).sum(1).to(out.dtype)
    return out


def _rotates_adjacent(op: Any) -> bool:
    return bool(op.rope.rope.interleaved and not op.rope.inverse)


ADJACENT = replace(ANY, extensions=("tail_rope",), needs=(("rotation of adjacent entries", _rotates_adjacent),))


@KERNELS("compress_and_write", "torch", when=ADJACENT, needs_host_lens=True, batch_invariant=True)
def compress_and_write(view: Any, rows: torch.Tensor, batch: Batch, cache: CompressorCache) -> None:
    """The op `compress_and_write` for the tokens that complete an entry alone; a step without any reads nothing."""
    (stored, table), (entries, other), d = cache.rows, cache.entries, view.dims
    spans = batch.list_spans()
    lasts = [b - n + last for _, (a, b, n) in spans for last in list_lasts(b - a, n, d.rate)]
    if not lasts:
        return
    places = torch.tensor(lasts, device=rows.device)
    x = compress_rows(view.compress, rows, batch.for_table(table), stored)[places].float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + view.norm.eps) * view.norm.weight.float()
    x = x.to(rows.dtype)
    cos, sin = view.rope.rope.table[batch.positions[places] + 1 - d.rate].unbind(1)
    first, second = x[:, -view.rope.size :].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    x = torch.cat((x[:, : -view.rope.size], turned.to(x.dtype)), -1)
    if view.spread is not None:
        x = rotate_blocks(x.float(), view.spread.block).to(x.dtype)
    slots = batch.for_table(other).for_entries(entries).slots
    entries.write(slots[places], x.view(-1, *entries.request.entry_shapes[0]))
