"""The states of recurrent layers: which slots a step reads and writes, and what a layer stores there."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding.case import pad
from inferplane.errors import UsageError
from inferplane.ops import Draw
from inferplane.ops.oracle import to_host
from inferplane.types import StateCache, StateRequest, StateSlots, StateTensor
from inferplane.types.batch import Query, make_batch

REQUEST = StateRequest((StateTensor((3, 2), None), StateTensor((4,))))
SLOTS = [StateSlots(1, 2), StateSlots(4, 3), StateSlots(5, 6)]


def make(counts, slots=SLOTS):
    queries = [Query([1] * n, 4, [2 * i, 2 * i + 1], None, (), s) for i, (n, s) in enumerate(zip(counts, slots))]
    return make_batch(queries, block_tokens=16, device="cpu")


def test_a_step_has_the_slots_of_its_sequences_in_each_part():
    batch = make([1, 2, 12])
    assert [slots.tolist() for slots in batch.list_states()] == [[1, 4, 5], [2, 3, 6]]
    assert batch.few is not None and batch.many is not None
    assert [slots.tolist() for slots in batch.few.list_states()] == [[1, 4], [2, 3]]
    assert [slots.tolist() for slots in batch.many.list_states()] == [[5], [6]]
    assert all(slots.dtype == torch.int64 for slots in batch.list_states())


def test_what_a_step_reads_stays_until_the_next_one():
    batch, cache = make([1, 1, 12]), StateCache(REQUEST, 7, torch.bfloat16, "cpu")
    for i, tensor in enumerate(cache.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + i)
    before = [tensor.clone() for tensor in cache.tensors]
    states = cache.read(batch.list_states())
    assert [(tuple(s.shape), s.dtype) for s in states] == [((3, 3, 2), torch.bfloat16), ((3, 4), torch.float32)]
    cache.write(batch.list_states(), *(s + 64 for s in states))
    for old, new, state in zip(before, cache.tensors, states):
        assert torch.equal(new[[2, 3, 6]], state + 64)
        assert torch.equal(new[[0, 1, 4, 5]], old[[0, 1, 4, 5]])
    assert all(torch.equal(one, other) for one, other in zip(cache.read(batch.list_states()), states))


def test_bytes_of_a_slot():
    assert REQUEST.count_bytes(torch.bfloat16) == 6 * 2 + 4 * 4
    assert REQUEST.count_bytes(torch.float32) == 6 * 4 + 4 * 4


def test_padded_sequences_have_the_slot_of_padding():
    batch = make([1, 1], SLOTS[:2])
    (padded,) = pad((batch,), Draw(0, torch.float32, "cpu"), lens_known=False)
    assert [slots.tolist() for slots in padded.list_states()] == [[1, 4, 0, 0], [2, 3, 0, 0]]
    assert [slots.tolist() for slots in to_host(padded).list_states()] == [[1, 4, 0, 0], [2, 3, 0, 0]]
    cache = StateCache(REQUEST, 7, torch.float32, "cpu")
    cache.write(padded.list_states(), *(torch.ones(4, *tensor.shape) for tensor in REQUEST.tensors))
    assert [row.any().item() for row in cache.tensors[1]] == [True, False, True, True, False, False, False]


def test_slots_are_for_all_sequences_or_for_none():
    with pytest.raises(UsageError, match="1 of 2 sequences"):
        make([1, 1], [SLOTS[0], None])
    with pytest.raises(UsageError, match="no slots for them"):
        make([1, 1], [None, None]).list_states()
