"""The life of a process that serves: open its ports, load the model, serve requests, end on a signal.

The first SIGTERM or Ctrl-C drains: new requests are refused, live ones have `drain_s` seconds, then the rest is aborted
with a terminal event. A second signal ends the process at once. If the model cannot be loaded or the engine dies, the
process ends with exit code 1, so that a supervisor can start it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from inferplane.engine.clients.process.memory import freeze_gc
from inferplane.serving import logs, tracing
from inferplane.serving.http.app import add_gate, full_app, health_app, metrics_app
from inferplane.serving.http.gate import Gate
from inferplane.serving.http.protocol import MAX_HEADER_BYTES, ConnectionLimits, connection_class
from inferplane.serving.keys import Keys
from inferplane.serving.lifecycle.prepare import SIGNALS
from inferplane.serving.lifecycle.workers import Workers
from inferplane.serving.service import FLUSH_S, Service
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import REJECTED, RequestCounters
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SequenceSlots

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inferplane.engine import AsyncLLM

KEEP_ALIVE_S = 30
ECHO_S = 0.3
"""A second signal within this time is the same one: launchers signal a child, and then its process group."""
log = logging.getLogger("inferplane.serving")


@dataclass(frozen=True)
class ProcessSetup:
    """What a process that serves is started with.

    Args:
        settings: how to serve.
        keys: which clients may call.
        sockets: listening sockets by name: "http", and if the settings have such ports "health" and "metrics".
        started: when the process was started, on a monotonic clock.
        open_engine: opens the engine; it may block.
        workers: further processes for HTTP, in the first process; None for none.
        shared: the counters of all processes, in a worker; None otherwise.
        number: this process's row in the counters: 0 is the first process, the others are workers.
        early_signals: signals that came before the event loop.
    """

    settings: ServerSettings
    keys: Keys
    sockets: Mapping[str, socket.socket]
    started: float
    open_engine: Callable[[], AsyncLLM]
    workers: Workers | None = None
    shared: SharedCounters | None = None
    number: int = 0
    early_signals: Sequence[int] = ()


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ServerProcess:
    """One process that serves, inside its event loop.

    Args:
        setup: what it is started with.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        self._setup, self._settings = setup, setup.settings
        self._tracer = tracing.start(self._settings)
        shared = setup.workers.shared if setup.workers is not None else setup.shared
        max_sequences = self._settings.max_num_seqs + self._settings.max_waiting
        slots = SequenceSlots(max_sequences, shared, setup.number)
        self._service = Service(self._settings, slots, self._tracer, RequestCounters(shared, setup.number))
        if setup.workers is not None:
            self._service.end_workers = setup.workers.end
        self._is_worker = setup.number > 0
        self._stop = asyncio.Event()
        self._gates: list[Gate] = []
        self._stopped_at = 0.0

    async def run(self) -> int:
        """Serve to the end, and return the exit code."""
        servers, sockets = self._make_servers(), self._setup.sockets
        addresses = {name: _address(s) for name, s in sockets.items()}
        grpc_server = await self._start_grpc(addresses)
        sweeping = [asyncio.create_task(gate.sweep()) for gate in self._gates]
        waiting = [asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._service.failed.wait())]
        serving = [asyncio.create_task(self._listen(server, sockets[name])) for name, server in servers.items()]
        if not self._is_worker:
            log.info("listening", extra={"facts": addresses})
        self._handle_signals()
        loading = asyncio.ensure_future(self._load())
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = self._service.failure
            await self._service.drain(self._settings.drain_s)
        finally:
            for server in servers.values():
                server.should_exit = True
            if grpc_server is not None:
                await grpc_server.stop(FLUSH_S)
            if not self._is_worker or self._service.serving.is_set():
                await asyncio.wait(serving, timeout=FLUSH_S)
            for task in (*serving, *sweeping, *waiting):
                task.cancel()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        if loading.done():
            loading.result()  # raises what the model raised
        log.info("ended", extra={"facts": {"why": "the engine died" if failed else "signal"}})
        return 1 if failed else 0

    async def _listen(self, server: uvicorn.Server, sock: socket.socket) -> None:
        """Answer on a socket; a worker waits until it is ready, because the other processes answer meanwhile."""
        if self._is_worker:
            await self._service.serving.wait()
        await server.serve(sockets=[sock])

    def _handle_signals(self) -> None:
        """Act on signals from now on, and on those that came before the event loop."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for early in self._setup.early_signals:
            self._on_signal(early)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            if time.monotonic() - self._stopped_at < ECHO_S:
                return
            log.warning("ending at once", extra={"facts": {"signal": signal.Signals(number).name}})
            logs.finish()
            os._exit(128 + number)  # the engine's process ends when its connection to this one closes
        log.info("draining", extra={"facts": {"signal": signal.Signals(number).name}})
        self._stopped_at = time.monotonic()
        self._stop.set()

    # -- parts

    async def _load(self) -> None:
        await self._service.load(self._setup.open_engine)
        freeze_gc()  # tokenizer and routes, too
        if self._setup.workers is not None and self._service.engine is not None:
            self._setup.workers.start(self._service.engine.address)
        model = self._service.model
        if model is not None:
            info = model.info
            facts: dict[str, Any] = {"model": model.names[0], "device": info.device, "dtype": info.dtype}
            facts.update(max_model_len=info.max_model_len, kv_blocks=info.kv_blocks, key=bool(self._setup.keys))
            facts["seconds"] = round(time.monotonic() - self._setup.started, 2)
            log.info("ready", extra={"facts": facts})

    async def _start_grpc(self, addresses: dict[str, str]) -> Any:
        """Start the gRPC server and add its address to the others; None if the settings have no port for it."""
        port = self._settings.grpc_port
        if port is None:
            return None
        from inferplane.serving.grpc.server import start_server

        server, bound = await start_server(self._service, self._settings, self._setup.keys, port)
        addresses["grpc"] = f"{self._settings.host}:{bound}"
        return server

    def _make_servers(self) -> dict[str, uvicorn.Server]:
        apps = {"http": full_app, "health": health_app, "metrics": metrics_app}
        return {name: self._make_server(apps[name](self._service)) for name in self._setup.sockets}

    def _make_server(self, routes: FastAPI) -> uvicorn.Server:
        settings = self._settings
        app, gate = add_gate(routes, self._service, self._setup.keys)
        self._gates.append(gate)
        on_refusal = partial(self._service.counters.add, REJECTED)
        config = uvicorn.Config(
            app,
            http=connection_class(ConnectionLimits(settings.header_timeout_s, settings.max_connections, on_refusal)),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(FLUSH_S),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        config.load()
        return _Server(config)


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"
