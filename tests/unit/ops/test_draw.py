"""Inputs of samples: repeatable, fresh for every seed, and a cache that holds what it says."""

import math

import pytest
import torch

from inferplane.kvcache import paged_layout
from inferplane.ops import Draw, placeholder
from inferplane.types import KVRequest, QTensor, Weight
from tests.unit.support.small import BF16, F32

GQA, MLA = KVRequest("gqa", 2, 8, 4), KVRequest("mla", 1, 12)
SEQUENCES = [(1, 5), (2, 16), (9, 0), (20, 7)]


class Recorder:
    """Builds caches and keeps what is written to the last one: slot -> entries."""

    def __init__(self, size=8):
        self.layout, self.blocks = paged_layout(size), 0

    def __call__(self, request, blocks):
        kv = self.layout.build(request, blocks, F32, torch.device("cpu"))
        self.blocks, self.written = blocks, {}
        write = kv.write

        def recorded(slots, *values):
            for i, s in enumerate(slots.tolist()):
                self.written[s] = tuple(v[i] for v in values)
            write(slots, *values)

        kv.write = recorded
        return kv


def everything(d):
    return d.normal(3, 4), d.uniform(5, low=-1), d.ints(6, below=9), d.permutation(7), d.weight(placeholder(4, 6))


def test_seeds_mean_the_same_everywhere():
    again = [torch.as_tensor(a) for a in everything(Draw(5, F32))]
    for a, b, c in zip(everything(Draw(5, F32)), again, everything(Draw(6, F32))):
        assert torch.equal(torch.as_tensor(a), b) and not torch.equal(b, torch.as_tensor(c))
    assert not torch.equal(*(Draw(5, F32).normal(2, 8)))


def test_dtypes_and_places():
    d = Draw(0, BF16, "meta")
    assert d.normal(2, 3).dtype is BF16 and d.normal(2, 3).device.type == "meta"
    assert d.normal(2, dtype=F32).dtype is F32 and d.uniform(2).dtype is F32 and d.ints(2, below=3).dtype is torch.int64


def test_ranges():
    d = Draw(0, F32)
    assert sorted(d.permutation(50)) == list(range(50)) != d.permutation(50)
    u, i, n = d.uniform(2000, low=-2, high=3), d.ints(2000, below=7), d.normal(20000, scale=4.0)
    assert -2 <= u.min() < -1.9 and 2.9 < u.max() < 3
    assert i.unique().tolist() == list(range(7))
    assert n.std().item() == pytest.approx(4, rel=0.05) and abs(n.mean()) < 0.2


@pytest.mark.parametrize("request_", [GQA, MLA], ids=lambda r: r.kind)
@pytest.mark.parametrize("written", [False, True])
def test_a_step_over_a_cache_with_history(request_, written):
    build = Recorder()
    batch, kv = Draw(1, F32, build_kv=build).step(request_, SEQUENCES, written=written)
    assert batch.lens().seq_lens == (6, 18, 9, 27) and batch.tokens == 32 and batch.ids.max() < 97
    used = [b for row, n in zip(batch.block_tables.tolist(), (6, 18, 9, 27)) for b in row[: math.ceil(n / 8)]]
    assert len(set(used)) == len(used) == build.blocks - 1, "blocks are never shared, and one is spare"
    assert used != sorted(used), "scattered"
    want = set()
    for row, (new, before) in zip(batch.rows(), SEQUENCES):
        table = row.table.tolist()
        stored = before + (new if written else 0)
        want |= {table[t // 8] * 8 + t % 8 for t in range(stored)}
        assert batch.positions[row.start : row.stop].tolist() == list(range(before, before + new))
        got = kv.read(row.table, stored)
        for t in range(stored):
            assert all(torch.equal(g[t], v) for g, v in zip(got, build.written[table[t // 8] * 8 + t % 8]))
    assert set(build.written) == want
    assert len({v[0].sum().item() for v in build.written.values()}) == len(want), "every entry is its own"


def test_weights_keep_activations_at_order_one():
    d = Draw(0, BF16)
    plain, vector = d.weight(placeholder(200, 300)), d.weight(placeholder(500))
    assert plain.dtype is BF16 and plain.float().std().item() == pytest.approx(300**-0.5, rel=0.05)
    assert vector.float().mean().item() == pytest.approx(1, abs=0.05)
    assert d.weight(placeholder(3, 5, dtype=F32)).dtype is F32
    q = d.weight(placeholder(6, 130, 200, format="fp8_block"))
    assert isinstance(q, QTensor) and q.block == (128, 128) and q.shape == (6, 130, 200)
    made = torch.ones(3)
    assert d.weight(Weight((), (3,), dtype=F32, make=lambda: made)) is made
    assert d.weight(Weight((), (3,), make=lambda: made)).dtype is BF16, "as a constant of a model without a dtype"


def test_a_draw_without_a_cache_cannot_step():
    with pytest.raises(AssertionError, match="without a cache"):
        Draw(0, F32).step(GQA, SEQUENCES)
