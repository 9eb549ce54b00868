"""Latent attention of many query tokens with 8-bit products: int8 for scores, FP8 for values; by a pin only.

The keys' mean over the sequence is subtracted from the keys first: that changes all scores of a query by the same
constant, which softmax ignores, and removes most outliers. Keys have a scale per 128 tokens of a head and queries one
per 16 tokens, over rotated and other entries together; values have one per channel. Sums are promoted to float32 after
each tile of keys.

Source: SageAttention, arXiv 2410.02367, and SageAttention2, arXiv 2411.10958, at the sizes of latent attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import LOG2_E, pad_width, sequence_extent, softmax_step
from inferplane.kernels.triton.kv_write import with_contiguous_rows
from inferplane.kernels.triton.mla import expand_latents, gather_latents
from inferplane.kernels.triton.rowwise import (
    larger_or_nan,
    largest_magnitude,
    quant_scale,
    quantize_entries,
    round_half_even,
)
from inferplane.types import Batch, LayerKV

MIN_WIDTH = 32
"""Fewest entries that 8-bit products take."""
KEY_TILE = 128
"""Tokens of a head's keys that share a scale."""
QUERY_ROWS = tl.constexpr(16)
"""Tokens of a head's queries that share a scale."""


@triton.jit
def _key_means_and_value_peaks(
    kv, latents, means, peaks, lengths, before, kv_token,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program `(head, sequence)` stores the keys' mean `[NOPE + ROPE]` and the values' largest magnitudes `[VALUE]`."""
    sequence, head = tl.program_id(1), tl.program_id(0)
    length, first = tl.load(lengths + sequence), tl.load(before + sequence)
    dim, rope_dim, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    nope, rope = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_R], tl.float32)
    peak = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, length, TILE):
        token = start + tl.arange(0, TILE)
        inside = (token < length)[:, None]
        row = (first + token).to(tl.int64)[:, None]
        source = kv + row * kv_token + head * (NOPE + VALUE)
        low, high = inside & (dim < NOPE)[None, :], inside & (rope_dim < ROPE)[None, :]
        nope += tl.sum(tl.load(source + dim[None, :], mask=low, other=0.0).to(tl.float32), 0)
        shared = latents + row * (LATENT + ROPE) + LATENT + rope_dim[None, :]
        rope += tl.sum(tl.load(shared, mask=high, other=0.0).to(tl.float32), 0)
        real = inside & (channel < VALUE)[None, :]
        value = tl.load(source + NOPE + channel[None, :], mask=real, other=0.0).to(tl.float32)
        peak = larger_or_nan(peak, largest_magnitude(value, 0))
    place = (sequence * HEADS + head).to(tl.int64)
    count = tl.maximum(length, 1).to(tl.float32)
    tl.store(means + place * (NOPE + ROPE) + dim, nope / count, mask=dim < NOPE)
    tl.store(means + place * (NOPE + ROPE) + NOPE + rope_dim, rope / count, mask=rope_dim < ROPE)
    tl.store(peaks + place * VALUE + channel, peak, mask=channel < VALUE)


@triton.jit
def _quantize_keys_and_values(
    kv, latents, means, peaks, keys, key_scales, values, lengths, before, kv_token, tokens, tiles,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, LATENT: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program `(tile of keys, head, sequence)` quantizes keys to int8 and values to FP8.

    Values are transposed, so that a channel's tokens are contiguous.
    """
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, first = tl.load(lengths + sequence), tl.load(before + sequence)
    if tile * TILE >= length:
        return
    token = tile * TILE + tl.arange(0, TILE)
    inside = (token < length)[:, None]
    row = (first + token).to(tl.int64)[:, None]
    place = (sequence * HEADS + head).to(tl.int64)
    dim, rope_dim, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    source = kv + row * kv_token + head * (NOPE + VALUE)
    low, high = inside & (dim < NOPE)[None, :], inside & (rope_dim < ROPE)[None, :]
    nope = tl.load(source + dim[None, :], mask=low, other=0.0).to(tl.float32)
    nope -= tl.load(means + place * (NOPE + ROPE) + dim, mask=dim < NOPE, other=0.0)[None, :]
    shared = latents + row * (LATENT + ROPE) + LATENT + rope_dim[None, :]
    rope = tl.load(shared, mask=high, other=0.0).to(tl.float32)
    rope -= tl.load(means + place * (NOPE + ROPE) + NOPE + rope_dim, mask=rope_dim < ROPE, other=0.0)[None, :]
    nope, rope = tl.where(low, nope, 0.0), tl.where(high, rope, 0.0)
    amax = larger_or_nan(largest_magnitude(nope, 1), largest_magnitude(rope, 1))
    scale = quant_scale(largest_magnitude(amax, 0), 127.0, False)
    target = keys + (row * HEADS + head) * (NOPE + ROPE)
    tl.store(target + dim[None, :], quantize_entries(nope, scale, False), mask=low)
    tl.store(target + NOPE + rope_dim[None, :], quantize_entries(rope, scale, False), mask=high)
    tl.store(key_scales + place * tiles + tile, scale)
    real = inside & (channel < VALUE)[None, :]
    value = tl.load(source + NOPE + channel[None, :], mask=real, other=0.0).to(tl.float32)
    peak = tl.load(peaks + place * VALUE + channel, mask=channel < VALUE, other=0.0)
    quantized = quantize_entries(value, quant_scale(peak, 448.0, False)[None, :], True)
    tl.store(values + (head * VALUE + channel).to(tl.int64)[None, :] * tokens + row, quantized, mask=real)


@triton.jit
def _attend_8bit(
    q, q_rope, keys, key_scales, values, peaks, out, starts, lengths, before, scale, tokens, tiles,
    q_token, q_head, rope_token, rope_head, out_token, out_head, first_head,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program `(tile, head, sequence)` quantizes ROWS queries to int8, attends to quantized keys and values, and stores
    the result of these queries in `out`.
    """
    sequence, head = tl.program_id(2), tl.program_id(1)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    first_token = tl.program_id(0) * ROWS
    if first_token >= count:
        return
    token = first_token + tl.arange(0, ROWS)
    real = (token < count)[:, None]
    position = length - count + token
    dim, rope_dim, channel = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    within = tl.arange(0, KEYS)
    rows = (begin + token).to(tl.int64)[:, None]
    pointers = q + rows * q_token + (first_head + head) * q_head + dim[None, :]
    query = tl.load(pointers, mask=real & (dim < NOPE)[None, :], other=0.0).to(tl.float32)
    pointers = q_rope + rows * rope_token + (first_head + head) * rope_head + rope_dim[None, :]
    query_rope = tl.load(pointers, mask=real & (rope_dim < ROPE)[None, :], other=0.0).to(tl.float32)
    amax = larger_or_nan(largest_magnitude(query, 1), largest_magnitude(query_rope, 1))
    amax = largest_magnitude(tl.reshape(amax, (ROWS // QUERY_ROWS, QUERY_ROWS)), 1)
    both = tl.broadcast_to(quant_scale(amax, 127.0, False)[:, None], (ROWS // QUERY_ROWS, QUERY_ROWS))
    query_scale = tl.reshape(both, (ROWS,))
    query_8 = round_half_even(tl.div_rn(query, query_scale[:, None])).to(tl.int8)
    query_rope_8 = round_half_even(tl.div_rn(query_rope, query_scale[:, None])).to(tl.int8)
    query_scale *= scale
    place = (sequence * HEADS + head).to(tl.int64)
    first = tl.load(before + sequence).to(tl.int64)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for start in range(0, length - count + tl.minimum(first_token + ROWS, count), KEYS):
        key = start + within
        inside = key < length
        source = keys + ((first + key)[None, :] * HEADS + head) * (NOPE + ROPE)
        seen_nope, seen_rope = inside[None, :] & (dim < NOPE)[:, None], inside[None, :] & (rope_dim < ROPE)[:, None]
        s = tl.dot(query_8, tl.load(source + dim[:, None], mask=seen_nope, other=0), out_dtype=tl.int32)
        key_rope = tl.load(source + NOPE + rope_dim[:, None], mask=seen_rope, other=0)
        s = tl.dot(query_rope_8, key_rope, s, out_dtype=tl.int32)
        key_scale = tl.load(key_scales + place * tiles + start // TILE)
        s = s.to(tl.float32) * (query_scale * key_scale)[:, None]
        s = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), s, float("-inf"))
        p, shrink, highest, total = softmax_step(s, highest, total, False)  # every row sees the first key
        source = values + (head * VALUE + channel).to(tl.int64)[None, :] * tokens + (first + key)[:, None]
        value = tl.load(source, mask=inside[:, None] & (channel < VALUE)[None, :], other=0)
        weight = (p * 448.0).to(tl.float8e4nv)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight, value.to(tl.float8e4nv, bitcast=True), acc, max_num_imprecise_acc=KEYS)
    peak = tl.load(peaks + place * VALUE + channel, mask=channel < VALUE, other=0.0)
    acc = acc * (quant_scale(peak, 448.0, False) / 448.0)[None, :] / total[:, None]
    target = out + rows * out_token + (first_head + head) * out_head + channel[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real & (channel < VALUE)[None, :])


def mla_expanded(view: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    """The op `mla_expanded` with 8-bit products, less exact than the plain one: gather, expand, quantize and attend, as
    many heads at a time as `EXPANDED_BYTES` hold.
    """
    tiles, d = view.prepared, view.dims
    launch = replace(tiles.prefill, rows=min(64, tiles.prefill.rows))  # queries are held in float32 and in int8
    q_nope, q_rope = with_contiguous_rows(q_nope), with_contiguous_rows(q_rope)
    latents, before = gather_latents(view, q_nope, batch, kv)
    tokens, sequences = latents.shape[0], len(batch.seq_lens)
    key_tiles = triton.cdiv(max(batch.lens().seq_lens), KEY_TILE)
    out = q_nope.new_empty(q_nope.shape[0], d.heads, d.value)
    sizes = {"NOPE": d.nope, "ROPE": d.rope, "VALUE": d.value, "TILE": KEY_TILE}
    entries = {"BLOCK_N": d.nope, "BLOCK_R": d.rope, "BLOCK_V": d.value}
    blocks = {name: pad_width(count, MIN_WIDTH) for name, count in entries.items()}
    for head, n, expanded in expand_latents(view, latents):
        means, peaks, scales = (
            expanded.new_empty(sequences, n, size, dtype=torch.float32)
            for size in (d.nope + d.rope, d.value, key_tiles)
        )
        keys = expanded.new_empty(tokens, n, d.nope + d.rope, dtype=torch.int8)
        values = expanded.new_empty(n, d.value, tokens, dtype=torch.uint8)
        made, at = (expanded, latents, means, peaks), (batch.seq_lens, before)
        _key_means_and_value_peaks[(n, sequences)](
            *made, *at, expanded.stride(0), HEADS=n, LATENT=d.latent, **sizes, **blocks, num_warps=8
        )
        _quantize_keys_and_values[(key_tiles, n, sequences)](
            *made, keys, scales, values, *at, expanded.stride(0), tokens, key_tiles,
            HEADS=n, LATENT=d.latent, **sizes, **blocks, num_warps=8,
        )  # fmt: skip
        _attend_8bit[(triton.cdiv(batch.max_query_tokens, launch.rows), n, sequences)](
            q_nope, q_rope, keys, scales, values, peaks, out, batch.query_start, *at, view.scale * LOG2_E, tokens,
            key_tiles, q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), out.stride(0),
            out.stride(1), head, HEADS=n, ROWS=launch.rows, KEYS=launch.keys, **sizes, **blocks,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    return out
