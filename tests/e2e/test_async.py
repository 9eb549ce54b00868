"""AsyncLLM: streams equal what LLM gives, end exactly once, and leave nothing behind."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inferplane import LLM, AsyncLLM, Delta, SamplingParams
from inferplane.engine.clients import local
from inferplane.engine.clients.client import RequestId, Submission
from inferplane.engine.clients.local import LocalEngine
from inferplane.errors import CapacityError, UsageError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "max_num_seqs": 4}
PROMPTS = [[5, 9, 11], [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6], [90], [8, 8], [42, 17, 23]]


async def collect(stream: AsyncIterator[Delta]) -> tuple[list[int], list[str]]:
    """Tokens of a stream, and the reasons its pieces carried."""
    tokens: list[int] = []
    reasons: list[str] = []
    async for piece in stream:
        tokens += piece.token_ids
        reasons += [piece.finish_reason] if piece.finish_reason else []
    return tokens, reasons


def at_rest(llm: AsyncLLM) -> None:
    """Nothing runs, nothing waits, no block is used."""
    engine = llm.llm.engine
    engine.pools.check()
    assert engine.pools.used == 0
    assert not engine.busy


def test_streams_equal_generate_and_end_once() -> None:
    params = [SamplingParams(max_tokens=12, temperature=t, seed=i) for i, t in enumerate((0, 0.7, 0, 1.0, 0, 0.9))]
    with LLM(CONFIG, **OPTIONS) as llm:
        want = [r.token_ids for r in llm.generate(PROMPTS, params)]

    async def run() -> None:
        async with AsyncLLM(CONFIG, **OPTIONS) as llm:
            got = await asyncio.gather(*(collect(llm.generate(p, s)) for p, s in zip(PROMPTS, params)))
            assert [tokens for tokens, _ in got] == want
            assert all(reasons == ["length"] for _, reasons in got)
            stats = await llm.stats()
            assert stats["requests_accepted_total"] == sum(stats["request_success_total"].values()) == len(PROMPTS)
            at_rest(llm)

    asyncio.run(run())


def test_fed_pieces_are_those_of_a_stream() -> None:
    params = SamplingParams(max_tokens=12, temperature=0)
    long = SamplingParams(max_tokens=400, temperature=0)

    def fall(piece: Delta) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        async with AsyncLLM(CONFIG, **OPTIONS) as llm:
            want = await asyncio.gather(*(collect(llm.generate(p, params)) for p in PROMPTS))
            got: list[list[Delta]] = [[] for _ in PROMPTS]
            await asyncio.gather(*(llm.feed(into.append, p, params) for into, p in zip(got, PROMPTS)))
            assert [[t for piece in pieces for t in piece.token_ids] for pieces in got] == [
                tokens for tokens, _ in want
            ]
            assert all(
                [bool(p.finish_reason) for p in pieces] == [False] * (len(pieces) - 1) + [True] for pieces in got
            )
            with pytest.raises(ZeroDivisionError):
                await llm.feed(fall, PROMPTS[0], long)
            with pytest.raises(UsageError):
                await llm.feed(got[0].append, [97], params)
            cancelled = asyncio.create_task(llm.feed(got[0].append, PROMPTS[1], long))
            while not (await llm.stats())["num_requests_running"]:
                await asyncio.sleep(0.005)
            cancelled.cancel()
            while (await llm.stats())["num_requests_running"]:
                await asyncio.sleep(0.005)
            at_rest(llm)

    asyncio.run(run())


def test_leaving_early_aborting_and_cancelling_free_the_blocks() -> None:
    long = SamplingParams(max_tokens=400, temperature=0)

    async def run() -> None:
        async with AsyncLLM(CONFIG, **OPTIONS) as llm:
            stream = llm.generate(PROMPTS[0], long)
            async for _ in stream:
                break
            await stream.aclose()
            aborted = asyncio.create_task(collect(llm.generate(PROMPTS[1], long, request_id="mine")))
            cancelled = asyncio.create_task(collect(llm.generate(PROMPTS[2], long)))
            while (await llm.stats())["num_requests_running"] < 2:
                await asyncio.sleep(0.005)
            llm.abort("mine")
            llm.abort("nobody")
            cancelled.cancel()
            assert (await aborted)[1] == ["abort"]
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert (await collect(llm.generate(PROMPTS[3], SamplingParams(max_tokens=3))))[1] == ["length"]
            at_rest(llm)

    asyncio.run(run())


def test_an_id_that_is_used_again_at_once_hears_nothing_of_the_request_before() -> None:
    long = SamplingParams(max_tokens=400, temperature=0)

    async def run() -> None:
        async with AsyncLLM(CONFIG, **OPTIONS) as llm:
            other = asyncio.create_task(collect(llm.generate(PROMPTS[1], long)))
            given_up = asyncio.create_task(collect(llm.generate(PROMPTS[0], long, "mine")))
            while (await llm.stats())["num_requests_running"] < 2:
                await asyncio.sleep(0.005)
            given_up.cancel()
            await asyncio.wait([given_up])
            tokens, reasons = await collect(llm.generate(PROMPTS[2], SamplingParams(max_tokens=5), "mine"))
            assert (len(tokens), reasons) == (5, ["length"])
            other.cancel()
            await asyncio.wait([other])

    asyncio.run(run())


def test_refusals_leave_nothing_and_others_run_on() -> None:
    async def run() -> None:
        async with AsyncLLM(CONFIG, max_waiting=1, **{**OPTIONS, "max_num_seqs": 1}) as llm:
            running = asyncio.create_task(collect(llm.generate(PROMPTS[0], SamplingParams(max_tokens=100), "same")))
            while (await llm.stats())["num_requests_running"] < 1:
                await asyncio.sleep(0.005)
            for bad, error in (([], UsageError), ([1000], UsageError), ([1] * 600, CapacityError)):
                with pytest.raises(error):
                    await collect(llm.generate(bad))
            with pytest.raises(UsageError, match="alive"):
                await collect(llm.generate([1], request_id="same"))
            waiting = asyncio.create_task(collect(llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))))
            while (await llm.stats())["num_requests_waiting"] < 1:
                await asyncio.sleep(0.005)
            with pytest.raises(CapacityError, match="waiting"):
                await collect(llm.generate(PROMPTS[2]))
            assert (await running)[1] == (await waiting)[1] == ["length"]
            at_rest(llm)

    asyncio.run(run())


@pytest.mark.parametrize(("drain_s", "reason"), [(0.0, "abort"), (60.0, "length")])
def test_shutdown_drains_or_aborts_and_refuses_what_comes_later(drain_s: float, reason: str) -> None:
    async def run() -> None:
        llm = AsyncLLM(CONFIG, **OPTIONS)
        task = asyncio.create_task(collect(llm.generate(PROMPTS[0], SamplingParams(max_tokens=60))))
        while (await llm.stats())["num_requests_running"] < 1:
            await asyncio.sleep(0.002)
        await llm.shutdown(drain_s)
        assert (await task)[1] == [reason]
        with pytest.raises(UsageError, match="shut down"):
            await collect(llm.generate(PROMPTS[1]))

    asyncio.run(run())


def test_a_broken_engine_ends_every_stream_with_the_reason() -> None:
    async def run() -> None:
        llm = AsyncLLM(CONFIG, **OPTIONS)

        def broken() -> list[Any]:
            raise SystemExit("the device is gone")

        tasks = [asyncio.create_task(collect(llm.generate(p, SamplingParams(max_tokens=400)))) for p in PROMPTS[:2]]
        while (await llm.stats())["num_requests_running"] < 2:
            await asyncio.sleep(0.002)
        llm.llm.engine.step = broken  # type: ignore[method-assign]
        assert [(await t)[1] for t in tasks] == [["error"], ["error"]]
        at_rest(llm)
        await llm.shutdown()

    asyncio.run(run())


class Told:
    """A caller who keeps what it hears."""

    def __init__(self) -> None:
        self.pieces: list[tuple[RequestId, Delta]] = []

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        self.pieces += pieces


def order(name: str, **params: Any) -> Submission:
    return Submission(name, [1, 2, 3], SamplingParams(ignore_eos=True, **params), 0, 0, "")


def turn(engine: LocalEngine) -> None:
    """Wait until the engine's thread has done all that it was asked for before."""
    engine.inspect("stats").result(10)


def test_a_request_in_the_queue_ends_with_its_caller() -> None:
    engine, told, gate = LocalEngine(LLM(CONFIG, **OPTIONS)), Told(), threading.Event()
    try:
        engine._inbox.put(lambda: gate.wait(10) and None)  # the engine's thread is in a long step
        accepted = engine.submit(order("a", max_tokens=400), told)
        engine.abort_all(told)
        gate.set()
        accepted.result(10)
        turn(engine)
        assert not engine._streams and [p.finish_reason for _, p in told.pieces] == ["abort"]
    finally:
        engine.close()


def test_a_constrained_request_that_was_given_up_leaves_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told, gate = LocalEngine(LLM(CONFIG, **OPTIONS)), Told(), threading.Event()
    try:
        monkeypatch.setattr(engine.llm, "constraint", lambda params: gate.wait(10) and None)
        given_up = engine.submit(order("x", max_tokens=3, regex="[a-z]+"), told)
        assert given_up.cancel()
        engine.abort("x", told)
        gate.set()
        engine._compilers.submit(lambda: None).result(10)
        turn(engine)
        deadline = time.monotonic() + 10
        while engine._compiling and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine._compiling and not told.pieces
        engine.submit(order("x", max_tokens=3), told).result(10)
        while not any(p.finish_reason for _, p in told.pieces) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [p.finish_reason for _, p in told.pieces][-1] == "length"
    finally:
        engine.close()


def test_constraints_that_nobody_waits_for_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told, gate = LocalEngine(LLM(CONFIG, **OPTIONS)), Told(), threading.Event()
    compiled: list[str | None] = []

    def slow(params: SamplingParams) -> None:
        if params.regex is not None:
            compiled.append(params.regex)
            gate.wait(10)
            raise UsageError("too complex")

    monkeypatch.setattr(engine.llm, "constraint", slow)
    try:
        working = [engine.submit(order(name, regex=name), told) for name in ("a", "b")]
        left = engine.submit(order("c", regex="c"), told)
        late = engine.submit(order("d", regex="d", timeout_s=0.01), told)
        engine.abort("c", told)
        turn(engine)
        time.sleep(0.02)
        gate.set()
        assert left.result(10) is None and late.result(10) is None
        assert all(isinstance(w.exception(10), UsageError) for w in working)
        while engine._streams:
            turn(engine)
        assert sorted(compiled) == ["a", "b"] and not engine._compiling  # type: ignore[type-var]
        ends = {name: (piece.finish_reason, piece.token_ids) for name, piece in told.pieces}
        assert ends == {"c": ("abort", []), "d": ("timeout", [])}
    finally:
        engine.close()


def test_an_engine_comes_to_rest_once_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "IDLE_S", 0.01)
    rests: queue.SimpleQueue[int] = queue.SimpleQueue()
    engine = LocalEngine(LLM(CONFIG, **OPTIONS), on_idle=lambda: rests.put(1))
    try:
        for name in ("a", "b"):
            engine.submit(order(name, max_tokens=3), Told()).result(10)
            assert rests.get(timeout=10)
            for _ in range(3):  # numbers that are asked for are no work
                turn(engine)
                time.sleep(0.03)
            assert rests.empty()
    finally:
        engine.close()
