"""The judge of kernels over states of sequences: right ones pass, each way of being wrong with them is found."""

from __future__ import annotations

import re

import pytest
import torch

from inferplane.binding import run_case
from inferplane.binding.case import batch_in
from inferplane.binding.case_states import poison_states, states_in
from inferplane.ops import DecoderStack, Draw, RecurrentBlock
from inferplane.types import StateRows
from tests.unit.binding.test_check import bench
from tests.unit.ops.test_contract import draw
from tests.unit.support.small import BF16, F32, kernel

STACKS = [s for s in DecoderStack.samples() if s.op.state_requests()]
CASES = [pytest.param(s, id=f"{s.op.name}-{s.label}") for s in (*RecurrentBlock.samples(), *STACKS)]

CHILDREN_BOUND = {"none": ("none",)}
"""What makes a view's children callable: the kernel inlines some, but none of these."""


def right(view, x, batch, kv):
    rows = batch.list_states()
    y, *states = view.mixer(x, batch, *kv.read(rows))
    kv.write(rows, *states)
    return y


def in_place(view, x, batch, kv):
    """It stores the states where it read them, as a kernel with one slot a sequence does."""
    rows = batch.list_states()
    y, *states = view.mixer(x, batch, *kv.read(rows))
    kv.write(StateRows(rows.read, rows.read), *states)
    return y


def elsewhere(view, x, batch, kv):
    rows = batch.list_states()
    y, *states = view.mixer(x, batch, *kv.read(rows))
    kv.write(StateRows(rows.read, rows.write.flip(0)), *states)
    return y


def one_slot_more(view, x, batch, kv):
    y = right(view, x, batch, kv)
    rows = batch.list_states()
    spare = next(i for i in range(1, kv.slots) if i not in {*rows.read.tolist(), *rows.write.tolist()})
    kv.tensors[-1][spare] = 0
    return y


def not_stored(view, x, batch, kv):
    return view.mixer(x, batch, *kv.read(batch.list_states()))[0]


def rounded(view, x, batch, kv):
    """It stores the last state in 8 bits."""
    y = right(view, x, batch, kv)
    kv.tensors[-1].copy_(kv.tensors[-1].to(torch.float8_e4m3fn).to(kv.tensors[-1].dtype))
    return y


def stale_at_start(view, x, batch, kv):
    """It reads what an earlier owner of the slot left, also where a sequence begins."""
    rows = batch.list_states()
    before = kv.read(rows)
    y, *states = view.mixer(x, batch, *before)
    begins = batch.seq_lens == batch.query_start[1:] - batch.query_start[:-1]
    states[-1] = states[-1] + torch.where(begins.view(-1, *[1] * (states[-1].ndim - 1)), before[-1], 0)
    kv.write(rows, *states)
    return y


FAULTS = {
    in_place: "it changed state slot",
    elsewhere: "in the states",
    one_slot_more: "it changed state slot",
    not_stored: "in the states",
    rounded: "it changed state slot|in the states",
    stale_at_start: "in the states",
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sample", CASES)
def test_bodies_pass_on_fresh_memory(sample, dtype):
    outcome = run_case(None, sample, bench(dtype), seed=5, poisoned=True)
    assert outcome.passed, outcome


@pytest.mark.parametrize("sample", RecurrentBlock.samples(), ids=lambda s: s.label)
def test_a_right_kernel_passes(sample):
    judged = kernel("recurrent_block", target=right, inlines=CHILDREN_BOUND)
    assert run_case(judged, sample, bench(), padded=True).passed
    assert run_case(judged, sample, bench(), poisoned=True).passed


@pytest.mark.parametrize("sample", RecurrentBlock.samples(), ids=lambda s: s.label)
@pytest.mark.parametrize("target", FAULTS, ids=lambda target: target.__name__)
def test_a_wrong_kernel_is_found(target, sample):
    judged = kernel("recurrent_block", target=target, inlines=CHILDREN_BOUND)
    outcome = run_case(judged, sample, bench(), poisoned=target is stale_at_start)
    assert not outcome.passed and re.search(FAULTS[target], outcome.detail), outcome


@pytest.mark.parametrize("sample", CASES)
def test_only_states_that_a_step_reads_are_finite(sample):
    args = sample.inputs(draw())
    poison_states(args)
    batch = batch_in(args)
    begins = [n == b - a for n, a, b in zip(batch.lens().seq_lens, batch.query_start, batch.query_start[1:])]
    assert not all(begins) and (any(begins) or sample.op.name == "decoder_stack")
    for cache in states_in(args):
        for tensor in cache.tensors:
            finite = torch.isfinite(tensor).flatten(1).all(1).nonzero()[:, 0].tolist()
            read = [slot for slot, new in zip(batch.list_states().read.tolist(), begins) if not new]
            assert finite == sorted(read)


def test_slots_are_drawn_apart_and_one_pair_is_spare():
    slots = [slot for pair in Draw(1, F32).state_slots(4) for slot in pair]
    assert len({*slots}) == 8 and {*slots} < {*range(1, 11)}
