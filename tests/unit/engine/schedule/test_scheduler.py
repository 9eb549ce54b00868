"""The scheduler as a state machine: limits hold, no block is lost, and everybody gets to the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.runner.kv_cache import CacheMemory
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.errors import CapacityError
from inferplane.kvcache import BlockAllocator, BlockPools, PoolShape, root_hash
from inferplane.types import FEW_TOKENS
from inferplane.types.batch import make_batch

BLOCK = 4


def scheduler(blocks=12, batch=4, tokens=16, length=40, reuse=True):
    root = (lambda tenant: root_hash(tenant)) if reuse else None
    return Scheduler(BlockPools([BlockAllocator(blocks)]), BLOCK, Limits(batch, tokens, length), root)


def request(i, prompt, max_tokens, priority=0):
    return Request(i, prompt, SamplingParams(max_tokens=max_tokens), priority=priority)


def check(s):
    a = s.pools
    assert a.free + a.cached + a.used == a.total
    held = {b for r in s.running for table in r.tables for b in table.held}
    assert len(held) == a.used and not any(r.tables for r in s.waiting)
    assert len(s.running) <= s.limits.max_num_seqs


def step(s):
    """One step as the engine makes it; returns who ended."""
    chosen = s.schedule()
    check(s)
    assert bool(chosen) == bool(s.running or s.waiting)
    assert sum(c.rows for c in chosen) <= s.limits.max_num_batched_tokens
    assert len({c.request.request_id for c in chosen}) == len(chosen)
    if chosen:  # few rows first, blocks enough: the batch builder checks both
        queries = s.queries(chosen)
        batch = make_batch(queries, block_tokens=BLOCK, device="cpu")
        assert len(set(batch.slots.tolist())) == batch.tokens  # nobody writes where another one does
        for c, q in zip(chosen, queries):
            assert q.ids == [*c.request.prompt, *c.request.generated][q.before : q.before + c.count]
            assert (q.logits == 1) == c.samples_next == (q.before + c.count == c.request.tokens)
        assert [c.rows > FEW_TOKENS for c in chosen] == sorted(c.rows > FEW_TOKENS for c in chosen)
    ended = []
    for c in chosen:
        if c.samples_next:
            c.request.generated.append(c.request.tokens % 7)
        s.commit(c)
        if len(c.request.generated) == c.request.params.max_tokens:
            c.request.finish_reason = "length"
            s.remove(c.request)
            ended.append(c.request)
    check(s)
    return ended


REQUESTS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 16), st.integers(0, 2), st.integers(0, 3), st.integers(0, 40)),
    min_size=1,
    max_size=14,
)


@given(
    requests=REQUESTS,
    blocks=st.integers(10, 24),
    batch=st.integers(1, 5),
    tokens=st.integers(1, 24),
    reuse=st.booleans(),
)
def test_everybody_gets_to_the_end(requests, blocks, batch, tokens, reuse):
    """Prompts are alike, so that prefixes are shared; requests arrive over time, and some are taken away."""
    s = scheduler(blocks, batch, tokens, reuse=reuse)
    ended, gone, now = [], [], 0
    coming = []
    for i, (prompt, most, priority, gap, patience) in enumerate(requests):
        now += gap
        coming.append(
            (now, now + patience if patience < 12 else None, request(i, [t % 5 for t in range(prompt)], most, priority))
        )
    for now in range(60 + sum(n + 2 * m for n, m, *_ in requests)):
        for arrives, leaves, r in coming:
            if arrives == now:
                s.add(r)
            elif leaves is not None and now == leaves and r.finish_reason is None:
                s.remove(r)
                gone.append(r)
        ended += step(s)
    assert len(ended) + len(gone) == len(requests) and not s.running and not s.waiting and s.pools.used == 0
    assert all(len(r.generated) == r.params.max_tokens for r in ended)


def test_decoding_is_not_held_up_by_a_long_prompt():
    s = scheduler(blocks=40, tokens=8, length=100)
    short, long = request(0, [1, 2], 10), request(1, [3] * 60, 2)
    s.add(short)
    step(s)
    s.add(long)
    for n in range(2, 8):
        step(s)
        assert len(short.generated) == n and long.computed == (n - 1) * 7


def test_equal_priority_is_served_in_order_of_arrival():
    s = scheduler(batch=1)
    for i in range(4):
        s.add(request(i, [1, i], 2, priority=-1 if i == 3 else 0))
    order = []
    while s.running or s.waiting:
        order += [r.request_id for r in step(s)]
    assert order == [3, 0, 1, 2]


def test_a_prefix_is_computed_once():
    s = scheduler(blocks=20, tokens=32)
    prompt = list(range(14))
    s.add(first := request(0, prompt, 1))
    assert step(s) == [first]
    s.add(again := request(1, prompt, 1))
    s.add(other := request(2, [*prompt[:4], 9, 9, 9, 9, *prompt[8:]], 1))
    (a, b) = sorted(s.schedule(), key=lambda c: c.request.request_id)
    assert (a.request, a.count, again.cached_tokens) == (again, 2, 12)  # three full blocks; the last token is computed
    assert (b.request, b.count, other.cached_tokens) == (other, 10, 4)
    for c in (a, b):
        s.remove(c.request)
    check(s)


def test_blocks_for_several_sequences_or_for_none():
    """And what is too much comes back, never what holds entries."""
    s = scheduler(blocks=8, tokens=32)
    a, b = (request(i, [i] * 9, 20) for i in range(2))
    s.add(a), s.add(b)
    step(s), step(s)
    held = len(a.blocks), len(b.blocks)
    room = s.pools.available
    most = (held[0] + room) * BLOCK
    assert room == 2 and not s.extend_all([(a, most), (b, (held[1] + 1) * BLOCK)])
    assert (len(a.blocks), len(b.blocks)) == held and s.pools.available == room
    assert s.extend_all([(a, most - BLOCK), (b, (held[1] + 1) * BLOCK)]) and s.pools.available == 0
    assert s.release_beyond(a, held[0] * BLOCK) == 1 and s.release_beyond(b, (held[1] - 1) * BLOCK + 1) == 1
    assert (len(a.blocks), len(b.blocks)) == held and s.pools.available == room
    check(s)


def test_what_can_never_run_is_refused():
    s = scheduler(blocks=5, length=40)
    for prompt, more, says in (
        (40, 1, "exceed the model's 40"),
        (1, 40, "exceed the model's 40"),
        (20, 2, "needs 6 KV blocks"),
    ):
        with pytest.raises(CapacityError, match=says) as caught:
            s.add(request(0, [1] * prompt, more))
        assert caught.value.remedy and not s.waiting
    s.add(request(0, [1] * 20, 1))  # its last token is never written
    assert len(step(s)) == 0 and len(step(s)) == 1


@pytest.mark.parametrize(("blocks", "left"), [(5, 0), (6, 9), (9, 9)])
def test_drafts_whose_blocks_were_taken_are_gone(blocks, left):
    """What their drafter wrote for them is in those blocks; others would come in their place."""
    s = scheduler(blocks=blocks, reuse=False)
    a, b = request(0, [1, 2, 3], 13), request(1, [1, 2, 3, 4], 5)
    s.add(a), s.add(b)
    step(s)
    a.drafts = [6] * 9
    assert s.extend(a, 13)
    chosen = {c.request.request_id: c for c in s.schedule()}
    assert len(chosen[0].drafts) == left and chosen[1].count == 1 and len(a.drafts) == left


@given(
    blocks=st.integers(1, 14),
    window=st.one_of(st.none(), st.integers(1, 30)),
    tokens=st.integers(1, 24),
    prompt=st.integers(1, 79),
)
def test_what_there_is_room_for_is_admitted_and_runs(blocks, window, tokens, prompt):
    """The longest sequence that `CacheMemory` promises, alone in the cache, whatever a step may hold."""
    longest = CacheMemory((blocks,), BLOCK, [PoolShape((window,), 1)], blocks).max_sequence_tokens(
        80, explicit_length=False
    )
    s = Scheduler(BlockPools([BlockAllocator(blocks)]), BLOCK, Limits(2, tokens, longest), windows=(window,))
    prompt = min(prompt, longest - 1)
    r = request(0, [1] * prompt, longest - prompt)
    s.add(r)
    for _ in range(200):
        chosen = s.schedule()
        assert len(chosen) == 1 and chosen[0].count <= tokens and not s.preemptions
        make_batch(s.queries(chosen), block_tokens=BLOCK, device="cpu")
        if chosen[0].samples_next:
            r.generated.append(1)
        s.commit(chosen[0])
        s.release_out_of_window(r)
        if r.tokens == longest:
            break
    s.remove(r)
    assert r.tokens == longest and s.pools.used == 0


@pytest.mark.parametrize(("blocks", "longest", "steps"), [(10, 40, 3), (30, 40, 3), (8, 40, 4)])
def test_a_window_cuts_chunks_only_where_the_cache_is_smaller_than_a_sequence(blocks, longest, steps):
    """A prompt of 39 tokens, 16 a step; 8 blocks of 4 hold 29 tokens that begin and end anywhere in a block: 10
    of a step, and 19 before them in a window of 20."""
    s = Scheduler(BlockPools([BlockAllocator(blocks)]), BLOCK, Limits(2, 16, longest), windows=(20,))
    s.add(request(0, [1] * 39, 1))
    counts = []
    while sum(counts) < 39:
        (chosen,) = s.schedule()
        counts.append(chosen.count)
        s.commit(chosen)
        s.release_out_of_window(chosen.request)
    assert len(counts) <= steps and max(counts) <= (16 if blocks * BLOCK >= longest else 10)
