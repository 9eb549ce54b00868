"""DeepSeek-V4's attention against transformers' module: any division into steps gives the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.unit.support.deepseek_v4 import HEAVY, SLIDING, SPARSE, Reference, Rig

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
