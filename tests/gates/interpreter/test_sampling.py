"""Drawn tokens against the op's own body: equal logits, cuts at every place, shares at the edges."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inferplane.kernels.triton.sampling import sample
from inferplane.ops import SampleTokens

ROWS = 12


def rows(vocab: int, step: float | None, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab, generator=generator) * 3
    return logits if step is None else (logits / step).round() * step


@pytest.mark.parametrize("step", [None, 1.0], ids=["distinct", "many_equal"])
@pytest.mark.parametrize("cuts", ["none", "k", "p", "min_p", "all"])
def test_draws_what_the_body_draws(cuts, step, record_property):
    record_property("op", "sample")
    record_property("kernel", "triton:sample")
    g = torch.Generator().manual_seed(7)
    logits = rows(301, step, 3)
    logits[5, ::3] = -torch.inf
    heat = torch.rand(ROWS, generator=g) + 0.3
    heat[::5] = 0
    uniform = (torch.rand(ROWS, generator=g) * 2**24).floor() / 2**24
    uniform[1], uniform[2] = 0.0, 1 - 2**-24
    k = torch.randint(0, 40, (ROWS,), generator=g) if cuts in ("k", "all") else torch.zeros(ROWS, dtype=torch.int64)
    k[3:5] = torch.tensor([1, 301]) if cuts in ("k", "all") else 0
    p = torch.rand(ROWS, generator=g) if cuts in ("p", "all") else torch.ones(ROWS)
    p[6:8] = torch.tensor([0.0, 1.0])
    least = torch.rand(ROWS, generator=g) if cuts in ("min_p", "all") else torch.zeros(ROWS)
    least[9] = 1.0
    cut = (None, None, None) if cuts == "none" else (k, p, least)
    want = SampleTokens()(logits, heat, *cut, uniform)
    got = sample(SimpleNamespace(), logits, heat, *cut, uniform)
    assert got.dtype == torch.int64
    assert torch.equal(got, want), (got, want)


def test_rows_may_be_strided_and_greedy_ones_need_no_number():
    logits = rows(100, None, 1)[:, :77]
    assert torch.equal(sample(SimpleNamespace(), logits, torch.zeros(ROWS), *[None] * 4), logits.argmax(-1))
