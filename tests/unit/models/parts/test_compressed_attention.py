"""DeepSeek-V4's attention against transformers' module: any division into steps gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from inferplane.kernels.composed import composed_kernels
from inferplane.ops import IndexSelect
from inferplane.types import Placement, When
from tests.unit.support.deepseek_v4 import HEAVY, SLIDING, SPARSE, Reference, Rig
from tests.unit.support.small import kernel

BAR = 1e-5


def check(got, want):
    assert (got - want).abs().max() <= BAR * want.abs().max()


@pytest.mark.parametrize("steps", [[95], [1] * 45, [19, 1, 1, 1, 40], [20, 21, 3, 8, 1], [7] * 13])
@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
def test_any_chunks_as_transformers(kind, steps):
    reference = Reference(kind)
    x = torch.randn(sum(steps), 48)
    rig = Rig(reference)
    sequence, got = rig.start(x), []
    for count in steps:
        got += rig.step((sequence, count))
    check(torch.cat(got), reference(x))


@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
def test_ragged_steps_as_transformers(kind):
    reference, lengths = Reference(kind, seed=1), (70, 23, 140)
    rig = Rig(reference)
    sequences = [rig.start(torch.randn(n, 48)) for n in lengths]
    got = [[] for _ in lengths]
    while any(s.done < len(s.x) for s in sequences):
        parts = []
        for i, s in enumerate(sequences):
            count = min((1, 11, 4, 25)[(i + s.done // 12) % 4], len(s.x) - s.done)
            parts += [(i, s, count)] if count else []
        parts.sort(key=lambda part: part[2] > 8)
        for (i, _, _), y in zip(parts, rig.step(*((s, count) for _, s, count in parts))):
            got[i].append(y)
    for s, y in zip(sequences, got):
        check(torch.cat(y), reference(s.x))


BOUNDARIES = {
    SLIDING: (1, 19, 20, 21),
    SPARSE: (1, 3, 4, 5, 7, 8, 9, 19, 20, 21, 23, 24, 25, 27, 28, 29, 90),
    HEAVY: (1, 19, 20, 21, 31, 32, 33, 63, 64, 65, 90, 160),
}
"""Lengths at the window, at one and two entries, and at as many entries as a query chooses."""


@pytest.mark.parametrize(("kind", "tokens"), [(kind, n) for kind, each in BOUNDARIES.items() for n in each])
def test_rejected_drafts_leave_nothing(kind, tokens):
    """After a prompt of this length: drafts of which some are accepted, whose entries are written anew."""
    reference = Reference(kind, seed=2)
    right, wrong = torch.randn(tokens + 12, 48), torch.randn(tokens + 12, 48)
    rig = Rig(reference)
    sequence = rig.start(right)
    got = rig.step((sequence, tokens))
    for accepted, drafted in ((1, 5), (3, 8), (4, 4), (2, 7), (2, 2)):
        x = right.clone()
        x[sequence.done + accepted :] = wrong[sequence.done + accepted :]
        sequence.x = x
        (rows,) = rig.step((sequence, min(drafted, len(x) - sequence.done)), keep=False)
        got.append(rows[:accepted])
        sequence.done += accepted
    check(torch.cat(got), reference(right))


@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
@pytest.mark.parametrize("block_tokens", [4, 32, 64])
def test_any_blocks(kind, block_tokens):
    """Of fewer tokens than an entry stands for, and of several entries."""
    reference = Reference(kind, seed=3)
    x = torch.randn(120, 48)
    rig = Rig(reference, block_tokens=block_tokens, blocks=200)
    sequence = rig.start(x)
    check(torch.cat([*rig.step((sequence, 70)), *rig.step((sequence, 8)), *rig.step((sequence, 42))]), reference(x))


@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
def test_composed_kernels_as_transformers(kind):
    reference = Reference(kind, seed=4)
    x = torch.randn(310, 48)
    rig = Rig(reference, *composed_kernels())
    sequence, got = rig.start(x), []
    for count in (61, *[1] * 9, 8, 5, 227):
        got += rig.step((sequence, count))
    check(torch.cat(got), reference(x))


@pytest.mark.parametrize("kind", [SLIDING, SPARSE, HEAVY])
def test_two_ranks_add_up(kind):
    """Each has half of the heads and of the groups, and all entries."""
    reference = Reference(kind, seed=5)
    x, total = torch.randn(90, 48), 0
    for rank in range(2):
        rig = Rig(reference, placement=Placement(rank, 2))
        assert rig.op.heads == 2 and len(rig.op.o_a.parts) == 1
        assert rig.requests == Rig(reference).requests
        sequence = rig.start(x)
        total = total + torch.cat([*rig.step((sequence, 50)), *rig.step((sequence, 4)), *rig.step((sequence, 36))])
    check(total, reference(x))


def test_the_selection_is_transformers_s():
    """Whatever the order in which it comes, for each query of a prompt."""
    reference = Reference(SPARSE, seed=6)
    x, found = torch.randn(150, 48), []
    rig = Rig(reference, kernel("index_select", target=recording(found), when=When(extensions=("index_select.rate",))))
    rig.step((rig.start(x), len(x)))
    module = reference.module
    with torch.no_grad():
        c = module.q_a_norm(module.q_a_proj(x))[None]
        want = module.compressor.indexer(x[None], c, torch.arange(len(x))[None], None, 0)[0]
    for got, expected in zip(found[0].tolist(), want.tolist()):
        assert sorted(i for i in got if i >= 0) == sorted(i for i in expected if i >= 0)


def recording(found):
    """A kernel of `index_select` that computes it by its body, and appends the selection to a list."""

    def call(view, q, w, batch, kv):
        found.append(IndexSelect(view.dims, view.kv, view.rate)(q, w, batch, kv))
        return found[-1]

    return call
