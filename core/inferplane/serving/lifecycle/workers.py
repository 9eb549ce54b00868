"""More processes for HTTP over one engine: parsing, templates and JSON then have several cores.

The process that was started serves as well, and has the engine. Each of the others inherits the listening socket,
connects to the engine by itself, takes connections once it has done so, and ends with the first one: its standard input
is a pipe that then closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from inferplane.serving import logs
from inferplane.serving.counters import NUM_CELLS, RequestCounters
from inferplane.serving.settings import ServerSettings
from inferplane.serving.slots import SLOTS_CELL, SequenceSlots, SharedCounters

RESTART_S = 1.0
END_S = 10.0
"""Seconds beyond draining that a worker has for its end; then it is killed."""
_START = (
    "import sys; sys.path[:] = sys.argv[1].split('\\n'); from inferplane.serving.lifecycle.workers import main; main()"
)
log = logging.getLogger("inferplane.serving")


class Workers:
    """The further processes.

    Args:
        settings: theirs are the same, without ports of their own.
        keys: who may come in.
        sock: listens.
        board: of the numbers that all share; the first process has the first slot.
    """

    def __init__(self, settings: ServerSettings, keys: list[str], sock: socket.socket, board: SharedCounters) -> None:
        own = replace(
            settings, health_port=None, metrics_port=None, grpc_port=None, http_workers=1, api_key=tuple(keys)
        )
        self._settings = replace(own, api_key_file=None)
        self._socket, self._board = sock, board
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._ending = False

    def start(self, count: int, address: str) -> None:
        """Start so many; each is started again when it ends by itself."""
        self._tasks = [asyncio.create_task(self._keep(number, address)) for number in range(1, count + 1)]

    async def end(self, drain_s: float) -> None:
        """Let them drain, and wait for their end."""
        self._ending = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=drain_s + END_S)
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, number: int, address: str) -> None:
        while not self._ending:
            code = await self._run(number, address)
            self._board.write(number, SLOTS_CELL, 0)  # what it held ended with it; what it counted stays
            if not self._ending:
                log.error("a worker ended", extra={"facts": {"worker": number, "code": code}})
                await asyncio.sleep(RESTART_S)

    async def _run(self, number: int, address: str) -> int:
        assert self._board.fd is not None
        fds = self._socket.fileno(), self._board.fd
        where = (*fds, self._board.slots, number, address)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _START, "\n".join(sys.path), *map(str, where)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # a terminal's Ctrl-C comes through the first process
        )
        self._processes.add(process)
        try:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(json.dumps(asdict(self._settings)).encode() + b"\n")
                await process.stdin.drain()
            return await process.wait()
        finally:
            self._processes.discard(process)


def _end_with_parent() -> None:
    """Standard input ends when the first process does; then nobody is left to answer for."""
    while os.read(0, 4096):  # not through sys.stdin: its lock, held here, is needed when the interpreter ends
        pass
    logs.finish()
    os._exit(1)


def main() -> None:
    """A worker. Standard input: the settings. Arguments: the descriptors of socket and board, the board's size and this
    process's slot on it, the engine's address."""
    from inferplane.engine.garbage import importing

    began = time.monotonic()
    with importing():
        from inferplane.engine import AsyncLLM
        from inferplane.serving.http.gate import Keys
        from inferplane.serving.lifecycle.run import Life
        from inferplane.serving.lifecycle.start import import_tokenizers, prepared

        import_tokenizers()
    fd, board, slots, slot = map(int, sys.argv[2:6])
    address = sys.argv[6]
    given = json.loads(sys.stdin.buffer.readline())
    values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    settings = ServerSettings(**values)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.set_up(settings.log_format, settings.log_level, worker=slot)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    shared = SharedCounters(slots, NUM_CELLS, board)
    life = Life(
        settings,
        Keys(settings.api_key),
        {"http": sock},
        began,
        lambda: prepared(lambda: AsyncLLM.connect(address)),
        slots=SequenceSlots(settings.max_batch + settings.max_waiting, shared, slot),
        counts=RequestCounters(shared, slot),
        others=True,
    )
    try:
        code = asyncio.run(life.live())
    except Exception as error:
        if not logs.is_json(settings.log_format):
            raise
        logs.log_fatal(error, worker=slot)
        code = 1
    finally:
        logs.finish()
    sys.exit(code)
