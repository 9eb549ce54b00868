"""How many tokens of prompts join sequences that decode: by limits, and by measured times of steps."""

import math
import random

import pytest

from inferplane.engine.loop import engine as engine_module
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.schedule.insertion import (
    FIRST_TOKENS,
    MIN_TOKENS,
    Insertion,
    PromptAllowance,
    StepTimes,
    StepWork,
    count_pairs,
)
from tests.unit.support.fake_model import engine, right

COSTS = (0.004, 0.0005, 0.0001, 2e-8)
"""Seconds a step, a row that decodes, a token of a prompt, and a pair."""


def seconds_of(work, costs=COSTS):
    return sum(c * n for c, n in zip(costs, (1, *work)))


def measured(costs=COSTS, steps=80, noise=0.0, seed=0, **fixed):
    """Times of steps of random sizes."""
    times, source = StepTimes(), random.Random(seed)
    for _ in range(steps):
        prompt = source.choice([0, source.randint(1, 400)])
        work = StepWork(source.randint(1, 16), prompt, prompt * source.randint(1, 4000) + 16 * source.randint(9, 4000))
        work = work._replace(**fixed)
        times.observe(work, seconds_of(work, costs) * (1 + noise * source.uniform(-1, 1)))
    return times


def test_times_of_steps_are_found():
    times = measured()
    for work in (StepWork(3, 0, 5000), StepWork(8, 300, 300 * 2000), StepWork(1, 50, 50 * 25)):
        assert times.predict(work) == pytest.approx(seconds_of(work), rel=0.02)
    assert times.deviation < 1e-4


def test_times_of_noisy_steps_are_found_nearly():
    times = measured(noise=0.2)
    for work in (StepWork(8, 300, 300 * 2000), StepWork(4, 200, 200 * 900)):
        assert times.predict(work) == pytest.approx(seconds_of(work), rel=0.15)
    assert times.deviation > 0


def test_prompts_are_not_forgotten_while_sequences_only_decode():
    times = measured()
    for _ in range(2000):
        times.observe(StepWork(4, 0, 8000), seconds_of(StepWork(4, 0, 8000)))
    work = StepWork(4, 300, 300 * 2000)
    assert times.predict(work) == pytest.approx(seconds_of(work), rel=0.05)


def test_a_step_that_compiles_counts_for_less():
    times = measured()
    work = StepWork(4, 300, 300 * 2000)
    times.observe(work, 60.0)
    assert times.predict(work) < 2 * seconds_of(work)


def test_a_slow_first_step_is_forgotten_while_prompts_wait():
    times, limits = StepTimes(), Insertion(max_inter_token_ms=50)
    times.observe(StepWork(4, 0, 100), 8.0)
    found = []
    for _ in range(400):
        allowed = PromptAllowance(limits, times, [(1, 100)] * 4)
        found.append(allowed.take(0, 10**6))
        work = StepWork(4, found[-1], count_pairs((found[-1], 0)) + 4 * count_pairs((1, 100)))
        times.observe(work, seconds_of(work))
    assert found[0] == MIN_TOKENS and min(found[-50:]) > 200


def test_tiny_costs_of_pairs_do_not_cancel():
    times = measured((0.004, 0.0005, 0.0001, 1e-18))
    assert times.most_tokens(0, 0.1) == pytest.approx(1000, rel=0.03)


def test_no_coefficient_is_negative():
    times = StepTimes()
    for rows, seconds in ((1, 0.5), (2, 0.4), (3, 0.3), (4, 0.2)):  # more work, and less time
        times.observe(StepWork(rows, 0, 0), seconds)
    assert min(times.coefficients()) >= 0 and times.predict(StepWork(9, 0, 0)) > 0


def test_most_tokens_are_those_that_fit():
    times = measured()
    for first, seconds in ((0, 0.01), (5000, 0.01), (100_000, 0.05)):
        most = times.most_tokens(first, seconds)
        cost = lambda n: seconds_of(StepWork(0, n, count_pairs((n, first)))) - COSTS[0]  # noqa: B023, E731
        assert cost(most) == pytest.approx(seconds, rel=0.05)
    assert times.most_tokens(0, 0.0) == times.most_tokens(0, -1.0) == 0
    assert StepTimes().most_tokens(0, 1.0) >= 2**31


def test_nobody_waits_where_nothing_decodes():
    allowed = PromptAllowance(Insertion(None, 1, 1), measured(), [])
    assert allowed.take(0, 100_000) == 100_000 and not allowed.is_used_up


def test_tokens_are_limited():
    allowed = PromptAllowance(Insertion(max_prompt_tokens_per_step=20), StepTimes(), [(1, 100)])
    assert [allowed.take(0, 12), allowed.is_used_up, allowed.take(0, 12), allowed.take(0, 12)] == [12, False, 8, 0]
    assert allowed.is_used_up


def test_measured_times_limit_tokens():
    times, decoding = measured(), [(1, 1000)] * 8
    short = PromptAllowance(Insertion(max_inter_token_ms=40), times, decoding)
    found = short.take(2000, 10**6)
    work = StepWork(8, found, count_pairs((found, 2000)) + 8 * count_pairs((1, 1000)))
    assert 0.030 < seconds_of(work) < 0.037 and found > 100
    assert short.take(0, 10**6) < 30  # of what rounding leaves
    allowed = PromptAllowance(Insertion(None, 50, 40), times, decoding)
    assert allowed.take(2000, 10**6) == 50  # the smaller of both limits


def test_several_prompts_share_what_a_limit_leaves():
    times, decoding = measured(), [(1, 1000)] * 8
    whole = PromptAllowance(Insertion(max_inter_token_ms=40), times, decoding).take(0, 10**6)
    short = PromptAllowance(Insertion(max_inter_token_ms=40), times, decoding)
    found = [short.take(0, 40) for _ in range(20)]
    assert found[:3] == [40] * 3 and sum(found) == pytest.approx(whole, rel=0.1)


def test_some_tokens_pass_although_the_limit_is_missed():
    short = PromptAllowance(Insertion(max_inter_token_ms=1), measured(), [(1, 1000)] * 8)
    assert short.seconds < 0 and not short.is_used_up
    assert [short.take(0, 10), short.take(0, 100), short.take(0, 100)] == [10, MIN_TOKENS - 10, 0]
    assert short.is_used_up


def test_the_first_steps_are_small_and_double():
    limits, times, found = Insertion(max_inter_token_ms=1000), StepTimes(), []
    for _ in range(4):
        allowed = PromptAllowance(limits, times, [(1, 10)])
        found.append(allowed.take(0, 10**6))
        times.observe(StepWork(1, found[-1], 0), 1e-6 * found[-1])
    assert found == [FIRST_TOKENS, 2 * FIRST_TOKENS, 4 * FIRST_TOKENS, 8 * FIRST_TOKENS]


class Clock:
    """Time that passes by what a step computes."""

    def __init__(self, e):
        self.now, self.inner, self.steps = 0.0, e.runner.run, []
        self.engine = e
        e.runner.run = self.run

    def monotonic(self):
        return self.now

    def run(self, batch):
        lens = batch.lens()
        counts = [b - a for a, b in zip(lens.query_start, lens.query_start[1:])]
        decode = sum(n for n in counts if n == 1)
        work = StepWork(decode, sum(counts) - decode, sum(n * t for n, t in zip(counts, lens.seq_lens)))
        self.now += seconds_of(work)
        self.steps.append(seconds_of(work))
        return self.inner(batch)


@pytest.mark.parametrize("limit", [None, 12])
def test_streams_hardly_wait_for_prompts(limit, monkeypatch):
    """A limit holds for nearly every step while prompts arrive, all of which end right; without one steps are long."""
    e = engine(4000, max_num_seqs=12, max_num_batched_tokens=256, insertion=Insertion(max_inter_token_ms=limit))
    clock = Clock(e)
    monkeypatch.setattr(engine_module, "time", clock)
    greedy = lambda n: SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)  # noqa: E731
    running = [e.add([n + 1], greedy(200)) for n in range(4)]
    for _ in range(20):
        e.step()
    begun = len(clock.steps)
    prompts = [e.add([1 + (i * n) % 7 for i in range(150)], greedy(2)) for n in range(8)]
    while any(r.finish_reason is None for r in prompts):
        e.step()
    during = sorted(clock.steps[begun:])
    assert all(map(right, prompts)) and {r.finish_reason for r in prompts} == {"length"}
    if limit is None:
        assert during[-1] > 0.024 and len(during) < 10
    else:
        assert during[math.ceil(0.95 * len(during)) - 1] <= 0.012, during
        assert len(during) < 40  # of about 50 tokens each
    e.finish()
    assert all(map(right, running))


def test_one_request_joins_a_step():
    e = engine(64, max_num_seqs=8, insertion=Insertion(max_new_requests_per_step=1))
    made = [e.add([n + 1, 2, 3], SamplingParams(max_tokens=3)) for n in range(5)]
    counts = []
    for _ in range(3):
        e.step()
        counts.append(sum(r.started is not None for r in made))
    assert counts == [1, 2, 3]
    e.finish()
