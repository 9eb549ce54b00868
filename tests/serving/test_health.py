"""Health on a port of its own: answered while the event loop that serves is stuck, which it tells, with the lag."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import NUM_CELLS, RequestCounters
from inferplane.serving.shared_state.loop_lag import NOT_READY_S, LoopLag
from inferplane.serving.shared_state.shared_counters import SharedCounters
from tests.serving.live import Live

STUCK = """
import os, signal, time

def hold_up(number, frame):
    while os.path.exists({flag!r}):
        time.sleep(0.02)

signal.signal(signal.SIGUSR1, hold_up)
"""
"""Runs in the server as it starts: a signal holds up its main thread, so the event loop, while a file exists."""
PATIENCE_S = 60.0


def until(look: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """What `look` returned once it is right."""
    limit = time.monotonic() + PATIENCE_S
    while not holds(seen := look()):
        assert time.monotonic() < limit, seen
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("args", [(), ("--api-key", "k", "--http-workers", "2")], ids=["plain", "key and workers"])
def test_probes_are_answered_while_the_event_loop_is_stuck(tmp_path: Path, args: tuple[str, ...]) -> None:
    flag = tmp_path / "stuck"
    (tmp_path / "sitecustomize.py").write_text(STUCK.format(flag=str(flag)))
    more = ("--health-port", "0", "--stall-s", "6", *args)
    with (
        Live(*more, environment={"PYTHONPATH": str(tmp_path)}) as server,
        httpx.Client(base_url=f"http://{server.host}:{server.ports['health']}", timeout=PATIENCE_S) as probe,
    ):

        def ask(path: str) -> tuple[int, dict[str, Any]]:
            answer = probe.get(path)
            return answer.status_code, answer.json()

        def ready() -> tuple[int, dict[str, Any]]:
            return ask("/v2/health/ready")

        status, body = ready()
        assert (status, body["status"]) == (200, "serving") and body["loop_lag_s"] >= 0
        flag.touch()
        os.kill(server.process.pid, signal.SIGUSR1)
        try:
            status, body = until(ready, lambda seen: seen[0] == 503)
            assert body["status"] == "stalled" and "event loop" in body["detail"], body
            assert body["loop_lag_s"] >= NOT_READY_S
            status, body = until(lambda: ask("/v2/health/live"), lambda seen: seen[0] == 503)
            assert body["loop_lag_s"] >= 6
            assert ask("/health")[0] == 503
            if "--http-workers" not in args:
                with pytest.raises(httpx.TimeoutException):
                    httpx.get(f"{server.url}/health", timeout=0.3)
        finally:
            flag.unlink()
        until(ready, lambda seen: seen[0] == 200)
        assert ask("/v2/health/live")[0] == 200
        with server.client() as client:
            assert client.get("/health").json()["loop_lag_s"] >= 0
        found = until(server.metrics, lambda seen: seen['inferplane:loop_lag_seconds{process="0"}'] > 6)
        assert ('inferplane:loop_lag_seconds{process="1"}' in found) == ("--http-workers" in args)
        assert server.stop() == 0


@pytest.mark.parametrize("held_s", [0.0, 0.3, 0.6])
def test_lag_is_seen_from_another_thread_and_remembered(held_s: float) -> None:
    reports: list[float] = []

    async def run() -> tuple[float, float]:
        lag = LoopLag(reports.append)
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        inside = asyncio.create_task(asyncio.to_thread(lambda: (time.sleep(held_s), lag.stuck_s)[1]))
        await asyncio.sleep(0)
        time.sleep(2 * held_s)
        seen = await inside
        await asyncio.sleep(0.2)
        worst = lag.worst_s
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert lag.stuck_s == 0
        return seen, worst

    seen, worst = asyncio.run(run())
    assert seen >= held_s - 0.1 and worst >= 2 * held_s - 0.1 and reports


@pytest.mark.parametrize(
    ("stuck_s", "stall_s", "live", "ready"),
    [
        (0.0, 30, True, True),
        (4.9, 1, True, True),
        (5.0, 30, True, False),
        (6.0, 1, False, False),
        (31, 30, False, False),
    ],
)
def test_thresholds_of_a_stuck_loop(
    stuck_s: float, stall_s: float, live: bool, ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(ServerSettings(stall_s=stall_s))
    service.state = "serving"
    monkeypatch.setattr(LoopLag, "stuck_s", stuck_s)
    found = service.condition_outside()
    assert (found.live, found.ready) == (live, ready)
    assert bool(found.detail) != ready and service.condition().ready


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_process_shows_its_own_lag(processes: int) -> None:
    shared = SharedCounters(processes, NUM_CELLS)
    for number in range(processes):
        RequestCounters(shared, number).set_loop_lag(number + 0.25)
    assert RequestCounters(shared).loop_lags() == [number + 0.25 for number in range(processes)]
    assert not list(RequestCounters(shared).items())
