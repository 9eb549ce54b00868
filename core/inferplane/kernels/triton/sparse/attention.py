"""Latent attention over chosen positions: entries are gathered through the block table, heads are rows of a product.

Each token has positions of its own, so a program takes some heads of one token. With few tokens the chosen positions
are split among programs, and a launch over all heads combines the splits, in their order. Many tokens attend as few do,
in parts whose folded queries fit a limit: expanded keys could not be shared by tokens that read others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import LOG2_E, pad_width, sequence_extent, slots_of_keys, softmax_step
from inferplane.kernels.triton.kv_write import cache_tensors, with_contiguous_rows
from inferplane.kernels.triton.mla import load_latents, mla_expanded
from inferplane.kernels.triton.sparse.selection import MOST_ROWS
from inferplane.kernels.triton.tiles import Launch, Tiles
from inferplane.types import Batch, LayerKV

FOLDED_BYTES = 256 << 20
"""Bytes of folded queries that are in memory at a time."""
LEAST_SPLIT = 128
"""Fewest chosen positions in a split, unless `Tiles.chunk_tokens` is less."""


@triton.jit(do_not_specialize=("first_row", "last_row", "splits"))
def _attend_chosen(
    q, q_rope, entries, scales, chosen, out, parts, lse, tables, starts, lengths,
    scale, table_outer, q_token, q_head, rope_token, rope_head, out_token, out_head, first_row, last_row, splits,
    span,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    TOP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program `(token, tile and split, sequence)`: attention of ROWS heads of a token to one split of the positions
    that it chose, `span` of them. `q`, `out`, `parts` and `lse` have rows from `first_row` up to `last_row` of the
    step. SPLIT: there are several splits, whose results are stored for `_combine_chosen`. A latent is read and
    multiplied in two halves, which takes fewer registers.
    """
    tiles: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    sequence = tl.program_id(1)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    token = tl.maximum(first_row - begin, 0) + tl.program_id(0) // (splits * tiles)
    if (length == 0) | (token >= tl.minimum(count, last_row - begin)):
        return
    head = tile * ROWS + tl.arange(0, ROWS)
    real = head < HEADS
    row = (begin + token).to(tl.int64)
    mine = row - first_row
    place = (mine * HEADS + head) * splits + split
    first = split * span
    last = tl.minimum(tl.minimum(first + span, TOP), length - count + token + 1)  # it chose no more than it sees
    if SPLIT & (first >= last):
        tl.store(lse + place, tl.full([ROWS], float("-inf"), tl.float32), mask=real)
        return
    HALF: tl.constexpr = BLOCK_L // 2
    REST: tl.constexpr = LATENT - HALF
    entry, rotated_entry, within = tl.arange(0, HALF), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
    low, middle = real[:, None], real[:, None] & (entry < REST)[None, :]
    high = real[:, None] & (rotated_entry < ROPE)[None, :]
    source = q + mine * q_token + head[:, None] * q_head + entry[None, :]
    query, query_2 = tl.load(source, mask=low, other=0.0), tl.load(source + HALF, mask=middle, other=0.0)
    source = q_rope + row * rope_token + head[:, None] * rope_head + rotated_entry[None, :]
    query_rope = tl.load(source, mask=high, other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, acc_2 = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    table = tables + sequence.to(tl.int64) * table_outer
    for start in range(first, last, KEYS):
        position = tl.load(chosen + row * TOP + start + within, mask=start + within < last, other=-1)
        inside = position >= 0
        slot = slots_of_keys(table, position, inside, BLOCK_TOKENS)
        rope = load_latents(entries, scales, slot, inside, LATENT, ROPE, BLOCK_R, PART, PARTS, KIND, query.dtype)
        s = tl.dot(query_rope, tl.trans(rope), input_precision="ieee")
        latent = load_latents(entries, scales, slot, inside, 0, HALF, HALF, PART, PARTS, KIND, query.dtype)
        s = tl.dot(query, tl.trans(latent), s, input_precision="ieee")
        latent_2 = load_latents(entries, scales, slot, inside, HALF, REST, HALF, PART, PARTS, KIND, query.dtype)
        s = tl.dot(query_2, tl.trans(latent_2), s, input_precision="ieee") * scale
        s = tl.where(inside[None, :], s, float("-inf"))
        p, shrink, highest, total = softmax_step(s, highest, total, True)
        p = p.to(query.dtype)
        acc = tl.dot(p, latent, acc * shrink[:, None], input_precision="ieee")
        acc_2 = tl.dot(p, latent_2, acc_2 * shrink[:, None], input_precision="ieee")
    weight = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLIT:
        target = parts + place[:, None] * LATENT + entry[None, :]
        tl.store(target, acc * weight, mask=low)
        tl.store(target + HALF, acc_2 * weight, mask=middle)
        tl.store(lse + place, tl.where(total == 0.0, float("-inf"), highest + tl.log2(total)), mask=real)
    else:
        target = out + mine * out_token + head[:, None] * out_head + entry[None, :]
        tl.store(target, (acc * weight).to(out.dtype.element_ty), mask=low)
        tl.store(target + HALF, (acc_2 * weight).to(out.dtype.element_ty), mask=middle)


@triton.jit(do_not_specialize=("splits",))
def _combine_chosen(
    parts, lse, out, out_token, out_head, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program `(head, row)` combines the splits of one head of a row; `parts` and `lse` as of `combine_splits`."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, entry = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_L)
    place = (row * HEADS + head) * splits + split
    mass = tl.load(lse + place, mask=split < splits, other=float("-inf"))
    highest = tl.max(mass, 0)
    weight = tl.exp2(mass - tl.where(highest == float("-inf"), 0.0, highest))
    used = (mass != float("-inf"))[:, None] & (entry < LATENT)[None, :]  # of the others nothing was stored
    part = tl.load(parts + place[:, None] * LATENT + entry[None, :], mask=used, other=0.0)
    total = tl.sum(weight, 0)
    acc = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = out + row * out_token + head * out_head + entry
    tl.store(target, acc.to(out.dtype.element_ty), mask=entry < LATENT)


def _choose_launch(tiles: Tiles, heads: int, dtype: torch.dtype) -> Launch:
    """The sizes for so many heads: no more rows than these fill."""
    launch = tiles.sparse.for_dtype(dtype)
    return Launch(min(launch.rows, pad_width(heads)), launch.keys, launch.warps, launch.stages)


def _attend_rows(
    view: Any, q: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV, rows: range
) -> torch.Tensor:
    """Attention of some rows of a step, whose folded queries `q` are `[H, rows, R]`: the like."""
    tiles: Tiles = view.prepared
    d, top = view.dims, chosen.shape[1]
    launch = _choose_launch(tiles, d.heads, q.dtype)
    entries, scales, kind = cache_tensors(kv)
    _, parts_count, part = entries[0].shape
    mid = torch.empty_like(q)
    out = mid.transpose(0, 1)
    across = triton.cdiv(d.heads, launch.rows)
    least = max(min(LEAST_SPLIT, tiles.chunk_tokens), launch.keys)
    splits = max(1, min(tiles.programs // (across * len(rows)), triton.cdiv(min(top, batch.max_seq_tokens), least)))
    span = triton.cdiv(triton.cdiv(top, splits), launch.keys) * launch.keys
    parts = lse = out
    if splits > 1:
        parts = q.new_empty(len(rows), d.heads, splits, d.latent, dtype=torch.float32)
        lse = q.new_empty(len(rows), d.heads, splits, dtype=torch.float32)
    most = min(batch.max_query_tokens, len(rows))
    _attend_chosen[(most * across * splits, len(batch.seq_lens))](
        q, q_rope, entries[0], scales[0], chosen, out, parts, lse,
        batch.block_tables, batch.query_start, batch.seq_lens,
        view.scale * LOG2_E, batch.block_tables.stride(0), q.stride(1), q.stride(0), q_rope.stride(0), q_rope.stride(1),
        out.stride(0), out.stride(1), rows.start, rows.stop, splits, span,
        HEADS=d.heads, LATENT=d.latent, ROPE=d.rope, PART=part, PARTS=parts_count, TOP=top,
        BLOCK_TOKENS=kv.block_tokens, KIND=kind, ROWS=launch.rows, KEYS=launch.keys, BLOCK_L=pad_width(d.latent),
        BLOCK_R=pad_width(d.rope), SPLIT=splits > 1, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits > 1:
        _combine_chosen[(d.heads, len(rows))](
            parts, lse, out, out.stride(0), out.stride(1), splits,
            HEADS=d.heads, LATENT=d.latent, BLOCK_L=pad_width(d.latent), BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4,
        )  # fmt: skip
    return mid


def attend_chosen(
    view: Any,
    kv_b: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    chosen: torch.Tensor,
    batch: Batch,
    kv: LayerKV,
) -> torch.Tensor:
    """Fold `kv_b` into the query, attend to the chosen entries, unfold; rows in parts that fit `FOLDED_BYTES`.

    Args:
        view: of a kernel with `Tiles`.
        kv_b: `[H (N + V), R]`.
        q_nope: `[T, H, N]`. q_rope: `[T, H, P]`.
        chosen: int32 `[T, K]`.
        batch: the step. kv: the layer's latents.

    Returns:
        `[T, H, V]`; rows of padding are undefined.
    """
    d = view.dims
    w_k, w_v = kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    q_rope, chosen = with_contiguous_rows(q_rope), chosen.contiguous()
    tokens = q_nope.shape[0]
    result = q_nope.new_empty(tokens, d.heads, d.value)  # tokens outside: the next product reads it as it lies
    step = max(1, min(FOLDED_BYTES // (d.heads * d.latent * q_nope.element_size()), MOST_ROWS))
    for first in range(0, tokens, step):
        rows = range(first, min(first + step, tokens))
        part = slice(rows.start, rows.stop)
        q = torch.bmm(q_nope[part].transpose(0, 1), w_k)
        mid = _attend_rows(view, q, q_rope, chosen, batch, kv, rows)
        torch.bmm(mid, w_v.transpose(1, 2), out=result[part].transpose(0, 1))
    return result


def sparse_mla_absorbed(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_absorbed` by `attend_chosen`."""
    return attend_chosen(view, view.kv_b, q_nope, q_rope, chosen, batch, kv)


def sparse_mla_expanded(
    view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, chosen: torch.Tensor, batch: Batch, kv: LayerKV
) -> torch.Tensor:
    """The op `sparse_mla_expanded` by `attend_chosen`; if no sequence has more tokens than are chosen, all of them are,
    and the step attends as `mla_expanded` does.
    """
    if batch.host_lens is not None and batch.max_seq_tokens <= view.top:
        return mla_expanded(view, q_nope, q_rope, batch, kv)
    return attend_chosen(view, view.kv_b.weight, q_nope, q_rope, chosen, batch, kv)
