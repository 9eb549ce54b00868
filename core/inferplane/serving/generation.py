"""An accepted request while it runs: its sequences, merged into one stream of pieces."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
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
    """New output of one sequence.

    Args:
        choice: which sequence: prompt * n + its number among the prompt's n.
        delta: new text and tokens; the last one's `finish_reason` is "stop" or "length".
    """

    choice: int
    delta: Delta


class Generation:
    """An accepted request.

    Args:
        engine: runs it.
        call: the request.
        prompts: token ids.
        params: how to sample each prompt.
        name: begins the ids of its sequences inside the engine; unique.
    """

    def __init__(
        self, engine: AsyncLLM, call: GenerateCall, prompts: list[list[int]], params: list[SamplingParams], name: str
    ) -> None:
        self.call, self.prompts, self.params = call, prompts, params
        self.completion_tokens = 0
        self.finish_reasons: list[str] = []
        self.refusal: ApiError | None = None
        self.first_token_s: float | None = None
        self._engine, self._name = engine, name
        self._cached_tokens: dict[int, int] = {}  # prompt -> tokens
        self._pieces: deque[Piece | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._write_now: Callable[[Piece], bool] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_choices(self) -> int:
        """Number of sequences."""
        return len(self.prompts) * self.call.n

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once."""
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, each prompt counted once as in `prompt_tokens`."""
        return sum(self._cached_tokens.values())

    def start(self) -> None:
        """Submit the sequences to the engine."""
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in range(self.num_choices)]

    async def wait_for_first_piece(self, timeout_s: float) -> None:
        """Wait for the first piece, at most `timeout_s` seconds.

        Raises:
            ApiError: the engine refused the request.
        """
        if not self._pieces:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._wake)
            try:
                await self._wait()
            finally:
                timer.cancel()
        if self._pieces and isinstance(self._pieces[0], ApiError):
            raise self._pieces[0]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield every piece of every sequence until all have ended.

        Raises:
            ApiError: of the first sequence that failed.
        """
        async for several in self.batches():
            for piece in several:
                yield piece

    async def batches(self, write_now: Callable[[Piece], bool] | None = None) -> AsyncIterator[list[Piece]]:
        """As `pieces`, but yield all pieces that are there together: those of a step, and more if the reader is slow.

        Args:
            write_now: called with a piece as soon as it arrives, unless older pieces wait or it is its sequence's last.
                If it returns True, it has consumed the piece: the piece is not yielded, and the reader's task is not
                woken. If it raises, the stream fails.
        """
        unfinished = self.num_choices
        while unfinished:
            self._write_now = write_now
            try:
                while not self._pieces:  # one task at a time reads a generation
                    await self._wait()
            finally:
                self._write_now = None
            several: list[Piece] = []
            failure: ApiError | None = None
            while self._pieces and failure is None:
                found = self._pieces.popleft()
                if isinstance(found, ApiError):
                    failure = found
                else:
                    several.append(found)
                    unfinished -= found.delta.finish_reason is not None
            if several:
                yield several
            if failure is not None:
                raise failure

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def close(self) -> None:
        """Abort the sequences that still run. The engine frees their blocks within a step."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, choice: int) -> None:
        prompt, index = divmod(choice, self.call.n)
        try:
            await self._engine.feed(
                partial(self._receive, choice),
                self.prompts[prompt],
                self.params[prompt],
                f"{self._name}.{choice}",
                index=index,
                tenant=self.call.tenant,
                exclusive_id=(self.call.request_id or "") if choice == 0 else "",
            )
        except InferplaneError as error:
            refusal = from_engine(error, self.call.words, self.call.sampling)
            self.refusal = self.refusal or refusal
            self._put(refusal)
        except Exception:
            log.exception("a sequence failed in the server")
            self._put(internal())

    def _receive(self, choice: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            if delta.timings is not None:
                prompt = choice // self.call.n
                cached = delta.timings.cached_tokens
                self._cached_tokens[prompt] = min(cached, self._cached_tokens.get(prompt, cached))
                if self.first_token_s is None or delta.timings.first_token_s < self.first_token_s:
                    self.first_token_s = delta.timings.first_token_s
        if reason not in (None, "stop", "length"):
            self._put(_failure(delta, self.call.timeout_s, self.params[0].timeout_s))
            return
        piece = Piece(choice, delta)
        if reason is not None or self._pieces or self._write_now is None or not self._write_now(piece):
            self._put(piece)

    def _put(self, piece: Piece | ApiError) -> None:
        self._pieces.append(piece)
        self._wake()


def _failure(delta: Delta, own_limit_s: float | None, limit_s: float | None) -> ApiError:
    """Return the error for a sequence that did not end by itself.

    A timeout is the client's (408) if its own limit was the shorter one, else the server's (504).
    """
    if delta.finish_reason == "timeout":
        if own_limit_s is not None and own_limit_s == limit_s:
            return ApiError(408, f"The request ran into its own time limit, {own_limit_s:g} s.", code="timeout")
        return ApiError(504, "The request ran into this server's time limit.", code="timeout")
    if delta.finish_reason == "abort":
        return ApiError(503, "The request was ended by the server.", code="aborted", retry_after_s=5)
    return ApiError(500, f"The request failed while it ran: {delta.error}.", code="generation_failed")
