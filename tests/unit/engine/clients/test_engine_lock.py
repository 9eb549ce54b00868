"""One model, called from several threads: calls take turns, and whoever drops a stream waits for nobody."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.types import HOST
from tests.unit.support.small import LLAMA

PROMPTS = [[3, 5, 7], [11, 2], [60, 61, 62, 63], [9]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm():
    """A small model whose blocks are all back in the end."""
    with LLM(LLAMA, device=HOST, load_format="dummy", dtype="float32", kv_cache_bytes=1 << 20, max_num_seqs=4) as llm:
        yield llm
        assert llm.engine.pools.used == 0 and not llm.engine.busy


def streamed(llm, prompt):
    return [token for piece in llm.stream(prompt, GREEDY) for token in piece.token_ids]


def embedded(llm, prompt):
    return llm.embed([prompt])[0]


def scored(llm, prompt):
    return llm.logits([prompt])[0].tolist()


def generated(llm, prompt):
    return llm.generate([prompt], GREEDY)[0].token_ids


def test_every_call_from_every_thread_gets_its_own_result(llm):
    calls = [(do, p) for _ in range(3) for do in (generated, streamed, embedded, scored) for p in PROMPTS]
    alone = {(do, *p): do(llm, p) for do, p in calls}
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda call: call[0](llm, call[1]), calls))
    for (do, p), found in zip(calls, together):
        if do in (generated, streamed):
            assert found == alone[(do, *p)]
        else:
            assert torch.allclose(torch.tensor(found), torch.tensor(alone[(do, *p)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["dropped", "closed"])
def test_a_stream_left_in_another_s_turn_is_ended_by_him_and_holds_nobody_up(llm, way, monkeypatch):
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    next(stream)
    inside, gone, step = Event(), Event(), llm.engine.step

    def held():
        inside.set()
        assert gone.wait(30), "who left waited for the turn"
        return step()

    monkeypatch.setattr(llm.engine, "step", held)
    results = []
    worker = Thread(target=lambda: results.append(generated(llm, PROMPTS[1])))
    worker.start()
    assert inside.wait(30)
    if way == "closed":
        stream.close()
    del stream
    gone.set()
    worker.join(60)
    assert len(results[0]) == 12 and llm.engine.metrics.finished["abort"] == 1
    assert not llm.engine.busy and llm.engine.pools.used == 0


def test_a_stream_dropped_in_the_middle_of_a_step_of_its_own_thread_ends_after_it(llm, monkeypatch):
    streams, step, during = [llm.stream(PROMPTS[0], GREEDY)], llm.engine.step, []
    next(streams[0])

    def dropping():
        streams.clear()  # as the collector of garbage may
        during.append(llm.engine.metrics.finished["abort"])
        return step()

    monkeypatch.setattr(llm.engine, "step", dropping)
    assert len(generated(llm, PROMPTS[1])) == 12
    assert during[0] == 0 and llm.engine.metrics.finished["abort"] == 1


@pytest.mark.parametrize("call", ["add", "end", "run"])
def test_a_stream_dropped_in_the_middle_of_any_call_of_its_own_thread_ends_after_it(llm, monkeypatch, call):
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    owner = llm.runner if call == "run" else llm.engine
    streams, original, inside, nested = [llm.stream(PROMPTS[0], long)], getattr(owner, call), [], []
    next(streams[0])
    end = llm.engine.end

    def dropping(*args, **more):
        inside.append(call)
        streams.clear()  # as the collector of garbage may
        try:
            return original(*args, **more)
        finally:
            inside.pop()

    def ending(*args, **more):
        nested.append(list(inside))
        return end(*args, **more)

    monkeypatch.setattr(llm.engine, "end", ending)
    if call == "end":
        original = ending
    monkeypatch.setattr(owner, call, dropping)
    (scored if call == "run" else generated)(llm, PROMPTS[1])
    assert llm.engine.metrics.finished["abort"] == 1
    assert all(len(names) <= (call == "end") for names in nested), nested


def test_closing_waits_for_the_call_of_another_thread(monkeypatch):
    llm = LLM(LLAMA, device=HOST, load_format="dummy", dtype="float32", kv_cache_bytes=1 << 20, max_num_seqs=4)
    inside, step, results = Event(), llm.engine.step, []

    def first():
        inside.set()
        return step()

    monkeypatch.setattr(llm.engine, "step", first)
    worker = Thread(target=lambda: results.append(generated(llm, PROMPTS[0])))
    worker.start()
    assert inside.wait(30)
    llm.close()
    worker.join(60)
    assert len(results[0]) == 12
