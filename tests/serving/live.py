"""A server as an operator starts it: in its own process, on its own port."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

START_S = 90.0
"""Generous: these machines are shared. How long a start takes is measured in benchmarks/."""


class Live:
    """`inferplane serve`, running.

    Args:
        args: its options.
        environment: variables beside those of this process.
        wait: until it accepts requests; otherwise until it listens.
        descriptors: most files that each of its processes may open.
    """

    def __init__(
        self,
        *args: str,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        descriptors: int | None = None,
    ) -> None:
        command = [sys.executable, "-m", "inferplane", "serve", "--device", "cpu", "--log-format", "json", *args]
        if "--port" not in args:
            command += ["--port", "0"]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("INFERPLANE_")}
        variables.update(environment or {})
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=variables)
        if descriptors is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        self.log: list[dict[str, Any]] = []
        self.text = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        listening = self.event("listening")
        self.host, _, port = listening["http"].rpartition(":")
        self.port = int(port)
        self.ports = {
            name: int(listening[name].rpartition(":")[2]) for name in ("health", "metrics") if name in listening
        }
        key = args[args.index("--api-key") + 1] if "--api-key" in args else ""
        self._headers: dict[str, bytes] = {}
        if key:
            self.use_key(key)
        self.scheme = "https" if "--tls-cert" in args else "http"
        self.url = f"{self.scheme}://{self.host}:{self.port}"
        if wait:
            self.event("ready")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace")
            with self._news:
                self.text += line
                if line.startswith("{"):
                    self.log.append(json.loads(line))
                self._news.notify_all()

    def event(self, name: str, timeout_s: float = START_S, after: int = 0, **facts: Any) -> dict[str, Any]:
        """The first line of the log with this event and these facts, waited for."""

        def found() -> dict[str, Any] | None:
            lines = self.log[after:]
            return next((e for e in lines if e["event"] == name and facts.items() <= e.items()), None)

        limit = time.monotonic() + timeout_s
        with self._news:
            while (line := found()) is None:
                over = self.process.poll() is not None and not self._reader.is_alive()
                assert not over and time.monotonic() < limit, f"no {name!r} {facts} in the log:\n{self.text[-3000:]}"
                self._news.wait(0.1)
            return line

    def use_key(self, key: str) -> None:
        """Send this key from now on."""
        self._headers = {"authorization": f"Bearer {key}".encode()}

    def client(self, **more: Any) -> httpx.Client:
        """A client of it, with its key."""
        return httpx.Client(base_url=self.url, timeout=60, headers=self._headers, **more)

    def connect(self) -> socket.socket:
        """A bare connection."""
        sock = socket.create_connection((self.host, self.port), timeout=30)
        sock.settimeout(30)
        return sock

    def metrics(self) -> dict[str, float]:
        """Its numbers."""
        with self.client() as client:
            lines = client.get("/metrics").raise_for_status().text.splitlines()
        return {n: float(v) for n, _, v in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    def at_rest(self, timeout_s: float = 20.0) -> dict[str, float]:
        """Its numbers once nothing runs any more; fails if blocks or slots are lost."""
        limit = time.monotonic() + timeout_s
        while True:
            now = self.metrics()
            free = now["inferplane:kv_blocks_free"] + now["inferplane:kv_blocks_cached"]
            busy = now["inferplane:num_requests_running"] + now["inferplane:num_requests_waiting"]
            if not busy and not now["inferplane:admitted_sequences"] and free == now["inferplane:kv_blocks_total"]:
                return now
            assert time.monotonic() < limit, f"not at rest: {now}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """End it by a signal; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def engine_pids(server: Live) -> list[int]:
    """Processes that a server has started: its engine, its template renderer."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == server.process.pid:
                found.append(int(folder.name))
    return found
