"""One request's fault ends that request: the others' tokens stay what they are, and no block is lost."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from inferplane.engine.loop.choose_tokens import choose_tokens
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import ScheduledChunk
from inferplane.errors import EngineError
from inferplane.types.batch import Query
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, alone, engine, interrupted, right

PLAIN = greedy(10)


class Text:
    """A detokenizer that takes down what it is told, and raises or stops at a given token."""

    visible = frozenset()

    def __init__(self, at=None, error=None, stops=False):
        self.ids, self.at, self.error, self.stops = [], at, error, stops

    def push(self, ids, part="answer"):
        self.ids += ids
        if len(self.ids) == self.at and self.error is not None:
            raise self.error
        return self.stops and len(self.ids) == self.at

    def take(self, *, end=False):
        return ""


class Rule:
    """A constraint that allows everything, and raises where it is told to."""

    def __init__(self, fail_in="", at=0):
        self.fail_in, self.at, self.ended, self.seen, self.reasoning_tokens = fail_in, at, False, [], 0

    def is_free(self, count):
        return False

    def masks(self, drafts):
        if self.fail_in == "masks" and len(self.seen) >= self.at:
            raise RuntimeError("no mask")
        return [None] * (1 + len(drafts))

    def accept(self, tokens):
        self.seen += tokens
        if self.fail_in == "accept" and len(self.seen) >= self.at:
            raise RuntimeError("not accepted")


def run(faulty, script=None, n=4, **options):
    """`n` requests, the second with what `faulty` gives `add`; returns it after all is over and checked."""
    e = engine(64, script=script, **options)
    each = [e.add(p, PLAIN, **(faulty if i == 1 else {})) for i, p in enumerate(some(n, 5))]
    e.finish()
    assert all(right(r) and (i == 1 or r.finish_reason == "length") for i, r in enumerate(each))
    assert e.pools.used == 0 and sum(e.metrics.finished.values()) == n
    return e, each[1]


@pytest.mark.parametrize("script", [None, "right", "alternate"])
@pytest.mark.parametrize(
    ("faulty", "says", "tokens"),
    [
        ({"text": Text}, "OSError: disk", 3),
        ({"constraint": "masks"}, "RuntimeError: no mask", None),
        ({"constraint": "accept"}, "RuntimeError: not accepted", 3),
    ],
    ids=["text", "masks", "accept"],
)
def test_its_text_or_constraint_fails(faulty, says, tokens, script):
    made = {"text": Text(3, OSError("disk"))} if "text" in faulty else {"constraint": Rule(faulty["constraint"], 3)}
    _, r = run(made, script)
    assert (r.finish_reason, r.error) == ("error", says)
    assert len(r.generated) == tokens or (tokens is None and 3 <= len(r.generated) <= 6)


@pytest.mark.parametrize("script", [None, "right"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_its_forward_fails(script, at):
    e = engine(64, script=script)
    each = [e.add(p, PLAIN) for p in some(5, 5)]

    def fail(request):
        if request is each[3] and len(request.generated) >= at:
            raise ValueError("an odd shape")

    e.fail_for = fail
    e.finish()
    assert (each[3].finish_reason, each[3].error) == ("error", "ValueError: an odd shape")
    assert all(map(right, each)) and e.metrics.finished == {"error": 1, "length": 4}


def test_it_fails_in_the_middle_of_its_prompt():
    e = engine(64, max_num_batched_tokens=8)
    a, b = (e.add(p, PLAIN) for p in some(2, 30))

    def fail(request):
        if request is a and request.computed >= 16:
            raise ValueError("here")

    e.fail_for = fail
    e.finish()
    assert a.finish_reason == "error" and b.finish_reason == "length" and right(b)


def test_every_forward_fails():
    e = engine(64)
    each = [e.add(p, PLAIN) for p in some(3, 5)]

    def fail(request):
        raise MemoryError("none left")

    e.fail_for = fail
    e.finish()
    assert [(r.finish_reason, r.error) for r in each] == [("error", "MemoryError: none left")] * 3
    e.fail_for = lambda request: None
    again = e.add([1, 2], PLAIN)
    e.finish()
    assert right(again) and again.finish_reason == "length"


def test_a_fault_that_passes_costs_nobody():
    """The step fails, each of its sequences alone does not: all go on."""
    e = engine(64)
    each = [e.add(p, PLAIN) for p in some(4, 5)]
    left = [3]

    def fail(request):
        if left[0] and len(e.now) > 1:
            left[0] -= 1
            raise RuntimeError("busy")

    e.fail_for = fail
    e.finish()
    assert all(right(r) and r.finish_reason == "length" for r in each) and not left[0]


@pytest.mark.parametrize("where", ["run", "sample", "propose", "schedule"])
@pytest.mark.parametrize("script", ["right", "alternate"])
def test_an_interrupted_step_is_done_again(where, script):
    e = engine(64, script=script)
    each = [e.add(p, PLAIN, text=Text()) for p in some(4, 9)]
    holder = {"run": e.runner, "sample": e.sampler, "schedule": e.scheduler}.get(where, e)
    inner = getattr(holder, where)

    def broken(*args):
        if where != "propose":
            inner(*args)
        raise KeyboardInterrupt

    while e.busy:
        setattr(holder, where, broken)
        interrupted(e.step)
        e.check_books()
        setattr(holder, where, inner)
        if e.busy:
            e.step()
    assert all(right(r) and r.finish_reason == "length" and r.text.ids == r.generated for r in each)


@pytest.mark.parametrize("script", [None, "right"])
def test_an_interrupt_while_tokens_are_accepted(script):
    """The sequence it hits cannot go on, for its text lacks a token; it ends, and the others go on."""
    e = engine(64, script=script)
    each = [e.add(p, PLAIN, text=Text(*((3, KeyboardInterrupt()) if i == 1 else ()))) for i, p in enumerate(some(4, 5))]
    while e.busy:
        interrupted(e.step)
        e.check_books()
    assert [r.finish_reason for r in each] == ["length", "abort", "length", "length"] and all(map(right, each))
    assert all(r.text.ids == r.generated for r in each)


@pytest.mark.parametrize("script", ["right", "junk"])
def test_a_proposer_that_fails_costs_drafts_only(script):
    e = engine(64, script=script)
    inner, calls = e.speculator.proposer.propose, [0]

    def propose(*args):
        calls[0] += 1
        if calls[0] % 2:
            raise RuntimeError("no room for drafts")
        return inner(*args)

    e.speculator.proposer.propose = propose
    each = [e.add(p, PLAIN) for p in some(3, 5)]
    with pytest.warns(UserWarning, match="no room for drafts") as told:
        e.finish()
    assert len(told) == 1 and e.stats()["spec_decode_failures_total"] == (calls[0] + 1) // 2 > 1
    assert all(right(r) and r.finish_reason == "length" for r in each)


def test_no_warning_otherwise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run({}, "right")


def test_timeouts(monkeypatch):
    import inferplane.engine.loop.engine as module

    now = [50.0]
    monkeypatch.setattr(module, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    e = engine(64, max_num_seqs=1)
    patient = e.add([1, 2], greedy(20), arrived=now[0])
    hasty = [e.add([3], greedy(20, timeout_s=t), arrived=now[0]) for t in (5.0, 50.0)]
    for _ in range(4):
        e.step()
    now[0] = 55.0
    assert hasty[0] in e.step() and hasty[0].finish_reason == "timeout" and not hasty[0].generated
    e.end(patient, "abort")
    e.step()
    now[0] = 101.0
    assert e.step() == [hasty[1]] and hasty[1].finish_reason == "timeout" and not e.busy
    e.check_books()
    assert len(hasty[1].generated) == 1 and hasty[1].timings().total_s == 51.0
    e.end(hasty[1], "abort")
    assert hasty[1].finish_reason == "timeout" and e.metrics.finished == {"timeout": 2, "abort": 1}


def test_abort_at_every_moment():
    for when in range(14):
        e = engine(64, script="right", max_num_batched_tokens=8)
        a, b = (e.add(p, PLAIN) for p in some(2, 20))
        for _ in range(when):
            if e.busy:
                e.step()
        e.end(a, "abort")
        e.check_books()
        e.finish()
        assert right(a) and right(b) and b.finish_reason == "length"


@pytest.mark.parametrize("script", [None, "right", "alternate"])
def test_ends_of_text(script):
    """A stop string, an end token and the last token allowed, wherever they stand among accepted drafts."""
    prompt = some(1, 5)[0]
    whole = alone(tuple(prompt), greedy(12))[0]
    for n in range(1, 12):
        e = engine(64, script=script, drafts=4)
        end = whole[n - 1]
        stop = e.add(prompt, greedy(12), text=Text(n, stops=True))
        last = e.add(prompt, greedy(n), text=Text())
        token = e.add(
            prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=[end]), text=Text()
        )
        e.finish()
        assert (stop.generated, stop.finish_reason) == (whole[:n], "stop") and stop.text.ids == whole[:n]
        assert (last.generated, last.finish_reason) == (whole[:n], "length") and last.text.ids == whole[:n]
        cut = whole.index(end) + 1
        assert (token.generated, token.finish_reason) == (whole[:cut], "stop")
        assert token.text.ids == whole[: cut - 1], "the token that ends it is no part of the text"
        assert 0 <= max(whole) < V


@pytest.mark.parametrize(
    ("drawn", "value"), [([2, 2, 2], 0.0), ([16], 0.0), ([-1], 0.0), ([3], torch.nan), ([3], -torch.inf), ([], 0.0)]
)
def test_what_a_broken_sampler_draws_fails_the_step(drawn, value):
    """A token too many or too few, one that is none, one whose logit is no number."""
    request = Request(1, [5, 6], SamplingParams(temperature=0), computed=1)
    logits = torch.zeros(64, 16).index_fill(1, torch.tensor([3]), value)[:1]  # memory goes on behind the row

    class Broken:
        def argmax(self, logits):
            return torch.tensor(drawn, dtype=torch.int64)

    def decided():
        return choose_tokens([ScheduledChunk(request, 1)], [Query([6], 1, [0], 1)], logits, Broken(), None)

    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        decided()
    drawn[:] = [4]
    assert [chosen.tokens for chosen in decided()] == [[4]]


@pytest.mark.parametrize("lost", ["ranks", "device"])
def test_an_engine_that_can_serve_nobody_any_more_says_so(lost, monkeypatch):
    """Its caller hears of it at once, instead of an error for each request to come."""
    e = engine(64)
    each = [e.add(p, PLAIN) for p in some(2, 5)]

    def fail(request):
        raise RuntimeError("gone")

    def lose(*size, **more):
        raise RuntimeError("an illegal memory access was encountered")

    e.fail_for = fail
    if lost == "ranks":
        monkeypatch.setattr(e.runner, "ranks", SimpleNamespace(broken="a step failed on rank 0"), raising=False)
    else:
        monkeypatch.setattr(e, "_probe", SimpleNamespace(zero_=lose))
    with pytest.raises(EngineError, match="out of step" if lost == "ranks" else "illegal memory access") as ended:
        e.finish()
    assert ended.value.remedy == "start the model anew"
    assert [r.finish_reason for r in each] == ["error", None]
