"""The next step is launched while one runs: what that must never change, and what waits. The order counts, not time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inferplane.engine.loop.why_waited import (
    ALONE,
    REASONS,
    describe_overlap,
    describe_overlap_in_words,
    why_not_overlapped,
)
from inferplane.engine.request.params import SamplingParams
from inferplane.engine.schedule.insertion import Insertion
from inferplane.errors import EngineError, InferplaneWarning
from inferplane.kvcache import block_hashes
from inferplane.types import HOST
from tests.unit.engine.loop.test_faults import Rule, Text
from tests.unit.engine.loop.test_steps import greedy, some
from tests.unit.support.fake_model import V, alone, engine, interrupted, right


def overlapped(*sizes, **options):
    return engine(*sizes, async_scheduling="on", **options)


def stop_at(prompt, n, most=12):
    """Parameters with which a prompt stops at its n-th token, and no sooner."""
    whole = alone(tuple(prompt), greedy(most))[0]
    return SamplingParams(
        max_tokens=most, temperature=0, ignore_eos=True, stop_token_ids=[whole[n - 1]], min_tokens=n - 1
    )


def written(e):
    """For each batch, the last position it writes."""
    seen, look = [], e.runner.before

    def before(batch):
        seen.append(batch.positions.max().item())
        look(batch)

    e.runner.before = before
    return seen


def test_a_step_is_launched_before_the_one_before_is_read():
    e, order = overlapped(), []
    look, read = e.runner.before, e.runner.start_read
    e.runner.before = lambda batch: (order.append("launch"), look(batch))

    def start_read(tensors):
        wait = read(tensors)
        return lambda: (order.append("read"), wait())[1]

    e.runner.start_read = start_read
    r = e.add([1, 2, 3], greedy(5))
    e.finish()
    assert right(r) and order == ["launch", *["launch", "read"] * 4, "read"]
    assert e.metrics.counters["overlapped_steps_total"] == 4 and not e.metrics.waits


def test_the_host_waits_where_it_is_off():
    e = engine(async_scheduling="off")
    r = e.add([1, 2, 3], greedy(5))
    e.step()
    assert len(r.generated) == 1 and e.overlap is None and not e.scheduler.in_flight.steps
    e.finish()
    assert right(r) and "overlapped_steps_total" not in e.metrics.counters


# ------------------------------------------------------------------ what is found one step late


@pytest.mark.parametrize("how", ["token", "text"])
@pytest.mark.parametrize("block_tokens", [1, 2, 4])
def test_a_surplus_token_reaches_nobody(how, block_tokens):
    """Neither the user, nor the text, nor the prefix cache: only blocks of known tokens are found again."""
    prompt = some(1, 6)[0]
    for n in range(1, 10):
        e = overlapped(64, block_tokens)
        text = Text(n, stops=how == "text")
        r = e.add(prompt, greedy(12) if how == "text" else stop_at(prompt, n), text=text)
        other = e.add(prompt[::-1], greedy(16))
        e.finish()
        assert r.finish_reason == "stop" and len(r.generated) == n and (how == "text" or right(r))
        assert text.ids == r.generated[: n - (how == "token")] and right(other)
        known = set()
        for one in (r, other):
            tokens = [*one.prompt, *one.generated[:-1]]
            known |= {*block_hashes(e.root(""), tokens, block_tokens)}
        assert {*e.pools.first._by_hash} == known
        again = e.add(prompt, greedy(12))
        e.finish()
        assert (right(again) and again.cached_tokens > 0) or block_tokens == 4


def test_a_stop_costs_one_row_and_a_length_none():
    prompt = some(1, 6)[0]
    for n in range(1, 9):
        e = overlapped(enable_prefix_caching=False)
        stop = e.add(prompt, stop_at(prompt, n))
        e.finish()
        assert len(stop.generated) == n and e.runner.rows == len(prompt) + n
        e = overlapped(enable_prefix_caching=False)
        length = e.add(prompt, greedy(n))
        e.finish()
        assert len(length.generated) == n and e.runner.rows == len(prompt) + n - 1
        assert e.metrics.counters["forward_rows_total"] == e.runner.rows


@pytest.mark.parametrize("stop", [False, True])
def test_the_longest_sequence_of_model_and_cache(stop):
    """24 tokens, of which the last one is never written: 23 in 6 blocks of 4. No row lies behind them."""
    for n in (11, 12) if stop else (12,):
        e, prompt = overlapped(6, max_model_len=24), some(1, 12)[0]
        seen = written(e)
        r = e.add(prompt, stop_at(prompt, n) if stop else greedy(12))
        e.finish()
        assert right(r) and len(r.generated) == n and max(seen) == 22


@pytest.mark.parametrize("how", ["abort", "stop", "preempt"])
def test_blocks_are_given_back_after_the_step_in_flight(how):
    e, prompt = overlapped(12, enable_prefix_caching=False, max_num_seqs=2), some(1, 17)[0]
    r = e.add(prompt, stop_at(prompt, 2) if how == "stop" else greedy(8))
    next_one = e.add(some(1, 20, seed=1)[0], greedy(4))
    e.step()
    blocks = {*r.blocks}
    if how == "stop":
        e.step()
        assert r.finish_reason == "stop"
    elif how == "abort":
        e.end(r, "abort")
    else:
        e.scheduler.preempt(r)
    assert len(e.scheduler.in_flight.steps) == 1 and blocks and not r.blocks
    assert all(e.pools.first.users(b) == 1 for b in blocks), "they are nobody's, and not free"
    late = e.add(some(1, 17, seed=2)[0], greedy(4))
    e.step()
    assert not blocks & {*late.blocks}
    e.finish()
    assert right(r) and right(next_one) and right(late) and e.pools.used == 0


def test_states_are_given_back_after_the_step_in_flight():
    e = overlapped(recurrent=2, max_num_seqs=2, enable_prefix_caching=False)
    a, b = (e.add(p, greedy(8)) for p in some(2, 5))
    e.step()
    e.end(a, "abort")
    assert e.scheduler.states.available == 0
    c = e.add([4, 5], greedy(4))
    e.step()
    e.finish()
    assert right(a) and right(b) and right(c) and e.scheduler.states.available == 2


def test_windows_are_released_when_their_step_is_over():
    e = overlapped(9, 2, windows=(3,), max_num_seqs=2)
    each = [e.add(p, greedy(20)) for p in some(2, 3)]
    e.finish()
    assert all(map(right, each)) and e.metrics.counters["overlapped_steps_total"] > 10


# ------------------------------------------------------------------ whatever happens between two steps


def test_abort_and_preempt_at_every_moment():
    for when in range(12):
        for what in ("abort", "preempt"):
            e = overlapped(64, max_num_batched_tokens=8)
            a, b = (e.add(p, greedy(10)) for p in some(2, 20))
            for _ in range(when):
                e.step()
            if what == "abort":
                e.end(a, "abort")
            elif a in e.scheduler.running:
                e.scheduler.preempt(a)
            e.check_books()
            e.finish()
            assert right(a) and right(b) and b.finish_reason == "length"
            assert a.finish_reason == ("abort" if what == "abort" else "length")


def test_an_id_is_used_again_while_the_step_of_its_first_request_is_in_flight():
    e = overlapped()
    a = e.add([1, 2], greedy(9), request_id="x")
    e.step()
    e.end(a, "abort")
    b = e.add([7, 8, 9], greedy(9), request_id="x")
    e.finish()
    assert right(a) and right(b) and b.finish_reason == "length"


def test_close_waits_for_the_step_in_flight():
    e = overlapped()
    r, read = e.add([1, 2], greedy(9)), []
    e.fail_later_for = lambda request: read.append(e.cache.blocks)
    e.step()
    assert e.busy and len(read) == 1
    e.close()
    assert r.finish_reason == "abort" and len(read) == 2 and not e.busy
    assert e.pools.used == 0 and not e.scheduler.in_flight.steps
    e.close()


def test_what_is_left_in_flight_is_waited_for_once_all_have_ended():
    e = overlapped()
    r = e.add([1, 2], greedy(9))
    e.step()
    e.settle()
    assert e.overlap.steps, "it runs on"
    e.end(r, "abort")
    assert e.busy and e.step() == [] and not e.busy
    again = e.add([1, 2], greedy(9))
    e.step()
    e.end(again, "abort")
    e.settle()
    assert not e.busy and e.pools.used == 0
    e.check_books()


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("place", ["launch", "read"])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("recurrent", [0, 6])
def test_a_step_in_flight_fails(place, at, recurrent):
    """Its sequences run again, and only the one that causes it ends."""
    e = overlapped(64, recurrent=recurrent)
    each = [e.add(p, greedy(10)) for p in some(5, 5)]

    def fail(request):
        if request is each[3] and len(request.generated) >= at:
            raise ValueError("an odd shape")

    setattr(e, "fail_for" if place == "launch" else "fail_later_for", fail)
    e.finish()
    assert (each[3].finish_reason, each[3].error) == ("error", "ValueError: an odd shape")
    assert all(map(right, each)) and e.metrics.finished == {"error": 1, "length": 4}
    assert e.metrics.waits["failure"] or recurrent
    again = e.add([1, 2], greedy(10))
    before = e.metrics.counters["overlapped_steps_total"]
    e.finish()
    assert right(again) and e.metrics.counters["overlapped_steps_total"] > before


def test_a_sequence_that_runs_alone_fails_while_it_is_in_flight():
    e = overlapped()
    r, left = e.add([1, 2], greedy(9)), [3]

    def fail(request):
        left[0] -= 1
        if not left[0]:
            raise ValueError("late")

    e.fail_later_for = fail
    e.finish()
    assert (r.finish_reason, r.error, len(r.generated)) == ("error", "ValueError: late", 2) and right(r)
    assert e.pools.used == 0


def test_a_fault_that_passes_costs_nobody():
    e, left = overlapped(), [4]
    each = [e.add(p, greedy(10)) for p in some(4, 5)]

    def fail(request):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("busy")

    e.fail_later_for = fail
    e.finish()
    assert all(right(r) and r.finish_reason == "length" for r in each) and left[0] < 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers(value):
    e = overlapped()
    each, run = [e.add(p, greedy(10)) for p in some(3, 5)], e.runner.run

    def broken(batch):
        logits, hidden = run(batch)
        for i, s in enumerate(e.now):
            if s.request is each[1] and each[1].num_chosen == 4:
                logits[i, 7] = value
                logits[i, :7] = logits[i, 8:] = torch.nan
        return logits, hidden

    e.runner.run = broken
    e.finish()
    assert [r.finish_reason for r in each] == ["length", "error", "length"] and all(map(right, each))
    assert "NaN or infinity" in each[1].error and len(each[1].generated) == 4


@pytest.mark.parametrize("what", ["text", "constraint"])
def test_a_text_or_constraint_that_fails_late(what):
    e = overlapped()
    faulty = {"text": Text(3, OSError("disk"))} if what == "text" else {"constraint": Rule("accept", 3)}
    each = [e.add(p, greedy(10), **(faulty if i == 1 else {})) for i, p in enumerate(some(3, 5))]
    e.finish()
    assert each[1].finish_reason == "error" and len(each[1].generated) == 3
    assert all(map(right, each)) and e.metrics.finished == {"error": 1, "length": 2}


def test_a_device_that_is_lost_ends_the_engine(monkeypatch):
    e = overlapped()
    each = [e.add(p, greedy(10)) for p in some(2, 5)]
    e.step()

    def lose(*unused):
        raise RuntimeError("an illegal memory access was encountered")

    e.fail_for = e.fail_later_for = lose
    monkeypatch.setattr(e.runner.backend, "synchronize", lose)
    monkeypatch.setattr(e, "_probe", SimpleNamespace(zero_=lose))
    with pytest.raises(EngineError, match="illegal memory access"):
        e.finish()
    assert [r.finish_reason for r in each] == ["error", None]
    e.close()
    assert [r.finish_reason for r in each] == ["error", "abort"] and e.pools.used == 0 and not e.busy


@pytest.mark.parametrize("where", ["launch", "read", "advance", "schedule", "publish"])
def test_interrupts(where):
    """Whatever is interrupted goes on with the next step; only a sequence that was getting its token ends."""
    e = overlapped()
    each = [e.add(p, greedy(10), text=Text()) for p in some(4, 9)]
    holder, name = {
        "launch": (e, "fail_for"),
        "read": (e, "fail_later_for"),
        "advance": (e.scheduler.in_flight, "advance"),
        "schedule": (e.scheduler, "schedule"),
        "publish": (e.scheduler, "publish"),
    }[where]
    inner, count = getattr(holder, name), [0]

    def broken(*unused):
        count[0] += 1
        if count[0] % 3 == 1:
            raise KeyboardInterrupt
        return inner(*unused)

    setattr(holder, name, broken)
    for _ in range(3):
        interrupted(e.step)
        e.check_books()
    setattr(holder, name, inner)
    e.finish()
    ended = [r.finish_reason for r in each]
    assert count[0] and all(map(right, each)) and all(r.text.ids == r.generated for r in each)
    assert ended == ["length"] * 4 if where != "publish" else {*ended} == {"length", "abort"}


# ------------------------------------------------------------------ what waits, and that it says so


@pytest.mark.parametrize(
    ("why", "options", "params"),
    [
        ("speculation", {"script": "alternate"}, {}),
        ("states", {"recurrent": 3, "block_tokens": 6}, {}),
        ("blocks", {"blocks": 7}, {}),
    ],
)
def test_steps_that_wait_are_counted(why, options, params):
    e = overlapped(**options)
    asked = SamplingParams(**{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **params})
    each = [e.add(p, asked) for p in some(3, 7)]
    e.finish()
    assert all(r.finish_reason == "length" and right(r) for r in each)
    assert e.metrics.waits[why] > 0 and {*e.metrics.waits} <= {why, "blocks"}
    assert e.stats()["async_scheduling_waits_total"] == dict(e.metrics.waits)
    data = describe_overlap(e)
    assert data["off"] == "" and {w["reason"]: w["steps"] for w in data["waits"]} == dict(e.metrics.waits)
    assert REASONS[why] in describe_overlap_in_words(e)
    assert (e.metrics.counters["overlapped_steps_total"] > 0) == (why != "failure")


# ------------------------------------------------------------------ tokens that depend on the newest one


def in_order(e):
    """What the host does in order: launches a model, chooses tokens, reads them."""
    order, look, read = [], e.runner.before, e.runner.start_read
    e.runner.before = lambda batch: (order.append("launch"), look(batch))

    def start_read(tensors):
        order.append("choose")
        wait = read(tensors)
        return lambda: (order.append("read"), wait())[1]

    e.runner.start_read = start_read
    return order


@pytest.mark.parametrize(
    "params", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "temperature": 1.0, "seed": 3}]
)
def test_penalties_choose_when_the_token_before_is_known(params):
    """The model of the next step runs meanwhile."""
    e = overlapped()
    order = in_order(e)
    r = e.add([1, 2, 3], SamplingParams(**{"max_tokens": 4, "temperature": 0, "ignore_eos": True, **params}))
    e.finish()
    assert right(r) and not e.metrics.waits and e.metrics.counters["overlapped_steps_total"] == 3
    assert order == ["launch", "choose", *["launch", "read", "choose"] * 3, "read"]


class Ladder(Rule):
    """Allows the token after the newest one, and from 6 tokens on all of them."""

    def is_free(self, count):
        return len(self.seen) >= 6

    def masks(self, drafts):
        words = np.zeros((V + 31) // 32, np.int32)
        token = (self.seen[-1] + 1) % V if self.seen else 4
        words[token // 32] = 1 << (token % 32)
        return [words] if len(self.seen) < 6 else [None]


def test_a_constraint_chooses_when_the_token_before_is_known():
    e = overlapped()
    order = in_order(e)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    r, other = e.add([1, 2, 3], params, constraint=Ladder()), e.add([7, 8], params)
    e.finish()
    assert r.generated[:6] == [4, 5, 6, 7, 8, 9] and r.constraint.seen == r.generated and right(other)
    assert not e.metrics.waits and e.metrics.counters["overlapped_steps_total"] == 8
    deferred = ["launch", "read", "choose"] * 6
    assert order == ["launch", "choose", *deferred, *["launch", "choose", "read"] * 2, "read"]


@pytest.mark.parametrize("what", ["abort", "preempt", "close", "drop", "interrupt", "fail"])
def test_what_happens_before_a_late_choice(what, monkeypatch):
    e = overlapped()
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, repetition_penalty=1.5)
    r, other = e.add([1, 2, 3], params), e.add([7, 8], params)
    e.step()
    if what == "interrupt":
        prepare, left = e.sampler.prepare, [1]

        def broken(rows):
            if left and len(rows) == 2:
                left.pop()
                raise KeyboardInterrupt
            return prepare(rows)

        monkeypatch.setattr(e.sampler, "prepare", broken)
        interrupted(e.step)
        assert not left and e.overlap.steps[0].read is None, "its tokens are not chosen yet"
    elif what == "fail":
        prepare, left = e.sampler.prepare, [1]

        def failing(rows):
            if left:
                left.pop()
                raise ValueError("once")
            return prepare(rows)

        monkeypatch.setattr(e.sampler, "prepare", failing)
        e.step()
        assert not left and e.metrics.waits == {"failure": 1} and not e.overlap.steps
    elif what == "abort":
        e.end(r, "abort")
    elif what == "preempt":
        e.scheduler.preempt(r)
    else:
        e.overlap.steps[0].later = e.overlap.steps[0].read = None
        e.close() if what == "close" else [e.end(each, "abort") for each in (r, other)]
        e.settle()
        assert not e.busy and e.pools.used == 0
        return
    e.check_books()
    e.finish()
    assert right(r) and right(other) and other.finish_reason == "length"


def test_a_constraint_that_fails_late_ends_alone():
    class Complex(Ladder):
        def masks(self, drafts):
            if len(self.seen) >= 3:
                raise ValueError("too complex")
            return super().masks(drafts)

    e = overlapped()
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    r, other = e.add([1, 2, 3], params, constraint=Complex()), e.add([7, 8], params)
    e.finish()
    assert (r.finish_reason, r.error, r.generated) == ("error", "ValueError: too complex", [4, 5, 6])
    assert right(other) and other.finish_reason == "length" and e.pools.used == 0


# ------------------------------------------------------------------ drafts


@pytest.mark.parametrize("kind", ["right", "none"])
def test_a_step_waits_only_where_there_are_drafts(kind):
    e = overlapped(script=kind, spec={"only_if_faster": False})
    each = [e.add(p, greedy(10)) for p in some(3, 5)]
    e.finish()
    assert all(map(right, each))
    if kind == "none":
        assert not e.metrics.waits and e.metrics.counters["overlapped_steps_total"] == 9
    else:
        assert e.metrics.waits["speculation"] > 1 and e.stats()["spec_decode_num_accepted_tokens_total"] > 0


def test_drafts_begin_and_end_while_steps_overlap():
    """They are found a step late: the next step waits, and has drafts of the newest token."""
    e = overlapped(script="right", spec={"only_if_faster": False}, drafts=2)
    proposer, told = e.speculator.proposer, []
    inner = proposer.propose

    def propose(chunks, most, hidden):
        quiet = not chunks or len(chunks[0].request.generated) not in (5, 6, 7, 8)
        told.append(None if quiet else len(e.overlap.steps))
        return [[] for _ in chunks] if quiet else inner(chunks, most, hidden)

    proposer.propose = propose
    r = e.add([1, 2, 3], greedy(16))
    e.finish()
    assert right(r) and [n for n in told if n is not None][:2] == [1, 0], "one too late, then one in time"
    assert e.metrics.waits == {"speculation": 1} and e.metrics.counters["overlapped_steps_total"] > 8
    assert e.stats()["spec_decode_num_accepted_tokens_total"] == 2


def test_what_reads_hidden_states_waits():
    e = overlapped(script="none")
    e.speculator.proposer.needs_step = lambda chunks, most: True
    r = e.add([1, 2, 3], greedy(6))
    e.finish()
    assert right(r) and e.metrics.waits == {"speculation": 6} and not e.metrics.counters["overlapped_steps_total"]


def test_every_reason_is_known():
    assert {*ALONE} < {*REASONS}


def test_drafts_wait_and_stay_what_they_are():
    e = overlapped(script="right")
    each = [e.add(p, greedy(10)) for p in some(3, 5)]
    e.finish()
    assert all(map(right, each)) and e.stats()["spec_decode_num_accepted_tokens_total"] > 0


# ------------------------------------------------------------------ how long a step took


class Seconds:
    """Time passes while the device computes a step, and where the test lets it."""

    def __init__(self, engine, monkeypatch):
        self.now = self.ready_at = 0.0
        monkeypatch.setattr("inferplane.engine.loop.overlap.time", self)
        run, read = engine.runner.run, engine.runner.start_read

        def launch(batch):
            self.now += 0.001
            self.ready_at = max(self.ready_at, self.now) + 0.01 * len(batch.ids)
            return run(batch)

        def start_read(tensors):
            wait, ready_at = read(tensors), self.ready_at

            def over():
                self.now = max(self.now, ready_at)
                return wait()

            return over

        engine.runner.run, engine.runner.start_read = launch, start_read

    def monotonic(self):
        return self.now


@pytest.mark.parametrize("outside", [0.0, 0.004, 3.0])
def test_the_time_of_a_step_is_the_devices(outside, monkeypatch):
    """Also where two are in flight, and the host does something else between two calls: not the time of a call."""
    e = overlapped(64, max_num_batched_tokens=16, insertion=Insertion(max_inter_token_ms=1000))
    device, seen, observe = Seconds(e, monkeypatch), [], e.scheduler.times.observe
    e.scheduler.times.observe = lambda work, seconds: (seen.append((work, seconds)), observe(work, seconds))
    first = e.add([1, 2, 3], greedy(12))
    e.step()
    second = e.add(some(1, 30)[0], greedy(4))
    while e.busy:
        device.now += outside
        e.step()
    assert right(first) and right(second) and any(work.prompt_tokens > 10 for work, _ in seen)
    for work, seconds in seen[1:]:
        rows = work.decode_rows + work.prompt_tokens
        # A device that was over long ago says only that it took no longer.
        assert seconds <= 0.01 * rows + 0.0021 and (outside == 3.0 or seconds >= 0.01 * rows - 0.0021), (work, seconds)


# ------------------------------------------------------------------ on or off


class Device:
    name, torch_device_indexed, asynchronous = "acme", HOST, False

    def start_read(self, tensors):
        return lambda: tensors


def test_the_setting():
    device = Device()
    assert "runs each step while the host waits" in why_not_overlapped(device, "auto")
    assert why_not_overlapped(device, "on") == ""
    device.asynchronous = True
    assert why_not_overlapped(device, "auto") == ""
    assert why_not_overlapped(device, "off") == "async_scheduling='off'"
    assert describe_overlap_in_words(engine()) == "asynchronous scheduling: off, async_scheduling='off'"


def test_a_device_that_cannot_be_read_behind_a_step():
    class Broken(Device):
        asynchronous = True

        def start_read(self, tensors):
            raise RuntimeError("no pinned memory")

    with pytest.warns(InferplaneWarning, match="no pinned memory"):
        assert "cannot be read behind a step" in why_not_overlapped(Broken(), "auto")


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("recurrent", [0, 4])
def test_mixed_steps_and_everything_sampled(chunk, recurrent):
    """Prompts in chunks beside sequences that decode, with all that returns beside tokens."""
    e = overlapped(max_num_batched_tokens=chunk, recurrent=recurrent)
    ways = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0, "seed": 5, "prompt_logprobs": 1},
        {"temperature": 0.7, "seed": 6, "top_k": 5, "logprobs": 0},
        {"temperature": 0, "min_tokens": 6, "stop_token_ids": list(range(V // 2))},
    ]
    each = [e.add(p, SamplingParams(max_tokens=11, **way)) for p, way in zip(some(4, 9), ways)]
    e.finish()
    assert all(map(right, each)) and e.metrics.counters["overlapped_steps_total"] > 3
    assert [len(each[1].prompt_logprobs), len(each[0].logprobs)] == [9, len(each[0].generated)]
    off = engine(max_num_batched_tokens=chunk, recurrent=recurrent)
    same = [off.add(p, SamplingParams(max_tokens=11, **way)) for p, way in zip(some(4, 9), ways)]
    off.finish()
    assert [(r.logprobs, r.prompt_logprobs) for r in each] == [(r.logprobs, r.prompt_logprobs) for r in same]
