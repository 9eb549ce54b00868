"""The program of a worker process; `workers.py` starts it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from inferplane.serving import logs
from inferplane.serving.keys import Keys
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.key_usage import TOTAL_CELLS
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.threads import switch_threads_often


def main() -> None:
    """Run a worker.

    Standard input: lines of JSON, the settings first, then the keys, and the keys again when they change.
    Arguments: the descriptors of the socket and of the shared counters,
    the number of processes, this process's row in the counters, the engine's address.
    """
    from inferplane.engine.clients.process.memory import gc_paused, share_heap

    started = time.monotonic()
    share_heap()
    switch_threads_often()
    with gc_paused():
        from inferplane.engine import AsyncLLM
        from inferplane.serving.lifecycle.prepare import import_tokenizers, open_engine
        from inferplane.serving.lifecycle.run import ProcessSetup, ServerProcess

        import_tokenizers()
    socket_fd, counters_fd, processes, number = map(int, sys.argv[2:6])
    lines = _read_lines()
    given = json.loads(next(lines))
    values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    settings = ServerSettings(**values)
    keys = Keys()
    keys.set(json.loads(next(lines)))
    threading.Thread(target=_follow_parent, args=(keys, lines), daemon=True).start()
    logs.set_up(settings.log_format, settings.log_level, worker=number)
    sock = socket.socket(fileno=socket_fd)
    sock.setblocking(False)
    shared = SharedCounters(processes, TOTAL_CELLS, counters_fd)
    opener = partial(open_engine, partial(AsyncLLM.connect, sys.argv[6]))
    setup = ProcessSetup(settings, keys, {"http": sock}, started, opener, shared=shared, number=number)
    try:
        code = asyncio.run(ServerProcess(setup).run())
    except Exception as error:
        if not logs.is_json(settings.log_format):
            raise
        logs.log_fatal(error, worker=number)
        code = 1
    finally:
        logs.finish()
    sys.exit(code)


def _read_lines() -> Iterator[bytes]:
    """Yield the lines of standard input, not through sys.stdin: its lock is needed when the interpreter ends."""
    text = b""
    while more := os.read(0, 65536):
        *lines, text = (text + more).split(b"\n")
        yield from lines


def _follow_parent(keys: Keys, lines: Iterator[bytes]) -> None:
    """Accept the keys of each further line, and end the process with the lines: the first process, and the engine with
    it, has ended.
    """
    for line in lines:
        keys.set(json.loads(line))
    logs.finish()
    os._exit(1)
