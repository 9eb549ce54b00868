"""`RemoteEngine`: the caller's side of an engine in another process."""

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

from inferplane.engine.clients.client import Health, ModelInfo, Question, RequestId, Sink, Submission
from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.messages import FromCaller, FromEngine
from inferplane.engine.request.results import Delta, FinishReason, Timings
from inferplane.engine.request.seeds import as_int64
from inferplane.errors import EngineError, InferplaneError, UsageError, warn

MAX_ADDRESS_BYTES = 103  # of a Unix socket's path on the strictest system, without the zero at the end
CLOSE_S = 30.0  # seconds after draining in which the engine has to close, and then its process to exit
_START = """import sys
sys.path[:] = sys.argv[1].split("\\n")
from inferplane.engine.clients.process.memory import gc_paused
with gc_paused():
    from inferplane.engine.clients.process.server import main
main()
"""


class EngineProcess:
    """A new process for an engine, connected by a socket pair; it waits for `load_model`. `model` and `options` are
    those of `LLM`. Attributes: `address`, path of the socket for other callers, in a folder of its own; `socket`, this
    caller's end of the pair. UsageError: an argument cannot be sent, or the platform has no Unix sockets.
    """

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise UsageError("process=True on this platform.", remedy="leave it out: the engine runs in a thread")
        self._folder = tempfile.mkdtemp(prefix="inferplane-")  # readable by this user only
        self.address = os.path.join(self._folder, "engine")
        if len(os.fsencode(self.address)) > MAX_ADDRESS_BYTES:
            os.rmdir(self._folder)
            raise UsageError(
                f"The path of the folder for temporary files is too long for the engine's socket: {self._folder}.",
                there_is=f"{MAX_ADDRESS_BYTES} bytes for a socket's path, here {len(os.fsencode(self.address))}",
                remedy="set TMPDIR to a shorter path",
            )
        load = messages.LoadModel(*_plain(model, options), address=self.address)
        self.socket, theirs = socket.socketpair()
        try:
            self._first_message = _framed(load)
            command = [sys.executable, "-c", _START, "\n".join(sys.path), str(theirs.fileno())]
            # Ctrl-C and SIGTERM are for this process; the other one inherits the mask before it can do anything itself.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            self.socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            theirs.close()

    def load_model(self) -> None:
        """Send the message that makes the process load the model; does not wait for the model."""
        self.socket.sendall(self._first_message)

    def exit_reason(self) -> str:
        """How the process ended, for a message (" with code 1"); waits up to 5 s, "" if the process still runs."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {signal.Signals(-code).name}" if code < 0 else f" with code {code}"

    def dispose(self, wait_s: float) -> None:
        """Wait for the end of the process, kill it after `wait_s` seconds, and remove its folder."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RemoteEngine:
    """An `EngineClient` for an engine in another process, made by `start` or `connect`. One thread writes, so that a
    caller never waits for the other process to read, and one reads.
    """

    def __init__(self, sock: socket.socket, address: str, process: EngineProcess | None = None) -> None:
        self._socket, self.address, self._process = sock, address, process
        self._stream = sock.makefile("rb")
        self._numbers = count()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the five below
        self._answers: dict[int, Future[Any]] = {}
        self._streams: dict[RequestId, tuple[Sink, RequestId]] = {}
        self._number_of: dict[tuple[Sink, RequestId], RequestId] = {}
        self._failure: EngineError | None = None
        self._closing = False
        self._ended = threading.Event()
        self.close_s = CLOSE_S
        self.info: ModelInfo
        self._writer = threading.Thread(target=self._write, name="inferplane-writer", daemon=True)
        self._reader = threading.Thread(target=self._read, name="inferplane-reader", daemon=True)

    @classmethod
    def start(
        cls, model: Any, options: Mapping[str, Any], on_warning: Callable[[str], None] | None = None
    ) -> RemoteEngine:
        """Start a process, load a model there, and wait until it is loaded. The process ends when its caller ends.

        Args:
            model: as for `LLM`. options: its other arguments; `progress` is called in the caller's process.
            on_warning: see `AsyncLLM`.

        Raises:
            As `LLM`. UsageError: an argument cannot be sent to another process. EngineError: the process ended.
        """
        process = EngineProcess(model, options)
        engine = cls(process.socket, process.address, process)
        engine._await_ready(options.get("progress"), on_warning)
        return engine

    @classmethod
    def connect(cls, address: str) -> RemoteEngine:
        """Use another process's engine by the path of its socket; EngineError if no engine answers there."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(address)
        except OSError as error:
            sock.close()
            raise EngineError(f"No engine at {address!r}: {error}.", remedy="start one first") from error
        engine = cls(sock, address)
        engine._await_ready()
        return engine

    # -- for callers

    def submit(self, submission: Submission, sink: Sink) -> Future[None]:
        """See `EngineClient`. UsageErrors and a lost connection come through the future too, never as an exception."""
        answer: Future[None] = Future()
        number = next(self._numbers)
        params = submission.params
        if params.seed is not None:  # a message's integers have 64 bits
            params = replace(params, seed=as_int64(params.seed))
        try:
            # Sinks of this process may use equal ids; in the other process they are one caller.
            data = _framed(messages.Submit(number, replace(submission, request_id=number, params=params)))
            refusal = self._send(number, answer, data, (sink, submission.request_id))
        except UsageError as error:
            refusal = error
        if refusal is not None:
            answer.set_exception(refusal)
        return answer

    def abort(self, request_id: RequestId, sink: Sink) -> None:
        """See `EngineClient`; queues the message and returns at once."""
        with self._lock:
            number = self._number_of.get((sink, request_id))
        if number is not None:
            self._outbox.put(messages.frame(messages.Abort(number)))

    def inspect(self, question: Question) -> Future[dict[str, Any]]:
        """See `EngineClient`. "health" of an engine that is closed or lost is an answer (not alive), not an error."""
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        refusal = self._send(number, answer, messages.frame(messages.Inspect(number, question)))
        if refusal is not None and question == "health":
            answer.set_result(asdict(Health(alive=False, failure=refusal.what.rstrip("."))))
        elif refusal is not None:
            answer.set_exception(refusal)
        return answer

    def close(self, drain_s: float = 0.0) -> None:
        """Reject new requests, let live ones run for up to `drain_s` seconds, abort the rest, disconnect.

        It waits until that is done. An engine made by `start` ends for all its callers, with its process: beyond
        `drain_s` it has `CLOSE_S` seconds to close and as many to exit, then the process is killed. After `connect`,
        only this client's requests end. A second call waits for the first, at most `drain_s + CLOSE_S` seconds.
        """
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

    def _send(
        self, number: int, answer: Future[Any], data: bytes, stream: tuple[Sink, RequestId] | None = None
    ) -> InferplaneError | None:
        """Queue `data`, and register `answer` and `stream` under `number`; returns why this is rejected, else None."""
        with self._lock:
            if self._closing:
                return UsageError("The model is shut down.", remedy="make a new AsyncLLM")
            if self._failure is None:
                self._answers[number] = answer
                if stream is not None:
                    self._streams[number] = stream
                    self._number_of[stream] = number
                self._outbox.put(data)
            return self._failure

    # -- threads

    def _await_ready(
        self, progress: Callable[[int, int], None] | None = None, on_warning: Callable[[str], None] | None = None
    ) -> None:
        """Read messages until the model is loaded, passing on progress and warnings, then start the threads. After a
        failure nothing remains open.
        """
        try:
            if self._process is not None:
                self._process.load_model()
            while not isinstance(message := self._receive(), messages.Ready):
                if message is None:
                    raise EngineError(f"The engine's process ended while it was starting{self._exit_reason()}.")
                if isinstance(message, messages.Failed):
                    raise message.fault.error()
                if isinstance(message, messages.Progress) and progress is not None:
                    progress(message.done, message.total)
                if isinstance(message, messages.Warned):
                    (on_warning or warn)(message.text)
        except BaseException:
            self._dispose()
            raise
        self.info = message.info
        self._reader.start()
        self._writer.start()

    def _receive(self) -> FromEngine | None:
        """The next message; None at the end, or after a broken message."""
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            header = self._stream.read(messages.HEADER_BYTES)
            if len(header) == messages.HEADER_BYTES:
                return messages.read_engine(self._stream.read(messages.body_bytes(header)))
        return None

    def _write(self) -> None:
        """The writer thread: send queued messages until None. A failure closes the connection, and so ends `_read`."""
        while (data := self._outbox.get()) is not None:
            try:
                self._socket.sendall(data)
            except Exception:  # the reader then ends all requests
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return

    def _read(self) -> None:
        """The reader thread: handle messages until the connection ends, then end all requests and calls."""
        closed, why = False, ""
        try:
            while not closed and (message := self._receive()) is not None:
                self._handle(message)
                closed = isinstance(message, messages.Closed)
        except Exception as error:  # a message is lost, so nothing can go on
            why = f"the connection to the engine failed: {type(error).__name__}: {error}"
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._end(closed, why)

    def _handle(self, message: FromEngine) -> None:
        """Pass one message of the engine to the sinks or to the future that it answers."""
        if isinstance(message, messages.Pieces):
            self._deliver(message.pieces)
        elif isinstance(message, messages.Reply):
            self._settle(message.number, message.value)
        elif isinstance(message, messages.Refused):
            self._forget(message.number)
            self._settle(message.number, message.fault.error())

    def _deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Deliver one step's pieces to their sinks, one call per sink, and drop the streams that end."""
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
            for number in ended.get(sink, ()):  # not before: if the delivery fails, the sink must get another end
                self._forget(number)

    def _settle(self, number: int, value: Any) -> None:
        """Set the result (or the exception) of the future that waits under `number`; nothing if there is none."""
        with self._lock:
            answer = self._answers.pop(number, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if isinstance(value, BaseException):
            answer.set_exception(value)
        else:
            answer.set_result(value)

    def _forget(self, number: RequestId) -> None:
        """Drop the stream of a request; its later pieces are ignored."""
        with self._lock:
            found = self._streams.pop(number, None)
            if found is not None and self._number_of.get(found) == number:
                del self._number_of[found]

    def _end(self, closed: bool, why: str = "") -> None:
        """End every future with an error and every stream with "abort" (after closing) or "error"; wake `close`."""
        ended = closed or self._closing
        message = "the engine was shut down" if ended else why or f"the engine's process ended{self._exit_reason()}"
        failure = EngineError(f"{message[0].upper()}{message[1:]}.", remedy="make a new AsyncLLM")
        with self._lock:
            self._failure = failure
            answers, streams = list(self._answers), list(self._streams)
        for number in answers:
            self._settle(number, failure)
        reason: FinishReason = "abort" if ended else "error"
        end = Delta("", [], reason, Timings(0.0, 0.0, 0.0, 0, 0), message)
        for live in streams:
            with contextlib.suppress(Exception):  # a failing sink must not keep the others from their last piece
                self._deliver([(live, end)])
        self._ended.set()
        self._outbox.put(None)

    def _exit_reason(self) -> str:
        return "" if self._process is None else self._process.exit_reason()

    def _dispose(self) -> None:
        """Close the socket; wait for the process if its engine has closed, else kill it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            self._process.dispose(CLOSE_S if self._ended.is_set() else 0.0)


def _plain(model: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Model and options as plain data: names for dtypes, mappings for configs, strings for paths; no `progress`."""
    if isinstance(model, (str, Path)):
        model = str(model)
    else:
        from inferplane.models import as_config

        model = dict(as_config(model))
    torch = sys.modules.get("torch")  # a caller with one of its dtypes has imported it
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
    """A message as bytes; UsageError if it holds a value that cannot be sent."""
    try:
        return messages.frame(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"An argument cannot be sent to the engine's process: {error}.",
            there_is="strings, numbers, lists and mappings of them",
        ) from error
