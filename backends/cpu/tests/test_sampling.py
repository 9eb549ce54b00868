"""Sampling from large vocabularies: the very tokens that the op's body draws, whatever the logits and the cuts."""

from types import SimpleNamespace

import pytest
import torch

from inferplane.ops import SampleTokens
from inferplane_cpu.kernels import sampling

V, ROWS = 9001, 48
BODY = SampleTokens()
VIEW = SimpleNamespace(prepared=sampling.Scratch())


def logits(kind: str, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(ROWS, V, generator=g)
    if kind == "peaked":
        return x * 8
    if kind == "ties":
        return (x * 3).bfloat16().float()
    if kind == "banned":
        return (x * 2).masked_fill(torch.rand(ROWS, V, generator=g) < 0.99, -torch.inf)
    if kind == "zeros of both signs":
        return torch.zeros(ROWS, V).copysign(x)
    return x * 0.05


def uniforms(g: torch.Generator) -> torch.Tensor:
    u = (torch.rand(ROWS, generator=g) * 2**24).floor() / 2**24
    u[:2] = torch.tensor([0.0, 1 - 2.0**-24])
    return u


def same(x: torch.Tensor, *rest: torch.Tensor | None) -> None:
    got, want = sampling.sample(VIEW, x, *rest), BODY(x, *rest)
    assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "banned", "zeros of both signs"])
def test_the_tokens_are_those_of_the_body(kind):
    g = torch.Generator().manual_seed(7)
    for _ in range(4):
        x, u = logits(kind, g), uniforms(g)
        kept = x.clone()
        heat = torch.rand(ROWS, generator=g) * 1.5 + 0.02
        heat[::9] = 0
        top_k = torch.randint(1, V + 9, (ROWS,), generator=g).masked_fill(torch.rand(ROWS, generator=g) < 0.6, 0)
        top_p = torch.rand(ROWS, generator=g).masked_fill(torch.rand(ROWS, generator=g) < 0.2, 1.0)
        top_p[3:6] = torch.tensor([1e-30, 1 - 2.0**-24, 1 - 2.0**-20])
        min_p = (torch.rand(ROWS, generator=g) ** 8).masked_fill(torch.rand(ROWS, generator=g) < 0.4, 0.0)
        same(x, heat, top_k, top_p, min_p, u)
        same(x, heat, top_k * 0, top_p, min_p, u)
        same(x, heat, top_k * 0, top_p, min_p * 0, u)
        same(x, heat, None, None, None, u)
        same(x, heat * 0, None, None, None, None)
        assert torch.equal(x, kept)


def test_a_short_list_is_left_to_the_body():
    g = torch.Generator().manual_seed(2)
    x, one = torch.randn(ROWS, 300, generator=g), torch.ones(ROWS)
    same(x, one, one.long() * 40, one * 0.9, one * 0, uniforms(g))
