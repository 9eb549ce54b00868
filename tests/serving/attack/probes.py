"""What is measured beside an attack: a client that behaves, health, the event loop's lag, and the machine itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.serving.live import Live, engine_pids
from tests.serving.soak import held

TOKENS = 16
EVERY_S = 0.1


class Repeated:
    """Calls a function again and again in a thread of its own, until the end of a `with` block."""

    def __init__(self, work: Callable[[], None], pause_s: float) -> None:
        self._work, self._pause_s = work, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause_s):
                self._work()
        except BaseException as error:  # a probe that has ended measures nothing: `__exit__` raises it
            self.error = error

    def __enter__(self) -> Repeated:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Streamed:
    """One request of the client that behaves; times in seconds.

    Args:
        started: on the monotonic clock.
        first_s: to the first token.
        whole_s: to the end.
    """

    started: float
    first_s: float
    whole_s: float


class GoodClient:
    """Streams `TOKENS` greedy tokens again and again on one connection, each time of another prompt.

    Args:
        server: to ask.
        key: its own.
    """

    def __init__(self, server: Live, key: str) -> None:
        self.streams: list[Streamed] = []
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def stream(self) -> None:
        """One request; AssertionError if it is not answered whole."""
        prompt = f"def function_{len(self.streams)}(a, b):\n    return "
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        started = time.monotonic()
        self._connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        answer = self._connection.getresponse()
        first = answer.read(1)
        first_s = time.monotonic() - started
        text = first + answer.read()
        assert answer.status == 200 and text.endswith(b"data: [DONE]\n\n"), (answer.status, text[-500:])
        assert b'"finish_reason":"length"' in text, text[-500:]
        self.streams.append(Streamed(started, first_s, time.monotonic() - started))


@dataclass(frozen=True)
class Probe:
    """One look at the server's health; times in seconds.

    Args:
        at: on the monotonic clock.
        own_port_s: the answer on the port of health.
        main_port_s: the answer on the port that serves.
        loop_lag_s: as the answer states it, of the last 5 to 10 s.
    """

    at: float
    own_port_s: float
    main_port_s: float
    loop_lag_s: float


class HealthProber:
    """Asks for health on both ports, on a new connection each time, as an orchestrator does."""

    def __init__(self, server: Live) -> None:
        self.probes: list[Probe] = []
        self._host, self._ports = server.host, (server.ports["health"], server.port)

    def probe(self) -> None:
        """Ask once; AssertionError if the server does not say that it is ready."""
        at, times, lag = time.monotonic(), [], 0.0
        for port in self._ports:
            started = time.monotonic()
            connection = http.client.HTTPConnection(self._host, port, timeout=120)
            connection.request("GET", "/v2/health/ready")
            answer = connection.getresponse()
            body: dict[str, Any] = json.loads(answer.read())
            connection.close()
            times.append(time.monotonic() - started)
            assert answer.status == 200, (port, answer.status, body)
            lag = max(lag, body["loop_lag_s"])
        self.probes.append(Probe(at, times[0], times[1], lag))


def _sleep_and_measure(worst: Synchronized[float]) -> None:
    while True:
        started = time.monotonic()
        time.sleep(0.05)
        worst.value = max(worst.value, time.monotonic() - started - 0.05)


@dataclass
class Bystander:
    """A process that only sleeps: by how much it wakes too late is what the machine, not the server, adds to a lag."""

    worst: Synchronized[float] = field(default_factory=lambda: multiprocessing.Value("d", 0.0))

    def __enter__(self) -> Bystander:
        context = multiprocessing.get_context("spawn")
        self.worst = context.Value("d", 0.0)
        self._process = context.Process(target=_sleep_and_measure, args=(self.worst,), daemon=True)
        self._process.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.join()


def processor_wait_s(pid: int) -> float:
    """Seconds that the main thread of a process was ready to run and had no processor; 0 where Linux does not tell."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def resident_bytes(server: Live) -> dict[str, int]:
    """Resident memory of the server's process and of its engine's, which is the largest of those it has started."""
    others = []
    for pid in engine_pids(server):
        with contextlib.suppress(OSError, KeyError):  # it ended meanwhile
            others.append(held(pid).resident_bytes)
    return {"server": held(server.process.pid).resident_bytes, "engine": max(others), "all": sum(others)}


def p99(seconds: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(seconds, n=100, method="inclusive")[98]
