"""Attention of ragged queries over paged K and V: one kernel for few and for many query tokens.

A program takes a tile of query rows. With few query tokens, rows are tokens times the query heads that share a KV
head; with many, tokens of one head. With few tokens, a sequence's cache is split among programs, by the sequence's own
length alone: no plan is made on the host, a captured step stays right when lengths grow, and a result does not depend
on the rest of the batch. Quantized entries are widened without their scales, which are applied to scores and weights.
A head's sink is counted once, by the program that has the first keys. What an op does not have (sinks, a soft cap) is
passed as None, so that the compiler leaves it out.

The device functions use: a slot, one token's place in the cache; `tables`, the block table, whose rows are sequences;
`starts` and `lengths`, where each sequence's query tokens begin and how many tokens it has in all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.kv_write import cache_tensors
from inferplane.kernels.triton.split_reduction import is_last_arrival, load_shared_part
from inferplane.kernels.triton.tiles import Launch, Tiles
from inferplane.types import Batch, LayerKV

LOG2_E = 1.4426950408889634
TO_POWERS_OF_TWO = tl.constexpr(LOG2_E)


@triton.jit
def widen_entries(x, KIND: tl.constexpr, dtype: tl.constexpr):
    """Stored cache entries as numbers of `dtype`, without their scales.

    KIND 0: as they are; 1: FP8 bits, which come out times 2^-8 (`WIDEN_FACTOR` makes up for it); 2: int8.
    """
    if KIND == 1:
        bits = ((x.to(tl.uint16) & 0x80) << 8) | ((x.to(tl.uint16) & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    elif KIND == 2:
        return x.to(tl.float32).to(dtype)
    else:
        return x


WIDEN_FACTOR = tl.constexpr((1.0, 256.0, 1.0))
"""By which `widen_entries` are too small, by KIND: read as a float16's, an FP8 number's exponent is 8 too small."""


@triton.jit
def slot_in_block(tables, key, BLOCK_TOKENS: tl.constexpr):
    """Slot of the key number `key` (one number) of a sequence whose block table `tables` points to. Keys that follow in
    the same block have the slots that follow.
    """
    block = tl.load(tables + key // BLOCK_TOKENS).to(tl.int64)
    return block * BLOCK_TOKENS + key % BLOCK_TOKENS


@triton.jit
def slots_of_keys(tables, keys, inside, BLOCK_TOKENS: tl.constexpr):
    """Slots of the keys `keys` (a vector of numbers, also of several blocks) of the sequence whose block table `tables`
    points to; keys that are not `inside` get slots of block 0.
    """
    block = tl.load(tables + keys // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
    return block * BLOCK_TOKENS + keys % BLOCK_TOKENS


@triton.jit
def sequence_extent(starts, lengths, sequence):
    """Three numbers of a sequence: its tokens in all, the row of its first query token, and how many query tokens it
    has.
    """
    length = tl.load(lengths + sequence)
    begin = tl.load(starts + sequence)
    return length, begin, tl.load(starts + sequence + 1) - begin


@triton.jit
def softmax_step(s, highest, total, BLIND: tl.constexpr):
    """One step of an online softmax, in powers of two; nothing is stored.

    Args:
        s: scores of this tile of keys `[ROWS, KEYS]`, times log2(e); minus infinity for hidden keys.
        highest: largest score of each row so far, minus infinity at the start.
        total: sum of each row's weights so far, relative to `highest`.
        BLIND: a row may have seen no key yet, so its largest score may be minus infinity, which would give NaN.

    Returns:
        Weights of this tile, the factor by which earlier sums must shrink, and the new `highest` and `total`.
    """
    higher = tl.maximum(highest, tl.max(s, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher) if BLIND else higher
    shrink = tl.exp2(highest - base)
    p = tl.exp2(s - base[:, None])
    return p, shrink, higher, total * shrink + tl.sum(p, 1)


@triton.jit
def cap_scores(s, cap):
    """`cap tanh(x)` of `s = 2 log2(e) x`, float32. Both forms of infinity give the cap's size, as they should."""
    return cap - 2.0 * cap / (tl.exp2(s) + 1.0)


@triton.jit
def first_visible_key(length, count, WINDOW: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """The first key that any query of a sequence may see with its sliding WINDOW (0: none), rounded down to a block."""
    if WINDOW > 0:
        return tl.maximum(length - count - WINDOW + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    else:
        return length * 0


@triton.jit
def split_size(keys, KEYS: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr):
    """Keys per split of a sequence with `keys` keys: a multiple of KEYS, at least CHUNK, so that SPLITS are enough."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, SPLITS), KEYS) * KEYS, CHUNK)


@triton.jit
def combine_splits(parts, lse, place, splits, used, entry, real, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Combine the results of a tile's splits, in their order, and return float32 `[ROWS, BLOCK]`; 0 for rows that saw
    no key. Only the program that came last may call it (`is_last_arrival`).

    `parts` holds each split's result, divided by its own sum of weights, and `lse` the base-2 logarithm of that sum.
    `place` is where a row's splits begin in both; the first `used` of them were written. `entry` are the columns, of
    which WIDTH exist; rows that are not `real` are not read.
    """
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(0, used):
        highest = tl.maximum(highest, tl.where(real, load_shared_part(lse + place + i, real), float("-inf")))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, entry.shape[0]], tl.float32)
    for i in range(0, used):
        weight = tl.where(real, tl.exp2(load_shared_part(lse + place + i, real) - base), 0.0)
        total += weight
        mask = real[:, None] & (entry < WIDTH)[None, :]
        acc += weight[:, None] * load_shared_part(parts + (place + i)[:, None] * WIDTH + entry[None, :], mask)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attend(
    q, k, v, k_scales, v_scales, out, parts, lse, counters, tables, starts, lengths, sinks,
    scale, softcap, table_outer, q_outer, q_inner, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program `(tile and split, head or KV head, sequence)`: attention of ROWS query rows to one split of the keys.

    Rows are TILE_HEADS heads of each token. SPLIT: there may be several splits, whose last program combines them.
    `sinks` `[HEADS]`: each softmax has this score more, without a value. `softcap`: scores are capped (`cap_scores`),
    and `scale` and `softcap` hold the factors that this needs.
    """
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    sequence = tl.program_id(2)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    first_token = tile * ROWS // TILE_HEADS
    if (length == 0) | (first_token >= count):
        return
    first = first_visible_key(length, count, WINDOW, BLOCK_TOKENS)
    last = length - count + tl.minimum((tile * ROWS + ROWS - 1) // TILE_HEADS + 1, count)
    alone, span, chunk = True, length - first, length
    if SPLIT:
        chunk = split_size(span, KEYS, CHUNK, SPLITS)
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
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * TO_POWERS_OF_TWO
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    table = tables + sequence.to(tl.int64) * table_outer
    KV_HEADS: tl.constexpr = HEADS // GROUP
    for start in range(first, last, KEYS):
        key = start + within
        inside = key < length
        if BLOCK_TOKENS % KEYS == 0:
            slot = slot_in_block(table, start, BLOCK_TOKENS) + within
        else:
            slot = slots_of_keys(table, key, inside, BLOCK_TOKENS)
        place = slot * KV_HEADS + kv_head
        keys = tl.load(
            k + place[None, :] * DIM + dim[:, None], mask=inside[None, :] & (dim < DIM)[:, None], other=0
        )  # fmt: skip
        s = tl.dot(query, widen_entries(keys, KIND, query.dtype), input_precision="ieee") * scale
        if KIND > 0:
            s *= (tl.load(k_scales + place, mask=inside, other=0.0) * WIDEN_FACTOR[KIND])[None, :]
        if softcap is not None:
            s = cap_scores(s, softcap)
        if WINDOW > 0:  # read without a sign, a distance below 0 is beyond the window too
            seen = inside[None, :] & ((position[:, None] - key[None, :]).to(tl.uint32, bitcast=True) < WINDOW)
        else:
            seen = inside[None, :] & (key[None, :] <= position[:, None])
        s = tl.where(seen, s, float("-inf"))
        p, shrink, highest, total = softmax_step(s, highest, total, True)
        acc = acc * shrink[:, None]
        values = tl.load(
            v + place[:, None] * V_DIM + value_dim[None, :],
            mask=inside[:, None] & (value_dim < V_DIM)[None, :], other=0,
        )  # fmt: skip
        if KIND > 0:
            p *= (tl.load(v_scales + place, mask=inside, other=0.0) * WIDEN_FACTOR[KIND])[None, :]
        acc = tl.dot(p.to(query.dtype), widen_entries(values, KIND, query.dtype), acc, input_precision="ieee")
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = rows * HEADS + head
    out_mask = real[:, None] & (value_dim < V_DIM)[None, :]
    if not alone:
        mine = place * splits + split
        tl.store(parts + mine[:, None] * V_DIM + value_dim[None, :], acc, mask=out_mask)
        seen_mass = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(lse + mine, seen_mass, mask=real)
        used = tl.cdiv(span, chunk)
        group = (sequence * tl.num_programs(1) + tl.program_id(1)) * (tl.num_programs(0) // splits) + tile
        if not is_last_arrival(counters + group, used):
            return
        acc = combine_splits(parts, lse, place * splits, splits, used, value_dim, real, V_DIM, ROWS)
    tl.store(out + place[:, None] * V_DIM + value_dim[None, :], acc.to(out.dtype.element_ty), mask=out_mask)


def pad_width(dim: int, least: int = 16) -> int:
    """Width of the tile that holds `dim` entries: a power of two, at least the `least` that a product takes."""
    return max(least, triton.next_power_of_2(dim))


def count_splits(batch: Batch, launch: Launch, tiles: Tiles) -> int:
    """The number of splits that the longest sequence of a batch can need, for the size of the launch; in a captured
    step the longest sequence of any replay, since `max_seq_tokens` is then the bucket's.
    """
    chunk = max(tiles.chunk_tokens, launch.keys)
    return min(tiles.splits, max(1, math.ceil(batch.max_seq_tokens / chunk)))


def attention(view: Any, q: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `attention`, with one launch. Few query tokens (`view.queries`): each sequence's cache is split among
    programs, of which the last combines the splits. Many: one program per tile of tokens and head.
    """
    tiles: Tiles = view.prepared
    few = view.queries == "few"
    entries, scales, kind = cache_tensors(kv)
    tokens, heads, dim = q.shape
    group, v_dim = heads // view.kv.heads, view.kv.v_dim
    launch = (tiles.decode if few else tiles.prefill.for_width(max(dim, v_dim))).for_dtype(q.dtype)
    q = q if q.stride(-1) == 1 else q.contiguous()
    out = q.new_empty(tokens, heads, v_dim)
    tile_heads = group if few else 1
    rows = max(launch.rows, triton.next_power_of_2(tile_heads)) if few else launch.rows
    splits = count_splits(batch, launch, tiles) if few else 1
    scale, cap = view.scale * LOG2_E, view.softcap
    if cap is not None:
        scale, cap = 2.0 * scale / cap, cap * LOG2_E
    parts = lse = counters = out
    across = triton.cdiv(batch.max_query_tokens * tile_heads, rows)
    grid = (across * splits, heads // tile_heads, len(batch.seq_lens))
    if splits > 1:
        parts = q.new_empty(tokens, heads, splits, v_dim, dtype=torch.float32)
        lse = q.new_empty(tokens, heads, splits, dtype=torch.float32)
        counters = tiles.counters.of(q.device, across * grid[1] * grid[2])
    _attend[grid](
        q, entries[0], entries[1], scales[0], scales[1], out, parts, lse, counters,
        batch.block_tables, batch.query_start, batch.seq_lens, view.sinks,
        scale, cap, batch.block_tables.stride(0), q.stride(0), q.stride(1), splits,
        HEADS=heads, GROUP=group, TILE_HEADS=tile_heads, DIM=dim, V_DIM=v_dim, BLOCK_TOKENS=kv.block_tokens,
        WINDOW=view.kv.window or 0, KIND=kind, ROWS=rows, KEYS=launch.keys,
        BLOCK_D=pad_width(dim), BLOCK_V=pad_width(v_dim),
        CHUNK=max(tiles.chunk_tokens, launch.keys), SPLITS=tiles.splits, SPLIT=splits > 1,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
