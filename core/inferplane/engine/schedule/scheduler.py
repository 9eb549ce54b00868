"""Who runs in the next step. It deals in integers only: tokens, blocks, sequences.

The rules: sequences that decode come first, so a long prompt never stalls them; prompts share what is left of the
token budget, chunk by chunk; new sequences join while there is room, in order of priority, then of the tenant that runs
least, then of arrival. When blocks run out, the sequence that would be served last gives all of its blocks back and is
computed again later; what it wrote stays in the prefix cache for as long as nobody needs the room. Where every layer
attends to a window, blocks before all windows are given back as a sequence grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferplane.engine.request.state import Request
from inferplane.errors import CapacityError, UsageError
from inferplane.kvcache import BlockAllocator, block_hashes
from inferplane.types import FEW_TOKENS
from inferplane.types.batch import Query


@dataclass(frozen=True)
class Limits:
    """What a step may hold.

    Args:
        max_batch: sequences in a step.
        max_step_tokens: tokens in a step; longer prompts are cut into chunks.
        max_model_len: tokens of a sequence.
        max_new_sequences: sequences that may join in one step.
        max_waiting: requests that may wait; None: any number.
        cut: `max_model_len` is what the cache holds, less than what the model allows.
    """

    max_batch: int
    max_step_tokens: int
    max_model_len: int
    max_new_sequences: int = 64
    max_waiting: int | None = None
    cut: bool = False

    @property
    def longer(self) -> str:
        """What to do for longer sequences."""
        return "raise kv_cache_bytes" if self.cut else "raise max_model_len"


@dataclass(frozen=True)
class Scheduled:
    """One sequence's share of a step: its next `count` known tokens, then `drafts`."""

    request: Request
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def last(self) -> bool:
        """Whether the step's logits decide this sequence's next token."""
        return self.request.computed + self.count == self.request.tokens

    @property
    def rows(self) -> int:
        """Token rows it brings to the step."""
        return self.count + len(self.drafts)


class Scheduler:
    """Continuous batching over one pool of blocks.

    Args:
        allocator: the blocks.
        block_tokens: tokens a block.
        limits: what a step may hold.
        root: `tenant -> bytes`, what the first block's hash builds on; None: prefixes are not reused.
        lookahead: tokens behind a block that its hash covers too: its entries depend on them.
        window: the most last tokens that any layer attends to; None: all.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_tokens: int,
        limits: Limits,
        root: Callable[[str], bytes] | None = None,
        lookahead: int = 0,
        window: int | None = None,
    ) -> None:
        self.allocator, self.block_tokens, self.limits, self.root = allocator, block_tokens, limits, root
        self.lookahead, self.window = lookahead, window
        self.most_at_once = limits.max_step_tokens
        if window is not None and limits.max_model_len > allocator.total * block_tokens:
            # The cache is smaller than a sequence: what fits beside a window and a block that both cut.
            self.most_at_once = max(1, min(self.most_at_once, (allocator.total - 1) * block_tokens - window))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self._arrivals = 0
        self._alive: set[int | str] = set()

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_tokens)

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """The one place where lengths are judged, before a request is queued.

        Raises:
            CapacityError: it could never run: too long for the model or for the whole cache, or the queue is full.
        """
        if prompt_tokens + max_tokens > self.limits.max_model_len:
            raise CapacityError(
                f"A prompt of {prompt_tokens} tokens and max_tokens={max_tokens} exceed the "
                f"{'cache' if self.limits.cut else 'model'}'s {self.limits.max_model_len} tokens.",
                remedy=f"shorten the prompt, lower max_tokens, or {self.limits.longer}",
            )
        need = self.blocks_for(prompt_tokens + max_tokens - 1)
        if self.window is not None:  # as many as it holds at once: a window, a step's tokens, and a block cut by each
            need = min(need, self.blocks_for(self.window + self.most_at_once) + 1)
        if need > self.allocator.total:
            raise CapacityError(
                f"A request of up to {prompt_tokens + max_tokens - 1} tokens needs {need} KV blocks.",
                there_is=f"{self.allocator.total} in all",
                remedy="lower max_tokens, or raise kv_cache_bytes",
            )
        if self.limits.max_waiting is not None and len(self.waiting) >= self.limits.max_waiting:
            raise CapacityError(
                f"{len(self.waiting)} requests are waiting already.", remedy="try again later, or raise max_waiting"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            CapacityError: see `check`.
            UsageError: a live request has the same id.
        """
        if request.request_id in self._alive:
            raise UsageError(f"A request with id {request.request_id!r} is alive.", remedy="choose another id")
        self.check(len(request.prompt), request.params.max_tokens)
        self._arrivals += 1
        request.arrival = self._arrivals
        self._alive.add(request.request_id)
        self.waiting.append(request)

    # -- the next step

    def schedule(self) -> list[Scheduled]:
        """The next step; sequences with few rows stand first. Empty when nothing can run."""
        budget, before = self.limits.max_step_tokens, self.preemptions
        chosen: dict[int, Scheduled] = {}
        order = sorted(self.running, key=lambda r: (r.remaining > 1, r.priority, r.arrival))
        for request in order:
            if not budget or (self.preemptions != before and request not in self.running):
                continue  # it must wait for the next step, or made room for another one
            if request.remaining > 1:
                budget -= self._add_drafts(chosen, budget)  # before prompts, whose chunks take all that is left
            count = min(request.remaining, budget, self.most_at_once)
            if count and self._reserve(request, request.computed + count, chosen):
                chosen[id(request)] = Scheduled(request, count)
                budget -= count
        budget -= self._add_drafts(chosen, budget)
        joined = 0 if self.preemptions == before else self.limits.max_new_sequences  # who made room waits a step
        while budget and joined < self.limits.max_new_sequences and len(self.running) < self.limits.max_batch:
            candidate = self._next_waiting()
            most = min(budget, self.most_at_once)
            if candidate is None or not self._join(candidate, most):
                break
            joined += 1
            count = min(candidate.remaining, most)
            chosen[id(candidate)] = Scheduled(candidate, count)
            budget -= count
        return sorted(chosen.values(), key=lambda s: s.rows > FEW_TOKENS)

    def _add_drafts(self, chosen: dict[int, Scheduled], budget: int) -> int:
        """Give chosen sequences their drafts, as far as tokens and blocks are left; returns the tokens that takes.

        It comes after every decode token has its place: drafts never push anybody out.
        """
        before = budget
        for key, s in chosen.items():
            request = s.request
            if not budget:
                break
            if not request.drafts or s.drafts or not s.last:
                continue
            # Past its end they would be thrown away.
            drafts = request.drafts[: min(budget, max(0, request.most_tokens - request.tokens))]
            while drafts and not self.extend(request, request.tokens + len(drafts)):
                drafts = drafts[:-1]
            chosen[key] = Scheduled(request, s.count, tuple(drafts))
            budget -= len(drafts)
        return before - budget

    def _next_waiting(self) -> Request | None:
        if not self.waiting:
            return None
        runs = Counter(r.tenant for r in self.running)
        return min(self.waiting, key=lambda r: (r.priority, r.preemptions == 0, runs[r.tenant], r.arrival))

    def _join(self, request: Request, most: int) -> bool:
        """Give a waiting sequence its blocks: cached ones for its known prefix, new ones for the rest.

        With a window, new ones for the first step alone: blocks before it come back in time for the next.
        """
        found: list[int] = []
        if self.root is not None and not request.needs_every_row:
            self._hash(request, request.tokens)
            # At least one token must be computed, for its logits.
            usable = request.hashes[: (request.tokens - 1) // self.block_tokens]
            found = self.allocator.acquire_prefix(usable)
        known = len(found) * self.block_tokens
        gone = self._gone(known)  # found, and not needed again: they must not take the room of what is
        self.allocator.release(found[:gone])
        tokens = request.tokens if self.window is None else min(request.tokens, known + most)
        need = self.blocks_for(tokens) - len(found)
        if need > self.allocator.available:
            self.allocator.release(found[gone:])
            return False
        request.blocks = [0] * gone + found[gone:] + self.allocator.allocate(need)
        request.computed, request.gone_blocks = known, gone
        if request.preemptions == 0:
            request.cached_tokens = request.computed
            self.prefix_queries_tokens += request.tokens
            self.prefix_hits_tokens += request.computed
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _hash(self, request: Request, tokens: int) -> None:
        """Hash the full blocks among its first `tokens` tokens that have no hash yet, if what follows them is known."""
        done = len(request.hashes) * self.block_tokens
        if tokens - done >= self.block_tokens:
            assert self.root is not None
            parent = request.hashes[-1] if request.hashes else self.root(request.tenant)
            known = request.slice(done, tokens + self.lookahead)
            request.hashes += block_hashes(parent, known, self.block_tokens, lookahead=self.lookahead)

    def _gone(self, computed: int) -> int:
        """Leading blocks that no layer will look into again, once so many tokens are computed."""
        return 0 if self.window is None else max(0, computed + 1 - self.window) // self.block_tokens

    def _give_back(self, request: Request) -> None:
        """All of its blocks."""
        self.allocator.release(request.blocks[request.gone_blocks :])
        request.blocks, request.gone_blocks = [], 0

    def extend(self, request: Request, tokens: int) -> bool:
        """Give a running sequence blocks for `tokens` tokens, if there are enough; False, and nothing taken, if not."""
        need = self.blocks_for(tokens) - len(request.blocks)
        if need > self.allocator.available:
            return False
        if need > 0:
            request.blocks += self.allocator.allocate(need)
        return True

    def extend_all(self, wanted: Sequence[tuple[Request, int]]) -> bool:
        """As `extend`, for several sequences or for none of them."""
        if sum(max(0, self.blocks_for(tokens) - len(r.blocks)) for r, tokens in wanted) > self.allocator.available:
            return False
        return all(self.extend(r, tokens) for r, tokens in wanted)

    def shorten(self, request: Request, tokens: int) -> int:
        """Take back blocks that lie behind a sequence's first `tokens` tokens; how many they were."""
        surplus = request.blocks[self.blocks_for(tokens) :]
        if surplus:
            del request.blocks[-len(surplus) :]
            self.allocator.release(surplus)
        return len(surplus)

    def _reserve(self, request: Request, tokens: int, chosen: dict[int, Scheduled]) -> bool:
        """Blocks for `tokens` tokens, others making room if they must; False when it has to make room itself."""
        while not self.extend(request, tokens):
            if self._trim(chosen):
                continue
            others = [r for r in self.running if id(r) not in chosen]
            last = max(others, key=lambda r: (r.priority, r.arrival))
            self.preempt(last)
            if last is request:
                return False
        return True

    def _trim(self, chosen: dict[int, Scheduled]) -> int:
        """Take back blocks that only drafts had asked for, of this step's drafts excepted; how many they were."""
        freed = 0
        for r in self.running:
            drafts = len(chosen[id(r)].drafts) if id(r) in chosen else 0
            if surplus := self.shorten(r, r.tokens + drafts):
                freed += surplus
                # Who drafted may have written entries there, and would take them to be in the blocks that come instead.
                del r.drafts[len(r.blocks) * self.block_tokens - r.tokens :]
        return freed

    def preempt(self, request: Request) -> None:
        """Take all blocks from a running sequence; it waits, and is computed again from its tokens."""
        self.running.remove(request)
        self._give_back(request)
        request.computed, request.drafts = 0, []
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.append(request)

    def queries(self, chosen: list[Scheduled]) -> list[Query]:
        """The step as the batch builder wants it; only sequences that reach their end want logits."""
        out = []
        for s in chosen:
            r = s.request
            ids = [*r.slice(r.computed, r.computed + s.count), *s.drafts]
            blocks = r.blocks[: self.blocks_for(r.computed + s.rows)]
            wanted: int | None = 1 + len(s.drafts) if s.last else 0
            if r.params.prompt_logprobs is not None and r.computed < len(r.prompt) and not r.generated:
                wanted = None
            out.append(Query(ids, r.computed, blocks, wanted))
        return out

    # -- after a step

    def commit(self, scheduled: Scheduled, accepted: int = 0) -> None:
        """Account for a step that ran: its known tokens and the `accepted` first drafts are in the cache for good.

        Call it after the sequence's new tokens were appended to `generated`, and before `remove`.
        """
        request = scheduled.request
        request.computed += scheduled.count + accepted
        request.drafts = []  # they continued the tokens before these
        if self.root is not None:
            full = request.computed // self.block_tokens
            self._hash(request, request.computed)
            first = (request.computed - scheduled.count - accepted) // self.block_tokens
            for i in range(first, full):
                self.allocator.publish(request.blocks[i], request.hashes[i])

    def let_go(self, request: Request) -> None:
        """Give back the blocks that no layer will look into again; their places in the table stay.

        Call it when the step is over, and not before: who drafts runs over the rows of a whole chunk, the first of
        which look into blocks that the last no longer need.
        """
        gone = self._gone(request.computed)
        if request in self.running and gone > request.gone_blocks:
            self.allocator.release(request.blocks[request.gone_blocks : gone])
            request.blocks[request.gone_blocks : gone] = [0] * (gone - request.gone_blocks)
            request.gone_blocks = gone

    def remove(self, request: Request) -> None:
        """Forget a request that ended, and take back its blocks."""
        if request in self.running:
            self.running.remove(request)
            self._give_back(request)
            request.drafts = []
        elif request in self.waiting:
            self.waiting.remove(request)
        self._alive.discard(request.request_id)
