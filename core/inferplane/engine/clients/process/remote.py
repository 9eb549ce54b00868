"""`RemoteEngine`: the caller's side of an engine in another process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import msgspec

from inferplane.engine.clients.client import Health, ModelInfo, Question, RequestId, Sink, Submission
from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.child import EngineProcess, frame
from inferplane.engine.clients.process.messages import FromEngine
from inferplane.engine.request.results import Delta, FinishReason, Timings
from inferplane.engine.request.seeds import as_int64
from inferplane.errors import EngineError, InferplaneError, UsageError, log_choice, warn

CLOSE_S = 30.0  # seconds after draining in which the engine has to close, and then its process to exit


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
            data = frame(messages.Submit(number, replace(submission, request_id=number, params=params)))
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

    def close(self, drain_s: float = 0.0, kill_s: float | None = None) -> None:
        """Reject new requests, let live ones run for up to `drain_s` seconds, abort the rest, disconnect.

        It waits until that is done. An engine made by `start` ends for all its callers, with its process: beyond
        `drain_s` it has `kill_s` seconds to close and to exit (None: `CLOSE_S` for each), then the process is killed.
        After `connect`, only this client's requests end. A second call waits for the first, at most
        `drain_s + CLOSE_S` seconds.
        """
        close_s = CLOSE_S if kill_s is None else kill_s
        with self._lock:
            begun, self._closing = self._closing, True
        if begun:
            self._ended.wait(drain_s + close_s)
            return
        limit = time.monotonic() + drain_s
        if self._process is None:
            while self._streams and not self._ended.is_set() and time.monotonic() < limit:
                time.sleep(0.01)
        else:
            self._outbox.put(messages.frame(messages.Close(drain_s)))
            self._ended.wait(drain_s + close_s)
        self._dispose(CLOSE_S if kill_s is None else limit + kill_s - time.monotonic())
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
                    (log_choice if message.is_choice else on_warning or warn)(message.text)
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
        elif isinstance(message, messages.Refusal):
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

    def _dispose(self, exit_s: float = CLOSE_S) -> None:
        """Close the socket; wait `exit_s` seconds for the process if its engine has closed, else kill it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._process is not None:
            self._process.dispose(exit_s if self._ended.is_set() else 0.0)
