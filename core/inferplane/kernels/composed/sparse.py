"""Attention over chosen tokens by torch's operators, one sequence at a time, over any KV layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.kernels.composed.attention import ANY, MAX_SCORES, attend
from inferplane.kernels.composed.padding import pad_rows, round_up_rows
from inferplane.ops import hide_others, mask_entries
from inferplane.types import Batch, Kernels, LayerKV

KERNELS = Kernels()
LARGEST_KEY = 2**31 - 1
"""The largest int32: what a score that is NaN counts as where scores are compared as whole numbers."""


@KERNELS("index_key_write", "torch", when=ANY, capture_safe=True, batch_invariant=True)
def index_key_write(view: Any, k: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
    """The op `index_key_write` by the cache's own write."""
    kv.write(batch.slots, k)


@KERNELS("index_select", "torch", when=replace(ANY, extensions=("index_select.rate",)), needs_host_lens=True)
def index_select(view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `index_select`: products in float32, query rows in parts whose scores fit `MAX_SCORES`; sequences of at
    most K tokens are not scored.
    """
    top, heads = view.dims.top, view.dims.heads
    out = q.new_full((q.shape[0], top), -1, dtype=torch.int32)
    tables = batch.for_entries(kv).block_tables
    for i, (a, b, tokens) in batch.list_spans():
        n, hidden = tokens // view.rate, mask_entries(b - a, tokens, view.rate, q.device)
        if n <= top:
            out[a:b, :n] = torch.where(hidden, -1, torch.arange(n, device=q.device)).int()
            continue
        keys = kv.read(tables[i], n)[0][:, 0].float().t()
        step = max(1, MAX_SCORES // (heads * n))
        for first in range(0, b - a, step):
            last = min(first + step, b - a)
            rows = slice(a + first, a + last)
            s = (q[rows].float().flatten(0, 1) @ keys).relu_().view(last - first, heads, n)
            s = torch.bmm(w[rows, None], s)[:, 0]
            out[rows] = take_largest(s, hidden[first:last], top)
    return out


def take_largest(scores: torch.Tensor, hidden: torch.Tensor, top: int) -> torch.Tensor:
    """As `choose_positions` for more tokens than are chosen, without sorting all: those above the least chosen score,
    then the first ones that equal it. Scores are compared as whole numbers, in which NaN is above infinity, and hidden
    positions are below all others.

    Args:
        scores: float32 `[Q, tokens]`.
        hidden: bool `[Q, tokens]`, the positions that a query does not see.
        top: how many are chosen at most.
    """
    bits = (scores + 0.0).view(torch.int32)  # both zeros get the same
    keys = torch.where(bits < 0, bits ^ LARGEST_KEY, bits).masked_fill_(scores.isnan(), LARGEST_KEY)
    keys = keys.masked_fill_(hidden, ~LARGEST_KEY)
    least = keys.topk(top, -1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = keys > least, (keys == least) & ~hidden
    taken = above | (equal & (equal.cumsum(-1) <= top - above.sum(-1, keepdim=True)))
    place = torch.where(taken, taken.cumsum(-1) - 1, top)
    positions = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device).expand_as(place)
    out = torch.full((scores.shape[0], top + 1), -1, dtype=torch.int32, device=scores.device)
    return out.scatter_(1, place, positions)[:, :top]


def expand_and_attend_chosen(
    view: Any,
    q: torch.Tensor,
    chosen: torch.Tensor,
    tokens: int,
    kv: LayerKV,
    table: torch.Tensor,
    expand: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The op `sparse_mla_expanded` for one sequence: expand K and V of all its tokens, pad V to K's width, and attend
    with a mask of what was not chosen, query rows in parts. Of at most K tokens all are chosen.

    Args:
        view: of a `sparse_mla_expanded` kernel.
        q: `[Q, H, N + P]`, rotated, of the sequence's last Q tokens. chosen: int32 `[Q, K]`.
        tokens: of the sequence. table: its block table.
        kv: the layer's cache.
        expand: multiplies latents `[n, R]`, whose rows are strided, by `kv_b`: `[n or more, H (N + V)]`; rows beyond n
            are padding.

    Returns:
        `[Q, H, V]`.
    """
    d, n = view.dims, tokens
    latent, k_rope = kv.read(table, n)[0].to(q.dtype).split((d.latent, d.rope), -1)
    expanded = expand(latent)
    count, width = expanded.shape[0], d.nope + d.rope
    k_nope, v = expanded.view(count, d.heads, -1).split((d.nope, d.value), -1)
    k_rope = F.pad(k_rope, (0, 0, 0, count - n))
    k = torch.cat((k_nope, k_rope[:, None].expand(count, d.heads, d.rope)), -1).transpose(0, 1)
    v = (F.pad(v, (0, width - d.value)) if d.value < width else v).transpose(0, 1)
    causal = q.shape[0] == n <= view.top and d.value <= width
    step = q.shape[0] if causal else max(1, MAX_SCORES // n)
    parts = []
    for rows, taken in zip(q.split(step), chosen.split(step)):
        seen = None if causal else ~hide_others(taken, n)
        o = attend(rows.transpose(0, 1), k, v, seen, causal=causal, scale=view.scale)
        parts.append(o.transpose(0, 1)[..., : d.value])
    return torch.cat(parts)


@KERNELS("sparse_mla_expanded", "torch_sdpa", when=ANY, needs_host_lens=True)
def sparse_mla_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_expanded` by `expand_and_attend_chosen`; in 16 bits, latents are padded before they are
    expanded.
    """

    def expand(latent: torch.Tensor) -> torch.Tensor:
        return F.linear(latent if latent.dtype is torch.float32 else pad_rows(latent), view.kv_b.weight)

    q = torch.cat((q_nope, q_rope), -1)
    out = q.new_empty(q.shape[0], view.dims.heads, view.dims.value)
    for a, b, n, table in batch.rows():
        out[a:b] = expand_and_attend_chosen(view, q[a:b], chosen[a:b], n, kv, table, expand)
    return out


@KERNELS("sparse_mla_absorbed", "torch_sdpa", when=ANY, needs_host_lens=True)
def sparse_mla_absorbed(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_absorbed`: fold `kv_b` into the query, gather the entries that each query chose, attend with
    all heads as rows of one product, unfold. Rows of padding are zero.
    """
    d = view.dims
    w_k, w_v = view.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q = torch.cat((torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1), q_rope), -1)
    mid = q.new_zeros(q.shape[0], d.heads, d.latent)
    for a, b, n, table in batch.rows():
        c = kv.read(table, n)[0].to(q.dtype)
        few = chosen[a:b, : min(chosen.shape[1], round_up_rows(n))]  # those of -1 come last
        taken = c[few.clamp(min=0).long()][:, None]
        # V is the first part of K; passing K for V keeps the widths equal, as the fused call requires.
        seen = (few >= 0)[:, None, None]
        o = F.scaled_dot_product_attention(q[a:b, None], taken, taken, seen, scale=view.scale)
        mid[a:b] = o[:, 0, :, : d.latent]
    return torch.bmm(mid.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
