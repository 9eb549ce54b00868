"""A model without weights behind the interface of `Runner`, for tests of the engine at thousands of steps a second.

Its cache really stores an entry a token: a number that depends on everything read before it, as a transformer's does.
Logits depend on all entries of the sequence, read back through the block table. So a wrong table, a block overwritten
or left stale, or a draft left behind changes what comes out; an entry that was never written raises.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, reduce
from types import SimpleNamespace

import torch

from inferplane.engine.loop.engine import Engine
from inferplane.engine.request.state import Request
from inferplane.engine.sampling.batch_rows import BatchRow
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.speculate import Proposer, SpeculativeConfig
from inferplane.kvcache import StatePool, TablePlan
from inferplane.ops import SampleTokens
from inferplane.types import HOST, KVCache, LayerPlace, StateCache, StateRequest, StateTensor
from tests.unit.support.small import bound

V, END = 23, 0
ENDS = frozenset({END})
MASK = 2**64 - 1
START = 0x243F6A8885A308D3
TABLE = torch.randn(1024, V, generator=torch.Generator().manual_seed(3)) * 2


@cache
def sampler():
    return Sampler(bound(SampleTokens()), V, HOST)


def entry(state, token):
    z = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15) & MASK
    return z ^ (z >> 29)


def fold(state, e):
    return (state * 6364136223846793005 + e) & MASK


def logits_after(states):
    return TABLE[torch.tensor([s >> 54 for s in states], dtype=torch.int64)]


@lru_cache(maxsize=100_000)
def alone(prompt, params, ends=ENDS, windows=(None,)):
    """The tokens that a request gets when nothing else runs, and why it ends. No cache, no batch, no engine."""
    entries, generated, whole = [[] for _ in windows], [], [START for _ in windows]

    def after(x):
        """The state behind a further token, which sees the last entries with its own in each table's window."""
        for table, window in enumerate(windows):
            own = entries[table]
            before = whole[table] if window is None else reduce(fold, own[max(0, len(own) + 1 - window) :], START)
            own.append(entry(before, x))
            x = fold(before, own[-1])
            whole[table] = x
        return x

    state = [after(token) for token in prompt][-1]
    ends = (frozenset() if params.ignore_eos else ends) | frozenset(params.stop_token_ids)
    while True:
        r = Request(0, list(prompt), params)
        if r.history is not None:
            r.history.extend(generated)
        row = BatchRow(params, r.seed, len(generated), r.history, (), ends)
        token = int(sampler().sample(logits_after([state]), sampler().prepare([row])))
        generated.append(token)
        if token in ends:
            return generated, "stop"
        if len(generated) >= params.max_tokens:
            return generated, "length"
        state = after(token)


class FakeRunner:
    """See the module. `before` is called with each batch first; `batches` and `rows` count.

    It has one layer for each of `windows`, with a block table of its own. A layer's entries depend on the state behind
    the layer before it. All layers of a pool keep theirs in one memory; the first pool has `blocks`, others have
    `more_blocks` each. With `recurrent` sequences the first layer, which sees all tokens, computes the same from a
    state instead, for as many sequences at a time.
    """

    def __init__(
        self, blocks=64, block_tokens=4, max_model_len=100_000, windows=(None,), recurrent=0, pool_of=(), more_blocks=12
    ):
        self.windows, self.limited_by_cache, self.ranks = windows, False, None
        self.tables = TablePlan(windows, (), (), (), "", pool_of)
        pools = (blocks, *[more_blocks] * max(pool_of, default=0))
        self.cache = KVCache((self,), min(pools), block_tokens, pools=pools)
        self.states = None
        if recurrent:
            assert windows[0] is None
            request = StateRequest((StateTensor((1,), torch.int64),))
            self.states = StateCache(request, StatePool(recurrent).slots, torch.float32, HOST)
            self.states.tensors[0].fill_(0x5A5A5A5A)
            self.cache = replace(self.cache, by_layer=(LayerPlace(self.states),))
        self.backend = SimpleNamespace(
            torch_device_indexed=HOST,
            name="fake",
            asynchronous=True,
            synchronize=lambda: None,
            start_read=lambda tensors: self.start_read(tensors),
        )
        self.late = lambda: None
        self.model = SimpleNamespace(vocab=V, layers=(), mtp=())
        self.files, self.options = (
            SimpleNamespace(name="fake"),
            SimpleNamespace(kv_cache_dtype="auto", quantization=None),
        )
        self.dtype, self.steps, self.max_model_len = torch.float32, {}, max_model_len
        self.sample = sampler()._sample
        self.entries = [[None] * (count * block_tokens) for count in pools]
        self.batches = self.rows = 0
        self.kinds = []
        self.before = lambda batch: None

    def start_read(self, tensors):
        copies, look = [t.clone() for t in tensors], self.late()

        def wait():
            if look is not None:
                look()
            return copies

        return wait

    def run(self, batch):
        self.batches += 1
        self.rows += batch.tokens
        self.kinds.append(batch.kind)
        self.before(batch)
        views = [batch.for_table(table) for table in range(len(self.windows))]
        pools = self.tables.list_pools()
        slots = [(pool, slot) for view, pool in zip(views, pools) for slot in view.slots.tolist()]
        assert len({*slots}) == len(slots), "two tokens in one slot"
        states = batch.ids.tolist()
        for view, window, pool in zip(views, self.windows, pools):
            if self.states is not None and view is batch:
                self.run_recurrence(batch, states)
            else:
                self.run_layer(view, window, states, self.entries[pool])
        at = range(len(states)) if batch.logit_rows is None else batch.logit_rows.tolist()
        return logits_after([states[i] for i in at]), torch.tensor([[s >> 54] for s in states])

    def run_layer(self, batch, window, states, e):
        """Replace each row's state by the one behind a layer, which reads and writes the entries of its table."""
        n = self.cache.block_tokens
        slots, positions = batch.slots.tolist(), batch.positions.tolist()
        for row in batch.rows():
            table, state, first = row.table.tolist(), START, row.tokens - (row.stop - row.start)
            look = lambda i: e[table[i // n] * n + i % n]  # noqa: E731, B023 - used at once
            for i in range(first if window is None else 0):
                state = fold(state, look(i))
            for i, t in enumerate(range(row.start, row.stop), first):
                assert positions[t] == i
                if window is not None:
                    state = reduce(fold, map(look, range(max(0, i + 1 - window), i)), START)
                e[slots[t]] = entry(state, states[t])
                state = states[t] = fold(state, e[table[i // n] * n + i % n])

    def run_recurrence(self, batch, states):
        """As `run_layer` without a window, from the state before the step alone."""
        (stored,), rows = self.states.tensors, batch.list_states()
        for i, row in enumerate(batch.rows()):
            begins = row.tokens == row.stop - row.start
            state = START if begins else int(stored[rows.read[i]]) & MASK
            for t in range(row.start, row.stop):
                state = states[t] = fold(state, entry(state, states[t]))
            stored[rows.write[i]] = state - (MASK + 1 if state >> 63 else 0)


class Watched(Engine):
    """An engine whose books are checked after every step, and that knows which requests run now."""

    def __init__(self, runner, **options):
        self.now, self.waits_now, self.used_in_flight, self.last_batch = [], False, {}, set()
        super().__init__(runner, **options)
        runner.before, runner.late = self.look, self.look_later
        if self.overlap is not None:
            self.watch_steps_in_flight()
        self.told = {}
        self.accepted = []

    def add(self, prompt, params, end_ids=ENDS, text=None, **more):
        request = super().add(prompt, params, end_ids, text, **more)
        request.windows = self.runner.windows
        self.accepted.append(request)
        return request

    def watch_steps_in_flight(self):
        """No block is given out while a step in flight has it, and its sequence is no longer there to have it."""
        flying = self.scheduler.in_flight
        begin, finish = flying.begin, flying.finish

        def begin_step():
            held = begin()
            self.used_in_flight[id(held)] = self.last_batch
            return held

        def finish_step(held):
            self.used_in_flight.pop(id(held), None)
            finish(held)

        def watched(pool, allocate):
            def allocate_blocks(count):
                blocks = allocate(count)
                taken = {(pool, block) for block in blocks}
                assert not any(used & taken for used in self.used_in_flight.values()), "a step in flight has them"
                return blocks

            return allocate_blocks

        flying.begin, flying.finish = begin_step, finish_step
        for number, pool in enumerate(self.pools.pools):
            pool.allocate = watched(number, pool.allocate)

    def held(self, request):
        """The blocks of all its tables, each with the number of its pool."""
        pools = self.runner.tables.list_pools()
        return [(pool, block) for pool, table in zip(pools, request.tables) for block in table.held]

    def schedule(self):
        self.now = super().schedule()
        return self.now

    def _run(self, chosen):
        self.now, self.waits_now = chosen, True
        try:
            return super()._run(chosen)
        finally:
            self.waits_now = False

    def look_later(self):
        """What raises when the host reads a step that is launched now."""
        some = list(self.now)

        def look():
            for s in some:
                self.fail_later_for(s.request)

        return look

    def fail_later_for(self, request):
        """Tests raise here for the requests whose steps they want to fail while they are in flight."""

    def look(self, batch):
        """What is written belongs to one sequence alone, and nobody was promised its old content."""
        n = self.cache.block_tokens
        self.last_batch = {block for s in self.now for block in self.held(s.request)}
        if self.waits_now:
            for s in self.now:
                self.fail_later_for(s.request)
        for allocator, table in zip(self.scheduler.tables.allocators, batch.list_tables()):
            assert all(allocator.users(s // n) == 1 for s in table.slots.tolist()), "a shared block is written"
        for s in self.now:
            self.fail_for(s.request)

    def fail_for(self, request):
        """Tests raise here for the requests they want to fail."""

    def step(self):
        touched = super().step()
        self.check_books()
        return touched

    def settled(self, r):
        """Its tokens in the cache without those of steps in flight."""
        steps = [] if self.overlap is None else self.overlap.steps
        return r.computed - sum(
            c.count for step in steps for i, c in enumerate(step.chunks) if c.request is r and step.is_current(i)
        )

    def check_books(self):
        a, s = self.pools, self.scheduler
        a.check()
        users = {}
        assert len(s.in_flight.steps) == (0 if self.overlap is None else len(self.overlap.steps)) <= 2
        for allocator, blocks in (pair for step in s.in_flight.steps for pair in step.blocks):
            for block in blocks:
                key = a.pools.index(allocator), block
                users[key] = users.get(key, 0) + 1
        for r in s.running:
            held = self.held(r)
            assert r.finish_reason is None and len({*held}) == len(held) and len(r.tables) == len(self.runner.windows)
            for table, w in zip(r.tables, self.runner.windows):
                assert table.released == (
                    0 if w is None else max(0, self.settled(r) + 1 - w) // self.cache.block_tokens
                )
                assert len(table.blocks) * self.cache.block_tokens >= r.computed and 0 <= r.computed < r.tokens
            for b in held:
                users[b] = users.get(b, 0) + 1
        counted = {(pool, block): n for pool, own in enumerate(a.pools) for block, n in own._users.items()}
        assert users == counted, "users are the tables'"
        if s.states is not None:
            held = [slots for step in s.in_flight.steps for slots in step.states]
            slots = Counter(slot for state in (*(r.state for r in s.running), *held) for slot in state)
            assert 0 not in slots and all(s.states.users(slot) == n for slot, n in slots.items())
            assert all(slots[r.state.write] == 1 for r in s.running) and all(r.state is None for r in s.waiting)
            s.states.check()
            assert s.states.available + len(s.running) + len(held) == s.states.total, "a slot was lost"
        assert all(r.finish_reason is None and not r.tables and not r.computed for r in s.waiting)
        live = {id(r) for r in (*s.running, *s.waiting)}
        assert len(live) == len(s.running) + len(s.waiting) and len(s.running) <= s.limits.max_num_seqs
        for r in self.accepted:
            assert (id(r) in live) == (r.finish_reason is None), "it lives, or it has ended"
            assert self.told.setdefault(id(r), r.finish_reason) in (None, r.finish_reason), "it ends once"
            self.told[id(r)] = r.finish_reason
            want = [(t, r.params.logprobs) for t in r.generated]
            assert r.logprobs is None or [(x.token_id, len(x.top)) for x in r.logprobs] == want
        ended = sum(r.finish_reason is not None for r in self.accepted)
        assert sum(self.metrics.finished.values()) == ended
        assert all(r.pending >= 0 and (s.in_flight.steps or not r.pending) for r in s.running)
        if not live and not s.in_flight.steps:
            assert a.used == 0 and a.free + a.cached == a.total

    def finish(self, most_steps=10_000):
        """Run until nothing is left; returns the steps that took."""
        for n in range(most_steps):
            if not self.busy:
                self.check_books()
                return n
            self.step()
        raise AssertionError("it does not come to an end")


class Script(Proposer):
    """A proposer that knows the plain continuation: `right`, `wrong`, `alternate` in turn, `junk` of any kind, `none`.

    Args:
        kind: see above.
        most: drafts a time, at most what is wanted.
        tell: request -> the tokens that it will get.
    """

    def __init__(self, kind, most, tell):
        self.kind, self.most, self.tell, self.turn = kind, most, tell, 0

    def needs_step(self, chunks, max_drafts):
        return False

    def propose(self, chunks, max_drafts, hidden):
        out = []
        for r, n in zip(chunks, max_drafts):
            done = len(r.request.generated)
            assert n == 0 or r.request.remaining == 1
            right = self.tell(r.request)[done : done + min(n, self.most)]
            self.turn += 1
            if self.kind == "right":
                out.append(right)
            elif self.kind == "wrong":
                out.append([(t + 1) % V for t in right])
            elif self.kind == "alternate":  # by call, and by place
                out.append([(t + (i + self.turn) % 3 // 2) % V for i, t in enumerate(right)])
            elif self.kind == "junk":
                out.append([(t * 7 + self.turn) % V for t in range(min(n, self.turn % (self.most + 1)))])
            else:
                out.append([])
        return out


def tell_alone(request):
    return alone(tuple(request.prompt), request.params, request.end_ids, request.windows)[0]


SIZES = ("max_model_len", "windows", "recurrent", "pool_of", "more_blocks")


def engine(blocks=64, block_tokens=4, *, script=None, drafts=3, spec=None, **options):
    """A watched engine; `script` names a scripted proposer, `spec` holds fields of SpeculativeConfig."""
    sizes = {name: options.pop(name) for name in SIZES if name in options}
    runner = FakeRunner(blocks, block_tokens, **sizes)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    if script is not None or spec is not None:
        fields = {"method": "ngram", "num_speculative_tokens": drafts, **(spec or {})}
        settings["speculative_config"] = SpeculativeConfig(**fields)
    made = Watched(runner, **settings)
    if script is not None:
        made.speculator.proposer = Script(script, drafts, tell_alone)
    return made


def right(request):
    """Whether a request has what it gets alone: all of it if it ended by itself, else a beginning of it."""
    tokens, reason = alone(tuple(request.prompt), request.params, request.end_ids, request.windows)
    if request.finish_reason in ("stop", "length"):
        return request.generated == tokens and request.finish_reason == reason
    return request.generated == tokens[: len(request.generated)]


def interrupted(function):
    """Call it through the KeyboardInterrupt it may raise."""
    with suppress(KeyboardInterrupt):
        function()
