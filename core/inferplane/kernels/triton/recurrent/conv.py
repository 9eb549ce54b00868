"""The causal convolution of recurrent layers in a decode step, in float32 whatever comes in."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from inferplane.kernels.triton.activations import activate
from inferplane.kernels.triton.recurrent.sequences import find_rows
from inferplane.types import Batch

CHANNELS = 256
"""Channels of a program: reads of a row are that long, and a model's few thousand channels fill the device."""


@triton.jit
def _causal_conv1d(
    x, state, weight, bias, out, after, starts, slots, lengths, x_outer, channels,
    SIZE: tl.constexpr, SILU: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program `(channels, sequence)`: results and new states of BLOCK channels of a sequence.

    An input before the sequence's rows of this step is in `state` `[B, channels, SIZE - 1]`, the oldest first.
    """
    sequence = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    begin, count, is_read = find_rows(starts, slots, lengths, sequence, MOST)
    TAIL: tl.constexpr = SIZE - 1
    stored = (sequence.to(tl.int64) * channels + channel) * TAIL
    known = inside & (channel * 0 + is_read > 0)
    for t in range(count):
        acc = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(SIZE):
            place = t - TAIL + i + channel * 0  # a row of this step, or before them
            new = tl.load(x + (begin + place) * x_outer + channel, mask=inside & (place >= 0), other=0.0)
            old = tl.load(state + stored + TAIL + place, mask=known & (place < 0), other=0.0)
            value = tl.where(place < 0, old, new).to(tl.float32)
            acc += value * tl.load(weight + channel * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            acc += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            acc = activate(acc, 1)
        tl.store(out + (begin + t) * channels + channel, acc.to(out.dtype.element_ty), mask=inside)
    for i in tl.static_range(TAIL):
        place = count - TAIL + i + channel * 0
        new = tl.load(x + (begin + place) * x_outer + channel, mask=inside & (place >= 0), other=0.0)
        old = tl.load(state + stored + TAIL + place, mask=known & (place < 0), other=0.0)
        tl.store(after + stored + i, tl.where(place < 0, old, new), mask=inside)


def causal_conv1d(view: Any, x: torch.Tensor, batch: Batch, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `causal_conv1d` in a decode step, by one launch: `[T, C]`, and the states `[B, C, k - 1]` after it."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    state = state.contiguous()
    tokens, channels = x.shape
    sequences, size = state.shape[0], view.weight.shape[1]
    out, after = x.new_empty(tokens, channels), torch.empty_like(state)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    if sequences:
        _causal_conv1d[(triton.cdiv(channels, block), sequences)](
            x, state, view.weight, view.bias, out, after, batch.query_start, batch.slots, batch.seq_lens, x.stride(0),
            channels, SIZE=size, SILU=view.silu, MOST=triton.next_power_of_2(batch.max_query_tokens), BLOCK=block,
            num_warps=4,
        )  # fmt: skip
    return out, after
