"""The caller's side of an engine in a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, is_dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from inferplane.engine.clients.client import Health, ModelInfo, Order, Question, RequestId, Sink
from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.messages import FromCaller, FromEngine
from inferplane.engine.request.results import Delta, FinishReason, Timings
from inferplane.engine.request.seeds import as_int64
from inferplane.errors import EngineError, InferplaneError, UsageError, warn

MOST_ADDRESS_BYTES = 103
"""Of a Unix socket: what the strictest of the systems takes, without the zero at the end."""
CLOSE_S = 30.0
"""Seconds beyond draining that the engine's process has for its end; then it is killed."""
_START = """import sys
sys.path[:] = sys.argv[1].split("\\n")
from inferplane.engine.clients.process.memory import importing
with importing():
    from inferplane.engine.clients.process.server import main
main()
"""


class RemoteEngine:
    """An `EngineClient` for an engine in another process. `start` and `connect` make one.

    Two threads serve it: one writes, so that a caller never waits for the other process to read, and one reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._stream = sock.makefile("rb")
        self._numbers = count()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the five below
        self._answers: dict[int, Future[Any]] = {}
        self._streams: dict[RequestId, tuple[Sink, RequestId]] = {}
        self._of: dict[tuple[Sink, RequestId], RequestId] = {}
        self._failure: EngineError | None = None
        self._closing = False
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self.address = ""
        self.close_s = CLOSE_S
        self.info: ModelInfo
        self._writer = threading.Thread(target=self._write, name="inferplane-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="inferplane-reader", daemon=True)

    @classmethod
    def start(cls, model: Any, options: Mapping[str, Any], warned: Callable[[str], None] | None = None) -> RemoteEngine:
        """Start a process and load a model there.

        Args:
            model: as for `LLM`.
            options: its other arguments.
            warned: see `AsyncLLM`.

        Raises:
            As `LLM`. UsageError: an argument cannot travel to another process. EngineError: the process ended.
        """
        progress = options.get("progress")
        if not hasattr(socket, "AF_UNIX"):
            raise UsageError("process=True on this platform.", remedy="leave it out: the engine runs in a thread")
        folder = tempfile.mkdtemp(prefix="inferplane-")  # readable by this user only
        address = os.path.join(folder, "engine")
        if len(os.fsencode(address)) > MOST_ADDRESS_BYTES:
            os.rmdir(folder)
            raise UsageError(
                f"The path of the folder for temporary files is too long for the engine's socket: {folder}.",
                there_is=f"room for {MOST_ADDRESS_BYTES} bytes in a socket's path, here {len(os.fsencode(address))}",
                remedy="set TMPDIR to a shorter path",
            )
        load = messages.Load(*_plain(model, options), address=address)
        ours, theirs = socket.socketpair()
        try:
            first = _framed(load)
            command = [sys.executable, "-c", _START, "\n".join(sys.path), str(theirs.fileno())]
            # Ctrl-C and SIGTERM are for this process; the other one inherits the mask before it can do anything itself.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            ours.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        engine = cls(ours)
        engine._process, engine._folder, engine.address = process, folder, load.address
        try:
            ours.sendall(first)
            engine._await_ready(progress, warned)
        except BaseException:
            process.kill()
            engine._dispose()
            raise
        return engine

    @classmethod
    def connect(cls, address: str) -> RemoteEngine:
        """Use an engine that another process has started.

        Raises:
            EngineError: nothing answers there.
        """
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            raise EngineError(f"No engine at {address!r}: {error}.", remedy="start one first") from error
        engine = cls(sock)
        engine.address = address
        try:
            engine._await_ready()
        except BaseException:
            engine._dispose()
            raise
        return engine

    # -- for callers

    def submit(self, order: Order, sink: Sink) -> Future[None]:
        """See `EngineClient`."""
        answer: Future[None] = Future()
        number = next(self._numbers)
        params = order.params
        if params.seed is not None:  # a message's integers have 64 bits
            params = replace(params, seed=as_int64(params.seed))
        try:
            # Sinks of this process may use equal ids; over there they are one caller.
            data = _framed(messages.Submit(number, replace(order, request_id=number, params=params)))
        except UsageError as error:
            answer.set_exception(error)
            return answer
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._answers[number] = answer
                self._streams[number] = sink, order.request_id
                self._of[sink, order.request_id] = number
                self._outbox.put(data)
        if refusal is not None:
            answer.set_exception(refusal)
        return answer

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """See `EngineClient`."""
        with self._lock:
            number = self._of.get((sink, request_id))
        if number is not None:
            self._outbox.put(messages.frame(messages.Withdraw(number)))

    def ask(self, question: Question) -> Future[dict[str, Any]]:
        """See `EngineClient`."""
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        data = messages.frame(messages.Ask(number, question))
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._answers[number] = answer
                self._outbox.put(data)
        if refusal is None:
            return answer
        if question == "health":
            answer.set_result(asdict(Health(alive=False, failure=refusal.what.rstrip("."))))
        else:
            answer.set_exception(refusal)
        return answer

    def close(self, drain_s: float = 0.0) -> None:
        """See `EngineClient`. An engine that another process has started goes on without this one's requests."""
        with self._lock:
            begun, self._closing = self._closing, True
        if begun:
            self._ended.wait(drain_s + self.close_s)
            return
        limit = time.monotonic() + drain_s
        if self._process is None:
            while self._streams and not self._ended.is_set() and time.monotonic() < limit:
                time.sleep(0.01)
        else:
            self._outbox.put(messages.frame(messages.Close(drain_s)))
            self._ended.wait(drain_s + self.close_s)
        self._dispose()
        self._reader.join()

    def _refusal(self) -> InferplaneError | None:
        """Why nothing can be asked any more; None while it can."""
        if self._closing:
            return UsageError("The model is shut down.", remedy="make a new AsyncLLM")
        return self._failure

    # -- threads

    def _await_ready(
        self, progress: Callable[[int, int], None] | None = None, warned: Callable[[str], None] | None = None
    ) -> None:
        """Follow the loading to its end, then begin to serve."""
        while True:
            message = self._receive()
            if message is None:
                raise EngineError(f"The engine's process ended while it was starting{self._exit()}.")
            if isinstance(message, messages.Failed):
                raise message.fault.error()
            if isinstance(message, messages.Ready):
                break
            if isinstance(message, messages.Progress) and progress is not None:
                progress(message.done, message.total)
            if isinstance(message, messages.Warned) and warned is not None:
                warned(message.text)
            elif isinstance(message, messages.Warned):
                warn(message.text)
        self.info = message.info
        self._reader.start()
        self._writer.start()

    def _receive(self) -> FromEngine | None:
        """The next message; None at the end, which a broken message also is."""
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            header = self._stream.read(messages.HEADER_BYTES)
            if len(header) == messages.HEADER_BYTES:
                return messages.read_engine(self._stream.read(messages.body_bytes(header)))
        return None

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            try:
                self._socket.sendall(data)
            except Exception:  # the reader tells everybody
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return

    def _read(self) -> None:
        closed, why = False, ""
        try:
            while not closed and (message := self._receive()) is not None:
                self._hear(message)
                closed = isinstance(message, messages.Closed)
        except Exception as error:  # what was said is lost, and with it the way to go on
            why = f"the connection to the engine failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._end(closed, why)

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, messages.Pieces):
            self._deliver(message.pieces)
        elif isinstance(message, messages.Accepted):
            self._settle(message.number, None)
        elif isinstance(message, messages.Answer):
            self._settle(message.number, message.value)
        elif isinstance(message, messages.Refused):
            self._forget(message.number)
            self._settle(message.number, message.fault.error())

    def _deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Hand a step's pieces on to those who wait for them."""
        batches: dict[Sink, list[tuple[RequestId, Delta]]] = {}
        ended: dict[Sink, list[RequestId]] = {}
        for number, delta in pieces:
            found = self._streams.get(number)
            if found is None:
                continue
            batches.setdefault(found[0], []).append((found[1], delta))
            if delta.finish_reason is not None:
                ended.setdefault(found[0], []).append(number)
        for sink, batch in batches.items():
            sink.deliver(batch)
            for number in ended.get(sink, ()):  # not before: who was not told of the end has to hear of another
                self._forget(number)

    def _settle(self, number: int, value: Any) -> None:
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(value, BaseException):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    def _forget(self, number: RequestId) -> None:
        with self._lock:
            found = self._streams.pop(number, None)
            if found is not None and self._of.get(found) == number:
                del self._of[found]

    def _end(self, closed: bool, why: str = "") -> None:
        """Tell all who wait that nothing comes any more."""
        ended = closed or self._closing
        said = "the engine was shut down" if ended else why or f"the engine's process ended{self._exit()}"
        failure = EngineError(f"{said[0].upper()}{said[1:]}.", remedy="make a new AsyncLLM")
        with self._lock:
            self._failure = failure
            answers, streams = list(self._answers), list(self._streams)
        for number in answers:
            self._settle(number, failure)
        reason: FinishReason = "abort" if ended else "error"
        end = Delta("", [], reason, Timings(0.0, 0.0, 0.0, 0, 0), said)
        for live in streams:
            with contextlib.suppress(Exception):  # a caller who cannot be told keeps nobody else from being told
                self._deliver([(live, end)])
        self._ended.set()
        self._outbox.put(None)

    def _exit(self) -> str:
        """How the process ended, for a message."""
        if self._process is None:
            return ""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with code {code}"

    def _dispose(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(0.0 if not self._ended.is_set() else CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _plain(model: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model and options as data: names for dtypes, mappings for configs, strings for paths."""
    if isinstance(model, (str, Path)):
        model = str(model)
    else:
        from inferplane.models import as_config

        model = dict(as_config(model))
    torch = sys.modules.get("torch")  # who has one of its dtypes has imported it
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if torch is not None and isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        elif isinstance(value, Path):
            value = str(value)
        elif is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        if name != "progress":
            plain[name] = value
    return model, plain


def _framed(message: FromCaller) -> bytes:
    try:
        return messages.frame(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"The engine's process cannot be told this: {error}.",
            there_is="strings, numbers, lists and mappings of them",
        ) from error
