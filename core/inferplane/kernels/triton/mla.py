"""Latent attention: few query tokens over the latents as they lie in the cache, many over keys and values expanded.

For few tokens, rows of a tile are tokens times heads: up to ROWS / H query tokens of a sequence read its latents
once. For many, the step's latents are gathered and expanded by one product, a few heads at a time, and attended to as
ordinary keys and values with the rotated part shared by all heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import (
    FACTOR,
    LOG2_E,
    block,
    chunk_of,
    combined,
    each_slot,
    extent_of,
    first_slot,
    splits_for,
    weighed,
    widened,
)
from inferplane.kernels.triton.kv_write import side_by_side, stored
from inferplane.kernels.triton.split_reduction import last_of
from inferplane.kernels.triton.tiles import Tiles
from inferplane.types import Batch, LayerKV

EXPANDED_BYTES = 256 << 20
"""Keys and values that are expanded at a time."""


@triton.jit
def _latents(
    entries, scales, slot, inside,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Entries BEGIN to BEGIN + WIDTH of some tokens, `[KEYS, BLOCK]` in `dtype`, zero beyond."""
    entry = tl.arange(0, BLOCK)
    mask = inside[:, None] & (entry < WIDTH)[None, :]
    raw = tl.load(entries + slot[:, None] * (PARTS * PART) + BEGIN + entry[None, :], mask=mask, other=0)
    if KIND == 0:
        return raw
    elif BEGIN % PART == 0 and BLOCK % PART == 0:  # whole groups: one scale is read for each, not for each entry
        numbers = tl.reshape(widened(raw, KIND, tl.float32), (slot.shape[0], BLOCK // PART, PART))
        part = BEGIN // PART + tl.arange(0, BLOCK // PART)
        counts = inside[:, None] & (part < PARTS)[None, :]
        scale = tl.load(scales + slot[:, None] * PARTS + part[None, :], mask=counts, other=0.0) * FACTOR[KIND]
        return tl.reshape(numbers * scale[:, :, None], (slot.shape[0], BLOCK)).to(dtype)
    else:
        part = (BEGIN + entry) // PART
        scale = tl.load(scales + slot[:, None] * PARTS + part[None, :], mask=mask, other=0.0) * FACTOR[KIND]
        return (widened(raw, KIND, tl.float32) * scale).to(dtype)


@triton.jit
def _absorbed(
    q, q_rope, entries, scales, out, parts, lse, counters, tables, starts, lengths,
    scale, table_outer, q_token, q_head, rope_token, rope_head, out_token, out_head, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    sequence = tl.program_id(1)
    length, begin, count = extent_of(starts, lengths, sequence)
    if (length == 0) | (tile * ROWS // HEADS >= count):
        return
    first = length * 0
    last = length - count + tl.minimum((tile * ROWS + ROWS - 1) // HEADS + 1, count)
    alone, chunk = True, length
    if SPLIT:
        chunk = chunk_of(length, KEYS, CHUNK, SPLITS)
        alone = chunk >= length
        first = split * chunk
        if first >= length:
            return
        last = tl.minimum(last, first + chunk)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    real = token < count
    position = length - count + token
    entry, turned, within = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)
    low = real[:, None] & (entry < LATENT)[None, :]
    high = real[:, None] & (turned < ROPE)[None, :]
    query = tl.load(q + rows[:, None] * q_token + head[:, None] * q_head + entry[None, :], mask=low, other=0.0)
    query_rope = tl.load(
        q_rope + rows[:, None] * rope_token + head[:, None] * rope_head + turned[None, :], mask=high, other=0.0
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_L], tl.float32)
    table = tables + sequence.to(tl.int64) * table_outer
    for start in range(first, last, KEYS):
        key = start + within
        inside = key < length
        if BLOCK_TOKENS % KEYS == 0:
            slot = first_slot(table, start, BLOCK_TOKENS) + within
        else:
            slot = each_slot(table, key, inside, BLOCK_TOKENS)
        latent = _latents(entries, scales, slot, inside, 0, LATENT, BLOCK_L, PART, PARTS, KIND, query.dtype)
        rope = _latents(entries, scales, slot, inside, LATENT, ROPE, BLOCK_R, PART, PARTS, KIND, query.dtype)
        s = tl.dot(query, tl.trans(latent), input_precision="ieee")
        s = tl.dot(query_rope, tl.trans(rope), s, input_precision="ieee") * scale
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        p, shrink, highest, total = weighed(s, highest, total, True)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(query.dtype), latent, acc, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not alone:
        place = (rows * HEADS + head) * splits
        tl.store(parts + (place + split)[:, None] * LATENT + entry[None, :], acc, mask=low)
        seen_mass = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(lse + place + split, seen_mass, mask=real)
        used = tl.cdiv(length, chunk)
        if not last_of(counters + sequence * (tl.num_programs(0) // splits) + tile, used):
            return
        acc = combined(parts, lse, place, splits, used, entry, real, LATENT, ROWS)
    target = rows * out_token + head * out_head
    tl.store(out + target[:, None] + entry[None, :], acc.to(out.dtype.element_ty), mask=low)


def absorb(p: Any, q_nope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The query's part without rotation folded into the latent space, `[H, T, R]`, and `W_v` `[H, V, R]`."""
    d = p.dims
    w_k, w_v = p.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    return torch.bmm(q_nope.transpose(0, 1), w_k), w_v


def mla_absorbed(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Fold `kv_b` into the query, attend to the latents split over programs, unfold."""
    tiles: Tiles = p.prepared
    launch, d = tiles.mla.for_dtype(q_nope.dtype), p.dims
    entries, scales, kind = stored(kv)
    _, parts_count, part = entries[0].shape
    tokens = q_nope.shape[0]
    q, w_v = absorb(p, q_nope)
    q_rope = side_by_side(q_rope)
    mid = torch.empty_like(q)
    out = mid.transpose(0, 1)
    splits = splits_for(batch, launch, tiles)
    parts = lse = counters = out
    across, sequences = triton.cdiv(batch.max_query_tokens * d.heads, launch.rows), len(batch.seq_lens)
    if splits > 1:
        parts = q.new_empty(tokens, d.heads, splits, d.latent, dtype=torch.float32)
        lse = q.new_empty(tokens, d.heads, splits, dtype=torch.float32)
        counters = tiles.counters.of(q.device, across * sequences)
    _absorbed[(across * splits, sequences)](
        q, q_rope, entries[0], scales[0], out, parts, lse, counters,
        batch.block_tables, batch.query_start, batch.seq_lens,
        p.scale * LOG2_E, batch.block_tables.stride(0), q.stride(1), q.stride(0), q_rope.stride(0), q_rope.stride(1),
        out.stride(0), out.stride(1), splits,
        HEADS=d.heads, LATENT=d.latent, ROPE=d.rope, PART=part, PARTS=parts_count, BLOCK_TOKENS=kv.block_tokens,
        KIND=kind, ROWS=launch.rows, KEYS=launch.keys, BLOCK_L=block(d.latent), BLOCK_R=block(d.rope),
        CHUNK=max(tiles.chunk_tokens, launch.keys), SPLITS=tiles.splits, SPLIT=splits > 1,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    result = q.new_empty(tokens, d.heads, d.value)  # tokens outside: the next product reads it as it lies
    torch.bmm(mid, w_v.transpose(1, 2), out=result.transpose(0, 1))
    return result


@triton.jit
def _gather(
    entries, scales, out, tables, lengths, before, table_outer,
    WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    sequence, token = tl.program_id(1), tl.program_id(0)
    if token >= tl.load(lengths + sequence):
        return
    at = tl.load(tables + sequence.to(tl.int64) * table_outer + token // BLOCK_TOKENS).to(tl.int64)
    slot = at * BLOCK_TOKENS + token % BLOCK_TOKENS
    entry = tl.arange(0, BLOCK)
    inside = entry < WIDTH
    raw = tl.load(entries + slot * WIDTH + entry, mask=inside, other=0)
    if KIND > 0:
        scale = tl.load(scales + slot * PARTS + entry // PART, mask=inside, other=0.0) * FACTOR[KIND]
        raw = widened(raw, KIND, tl.float32) * scale
    row = (tl.load(before + sequence) + token).to(tl.int64)
    tl.store(out + row * WIDTH + entry, raw.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expanded(
    q, q_rope, kv, latents, out, starts, lengths, before, scale,
    q_token, q_head, rope_token, rope_head, out_token, out_head, kv_token, first_head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(2)
    length, begin, count = extent_of(starts, lengths, sequence)
    first_token = tl.program_id(0) * ROWS
    if first_token >= count:
        return
    token = first_token + tl.arange(0, ROWS)
    head = first_head + tl.program_id(1)
    real = token < count
    position = length - count + token
    dim, turned, value_dim = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    within = tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)[:, None]
    query = tl.load(
        q + rows * q_token + head * q_head + dim[None, :], mask=real[:, None] & (dim < NOPE)[None, :], other=0.0
    )  # fmt: skip
    query_rope = tl.load(
        q_rope + rows * rope_token + head * rope_head + turned[None, :],
        mask=real[:, None] & (turned < ROPE)[None, :], other=0.0,
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    base_row = tl.load(before + sequence).to(tl.int64)
    for start in range(0, length - count + tl.minimum(first_token + ROWS, count), KEYS):
        key = start + within
        inside = key < length
        row = base_row + key
        place = kv + row * kv_token + tl.program_id(1) * (NOPE + VALUE)
        keys = tl.load(place[None, :] + dim[:, None], mask=inside[None, :] & (dim < NOPE)[:, None], other=0.0)
        rope = tl.load(
            latents + row[None, :] * (LATENT + ROPE) + LATENT + turned[:, None],
            mask=inside[None, :] & (turned < ROPE)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(query, keys, input_precision="ieee")
        s = tl.dot(query_rope, rope, s, input_precision="ieee") * scale
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        p, shrink, highest, total = weighed(s, highest, total, False)  # every row sees the first key
        acc = acc * shrink[:, None]
        values = tl.load(
            place[:, None] + NOPE + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(p.to(query.dtype), values, acc, input_precision="ieee")
    target = out + rows * out_token + head * out_head + value_dim[None, :]
    wanted = real[:, None] & (value_dim < VALUE)[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


def gathered(p: Any, like: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of every sequence of a step, one after another in the dtype of `like`, `[N, R + P]`, and where each
    sequence's begin, int32 `[B]`. Lengths must be known on the host.
    """
    entries, scales, kind = stored(kv)
    _, parts, part = entries[0].shape
    lens = batch.lens().seq_lens
    before = batch.seq_lens.cumsum(0, dtype=torch.int32) - batch.seq_lens
    out = like.new_empty(sum(lens), parts * part)
    _gather[(max(lens), len(lens))](
        entries[0], scales[0], out, batch.block_tables, batch.seq_lens, before, batch.block_tables.stride(0),
        WIDTH=parts * part, PART=part, PARTS=parts, BLOCK=block(parts * part), BLOCK_TOKENS=kv.block_tokens, KIND=kind,
        num_warps=1 if parts * part <= 256 else 4,
    )  # fmt: skip
    return out, before


def mla_expanded(p: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Gather, expand and attend, as many heads at a time as `EXPANDED_BYTES` hold."""
    tiles: Tiles = p.prepared
    launch, d = tiles.prefill.for_dtype(q_nope.dtype), p.dims
    q_nope, q_rope = side_by_side(q_nope), side_by_side(q_rope)
    latents, before = gathered(p, q_nope, batch, kv)
    width = d.nope + d.value
    weight = p.kv_b.weight.view(d.heads, width, d.latent)
    bytes_a_head = latents.shape[0] * width * latents.element_size()
    at_once = max(1, min(d.heads, EXPANDED_BYTES // max(1, bytes_a_head)))
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    for head in range(0, d.heads, at_once):
        heads = min(at_once, d.heads - head)
        expanded = F.linear(latents[:, : d.latent], weight[head : head + heads].flatten(0, 1))
        grid = (triton.cdiv(batch.max_query_tokens, launch.rows), heads, len(batch.seq_lens))
        _expanded[grid](
            q_nope, q_rope, expanded, latents, out, batch.query_start, batch.seq_lens, before, p.scale * LOG2_E,
            q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), out.stride(0), out.stride(1),
            expanded.stride(0), head,
            NOPE=d.nope, ROPE=d.rope, VALUE=d.value, LATENT=d.latent, ROWS=launch.rows, KEYS=launch.keys,
            BLOCK_N=block(d.nope), BLOCK_R=block(d.rope), BLOCK_V=block(d.value),
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out
