"""Who runs in the next step. It deals in integers only: tokens, blocks, sequences."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from inferplane.engine.request import Request
from inferplane.errors import CapacityError
from inferplane.kvcache import BlockAllocator
from inferplane.types import FEW_TOKENS
from inferplane.types.batch import Query


@dataclass(frozen=True)
class Limits:
    """What a step may hold.

    Args:
        max_batch: sequences in a step.
        max_step_tokens: tokens in a step; longer prompts are cut into chunks.
        max_model_len: tokens of a sequence.
    """

    max_batch: int
    max_step_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class Scheduled:
    """One sequence's share of a step: its next `count` tokens. `last` when they reach the end of what is known."""

    request: Request
    count: int

    @property
    def last(self) -> bool:
        """Whether the step's logits decide this sequence's next token."""
        return self.request.computed + self.count == self.request.tokens


class Scheduler:
    """Continuous batching, first come first served: new sequences join whenever there is room for their whole life.

    A sequence gets all blocks it can ever need when it starts, so that nothing has to be taken back later.

    Args:
        allocator: the blocks.
        block_tokens: tokens a block.
        limits: what a step may hold.
    """

    def __init__(self, allocator: BlockAllocator, block_tokens: int, limits: Limits) -> None:
        self.allocator, self.block_tokens, self.limits = allocator, block_tokens, limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return math.ceil(tokens / self.block_tokens)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CapacityError: it could never run: too long for the model or for the whole cache.
        """
        if len(request.prompt) + request.params.max_tokens > self.limits.max_model_len:
            raise CapacityError(
                f"A prompt of {len(request.prompt)} tokens and max_tokens={request.params.max_tokens} exceed the "
                f"model's {self.limits.max_model_len} tokens.",
                remedy="shorten the prompt, lower max_tokens, or raise max_model_len",
            )
        need = self.blocks_for(request.most_tokens)
        if need > self.allocator.total:
            raise CapacityError(
                f"A request of up to {request.most_tokens} tokens needs {need} KV blocks.",
                there_is=f"{self.allocator.total} in all",
                remedy="lower max_tokens, or raise kv_cache_bytes",
            )
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        """The next step: running sequences first, then prompts, new sequences while there is room.

        Sequences with few tokens stand first.
        """
        budget = self.limits.max_step_tokens
        chosen: list[Scheduled] = []
        for request in self.running:
            count = min(request.tokens - request.computed, budget)
            if count:
                chosen.append(Scheduled(request, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.limits.max_batch:
            need = self.blocks_for(self.waiting[0].most_tokens)
            if need > self.allocator.free:
                break
            request = self.waiting[0]
            request.blocks = self.allocator.take(need)
            self.running.append(request)  # first in, then out: an interrupt between must not lose it
            self.waiting.popleft()
            count = min(request.tokens, budget)
            chosen.append(Scheduled(request, count))
            budget -= count
        chosen.sort(key=lambda s: s.count > FEW_TOKENS)
        return chosen

    def queries(self, chosen: list[Scheduled]) -> list[Query]:
        """The step as the batch builder wants it; only sequences that reach their end want logits."""
        return [
            Query(
                s.request.slice(s.request.computed, s.request.computed + s.count),
                s.request.computed,
                s.request.blocks[: self.blocks_for(s.request.computed + s.count)],
                1 if s.last else 0,
            )
            for s in chosen
        ]

    def commit(self, chosen: list[Scheduled]) -> None:
        """Account for a step that ran: its tokens are in the cache."""
        for s in chosen:
            s.request.computed += s.count

    def remove(self, request: Request) -> None:
        """Forget a request that ended, and take back its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.allocator.give_back(request.blocks)
            request.blocks = []
        if request in self.waiting:
            self.waiting.remove(request)
