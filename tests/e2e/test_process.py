"""An engine in a process of its own: the same answers, and a clear end whoever dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, AsyncLLM, SamplingParams
from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.server import _Forwarding
from inferplane.errors import (
    CapacityError,
    DeviceError,
    EngineError,
    InferplaneWarning,
    UnsupportedModelError,
    UsageError,
    log_choice,
)
from tests.e2e.test_async import CONFIG, OPTIONS, PROMPTS, collect

LONG = SamplingParams(max_tokens=400, temperature=0)


def served(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `work` on a model in a process of its own, and end it."""

    async def run() -> None:
        async with AsyncLLM(CONFIG, process=True, **{**OPTIONS, **options}) as llm:
            await work(llm)

    asyncio.run(run())


async def running(llm: AsyncLLM, *tasks: asyncio.Future[Any]) -> None:
    """Wait until these requests run. A busy machine may look only when one has ended already."""
    while (await llm.stats())["num_requests_running"] < len(tasks) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.005)


def pid(llm: AsyncLLM) -> int:
    return llm._client._process._process.pid  # type: ignore[attr-defined]


def test_streams_equal_those_of_a_thread_and_nothing_stays() -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=t, seed=-(2**63) + i, logprobs=2) for i, t in enumerate((0, 0.9))
    ]
    with LLM(CONFIG, **OPTIONS) as llm:
        want = [(r.token_ids, r.logprobs) for r in llm.generate(PROMPTS[:2], params)]

    async def whole(llm: AsyncLLM, prompt: list[int], how: SamplingParams) -> tuple[list[int], list[Any]]:
        pieces = [p async for p in llm.generate(prompt, how)]
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        return [t for p in pieces for t in p.token_ids], [x for p in pieces for x in p.logprobs or ()]

    async def work(llm: AsyncLLM) -> None:
        assert (await llm.health()).is_ready()
        got = await asyncio.gather(*(whole(llm, p, s) for p, s in zip(PROMPTS, params)))
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
        for (_, ours), (_, theirs) in zip(got, want):  # batches differ, and with them the last bits
            assert [(x.token_id, x.rank) for x in ours] == [(x.token_id, x.rank) for x in theirs]
            assert [x.logprob for x in ours] == pytest.approx([x.logprob for x in theirs], abs=1e-4)
            assert all([i for i, _ in x.top] == [i for i, _ in y.top] for x, y in zip(ours, theirs))
        stats = await llm.stats()
        assert stats["requests_accepted_total"] == sum(stats["request_success_total"].values()) == 2
        assert (await llm.explain())["device"] == llm.info.device == "cpu"
        assert llm.info.vocab == 97
        for bad, error in (([], UsageError), ([10**30], UsageError), ([1] * 600, CapacityError)):
            with pytest.raises(error):
                await collect(llm.generate(bad))
        for odd in ({"tenant": None}, {"priority": 1.5}, {"priority": True}, {"index": "0"}, {"tenant": "\ud800"}):
            with pytest.raises(UsageError):
                await collect(llm.generate(PROMPTS[0], **odd))
        with pytest.raises(UsageError, match="lives in a process"):
            _ = llm.llm
        stream = llm.generate(PROMPTS[0], LONG)
        async for _ in stream:
            break
        await stream.aclose()
        mine = asyncio.create_task(collect(llm.generate(PROMPTS[1], LONG, "mine")))
        await running(llm, mine)
        with pytest.raises(UsageError, match="alive"):
            await collect(llm.generate([1], request_id="mine"))
        llm.abort("mine")
        assert (await mine)[1] == ["abort"]
        stats = await llm.stats()
        assert stats["kv_blocks_free"] + stats["kv_blocks_cached"] == stats["kv_blocks_total"]

    served(work)


def test_other_callers_share_the_engine_and_leave_alone() -> None:
    async def work(llm: AsyncLLM) -> None:
        other = AsyncLLM.connect(llm.address)
        assert other.info == llm.info
        one = asyncio.create_task(collect(llm.generate(PROMPTS[0], LONG, "same id")))
        two = asyncio.create_task(collect(other.generate(PROMPTS[1], LONG, "same id")))
        await running(llm, one, two)
        await other.shutdown()
        assert (await two)[1] == ["abort"]
        with socket.socket(socket.AF_UNIX) as rude:  # says what is no message
            rude.connect(llm.address)
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert rude.recv(1 << 16)
            rude.settimeout(10)
            while rude.recv(1 << 16):
                pass
        assert (await llm.stats())["num_requests_running"] == 1
        llm.abort("same id")
        assert (await one)[1] == ["abort"]

    served(work)
    with pytest.raises(EngineError, match="No engine"):
        AsyncLLM.connect("/nowhere/engine")


def test_a_killed_process_ends_every_stream_with_the_reason() -> None:
    async def work(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(collect(llm.generate(p, LONG))) for p in PROMPTS[:2]]
        await running(llm, *tasks)
        os.kill(pid(llm), signal.SIGKILL)
        assert [(await t)[1] for t in tasks] == [["error"], ["error"]]
        with pytest.raises(EngineError, match="SIGKILL"):
            await collect(llm.generate(PROMPTS[2]))
        health = await llm.health()
        assert not health.is_ready() and "SIGKILL" in health.failure
        folder = Path(llm.address).parent
        await llm.shutdown()
        assert not folder.exists()

    served(work)


def test_a_stopped_process_is_not_healthy_and_does_not_keep_us() -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm.generate(PROMPTS[0], LONG)))
        await running(llm, task)
        os.kill(pid(llm), signal.SIGSTOP)
        assert not (await llm.health(0.2)).alive
        await llm.shutdown(kill_s=0.5)
        assert (await task)[1] == ["abort"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid(llm), 0)

    served(work)


def test_shutdown_lets_live_requests_run_to_their_end() -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(collect(llm.generate(PROMPTS[0], SamplingParams(max_tokens=100, temperature=0))))
        await running(llm, task)
        await llm.shutdown(drain_s=60)
        tokens, reasons = await task
        assert len(tokens) == 100 and reasons == ["length"]
        with pytest.raises(UsageError, match="shut down"):
            await collect(llm.generate(PROMPTS[1]))

    served(work)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device": "abacus"}, DeviceError),
        ({"model": {**CONFIG, "architectures": ["Abacus"]}}, UnsupportedModelError),
        ({"ops": {1: print}}, UsageError),
    ],
)
def test_a_model_that_cannot_be_loaded_raises_here(options: dict[str, Any], error: type[Exception]) -> None:
    model = options.pop("model", CONFIG)
    with pytest.raises(error):
        AsyncLLM(model, process=True, **{**OPTIONS, **options})


def test_a_line_about_a_choice_is_no_warning_of_the_process() -> None:
    sent: list[messages.Warned] = []
    with _Forwarding(sent.append):
        log_choice("device=auto takes one")
        logging.getLogger("inferplane").warning("a warning")
    assert sent == [messages.Warned("device=auto takes one", is_choice=True), messages.Warned("a warning")]


def test_warnings_go_where_they_are_asked_for() -> None:
    """And not through the filters of this process, which other threads change while they import."""
    model, told = {**CONFIG, "max_position_embeddings": 4096}, []
    few = {"process": True, **OPTIONS, "kv_cache_bytes": 1 << 17}
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("ignore")
        asyncio.run(AsyncLLM(model, on_warning=told.append, **few).shutdown())
        assert len(told) == 1 and "kv_cache_bytes = 131072 holds" in told[0]
        warnings.simplefilter("always")
        asyncio.run(AsyncLLM(model, **few).shutdown())
    # Others, such as a socket that an earlier test left to the garbage collector, may be raised in between.
    assert [str(w.message) for w in raised if issubclass(w.category, InferplaneWarning)] == told
    with pytest.raises(UsageError, match="on_warning without process"):
        AsyncLLM(model, on_warning=told.append, **OPTIONS)


ORPHAN = """
import os, sys
from inferplane import AsyncLLM
from tests.e2e.test_async import CONFIG, OPTIONS
llm = AsyncLLM(CONFIG, process=True, **OPTIONS)
print(llm._client._process._process.pid, flush=True)
os._exit(1)
"""


def test_the_process_ends_with_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=120, check=False)
    child = int(done.stdout)
    limit = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
        if (Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split())[0] == "Z":
            break  # ended, and nobody here collects it
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_messages_survive_the_journey() -> None:
    fault = messages.Fault.of(CapacityError("too long", there_is="4", remedy="shorten"))
    assert str(fault.error()) == "too long There is: 4. To do: shorten."
    assert isinstance(fault.error(), CapacityError)
    assert isinstance(messages.Fault("SystemExit", "?").error(), EngineError)
    assert isinstance(messages.Fault.of(KeyError("x")).error(), EngineError)
    with pytest.raises(ValueError, match="bytes"):
        messages.body_bytes(b"\xff" * messages.HEADER_BYTES)


def test_a_request_that_cannot_be_read_costs_nobody_else() -> None:
    """It passed by all checks, as with a client of another version; its sender hears of it."""

    async def work(llm: AsyncLLM) -> None:
        other = asyncio.ensure_future(collect(llm.generate(PROMPTS[0], LONG)))
        await running(llm, other)
        params = SamplingParams(max_tokens=3)
        object.__setattr__(params, "ignore_eos", 1)
        with pytest.raises(UsageError, match=r"cannot read a request.*bool"):
            await collect(llm.generate(PROMPTS[1], params))
        assert (await other)[1] == ["length"]

    served(work)


@pytest.mark.parametrize("process", [False, True])
def test_a_limit_holds_while_constraints_are_compiled(process: bool) -> None:
    """Others' constraints take the compilers; who waits behind them is told in time, and nothing of it stays.

    In time means before those that it waits behind are done: seconds would say how busy the machine is.
    """

    async def run() -> None:
        async with AsyncLLM("demo", device="cpu", max_model_len=256, process=process) as llm:
            await collect(llm.generate("x", SamplingParams(max_tokens=1)))  # now the tokenizer is loaded
            slow = SamplingParams(max_tokens=2, regex="(a|b|ab|ba|aab){1,400}(c|d|cd){1,400}[a-z]{1,500}x")
            streams = []
            for i in range(20):
                how = replace(slow, regex=f"{slow.regex}{i}")
                streams.append(asyncio.ensure_future(collect(llm.generate("x", how))))
            await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)  # now the others wait for the compilers
            late = [p async for p in llm.generate("y", SamplingParams(max_tokens=2, regex="[yz]+", timeout_s=0.01))]
            assert [p.finish_reason for p in late if p.finish_reason] == ["timeout"]
            assert sum(not stream.done() for stream in streams) > 1
            await asyncio.gather(*streams, return_exceptions=True)
            assert (await llm.stats())["num_requests_running"] == 0

    asyncio.run(run())
