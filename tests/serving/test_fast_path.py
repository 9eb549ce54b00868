"""What lies between the gate and the routes that generate: turns, and the short way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from inferplane.serving.http import generate
from inferplane.serving.http.app import full_app, health_app, metrics_app
from inferplane.serving.http.fast_path import LoopPassLimiter
from inferplane.serving.http.gate import FACTS, REQUEST_ID
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


def test_one_goes_on_in_each_pass_and_who_leaves_keeps_nobody_waiting():
    async def work() -> None:
        loop, turns, passes = asyncio.get_running_loop(), LoopPassLimiter(), 0
        went: dict[int, int] = {}

        def tick() -> None:
            nonlocal passes
            passes += 1
            loop.call_soon(tick)

        async def one(i: int) -> None:
            await turns.mine()
            went[i] = passes

        tick()
        tasks = [asyncio.create_task(one(i)) for i in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert list(went) == [0, 1, 3, 4, 5]
        assert len(set(went.values())) == 5, went
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        alone = asyncio.create_task(one(9))
        await asyncio.sleep(0)
        assert alone.done()  # nobody else waits: at once

    asyncio.run(work())


async def told(app: Any, path: str, body: bytes) -> tuple[list[Any], dict[str, Any], str]:
    """What an application sends for a POST, what it tells the log, and what it raises."""
    given = iter([{"type": "http.request", "body": body, "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(given)

    async def send(message: Any) -> None:
        sent.append(message)

    facts: dict[str, Any] = {}
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope.update({"headers": [(b"content-type", b"application/json")], FACTS: facts, REQUEST_ID: "r"})
    try:
        await app(scope, receive, send)
    except ZeroDivisionError as error:
        return sent, facts, repr(error)
    return sent, facts, ""


@pytest.mark.parametrize("path", generate.PATHS)
def test_the_short_way_tells_what_the_long_one_does(path: str, monkeypatch: pytest.MonkeyPatch):
    async def work() -> None:
        short = full_app(Service(ServerSettings()))
        long = full_app(Service(ServerSettings()))
        assert set(short.short) == set(generate.PATHS)
        long.short = {}
        for body in BODIES:
            found = await told(short, path, body)
            assert found == await told(long, path, body)
            assert found[0][0]["status"] in (400, 503), found
            assert json.loads(found[0][1]["body"])

        def fall(body: bytes) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(generate, "parse", fall)
        found = await told(short, path, b"{}")
        assert found == await told(long, path, b"{}")
        assert found[0][0]["status"] == 500 and found[2]

    asyncio.run(work())


def test_ports_of_health_and_metrics_generate_nothing():
    async def work() -> None:
        for app in (health_app(Service(ServerSettings())), metrics_app(Service(ServerSettings()))):
            for path in generate.PATHS:
                sent, _, _ = await told(app, path, b"{}")
                assert sent[0]["status"] == 404

    asyncio.run(work())
