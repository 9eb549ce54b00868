"""The streams of an engine's callers: who gets which piece, and when the engine has let go of a request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from inferplane.engine.clients.client import EngineClient, RequestId, Submission
from inferplane.engine.request.results import Delta, Timings
from inferplane.errors import UsageError

OnPiece = Callable[[Delta], None]


class Mailbox:
    """The streams of one asyncio loop. It receives the pieces of a step together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: dict[RequestId, OpenStream] = {}

    def deliver(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """Pass a step's pieces to the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the pieces are not needed
            self.loop.call_soon_threadsafe(self._put, pieces)

    def _put(self, pieces: list[tuple[RequestId, Delta]]) -> None:
        """In the loop: pass each piece to its stream; pieces of released streams are dropped."""
        for request_id, piece in pieces:
            stream = self.streams.get(request_id)
            if stream is not None:
                stream.receive(piece)


class Streams:
    """The live streams of an engine's callers, by their own ids and by asyncio loop."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._live: dict[RequestId, tuple[RequestId, Mailbox]] = {}  # a caller's id -> the engine's
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}  # of loops with streams that are not released

    @contextlib.contextmanager
    def open(
        self,
        request_id: RequestId | None,
        submission: Submission,
        on_piece: OnPiece,
        on_released: Callable[[], None] = lambda: None,
    ) -> Iterator[OpenStream]:
        """A stream to submit a request with; its pieces go to `on_piece` in the running loop. Leaving the block before
        the last piece aborts the request, also one not queued yet. `on_released` is called in the loop when the block
        has been left and the engine holds nothing of the request. UsageError: a live request has the caller's id.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if request_id in self._live:
                on_released()
                raise UsageError(f"Request {request_id!r} is alive already.", remedy="use another request_id")
            for closed in [other for other in self._mailboxes if other.is_closed()]:
                del self._mailboxes[closed]
            box = self._mailboxes.setdefault(loop, Mailbox(loop))
            if request_id is not None:
                self._live[request_id] = submission.request_id, box

            def release() -> None:
                with self._lock:
                    del box.streams[submission.request_id]
                    if not box.streams:
                        self._mailboxes.pop(loop, None)
                on_released()

            stream = box.streams[submission.request_id] = OpenStream(self._client, submission, box, on_piece, release)
        try:
            yield stream
        finally:
            if request_id is not None:
                with self._lock:
                    del self._live[request_id]
            stream.leave()

    def abort(self, request_id: RequestId) -> None:
        """End a request by its caller's id; an unknown one is ignored."""
        with self._lock:
            found = self._live.get(request_id)
        if found is not None:
            self._client.abort(*found)


class OpenStream:
    """A request and its mailbox. Its methods are called in the mailbox's loop."""

    def __init__(
        self,
        client: EngineClient,
        submission: Submission,
        box: Mailbox,
        on_piece: OnPiece,
        release: Callable[[], None],
    ) -> None:
        self._client, self._submission, self._box = client, submission, box
        self._on_piece, self._release = on_piece, release
        self._answer: asyncio.Future[BaseException | None] = box.loop.create_future()
        self._is_open, self._is_held = True, False

    def receive(self, piece: Delta) -> None:
        """Pass a piece on; after `leave`, only the last one matters: the engine has let go of the request."""
        if piece.finish_reason is not None:
            self._is_held = False
        if self._is_open:
            self._on_piece(piece)
        elif not self._is_held:  # the last piece
            self._release()

    async def submit(self) -> Delta | None:
        """Wait until the request is queued, which takes as long as compiling its constraint; raises the error that
        rejects it. If `timeout_s` ends before, returns the stream's last piece ("timeout"), otherwise None.
        """
        params = self._submission.params
        arrived, limit = time.monotonic(), params.timeout_s if params.needs_grammar else None
        queued = self._client.submit(self._submission, self._box)
        self._is_held = True
        queued.add_done_callback(self._pass_answer)
        if limit is None:
            await self._answer
        else:  # not by `wait_for`, which before Python 3.12 can swallow a cancellation that comes with the answer
            await asyncio.wait({self._answer}, timeout=limit)
        if not self._answer.done():
            waited = time.monotonic() - arrived
            return Delta("", [], "timeout", Timings(waited, waited, waited, len(self._submission.prompt), 0))
        if (error := self._answer.result()) is not None:
            raise error
        return None

    def leave(self) -> None:
        """Pass on no more pieces. Abort the request if it has not ended, and release it when the engine has."""
        self._is_open = False
        if self._is_held:
            self._client.abort(self._submission.request_id, self._box)
        else:
            self._release()

    def _pass_answer(self, queued: Future[None]) -> None:
        """Pass the engine's answer to the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._box.loop.call_soon_threadsafe(self._on_answer, queued.exception())

    def _on_answer(self, error: BaseException | None) -> None:
        """Note whether the request is queued. A rejected one gets no last piece."""
        if not self._answer.done():
            self._answer.set_result(error)
        if error is not None and self._is_held:
            self._is_held = False
            if not self._is_open:
                self._release()
