"""A graph that replays wrongly serves no token: each fault is planted in a device's graph and found before its use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.engine.runner.buckets import Buckets
from inferplane.engine.runner.capture import DecodeSteps
from inferplane.errors import InferplaneWarning
from inferplane.kvcache import paged_layout
from inferplane.ops import Attention
from inferplane.types import HOST, KVCache, KVRequest
from inferplane.types.batch import Query, make_batch
from inferplane_cpu.backend import CpuBackend

BLOCK, BLOCKS, REQUEST = 4, 40, KVRequest("gqa", 2, 8, 8)
NOISE = torch.Generator().manual_seed(7)


class Step:
    """One layer: writes its rows' entries, attends to them, and mixes in ids and positions."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(5)
        self.kv = paged_layout(BLOCK).build(REQUEST, BLOCKS, torch.float32, torch.device(HOST))
        self.kv.write(torch.arange(160), *(torch.randn(160, 2, 8, generator=generator) for _ in "kv"))
        self.op, self.noise = Attention(4, 0.3, REQUEST, "few"), noise
        self.table = torch.randn(16, 32, generator=generator)
        self.writes = True

    def __call__(self, batch):
        x = self.table[batch.ids].view(-1, 4, 8) + batch.positions[:, None, None]
        if self.writes:
            self.kv.write(batch.slots, x[:, :2], x[:, 2:])
        hidden = self.op(x, batch, self.kv).flatten(1)
        hidden = hidden + self.noise * torch.randn(hidden.shape, generator=NOISE)
        return hidden[:, :5].clone(), hidden


class Graph:
    """As a device's graph, with a fault."""

    def __init__(self, step, bucket, owner, fault):
        self.step, self.bucket, self.owner, self.fault, self.replays = step, bucket, owner, fault, 0
        self.held = {name: t.clone() for name, t in vars(bucket).items() if isinstance(t, torch.Tensor)}
        self.results = tuple(t.clone() for t in step(bucket))

    def replay(self):
        self.replays += 1
        if self.fault in self.held:  # read once, at the capture
            return self.step(replace(self.bucket, **{self.fault: self.held[self.fault]}))
        self.owner.writes = self.fault != "leaves out the writes"
        made = self.step(replace(self.bucket))
        self.owner.writes = True
        if self.fault == "leaves the results" or (self.fault == "is right once" and self.replays > 1):
            return self.results
        if self.fault == "is wrong by 1 %":
            return tuple(t * 1.01 for t in made)
        if self.fault == "writes to another block":
            self.owner.kv.write(torch.tensor([int(self.bucket.slots[0]) ^ 1]), *(torch.zeros(1, 2, 8) for _ in "kv"))
        return made


class Device(CpuBackend):
    def __init__(self, owner, fault=""):
        super().__init__()
        self.owner, self.fault = owner, fault

    def capture(self, step, bucket):
        return Graph(step, bucket, self.owner, self.fault)


def batch_of(counts, before):
    queries, block = [], 0
    for i, count in enumerate(counts):
        blocks = [block + j for j in range(-(-(count + before + i) // BLOCK))]
        block += len(blocks)
        queries.append(Query([(3 * i + j) % 16 for j in range(count)], before + i, blocks))
    return make_batch(queries, block_tokens=BLOCK, device=HOST)


def steps_of(step, fault=""):
    return DecodeSteps(Device(step, fault), step, KVCache((step.kv,), BLOCKS, BLOCK), 30, Buckets((1, 2, 4), (1, 2, 3)))


FAULTS = [
    "leaves the results",
    "leaves out the writes",
    "is right once",
    "is wrong by 1 %",
    "writes to another block",
    "ids",
    "positions",
    "slots",
    "seq_lens",
    "block_tables",
]


COUNTS = [[1], [1, 1, 1], [2, 2], [2, 1, 2]]
CASES = [(f, c) for f in FAULTS for c in COUNTS if (f, c) != ("block_tables", [1])]
"""One sequence has one table: only a second one shows that it is read anew."""


@pytest.mark.parametrize(("fault", "counts"), CASES)
def test_a_wrong_graph_serves_nothing(fault, counts):
    faulty, right = Step(), Step()
    steps = steps_of(faulty, fault)
    with pytest.warns(InferplaneWarning, match="device 'cpu' replays a captured step of .* wrongly: after other"):
        first = steps(batch_of(counts, 6))
    for got, before in ((first, 6), (steps(batch_of(counts, 9)), 9)):
        assert all(torch.equal(g, w) for g, w in zip(got, right(batch_of(counts, before)))), fault
    entries = zip(faulty.kv.entries, right.kv.entries)  # the last block takes what padded rows write
    assert all(torch.equal(g[:-1], w[:-1]) for g, w in entries), "a probe is left in the cache"
    assert steps.replayed == 0 and not steps.buckets and "replays a captured step" in steps.disabled_reason


@pytest.mark.parametrize("noise", [0.0, 1e-4])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [3, 1, 2]])
def test_a_right_graph_is_replayed(counts, noise):
    """Also where kernels sum in any order; the cache holds what eager steps leave in it."""
    captured, right = Step(noise), Step()
    steps = steps_of(captured)
    for before in (5, 9, 2):
        got, want = steps(batch_of(counts, before)), right(batch_of(counts, before))
        assert all(torch.allclose(g, w, atol=8 * noise) for g, w in zip(got, want))
    assert all(torch.equal(g[:-1], w[:-1]) for g, w in zip(captured.kv.entries, right.kv.entries))
    assert (steps.replayed, steps.eager, steps.disabled_reason) == (3, 0, "")
