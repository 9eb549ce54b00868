"""Whether drafting pays, by the tokens a second that steps gave: sequences, costs and acceptances are simulated."""

import random
from types import SimpleNamespace

import pytest

from inferplane.engine.request.params import SamplingParams
from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.control import (
    LEVELS,
    MOST_SEGMENTS,
    MOST_TRIALS,
    NEVER,
    SEGMENT_STEPS,
    SEGMENTS,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Acceptance,
    BatchLevel,
    DraftControl,
    LevelComparison,
)


def sequence(number, generated=0, **params):
    return SimpleNamespace(
        request_id=number, arrival=number, params=SamplingParams(**params), generated=[0] * generated
    )


class World:
    """Steps of `count` sequences. A step takes `fixed` seconds, `row` for each row, and `draft` for each draft made.

    Args:
        acceptance: of each sequence, by its number: how likely a draft is accepted.
        noise: share by which a step's time varies.
    """

    def __init__(self, acceptance, fixed=1.0, row=0.01, draft=0.0, noise=0.0, most=3, **control):
        self.control = DraftControl(most, control.pop("trial_tokens", 10**9), **control)
        self.lengths = AdaptiveLength(most, True, self.control)
        self.source, self.acceptance = random.Random(0), acceptance
        self.fixed, self.row, self.draft, self.noise = fixed, row, draft, noise
        self.each = [sequence(n) for n in range(len(acceptance))]
        self.pending = [0] * len(self.each)
        self.tokens, self.seconds = 0, 0.0

    def step(self):
        rows, tokens = len(self.each) + sum(self.pending), 0
        made = 0
        for i, (one, drafts) in enumerate(zip(self.each, self.pending)):
            accepted = 0
            while accepted < drafts and self.source.random() < self.acceptance[i]:
                accepted += 1
            tokens += 1 + accepted
            one.generated.extend([0] * (1 + accepted))
            self.lengths.observe(one, drafts, accepted)
            self.pending[i] = self.lengths.length(one)
            made += self.pending[i]
        seconds = self.fixed + self.row * rows + self.draft * made
        seconds *= 1 + self.noise * self.source.uniform(-1, 1)
        self.lengths.observe_step(len(self.each), tokens, seconds)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds

    def rate(self, steps):
        self.tokens, self.seconds = 0, 0.0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds

    def plain(self):
        return len(self.each) / (self.fixed + self.row * len(self.each))


def test_it_stops_where_rows_are_dear():
    world = World([0.5] * 64, fixed=1.0, row=0.1)
    world.rate(300)
    assert LEVELS[world.control.batches[7].level] > 0.6
    assert world.rate(2000) > 0.97 * world.plain()


def test_it_stops_where_drafting_is_dear_although_all_is_noisy():
    world = World([0.6] * 64, fixed=1.0, row=0.03, draft=0.1, noise=0.1)
    world.rate(1500)
    assert world.control.is_paused or world.control.batches[7].level >= NEVER - 1
    assert world.rate(3000) > 0.97 * world.plain()


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_goes_on_where_rows_are_cheap(noise):
    world = World([0.7] * 2, fixed=1.0, row=0.001, noise=noise)
    always = World([0.7] * 2, fixed=1.0, row=0.001, noise=noise)
    always.lengths.control = None
    world.rate(100)
    assert world.rate(3000) > 0.96 * always.rate(3000)
    assert world.rate(1000) > 1.5 * world.plain()


def test_sequences_that_repeat_themselves_draft_beside_others():
    acceptance = [0.95] * 16 + [0.1] * 48
    world = World(acceptance, fixed=1.0, row=0.02)
    world.rate(3000)
    assert world.rate(2000) > 1.1 * world.plain()
    assert sum(world.pending[:16]) > 24 and sum(world.pending[16:]) < 16


def test_it_begins_again_when_the_text_does():
    world = World([0.1] * 8, fixed=1.0, row=0.1)
    world.rate(3000)
    assert world.rate(500) > 0.97 * world.plain()
    world.acceptance = [0.98] * 8
    world.rate(6000)
    assert world.rate(500) > 1.5 * world.plain()


def test_sizes_of_batch_have_levels_of_their_own():
    world = World([0.5] * 64, fixed=1.0, row=0.1)
    world.rate(600)
    world.each, world.pending = world.each[:1], world.pending[:1]
    world.rate(400)
    assert world.control.batches[7].level > 2 and world.control.batches[1].level < 3
    assert world.rate(500) > 1.3 * world.plain()


def test_a_turn_with_two_sizes_does_not_count():
    control = DraftControl(3, 0)
    for size in (4, 8) * 40:
        control.observe_step(size, size, 1.0)
    assert all(not b.comparison.rates for b in control.batches.values())


def test_trials():
    """While no drafts are made, one in four sequences gets one every 32nd step, unless it is too long."""
    control = DraftControl(3, trial_tokens=20)
    control.batches[control._size] = BatchLevel(NEVER)
    given = set()
    for step in range(TRIAL_STEPS * TRIAL_SHARE):
        control.steps = step
        limits = [control.limit(sequence(n, generated=10 + 20 * (n == 7))) for n in range(8)]
        given |= {n for n, limit in enumerate(limits) if limit}
        assert sum(limits) in ((1, 2) if step % TRIAL_STEPS == 0 else (0,))
    assert given == set(range(7))


def test_seeds_are_not_limited_where_drafts_change_what_is_drawn():
    for preserves in (True, False):
        control = DraftControl(3, 0, preserves)
        control.steps = 1
        control.batches[control._size] = BatchLevel(NEVER)
        assert control.limit(sequence(1, temperature=0.5, seed=7)) == (0 if preserves else 3)
        assert control.limit(sequence(1, temperature=0.5)) == control.limit(sequence(1, temperature=0, seed=7)) == 0


def test_a_least_probability_limits_the_number():
    control = DraftControl(7, 0)
    control.steps, control.batches[control._size] = 1, BatchLevel(LEVELS.index(0.65))
    for mean, most in ((0.9, 4), (0.8, 1), (0.6, 0), (1.0, 7), (0.0, 0)):
        control._of[1] = Acceptance(mean)
        assert control.limit(sequence(1)) == most
        assert most == 7 or mean ** (most + 1) < 0.65 <= mean**most
    control.forget(sequence(1))
    assert control.limit(sequence(1)) == 1  # by what is known of others


def test_acceptance_is_counted():
    known = Acceptance(0.5)
    known.observe(3, 1)  # one accepted, one rejected, the third not tried
    assert known.mean == pytest.approx((0.5 * 2 + 1) / 4) and known.trials == 4
    for _ in range(50):
        known.observe(4, 4)
    assert known.trials == MOST_TRIALS and known.mean > 0.99


def compared(rates):
    found = LevelComparison([2, 5])
    for one, other in rates:
        assert not found.is_over
        found.add(one, 1.0)
        found.add(other, 1.0)
    return found


def test_a_clear_lead_ends_a_comparison():
    assert compared([(10, 11)] * SEGMENTS).left == [5]
    assert compared([(10, 9)] * SEGMENTS).left == [2]
    assert compared([(10, 11), (10, 12)] * (SEGMENTS // 2)).find_best() == 5


def test_a_lead_that_may_be_chance_does_not():
    found = compared([(10, 11), (10, 8)] * (MOST_SEGMENTS // 2 - 1))
    assert not found.is_over and found.left == [2, 5]
    found = compared([(10, 14), (10, 9)] * (MOST_SEGMENTS // 2))
    assert found.is_over and found.find_best() == 5  # by the average, as it could not be decided


def test_a_level_in_use_stays_unless_another_brings_enough():
    found = compared([(10, 10.05)] * MOST_SEGMENTS)
    assert found.is_over and found.find_best() == 2
    assert compared([(10, 10.2)] * SEGMENTS).find_best() == 5


def test_of_three_levels_the_clearly_worse_drops_out():
    found = LevelComparison([0, 3, 6])
    for level, rate in ((0, 10), (3, 5), (6, 11)) * SEGMENTS:
        assert found.level == level
        found.add(rate, 1.0)
    assert found.is_over and found.find_best() == 6
    found = LevelComparison([0, 3, 6])
    for turn in range(SEGMENTS):
        for rate in (10 + turn % 2, 5, 10.5 - turn % 2):
            found.add(rate, 1.0)
    assert found.left == [0, 6] and not found.is_over and found.level == 0


def test_seconds_of_drafting_do_not_count_without_drafts():
    """A drafter's entries are kept up while levels are compared; a pause has none of that cost."""
    control = DraftControl(3, 0)
    for _ in range(3 * SEGMENTS * (SEGMENT_STEPS + 1) + 1):
        control.observe_step(4, 4, 1.0, 0.5)
    assert control.batches[3].level == NEVER and control.batches[3].worth == 1.0


def test_steps_without_a_token_are_no_reason_to_stop():
    control = DraftControl(3, 0)
    for _ in range(3 * MOST_SEGMENTS * (SEGMENT_STEPS + 1) + 1):
        control.observe_step(1, 0, 1e-3)
    assert control.batches[1].worth >= 0
