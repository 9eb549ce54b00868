"""Sequences with states: however a sequence is cut, mixed, preempted or repeated, its states are those of one pass."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.kvcache import BlockAllocator, StatePool, root_hash
from inferplane.ops.recurrent.ragged import run_ragged
from inferplane.types import StateCache, StateRequest, StateTensor
from inferplane.types.batch import make_batch

BLOCK, MODULUS = 4, 1009


def advance(state, x):
    """One token of a recurrence whose state depends on every token before, and on their order; exact in float32."""
    after = (state * 31 + x + 1) % MODULUS
    return after, after


def advance_all(state, before, x):
    """The same over the rows of one sequence."""
    out = []
    for row in x:
        y, state = advance(state, row)
        out.append(y)
    return torch.stack(out), state


class Model:
    """A layer whose state is a number, in a cache full of NaN: what is read before it was written shows."""

    def __init__(self, slots):
        self.cache = StateCache(StateRequest((StateTensor((1,)),)), slots, torch.float32, "cpu")
        self.cache.tensors[0].fill_(torch.nan)

    def __call__(self, batch):
        (state,) = self.cache.read(batch.list_states())
        y, state = run_ragged(batch, (batch.ids.float()[:, None],), state, advance, advance_all)
        self.cache.write(batch.list_states(), state)
        return y[:, 0]


def generate_alone(prompt, count):
    """The tokens of a sequence in one pass."""
    state, generated = torch.zeros(1), []
    for token in prompt:
        state, _ = advance(state, token)
    for _ in range(count):
        generated.append(int(state))
        state, _ = advance(state, generated[-1])
    return generated


def check_slots(s):
    """Every running sequence has slots of its own, no waiting one has any, and none is lost."""
    held = [slot for r in s.running for slot in r.state]
    assert len(set(held)) == len(held) == 2 * len(s.running) and 0 not in held
    assert all(r.state is None for r in s.waiting)
    assert s.states.available + len(s.running) == s.states.total


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(0, 2), st.integers(0, 40)),
        min_size=1,
        max_size=10,
    ),
    blocks=st.integers(9, 18),
    batch=st.integers(1, 5),
    slots=st.integers(1, 5),
    tokens=st.integers(1, 24),
    repeats=st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_states_are_those_of_one_pass(requests, blocks, batch, slots, tokens, repeats):
    s = Scheduler(BlockAllocator(blocks), BLOCK, Limits(batch, tokens, 40), root_hash, states=StatePool(slots))
    model = Model(s.states.slots)
    live, leaving = [], {}
    for i, (length, most, priority, patience) in enumerate(requests):
        live.append(Request(i, [t % 5 for t in range(length)], SamplingParams(max_tokens=most), priority=priority))
        leaving[i] = patience
        s.add(live[-1])
    for now in range(60 + sum(n + 2 * most for n, most, *_ in requests) * 2):
        for r in live:
            if r.request_id % 3 == 2 and leaving[r.request_id] == now and r.finish_reason is None:
                r.finish_reason = "abort"
                s.remove(r)
        chosen = s.schedule()
        check_slots(s)
        if not chosen:
            break
        for r in s.running:
            r.drafts = [1, 2]
        step = make_batch(s.queries(chosen), block_tokens=BLOCK, device="cpu")
        results = [model(step) for _ in range(1 + repeats[now % len(repeats)])]  # as after an interrupt
        assert all(torch.equal(results[0], again) for again in results)
        for c, stop in zip(chosen, step.lens().query_start[1:]):
            assert not c.drafts
            if c.samples_next:
                row = stop - 1 if step.logit_rows is None else int(step.logit_rows[step.logit_rows < stop].max())
                c.request.generated.append(int(results[0][row]))
            s.commit(c)
            if len(c.request.generated) == c.request.params.max_tokens:
                c.request.finish_reason = "length"
                s.remove(c.request)
        check_slots(s)
    assert not s.running and not s.waiting
    assert s.states.available == slots and s.allocator.used == 0
    for r in live:
        assert r.generated == generate_alone(r.prompt, len(r.generated)) and r.cached_tokens == 0
        assert r.finish_reason == "abort" or len(r.generated) == r.params.max_tokens


def test_a_sequence_without_slots_waits_and_takes_no_blocks():
    s = Scheduler(BlockAllocator(12), BLOCK, Limits(4, 16, 40), states=StatePool(1))
    for i in range(2):
        s.add(Request(i, [1, 2, 3], SamplingParams(max_tokens=2)))
    chosen = s.schedule()
    assert [c.request.request_id for c in chosen] == [0] and s.allocator.used == 1
    s.preempt(chosen[0].request)
    check_slots(s)
    assert s.allocator.used == 0 and s.states.available == 1
