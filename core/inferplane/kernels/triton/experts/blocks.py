"""Assigns pairs to blocks of one expert each, on the device, from ids alone. `moe.py` says what these are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane.errors import KernelError


@triton.jit
def _assign_blocks(
    ids, slots, owners, pairs, blocks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e assigns the pairs of expert e to slots; one more program marks the blocks that no expert needs."""
    me, bin, within = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, CHUNK)
    count = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        count += tl.histogram(tl.where(expert < 0, EXPERTS, expert), BINS)
    need = tl.where(bin < EXPERTS, tl.cdiv(count, ROWS), 0)
    first = tl.sum(tl.where(bin < me, need, 0), 0)
    mine = tl.sum(tl.where(bin == me, need, 0), 0)
    seen = 0
    if me < EXPERTS:
        for start in range(0, pairs, CHUNK):
            expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
            here = (expert == me).to(tl.int32)
            tl.store(slots + first * ROWS + seen + tl.cumsum(here, 0) - 1, start + within, mask=here > 0)
            seen += tl.sum(here, 0)
        row = seen + tl.arange(0, ROWS)
        tl.store(slots + first * ROWS + row, tl.full([ROWS], 0, tl.int32) + pairs, mask=row < mine * ROWS)
        last = first + mine
    else:
        last = blocks
    for start in range(first, last, CHUNK):
        owner = tl.where(me < EXPERTS, me, -1)
        tl.store(owners + start + within, tl.full([CHUNK], 0, tl.int32) + owner, mask=start + within < last)


@triton.jit
def assign_one_block(
    ids, block, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """What `_assign_blocks` finds, for one block: its expert or -1, and the pair in each of its rows."""
    within, bin, row = tl.arange(0, CHUNK), tl.arange(0, BINS), tl.arange(0, ROWS)
    count = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        count += tl.histogram(tl.where(expert < 0, EXPERTS, expert), BINS)
    need = tl.where(bin < EXPERTS, tl.cdiv(count, ROWS), 0)
    behind = tl.cumsum(need, 0)
    owner = tl.sum((behind <= block).to(tl.int32), 0)
    seen = (tl.sum(tl.where(bin == owner, behind - need, 0), 0) - block) * ROWS
    pair = tl.zeros([ROWS], tl.int32) + pairs
    for start in range(0, pairs, CHUNK):
        expert = tl.load(ids + start + within, mask=start + within < pairs, other=-1).to(tl.int32)
        here = expert == owner
        rank = seen + tl.cumsum(here.to(tl.int32), 0) - 1
        mine = here[None, :] & (rank[None, :] == row[:, None])
        pair += tl.sum(tl.where(mine, (start - pairs) + within[None, :], 0), 1)
        seen += tl.sum(here.to(tl.int32), 0)
    return tl.where(owner < EXPERTS, owner, -1), pair


def allocate_blocks(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors, not initialized, for slots and owners of the shapes that `assign_blocks` returns; `multiply_grouped`
    fills them in with `assign_from`.
    """
    blocks = triton.cdiv(ids.numel() + min(experts, ids.numel()) * (rows - 1), rows)
    slots = torch.empty(blocks * rows, device=ids.device, dtype=torch.int32)
    return slots, torch.empty(blocks, device=ids.device, dtype=torch.int32)


def assign_blocks(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert, each expert's rows filled up to whole blocks: the contiguous form.

    Args:
        ids: chosen experts `[T, k]`, -1 for one on another rank.
        experts: number of experts.
        rows: rows of a block.

    Returns:
        int32 slots `[blocks * rows]`, the pair `t k + j` in each or `T k` where there is none, and owners `[blocks]`,
        each block's expert or -1. Slots of blocks without an owner are not written.
    """
    slots, owners = allocate_blocks(ids, experts, rows)
    pairs = ids.numel()
    _assign_blocks[(experts + 1,)](
        ids.contiguous(), slots, owners, pairs, len(owners),
        EXPERTS=experts, BINS=triton.next_power_of_2(experts + 1), ROWS=rows,
        CHUNK=max(64, min(1024, triton.next_power_of_2(pairs))), num_warps=4,
    )  # fmt: skip
    return slots, owners


def assign_masked_blocks(counts: torch.Tensor, capacity: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and owners of the masked form: every expert has `capacity` rows, of which the first `counts` are used.

    Args:
        counts: int32 `[E]`, on the device.
        capacity: a multiple of `rows`.
        rows: of a block.

    Raises:
        KernelError: a block would have rows of two experts.
    """
    if capacity % rows:
        raise KernelError(f"{capacity} rows an expert in blocks of {rows}.", remedy="make it a multiple of a block")
    place = torch.arange(capacity, device=counts.device, dtype=torch.int32)
    expert = torch.arange(len(counts), device=counts.device, dtype=torch.int32)[:, None]
    size = len(counts) * capacity
    slots = torch.where(place < counts[:, None], expert * capacity + place, size).int().flatten()
    owners = torch.where(place[::rows] < counts[:, None], expert, -1).int().flatten()
    return slots, owners
