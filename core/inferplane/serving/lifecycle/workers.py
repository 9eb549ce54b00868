"""Further processes that serve HTTP over the same engine, so that parsing, templates and JSON use several cores.

The first process serves too, and it owns the engine. Each worker inherits the listening socket, connects to the engine,
takes connections once that has succeeded, and ends with the first process: its standard input is a pipe that then
closes. `worker.py` is what a worker runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

from inferplane.serving.keys import Keys
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import LAG_CELL, SLOTS_CELL, RequestCounters
from inferplane.serving.shared_state.key_usage import TOTAL_CELLS, sequence_cells
from inferplane.serving.shared_state.shared_counters import SharedCounters

RESTART_S = 1.0
"""Seconds before a worker that ended by itself is started again."""
END_S = 2.0
"""Seconds that a worker has for its end beyond draining; then it is killed."""
KILL_S = 0.5
"""Seconds that are waited for the end of a worker that was killed."""
_MODULE = "inferplane.serving.lifecycle.worker"
_COMMAND = f"import sys; sys.path[:] = sys.argv[1].split('\\n'); from {_MODULE} import main; main()"
log = logging.getLogger("inferplane.serving")


class Workers:
    """Starts the workers, restarts those that end, and ends them.

    Args:
        settings: the workers get the same, without ports of their own.
        keys: which clients may call.
        sock: listens.
    """

    def __init__(self, settings: ServerSettings, keys: Keys, sock: socket.socket) -> None:
        ports = ("health_port", "metrics_port", "grpc_port", "grpc_health_port")
        unset: dict[str, Any] = dict.fromkeys((*ports, "api_key_file"))
        self._settings = replace(settings, http_workers=1, api_key=(), **unset)
        self._keys = keys
        self._count = settings.http_workers - 1
        self._socket = sock
        self.shared = SharedCounters(settings.http_workers, TOTAL_CELLS)
        """The counters of all processes; the first process has row 0."""
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._ending = False

    def start(self, address: str) -> None:
        """Start the workers, which connect to the engine at `address`."""
        self._tasks = [asyncio.create_task(self._keep_running(i, address)) for i in range(1, self._count + 1)]

    async def end(self, drain_s: float) -> None:
        """Let the workers drain, and wait for their end."""
        self._ending = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s + END_S)
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=KILL_S)  # they count what ended with a process
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send_keys(self) -> None:
        """Let the workers accept the keys that this process accepts by now."""
        line = json.dumps(self._keys.to_list()).encode() + b"\n"
        for process in self._processes:
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(line)

    async def _keep_running(self, number: int, address: str) -> None:
        while not self._ending:
            code = await self._run(number, address)
            for cell in (SLOTS_CELL, LAG_CELL, *sequence_cells()):  # its sequences ended with it; its counts stay
                self.shared.write(number, cell, 0)
            RequestCounters(self.shared, number).end_lost()
            if not self._ending:
                log.error("a worker ended", extra={"facts": {"worker": number, "code": code}})
                await asyncio.sleep(RESTART_S)

    async def _run(self, number: int, address: str) -> int:
        assert self.shared.fd is not None
        fds = self._socket.fileno(), self.shared.fd
        arguments = (*fds, self.shared.processes, number, address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _COMMAND, "\n".join(sys.path), *map(str, arguments)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # a terminal's Ctrl-C comes through the first process
        )
        self._processes.add(process)
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                for line in (asdict(self._settings), self._keys.to_list()):
                    process.stdin.write(json.dumps(line).encode() + b"\n")
                await process.stdin.drain()
            return await process.wait()
        finally:
            self._processes.discard(process)
