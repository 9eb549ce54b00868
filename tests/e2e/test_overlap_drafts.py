"""Steps with drafts in flight: a captured step's result is the next one's input, before the host has read it."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane_cpu.backend import CpuBackend
from tests.unit.engine.runner.test_capture import Record

DRAFTER = {"mtp": None, "eagle": "demo-eagle"}
PROMPTS = ["def f(", "class Stack:", "import ", "for x in"]
GREEDY = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (20, 7, 33, 26)]


@pytest.fixture
def opened(monkeypatch):
    """Opens the demo model on a device that captures steps."""
    safe = [replace(kernel, capture_safe=True) for kernel in CpuBackend().kernels()]
    monkeypatch.setattr(CpuBackend, "kernels", lambda self: safe)
    monkeypatch.setattr(CpuBackend, "capture", lambda self, step, bucket: Record(step, bucket))
    made = []

    def open_one(setting, method="mtp", drafts=3, strategy="target_match", **options):
        config = {"num_speculative_tokens": drafts, "verify_strategy": strategy, "only_if_faster": False}
        config |= {"method": method, "model": DRAFTER[method]}
        sizes = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 96, "speculative_config": config, **options}
        made.append(LLM("demo", device="cpu", async_scheduling=setting, **sizes))
        return made[-1]

    yield open_one
    for llm in made:
        assert not llm.engine.busy and llm.engine.pools.used == 0
        llm.engine.pools.check()
        llm.close()


def answers(llm, params, prompts=PROMPTS):
    return [(r.token_ids, r.text, r.finish_reason) for r in llm.generate(prompts, params)]


@pytest.mark.parametrize(("method", "drafts"), [("mtp", 1), ("mtp", 3), ("eagle", 3)])
def test_same_answers(opened, method, drafts):
    off, on = opened("off", method, drafts), opened("on", method, drafts)
    ways = [
        GREEDY,
        [SamplingParams(max_tokens=n, temperature=0.9, seed=n, top_p=0.9) for n in (3, 21, 30, 9)],
        [
            SamplingParams(max_tokens=24, temperature=0, stop=["e", "("]),
            *GREEDY[:2],
            SamplingParams(max_tokens=1, seed=1),
        ],
    ]
    for params in (*ways, GREEDY):  # the last time with prefixes in the cache
        assert answers(on, params) == answers(off, params)
    stats, same = on.engine.stats(), off.engine.stats()
    assert stats["overlapped_steps_total"] > 20 and stats["spec_decode_num_accepted_tokens_total"] > 20
    assert stats["generation_tokens_total"] == same["generation_tokens_total"]
    assert on.engine.speculator.captured_steps.replayed > 20


def test_a_seeds_text_does_not_depend_on_what_overlapped(opened):
    """Under "rejection" the number of drafts decides which tokens a seed draws: it is exact on the device, too."""
    ways = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((30, 0.7), (21, 1.0), (33, 1.3), (9, 0.8))]
    off, on = (opened(setting, drafts=5, strategy="rejection") for setting in ("off", "on"))
    assert answers(on, ways) == answers(off, ways)
    assert on.engine.metrics.counters["overlapped_steps_total"] > 8
    per_position = on.engine.stats()["spec_decode_num_draft_tokens_per_pos"]
    assert per_position[0] > per_position[-1] > 0, "numbers of drafts change"


def test_captured_steps_without_drafts(opened):
    """A replay overwrites what the step before left in the capture's tensors, whose results are read later."""
    ways = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((20, 0), (7, 0.8), (33, 0), (26, 1.0))]
    off, on = (opened(setting, speculative_config=None) for setting in ("off", "on"))
    assert answers(on, ways) == answers(off, ways)
    assert on.engine.metrics.counters["overlapped_steps_total"] > 25 and on.runner.decode.replayed > 20


def random_params(draw):
    temperature = draw.choice([0, 0, 0.8])
    more = draw.choice([{}, {}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"min_tokens": 4}, {"top_k": 5}])
    return SamplingParams(max_tokens=draw.randint(4, 40), temperature=temperature, seed=draw.randint(0, 9), **more)


@pytest.mark.parametrize("blocks", [40, 9])
def test_random_histories(opened, blocks):
    """Requests come, are aborted, preempted, interrupted and fail to be read; what they get is what they get alone."""
    off, on = opened("off"), opened("on", kv_cache_tokens=16 * blocks, max_num_batched_tokens=24)
    engine, draw, known = on.engine, random.Random(blocks), {}
    start_read, faults = engine.runner.backend.start_read, []

    def read_or_fail(tensors):
        wait, fault = start_read(tensors), faults.pop() if faults else None

        def read():
            nonlocal fault
            if fault is not None:
                now, fault = fault, None
                raise now
            return wait()

        return read

    engine.runner.backend.start_read = read_or_fail
    each = []
    for _ in range(260):
        event = draw.random()
        live = [*engine.scheduler.running, *engine.scheduler.waiting]
        if event < 0.12 and len(live) < 7:
            prompt = off.tokenizer.encode(draw.choice(PROMPTS) * draw.randint(1, 4))[:40]
            params = random_params(draw)
            each.append((engine.add(prompt, params, frozenset()), prompt, params))
        elif event < 0.16 and live:
            engine.end(draw.choice(live), "abort")
        elif event < 0.2 and engine.scheduler.running:
            engine.scheduler.preempt(draw.choice(engine.scheduler.running))
        elif event < 0.23:
            faults.append(draw.choice([KeyboardInterrupt(), RuntimeError("not read")]))
        with suppress(KeyboardInterrupt):
            engine.step()
        engine.pools.check()
    faults.clear()
    while engine.busy:
        engine.step()
    assert engine.metrics.counters["overlapped_steps_total"] > 40 and engine.pools.used == 0
    assert engine.stats()["spec_decode_num_accepted_tokens_total"] > 40 and len(each) > 12
    for request, prompt, params in each:
        key = (*prompt, params)
        if key not in known:
            alone = off.engine.add(prompt, params, frozenset())
            while off.engine.busy:
                off.engine.step()
            known[key] = alone.generated
        assert request.generated == known[key][: len(request.generated)], request.finish_reason
        assert request.finish_reason in ("abort", "error") or request.generated == known[key]
        assert request.finish_reason != "error" or "not read" in request.error
    assert engine.metrics.finished["length"] > 8


def test_a_step_follows_on_the_device_until_its_sequences_change(opened):
    """The host reads a step after it has launched the next one; a prompt, or a new end of sequences, costs no token."""
    on, order = opened("on", max_num_batched_tokens=24), []
    engine = on.engine
    launch, start_read = engine.speculator.launch, engine.runner.backend.start_read

    def launch_noted(chunks, before):
        found = launch(chunks, before)
        order.append(("launch" if before is None else "follow", len(chunks)) if found is not None else ("none", 0))
        return found

    def read_noted(tensors):
        wait = start_read(tensors)
        return lambda: (order.append(("read", 0)), wait())[1]

    engine.speculator.launch, engine.runner.backend.start_read = launch_noted, read_noted
    requests = [engine.add(on.tokenizer.encode(p), q, frozenset()) for p, q in zip(PROMPTS[:2], (GREEDY[1], GREEDY[0]))]
    while engine.busy:
        engine.step()
    assert [len(r.generated) for r in requests] == [7, 20]
    names = [name for name, _ in order]
    first = names.index("launch")
    assert names[first : first + 5] == ["launch", "follow", "read", "follow", "read"]
    assert names.count("launch") == 1 and ("follow", 1) in order, "one sequence ends, the other goes on behind it"


def test_a_step_whose_logits_are_no_numbers_runs_again(opened):
    on = opened("on")
    engine = on.engine
    requests = [engine.add(on.tokenizer.encode(p), q, frozenset()) for p, q in zip(PROMPTS[:2], GREEDY)]
    while not engine.overlap.steps or engine.overlap.steps[0].drafted is None:
        engine.step()
    drafted = engine.overlap.steps[0].drafted
    table = drafted.table.clone().tolist()
    table[1][1] = 0  # its column of finite logits
    engine.overlap.steps[0].read = lambda: [torch.tensor(table), drafted.rows]
    while engine.busy:
        engine.step()
    assert [r.finish_reason for r in requests] == ["length"] * 2, "run again, it is all right"
    assert engine.metrics.waits["failure"] >= 1
