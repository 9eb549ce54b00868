"""The process that an engine lives in: loads the model, then serves callers over Unix sockets.

The caller that started it is connected by a socket pair; when that connection ends, so does the process. Others of the
same user connect at a socket in a folder that is theirs alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from inferplane.engine.clients.client import RequestId
from inferplane.engine.clients.llm import LLM
from inferplane.engine.clients.local import LocalEngine
from inferplane.engine.clients.process import messages
from inferplane.engine.clients.process.memory import freeze_gc, gc_paused, memory_trimmer, share_heap
from inferplane.engine.clients.process.messages import Fault, FromCaller, FromEngine
from inferplane.engine.request.results import Delta
from inferplane.errors import InferplaneWarning, UsageError

MAX_UNREAD_BYTES = 64 * 2**20
"""A caller with more unread bytes is disconnected, and its requests end."""


class Connection:
    """One caller. A `Sink`: the engine's thread delivers, the loop's thread writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.loop = asyncio.get_running_loop()

    # -- from any thread

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """See `Sink`: send the pieces of one step to the caller, from any thread."""
        self.post(messages.Pieces(pieces))

    def post(self, message: FromEngine) -> None:
        """Send a message from any thread, in the loop's thread later; nothing happens if the loop has ended."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.send, message)

    # -- in the loop

    def send(self, message: FromEngine) -> None:
        """Write a message, without waiting until it is sent. A caller that has `MAX_UNREAD_BYTES` unread, or whose
        message cannot be encoded, is disconnected.
        """
        if self.writer.is_closing():
            return
        if self.writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.writer.transport.abort()
            return
        try:
            self.writer.write(messages.frame(message))
        except Exception as error:  # otherwise the caller would wait for this message for ever
            print(f"inferplane engine: a caller is disconnected: {error}", file=sys.stderr)
            self.writer.transport.abort()

    async def receive(self) -> FromCaller | None:
        """The next valid message; None when the caller has left or violates the protocol, which is reported on stderr.

        A message that has a number but a value of a wrong type is answered with `Refusal`, and the next one is awaited.
        """
        while True:
            try:
                size = messages.body_bytes(await self.reader.readexactly(messages.HEADER_BYTES))
                body = await self.reader.readexactly(size)
                return messages.read_caller(body)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            except msgspec.ValidationError as error:
                number = messages.number_of(body)
                if number is None:
                    return self._report(error)
                self.send(messages.Refusal(number, Fault.of(UsageError(f"The engine cannot read a request: {error}."))))
            except (ValueError, msgspec.DecodeError) as error:
                return self._report(error)

    @staticmethod
    def _report(error: Exception) -> None:
        """Write to stderr why a caller is disconnected."""
        print(f"inferplane engine: a caller is disconnected: {error}", file=sys.stderr)

    async def serve(
        self, engine: LocalEngine, on_close: Callable[[float], None], first: Awaitable[FromCaller | None] | None = None
    ) -> None:
        """Answer a caller's messages until it leaves; then all its requests are aborted.

        Args:
            engine: runs the requests and answers inspections.
            on_close: called with the seconds for draining at `Close`; further messages are still answered.
            first: the first message, if it is being received already.
        """
        try:
            message = await (first if first is not None else self.receive())
            while message is not None and not isinstance(message, messages.LoadModel):
                if isinstance(message, messages.Submit):
                    self._answer(engine.submit(message.submission, self), message.number)
                elif isinstance(message, messages.Abort):
                    engine.abort(message.request_id, self)
                elif isinstance(message, messages.Inspect):
                    self._answer(engine.inspect(message.question), message.number)
                else:
                    on_close(message.drain_s)
                message = await self.receive()
        finally:
            engine.abort_all(self)

    def _answer(self, answer: Future[Any], number: int) -> None:
        """Send the result of a future under a message's number when it is done: `Reply` or `Refusal`."""

        def done(answer: Future[Any]) -> None:
            error = answer.exception()
            if error is not None:
                self.post(messages.Refusal(number, Fault.of(error)))
            else:
                self.post(messages.Reply(number, answer.result()))

        answer.add_done_callback(done)

    async def leave(self) -> None:
        """Wait up to 5 s until what was written is sent, then close the connection."""
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.drain(), 5.0)
        self.writer.close()


class _Forwarding(logging.Handler):
    """Forwards Inferplane's log messages within its block; this process has no log of its own."""

    def __init__(self, forward: Callable[[messages.Warned], None]) -> None:
        super().__init__()
        self._forward, self._logger = forward, logging.getLogger("inferplane")
        self._level = self._logger.level

    def emit(self, record: logging.LogRecord) -> None:
        self._forward(messages.Warned(record.getMessage(), record.levelno < logging.WARNING))

    def __enter__(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def __exit__(self, *unused: object) -> None:
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self)


def _load(message: messages.LoadModel, owner: Connection) -> LocalEngine:
    """Load the model and start its engine, in a thread; progress, warnings and log messages go to the owner as
    messages. Blocks until the model is loaded; afterwards all objects are excluded from garbage collection.
    """

    def progress(done: int, total: int) -> None:
        owner.post(messages.Progress(done, total))

    sent: set[messages.Warned] = set()

    def send(message: messages.Warned) -> None:
        if message not in sent:  # a draft model may give the same warning
            sent.add(message)
            owner.post(message)

    def showwarning(message: Warning | str, *unused: Any) -> None:
        send(messages.Warned(str(message)))

    with warnings.catch_warnings(), _Forwarding(send):
        warnings.showwarning = showwarning  # type: ignore[assignment]
        warnings.simplefilter("always", InferplaneWarning)  # the owner's process has the filters
        llm = LLM(message.model, progress=progress, **message.options)
        with gc_paused():
            kind = llm.tokenizer.kind if llm.files.has_tokenizer else ""  # now, not at the first request
    freeze_gc()
    engine = LocalEngine(llm, on_idle=memory_trimmer())
    engine.info = replace(engine.info, tokenizer=kind)
    return engine


async def _run(sock: socket.socket) -> None:
    """The life of the process: receive the owner's `LoadModel`, load, serve. If the owner leaves while the model is
    loading, the process exits at once; a failed loading is reported to the owner.
    """
    owner = Connection(*await asyncio.open_unix_connection(sock=sock))
    first = await owner.receive()
    if not isinstance(first, messages.LoadModel):
        return
    loading = asyncio.ensure_future(asyncio.to_thread(_load, first, owner))
    second = asyncio.ensure_future(owner.receive())
    await asyncio.wait({loading, second}, return_when=asyncio.FIRST_COMPLETED)
    if second.done():  # the owner has left before there are other callers; loading cannot be interrupted otherwise
        _remove(first.address)
        os._exit(0)
    try:
        if (error := loading.exception()) is not None:
            owner.send(messages.Failed(Fault.of(error)))
            await owner.leave()
        else:
            await _live(owner, loading.result(), first.address, second)
    finally:
        _remove(first.address)


async def _live(owner: Connection, engine: LocalEngine, address: str, second: Awaitable[FromCaller | None]) -> None:
    """Serve the owner, whose `second` message is being received, and later callers until the owner sends `Close` or
    leaves; then close the engine and all connections.
    """
    others = await _listen(engine, address)
    owner.send(messages.Ready(engine.info))
    closing: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def close(drain_s: float) -> None:
        if not closing.done():
            closing.set_result(drain_s)

    serving = asyncio.ensure_future(owner.serve(engine, close, second))
    serving.add_done_callback(lambda _: close(0.0))
    await asyncio.to_thread(engine.close, await closing)
    for caller in (*others, owner):  # after the messages that the engine's thread has posted
        caller.send(messages.Closed())
    await asyncio.gather(*(caller.leave() for caller in (*others, owner)))


def _remove(address: str) -> None:
    """Remove the socket at `address` and its own folder: the process that made the folder may have ended."""
    with contextlib.suppress(OSError):
        os.unlink(address)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(address))


async def _listen(engine: LocalEngine, address: str) -> set[Connection]:
    """Accept further callers at a Unix socket, from now on and in the background; the returned set always holds those
    that are connected. Their `Close` is ignored.
    """
    callers: set[Connection] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = Connection(reader, writer)
        callers.add(caller)
        try:
            caller.send(messages.Ready(engine.info))
            await caller.serve(engine, lambda _: None)
        finally:
            callers.discard(caller)
            writer.close()

    await asyncio.start_unix_server(serve, address)
    return callers


def main() -> None:
    """Serve on the socket whose descriptor is the last command-line argument, until the engine is closed. Ignores
    SIGINT and SIGTERM.
    """
    # Signals to all processes of a terminal, a service or a launcher are for the process that started this one: it may
    # have requests to finish, and this process ends when it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    share_heap()
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[-1]))))
