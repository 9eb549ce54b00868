"""The loop: schedule, run, sample, commit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from inferplane.engine.params import SamplingParams
from inferplane.engine.request import Request
from inferplane.engine.runner import Runner
from inferplane.engine.scheduler import Limits, Scheduled, Scheduler
from inferplane.engine.text import Detokenizer
from inferplane.errors import CapacityError, UsageError
from inferplane.kvcache import BlockAllocator
from inferplane.types import HOST, KVCache
from inferplane.types.batch import Query, make_batch

DEFAULT_STEP_TOKENS = 2048
COLDEST = 1e-5
"""Temperatures below this take the likeliest token: dividing by them would overflow float32."""


class Engine:
    """Runs requests to their end, step by step, in the caller's thread.

    Args:
        runner: the bound model and its cache.
        max_batch: sequences in a step.
        max_step_tokens: tokens in a step; longer prompts are cut into chunks.
    """

    def __init__(self, runner: Runner, *, max_batch: int, max_step_tokens: int = DEFAULT_STEP_TOKENS) -> None:
        assert runner.cache is not None, "the runner was not opened"
        self.runner, self.cache = runner, runner.cache
        self.device = runner.backend.torch_device_indexed
        self.vocab = runner.model.embed.weight.shape[0]
        self.allocator = BlockAllocator(self.cache.blocks)
        limits = Limits(max_batch, max_step_tokens, runner.max_model_len)
        self.scheduler = Scheduler(self.allocator, self.cache.block_tokens, limits)
        self.closed = False
        self._ids = count()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        end_ids: frozenset[int],
        text: Detokenizer | None = None,
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: token ids.
            params: how to sample, and when to stop.
            end_ids: tokens that end the text.
            text: told every generated token that is part of the text; it knows the stop strings.

        Raises:
            UsageError: it is empty, or a token id lies outside the vocabulary; the engine is closed.
            CapacityError: it could never run.
        """
        self.check(prompt)
        own: Any = params.stop_token_ids  # a tuple, whatever was passed
        ends = (frozenset() if params.ignore_eos else end_ids) | frozenset(own)
        request = Request(next(self._ids), list(prompt), params, ends, text)
        self.scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int]) -> None:
        """Raise UsageError for an empty prompt or token ids outside the vocabulary, or when the engine is closed."""
        if self.closed:
            raise UsageError("The model is closed: its weights and its cache are freed.", remedy="make a new LLM")
        if not prompt:
            raise UsageError("The prompt is empty.", remedy="pass at least one token")
        bad: list[Any] = [t for t in prompt if type(t) is not int or not 0 <= t < self.vocab]
        if bad:
            raise UsageError(f"Token id {bad[0]!r} is not in the vocabulary.", there_is=f"ids 0 to {self.vocab - 1}")

    def step(self) -> list[tuple[Request, int]]:
        """One step; returns the sequences that got a token, with it. Ended ones have a `finish_reason`.

        What an exception or an interrupt leaves half done is done again by the next step: until its token is accepted
        a sequence stands where it stood, and writing the same cache entries twice changes nothing.
        """
        chosen = self.scheduler.schedule()
        if not chosen:
            assert not self.busy, "nothing runs, and what waits does not fit: blocks were lost"
            return []
        now = time.monotonic()
        for s in chosen:
            s.request.started = s.request.started or now
        batch = make_batch(self.scheduler.queries(chosen), block_tokens=self.cache.block_tokens, device=self.device)
        logits, _ = self.runner.run(batch)
        deciding = [s for s in chosen if s.last]
        decided = [(s.request, token) for s, token in zip(deciding, self._sample(deciding, logits))]
        for request, token in decided:
            self._accept(request, token)
        self.scheduler.commit(chosen)
        return decided

    def _sample(self, deciding: list[Scheduled], logits: torch.Tensor) -> list[int]:
        if not deciding:
            return []
        params = [s.request.params for s in deciding]
        heat = [p.temperature if p.temperature >= COLDEST else 0.0 for p in params]
        banned = [
            (row, [i for i in s.request.end_ids if 0 <= i < self.vocab])
            for row, s in enumerate(deciding)
            if len(s.request.generated) < s.request.params.min_tokens
        ]
        column = lambda values, dtype: torch.tensor(values, dtype=dtype).to(self.device)  # noqa: E731
        with torch.inference_mode():
            for row, ids in banned:
                logits[row, ids] = -torch.inf
            tokens = self.runner.sample(
                logits,
                column(heat, torch.float32),
                column([p.top_k for p in params], torch.int64),
                column([p.top_p for p in params], torch.float32),
                column([p.min_p for p in params], torch.float32),
                column([s.request.uniform() if h else 0.0 for s, h in zip(deciding, heat)], torch.float32),
            )
        return [int(i) for i in tokens.to(HOST).tolist()]

    def _accept(self, request: Request, token: int) -> None:
        request.generated.append(token)
        request.first_token = request.first_token or time.monotonic()
        if token in request.end_ids or (request.text is not None and request.text.push([token])):
            self.end(request, "stop")
        elif len(request.generated) >= request.params.max_tokens:
            self.end(request, "length")

    def end(self, request: Request, reason: str) -> None:
        """End a request and take back its blocks; a request that has ended stays as it is."""
        if request.finish_reason is None:
            request.finish_reason = reason  # type: ignore[assignment]
            request.ended = time.monotonic()
            self.scheduler.remove(request)

    def close(self) -> None:
        """End all requests and let go of the cache; nothing can be added any more."""
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.end(request, "abort")
        self.closed = True
        self.cache = KVCache((), self.cache.blocks, self.cache.block_tokens)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    # -- without sampling

    @contextmanager
    def _blocks(self, tokens: int) -> Iterator[list[int]]:
        blocks = self.allocator.take(self.scheduler.blocks_for(tokens))
        try:
            yield blocks
        finally:
            self.allocator.give_back(blocks)

    def logits(self, prompt: Sequence[int], chunk_tokens: int | None = None) -> torch.Tensor:
        """Logits after every token of a prompt: float32 `[tokens, vocab]` on the host.

        Args:
            prompt: token ids.
            chunk_tokens: tokens a step; None takes the engine's.

        Raises:
            UsageError, CapacityError: as for `add`.
        """
        self.check(prompt)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise UsageError(f"chunk_tokens = {chunk_tokens}.", there_is="values of 1 and more")
        if len(prompt) > self.scheduler.limits.max_model_len:
            raise CapacityError(
                f"A prompt of {len(prompt)} tokens exceeds the model's {self.scheduler.limits.max_model_len}.",
                remedy="shorten it, or raise max_model_len",
            )
        step = chunk_tokens or self.scheduler.limits.max_step_tokens
        out = []
        with self._blocks(len(prompt)) as blocks:
            for start in range(0, len(prompt), step):
                ids = list(prompt[start : start + step])
                have = blocks[: self.scheduler.blocks_for(start + len(ids))]
                batch = make_batch([Query(ids, start, have)], block_tokens=self.cache.block_tokens, device=self.device)
                out.append(self.runner.run(batch)[0].to(HOST))
        return torch.cat(out)
