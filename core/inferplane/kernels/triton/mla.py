"""Latent attention (MLA): few query tokens attend to the latents in the cache, many to keys and values expanded.

For few tokens, rows of a tile are tokens times heads: up to ROWS / H query tokens of a sequence read its latents
once. For many, the step's latents are gathered and expanded by one product, a few heads at a time, and attended to as
ordinary keys and values; the rotated part is shared by all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import (
    LOG2_E,
    WIDEN_FACTOR,
    combine_splits,
    count_splits,
    pad_width,
    sequence_extent,
    slot_in_block,
    slots_of_keys,
    softmax_step,
    split_size,
    widen_entries,
)
from inferplane.kernels.triton.kv_write import cache_tensors, with_contiguous_rows
from inferplane.kernels.triton.split_reduction import is_last_arrival
from inferplane.kernels.triton.tiles import Tiles
from inferplane.types import Batch, LayerKV

EXPANDED_BYTES = 256 << 20
"""Bytes of keys and values that are expanded at a time."""


@triton.jit
def load_latents(
    entries, scales, slot, inside,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    KIND: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Dequantized entries BEGIN to BEGIN + WIDTH of some slots, `[KEYS, BLOCK]` in `dtype`, zero beyond.

    The cache has PARTS runs of PART entries with a scale each; KIND as in `widen_entries`.
    """
    entry = tl.arange(0, BLOCK)
    mask = inside[:, None] & (entry < WIDTH)[None, :]
    raw = tl.load(entries + slot[:, None] * (PARTS * PART) + BEGIN + entry[None, :], mask=mask, other=0)
    if KIND == 0:
        return raw
    elif BEGIN % PART == 0 and BLOCK % PART == 0:  # whole groups: one scale is read for each, not for each entry
        numbers = tl.reshape(widen_entries(raw, KIND, tl.float32), (slot.shape[0], BLOCK // PART, PART))
        part = BEGIN // PART + tl.arange(0, BLOCK // PART)
        counts = inside[:, None] & (part < PARTS)[None, :]
        scale = tl.load(scales + slot[:, None] * PARTS + part[None, :], mask=counts, other=0.0) * WIDEN_FACTOR[KIND]
        return tl.reshape(numbers * scale[:, :, None], (slot.shape[0], BLOCK)).to(dtype)
    else:
        part = (BEGIN + entry) // PART
        scale = tl.load(scales + slot[:, None] * PARTS + part[None, :], mask=mask, other=0.0) * WIDEN_FACTOR[KIND]
        return (widen_entries(raw, KIND, tl.float32) * scale).to(dtype)


@triton.jit
def _absorbed(
    q, q_rope, entries, scales, out, parts, lse, counters, tables, starts, lengths,
    scale, table_outer, q_token, q_head, rope_token, rope_head, out_token, out_head, splits,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program `(tile and split, sequence)`: attention of ROWS rows, tokens times HEADS, to one split of the latents.

    SPLIT: there may be several splits, whose last program combines them.
    """
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    sequence = tl.program_id(1)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    if (length == 0) | (tile * ROWS // HEADS >= count):
        return
    first = length * 0
    last = length - count + tl.minimum((tile * ROWS + ROWS - 1) // HEADS + 1, count)
    alone, chunk = True, length
    if SPLIT:
        chunk = split_size(length, KEYS, CHUNK, SPLITS)
        alone = chunk >= length
        first = split * chunk
        if first >= length:
            return
        last = tl.minimum(last, first + chunk)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    real = token < count
    position = length - count + token
    entry, rotated_entry, within = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R), tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)
    low = real[:, None] & (entry < LATENT)[None, :]
    high = real[:, None] & (rotated_entry < ROPE)[None, :]
    query = tl.load(q + rows[:, None] * q_token + head[:, None] * q_head + entry[None, :], mask=low, other=0.0)
    query_rope = tl.load(
        q_rope + rows[:, None] * rope_token + head[:, None] * rope_head + rotated_entry[None, :], mask=high, other=0.0
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_L], tl.float32)
    table = tables + sequence.to(tl.int64) * table_outer
    for start in range(first, last, KEYS):
        key = start + within
        inside = key < length
        if BLOCK_TOKENS % KEYS == 0:
            slot = slot_in_block(table, start, BLOCK_TOKENS) + within
        else:
            slot = slots_of_keys(table, key, inside, BLOCK_TOKENS)
        latent = load_latents(entries, scales, slot, inside, 0, LATENT, BLOCK_L, PART, PARTS, KIND, query.dtype)
        rope = load_latents(entries, scales, slot, inside, LATENT, ROPE, BLOCK_R, PART, PARTS, KIND, query.dtype)
        s = tl.dot(query, tl.trans(latent), input_precision="ieee")
        s = tl.dot(query_rope, tl.trans(rope), s, input_precision="ieee") * scale
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        p, shrink, highest, total = softmax_step(s, highest, total, True)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(query.dtype), latent, acc, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not alone:
        place = (rows * HEADS + head) * splits
        tl.store(parts + (place + split)[:, None] * LATENT + entry[None, :], acc, mask=low)
        seen_mass = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(lse + place + split, seen_mass, mask=real)
        used = tl.cdiv(length, chunk)
        if not is_last_arrival(counters + sequence * (tl.num_programs(0) // splits) + tile, used):
            return
        acc = combine_splits(parts, lse, place, splits, used, entry, real, LATENT, ROWS)
    target = rows * out_token + head * out_head
    tl.store(out + target[:, None] + entry[None, :], acc.to(out.dtype.element_ty), mask=low)


def fold_query(view: Any, q_nope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold `kv_b` into the query's part without rotation `q_nope` `[T, H, N]`: latent queries `[H, T, R]`; and the
    value rows of `kv_b`, `W_v` `[H, V, R]`, which unfold the result.
    """
    d = view.dims
    w_k, w_v = view.kv_b.view(d.heads, d.nope + d.value, d.latent).split((d.nope, d.value), 1)
    return torch.bmm(q_nope.transpose(0, 1), w_k), w_v


def mla_absorbed(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_absorbed`: fold `kv_b` into the query, attend to the latents in one launch, unfold."""
    tiles: Tiles = view.prepared
    launch, d = tiles.mla.for_dtype(q_nope.dtype), view.dims
    entries, scales, kind = cache_tensors(kv)
    _, parts_count, part = entries[0].shape
    tokens = q_nope.shape[0]
    q, w_v = fold_query(view, q_nope)
    q_rope = with_contiguous_rows(q_rope)
    mid = torch.empty_like(q)
    out = mid.transpose(0, 1)
    splits = count_splits(batch, launch, tiles)
    parts = lse = counters = out
    across, sequences = triton.cdiv(batch.max_query_tokens * d.heads, launch.rows), len(batch.seq_lens)
    if splits > 1:
        parts = q.new_empty(tokens, d.heads, splits, d.latent, dtype=torch.float32)
        lse = q.new_empty(tokens, d.heads, splits, dtype=torch.float32)
        counters = tiles.counters.of(q.device, across * sequences)
    _absorbed[(across * splits, sequences)](
        q, q_rope, entries[0], scales[0], out, parts, lse, counters,
        batch.block_tables, batch.query_start, batch.seq_lens,
        view.scale * LOG2_E, batch.block_tables.stride(0), q.stride(1), q.stride(0), q_rope.stride(0), q_rope.stride(1),
        out.stride(0), out.stride(1), splits,
        HEADS=d.heads, LATENT=d.latent, ROPE=d.rope, PART=part, PARTS=parts_count, BLOCK_TOKENS=kv.block_tokens,
        KIND=kind, ROWS=launch.rows, KEYS=launch.keys, BLOCK_L=pad_width(d.latent), BLOCK_R=pad_width(d.rope),
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
    """Program `(token, sequence)` copies the token's latent, dequantized, to the token's row of `out`."""
    sequence, token = tl.program_id(1), tl.program_id(0)
    if token >= tl.load(lengths + sequence):
        return
    at = tl.load(tables + sequence.to(tl.int64) * table_outer + token // BLOCK_TOKENS).to(tl.int64)
    slot = at * BLOCK_TOKENS + token % BLOCK_TOKENS
    entry = tl.arange(0, BLOCK)
    inside = entry < WIDTH
    raw = tl.load(entries + slot * WIDTH + entry, mask=inside, other=0)
    if KIND > 0:
        scale = tl.load(scales + slot * PARTS + entry // PART, mask=inside, other=0.0) * WIDEN_FACTOR[KIND]
        raw = widen_entries(raw, KIND, tl.float32) * scale
    row = (tl.load(before + sequence) + token).to(tl.int64)
    tl.store(out + row * WIDTH + entry, raw.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expanded(
    q, q_rope, kv, latents, out, starts, lengths, before, scale,
    q_token, q_head, rope_token, rope_head, out_token, out_head, kv_token, first_head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program `(tile, head, sequence)`: causal attention of ROWS tokens to expanded keys and values.

    `kv` holds a head's key and value side by side per row, `latents` the rotated keys, which all heads share.
    """
    sequence = tl.program_id(2)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    first_token = tl.program_id(0) * ROWS
    if first_token >= count:
        return
    token = first_token + tl.arange(0, ROWS)
    head = first_head + tl.program_id(1)
    real = token < count
    position = length - count + token
    dim, rotated_entry, value_dim = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    within = tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)[:, None]
    query = tl.load(
        q + rows * q_token + head * q_head + dim[None, :], mask=real[:, None] & (dim < NOPE)[None, :], other=0.0
    )  # fmt: skip
    query_rope = tl.load(
        q_rope + rows * rope_token + head * rope_head + rotated_entry[None, :],
        mask=real[:, None] & (rotated_entry < ROPE)[None, :], other=0.0,
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
            latents + row[None, :] * (LATENT + ROPE) + LATENT + rotated_entry[:, None],
            mask=inside[None, :] & (rotated_entry < ROPE)[:, None], other=0.0,
        )  # fmt: skip
        s = tl.dot(query, keys, input_precision="ieee")
        s = tl.dot(query_rope, rope, s, input_precision="ieee") * scale
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        p, shrink, highest, total = softmax_step(s, highest, total, False)  # every row sees the first key
        acc = acc * shrink[:, None]
        values = tl.load(
            place[:, None] + NOPE + value_dim[None, :],
            mask=inside[:, None] & (value_dim < VALUE)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(p.to(query.dtype), values, acc, input_precision="ieee")
    target = out + rows * out_token + head * out_head + value_dim[None, :]
    out_mask = real[:, None] & (value_dim < VALUE)[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


def gather_latents(view: Any, like: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the latents of all sequences of a step out of the cache, dequantized. Their lengths must be known on the
    host; otherwise this waits for the device.

    Returns:
        The latents, one sequence after the other, `[N, R + P]` in the dtype of `like`, and the row at which each
            sequence begins, int32 `[B]`.
    """
    entries, scales, kind = cache_tensors(kv)
    _, parts, part = entries[0].shape
    lens = batch.lens().seq_lens
    before = batch.seq_lens.cumsum(0, dtype=torch.int32) - batch.seq_lens
    out = like.new_empty(sum(lens), parts * part)
    _gather[(max(lens), len(lens))](
        entries[0], scales[0], out, batch.block_tables, batch.seq_lens, before, batch.block_tables.stride(0),
        WIDTH=parts * part, PART=part, PARTS=parts, BLOCK=pad_width(parts * part),
        BLOCK_TOKENS=kv.block_tokens, KIND=kind, num_warps=1 if parts * part <= 256 else 4,
    )  # fmt: skip
    return out, before


def expand_latents(view: Any, latents: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Expand gathered latents to keys and values, as many heads at a time as `EXPANDED_BYTES` hold: yields the first
    head, the number of heads, and their keys and values, `[N, heads (nope + value)]`.
    """
    d, width = view.dims, view.dims.nope + view.dims.value
    weight = view.kv_b.weight.view(d.heads, width, d.latent)
    bytes_a_head = latents.shape[0] * width * latents.element_size()
    at_once = max(1, min(d.heads, EXPANDED_BYTES // max(1, bytes_a_head)))
    for head in range(0, d.heads, at_once):
        heads = min(at_once, d.heads - head)
        yield head, heads, F.linear(latents[:, : d.latent], weight[head : head + heads].flatten(0, 1))


def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_expanded`: gather the latents, then expand and attend, as many heads at a time as `EXPANDED_BYTES` of
    expanded keys and values hold.
    """
    tiles: Tiles = view.prepared
    launch, d = tiles.prefill.for_dtype(q_nope.dtype), view.dims
    q_nope, q_rope = with_contiguous_rows(q_nope), with_contiguous_rows(q_rope)
    latents, before = gather_latents(view, q_nope, batch, kv)
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    for head, heads, expanded in expand_latents(view, latents):
        grid = (triton.cdiv(batch.max_query_tokens, launch.rows), heads, len(batch.seq_lens))
        _expanded[grid](
            q_nope, q_rope, expanded, latents, out, batch.query_start, batch.seq_lens, before, view.scale * LOG2_E,
            q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), out.stride(0), out.stride(1),
            expanded.stride(0), head,
            NOPE=d.nope, ROPE=d.rope, VALUE=d.value, LATENT=d.latent, ROWS=launch.rows, KEYS=launch.keys,
            BLOCK_N=pad_width(d.nope), BLOCK_R=pad_width(d.rope), BLOCK_V=pad_width(d.value),
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out
