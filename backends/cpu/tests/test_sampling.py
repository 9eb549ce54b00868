"""Sampling from large vocabularies: the tokens that the op's body draws, whatever the logits and the cuts."""

from collections.abc import Iterator

import pytest
import torch

from inferplane.binding import View
from inferplane.ops import SampleTokens
from inferplane.ops.sampling import compute_filtered_weights
from inferplane_cpu.kernels import sampling
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

V, ROWS = 9001, 48
BODY = SampleTokens()
SETS = instruction_sets()
needs_library = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
KINDS = ["flat", "peaked", "ties", "banned", "zeros of both signs"]
ROUNDING = 1e-5
"""Of a cumulated share: exponents up to 28 are rounded to 24 bits twice, and exponentials to as many."""
VIEW = View(prepared=sampling.RowMemory())


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


def asked(g: torch.Generator, rows: int = ROWS) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Arguments behind the logits: all cuts, two of them, one, none at all, only the likeliest."""
    u = uniforms(g)[:rows]
    heat = torch.rand(rows, generator=g) * 1.5 + 0.02
    heat[::9] = 0
    top_k = torch.randint(1, V + 9, (rows,), generator=g).masked_fill(torch.rand(rows, generator=g) < 0.6, 0)
    top_p = torch.rand(rows, generator=g).masked_fill(torch.rand(rows, generator=g) < 0.2, 1.0)
    top_p[3:6] = torch.tensor([1e-30, 1 - 2.0**-24, 1 - 2.0**-20])
    min_p = (torch.rand(rows, generator=g) ** 8).masked_fill(torch.rand(rows, generator=g) < 0.4, 0.0)
    yield heat, top_k, top_p, min_p, u
    yield heat, top_k * 0, top_p, min_p, u
    yield heat, top_k * 0, top_p, min_p * 0, u
    yield heat, top_k * 0, top_p * 0 + 1, min_p * 0, u
    yield heat, None, None, None, u
    yield heat * 0, None, None, None, None


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_body(kind):
    g = torch.Generator().manual_seed(7)
    for _ in range(4):
        x = logits(kind, g)
        kept = x.clone()
        for arguments in asked(g):
            same(x, *arguments)
        assert torch.equal(x, kept)


def test_a_short_list_is_left_to_the_body():
    g = torch.Generator().manual_seed(2)
    x, one = torch.randn(ROWS, 300, generator=g), torch.ones(ROWS)
    same(x, one, one.long() * 40, one * 0.9, one * 0, uniforms(g))


def decided_by_rounding(x, token, heat, top_k, top_p, min_p, u) -> bool:
    """Whether a row's token has a weight and its share of the cumulated weights lies next to `uniform`."""
    weights, ids = compute_filtered_weights(
        x[None], heat[None], *(None if c is None else c[None] for c in (top_k, top_p, min_p))
    )
    at = token if ids is None else (ids[0] == token).nonzero()[0, 0]
    upto = weights[0].double().cumsum(0) / weights.sum()
    return bool(weights[0, at] > 0 and upto[at] - weights[0, at] / weights.sum() - ROUNDING <= u <= upto[at] + ROUNDING)


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_native_tokens_are_those_of_the_body_save_where_rounding_decides(kind):
    """A handful of 100,000 rows differ; each that does has to have its random number on the edge of two tokens."""
    g = torch.Generator().manual_seed(11)
    others = rows = 0
    for _ in range(3):
        x = logits(kind, g)
        kept = x.clone()
        for heat, *rest in asked(g):
            got, want = sampling.sample_native(None, x, heat, *rest), BODY(x, heat, *rest)
            assert got.dtype == want.dtype and got.shape == want.shape
            for i in (got != want).nonzero()[:, 0].tolist():
                assert heat[i] > 0 and rest[-1] is not None, "the likeliest token is not rounded"
                assert decided_by_rounding(x[i], got[i], heat[i], *(None if r is None else r[i] for r in rest))
            others, rows = others + int((got != want).sum()), rows + ROWS
        assert torch.equal(x, kept)
    assert others <= rows // 200


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_native_tokens_depend_on_the_row_alone(kind):
    """Not on the instruction set, the threads, the rows beside it, or the dtype that holds the same logits."""
    g = torch.Generator().manual_seed(13)
    x = logits(kind, g).bfloat16()
    threads = torch.get_num_threads()
    for arguments in asked(g):
        want = sampling.sample_native(None, x, *arguments)
        assert torch.equal(sampling.sample_native(None, x.float(), *arguments), want)
        wide = torch.zeros(ROWS, V + 5).bfloat16()
        wide[:, :V] = x
        assert torch.equal(sampling.sample_native(None, wide[:, :V], *arguments), want)
        alone = [sampling.sample_native(None, x[i : i + 1], *cut(arguments, i)) for i in range(ROWS)]
        assert torch.equal(torch.cat(alone), want)
        for name in SETS:
            with use_instruction_set(name):
                assert torch.equal(sampling.sample_native(None, x, *arguments), want), name
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(sampling.sample_native(None, x, *arguments), want), count
        finally:
            torch.set_num_threads(threads)


def cut(arguments: tuple[torch.Tensor | None, ...], i: int) -> list[torch.Tensor | None]:
    return [None if a is None else a[i : i + 1] for a in arguments]


@needs_library
@pytest.mark.parametrize("vocab", [1, 15, 16, 1023, 1025, 40_000])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 1e4])
def test_native_tokens_of_vocabularies_of_all_sizes(vocab, spread):
    g = torch.Generator().manual_seed(vocab)
    x = torch.randn(6, vocab, generator=g) * spread
    heat, one, u = torch.tensor([1e-9, 1e-4, 0.5, 1, 2, 1e8]), torch.ones(6), uniforms(g)[:6]
    for top_k in (0, 1, 5, vocab):
        arguments = heat, one.long() * top_k, one * 0.9, one * 0.01, u
        got, want = sampling.sample_native(None, x, *arguments), BODY(x, *arguments)
        for i in (got != want).nonzero()[:, 0].tolist():
            assert decided_by_rounding(x[i], got[i], *(a[i] for a in arguments))


@needs_library
def test_native_rows_that_are_broken_get_the_token_that_shows_it():
    x = torch.zeros(6, V)
    x[0, 5], x[1, 7], x[2], x[3, 9] = torch.nan, torch.inf, -torch.inf, -torch.nan
    x[4, 3:] = -torch.inf
    one = torch.ones(6)
    for cuts in ((None, None, None), (one.long() * 3, one * 0.5, one * 0.1), (one.long() * 0, one * 0.5, one * 0)):
        got = sampling.sample_native(None, x, one, *cuts, one * 0.4)
        assert got[:4].tolist() == [5, 7, 0, 9] and torch.equal(got, BODY(x, one, *cuts, one * 0.4))
        assert x[4:].gather(1, got[4:, None]).isfinite().all()
        assert torch.equal(got, sampling.sample(VIEW, x, one, *cuts, one * 0.4))


@needs_library
@pytest.mark.parametrize("heat", [1e29, 1e30, 1e38])
def test_masked_tokens_are_never_drawn_however_hot(heat):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 17, generator=g)
    x[:, ::3] = -torch.inf
    one, u = torch.ones(ROWS), uniforms(g)
    for cuts in ((None, None, None), (one.long() * 9, one * 0.9, one * 0)):
        got = sampling.sample_native(None, x, one * heat, *cuts, u)
        assert got.max() < 17 and x.gather(1, got[:, None]).isfinite().all()
        assert torch.equal(got, BODY(x, one * heat, *cuts, u))


EDGES = [
    "flat",
    "narrow",
    "all equal",
    "one dominates",
    "ties",
    "rising",
    "falling",
    "unlike its sample",
    "banned",
    "far apart",
]
CUTS = [
    (0, 1e-6, 0.0),
    (0, 1 - 1e-7, 0.0),
    (0, 0.5, 0.0),
    (0, 0.95, 0.0),
    (0, 0.95, 0.05),
    (0, 1.0, 0.3),
    (0, 1.0, 1e-4),
    (1, 1.0, 0.0),
    (7, 0.9, 0.0),
    (2400, 1.0, 0.0),
    (5000, 0.9, 0.0),
    (70_000, 1.0, 0.01),
    (10**9, 0.999, 0.0),
]
"""top_k, top_p, min_p of a row each."""


def edge(kind: str, vocab: int, g: torch.Generator) -> torch.Tensor:
    """Rows that are as far as can be from what a kernel which guesses from a sample would like."""
    x, ids = torch.randn(len(CUTS), vocab, generator=g), torch.arange(vocab)
    if kind == "narrow":
        return x * 1e-3 + 1000
    if kind == "all equal":
        return torch.full_like(x, -3.25)
    if kind == "one dominates":
        x[:, vocab // 3] = 30
    if kind == "ties":
        return (x * 2).round() / 2
    if kind in ("rising", "falling"):
        return ((ids if kind == "rising" else -ids) * (20.0 / vocab)).expand_as(x).contiguous()
    if kind == "unlike its sample":  # of each 1024 tokens, those of some registers are likelier than all others
        return x + 9 * (ids // 16 % 64 == (ids // 1024 * 5 + 1) % 16) + 4 * (ids // 8 % 16 == 3)
    if kind == "banned":
        return x.masked_fill(torch.rand(x.shape, generator=g) < 0.999, -torch.inf).index_fill_(1, ids[vocab // 2], 0.0)
    if kind == "far apart":
        return torch.where(x > 2, 3e38, -3e38).index_fill_(1, ids[vocab // 2], 3e38)
    return x


@needs_library
@pytest.mark.parametrize("vocab", [1, 7, 151_936, 152_065])
@pytest.mark.parametrize("kind", EDGES)
def test_native_tokens_of_rows_that_are_unlike_any_sample(kind, vocab):
    g = torch.Generator().manual_seed(vocab)
    x, u = edge(kind, vocab, g), (torch.rand(len(CUTS), generator=g) * 2**24).floor() / 2**24
    top_k, top_p, min_p = (torch.tensor(c) for c in zip(*CUTS))
    for heat in (torch.ones(len(CUTS)), torch.rand(len(CUTS), generator=g) + 0.4):
        arguments = heat, top_k, top_p, min_p, u
        want, got = BODY(x, *arguments), sampling.sample_native(None, x, *arguments)
        for i in (got != want).nonzero()[:, 0].tolist():
            assert decided_by_rounding(x[i], got[i], *(a[i] for a in arguments)), CUTS[i]
        for name in SETS:
            with use_instruction_set(name):
                assert torch.equal(sampling.sample_native(None, x, *arguments), got), name


@needs_library
@pytest.mark.parametrize("vocab", [7, 1024, 152_064])
def test_native_tokens_of_equal_logits_are_kept_by_id(vocab):
    """All weights are 2^40, so that nothing is rounded: the tokens are the body's to the last one."""
    g = torch.Generator().manual_seed(vocab)
    u = uniforms(g)[:8]
    x = torch.zeros(8, vocab)
    x[:, ::2] = -0.0
    one = torch.ones(8)
    top_p = torch.tensor([1e-6, 0.3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-7, 1.0])
    for top_k in (0, vocab // 2, vocab - 1):
        for min_p in (0.0, 1.0):
            arguments = one, one.long() * top_k, top_p, one * min_p, u
            want = BODY(x, *arguments)
            for name in SETS:
                with use_instruction_set(name):
                    assert torch.equal(sampling.sample_native(None, x, *arguments), want), (name, top_k, min_p)


@needs_library
def test_native_tokens_at_a_boundary_of_ties_are_the_first_ones_by_id():
    """Of the tokens 5, 15, 25, ..., which share the second largest logit, the cuts leave the first few."""
    vocab, kept = 151_936, 40
    x = torch.full((1, vocab), -20.0)
    x[0, 5::10], x[0, 77] = 1.0, 1.5
    one = torch.ones(1)
    weights = [2.0**40, *[2.0**40 * torch.tensor(-0.5).exp().item()] * len(range(5, vocab, 10))]
    share = sum(weights[: kept + 1]) / (sum(weights) + vocab * 0.9 * 2.0**40 * torch.tensor(-21.5).exp().item())
    for name in SETS:
        with use_instruction_set(name):
            drawn = set()
            for u in torch.linspace(0, 1 - 2.0**-24, 120):
                by_number = sampling.sample_native(None, x, one, one.long() * (kept + 1), one, one * 0, one * u)
                by_weight = sampling.sample_native(None, x, one, one.long() * 0, one * (share - 1e-5), one * 0, one * u)
                assert torch.equal(by_number, by_weight)
                drawn.add(int(by_number))
        assert drawn == {77, *range(5, 5 + 10 * kept, 10)}, name


@needs_library
@pytest.mark.parametrize("vocab", [1, 7, 151_936, 152_064])
def test_native_rows_of_any_size_that_are_broken_get_the_token_that_shows_it(vocab):
    x = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    last = vocab - 1
    x[0, last], x[1, last], x[2], x[3] = torch.nan, torch.inf, -torch.inf, torch.nan
    one = torch.ones(4)
    for top_k, top_p, min_p in CUTS:
        for name in SETS:
            with use_instruction_set(name):
                got = sampling.sample_native(None, x, one, one.long() * top_k, one * top_p, one * min_p, one * 0.7)
            assert got.tolist() == [last, last, 0, 0], name
