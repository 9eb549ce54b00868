"""How far a result is from the oracle's: every op's comparison can fail, and forgives only what is free."""

import math

import pytest
import torch

from inferplane.binding import link
from inferplane.kvcache import paged_layout
from inferplane.ops import OPS, Draw, MoERoute, RMSNorm
from inferplane.ops.op import as_tuple, relative_error
from tests.unit.support.small import F32, plan

WRITES = ("kv_write", "mla_kv_write", "index_key_write", "entry_write", "compress_and_write", "compressor")
ROWS = [
    pytest.param(s, id=s.op.name)
    for s in (
        op.samples()[-1]
        for op in list(OPS.values())
        if op.__module__.startswith("inferplane.") and op.samples() and op.name not in WRITES
    )
]


def result(sample, seed=0):
    """The float32 result of an op's body on a sample, as a tuple."""
    layout = paged_layout(16)
    d = Draw(seed, F32, build_kv=lambda r, n: layout.build(r, n, F32, torch.device("cpu")))
    weights = {id(w): d.weight(w) for _, w in sample.op.weights()}
    p = plan(sample.op, kinds=("mixed",))
    packed = {(i, name): packing.fn(weights[i]) for i, names in p.packings.items() for name, packing in names.items()}
    return as_tuple(link(p, packed)["mixed"](*sample.inputs(d)))


@pytest.mark.parametrize("sample", ROWS)
def test_compare_catches_permutations_and_other_weights(sample):
    op, want = sample.op, result(sample)
    same = op.compare(*(r if len(r) > 1 else r[0] for r in (want, want)))
    assert same.error == 0
    rolled = tuple(None if t is None else t.roll(1, 0) for t in want)
    other = result(sample, seed=1)
    for wrong in (rolled, other):
        got = op.compare(*(r if len(r) > 1 else r[0] for r in (wrong, want)))
        assert got.error > 3 * max(op.tolerance.values()), got


def test_relative_error():
    want = torch.tensor([1.0, -4.0, 2.0])
    assert relative_error(want + torch.tensor([0.0, 0.0, 0.4]), want) == pytest.approx(0.1)
    assert relative_error(want[:2], want) == relative_error(want[None], want) == math.inf
    for bad in (math.nan, math.inf):
        assert relative_error(torch.tensor([1.0, bad, 2.0]), want) == math.inf
    zero = torch.zeros(3)
    assert relative_error(zero, zero) == 0 and relative_error(want, zero) == math.inf
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0
    assert relative_error(None, None) == 0 and relative_error(None, want) == relative_error(want, None) == math.inf


def test_compare_counts_results():
    a = torch.ones(2)
    assert RMSNorm.compare((a, a), a).error == math.inf
    worst = RMSNorm.compare((a, a * 1.5, a), (a, a, a))
    assert worst.error == pytest.approx(0.5) and "1" in worst.detail
    assert RMSNorm.compare((a * math.nan, a), (a, a)).error == math.inf


def test_the_order_of_chosen_experts_is_free():
    weights, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[3, 1]])
    same = MoERoute.compare((weights.flip(1), ids.flip(1)), (weights, ids))
    assert same.error == 0
    assert MoERoute.compare((weights, ids.flip(1)), (weights, ids)).error > 0.5
    assert MoERoute.compare((weights, ids - 2), (weights, ids)).error == math.inf
    assert MoERoute.compare(weights, (weights, ids)).error == math.inf
