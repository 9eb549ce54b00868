"""Tuning on a clock that kernels advance themselves: what is right, timed in turn, and chosen beyond noise only."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from inferplane.binding import Bench, KernelTiming, Options, PlanSettings, bind, tune
from inferplane.binding.tuning import TOKENS, choose
from inferplane.cli import main
from inferplane.ops import RMSNorm, placeholder
from inferplane.plugin import HOST, Features, Kernel
from tests.unit.types.test_schemas import check

MODEL = RMSNorm(placeholder(64), 1e-6)


class Clock:
    """Seconds that pass only in kernels."""

    def __init__(self) -> None:
        self.now, self.recorded = 0.0, 0

    def __call__(self) -> float:
        return self.now

    def record(self, work):
        self.recorded += 1
        return work


def kernel(clock: Clock, provider: str, seconds, *, rank: int = 10, wrong: bool = False, **options) -> Kernel:
    lasts = itertools.cycle(seconds if isinstance(seconds, tuple) else (seconds,))

    def norm(p, x):
        clock.now += next(lasts)
        y = RMSNorm.__call__(p, x)
        return y * 2 if wrong else y

    return Kernel("rms_norm", provider, norm, rank=rank, capture_safe=options.pop("capture_safe", True), **options)


def outcome(clock: Clock, *kernels: Kernel, options: Options | None = None):
    settings = PlanSettings("made", torch.float32, features=Features([]))
    plan = bind(MODEL, list(kernels), settings, lambda request: [], options=options or Options())
    bench = Bench("made", HOST, torch.float32, Features([]), lambda request: [])
    return tune(plan, bench, clock, clock.record)


def test_the_fastest_is_chosen_for_every_kind_of_step():
    clock = Clock()
    found = outcome(clock, kernel(clock, "slow", 3e-3, rank=50), kernel(clock, "fast", 1e-3))
    assert [t.key.split("|")[1] for t in found] == list(TOKENS)
    assert {t.before for t in found} == {"slow:norm"} and {t.chosen for t in found} == {"fast:norm"}
    slow, fast = found[0].timings
    assert slow.score == pytest.approx(3e-3) and fast.score == pytest.approx(1e-3)
    assert sorted(fast.seconds) == sorted(TOKENS["decode"])


def test_a_wrong_kernel_is_out_however_fast_it_is():
    clock = Clock()
    found = outcome(clock, kernel(clock, "right", 3e-3, rank=50), kernel(clock, "wrong", 1e-6, wrong=True))
    assert all(t.chosen == "right:norm" for t in found)
    (out,) = [t for t in found[0].timings if t.kernel == "wrong:norm"]
    assert out.wrong and "tolerance" in out.wrong and not out.seconds


def test_a_wrong_first_choice_is_replaced():
    clock = Clock()
    found = outcome(clock, kernel(clock, "wrong", 1e-6, rank=50, wrong=True), kernel(clock, "right", 3e-3))
    assert all((t.before, t.chosen) == ("wrong:norm", "right:norm") for t in found)


def test_within_noise_nothing_changes():
    clock = Clock()
    shaky = (2e-3, 2.6e-3, 3.4e-3, 2.9e-3, 2.2e-3)
    found = outcome(clock, kernel(clock, "first", 2.8e-3, rank=50), kernel(clock, "shaky", shaky))
    assert all(t.chosen == "first:norm" for t in found)


def test_short_calls_are_repeated_until_they_can_be_timed():
    clock = Clock()
    found = outcome(clock, kernel(clock, "slow", 4e-5, rank=50), kernel(clock, "fast", 1e-5))
    assert found[0].timings[1].score == pytest.approx(1e-5, rel=1e-6)
    assert found[0].chosen == "fast:norm"


def test_only_what_may_be_recorded_is_recorded():
    clock = Clock()
    outcome(clock, *(kernel(clock, p, 3e-3, capture_safe=False) for p in ("one", "other")))
    assert clock.recorded == 0
    outcome(clock, *(kernel(clock, p, 3e-3) for p in ("one", "other")))
    assert clock.recorded == 2 * sum(map(len, TOKENS.values()))


def test_pins_and_changed_results_are_left_alone():
    clock = Clock()
    two = kernel(clock, "one", 1e-3, rank=50), kernel(clock, "other", 1e-4)
    assert outcome(clock, *two, options=Options({"rms_norm": "one"})) == []
    assert outcome(clock, two[0], kernel(clock, "coarse", 1e-4, extra_error=0.1)) == []


@pytest.mark.parametrize(("seconds", "chosen"), [(0.98, "old"), (0.9, "new"), (1.2, "old")])
def test_a_gain_must_be_worth_it(seconds, chosen):
    old = KernelTiming("old", seconds={1: [1.0, 1.0, 1.0]})
    assert choose("old", [old, KernelTiming("new", seconds={1: [seconds] * 3})]) == chosen


def test_nothing_right_keeps_what_ranks_chose():
    assert choose("old", [KernelTiming("old", wrong="a"), KernelTiming("new", wrong="b")]) == "old"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A lock file that the verb has written for the demo model, few times measured."""
    path = tmp_path_factory.mktemp("tune") / "lock.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inferplane.binding.tuning.ROUNDS", 1)
        patch.setattr("inferplane.binding.tuning.MIN_MEASUREMENT_S", 1e-5)
        patch.setattr("inferplane.binding.tuning.TOKENS", {"decode": (1,), "mixed": (9,)})
        assert main.main(["tune", "--device", "cpu", "--out", str(path)]) == 0
    return path


def test_the_verb_writes_a_lock_file_that_is_taken(written, capsys):
    content = json.loads(written.read_text())
    check("lock", content)
    assert content["choices"].keys() == content["measured"].keys()
    row = next(iter(content["measured"].values()))
    assert row["before"] in row["kernels"] and all(k["tolerance"] > 0 for k in row["kernels"].values())
    words = ["generate", "--device", "cpu", "-p", "def", "--max-tokens", "2", "--lock", str(written)]
    assert main.main(words) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda", "--out", "lock.json"], "'cuda'"),
        (["--device", "cpu", "--out", "nowhere/lock.json"], "cannot be written"),
        (["--device", "cpu"], "--out"),
    ],
)
def test_mistakes_get_one_clear_error_and_no_file(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["tune", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and "to do: " in error
    assert not (tmp_path / "lock.json").exists()
