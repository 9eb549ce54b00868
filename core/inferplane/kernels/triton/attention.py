"""Attention of ragged queries over paged K and V: one kernel for few and for many query tokens.

A program takes a tile of query rows: tokens times the query heads that share a KV head when tokens are few, tokens of
one head when they are many. With few tokens the cache of a sequence is split among programs; how, follows from that
sequence's own length, so no plan is made on the host, a captured step stays right when lengths grow, and a result does
not depend on the rest of the batch. Quantized entries are widened as they are; their scales act on scores and weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.kv_write import stored
from inferplane.kernels.triton.split_reduction import kept, last_of
from inferplane.kernels.triton.tiles import Launch, Tiles
from inferplane.types import Batch, LayerKV

LOG2_E = 1.4426950408889634


@triton.jit
def widened(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored entries as numbers: KIND 0 as they are, 1 FP8 bits times 2^-8, 2 int8. See `FACTOR`."""
    if KIND == 1:
        bits = ((x.to(tl.uint16) & 0x80) << 8) | ((x.to(tl.uint16) & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    elif KIND == 2:
        return x.to(tl.float32).to(dtype)
    else:
        return x


FACTOR = tl.constexpr((1.0, 256.0, 1.0))
"""What widened entries lack, by kind: read as a half float's, an FP8 number's exponent is 8 too small."""


@triton.jit
def first_slot(tables, key, BLOCK_TOKENS: tl.constexpr):
    """Slot of a key whose tile lies within one block."""
    block = tl.load(tables + key // BLOCK_TOKENS).to(tl.int64)
    return block * BLOCK_TOKENS + key % BLOCK_TOKENS


@triton.jit
def each_slot(tables, keys, inside, BLOCK_TOKENS: tl.constexpr):
    """Slots of keys that may lie in several blocks."""
    block = tl.load(tables + keys // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_TOKENS + keys % BLOCK_TOKENS


@triton.jit
def extent_of(starts, lengths, sequence):
    """A sequence's tokens in all, where its query tokens begin, and how many they are."""
    length = tl.load(lengths + sequence)
    begin = tl.load(starts + sequence)
    return length, begin, tl.load(starts + sequence + 1) - begin


@triton.jit
def weighed(s, highest, total, BLIND: tl.constexpr):
    """Weights of scores `s` (in powers of two), by what the results so far shrink, and the new maxima and sums. BLIND:
    a row may have seen no key yet.
    """
    higher = tl.maximum(highest, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if BLIND else higher
    shrink = tl.exp2(highest - base)
    p = tl.exp2(s - base[:, None])
    return p, shrink, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def span_of(length, count, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The first key that any of a sequence's queries may see, rounded down to a block."""
    if WINDOW > 0:
        return tl.maximum(length - count - WINDOW + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return length * 0


@triton.jit
def chunk_of(keys, KEYS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of a split, for a sequence with `keys` of them: a multiple of KEYS, so large that SPLITS are enough."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), KEYS) * KEYS, CHUNK)


@triton.jit
def combined(parts, lse, place, splits, used, entry, real, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Rows put together from the results of their splits, each normed by its own sum; float32 `[ROWS, BLOCK]`.

    `place` are the rows' first splits in `lse` (base 2) and `parts`, of which `used` count, one after another.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(0, used):
        highest = tl.maximum(highest, tl.where(real, kept(lse + place + i, real), float("-inf")))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, entry.shape[0]], tl.float32)
    for i in range(0, used):
        weight = tl.where(real, tl.exp2(kept(lse + place + i, real) - base), 0.0)
        total += weight
        mask = real[:, None] & (entry < WIDTH)[None, :]
        acc += weight[:, None] * kept(parts + (place + i)[:, None] * WIDTH + entry[None, :], mask)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend(
    q, k, v, k_scales, v_scales, out, parts, lse, counters, tables, starts, lengths,
    scale, table_outer, q_outer, q_inner, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    sequence = tl.program_id(2)
    length, begin, count = extent_of(starts, lengths, sequence)
    first_token = tile * ROWS // TILE_HEADS
    if (length == 0) | (first_token >= count):
        return
    first = span_of(length, count, WINDOW, BLOCK_TOKENS)
    last = length - count + tl.minimum((tile * ROWS + ROWS - 1) // TILE_HEADS + 1, count)
    alone, span, chunk = True, length - first, length
    if SPLIT:
        chunk = chunk_of(span, KEYS, CHUNK, SPLITS)
        alone = chunk >= span
        first += split * chunk
        if first >= length:
            return
        last = tl.minimum(last, first + chunk)
    elif WINDOW > 0:
        first = tl.maximum(length - count + first_token - WINDOW + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // TILE_HEADS
    head = tl.program_id(1) * TILE_HEADS + row % TILE_HEADS
    kv_head = tl.program_id(1) * TILE_HEADS // GROUP
    real = token < count
    position = length - count + token
    dim, value_dim, within = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)
    query = tl.load(
        q + rows[:, None] * q_outer + head[:, None] * q_inner + dim[None, :],
        mask=real[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    table = tables + sequence.to(tl.int64) * table_outer
    KV_HEADS: tl.constexpr = HEADS // GROUP
    for start in range(first, last, KEYS):
        key = start + within
        inside = key < length
        if BLOCK_TOKENS % KEYS == 0:
            slot = first_slot(table, start, BLOCK_TOKENS) + within
        else:
            slot = each_slot(table, key, inside, BLOCK_TOKENS)
        place = slot * KV_HEADS + kv_head
        keys = tl.load(
            k + place[None, :] * DIM + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0
        )  # fmt: skip
        s = tl.dot(query, widened(keys, KIND, query.dtype), input_precision="ieee") * scale
        if KIND > 0:
            s *= (tl.load(k_scales + place, mask=inside, other=0.0) * FACTOR[KIND])[None, :]
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        s = tl.where(seen, s, float("-inf"))
        p, shrink, highest, total = weighed(s, highest, total, True)
        acc = acc * shrink[:, None]
        values = tl.load(
            v + place[:, None] * V_DIM + value_dim[None, :],
            mask=inside[:, None] & (value_dim < V_DIM)[None, :], other=0,
        )  # fmt: skip
        if KIND > 0:
            p *= (tl.load(v_scales + place, mask=inside, other=0.0) * FACTOR[KIND])[None, :]
        acc = tl.dot(p.to(query.dtype), widened(values, KIND, query.dtype), acc, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = rows * HEADS + head
    wanted = real[:, None] & (value_dim < V_DIM)[None, :]
    if not alone:
        mine = place * splits + split
        tl.store(parts + mine[:, None] * V_DIM + value_dim[None, :], acc, mask=wanted)
        seen_mass = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(lse + mine, seen_mass, mask=real)
        used = tl.cdiv(span, chunk)
        group = (sequence * tl.num_programs(1) + tl.program_id(1)) * (tl.num_programs(0) // splits) + tile
        if not last_of(counters + group, used):
            return
        acc = combined(parts, lse, place * splits, splits, used, value_dim, real, V_DIM, ROWS)
    tl.store(out + place[:, None] * V_DIM + value_dim[None, :], acc.to(out.dtype.element_ty), mask=wanted)


def block(dim: int) -> int:
    """Width of the tile that holds `dim` entries."""
    return max(16, triton.next_power_of_2(dim))


def splits_for(batch: Batch, launch: Launch, tiles: Tiles) -> int:
    """Splits that the longest sequence of a batch (or of what a captured step is for) can need."""
    chunk = max(tiles.chunk_tokens, launch.keys)
    return min(tiles.splits, max(1, math.ceil(batch.max_seq_tokens / chunk)))


def attention(p: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """Few query tokens: split over the cache, and put together by the last split to come. Many: a tile of tokens and a
    head a program.
    """
    tiles: Tiles = p.prepared
    few = p.queries == "few"
    launch = (tiles.decode if few else tiles.prefill).for_dtype(q.dtype)
    entries, scales, kind = stored(kv)
    tokens, heads, dim = q.shape
    group, v_dim = heads // p.kv.heads, p.kv.v_dim
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q.new_empty(tokens, heads, v_dim)
    tile_heads = group if few else 1
    rows = max(launch.rows, triton.next_power_of_2(tile_heads)) if few else launch.rows
    splits = splits_for(batch, launch, tiles) if few else 1
    parts = lse = counters = out
    across = triton.cdiv(batch.max_query_tokens * tile_heads, rows)
    grid = (across * splits, heads // tile_heads, len(batch.seq_lens))
    if splits > 1:
        parts = q.new_empty(tokens, heads, splits, v_dim, dtype=torch.float32)
        lse = q.new_empty(tokens, heads, splits, dtype=torch.float32)
        counters = tiles.counters.of(q.device, across * grid[1] * grid[2])
    _attend[grid](
        q, entries[0], entries[1], scales[0], scales[1], out, parts, lse, counters,
        batch.block_tables, batch.query_start, batch.seq_lens,
        p.scale * LOG2_E, batch.block_tables.stride(0), q.stride(0), q.stride(1), splits,
        HEADS=heads, GROUP=group, TILE_HEADS=tile_heads, DIM=dim, V_DIM=v_dim, BLOCK_TOKENS=kv.block_tokens,
        WINDOW=p.kv.window or 0, KIND=kind, ROWS=rows, KEYS=launch.keys, BLOCK_D=block(dim), BLOCK_V=block(v_dim),
        CHUNK=max(tiles.chunk_tokens, launch.keys), SPLITS=tiles.splits, SPLIT=splits > 1,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
