"""Sequences with states: however a sequence is cut, mixed, preempted, repeated or drafted, its states are those of one
pass."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import Limits, Scheduler
from inferplane.kvcache import BlockAllocator, BlockPools, StatePool, root_hash
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


def choose(chunk, results, row):
    """The tokens behind a chunk whose first row is `row`: accepted drafts, and one that is new."""
    at = row + chunk.count - 1
    tokens = [int(results[at])]
    for i, draft in enumerate(chunk.drafts, 1):
        if draft != tokens[-1]:
            break
        tokens.append(int(results[at + i]))
    return tokens


def check_slots(s):
    """Every running sequence writes a slot of its own, and reads one that none writes; no waiting one has any, and none
    is lost."""
    held = Counter(slot for r in s.running for slot in r.state)
    assert 0 not in held and all(s.states.users(slot) == n for slot, n in held.items())
    assert all(held[r.state.write] == 1 for r in s.running) and all(r.state is None for r in s.waiting)
    s.states.check()
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
    wrong=st.lists(st.sampled_from([None, 0, 0, 1, 2, 9]), min_size=1, max_size=7),
    caching=st.booleans(),
)
def test_states_are_those_of_one_pass(requests, blocks, batch, slots, tokens, repeats, wrong, caching):
    root = root_hash if caching else None
    s = Scheduler(BlockPools([BlockAllocator(blocks)]), BLOCK, Limits(batch, tokens, 40), root, states=StatePool(slots))
    model = Model(s.states.slots)
    live, leaving = [], {}
    for i, (length, most, priority, patience) in enumerate(requests):
        live.append(Request(i, [t % 5 for t in range(length)], SamplingParams(max_tokens=most), priority=priority))
        leaving[i] = patience
        s.add(live[-1])
    for now in range(60 + sum(n + 2 * most for n, most, *_ in requests) * 3):
        for r in live:
            if r.request_id % 3 == 2 and leaving[r.request_id] == now and r.finish_reason is None:
                r.finish_reason = "abort"
                s.remove(r)
        chosen = s.schedule()
        check_slots(s)
        if not chosen:
            break
        step = make_batch(s.queries(chosen), block_tokens=BLOCK, device="cpu")
        results = [model(step) for _ in range(1 + repeats[now % len(repeats)])]  # as after an interrupt
        assert all(torch.equal(results[0], again) for again in results)
        for i, (c, row) in enumerate(zip(chosen, step.lens().query_start)):
            r = c.request
            found = choose(c, results[0], row) if c.samples_next else []
            r.generated += found
            s.commit(c, max(0, len(found) - 1))
            if len(r.generated) == r.params.max_tokens:
                r.finish_reason = "length"
                s.remove(r)
            elif found and (first := wrong[(now + i) % len(wrong)]) is not None:
                assert r.is_decoding and r.remaining <= 1 + len(c.drafts) + c.count
                r.drafts = generate_alone(r.prompt, len(r.generated) + 5)[len(r.generated) :]
                r.drafts[first:] = [draft + 1 for draft in r.drafts[first:]]
        check_slots(s)
    assert not s.running and not s.waiting
    assert s.states.available == slots and s.pools.used == 0
    for r in live:
        assert r.generated == generate_alone(r.prompt, len(r.generated))
        assert r.finish_reason == "abort" or len(r.generated) == r.params.max_tokens


def run_step(s, model):
    """The chunks of a step, which has run; sequences that have all tokens are removed."""
    chosen = s.schedule()
    step = make_batch(s.queries(chosen), block_tokens=BLOCK, device="cpu") if chosen else None
    results = model(step) if chosen else ()
    for c, row in zip(chosen, step.lens().query_start if chosen else ()):
        found = choose(c, results, row) if c.samples_next else []
        c.request.generated += found
        s.commit(c, max(0, len(found) - 1))
        if len(c.request.generated) == c.request.params.max_tokens:
            s.remove(c.request)
    check_slots(s)
    return chosen


def run_all(s, model, *requests):
    """The numbers of tokens of each request's steps; all are added at once, and get what they get alone."""
    steps = {r.request_id: [] for r in requests}
    for r in requests:
        s.add(r)
    while chosen := run_step(s, model):
        for c in chosen:
            steps[c.request.request_id].append(c.count)
    assert all(r.generated == generate_alone(r.prompt, len(r.generated)) for r in requests)
    return steps


def ask(name, prompt, most=1):
    return Request(name, prompt, SamplingParams(max_tokens=most))


def test_a_prefix_is_reused_where_a_step_ended():
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 99, 60), root_hash, states=StatePool(4))
    model, prompt = Model(s.states.slots), [t % 5 for t in range(14)]
    assert run_all(s, model, ask(0, prompt)) == {0: [12, 2]}, "before the last token's block"
    again, longer = ask(1, prompt), ask(2, [*prompt, 3, 3, 3])
    assert run_all(s, model, again) == {1: [2]} and again.cached_tokens == 12
    assert run_all(s, model, longer) == {2: [4, 1]} and longer.cached_tokens == 12
    assert run_all(s, model, ask(3, prompt[:12])) == {3: [8, 4]}, "no step ended after 8 tokens"
    other = ask(4, [*prompt[:8], 9, 9, 9])
    assert run_all(s, model, other) == {4: [3]} and other.cached_tokens == 8, "until the last one"


def test_steps_end_where_others_branch_off():
    """The second prompt shares 8 tokens with the first; a third one finds their states, which the second left."""
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 99, 60), root_hash, states=StatePool(4))
    model, shared = Model(s.states.slots), [1, 2, 3, 4, 4, 3, 2, 1]
    prompts = [[*shared, *[t] * 9] for t in range(3)]
    found = [ask(i, prompt) for i, prompt in enumerate(prompts)]
    assert run_all(s, model, found[0]) == {0: [16, 1]}
    assert run_all(s, model, found[1]) == {1: [8, 8, 1]}
    assert run_all(s, model, found[2]) == {2: [8, 1]}
    assert [r.cached_tokens for r in found] == [0, 0, 8]


def test_generated_tokens_are_part_of_a_prefix():
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 99, 60), root_hash, states=StatePool(4))
    model = Model(s.states.slots)
    first = ask(0, [1, 2, 3], 10)
    run_all(s, model, first)
    turn = ask(1, [1, 2, 3, *first.generated, 4])
    assert run_all(s, model, turn) == {1: [2]} and turn.cached_tokens == 12


def test_chunks_end_at_blocks():
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 10, 60), root_hash, states=StatePool(4))
    model, prompt = Model(s.states.slots), [t % 5 for t in range(30)]
    assert run_all(s, model, ask(0, prompt)) == {0: [8, 8, 8, 4, 2]}
    assert s.states.count_prefix([b""]) == 0 and run_all(s, model, ask(1, prompt[:17])) == {1: [1]}
    off = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 10, 60), states=StatePool(4))
    assert run_all(off, Model(9), ask(0, prompt)) == {0: [10, 10, 10]}


def run_drafts(s, model, request, *drafts):
    """Known tokens and drafts of each step of a sequence alone that is given these drafts, one list after each step."""
    s.add(request)
    steps, left = [], list(drafts)
    while chosen := run_step(s, model):
        steps += [(c.count, len(c.drafts)) for c in chosen]
        request.drafts = left.pop(0) if left else []
    assert request.generated == generate_alone(request.prompt, len(request.generated))
    return steps


def test_accepted_tokens_are_computed_again_after_a_refused_draft():
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 99, 60), states=StatePool(4))
    model, t = Model(s.states.slots), generate_alone([1, 2, 3], 12)
    drafts = [t[1], t[2], t[3] + 1], [t[4], 0], [], [t[6], t[7], t[8] + 1]
    steps = [(3, 0), (1, 3), (4, 0), (1, 0), (1, 3), (4, 0)]
    assert run_drafts(s, model, ask(0, [1, 2, 3], 10), *drafts) == steps, "no drafts while tokens are computed again"
    drafts = [t[1], t[2]], [t[4], t[5]], [t[7] + 1], [t[8]]
    steps = [(3, 0), (1, 2), (1, 2), (1, 1), (2, 0), (1, 0), (1, 0)]
    assert run_drafts(s, model, ask(1, [1, 2, 3], 11), *drafts) == steps, "accepted drafts are not computed again"


def test_drafts_end_where_a_block_does():
    """So that the states there are found."""
    s = Scheduler(BlockPools([BlockAllocator(40)]), BLOCK, Limits(4, 99, 60), root_hash, states=StatePool(4))
    model, request, t = Model(s.states.slots), ask(0, [1, 2], 12), generate_alone([1, 2], 12)
    drafts = t[1:6], t[3:8], [t[7], t[8] + 1, 0], [0], [0] * 5, [0]
    steps = [(2, 0), (1, 1), (1, 3), (1, 3), (3, 0), (1, 0), (1, 0)]
    assert run_drafts(s, model, request, *drafts) == steps
    again = ask(1, [1, 2, *request.generated, 4])
    assert run_all(s, model, again) == {1: [3]} and again.cached_tokens == 12


def test_prompts_do_not_stall_a_sequence_whose_drafts_were_refused():
    s = Scheduler(BlockPools([BlockAllocator(90)]), BLOCK, Limits(4, 8, 200), states=StatePool(4))
    model, decoding, prompt = Model(s.states.slots), ask(1, [1, 2, 3], 9), ask(0, [1] * 90)
    prompt.priority = -1
    s.add(decoding)
    run_step(s, model)
    decoding.drafts = [decoding.generated[0] + 1]
    s.add(prompt)
    for _ in range(2):
        chosen = run_step(s, model)
    assert {c.request.request_id: c.count for c in chosen} == {1: 2, 0: 6}
    assert decoding.generated == generate_alone([1, 2, 3], 3)


def test_a_sequence_without_slots_waits_and_takes_no_blocks():
    s = Scheduler(BlockPools([BlockAllocator(12)]), BLOCK, Limits(4, 16, 40), states=StatePool(1))
    for i in range(2):
        s.add(Request(i, [1, 2, 3], SamplingParams(max_tokens=2)))
    chosen = s.schedule()
    assert [c.request.request_id for c in chosen] == [0] and s.pools.used == 1
    s.preempt(chosen[0].request)
    check_slots(s)
    assert s.pools.used == 0 and s.states.available == 1
