"""How a server starts: what can be refused at once, then the engine's process, and what serves while that one loads.

Nothing heavy is imported here. The engine's process takes seconds to import and to load, so it is started first; the
web framework and the tokenizer's library are imported beside it. Torch is imported there alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from inferplane.engine import AsyncLLM
from inferplane.engine.garbage import importing, let_be
from inferplane.errors import UsageError
from inferplane.serving import logs
from inferplane.serving.configure import PLUGIN_GROUP, ResolvedSettings
from inferplane.serving.settings import FIELDS, ServerSettings

T = TypeVar("T")
BACKLOG = 2048
ENGINE_OPTIONS = (
    *("device", "index", "dtype", "kv_dtype", "quantization", "load_format", "lock", "strict", "deterministic"),
    *("max_model_len", "max_batch", "max_step_tokens", "kv_cache_bytes", "prefix_cache"),
)
"""Settings that are arguments of `AsyncLLM`, under the same names."""
PACKAGES = ("fastapi", "pydantic", "uvicorn", "h11", "prometheus_client")
"""What serving needs beyond what everything needs."""
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
log = logging.getLogger("inferplane.serving")


def run(resolved: ResolvedSettings, pins: Mapping[str, str]) -> int:
    """Serve until a signal; the exit code.

    Args:
        resolved: how, and where each setting came from.
        pins: site or op -> provider.

    Raises:
        UsageError: a package is missing, a port is taken, a key or certificate file cannot be read.
        InferplaneError: the model or the device is not there, or the model cannot be loaded.
    """
    settings = resolved.settings
    check_packages(settings)
    began = time.monotonic()
    logs.set_up(settings.log_format, settings.log_level)
    if "WORLD_SIZE" in os.environ:
        from inferplane.engine.ranks import launched

        if launched()[0]:
            return _follow(settings, pins)
    if settings.otlp_endpoint is not None:
        from inferplane.serving.tracing import wanted

        wanted(settings, os.environ)  # before anything is loaded
    find(settings)
    keys = read_keys(settings)
    check_certificate(settings)
    ports = {"http": settings.port, "health": settings.health_port, "metrics": settings.metrics_port}
    with contextlib.ExitStack() as opened:
        sockets = {}
        for name, port in ports.items():
            if port is not None:
                flag = "--port" if name == "http" else f"--{name}-port"
                sockets[name] = opened.enter_context(contextlib.closing(listen(settings.host, port, flag)))
        if settings.grpc_port:  # gRPC opens it by itself, later
            listen(settings.host, settings.grpc_port, "--grpc-port").close()
        for note in resolved.notes:
            log.warning(note)
        return _serve(settings, pins, keys, sockets, began)


def _follow(settings: ServerSettings, pins: Mapping[str, str]) -> int:
    """A rank beside rank 0, which alone listens: it runs that one's steps, and ends with it."""
    from inferplane.engine import LLM

    log.info("following")
    LLM(settings.model, **engine_options(settings, pins))  # ends the process, unless each rank serves by itself
    return 0


def _serve(
    settings: ServerSettings,
    pins: Mapping[str, str],
    keys: list[str],
    sockets: Mapping[str, socket.socket],
    began: float,
) -> int:
    """Start the engine's process, and meanwhile import what serves.

    Nobody is answered before weights are being read: whatever is wrong with model, device or settings has been told by
    then, and a server that cannot be is not seen to live.
    """
    told: list[int] = []
    for number in SIGNALS:  # until the server's loop is there to hear them
        signal.signal(number, lambda number, frame: told.append(number))
    reading = threading.Event()
    options = {**engine_options(settings, pins), "progress": lambda done, total: reading.set()}
    warned = lambda words: log.warning("%s", words)  # noqa: E731
    opening = _beside(lambda: AsyncLLM(settings.model, process=True, warned=warned, **options), "load")
    with importing():
        from inferplane.serving.counters import NUM_CELLS, RequestCounters
        from inferplane.serving.http.gate import Keys
        from inferplane.serving.lifecycle.run import Life
        from inferplane.serving.lifecycle.workers import Workers
        from inferplane.serving.slots import SequenceSlots, SharedCounters

        import_tokenizers()
    while not (reading.is_set() or opening.done() or told):
        reading.wait(0.02)
    if opening.done():
        opening.result()  # raises what the model raised
    workers, slots, counts = None, None, None
    if settings.http_workers > 1:
        board = SharedCounters(settings.http_workers, NUM_CELLS)
        workers = Workers(settings, keys, sockets["http"], board)
        slots, counts = SequenceSlots(settings.max_batch + settings.max_waiting, board), RequestCounters(board)
    try:
        engine = lambda: prepared(opening.result)  # noqa: E731
        return asyncio.run(Life(settings, Keys(keys), sockets, began, engine, workers, told, slots, counts).live())
    finally:
        logs.finish()


def _beside(work: Callable[[], T], name: str) -> Future[T]:
    """Run in a thread that does not keep the process from ending."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=f"inferplane-{name}", daemon=True).start()
    return answer


def import_tokenizers() -> None:
    """Import what all kinds of tokenizers need; that takes as long as all else together.

    It is for a process whose own imports are done: threads that import the same packages at the same time can block
    each other.
    """
    with contextlib.suppress(ImportError):  # said when it is used
        from transformers import PreTrainedTokenizerFast as PreTrainedTokenizerFast


def prepared(engine: Callable[[], AsyncLLM]) -> AsyncLLM:
    """An engine, waited for; what is there then stays."""
    found = engine()
    let_be()
    return found


def check_packages(settings: ServerSettings) -> None:
    """UsageError when a package is missing that serving needs."""
    needed = PACKAGES if settings.grpc_port is None else (*PACKAGES, *GRPC_PACKAGES)
    missing = next((name for name in needed if find_spec(name) is None), None)
    if missing is not None:
        raise UsageError(
            f"Serving needs packages that are not installed ({missing}).", remedy="pip install 'inferplane[serving]'"
        )


def find(settings: ServerSettings) -> None:
    """Refuse a model that is no folder and a device that no plugin names, before anything listens.

    What looks right costs nothing here. What does not is asked of those who know, and torch is imported for it; the
    rest is found by the engine's process (`_serve`).

    Raises:
        InferplaneError: as a model that is opened in this process.
    """
    folder = Path(settings.model).expanduser()
    if settings.model != FIELDS["model"].default and not (folder / "config.json").is_file():
        from inferplane.engine import ModelFiles

        ModelFiles(settings.model)
    known = {point.name.partition(":")[0] for point in metadata.entry_points(group=PLUGIN_GROUP)}
    if settings.device != FIELDS["device"].default and settings.device.partition(":")[0] not in known:
        from inferplane.plugins import host

        host().backend(settings.device, index=settings.index)


def check_certificate(settings: ServerSettings) -> None:
    """UsageError when the certificate and its key cannot be served with."""
    if settings.tls_cert is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The certificate {settings.tls_cert} or its key {settings.tls_key} cannot be used: {error}.",
            there_is="PEM files; the key is the certificate's own, without a password",
            remedy="see --tls-cert and --tls-key",
        ) from error


def read_keys(settings: ServerSettings) -> list[str]:
    """The keys of the settings and of their file.

    Raises:
        UsageError: the file cannot be read or holds no key: a server that was to be closed must not stand open.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        try:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"api_key_file {settings.api_key_file} cannot be read: {error}.",
                remedy="name a text file with one key a line",
            ) from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"api_key_file {settings.api_key_file} holds no key.", remedy="write one a line")
        keys += found
    return keys


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A socket that listens; UsageError when the port is taken or the address is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{host!r} is no address to listen on: {error}.", remedy="choose another --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(
                f"{host} is no address of this machine: {error.strerror}.",
                remedy="choose another --host; 0.0.0.0 listens on all that it has",
            ) from error
        raise UsageError(
            f"Port {port} of {host} cannot be had: {error.strerror or error}.",
            remedy=f"choose another {flag}, or end what has it",
        ) from error
    sock.setblocking(False)
    return sock


def engine_options(settings: ServerSettings, pins: Mapping[str, str]) -> dict[str, Any]:
    """The settings as arguments of `AsyncLLM`. The queue's bound is the service's: it answers at once."""
    options = {name: getattr(settings, name) for name in ENGINE_OPTIONS}
    if settings.speculate_method is not None:
        names = ("speculate_method", "speculate_max_draft_token_num", "draft_model_name_or_path")
        options["speculative"] = {name: value for name in names if (value := getattr(settings, name)) is not None}
    return {**options, "ops": dict(pins), "max_waiting": settings.max_batch + settings.max_waiting}
