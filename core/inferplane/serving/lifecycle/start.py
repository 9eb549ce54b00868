"""Starts a server: refuse what can be refused at once, start the engine's process, import the rest meanwhile.

Nothing heavy is imported here. The engine's process takes seconds to import and to load, so it starts first; the web
framework and the tokenizer's library are imported while it does. Only the engine's process imports torch.
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
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inferplane.engine import AsyncLLM
from inferplane.engine.clients.options import OPTIONS, SpeculativeOptions
from inferplane.engine.clients.process.child import kill_engines
from inferplane.engine.clients.process.download_check import check_in_process
from inferplane.engine.clients.process.memory import gc_paused, share_heap
from inferplane.errors import UsageError, install_hint
from inferplane.hub import forbid_downloads, locate, parse_name, report_on_stderr
from inferplane.serving import logs
from inferplane.serving.configure import PLUGIN_GROUP, PREFIX, ResolvedSettings
from inferplane.serving.keys import Keys, read_keys
from inferplane.serving.lifecycle.descriptors import raise_limit
from inferplane.serving.lifecycle.launch import launch_ranks
from inferplane.serving.lifecycle.notify import FOLLOWS, notify
from inferplane.serving.lifecycle.prepare import SIGNALS, import_tokenizers, open_engine
from inferplane.serving.settings import FIELDS, ServerSettings
from inferplane.serving.threads import run_in_daemon_thread, switch_threads_often

Sockets = Mapping[str, socket.socket]
BACKLOG = 2048
ENGINE_OPTIONS = [name for name in FIELDS if name in OPTIONS]
"""The settings that are options of `AsyncLLM`."""
PACKAGES = ("fastapi", "pydantic", "uvicorn", "h11", "prometheus_client")
"""Packages that only the server needs."""
GRPC_PACKAGES = ("grpc", "grpc_health", "grpc_reflection")
log = logging.getLogger("inferplane.serving")


def run(resolved: ResolvedSettings, pins: Mapping[str, str]) -> int:
    """Serve until a signal.

    Args:
        resolved: the settings, and where each came from.
        pins: site or op -> provider.

    Returns:
        The exit code.

    Raises:
        UsageError: a package is missing, a port is taken, a key or certificate file cannot be read, or fewer processes
            share the model than the source system's variables request.
        InferplaneError: the model or the device is not there, or the model cannot be loaded.
    """
    settings = resolved.settings
    check_packages(settings)
    started = time.monotonic()
    share_heap()
    switch_threads_often()
    logs.set_up(settings.log_format, settings.log_level)
    raise_limit()
    launch_ranks(resolved.launch, settings.device, ("inferplane", *sys.argv[1:]))
    settings = locate_models(settings, pins)
    if "WORLD_SIZE" in os.environ:
        from inferplane.engine.runner.ranks import launcher_ranks

        if launcher_ranks()[0]:
            return _run_follower(settings, pins)
    if settings.otlp_endpoint is not None:
        from inferplane.serving.tracing import is_tracing_enabled

        is_tracing_enabled(settings, os.environ)  # raises what is wrong with it, before anything is loaded
    check_model_and_device(settings)
    if settings.chat_template is not None:
        from inferplane.dialogue.template_files import read_template

        read_template(settings.chat_template)
    check_parsers(settings)
    keys = Keys(read_keys(settings))
    os.environ.pop(f"{PREFIX}API_KEY", None)  # what this process starts has no use for it
    check_certificate(settings)
    ports = {"http": settings.port, "health": settings.health_port, "metrics": settings.metrics_port}
    with contextlib.ExitStack() as opened:
        sockets = {}
        for name, port in ports.items():
            if port is not None and port >= 0:
                flag = "--port" if name == "http" else f"--{name}-port"
                sockets[name] = opened.enter_context(contextlib.closing(listen(settings.host, port, flag)))
        for flag, port in (("--grpc-port", settings.grpc_port), ("--grpc-health-port", settings.grpc_health_port)):
            if port:  # only a check: gRPC opens the port itself, later
                listen(settings.host, port, flag).close()
        for note in resolved.notes:
            log.warning(note)
        return _serve(settings, pins, keys, sockets, started)


def _run_follower(settings: ServerSettings, pins: Mapping[str, str]) -> int:
    """Run a rank other than 0. Only rank 0 listens; this rank runs the same steps and ends with rank 0."""
    from inferplane.engine import LLM

    log.info("following")
    notify(FOLLOWS)
    LLM(settings.model, **engine_options(settings, pins))  # ends the process, unless each rank serves by itself
    return 0


def _serve(settings: ServerSettings, pins: Mapping[str, str], keys: Keys, sockets: Sockets, started: float) -> int:
    """Start the engine's process, and meanwhile import what serves.

    No request is answered before weights are being read. By then every fault in model, device or settings has been
    reported, so that a server which cannot start never answers a health check.
    """
    early_signals: list[int] = []
    for number in SIGNALS:  # until the server's event loop handles them
        signal.signal(number, lambda number, frame: early_signals.append(number))
    reading_weights = threading.Event()
    options = {**engine_options(settings, pins), "progress": lambda done, total: reading_weights.set()}
    options["on_warning"] = partial(log.warning, "%s")
    opening = run_in_daemon_thread(lambda: AsyncLLM(settings.model, process=True, **options), "start")
    with gc_paused():
        from inferplane.serving.lifecycle.run import ProcessSetup, ServerProcess
        from inferplane.serving.lifecycle.workers import Workers

        import_tokenizers()
    while not (reading_weights.is_set() or opening.done() or early_signals):
        reading_weights.wait(0.02)
    if opening.done():
        opening.result()  # raises what the model raised
    workers = Workers(settings, keys, sockets["http"]) if settings.http_workers > 1 else None
    opener = partial(open_engine, opening.result)
    setup = ProcessSetup(settings, keys, sockets, started, opener, workers, early_signals=early_signals)
    try:
        return asyncio.run(ServerProcess(setup).run())
    finally:
        kill_engines()  # one that has not been closed: it was still loading
        logs.finish()


def locate_models(settings: ServerSettings, pins: Mapping[str, str]) -> ServerSettings:
    """The settings with folders in place of names on a hub: downloaded if need be, once, before any process starts. The
    model is served under the name that the user gave.

    Raises:
        InferplaneError: there is no such model, it cannot be downloaded, or its weights are too large for the device.
    """
    if settings.offline:
        forbid_downloads(os.environ)
    changes: dict[str, Any] = {}
    for setting in ("model", "speculative_model"):
        model = getattr(settings, setting)
        if model is None or Path(model).expanduser().exists() or (name := parse_name(model)) is None:
            continue
        from inferplane.gguf.opened import find_planned_ranges

        options = engine_options(replace(settings, speculative_method=None), pins)
        check = partial(check_in_process, model=model, options=options) if setting == "model" else None
        with report_on_stderr() as progress:
            shown = replace(progress, say=partial(log.info, "%s"))
            found = locate(name, progress=shown, check=check, find_ranges=find_planned_ranges)
        changes[setting] = str(found.path)
    if "model" in changes and not settings.served_model_name:
        changes["served_model_name"] = (settings.model,)
    return replace(settings, **changes)


def check_packages(settings: ServerSettings) -> None:
    """Raise UsageError if a package that serving needs is missing."""
    has_grpc = settings.grpc_port is not None or settings.grpc_health_port is not None
    needed = (*PACKAGES, *GRPC_PACKAGES) if has_grpc else PACKAGES
    missing = next((name for name in needed if find_spec(name) is None), None)
    if missing is not None:
        raise UsageError(f"Serving needs packages that are not installed ({missing}).", remedy=install_hint("serving"))


def check_model_and_device(settings: ServerSettings) -> None:
    """Refuse a model that is no folder and a device that no plugin names, before anything listens.

    The check is cheap if both look right. Otherwise the code that opens models and devices raises the error, which
    imports torch. The engine's process finds all other faults (`_serve`).

    Raises:
        InferplaneError: the same error that opening the model in this process would raise.
    """
    folder = Path(settings.model).expanduser()
    if settings.model != FIELDS["model"].default and not (folder / "config.json").is_file():
        from inferplane.engine import ModelFiles

        ModelFiles(settings.model)
    known = {point.name.partition(":")[0] for point in metadata.entry_points(group=PLUGIN_GROUP)}
    if settings.device != FIELDS["device"].default and settings.device.partition(":")[0] not in known:
        from inferplane.plugins import host

        host().backend(settings.device, index=settings.index)


def check_parsers(settings: ServerSettings) -> None:
    """Raise UsageError if no form of replies has the name that a setting gives."""
    from inferplane.dialogue.replies.catalog import FORMS, choose_form, find_form

    names = settings.reasoning_parser, settings.tool_call_parser
    try:
        choose_form(find_form(None), *names)
    except UsageError:  # plugins may have more, which costs an import of torch here
        from inferplane.plugins import host

        choose_form(find_form(None), *names, (*host().reply_forms(), *FORMS))


def check_certificate(settings: ServerSettings) -> None:
    """Raise UsageError if the certificate and its key cannot be used."""
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


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return a listening socket; raise UsageError if the port is taken or the address is not this machine's."""
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
    """Return the settings as arguments of `AsyncLLM`.

    `max_waiting` is so large that the engine's queue never refuses: the service does, without asking the engine.
    """
    options = {name: getattr(settings, name) for name in ENGINE_OPTIONS}
    speculation = SpeculativeOptions(*(getattr(settings, f.name) for f in fields(SpeculativeOptions)))
    max_waiting = settings.max_num_seqs + settings.max_waiting
    return {**options, "speculative_config": speculation.config(), "ops": dict(pins), "max_waiting": max_waiting}
