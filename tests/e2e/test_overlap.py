"""Asynchronous scheduling on whole models: every answer is that of the loop that waits."""

import asyncio
import threading

import pytest

from inferplane import LLM, AsyncLLM, SamplingParams, plugins
from tests.e2e.tiny_llm import LONG, opened, write
from tests.mock_device import hidden

WAYS = {
    "greedy": {"temperature": 0},
    "n": {"n": 3, "seed": 4, "temperature": 1.0},
    "sampled": {"seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "stop string": {"temperature": 0, "stop": ["e", "q", "\n"]},
    "regex": {"seed": 3, "regex": "[a-z]{3,9}( [a-z]{2,5})*"},
    "min_tokens": {"seed": 5, "min_tokens": 9},
    "logit_bias": {"temperature": 0, "logit_bias": {70: 4.0, 71: -4.0}},
}
PROMPTS = ["Hello", LONG, LONG + "again", "a b c", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(folder):
    with opened(folder, async_scheduling="off") as off, opened(folder, async_scheduling="on") as on:
        yield off, on


def answers(llm, params):
    found = [r for result in llm.generate(PROMPTS, params) for r in (result.samples or (result,))]
    return [(r.token_ids, r.text, r.finish_reason) for r in found], [
        (x.token_id, pytest.approx(x.logprob, abs=1e-4), [t for t, _ in x.top])
        for r in found
        for x in (*(r.logprobs or ()), *(r.prompt_logprobs or ())[1:])
    ]


@pytest.mark.parametrize("way", WAYS)
def test_same_answers(pair, way):
    off, on = pair
    for most in (1, 2, 23):
        words = {"max_tokens": most, **WAYS[way]}
        params = SamplingParams(**{**words, "min_tokens": min(most, words.get("min_tokens", 0))})
        for _ in range(2):  # the second time with prefixes in the cache
            assert answers(on, params) == answers(off, params)
            assert not on.engine.busy and on.engine.pools.used == 0
            on.engine.pools.check()


def test_what_overlaps_and_what_waits(folder):
    for way, words in WAYS.items():
        with opened(folder, async_scheduling="on") as llm:
            answers(llm, SamplingParams(**{"max_tokens": 12, **words}))
            found = llm.explain()["async_scheduling"]
            assert found["off"] == "" and found["overlapped_steps"] > 0 and not found["waits"], way
            assert "asynchronous scheduling: on" in llm.explain_text()


def test_streams_and_everything_together(pair):
    off, on = pair
    each = [SamplingParams(**{"max_tokens": 15, **words}) for way, words in WAYS.items() if way != "n"]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(each))]
    want = [r.token_ids for r in off.generate(prompts, each)]
    assert [r.token_ids for r in on.generate(prompts, each)] == want
    streams = [on.stream(p, q) for p, q in zip(prompts, each)]
    first = [next(s) for s in streams]
    assert [[*d.token_ids, *(t for d in s for t in d.token_ids)] for d, s in zip(first, streams)] == want
    stream = on.stream(LONG, each[0])
    next(stream)
    assert on.engine.overlap.steps
    stream.close()
    assert not on.engine.busy and on.engine.pools.used == 0, "its blocks are free without a further call"
    assert [r.token_ids for r in on.generate(prompts, each)] == want
    assert not on.engine.busy and on.engine.pools.used == 0


def test_logits_and_embeddings_between_steps(pair):
    off, on = pair
    ids = [on.tokenizer.encode(LONG)]
    want, vectors = off.logits(ids)[0], off.embed(["Hello", LONG])
    stream = on.stream(LONG, SamplingParams(max_tokens=20, temperature=0))
    got = [next(stream)]
    assert on.engine.overlap.steps, "a step is in flight"
    assert (on.logits(ids)[0] - want).abs().max() < 1e-4
    assert on.embed(["Hello", LONG]) == vectors
    got += stream
    tokens = off.generate([LONG], SamplingParams(max_tokens=20, temperature=0))[0].token_ids
    assert [t for d in got for t in d.token_ids] == tokens


def test_another_method_of_speculation_waits_for_what_is_in_flight(folder):
    with opened(folder, async_scheduling="on") as llm:
        params = SamplingParams(max_tokens=20, temperature=0)
        want = llm.generate([LONG], params)[0].token_ids
        stream = llm.stream(LONG, params)
        next(stream)
        llm.engine.end(llm.engine.scheduler.running[0], "abort")
        assert llm.engine.busy
        llm.set_speculation({"method": "ngram", "num_speculative_tokens": 3})
        assert llm.generate([LONG], params)[0].token_ids == want
        assert llm.engine.metrics.waits["speculation"] > 0


@pytest.mark.parametrize(("device", "setting", "on"), [("cpu", "auto", False), ("cpu", "on", True)])
def test_by_device(folder, device, setting, on):
    with LLM(folder, device=device, dtype="float32", async_scheduling=setting) as llm:
        assert (llm.engine.overlap is not None) == on
        assert bool(llm.explain()["async_scheduling"]["off"]) != on


def test_on_a_device_that_is_late(folder, monkeypatch):
    """The mock's steps are over 3 ms after their launch; it is on by default."""
    if not hidden.supported():
        pytest.skip("not run: this torch takes no devices written in Python (2.9 does)")
    hidden.start()
    host = plugins.discover("only,inferplane_cpu.plugin,tests.mock_device.mock_device")
    monkeypatch.setattr("inferplane.engine.clients.llm.host", lambda: host)
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 32, "device": "mock:later"}
    each = [SamplingParams(**{"max_tokens": 9, **WAYS[way]}) for way in ("greedy", "sampled", "logprobs", "penalties")]
    with LLM(folder, async_scheduling="off", **options) as llm:
        want = [r.token_ids for r in llm.generate(PROMPTS[:4], each)]
    with LLM(folder, **options) as llm:
        run = llm.runner.run

        def late(batch):
            found = run(batch)
            hidden.TIMELINE.launch(0.003)
            return found

        monkeypatch.setattr(llm.runner, "run", late)
        assert [r.token_ids for r in llm.generate(PROMPTS[:4], each)] == want
        assert llm.generate(PROMPTS[:3], each[:3])[0].token_ids == want[0]
        assert llm.engine.metrics.counters["overlapped_steps_total"] > 5
        assert llm.explain()["async_scheduling"]["off"] == ""


def test_a_step_that_hangs_on_the_device_is_noticed_and_a_drain_waits_for_it(folder):
    """The watchdog asks how long ago a step ended; closing with time to drain lets streams come to their end."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with opened(folder, async_scheduling="off") as llm:
        want = llm.generate([LONG], params)[0].token_ids

    async def run():
        engine = AsyncLLM(folder, device="cpu", dtype="float32", max_num_seqs=4, async_scheduling="on")
        inner, goes_on, tokens, left = engine.llm.engine, threading.Event(), [], [5]
        start_read = inner.runner.backend.start_read

        def hanging(tensors):
            wait = start_read(tensors)
            left[0] -= 1
            return (lambda: (goes_on.wait(60), wait())[1]) if not left[0] else wait

        inner.runner.backend.start_read = hanging

        async def read():
            async for piece in engine.generate(LONG, params):
                tokens.extend(piece.token_ids)

        reading = asyncio.create_task(read())
        while (await engine.health()).quiet_s < 0.05 or left[0] > 0:
            await asyncio.sleep(0.01)
        health = await engine.health()
        assert health.alive and health.busy and not health.is_ready(stuck_s=0.01) and tokens == want[:4]
        goes_on.set()
        await asyncio.gather(engine.shutdown(60), reading)
        assert tokens == want and inner.pools.used == 0 and not inner.busy

    asyncio.run(run())
