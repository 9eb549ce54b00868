"""Scores of an indexer over paged keys, divided over the keys so that one query fills the device; rotated index keys.

A program takes a few tokens of a sequence and some tiles of keys. A tile of keys is read once, dequantized as reading
the cache gives it, and multiplied by all heads' queries of one token after the other. No score depends on how keys and
tokens are divided.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.attention import pad_width, sequence_extent, slots_of_keys
from inferplane.kernels.triton.kv_write import cache_tensors
from inferplane.kernels.triton.mla import load_latents
from inferplane.kernels.triton.tiles import Tiles
from inferplane.types import Batch, LayerKV

ROTATED_ROWS = 16
"""Rows of a program that rotates."""


@triton.jit(do_not_specialize=("first_row", "last_row", "queries", "splits"))
def _index_scores(
    q, w, entries, scales, out, tables, starts, lengths,
    q_token, q_head, w_token, table_outer, first_row, last_row, stride, queries, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KIND: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Program `(split, tile, sequence)` stores the scores of `queries` tokens with every `splits`-th tile of KEYS keys.

    Of the step's rows, those from `first_row` up to `last_row` have scores in `out`, `stride` numbers a row. Tokens
    that choose all that they see are not scored.
    """
    sequence = tl.program_id(2)
    length, begin, count = sequence_extent(starts, lengths, sequence)
    token = tl.maximum(first_row - begin, 0) + tl.program_id(1) * queries
    end = tl.minimum(tl.minimum(token + queries, count), last_row - begin)
    seen = length - count + end  # by the last of the tokens
    if (length == 0) | (token >= end) | (seen <= TOP):
        return
    head, entry, within = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_E), tl.arange(0, KEYS)
    table = tables + sequence.to(tl.int64) * table_outer
    loaded = (entry < DIM)[:, None] & (head < HEADS)[None, :]
    for start in range(tl.program_id(0) * KEYS, seen, splits * KEYS):
        key = start + within
        inside = key < seen
        slot = slots_of_keys(table, key, inside, BLOCK_TOKENS)
        keys = load_latents(entries, scales, slot, inside, 0, DIM, BLOCK_E, DIM, 1, KIND, q.dtype.element_ty)
        for i in range(token, end):
            row = (begin + i).to(tl.int64)
            source = q + row * q_token + head[None, :] * q_head + entry[:, None]
            s = tl.dot(keys, tl.load(source, mask=loaded, other=0.0), input_precision="ieee")
            weight = tl.load(w + row * w_token + head, mask=head < HEADS, other=0.0)
            s = tl.where(s < 0.0, 0.0, s) * weight[None, :]  # NaN stays
            if HEADS < BLOCK_J:
                s = tl.where((head < HEADS)[None, :], s, 0.0)
            tl.store(out + (row - first_row) * stride + key, tl.sum(s, 1), mask=inside)


@triton.jit(do_not_specialize=("rows",))
def _rotate(x, out, rows, factor, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Program `tile` stores ROWS rows of BLOCK entries times Sylvester's Hadamard matrix and `factor`."""
    row, entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    place, inside = row[:, None] * BLOCK + entry[None, :], (row < rows)[:, None]
    value = tl.load(x + place, mask=inside, other=0.0)
    odd = entry[:, None] & entry[None, :]  # an entry's sign is the parity of the bits that its row and column share
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    sign = (1 - 2 * (odd & 1)).to(tl.float32).to(value.dtype)
    y = tl.dot(value, sign, input_precision="ieee") * factor
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def rotate_index_keys(view: Any, x: torch.Tensor) -> torch.Tensor:
    """The op `rotate_index_keys`: entries times signs, which are exact in every dtype, summed up in float32 and scaled
    then. Blocks have 16 to 256 entries.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    rows = x.numel() // view.block
    if rows:
        _rotate[(triton.cdiv(rows, ROTATED_ROWS),)](
            x, out, rows, view.block**-0.5, BLOCK=view.block, ROWS=ROTATED_ROWS, num_warps=8
        )
    return out


def score_keys(
    view: Any, q: torch.Tensor, w: torch.Tensor, batch: Batch, kv: LayerKV, rows: range, stride: int
) -> torch.Tensor:
    """Index scores of some rows of a step with all keys that they see, where these are more than are chosen.

    Args:
        view: of an `index_select` kernel with `Tiles`.
        q: `[T, J, E]` with contiguous heads. w: float32 `[T, J]`, contiguous rows.
        batch: the step. kv: the layer's index keys.
        rows: those of the step that are scored.
        stride: numbers of a row of the result, at least as many as the longest sequence has tokens.

    Returns:
        float32 `[rows, stride]`; only scores of positions that a row sees are set, and those of later rows' positions.
    """
    tiles: Tiles = view.prepared
    d, launch = view.dims, tiles.index.for_dtype(q.dtype)
    entries, scales, kind = cache_tensors(kv)
    out = torch.empty(len(rows), stride, dtype=torch.float32, device=q.device)
    most = min(batch.max_query_tokens, len(rows))
    queries = min(most, launch.rows)
    across, sequences = triton.cdiv(most, queries), len(batch.seq_lens)
    used = min(across * sequences, len(rows) // queries + sequences)
    splits = max(1, min(2 * tiles.programs // used, triton.cdiv(stride, launch.keys)))
    _index_scores[(splits, across, sequences)](
        q, w, entries[0], scales[0], out, batch.block_tables, batch.query_start, batch.seq_lens,
        q.stride(0), q.stride(1), w.stride(0), batch.block_tables.stride(0), rows.start, rows.stop, stride, queries,
        splits,
        HEADS=d.heads, DIM=d.dim, TOP=d.top, BLOCK_TOKENS=kv.block_tokens, KIND=kind, KEYS=launch.keys,
        BLOCK_J=pad_width(d.heads), BLOCK_E=pad_width(d.dim), num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
