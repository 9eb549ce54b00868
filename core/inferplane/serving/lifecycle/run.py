"""A server's life: ports first, then the model, then requests, then the end that signals ask for.

The first SIGTERM or Ctrl-C drains: new requests are refused, live ones have `drain_s` seconds, what is left is aborted
with a terminal event. A second ends the process at once. A model that cannot be loaded, or an engine that dies, ends
it with exit code 1, for whoever started it to start it again.
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
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from inferplane.engine.garbage import let_be
from inferplane.serving import logs, tracing
from inferplane.serving.counters import REJECTED, RequestCounters
from inferplane.serving.http.app import add_gate, full_app, health_app, metrics_app
from inferplane.serving.http.gate import Gate, Keys
from inferplane.serving.http.protocol import MAX_HEADER_BYTES, connection_class
from inferplane.serving.lifecycle.start import SIGNALS
from inferplane.serving.lifecycle.workers import Workers
from inferplane.serving.service import FLUSH_S, Service
from inferplane.serving.settings import ServerSettings
from inferplane.serving.slots import SequenceSlots

if TYPE_CHECKING:
    from fastapi import FastAPI

    from inferplane.engine import AsyncLLM

KEEP_ALIVE_S = 30
ECHO_S = 0.3
"""A signal so soon after the first is the same one: launchers signal a child, and then its group."""
log = logging.getLogger("inferplane.serving")


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One run of a server, inside its loop.

    Args:
        settings: how to serve.
        keys: who may come in.
        sockets: "http", and where they are asked for "health" and "metrics"; they listen.
        began: when the process was started, on a monotonic clock.
        opener: opens the engine.
        workers: further processes for HTTP; None for none.
        told: signals that came before the loop.
        places: for sequences, when several processes share them.
        counts: of the whole server, likewise.
        others: whether others answer on these sockets while it loads; then it takes connections only once it is ready.
    """

    def __init__(
        self,
        settings: ServerSettings,
        keys: Keys,
        sockets: Mapping[str, socket.socket],
        began: float,
        opener: Callable[[], AsyncLLM],
        workers: Workers | None = None,
        told: Sequence[int] = (),
        slots: SequenceSlots | None = None,
        counts: RequestCounters | None = None,
        others: bool = False,
    ) -> None:
        self._settings, self._keys, self._sockets, self._began = settings, keys, sockets, began
        self._opener, self._workers = opener, workers
        self._tracer = tracing.start(settings)
        self._service = Service(settings, slots, self._tracer, counts)
        if workers is not None:
            self._service.others_end = workers.end
        self._stop = asyncio.Event()
        self._gates: list[Gate] = []
        self._told, self._others = told, others
        self._stopped_at = 0.0

    async def live(self) -> int:
        """Serve to the end; the exit code."""
        servers = self._servers()
        addresses = {name: _address(s) for name, s in self._sockets.items()}
        calls = await self._start_grpc(addresses)
        sweeping = [asyncio.create_task(gate.sweep()) for gate in self._gates]
        waiting = [asyncio.ensure_future(self._stop.wait()), asyncio.ensure_future(self._service.failed.wait())]
        serving = [asyncio.create_task(self._listen(server, self._sockets[name])) for name, server in servers.items()]
        if not self._others:
            log.info("listening", extra={"facts": addresses})
        self._hear()
        loading = asyncio.ensure_future(self._load())
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = self._service.failure
            await self._service.drain(self._settings.drain_s)
        finally:
            for server in servers.values():
                server.should_exit = True
            if calls is not None:
                await calls.stop(FLUSH_S)
            if not self._others or self._service.serving.is_set():
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
        """Answer on a socket; where others do so too, once there is a model, for until then they have one."""
        if self._others:
            await self._service.serving.wait()
        await server.serve(sockets=[sock])

    def _hear(self) -> None:
        """Act on signals, those that came before the loop among them."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        for heard in self._told:
            self._on_signal(heard)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            if time.monotonic() - self._stopped_at < ECHO_S:
                return
            log.warning("ending at once", extra={"facts": {"signal": signal.Signals(number).name}})
            logs.finish()
            os._exit(128 + number)  # the engine's process ends with this one's connection
        log.info("draining", extra={"facts": {"signal": signal.Signals(number).name}})
        self._stopped_at = time.monotonic()
        self._stop.set()

    # -- parts

    async def _load(self) -> None:
        await self._service.load(self._opener)
        let_be()  # tokenizer and routes, too
        if self._workers is not None and self._service.engine is not None:
            self._workers.start(self._settings.http_workers - 1, self._service.engine.address)
        model = self._service.model
        if model is not None:
            info = model.info
            facts: dict[str, Any] = {"model": model.names[0], "device": info.device, "dtype": info.dtype}
            facts.update(max_model_len=info.max_model_len, kv_blocks=info.kv_blocks, key=bool(self._keys))
            facts["seconds"] = round(time.monotonic() - self._began, 2)
            log.info("ready", extra={"facts": facts})

    async def _start_grpc(self, addresses: dict[str, str]) -> Any:
        """The gRPC server, its address added to the others; None when none is asked for."""
        port = self._settings.grpc_port
        if port is None:
            return None
        from inferplane.serving.grpc.server import start

        server, bound = await start(self._service, self._settings, self._keys, port)
        addresses["grpc"] = f"{self._settings.host}:{bound}"
        return server

    def _servers(self) -> dict[str, uvicorn.Server]:
        makers: dict[str, Callable[[Service], FastAPI]] = {
            "http": full_app,
            "health": health_app,
            "metrics": metrics_app,
        }
        return {name: self._server(makers[name](self._service)) for name in self._sockets}

    def _server(self, routes: FastAPI) -> uvicorn.Server:
        s = self._settings
        app, gate = add_gate(routes, self._service, self._keys)
        self._gates.append(gate)
        config = uvicorn.Config(
            app,
            http=connection_class(s.header_timeout_s, s.max_connections, partial(self._service.counts.add, REJECTED)),
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
            ssl_certfile=s.tls_cert,
            ssl_keyfile=s.tls_key,
        )
        config.load()
        return _Server(config)


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{host}:{port}"
