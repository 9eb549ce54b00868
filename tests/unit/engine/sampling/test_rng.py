"""Random numbers as a function of seed and place: known answers, both implementations alike, and statistics."""

import pytest
import torch

from inferplane.engine.request import seeds as seed_math
from inferplane.engine.sampling import rng
from tests.unit.support.splitmix import uniform_scalar

N = 1 << 16
SEEDS = [0, 1, 7, -1, 2**63 - 1, -(2**63), 123456789]


def p_value(counts, expected):
    """Of a chi-square test of counts against expected counts."""
    stat = ((counts - expected) ** 2 / expected).sum().double()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), stat / 2).item()


def many(seed, stream=0, dtype=torch.float32, n=N):
    return rng.uniform(torch.full((n,), seed), torch.arange(n), stream, dtype)


def test_known_answers():
    """SplitMix64 from state 1234567: the sequence that its reference implementations print."""
    want = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = [1234567 + (i + 1) * seed_math.GAMMA for i in range(5)]
    assert [seed_math.mix(s) for s in states] == want
    got = rng._mix_tensor(torch.tensor([seed_math.as_int64(s) for s in states]))
    assert got.tolist() == [seed_math.as_int64(w) for w in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_implementations_agree_to_the_last_bit(dtype):
    g = torch.Generator().manual_seed(1)
    seeds = torch.cat((torch.tensor(SEEDS), torch.randint(-(2**63), 2**63 - 1, (500,), generator=g)))
    counters = torch.cat((torch.arange(7), torch.randint(0, 2**40, (500,), generator=g)))
    for stream in (0, 1, 5):
        got = rng.uniform(seeds, counters, stream, dtype)
        assert got.dtype is dtype
        assert got.tolist() == [uniform_scalar(s, c, stream, dtype) for s, c in zip(seeds.tolist(), counters.tolist())]
    assert uniform_scalar(2**64 + 5, 3) == uniform_scalar(5, 3), "seeds count modulo 2^64"


def test_a_number_depends_on_its_seed_and_place_only():
    whole = many(42)
    some = torch.tensor([5, 0, 65535, 1000])
    assert torch.equal(rng.uniform(torch.tensor([42, 42, 42, 42]), some), whole[some])


def test_several_streams_at_once():
    seeds, places = torch.tensor([-(2**63), 0, 12345]), torch.tensor([0, 2**40, 7])
    got = rng.uniform(seeds, places, torch.arange(5)[:, None])
    assert torch.equal(got, torch.stack([rng.uniform(seeds, places, stream) for stream in range(5)]))


def test_numbers_lie_below_1():
    assert all((many(s) < 1).all() and (many(s) >= 0).all() for s in SEEDS)
    assert 1 - 2.0**-24 < 1 and torch.tensor(1 - 2.0**-24, dtype=torch.float32) < 1
    assert torch.equal(many(3) * 2**24, (many(3) * 2**24).round()), "multiples of 2^-24"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", [0, 1])
def test_uniform(seed, stream):
    for dtype in (torch.float32, torch.float64):
        u = many(seed, stream, dtype)
        assert p_value(torch.histc(u.float(), 256, 0, 1).double(), N / 256) > 1e-4
        assert abs(u.mean().item() - 0.5) < 5 / (12 * N) ** 0.5
    low = (many(seed, stream) * 2**24).long() & 255  # the last bits are as good as the first
    assert p_value(torch.bincount(low, minlength=256).double(), N / 256) > 1e-4


def independent(a, b):
    pairs = (a * 16).long() * 16 + (b * 16).long()
    return p_value(torch.bincount(pairs, minlength=256).double(), len(a) / 256) > 1e-4


def test_independent_across_places_seeds_and_streams():
    u = many(11)
    for lag in (1, 2, 3, 64):
        assert independent(u[:-lag], u[lag:])
    assert all(independent(u, many(11 + d)) for d in (1, 2, 256, 2**32))
    assert all(independent(u, many(11, stream)) for stream in (1, 2, 3))
    columns = rng.uniform(torch.arange(N), torch.zeros(N, dtype=torch.int64))  # the first number of successive seeds
    assert p_value(torch.histc(columns, 256, 0, 1).double(), N / 256) > 1e-4
    assert independent(columns[:-1], columns[1:])


def test_children_of_a_request():
    seeds = {seed_math.child_seed(s, i) for s in range(50) for i in range(128)}
    assert len(seeds) == 50 * 128 and all(-(2**63) <= s < 2**63 for s in seeds)
    assert seed_math.child_seed(9, 0) == 9 and seed_math.child_seed(2**64 - 1, 0) == -1
    assert seed_math.fresh_seed() != seed_math.fresh_seed()
