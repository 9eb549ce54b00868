"""An accepted request while it runs: its sequences, merged into one stream of pieces."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from inferplane.engine import Delta, SamplingParams
from inferplane.errors import InferplaneError
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError, from_engine, internal

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM

log = logging.getLogger("inferplane.serving")


class Piece(msgspec.Struct, frozen=True):
    """What one sequence got.

    Args:
        choice: which sequence: prompt * n + its number.
        delta: new text and tokens; the last one's `finish_reason` is "stop" or "length".
    """

    choice: int
    delta: Delta


class Generation:
    """An accepted request.

    Args:
        engine: runs it.
        ask: as it was asked.
        prompts: token ids.
        params: how to sample each prompt.
        name: of its sequences inside the engine; unique.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        ask: GenerateCall,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        name: str,
    ) -> None:
        self.ask, self.prompts, self.params, self.name = ask, prompts, params, name
        self.completion_tokens = 0
        self._cached: dict[int, int] = {}  # prompt -> tokens
        self.finished: list[str] = []
        self.refusal: ApiError | None = None
        self.first_token_s: float | None = None
        self._engine = engine
        self._pieces: deque[Piece | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._at_once: Callable[[Piece], bool] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def choices(self) -> int:
        """How many sequences it has."""
        return len(self.prompts) * self.ask.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts, each counted once."""
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompts that were found in the cache, each counted once as in `prompt_tokens`."""
        return sum(self._cached.values())

    def start(self) -> None:
        """Hand its sequences to the engine."""
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in range(self.choices)]

    async def begin(self, patience_s: float) -> None:
        """Wait for the first piece, but not longer than this; ApiError when the engine refuses the request."""
        if not self._pieces:
            impatient = asyncio.get_running_loop().call_later(patience_s, self._wake)
            try:
                await self._news()
            finally:
                impatient.cancel()
        if self._pieces and isinstance(self._pieces[0], ApiError):
            raise self._pieces[0]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece of every sequence; ends when all have ended, or with the ApiError of the first that failed."""
        async for several in self.batches():
            for piece in several:
                yield piece

    async def batches(self, at_once: Callable[[Piece], bool] | None = None) -> AsyncIterator[list[Piece]]:
        """As `pieces`, those together that are there: a step's, and more where the reader is slow.

        Args:
            at_once: is offered a piece in the moment it comes, if none waits before it and it is not a sequence's last.
                It says whether it took it: then it is not yielded, and the reader's task is not woken. When it raises,
                the stream fails.
        """
        left = self.choices
        while left:
            self._at_once = at_once
            try:
                await self._some()
            finally:
                self._at_once = None
            several: list[Piece] = []
            failure: ApiError | None = None
            while self._pieces and failure is None:
                found = self._pieces.popleft()
                if isinstance(found, ApiError):
                    failure = found
                else:
                    several.append(found)
                    left -= found.delta.finish_reason is not None
            if several:
                yield several
            if failure is not None:
                raise failure

    async def _some(self) -> None:
        """Wait until there is a piece. One task at a time reads a job."""
        while not self._pieces:
            await self._news()

    async def _news(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def close(self) -> None:
        """End what still runs. The engine frees its blocks within a step."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, choice: int) -> None:
        which, index = divmod(choice, self.ask.n)
        try:
            await self._engine.feed(
                partial(self._take, choice),
                self.prompts[which],
                self.params[which],
                f"{self.name}.{choice}",
                index=index,
                tenant=self.ask.tenant,
                alone=(self.ask.request_id or "") if choice == 0 else "",
            )
        except InferplaneError as error:
            said = from_engine(error, self.ask.words, self.ask.sampling)
            self.refusal = self.refusal or said
            self._put(said)
        except Exception:
            log.exception("a sequence failed in the server")
            self._put(internal())

    def _take(self, choice: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        if reason is not None:
            self.finished.append(reason)
            if delta.timings is not None:
                which = choice // self.ask.n
                found = delta.timings.cached_tokens
                self._cached[which] = min(found, self._cached.get(which, found))
                if self.first_token_s is None or delta.timings.first_token_s < self.first_token_s:
                    self.first_token_s = delta.timings.first_token_s
        if reason not in (None, "stop", "length"):
            self._put(_failure(delta, self.ask.timeout_s, self.params[0].timeout_s))
            return
        piece = Piece(choice, delta)
        if reason is not None or self._pieces or self._at_once is None or not self._at_once(piece):
            self._put(piece)

    def _put(self, piece: Piece | ApiError) -> None:
        self._pieces.append(piece)
        self._wake()


def _failure(delta: Delta, own_limit_s: float | None, limit_s: float | None) -> ApiError:
    """A sequence that ended otherwise than by itself. Of two time limits its client answers for his own."""
    if delta.finish_reason == "timeout":
        if own_limit_s is not None and own_limit_s == limit_s:
            return ApiError(408, f"The request ran into its own time limit, {own_limit_s:g} s.", code="timeout")
        return ApiError(504, "The request ran into this server's time limit.", code="timeout")
    if delta.finish_reason == "abort":
        return ApiError(503, "The request was ended by the server.", code="aborted", retry_after_s=5)
    return ApiError(500, f"The request failed while it ran: {delta.error}.", code="generation_failed")
