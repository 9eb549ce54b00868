"""An accepted request while it runs: its sequences, merged into one stream of pieces."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferplane.engine import Delta, SamplingParams
from inferplane.errors import InferplaneError
from inferplane.serving.admission import Ask
from inferplane.serving.errors import ApiError, from_engine, internal

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM

log = logging.getLogger("inferplane.serving")


@dataclass(frozen=True)
class Piece:
    """What one sequence got.

    Args:
        choice: which sequence: prompt * n + its number.
        delta: new text and tokens; the last one's `finish_reason` is "stop" or "length".
    """

    choice: int
    delta: Delta


class Job:
    """An accepted request.

    Args:
        engine: runs it.
        ask: as it was asked.
        prompts: token ids.
        params: how to sample each prompt.
        name: of its sequences inside the engine; unique.
    """

    def __init__(
        self, engine: AsyncLLM, ask: Ask, prompts: Sequence[list[int]], params: Sequence[SamplingParams], name: str
    ) -> None:
        self.ask, self.prompts, self.params, self.name = ask, prompts, params, name
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished: list[str] = []
        self._engine = engine
        self._pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
        self._first = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def choices(self) -> int:
        """How many sequences it has."""
        return len(self.prompts) * self.ask.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all its prompts, each counted once."""
        return sum(map(len, self.prompts))

    def start(self) -> None:
        """Hand its sequences to the engine."""
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in range(self.choices)]

    async def begin(self, patience_s: float) -> None:
        """Wait for the first piece, but not longer than this; ApiError when the engine refuses the request."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._first.wait(), patience_s)
        if not self._pieces.empty():
            first = self._pieces.get_nowait()
            if isinstance(first, ApiError):
                raise first
            self._pieces = _put_back(first, self._pieces)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece of every sequence; ends when all have ended, or with the ApiError of the first that failed."""
        async for several in self.batches():
            for piece in several:
                yield piece

    async def batches(self) -> AsyncIterator[list[Piece]]:
        """As `pieces`, those together that are there: a step's, and more where the reader is slow."""
        left = self.choices
        while left:
            several: list[Piece] = []
            found = await self._pieces.get()
            while isinstance(found, Piece):
                several.append(found)
                left -= found.delta.finish_reason is not None
                if self._pieces.empty():
                    break
                found = self._pieces.get_nowait()
            if several:
                yield several
            if isinstance(found, ApiError):
                raise found

    async def close(self) -> None:
        """End what still runs. The engine frees its blocks within a step."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, choice: int) -> None:
        which, index = divmod(choice, self.ask.n)
        try:
            stream = self._engine.generate(
                self.prompts[which],
                self.params[which],
                f"{self.name}.{choice}",
                index=index,
                tenant=self.ask.tenant,
            )
            async with contextlib.aclosing(stream) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    self._take(choice, delta)
        except InferplaneError as error:
            self._put(from_engine(error, self.ask.words, self.ask.sampling))
        except Exception:
            log.exception("a sequence failed in the server")
            self._put(internal())

    def _take(self, choice: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        if reason is not None:
            self.finished.append(reason)
            if delta.timings is not None:
                self.cached_tokens += delta.timings.cached_tokens
        self._put(Piece(choice, delta) if reason in (None, "stop", "length") else _failure(delta))

    def _put(self, piece: Piece | ApiError) -> None:
        self._pieces.put_nowait(piece)
        self._first.set()


def _put_back(first: Piece, rest: asyncio.Queue[Piece | ApiError]) -> asyncio.Queue[Piece | ApiError]:
    """A queue that begins with a piece that was taken from it. Nothing waits on either."""
    again: asyncio.Queue[Piece | ApiError] = asyncio.Queue()
    again.put_nowait(first)
    while not rest.empty():
        again.put_nowait(rest.get_nowait())
    return again


def _failure(delta: Delta) -> ApiError:
    """A sequence that ended otherwise than by itself."""
    if delta.finish_reason == "timeout":
        return ApiError(504, "The request ran into its time limit.", code="timeout")
    if delta.finish_reason == "abort":
        return ApiError(503, "The request was ended by the server.", code="aborted", retry_after_s=5)
    return ApiError(500, f"The request failed while it ran: {delta.error}.", code="generation_failed")
