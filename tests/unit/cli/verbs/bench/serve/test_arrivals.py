"""Arrival processes: their statistics with fixed seeds, and the words for them."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from statistics import fmean, pstdev

import pytest

from inferplane.cli.verbs.bench.serve.arrivals import due_times, parse_process, parse_rate
from inferplane.errors import UsageError

COUNT = 20_000


def times(rate: str, process: str = "poisson", length_s: float = 0.0, count: int = COUNT, seed: int = 0) -> list[float]:
    return list(islice(due_times(parse_rate(rate), parse_process(process), length_s, seed), count))


@pytest.mark.parametrize(
    ("process", "variation"), [("poisson", 1.0), ("constant", 0.0), ("gamma:0.25", 2.0), ("gamma:4", 0.5)]
)
def test_gaps_have_the_rates_mean_and_the_processes_variation(process, variation):
    due = times("8", process)
    gaps = [b - a for a, b in pairwise(due)]
    assert due[0] == 0 and min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_poisson_counts_have_the_variance_of_their_mean_and_gaps_are_exponential():
    due = times("5")
    counts = [0] * int(due[-1])
    for at in due:
        if int(at) < len(counts):
            counts[int(at)] += 1
    assert fmean(counts) == pytest.approx(5, rel=0.03) and pstdev(counts) ** 2 == pytest.approx(5, rel=0.06)
    gaps = [b - a for a, b in pairwise(due)]
    for share in (0.25, 0.5, 0.9):
        below = sum(gap < -math.log(1 - share) / 5 for gap in gaps) / len(gaps)
        assert below == pytest.approx(share, abs=0.012)


def test_equal_seeds_give_equal_times_and_others_do_not():
    assert times("3", count=50, seed=7) == times("3", count=50, seed=7) != times("3", count=50, seed=8)


def test_everything_at_once():
    assert times("inf", count=5) == [0.0] * 5


@pytest.mark.parametrize("process", ["constant", "poisson"])
def test_a_ramp_has_its_rate_at_every_time(process):
    length = 1000.0
    due = [at for at in times("2:18", process, length, 40_000) if at < length]
    assert len(due) == pytest.approx(10 * length, rel=0.03)
    for at in (100, 500, 900):
        near = sum(at - 50 <= one < at + 50 for one in due) / 100
        assert near == pytest.approx(2 + 16 * at / length, rel=0.08)
    after = [at for at in times("2:18", "constant", 10.0, 400) if at > 10]
    assert fmean(b - a for a, b in pairwise(after)) == pytest.approx(1 / 18)


def test_a_ramp_down_and_from_nothing():
    falling = [at for at in times("9:1", "constant", 100.0, 600) if at < 100]
    assert len(falling) == pytest.approx(500, abs=2) and falling == sorted(falling)
    rising = times("0:4", "constant", 100.0, 200)
    assert (
        rising[200 - 1] == pytest.approx(100 * math.sqrt(199 / 200), rel=1e-6)
        and parse_rate("0:4").length_of(200) == 100
    )


def test_words():
    assert [str(parse_rate(w)) for w in ("2.5", "inf", "1:8")] == ["2.5", "inf", "1:8"]
    assert [str(parse_process(w)) for w in ("poisson", "constant", "gamma:0.5")] == ["poisson", "constant", "gamma:0.5"]


@pytest.mark.parametrize(
    "words", ["0", "-1", "nan", "x", "", "1:", ":1", "inf:1", "1:inf", "0:0", "-inf", "1:-1", "1e308:1e307", "1e-320"]
)
def test_rates_that_are_none(words):
    with pytest.raises(UsageError, match="--rate"):
        parse_rate(words)


@pytest.mark.parametrize(
    "words", ["", "gamma", "gamma:0", "gamma:-1", "gamma:x", "gamma:inf", "gamma:1e308", "gamma:1e-4", "normal:1"]
)
def test_processes_that_are_none(words):
    with pytest.raises(UsageError, match="--arrivals"):
        parse_process(words)


@pytest.mark.parametrize("shape", ["0.001", "1e6"])
def test_gaps_of_the_outermost_shapes_are_numbers(shape):
    due = times("1", f"gamma:{shape}", count=200)
    assert all(math.isfinite(at) for at in due) and due == sorted(due)
