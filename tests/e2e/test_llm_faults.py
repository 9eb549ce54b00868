"""`LLM` when something goes wrong, when there is too little room, and when it is closed."""

from __future__ import annotations

import re

import pytest

from inferplane import SamplingParams
from inferplane.engine import InferplaneWarning
from inferplane.engine.loop import engine as engine_module
from inferplane.errors import CapacityError, GenerationError, UsageError
from tests.e2e.tiny_llm import GREEDY, LONG, one, opened
from tests.e2e.tiny_models import prompts

# ------------------------------------------------------------------ what goes wrong


class Fault(Exception):
    pass


@pytest.mark.parametrize("place", ["run", "choose_tokens", "accept_tokens", "commit", "schedule"])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_interrupts(llm, monkeypatch, place, step):
    """Inside a step: the call ends, nothing is lost, and a stream that ran beside it goes on as if undisturbed.

    Only the sequence whose tokens were just being accepted is ended with it.
    """
    sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=8)
    want, want_stream = one(llm, LONG), list(llm.stream("abc", sampled))
    stream = llm.stream("abc", sampled)
    got = [next(stream), next(stream)]
    engine = llm.engine
    owners = {"run": engine.runner, "commit": engine.scheduler, "schedule": engine.scheduler}
    owner = owners.get(place, engine_module)
    original, calls = getattr(owner, place), [0]

    def interrupted(*args, **kwargs):
        calls[0] += 1
        if calls[0] != step:
            return original(*args, **kwargs)
        if place in ("run", "schedule"):
            original(*args, **kwargs)  # it has done its work when the key is pressed
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([LONG, "b", "c", "d", "e", "f"], GREEDY)
    hit = place in ("accept_tokens", "commit") and step == 1  # the stream's sequence is the first to be accepted
    assert len(engine.scheduler.running) == (0 if hit else 1) and not engine.scheduler.waiting
    assert one(llm, LONG).token_ids == want.token_ids
    got += stream
    if hit:
        assert got[-1].finish_reason == "abort"
        return
    assert [t for d in got for t in d.token_ids] == [t for d in want_stream for t in d.token_ids]
    assert "".join(d.text for d in got) == "".join(d.text for d in want_stream)


def test_a_request_that_fails_ends_alone(llm, monkeypatch):
    poison, run = 399, llm.runner.run
    want = one(llm)

    def faulty(batch):
        if poison in batch.ids:
            raise Fault("a kernel")
        return run(batch)

    monkeypatch.setattr(llm.runner, "run", faulty)
    stream = llm.stream([poison, 1], GREEDY)
    with pytest.warns(InferplaneWarning, match="1 of 3 requests failed.*a kernel"):
        good, bad, also_good = llm.generate(["Hello", [5, poison], "Hello"], GREEDY)
    assert good.token_ids == also_good.token_ids == want.token_ids and good.finish_reason == "length"
    place = f" at {__file__}:{faulty.__code__.co_firstlineno + 2}"
    assert (bad.finish_reason, bad.token_ids, bad.text, bad.error) == ("error", [], "", f"Fault: a kernel{place}")
    words = re.escape(f"Fault: a kernel{place}.")
    with pytest.raises(GenerationError, match=words):
        list(stream)
    with pytest.raises(GenerationError, match=f"2 of 2.*{words}"):
        llm.generate([[poison], [poison, 2]], GREEDY)
    assert one(llm).token_ids == want.token_ids


def test_an_error_that_says_what_to_do_is_the_requests_own(llm, monkeypatch):
    """As that of a constraint which cannot be followed: no class, and no advice about kernels."""

    def faulty(batch):
        raise UsageError("The grammar is too long.", remedy="simplify it")

    monkeypatch.setattr(llm.runner, "run", faulty)
    words = "while they ran: The grammar is too long. To do: simplify it."
    with pytest.raises(GenerationError, match=re.escape(words)) as caught:
        llm.generate(["Hello"], GREEDY)
    assert "explain" not in str(caught.value)
    with pytest.raises(GenerationError, match=re.escape(words.replace("they", "it"))) as caught:
        list(llm.stream("Hello", GREEDY))
    assert "explain" not in str(caught.value)


def test_one_bad_prompt_of_several(llm):
    for bad, params in (([1, 10**6], GREEDY), (LONG * 40, GREEDY)):
        with pytest.raises((UsageError, CapacityError)):
            llm.generate(["fine", "fine", bad, "fine"], params)
        assert not llm.engine.busy
    assert one(llm).token_ids == one(llm).token_ids


def test_too_much_is_refused(llm, folder):
    with pytest.raises(CapacityError, match=r"1 tokens and max_tokens=512 exceed the model's 512 tokens") as caught:
        one(llm, [3], max_tokens=512)
    assert caught.value.remedy
    with pytest.raises(CapacityError, match="513 tokens exceeds"):
        llm.logits([[3] * 513])
    with opened(folder, max_model_len=40, kv_cache_bytes=3 * 16 * 2 * 2 * 2 * 16 * 4) as small:
        assert (small.engine.pools.total, small.runner.max_model_len) == (3, 40)
        got = one(small, [3] * 10, max_tokens=30)
        assert (len(got.token_ids), got.finish_reason) == (30, "length")
        with pytest.raises(CapacityError, match="exceed"):
            one(small, [3] * 11, max_tokens=30)
        with pytest.raises(CapacityError, match="exceeds"):
            small.logits([[3] * 41])
        assert small.logits([[3] * 40])[0].shape[0] == 40
        stream = small.stream([3] * 10, SamplingParams(max_tokens=30, ignore_eos=True))  # or its first token may end it
        next(stream)
        with pytest.raises(CapacityError, match="KV blocks"):
            small.logits([[3] * 40])  # the stream holds some of them
        stream.close()
        assert small.engine.pools.used == 0


def test_more_than_fits_waits(llm, folder):
    """Twelve requests, four in a batch, blocks for about two: the same tokens as each alone."""
    many = prompts(400, (30, 3, 60, 17, 1, 44, 20, 9, 31, 5, 50, 16), seed=9)
    params = [SamplingParams(max_tokens=5 + 3 * i, temperature=1.0, seed=i) for i in range(12)]
    want = [llm.generate([p], s)[0] for p, s in zip(many, params)]
    with opened(
        folder, max_model_len=96, kv_cache_bytes=10 * 16 * 2 * 2 * 2 * 16 * 4, max_num_batched_tokens=24
    ) as small:
        assert small.engine.pools.total == 10
        got = small.generate(many, params)
        assert small.engine.pools.used == 0
    assert [g.token_ids for g in got] == [w.token_ids for w in want]
    assert any(g.timings.queue_s > g.timings.total_s / 4 for g in got)


# ------------------------------------------------------------------ close


def test_close(folder):
    with opened(folder) as llm:
        stream = llm.stream("Hello", SamplingParams(max_tokens=50, ignore_eos=True))
        head = next(stream)
    assert llm.engine.pools.used == 0 and not llm.runner.loaded.packed
    rest = list(stream)
    assert rest[-1].finish_reason == "abort" and len(head.token_ids) + sum(len(d.token_ids) for d in rest) < 50
    for ask in (lambda: one(llm), lambda: one(llm, [1]), lambda: llm.logits([[1]]), lambda: next(llm.stream("x"))):
        with pytest.raises(UsageError, match="closed"):
            ask()
    llm.close()
    assert llm.explain()["sites"] and llm.device == "cpu"  # what was decided can still be looked at
    with pytest.raises(ZeroDivisionError), opened(folder) as llm:
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="closed"):
        one(llm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_close_frees_memory(folder, dtype):
    """At once: nothing of a model refers to itself, or memory would wait for Python's collector."""
    import gc
    import weakref

    llm = opened(folder, dtype=dtype)
    one(llm)
    entries = llm.runner.cache.layers[0].entries[0]
    weight = next(t for t in llm.runner.loaded.packed.values() if t.ndim == 2)
    refs = [weakref.ref(t) for t in (entries, weight)]
    del entries, weight
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert [r() for r in refs] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("name", "value"), [("max_num_seqs", 0), ("max_num_batched_tokens", 0), ("max_model_len", 0)])
def test_limits_that_are_none(folder, name, value):
    with pytest.raises(UsageError, match=f"{name} = 0"):
        opened(folder, **{name: value})


def test_the_smallest_limits(llm, folder):
    want = one(llm, LONG).token_ids
    with opened(folder, max_num_seqs=1, max_num_batched_tokens=1) as small:
        assert [r.token_ids for r in small.generate([LONG, LONG], GREEDY)] == [want, want]
