"""Which sequences run in the next step. It deals in integers only: tokens, blocks, sequences.

The rules: sequences that decode come first, so that a long prompt never stalls them; prompts share the rest of the
token budget, chunk by chunk, as far as `Insertion` lets them; new sequences join while the limits and the free blocks
allow, in order of priority, then of the tenant that runs least, then of arrival. When blocks run out, the sequence that
is last in this order releases all its blocks and is computed again later; its entries stay in the prefix cache until
their blocks are needed. Blocks that the windows of all their layers have passed are released as a sequence grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferplane.engine.request.state import Request
from inferplane.engine.schedule.in_flight import StepsInFlight
from inferplane.engine.schedule.insertion import Insertion, PromptAllowance, StepTimes, StepWork, count_pairs
from inferplane.engine.schedule.states import find_states, limit_chunk
from inferplane.engine.schedule.tables import SequenceTables, hash_blocks
from inferplane.errors import CapacityError, UsageError
from inferplane.kvcache import BlockPools, StatePool
from inferplane.kvcache.tables import Windows
from inferplane.types import FEW_TOKENS
from inferplane.types.batch import Query


@dataclass(frozen=True)
class Limits:
    """Limits of a step and of the queue.

    Args:
        max_num_seqs: maximum number of sequences in a step.
        max_num_batched_tokens: maximum number of tokens in a step; longer prompts are split into chunks.
        max_model_len: maximum number of tokens of a sequence.
        max_waiting: maximum number of waiting requests; None: unlimited.
        limited_by_cache: True if the KV cache, not the model, caps the sequence length.
        insertion: what may join in a step.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting: int | None = None
    limited_by_cache: bool = False
    insertion: Insertion = Insertion()

    @property
    def length_remedy(self) -> str:
        """What a user may do about sequences that are too long, as words for an error."""
        return "raise kv_cache_bytes" if self.limited_by_cache else "raise max_model_len where the model allows it"


@dataclass(frozen=True)
class ScheduledChunk:
    """The tokens of one sequence in a step: its next `count` known tokens, then `drafts`."""

    request: Request
    count: int
    drafts: tuple[int, ...] = ()

    @property
    def samples_next(self) -> bool:
        """Whether the step's logits give this sequence's next token: the chunk ends with its last known token."""
        return self.request.computed + self.count == self.request.tokens

    @property
    def rows(self) -> int:
        """Number of its token rows in the step: known tokens and drafts."""
        return self.count + len(self.drafts)


def count_work(chunks: Sequence[ScheduledChunk]) -> StepWork:
    """What a step of these chunks computes, before it runs."""
    decode_rows = sum(c.rows for c in chunks if c.request.is_decoding)
    pairs = sum(count_pairs((c.rows, c.request.computed)) for c in chunks)
    return StepWork(decode_rows, sum(c.rows for c in chunks) - decode_rows, pairs)


class Scheduler:
    """Continuous batching over pools of blocks: the queue, the running requests, and the blocks that they hold.

    Args:
        pools: the blocks.
        block_tokens: tokens per block.
        limits: of a step and of the queue.
        root: `tenant -> bytes`, the parent of the first block's hash; None: prefixes are not reused.
        lookahead: tokens after a block that its hash covers too, because its entries depend on them.
        windows: the widest attention window of the layers of each block table, in tokens; None: a layer attends to all
            tokens.
        states: the slots of recurrent layers' states; None: no layer keeps any. With them prefixes are reused at whose
            end a step ended, and after a step that refuses drafts the next one begins where that step did.

    Attributes: `tables`, the sequences' blocks; its `extend`, `extend_all` and `release_beyond` are here too;
    `in_flight`, what sequences gave back while steps are not over; `too_few_blocks`: see `schedule`.
    """

    def __init__(
        self,
        pools: BlockPools,
        block_tokens: int,
        limits: Limits,
        root: Callable[[str], bytes] | None = None,
        lookahead: int = 0,
        windows: Windows = (None,),
        states: StatePool | None = None,
    ) -> None:
        self.pools, self.block_tokens, self.limits, self.states = pools, block_tokens, limits, states
        self.root, self.lookahead, self.tables = root, lookahead, SequenceTables(pools, block_tokens, windows)
        self.extend, self.extend_all = self.tables.extend, self.tables.extend_all
        self.release_beyond, self.blocks_for = self.tables.release_beyond, self.tables.blocks_for
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight = StepsInFlight(self.tables, states)
        self.too_few_blocks = False
        self.preemptions = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0
        self.times = StepTimes()
        self._arrivals = 0
        self._alive: set[int | str] = set()

    def check(self, prompt_tokens: int, max_tokens: int) -> None:
        """Check the lengths of a request before it is queued (prompt, and most generated tokens); nothing changes.

        Raises:
            CapacityError: it could never run, being too long for the model or the cache; or the queue is full.
        """
        if prompt_tokens + max_tokens > self.limits.max_model_len:
            raise CapacityError(
                f"A prompt of {prompt_tokens} tokens and max_tokens={max_tokens} exceed the "
                f"{'cache' if self.limits.limited_by_cache else 'model'}'s {self.limits.max_model_len} tokens.",
                remedy=f"shorten the prompt, lower max_tokens, or {self.limits.length_remedy}",
            )
        if shortage := self.tables.find_shortage(prompt_tokens + max_tokens - 1, 1):
            raise CapacityError(
                f"A request of up to {prompt_tokens + max_tokens - 1} tokens needs {shortage[0]} KV blocks.",
                there_is=f"{shortage[1]} in all",
                remedy="lower max_tokens, or raise kv_cache_bytes",
            )
        if self.limits.max_waiting is not None and len(self.waiting) >= self.limits.max_waiting:
            raise CapacityError(
                f"{len(self.waiting)} requests are waiting already.", remedy="try again later, or raise max_waiting"
            )

    def max_chunk_tokens(self, tokens: int) -> int:
        """The largest number of tokens that a step computes of a sequence of `tokens` tokens. Where the cache holds the
        sequence only because windows pass, its chunks have to fit beside the windows.
        """
        return self.tables.max_step_tokens(tokens, self.limits.max_num_batched_tokens)

    def add(self, request: Request) -> None:
        """Queue a request behind those that wait; it gets blocks when a step takes it up.

        Raises:
            CapacityError: see `check`.
            UsageError: a live request has the same id.
        """
        if request.request_id in self._alive:
            raise UsageError(f"A request with id {request.request_id!r} is alive.", remedy="choose another id")
        self.check(len(request.prompt), request.params.max_tokens)
        self._arrivals += 1
        request.arrival = self._arrivals
        request.max_chunk_tokens = self.max_chunk_tokens(request.max_cached_tokens)
        self._alive.add(request.request_id)
        self.waiting.append(request)

    # -- the next step

    def schedule(self) -> list[ScheduledChunk]:
        """Choose the next step: its chunks, those with few rows first, each with blocks; empty when nothing can run.
        Waiting requests may join, running ones be preempted (see the module for the rules).
        While a step is in flight nothing is preempted: `too_few_blocks` is set, and the sequence is left out.
        """
        self.too_few_blocks = False
        budget, before = self.limits.max_num_batched_tokens, self.preemptions
        chosen: dict[int, ScheduledChunk] = {}
        allowed: PromptAllowance | None = None
        order = sorted(self.running, key=lambda r: (not r.is_decoding, r.priority, r.arrival))
        for request in order:
            if not budget or request.is_complete or (self.preemptions != before and request not in self.running):
                continue  # it waits for the next step, needs none, or was preempted for another sequence
            is_prompt = not request.is_decoding
            if is_prompt:
                budget -= self._add_drafts(chosen, budget)  # before prompts, whose chunks use up the budget
            count = min(request.remaining, budget, request.max_chunk_tokens)
            if is_prompt:
                allowed = allowed or self._allow_prompts(chosen)
                count = allowed.take(request.computed, count)
            if request.stops:
                count = limit_chunk(request, count, self.block_tokens)
            if count and self._reserve(request, request.computed + count, chosen):
                chosen[id(request)] = ScheduledChunk(request, count)
                budget -= count
        budget -= self._add_drafts(chosen, budget)
        if not self.waiting:
            return sorted(chosen.values(), key=lambda s: s.rows > FEW_TOKENS)
        allowed = allowed or self._allow_prompts(chosen)
        joins = self.limits.insertion.max_new_requests_per_step or self.limits.max_num_seqs
        joins *= self.preemptions == before and not self.too_few_blocks  # a preempted sequence waits a step
        while budget and joins > 0 and len(self.running) < self.limits.max_num_seqs and not allowed.is_used_up:
            candidate = _next_waiting(self.waiting, self.running)
            if candidate is None:
                break
            max_tokens = min(budget, candidate.max_chunk_tokens)
            if not self._join(candidate, max_tokens):
                break
            joins -= 1
            count = max(1, allowed.take(candidate.computed, min(candidate.remaining, max_tokens)))
            if candidate.stops:
                count = limit_chunk(candidate, count, self.block_tokens)
            chosen[id(candidate)] = ScheduledChunk(candidate, count)
            budget -= count
        return sorted(chosen.values(), key=lambda s: s.rows > FEW_TOKENS)

    def _allow_prompts(self, chosen: dict[int, ScheduledChunk]) -> PromptAllowance:
        """What prompts may have beside the sequences that decode, which are chosen already."""
        decoding = [(s.rows, s.request.computed) for s in chosen.values()]
        return PromptAllowance(self.limits.insertion, self.times, decoding)

    def _add_drafts(self, chosen: dict[int, ScheduledChunk], budget: int) -> int:
        """Add drafts to chosen chunks while the budget and the free blocks last; returns the number of tokens used.

        Called after every decode token has its blocks: drafts never preempt a sequence.
        """
        before = budget
        for key, s in chosen.items():
            request = s.request
            if not budget:
                break
            if not request.drafts or s.drafts or not s.samples_next:
                continue
            drafts = request.drafts[: min(budget, self.max_drafts(request))]
            while drafts and not self.extend(request, request.tokens + len(drafts)):
                drafts = drafts[:-1]
            chosen[key] = ScheduledChunk(request, s.count, tuple(drafts))
            budget -= len(drafts)
        return before - budget

    def max_drafts(self, request: Request) -> int:
        """The largest number of drafts that the next step may verify after a sequence's known tokens."""
        if request.recomputed:
            return 0  # so that its states get ahead, whatever is refused
        most = request.max_cached_tokens - request.tokens  # drafts past its end would be discarded
        if self.states is not None and self.root is not None:
            most = min(most, -request.tokens % self.block_tokens)  # a step ends where a block does, to be found there
        return max(0, most)

    def _join(self, request: Request, max_tokens: int) -> bool:
        """Run a waiting sequence with a first chunk of up to `max_tokens` tokens, and give it blocks: cached ones for
        its known prefix, new ones for the rest. False, and nothing changes, if too few are free.
        """
        usable: list[bytes] = []
        if self.root is not None and not request.needs_every_row:
            hash_blocks(request, request.tokens, self.root, self.block_tokens, self.lookahead)
            # At least one token must be computed, for its logits.
            usable = request.hashes[: (request.tokens - 1) // self.block_tokens]
        if self.states is not None:
            if not self.states.available:
                return False
            request.stops, usable = find_states(usable, self.tables, self.states)
        if not self.tables.admit(request, usable, max_tokens):
            return False
        if self.states is not None:
            request.state = self.states.allocate(usable[-1] if usable else None)
        if request.preemptions == 0:
            request.cached_tokens = request.computed
            self.prefix_queries_tokens += request.tokens
            self.prefix_hits_tokens += request.computed
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _reserve(self, request: Request, tokens: int, chosen: dict[int, ScheduledChunk]) -> bool:
        """Give a sequence blocks for `tokens` tokens. If too few are free, take back blocks of drafts, then preempt
        sequences that are not in `chosen`, the last in order first; False if it was preempted itself.
        """
        while not self.extend(request, tokens):
            if self.in_flight.steps:
                self.too_few_blocks = True
                return False
            if self.tables.trim(self.running, {key: len(chunk.drafts) for key, chunk in chosen.items()}):
                continue
            others = [r for r in self.running if id(r) not in chosen]
            last = max(others, key=lambda r: (r.priority, r.arrival))
            self.preempt(last)
            if last is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Release all blocks and drafts of a running sequence; it waits, and is computed again from its tokens."""
        self.running.remove(request)
        self.release(request)
        request.computed, request.recomputed, request.pending, request.drafts = 0, 0, 0, []
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.append(request)

    def release(self, request: Request) -> None:
        """Give back all blocks and the state slots of a sequence."""
        self.tables.release_all(request)
        if self.states is not None and request.state is not None:
            self.in_flight.release_states(request.state)
            request.state = None

    def queries(self, chosen: list[ScheduledChunk]) -> list[Query]:
        """The step as queries for `make_batch`. Logits are requested for the last known token and the drafts of
        sequences that reach them, and for all rows of prompts with `prompt_logprobs`.
        """
        out = []
        for s in chosen:
            r = s.request
            ids = [*r.slice(r.computed, r.computed + s.count), *s.drafts]
            if r.pending and s.samples_next:
                ids.append(0)  # stands for the token that the step in flight chooses
            stop = self.tables.blocks_for(r.computed + s.rows)
            more_blocks = [t.blocks[:stop] for t in r.tables[1:]] if len(r.tables) > 1 else ()
            num_logits: int | None = 1 + len(s.drafts) if s.samples_next else 0
            if r.params.prompt_logprobs is not None and r.computed < len(r.prompt) and not r.generated:
                num_logits = None
            out.append(Query(ids, r.computed, r.tables[0].blocks[:stop], num_logits, more_blocks, r.state))
        return out

    # -- after a step

    def commit(self, chunk: ScheduledChunk, accepted: int = 0) -> None:
        """Record a step that ran: the chunk's known tokens and its first `accepted` drafts are in the cache now; full
        blocks can be found by their content from now on.

        Where a sequence has states and a draft was refused, none of that holds: the states went past the draft, so the
        next step reads those before this step, and computes its known and accepted tokens once more.

        Call it when the sequence's new tokens are in `generated`, before `remove`.
        """
        request = chunk.request
        request.drafts = []  # they were guesses for positions that are decided now
        if self.states is not None and accepted < len(chunk.drafts):
            request.recomputed = chunk.count + accepted
            return
        request.recomputed = max(0, request.recomputed - chunk.count)
        request.computed += chunk.count + accepted
        self.publish(request, request.computed - chunk.count - accepted, request.computed)
        if self.states is not None and request.state is not None:
            full, rest = divmod(request.computed, self.block_tokens)
            found = request.hashes[full - 1] if self.root is not None and not rest else None
            request.state = self.states.advance(request.state, found)

    def publish(self, request: Request, first: int, stop: int) -> None:
        """Full blocks of a sequence's tokens `first` to `stop` (without) can be found by their content from now on."""
        if self.root is not None:
            hash_blocks(request, stop, self.root, self.block_tokens, self.lookahead)
            if stop // self.block_tokens > first // self.block_tokens:
                self.tables.publish(request, first // self.block_tokens, stop // self.block_tokens)

    def release_out_of_window(self, request: Request, computed: int | None = None) -> None:
        """Release the blocks that the windows of all their layers have passed; `computed`: see `SequenceTables`.

        Call it only after the step: the draft model still reads the chunk's early rows, which need blocks the last row
        no longer does.
        """
        if self.tables.windowed and request in self.running:
            self.tables.release_out_of_window(request, computed)

    def remove(self, request: Request) -> None:
        """Remove a request that ended, running or waiting, and release its blocks; its id may be used again."""
        if request in self.running:
            self.running.remove(request)
            self.release(request)
            request.drafts = []
        elif request in self.waiting:
            self.waiting.remove(request)
        self._alive.discard(request.request_id)


def _next_waiting(waiting: Sequence[Request], running: Sequence[Request]) -> Request | None:
    """The next waiting request: by priority, preempted ones first, the tenant that runs least, arrival."""
    if not waiting:
        return None
    runs = Counter(r.tenant for r in running)
    return min(waiting, key=lambda r: (r.priority, r.preemptions == 0, runs[r.tenant], r.arrival))
