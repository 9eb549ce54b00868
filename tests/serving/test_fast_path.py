"""Between the gate and the routes that generate: the limiter of the fast path, and the direct handlers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from inferplane.serving.bodies import BodyMemory
from inferplane.serving.http import generate
from inferplane.serving.http.app import full_app, health_app, metrics_app
from inferplane.serving.http.chunks import ChunkWriter
from inferplane.serving.http.fast_path import MAX_SKIPPED_PASSES, LoopPassLimiter
from inferplane.serving.http.scope import CONTEXT, RequestContext
from inferplane.serving.large_bodies import threads
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings

BODIES = (
    b"",
    b"[",
    b"[]",
    b"{}",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"messages": [], "model": 1}',
    b'{"input": []}',
    b'{"text": 5, "req_id": "a"}',
    b'{"text": "x", "max_dec_len": 2}',
    b'{"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}',
)


@pytest.mark.parametrize("per_pass", [1, 2, 3])
def test_few_tasks_continue_per_pass_and_a_cancelled_task_delays_none(per_pass):
    async def work() -> None:
        loop, limiter, passes = asyncio.get_running_loop(), LoopPassLimiter(per_pass), 0
        went: dict[int, int] = {}

        def tick() -> None:
            nonlocal passes
            passes += 1
            loop.call_soon(tick)

        async def one(i: int) -> None:
            await limiter.wait()
            went[i] = passes

        tick()
        tasks = [asyncio.create_task(one(i)) for i in range(10)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert list(went) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert max(Counter(went.values()).values()) == per_pass, went
        assert len(set(went.values())) == -(-9 // per_pass), went
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alone = asyncio.create_task(one(9))
        await asyncio.sleep(0)
        assert alone.done()  # no other task waits: at once

    asyncio.run(work())


def test_tasks_behind_those_of_another_limiter_have_few_passes_while_these_wait():
    async def work() -> None:
        first = LoopPassLimiter(2)
        limiter = LoopPassLimiter(after=first)
        went: list[str] = []

        async def one(name: str, limiter: LoopPassLimiter) -> None:
            await limiter.wait()
            went.append(name)

        tasks = [asyncio.create_task(one("first", first)) for _ in range(8 * MAX_SKIPPED_PASSES)]
        tasks += [asyncio.create_task(one("after", limiter)) for _ in range(5)]
        await asyncio.wait_for(asyncio.gather(*tasks), 10)
        places = [i for i, name in enumerate(went) if name == "after"]
        assert len(went) == 8 * MAX_SKIPPED_PASSES + 5 and len(places) == 5
        gaps = [b - a for a, b in zip([0, *places], places, strict=False)]
        assert places[0] > MAX_SKIPPED_PASSES and max(gaps) <= 2 * (MAX_SKIPPED_PASSES + 2) + 1, places
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alone = asyncio.create_task(one("alone", limiter))
        await asyncio.sleep(0)
        assert alone.done()

    asyncio.run(work())


def test_tasks_do_not_wait_behind_those_of_another_client():
    """A client that sends many requests at once leaves passes to its own refusals, not to another's."""

    async def work() -> None:
        first = LoopPassLimiter(2)
        limiter = LoopPassLimiter(after=first)
        went: list[str] = []

        async def one(client: str) -> None:
            await first.wait(client)
            await limiter.wait(client)
            went.append(client)

        many = [asyncio.create_task(one("many")) for _ in range(4 * MAX_SKIPPED_PASSES)]
        await asyncio.sleep(0)
        few = asyncio.create_task(one("few"))
        for _ in range(4):
            await asyncio.sleep(0)
        assert few.done() and went == ["few"], went
        await asyncio.wait_for(asyncio.gather(*many), 10)

    asyncio.run(work())


def test_clients_take_turns_and_one_with_many_requests_delays_its_own():
    async def work() -> None:
        limiter = LoopPassLimiter()
        went: list[tuple[str, int]] = []

        async def one(client: str, i: int) -> None:
            await limiter.wait(client)
            went.append((client, i))

        tasks = [asyncio.create_task(one("many", i)) for i in range(40)]
        await asyncio.sleep(0)  # one of them has continued, the others wait
        tasks += [asyncio.create_task(one(name, i)) for i in range(2) for name in ("few", "other")]
        await asyncio.sleep(0)
        tasks[20].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        first = went.index(("few", 0))
        assert first <= 4
        order = [client for client, _ in went[first : first + 7]]
        assert order == ["few", "other", "many", "few", "other", "many", "many"], went
        assert [i for client, i in went if client == "many"] == [i for i in range(40) if i != 20]
        assert not limiter._waiting

    asyncio.run(work())


async def post(app: Any, path: str, body: bytes) -> tuple[list[Any], dict[str, Any], str]:
    """Return what an application sends for a POST, its facts for the log, and what it raises."""
    given = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(given)

    async def send(message: Any) -> None:
        sent.append(message)

    context = RequestContext("r", ChunkWriter(send), held=BodyMemory(10**9).hold())
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope.update({"headers": [(b"content-type", b"application/json")], CONTEXT: context})
    try:
        await app(scope, receive, send)
    except ZeroDivisionError as error:
        return sent, context.facts, repr(error)
    return sent, context.facts, ""


@pytest.mark.parametrize("path", generate.PATHS)
def test_the_direct_handlers_answer_as_fastapi_does(path: str, monkeypatch: pytest.MonkeyPatch):
    async def work() -> None:
        short = full_app(Service(ServerSettings()))
        long = full_app(Service(ServerSettings()))
        assert set(short.direct_handlers) == set(generate.PATHS)
        long.direct_handlers = {}
        for body in BODIES:
            found = await post(short, path, body)
            assert found == await post(long, path, body)
            assert found[0][0]["status"] in (400, 503), found
            assert json.loads(found[0][1]["body"])

        def fall(body: bytes) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(threads, "parse", fall)
        found = await post(short, path, b"{}")
        assert found == await post(long, path, b"{}")
        assert found[0][0]["status"] == 500 and found[2]

    asyncio.run(work())


def test_ports_of_health_and_metrics_generate_nothing():
    async def work() -> None:
        for app in (health_app(Service(ServerSettings())), metrics_app(Service(ServerSettings()))):
            for path in generate.PATHS:
                sent, _, _ = await post(app, path, b"{}")
                assert sent[0]["status"] == 404

    asyncio.run(work())
