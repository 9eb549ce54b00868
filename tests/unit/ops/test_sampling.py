"""Sampling: which tokens may come, how often they come, and that nothing else has a say."""

import pytest
import torch

from inferplane.ops import SampleTokens
from inferplane.ops.sampling import CHUNK_TOKENS, MIN_CHUNKS, stable_topk
from tests.unit.support.small import bound

sample = bound(SampleTokens())
N = 4000


def draw(logits, heat=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=None):
    """Tokens of one row for every `uniform` (N of them, evenly spread, unless given)."""
    u = (torch.arange(N) + 0.5) / N if uniform is None else torch.tensor(uniform)
    rows = len(u)
    full = [torch.full((rows,), x) for x in (heat, top_k, top_p, min_p)]
    return sample(torch.tensor(logits).expand(rows, -1), *full, u)


def shares(tokens, vocab):
    return torch.bincount(tokens, minlength=vocab) / len(tokens)


LOGITS = [0.1, 2.0, -1.0, 1.5, 2.5, -3.0, 0.0]  # by probability: 4 1 3 0 6 2 5
P = torch.tensor(LOGITS).double().softmax(0)


@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability(heat):
    want = (torch.tensor(LOGITS).double() / heat).softmax(0)
    assert (shares(draw(LOGITS, heat), 7) - want).abs().max() <= 1.5 / N


def kept(**cuts):
    return set(draw(LOGITS, **cuts).tolist())


def test_top_k_keeps_the_k_most_probable():
    order = [4, 1, 3, 0, 6, 2, 5]
    for k in range(1, 8):
        assert kept(top_k=k, uniform=[0.0, 0.5, *torch.linspace(0.9, 0.999999, 3000).tolist()]) <= set(order[:k])
        share = shares(draw(LOGITS, top_k=k), 7)
        want = torch.zeros(7, dtype=torch.float64)
        want[order[:k]] = P[order[:k]] / P[order[:k]].sum()
        assert (share - want).abs().max() <= 1.5 / N
    assert kept(top_k=0) == kept(top_k=7) == kept(top_k=99)


def test_top_p_keeps_the_shortest_head_that_reaches_it():
    cumulated = P.sort(descending=True).values.cumsum(0)
    for i, order in enumerate([4, 1, 3, 0, 6]):
        just_below, just_above = cumulated[i].item() - 1e-4, cumulated[i].item() + 1e-4
        assert order in kept(top_p=just_below)
        assert len(kept(top_p=just_below)) == i + 1 and len(kept(top_p=just_above)) == i + 2
    assert kept(top_p=0.0) == {4}


def test_min_p_is_relative_to_the_most_probable():
    ratio = (P / P.max()).tolist()
    for token in (1, 3, 0, 6):
        assert token in kept(min_p=ratio[token] - 1e-4) and token not in kept(min_p=ratio[token] + 1e-4)
    assert kept(min_p=1.0) == {4} == kept(min_p=2.0)


def test_cuts_apply_in_their_order():
    """Top-p counts what top-k left: of 4 and 1 alone, 4 has 0.62 and reaches 0.6 by itself."""
    assert P[4] < 0.6 < P[4] / (P[4] + P[1])
    assert kept(top_p=0.6) == {4, 1} and kept(top_p=0.6, top_k=2) == {4}
    heated = (torch.tensor(LOGITS) / 10).softmax(0)  # temperature comes before all cuts
    assert kept(heat=10.0, min_p=(heated[6] / heated[4]).item() - 1e-3) == {4, 1, 3, 0, 6}


def test_temperature_zero_is_greedy_whatever_the_cuts():
    assert set(draw(LOGITS, heat=0.0, top_k=3, top_p=0.5).tolist()) == {4}
    ties = torch.zeros(5, 300)
    ties[:, 7:] = 2.0
    row = torch.zeros(5)
    assert sample(ties, row, row.long(), row + 1, row, torch.rand(5)).tolist() == [7] * 5, "the lowest id among equals"


def test_the_ends_of_uniform():
    last = torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)).item()
    assert draw(LOGITS, uniform=[0.0, last]).tolist() == [4, 5]
    assert draw(LOGITS, top_k=2, uniform=[0.0, last]).tolist() == [4, 1]
    assert draw([0.0] * 50_000, uniform=[last]).item() < 50_000


def test_forbidden_tokens_never_come():
    logits = [1.0, -torch.inf, 0.0, -torch.inf]
    assert set(draw(logits).tolist()) == {0, 2}
    assert set(draw(logits, top_k=4, top_p=0.9999999).tolist()) == {0, 2}


def test_a_row_does_not_know_its_neighbours():
    g = torch.Generator().manual_seed(3)
    rows = 64
    args = [torch.randn(rows, 500, generator=g) * 3, torch.rand(rows, generator=g) * 2]
    args[1][::5] = 0
    args += [
        torch.randint(0, 40, (rows,), generator=g),
        torch.rand(rows, generator=g),
        torch.rand(rows, generator=g) / 5,
    ]
    args.append(torch.rand(rows, generator=g))
    whole = sample(*args)
    assert whole.dtype is torch.int64 and whole.shape == (rows,)
    assert torch.equal(torch.cat([sample(*(a[i : i + 1] for a in args)) for i in range(rows)]), whole)
    order = torch.randperm(rows, generator=g)
    assert torch.equal(sample(*(a[order] for a in args)), whole[order])


def test_a_share_of_wrong_rows_is_the_error():
    got, want = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])
    assert SampleTokens.compare(got, want).error == 0.25 and SampleTokens.compare(want, want).error == 0
    assert SampleTokens.compare(got[:3], want).error == float("inf")


def test_what_no_row_needs_may_be_left_out():
    u, heat = (torch.arange(N) + 0.5) / N, torch.ones(N)
    logits = torch.tensor(LOGITS).expand(N, -1)
    free = sample(logits, heat, None, None, None, u)
    assert (shares(free, 7) - P).abs().max() <= 1.5 / N
    assert sample(logits[:3], heat[:3] * 0, None, None, None, None).tolist() == [4, 4, 4]
    assert sample(logits[:3], torch.tensor([0.0, 1.0, 0.0]), None, None, None, u[:3])[::2].tolist() == [4, 4]


@pytest.mark.parametrize("count", [0, 1, 2, 64, 1024, 2500])
def test_the_likeliest_of_many_are_those_of_a_sort(count):
    """Large vocabularies are looked through by the maxima of chunks; a last, incomplete chunk counts as well."""
    g = torch.Generator().manual_seed(count)
    vocab = CHUNK_TOKENS * MIN_CHUNKS + 33
    x = torch.randn(5, vocab, generator=g) * 3
    x[1] = x[1].bfloat16().float()
    x[2] = x[2].masked_fill(torch.rand(vocab, generator=g) < 0.999, -torch.inf)
    x[3] = torch.zeros(vocab).copysign(x[3])
    x[4, -7] = 99.0
    logits, ids = stable_topk(x, count)
    want, order = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order[:, :count]) and torch.equal(logits, want[:, :count])
