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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from inferplane.engine.clients.process.child import kill_engines
from inferplane.engine.clients.process.memory import freeze_gc
from inferplane.errors import UsageError
from inferplane.serving import logs, tracing
from inferplane.serving.http.app import add_gate, full_app, health_app, metrics_app
from inferplane.serving.http.gate import Gate
from inferplane.serving.http.protocol import (
    MAX_HEADER_BYTES,
    MAX_REFUSED,
    AddressLimit,
    ConnectionLimits,
    connection_class,
)
from inferplane.serving.keys import Keys, read_keys
from inferplane.serving.lifecycle.descriptors import LoopErrors, limit_connections
from inferplane.serving.lifecycle.notify import READY, notify
from inferplane.serving.lifecycle.prepare import SIGNALS
from inferplane.serving.lifecycle.workers import Workers
from inferplane.serving.service import END_S, Service
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.counters import ACCEPTED, ENDED, REJECTED, RequestCounters
from inferplane.serving.shared_state.key_usage import KeyUsage, Shares
from inferplane.serving.shared_state.shared_counters import SharedCounters
from inferplane.serving.shared_state.slots import SequenceSlots
from inferplane.serving.threads import collect_garbage_often, run_in_daemon_thread

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inferplane.engine import AsyncLLM

KEEP_ALIVE_S = 30
ACCEPTS_PER_PASS, BACKLOG, QUEUED_PER_CONNECTION = 32, 2048, 4
"""Most connections that are accepted in one turn of the event loop, and most that the system queues, in all and for
each that may be open. If there are no descriptors left, asyncio tries each accept of the turn nevertheless, and then
waits for a second: with few descriptors a long queue of clients that have left by then would keep others waiting.
"""
ECHO_S = 0.3
"""A second signal within this time is the same one: launchers signal a child, and then its process group."""
MIN_FLUSH_S = 0.5
"""Seconds that what comes last has in any case: spans, then the log."""
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
    """A uvicorn server that leaves signals to the process.

    Args:
        config: uvicorn's.
        gate: of its application.
        backlog: most connections that the system queues.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, backlog: int) -> None:
        super().__init__(config)
        self._gate, self._backlog = gate, backlog

    async def serve_and_sweep(self, sock: socket.socket) -> None:
        """Answer on a listening socket until `should_exit`, with the gate's sweep in the same event loop."""
        sweeping = asyncio.create_task(self._gate.sweep())
        try:
            await self.serve(sockets=[sock])
        finally:
            sweeping.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(self._backlog)  # uvicorn has one number for this and for the accepts of a turn


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
        shares = Shares(self._settings.max_num_seqs_per_key, self._settings.max_tokens_per_minute_per_key)
        slots = SequenceSlots(max_sequences, shared, setup.number, KeyUsage(setup.keys, shares, shared, setup.number))
        self._service = Service(self._settings, slots, self._tracer, RequestCounters(shared, setup.number))
        if setup.workers is not None:
            self._service.end_workers = setup.workers.end
        self._is_worker = setup.number > 0
        self._stop = asyncio.Event()
        self._stopped_at = 0.0
        self._max_connections = limit_connections(self._settings.max_connections)
        if self._max_connections < self._settings.max_connections:
            facts = {"max_connections": self._max_connections, "requested": self._settings.max_connections}
            log.warning("fewer connections: too few open files allowed", extra={"facts": facts})

    async def run(self) -> int:
        """Serve to the end, and return the exit code."""
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        servers, sockets = self._make_servers(), self._setup.sockets
        addresses = {name: _address(s) for name, s in sockets.items()}
        grpc_server = await self._start_grpc(addresses)
        grpc_health = self._start_grpc_health(addresses)
        measuring = asyncio.create_task(self._service.loop_lag.watch())
        waiting = [asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._service.failed.wait())]
        serving = [asyncio.create_task(self._listen(name, server)) for name, server in servers.items()]
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
                await grpc_server.stop(self._service.left_s)
            if not self._is_worker or self._service.serving.is_set():
                await asyncio.wait(serving, timeout=self._service.left_s)
            if grpc_health is not None:
                grpc_health.stop(0)
            for task in (*serving, measuring, *waiting):
                task.cancel()
            if self._tracer is not None:
                closing = asyncio.wrap_future(run_in_daemon_thread(self._tracer.close, "spans"))
                await asyncio.wait({closing}, timeout=max(self._service.left_s, MIN_FLUSH_S))
        if loading.done():
            loading.result()  # raises what the model raised
        counters = self._service.counters
        counts = {"requests_accepted": counters.total(ACCEPTED), "requests_ended": counters.total(ENDED)}
        log.info("ended", extra={"facts": {"why": "the engine died" if failed else "signal", **counts}})
        code = 1 if failed else 0
        exit_at = self._service.end_at + MIN_FLUSH_S
        threading.Thread(target=_exit_at, args=(exit_at, code), name="inferplane-exit", daemon=True).start()
        return code

    async def _listen(self, name: str, server: _Server) -> None:
        """Answer on a socket; a worker waits until it is ready, because the other processes answer meanwhile.

        The port of health has a thread and an event loop of its own, so that probes are answered whatever holds up
        this one.
        """
        if self._is_worker:
            await self._service.serving.wait()
        serving = server.serve_and_sweep(self._setup.sockets[name])
        if name == "health":
            await asyncio.wrap_future(run_in_daemon_thread(partial(asyncio.run, serving), "health"))
        else:
            await serving

    def _handle_signals(self) -> None:
        """Act on signals from now on, and on those that came before the event loop."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for early in self._setup.early_signals:
            self._on_signal(early)

        if self._settings.api_key_file is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys_again)

    def _read_keys_again(self) -> None:
        """Accept the keys that the key file holds by now; if it cannot be read, those of before."""
        try:
            self._setup.keys.replace(read_keys(self._settings))
        except UsageError as error:
            log.error("the keys stay as they are", extra={"facts": {"why": str(error)}})
            return
        if self._setup.workers is not None:
            self._setup.workers.send_keys()
        log.info("keys read again", extra={"facts": {"keys": len(self._setup.keys.all)}})

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            if time.monotonic() - self._stopped_at < ECHO_S:
                return
            log.warning("ending at once", extra={"facts": {"signal": signal.Signals(number).name}})
            logs.finish()
            kill_engines()
            os._exit(128 + number)
        log.info("draining", extra={"facts": {"signal": signal.Signals(number).name}})
        self._stopped_at = time.monotonic()
        self._stop.set()

    # -- parts

    async def _load(self) -> None:
        await self._service.load(self._setup.open_engine)
        freeze_gc()  # tokenizer and routes, too
        collect_garbage_often()
        if self._setup.workers is not None and self._service.engine is not None:
            self._setup.workers.start(self._service.engine.address)
        model = self._service.model
        if model is not None:
            info = model.info
            facts: dict[str, Any] = {"model": model.names[0], "device": info.device, "dtype": info.dtype}
            facts.update(max_model_len=info.max_model_len, kv_blocks=info.kv_blocks, key=bool(self._setup.keys))
            facts["seconds"] = round(time.monotonic() - self._setup.started, 2)
            log.info("ready", extra={"facts": facts})
            if not self._is_worker:
                notify(READY)

    async def _start_grpc(self, addresses: dict[str, str]) -> Any:
        """Start the gRPC server and add its address to the others; None if the settings have no port for it."""
        port = self._settings.grpc_port
        if port is None:
            return None
        from inferplane.serving.grpc.server import start_server

        server, bound = await start_server(self._service, self._settings, self._setup.keys, port)
        addresses["grpc"] = f"{self._settings.host}:{bound}"
        return server

    def _start_grpc_health(self, addresses: dict[str, str]) -> Any:
        """Start gRPC's health on a port of its own, as `_start_grpc` does the rest."""
        port = self._settings.grpc_health_port
        if port is None:
            return None
        from inferplane.serving.grpc.health import start_health_server

        server, bound = start_health_server(self._service, self._settings, port)
        addresses["grpc_health"] = f"{self._settings.host}:{bound}"
        return server

    def _make_servers(self) -> dict[str, _Server]:
        apps = {"http": full_app, "health": health_app, "metrics": metrics_app}
        return {name: self._make_server(apps[name](self._service)) for name in self._setup.sockets}

    def _make_server(self, routes: FastAPI) -> _Server:
        settings = self._settings
        app, gate = add_gate(routes, self._service, self._setup.keys)
        on_refusal = partial(self._service.counters.add, REJECTED)
        per_address = None
        if settings.max_connections_per_address is not None:
            max_refused = min(MAX_REFUSED, self._max_connections // 8)
            per_address = AddressLimit(settings.max_connections_per_address, max_refused)
        limits = ConnectionLimits(settings.header_timeout_s, self._max_connections, on_refusal, per_address)
        config = uvicorn.Config(
            app,
            http=connection_class(limits),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=ACCEPTS_PER_PASS,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(END_S),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        config.load()
        return _Server(config, gate, min(BACKLOG, QUEUED_PER_CONNECTION * self._max_connections))


def _exit_at(when: float, code: int) -> None:
    """End the process if it has not ended by itself: a thread may still encode a text or wait for a full pipe."""
    time.sleep(max(when - time.monotonic(), MIN_FLUSH_S))
    kill_engines()
    os._exit(code)


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"
