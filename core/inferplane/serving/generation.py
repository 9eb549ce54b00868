"""An accepted request while it runs: its sequences, merged into one stream of pieces."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from inferplane.engine import Delta, SamplingParams
from inferplane.engine.request.params import BEYOND_LIMITS
from inferplane.errors import InferplaneError, UsageError, sentence
from inferplane.serving.admission import GRACE_S, Deadline, GenerateCall
from inferplane.serving.errors import TOO_COMPLEX, ApiError, constraint_field, from_engine, internal, invalid

if TYPE_CHECKING:
    from inferplane.engine import AsyncLLM

log = logging.getLogger("inferplane.serving")

_CLASS = re.compile(r"^[A-Z]\w*(?:Error|Exception|Exit|Fault|Interrupt|Iteration): ")
"""The name of an exception's class before its words: for logs, not for clients."""


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
        deadline: ends it, even if the engine is silent.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        call: GenerateCall,
        prompts: list[list[int]],
        params: list[SamplingParams],
        name: str,
        deadline: Deadline,
    ) -> None:
        self.call, self.prompts, self.params = call, prompts, params
        self.completion_tokens = self.reasoning_tokens = 0
        self.finish_reasons: list[str] = []
        self.refusal: ApiError | None = None
        self.failure: ApiError | None = None
        """The first error of a sequence."""
        self.first_token_s: float | None = None
        self._engine, self._name = engine, name
        self._cached_tokens: dict[int, int] = {}  # prompt -> tokens
        self._pieces: deque[Piece | ApiError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._write_now: Callable[[Piece], bool] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._deadline = deadline
        self._watchdog: asyncio.TimerHandle | None = None
        self._num_held = 0  # sequences that the engine may hold
        self._on_released: Callable[[], None] | None = None

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
        """Submit the sequences to the engine, and watch over their time."""
        self._watchdog = asyncio.get_running_loop().call_later(self._deadline.left_s + GRACE_S, self._on_late)
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

    @property
    def outcome(self) -> str:
        """How it ended: a label of `REQUESTS_ENDED`."""
        if self.failure is None:
            return "finished" if len(self.finish_reasons) == self.num_choices else "disconnect"
        if self.failure is self.refusal:
            return "refused"
        return self.failure.code if self.failure.code in ("timeout", "aborted") else "failed"

    def _on_late(self) -> None:
        if len(self.finish_reasons) < self.num_choices and self.failure is None:
            log.warning("the engine did not end a request in time", extra={"facts": {"job": self._name}})
            self._put(self._deadline.error())

    async def close(self, on_released: Callable[[], None]) -> None:
        """Abort the sequences that still run. The engine frees their blocks within a step.

        Args:
            on_released: called when the engine holds none of them any more: at once, or when it has confirmed the end
                of the last one, or has died.
        """
        if self._watchdog is not None:
            self._watchdog.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._on_released = on_released
            self._release_if_done()

    def _release(self) -> None:
        self._num_held -= 1
        self._release_if_done()

    def _release_if_done(self) -> None:
        on_released = self._on_released
        if on_released is not None and not self._num_held:
            self._on_released = None
            on_released()

    async def _run(self, choice: int) -> None:
        params = self.params[choice // self.call.n]
        try:
            try:
                await self._feed(choice, params)
            except UsageError:
                if not (params.structural_tags and self.call.has_optional_tags):
                    raise
                await self._feed(choice, params.without_grammars)
        except InferplaneError as error:
            refusal = from_engine(error, self.call.words, self.call.sampling)
            self.refusal = self.refusal or refusal
            self._put(refusal)
        except Exception:
            log.exception("a sequence failed in the server")
            self._put(internal())

    async def _feed(self, choice: int, params: SamplingParams) -> None:
        prompt, index = divmod(choice, self.call.n)
        self._num_held += 1
        await self._engine.feed(
            partial(self._receive, choice),
            self.prompts[prompt],
            params,
            f"{self._name}.{choice}",
            index=index,
            tenant=self.call.key.tenant if self.call.key is not None else "",
            exclusive_id=(self.call.request_id or "") if choice == 0 else "",
            on_released=self._release,
        )

    def _receive(self, choice: int, delta: Delta) -> None:
        self.completion_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        if reason is not None:
            self.finish_reasons.append(reason)
            if delta.timings is not None:
                self.reasoning_tokens += delta.reasoning_tokens
                prompt = choice // self.call.n
                cached = delta.timings.cached_tokens
                self._cached_tokens[prompt] = min(cached, self._cached_tokens.get(prompt, cached))
                if self.first_token_s is None or delta.timings.first_token_s < self.first_token_s:
                    self.first_token_s = delta.timings.first_token_s
        if reason not in (None, "stop", "length"):
            if reason == "error":
                facts = {"job": self._name, "why": delta.error + delta.error_place}
                log.error("a sequence failed in the engine", extra={"facts": facts})
            self._put(_failure(delta, self._deadline, constraint_field(self.call.words, self.call.sampling)))
            return
        piece = Piece(choice, delta)
        if reason is not None or self._pieces or self._write_now is None or not self._write_now(piece):
            self._put(piece)

    def _put(self, piece: Piece | ApiError) -> None:
        if isinstance(piece, ApiError):
            self.failure = self.failure or piece
        self._pieces.append(piece)
        self._wake()


def _failure(delta: Delta, deadline: Deadline, param: str | None = None) -> ApiError:
    """Return the error for a sequence that did not end by itself. `param` is the field with its constraint, if any."""
    if delta.finish_reason == "timeout":
        return deadline.error()
    if delta.finish_reason == "abort":
        return ApiError(503, "The request was ended by the server.", code="aborted", retry_after_s=5)
    why = _CLASS.sub("", delta.error or "")
    if BEYOND_LIMITS in why:
        why = why.partition(BEYOND_LIMITS)[2].partition(" To do: ")[0].removeprefix(": ").removeprefix("Parser Error: ")
        return invalid(sentence(f"The {param or 'constraint'} is too complex to follow: {why}"), param, TOO_COMPLEX)
    return ApiError(500, sentence(f"The request failed while it ran: {why}"), code="generation_failed")
