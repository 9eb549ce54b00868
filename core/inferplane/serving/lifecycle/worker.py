"""The program of a worker process; `workers.py` starts it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from functools import partial
from typing import Any

from inferplane.serving import logs
from inferplane.serving.keys import Keys
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import NUM_CELLS
from inferplane.serving.shared_state.shared_counters import SharedCounters


def main() -> None:
    """Run a worker.

    Standard input: the settings as a line of JSON. Arguments: the descriptors of the socket and of the shared counters,
    the number of processes, this process's row in the counters, the engine's address.
    """
    from inferplane.engine.clients.process.memory import gc_paused

    started = time.monotonic()
    with gc_paused():
        from inferplane.engine import AsyncLLM
        from inferplane.serving.lifecycle.prepare import import_tokenizers, open_engine
        from inferplane.serving.lifecycle.run import ProcessSetup, ServerProcess

        import_tokenizers()
    socket_fd, counters_fd, processes, number = map(int, sys.argv[2:6])
    given = json.loads(sys.stdin.buffer.readline())
    values: Any = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    settings = ServerSettings(**values)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.set_up(settings.log_format, settings.log_level, worker=number)
    sock = socket.socket(fileno=socket_fd)
    sock.setblocking(False)
    shared = SharedCounters(processes, NUM_CELLS, counters_fd)
    opener = partial(open_engine, partial(AsyncLLM.connect, sys.argv[6]))
    keys, sockets = Keys(settings.api_key), {"http": sock}
    setup = ProcessSetup(settings, keys, sockets, started, opener, shared=shared, number=number)
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


def _end_with_parent() -> None:
    """End the process when standard input ends: the first process, and the engine with it, has ended."""
    while os.read(0, 4096):  # not through sys.stdin: its lock, held here, is needed when the interpreter ends
        pass
    logs.finish()
    os._exit(1)
