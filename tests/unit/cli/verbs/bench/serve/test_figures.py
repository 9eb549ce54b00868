"""Figures from records: counts, rates, goodput, intervals, and what is over time."""

from __future__ import annotations

import math
import random
from array import array
from statistics import fmean

import pytest

from inferplane.cli.verbs.bench.serve.arrivals import Process
from inferplane.cli.verbs.bench.serve.figures import latencies, level_figures, requests_running, tokens_over_time
from inferplane.cli.verbs.bench.serve.load import LevelPlan, LevelResult
from inferplane.cli.verbs.bench.serve.records import BROKEN, REFUSED, RequestRecord
from inferplane.cli.verbs.bench.serve.targets import meets, parse_targets
from inferplane.cli.verbs.bench.statistics import intervals
from inferplane.errors import UsageError

PLAN = LevelPlan(4, None, Process(1.0), 5, None)


def record(
    sent: float, *arrivals: float, tokens: int | None = None, failure: str = "", prompt: int = 10
) -> RequestRecord:
    made = RequestRecord(8, sent, sent, array("d", arrivals), arrivals[-1] if arrivals else sent + 1, prompt)
    made.output_tokens, made.counted_by = len(arrivals) if tokens is None else tokens, "usage"
    if failure:
        made.fail(failure, f"it was {failure}")
    return made


FIVE = [
    record(0.0, 0.1, 0.2, 0.4),
    record(0.5, 0.6, 0.8, tokens=5),
    record(1.0, 1.5, tokens=1),
    record(1.0, 1.2, 1.3, failure=BROKEN),
    record(2.0, failure=REFUSED),
]


def test_latencies_are_those_of_requests_that_ended():
    found = latencies(FIVE)
    assert found["ttft"] == pytest.approx([0.1, 0.1, 0.5]) and found["e2e"] == pytest.approx([0.4, 0.3, 0.5])
    assert found["itl"] == pytest.approx([0.1, 0.2, 0.2]), "every gap"
    assert found["tpot"] == pytest.approx([0.3 / 2, 0.2 / 4]), "none of a single token"


def test_counts_and_rates():
    figures = level_figures(LevelResult(PLAN, FIVE, not_sent=2, duration_s=4.0, cpu_s=0.1, resent=7), {"ttft": 0.2})
    counts = figures["counts"]
    assert (counts["sent"], counts["ended"], counts["failed"], counts["not_sent"]) == (5, 3, 2, 2)
    assert counts["resent"] == 7
    assert {kind: n for kind, n in counts["failures"].items() if n} == {BROKEN: 1, REFUSED: 1}
    assert {one["failure"]: one["count"] for one in figures["failure_examples"]} == {BROKEN: 1, REFUSED: 1}
    assert counts["shorter_than_requested"] == 3 and counts["met_targets"] == 2
    rates = {name: rate["value"] for name, rate in figures["rates"].items()}
    assert rates == {
        "requests": 3 / 4,
        "output_tokens": 9 / 4,
        "prompt_tokens": 30 / 4,
        "total_tokens": 39 / 4,
        "goodput": 2 / 4,
    }
    assert figures["client_cpu_share"] == pytest.approx(0.025) and figures["sent_late"] is None
    assert "goodput" not in level_figures(LevelResult(PLAN, FIVE, duration_s=4.0), {})["rates"]


def test_a_level_without_requests_has_figures():
    figures = level_figures(LevelResult(PLAN, []), {})
    assert figures["counts"]["sent"] == 0 == figures["rates"]["requests"]["value"]
    assert not any(figures["latencies"].values()) and figures["requests_running"] == {"mean": 0, "max": 0}


@pytest.mark.parametrize(
    ("words", "met"),
    [
        (["ttft:100.001"], [0, 1]),
        (["ttft:99"], []),
        (["tpot:100"], [1, 2]),
        (["tpot:200", "ttft:400"], [0, 1]),
        (["e2e:350"], [1]),
        (["e2el:450", "ttft:450"], [0, 1]),
        (["ttft:1e6"], [0, 1, 2]),
    ],
)
def test_goodput(words, met):
    targets = parse_targets(words)
    assert [i for i, one in enumerate(FIVE) if meets(one, targets)] == met


@pytest.mark.parametrize(
    "words", [["x:5"], ["ttft"], ["ttft:0"], ["ttft:-1"], ["ttft:x"], ["ttft:inf"], ["e2e:1", "e2el:2"]]
)
def test_targets_that_are_none(words):
    with pytest.raises(UsageError, match="--goodput"):
        parse_targets(words)


def test_a_request_without_text_meets_no_target():
    assert not meets(record(0.0), {"e2e": 5.0})


def test_requests_running_and_tokens_over_time():
    assert max(n for _, n in requests_running(FIVE)) == 2 and requests_running(FIVE)[-1][1] == 0
    rates = tokens_over_time(FIVE[:3], 2.0, 4)
    assert [at for at, _ in rates] == [0.25, 0.75, 1.25, 1.75] and sum(
        rate * 0.5 for _, rate in rates
    ) == pytest.approx(9)
    assert [rate for _, rate in rates] == pytest.approx([6, 10, 0, 2])


def test_intervals_hold_the_true_values_as_often_as_they_say():
    source, inside, runs = random.Random(5), {"mean": 0, "p50": 0, "p90": 0}, 2000
    truth = {"mean": 1.0, "p50": math.log(2), "p90": math.log(10)}
    for _ in range(runs):
        found = intervals([source.expovariate(1) for _ in range(200)])
        for name, value in truth.items():
            low, high = found[name]
            inside[name] += low <= value <= high
    assert all(0.93 <= n / runs <= 0.985 for n in inside.values()), inside


def test_too_few_values_have_no_intervals():
    assert intervals([1.0]) == dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    many = [float(i) for i in range(100)]
    found = intervals(many)
    assert found["p99"] is None and found["p50"] == [39.0, 60.0] and fmean(found["mean"]) == pytest.approx(49.5)
