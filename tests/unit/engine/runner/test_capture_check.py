"""A graph that replays wrongly serves no token: each fault is planted in a device's graph and found before its use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.engine.runner.buckets import Buckets, Size
from inferplane.engine.runner.capture import DecodeSteps
from inferplane.kvcache import paged_layout
from inferplane.ops import Attention
from inferplane.types import HOST, KVCache, KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.backend import CpuBackend

BLOCK, BLOCKS, REQUEST = 4, 120, KVRequest("gqa", 2, 8, 8)
NOISE = torch.Generator().manual_seed(7)


class Step:
    """One layer: writes its rows' entries, attends to them, and mixes in ids, positions and further rows."""

    def __init__(self, noise: float = 0.0, kv_dtype: str = "auto") -> None:
        generator = torch.Generator().manual_seed(5)
        layout = paged_layout(BLOCK, kv_dtype)
        self.kv = layout.build(REQUEST, BLOCKS, torch.float32, torch.device(HOST))
        self.kv.write(
            torch.arange(BLOCK * BLOCKS), *(torch.randn(BLOCK * BLOCKS, 2, 8, generator=generator) for _ in "kv")
        )
        self.op, self.noise = Attention(4, 0.3, REQUEST, "few"), noise
        self.table = torch.randn(16, 32, generator=generator)
        self.writes = True

    def __call__(self, batch, *rows):
        x = self.table[batch.ids].view(-1, 4, 8) + batch.positions[:, None, None]
        if self.writes:
            self.kv.write(batch.slots, x[:, :2], x[:, 2:])
        hidden = self.op(x, batch, self.kv).flatten(1) + sum(rows)
        hidden = hidden + self.noise * torch.randn(hidden.shape, generator=NOISE)
        return hidden[:, :5].clone(), hidden


class Graph:
    """As a device's graph, with a fault."""

    def __init__(self, step, bucket, device):
        self.step, self.bucket, self.device, self.fault, self.replays = step, bucket, device, device.fault, 0
        self.held = {name: t.clone() for name, t in vars(bucket).items() if isinstance(t, torch.Tensor)}
        self.results = tuple(t.clone() for t in step(replace(bucket)))
        device.captured += 1
        self.number = device.captured

    def replay(self):
        self.replays += 1
        if self.fault in self.held:  # read once, at the capture
            return self.step(replace(self.bucket, **{self.fault: self.held[self.fault]}))
        owner = self.device.owner
        owner.writes = self.fault != "leaves out the writes"
        made = self.step(replace(self.bucket))
        owner.writes = True
        if self.fault == "leaves the results" or (self.fault == "is right once" and self.replays > 1):
            return self.results
        if self.fault == "is wrong by 1 %":
            return tuple(t * 1.01 for t in made)
        if self.fault == "leaves half of the results":
            half = (len(self.bucket.slots) + 1) // 2
            return tuple(torch.cat((t[:half], old[half:])) for t, old in zip(made, self.results))
        if self.fault == "loses results to a later graph" and self.number < self.device.captured:
            return self.results
        if self.fault == "shares a buffer":
            self.device.buffers = [
                b if len(b) >= len(t) else torch.zeros_like(t) for b, t in zip(self.device.buffers, made)
            ]
            return tuple(b[: len(t)].copy_(t) for b, t in zip(self.device.buffers, made))
        if self.fault == "writes twice" and self.replays > 1:
            self.write([int(self.bucket.slots.max()) ^ 1])
        if self.fault == "writes padded rows to slot 0" and (self.bucket.slots < 0).any():
            self.write([0])
        if self.fault == "writes to the step of its capture":
            self.write([slot for slot in self.held["slots"].tolist() if slot >= 0])
        return made

    def write(self, slots):
        self.device.owner.kv.write(torch.tensor(slots), *(torch.zeros(len(slots), 2, 8) for _ in "kv"))


class Device(CpuBackend):
    def __init__(self, owner, fault=""):
        super().__init__()
        self.owner, self.fault, self.captured, self.buffers = owner, fault, 0, [torch.zeros(0), torch.zeros(0)]

    def capture(self, step, bucket):
        return Graph(step, bucket, self)


def batch_of(counts, before, first_block=0):
    queries, block = [], first_block
    for i, count in enumerate(counts):
        blocks = [block + j for j in range(-(-(count + before + i) // BLOCK))]
        block += len(blocks)
        queries.append(Query([(3 * i + j) % 16 for j in range(count)], before + i, blocks))
    return make_batch(queries, block_tokens=BLOCK, device=HOST)


def steps_of(step, fault="", max_model_len=30):
    told = []
    steps = DecodeSteps(
        Device(step, fault),
        step,
        KVCache((step.kv,), BLOCKS, BLOCK),
        max_model_len,
        Buckets((1, 2, 4, 16), (1, 2, 3)),
        vocab=16,
        on_wrong=lambda size, reason: told.append((size, reason)),
    )
    return steps, told


FAULTS = {
    "ids": "differs from the eager step",
    "positions": "differs from the eager step",
    "slots": "",
    "seq_lens": "differs from the eager step",
    "block_tables": "differs from the eager step",
    "leaves the results": "differs from the eager step in result 0",
    "leaves out the writes": "",
    "is right once": "the second replay",
    "is wrong by 1 %": "differs from the eager step in result 0",
    "leaves half of the results": "differs from the eager step in result",
    "writes twice": "the second replay",
    "writes padded rows to slot 0": "changes slot 0 of the cache",
    "writes to the step of its capture": "",
}
"""What a graph does wrongly, and words that tell it."""
COUNTS = [[1], [1, 1, 1], [2, 2], [2, 1, 2], [1] * 11]
UNSEEN = [("leaves half of the results", [1]), ("writes padded rows to slot 0", [1])]
"""A step of one sequence has no second half and no padding."""
CASES = [(fault, counts) for fault in FAULTS for counts in COUNTS if (fault, counts) not in UNSEEN]


@pytest.mark.parametrize(("fault", "counts"), CASES)
def test_a_wrong_graph_serves_nothing(fault, counts):
    faulty, right = Step(), Step()
    steps, told = steps_of(faulty, fault)
    for before in (6, 9):
        got, want = steps(batch_of(counts, before)), right(batch_of(counts, before))
        assert all(torch.equal(g, w) for g, w in zip(got, want)), fault
    ((size, reason),) = told
    assert "replay of a step" in reason and FAULTS[fault] in reason, reason
    assert size.sequences >= len(counts) and steps.wrong == {size: reason}
    assert (steps.replayed, steps.eager, steps.buckets, steps.disabled_reason) == (0, 2, {}, "")
    entries = zip(faulty.kv.entries, right.kv.entries)  # the slot behind the last takes what padded rows write
    assert all(torch.equal(g[:-1], w[:-1]) for g, w in entries), "a trial is left in the cache"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("fault", "noise"), [("", 0.0), ("", 1e-4), ("shares a buffer", 0.0)])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 1, 2], [1] * 16])
def test_a_right_graph_is_replayed(counts, fault, noise, kv_dtype):
    """Also where kernels add in any order, and where graphs share memory. The cache holds what eager steps write."""
    captured, right = Step(noise, kv_dtype), Step(0.0, kv_dtype)
    steps, told = steps_of(captured, fault)
    for before in (5, 9, 2):
        got, want = steps(batch_of(counts, before)), right(batch_of(counts, before))
        assert all(torch.allclose(g, w, atol=8 * noise) for g, w in zip(got, want))
    stored = zip((*captured.kv.entries, *captured.kv.scales), (*right.kv.entries, *right.kv.scales))
    assert all(torch.equal(g[:-1], w[:-1]) for g, w in stored)
    assert (steps.replayed, steps.eager, told) == (3, 0, [])


def test_only_the_wrong_size_is_dropped():
    """A later capture may spoil the one before it, which shares its memory."""
    step = Step()
    steps, told = steps_of(step, "loses results to a later graph")
    steps(batch_of([1], 6))
    assert steps.replayed == 1 and not told
    steps(batch_of([1, 1], 6))
    assert [size for size, _ in told] == [Size(1, 1)] and list(steps.buckets) == [Size(2, 1)]
    for counts in ([1], [1, 1]):
        assert torch.equal(steps(batch_of(counts, 9))[0], Step()(batch_of(counts, 9))[0])
    assert (steps.replayed, steps.eager) == (3, 1)


def test_further_rows_that_a_graph_holds_are_found():
    """As the hidden states that a draft layer reads."""
    step = Step()
    steps, told = steps_of(step)

    class Stale(Graph):
        def __init__(self, function, bucket, device):
            super().__init__(function, bucket, device)
            self.rows = [t.clone() for t in function.__closure__[0].cell_contents]

        def replay(self):
            return step(replace(self.bucket), *self.rows)

    steps.backend.capture = lambda function, bucket: Stale(function, bucket, steps.backend)
    batch, hidden = batch_of([1, 1], 6), torch.randn(2, 32)
    assert torch.equal(steps(batch, hidden)[1], Step()(batch, hidden)[1])
    assert len(told) == 1 and "differs from the eager step" in told[0][1]


def test_a_graph_that_raises_is_dropped_with_its_words():
    step = Step()
    steps, told = steps_of(step)

    def fail():
        raise RuntimeError("graph is not instantiated")

    steps.backend.capture = lambda function, bucket: type("Bad", (), {"replay": staticmethod(fail)})()
    assert torch.equal(steps(batch_of([1], 6))[0], Step()(batch_of([1], 6))[0])
    assert "RuntimeError: graph is not instantiated" in told[0][1]


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_small_cache_is_enough(blocks):
    """Then the blocks of the step at hand are borrowed, and given back as they were."""
    step, right = Step(), Step()
    steps, told = steps_of(step)
    steps.checker = replace(steps.checker, cache=KVCache((step.kv,), blocks, BLOCK))
    batch = batch_of([1], 2)
    assert torch.equal(steps(batch)[0], right(batch)[0]) and not told and steps.replayed == 1
    assert all(torch.equal(g[:-1], w[:-1]) for g, w in zip(step.kv.entries, right.kv.entries))


def test_a_size_is_compared_once():
    """Two trials of two eager runs and two replays, however long it is used."""

    class Counted(Step):
        runs = 0

        def __call__(self, batch, *rows):
            self.runs += 1
            return super().__call__(batch, *rows)

    step = Counted()
    steps, _ = steps_of(step)
    for before in (5, 6, 7, 8):
        steps(batch_of([1, 1], before))
    assert step.runs == 1 + 2 * (2 + 2) + 4


def test_the_longest_sequence_is_tried():
    """A graph whose reach was fixed by the step of its capture is right for short sequences only."""
    step = Step()
    steps, told = steps_of(step, max_model_len=200)

    class Short(Graph):
        def replay(self):
            return self.step(replace(self.bucket, seq_lens=self.bucket.seq_lens.clamp(max=40)))

    steps.backend.capture = lambda function, bucket: Short(function, bucket, steps.backend)
    steps(batch_of([1], 6))
    assert len(told) == 1
