"""A new capture is held against the step that it captured, before any of its results is used.

A graph can be wrong where no kernel is: it may replay results of its capture, have read a length on the host, or leave
out the cache's writes. So it replays steps of random sequences on scratch blocks: other ids, positions, slots, lengths
and block tables than those of its capture, all sequences and fewer, each twice. Results and cache entries must be those
of the eager step on the same tensors. What the blocks held is put back at the end. Slots of states are filled, compared
and put back likewise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

import torch

from inferplane.engine.runner.buckets import Size
from inferplane.ops.op import ACCUMULATED, relative_error
from inferplane.types import HOST, Batch, KVCache
from inferplane.types.batch import Query, make_batch
from inferplane.types.state import PADDING_SLOT, StateSlots

Results = Sequence[torch.Tensor]
SEED = 0
SEQUENCES = 6
"""Maximum number of distinct sequences in a trial, each with blocks of its own; a larger step repeats them."""
HISTORY_BLOCKS = 3
"""Blocks in which all sequences find the tokens before their own."""
NOISE = 8.0
"""A replay may differ from the eager step by this many times what two eager runs differ by."""


class StepOutcome(NamedTuple):
    """What a run made: its results, and what each layer's watched blocks and slots of states hold afterwards, on the
    host."""

    results: list[torch.Tensor]
    entries: list[torch.Tensor]


class ScratchBlocks:
    """Blocks and slots of states of a cache that a check may write to. Inside of `with` they hold random numbers.

    Args:
        cache: the cache.
        device: where block numbers are sent.
        tokens: that a sequence writes in a step.
        used: blocks of the step at hand, those that it writes first. They are taken only if the cache has too few
            others. The first ones and block 0, to which a wrong graph may write, must not change.
        num_tables: block tables of a sequence.

    Attributes: `history`, the blocks that all sequences read in all tables; `own`, those of each sequence of a trial in
    each table; `pairs`, the slots of each one's states, None where no layer keeps any.

    Raises:
        ValueError: the cache has too few blocks for a sequence.
    """

    def __init__(self, cache: KVCache, device: str, tokens: int, used: Sequence[int], num_tables: int = 1) -> None:
        self.device, self.block_tokens, self.layers = device, cache.block_tokens, cache.storages()
        in_table = math.ceil((tokens - 1) / self.block_tokens) + 1
        each = in_table * num_tables
        used = [block for block in used if block < cache.blocks]  # tables of another pool have other numbers
        taken = set(used)
        order = chain((b for b in reversed(range(cache.blocks)) if b not in taken), used)
        numbers = list(islice(order, SEQUENCES * each + HISTORY_BLOCKS))
        self.history = numbers[: max(0, min(HISTORY_BLOCKS, len(numbers) - each))]
        rest = numbers[len(self.history) :]
        self.own = [
            [rest[j : j + in_table] for j in range(i, i + each, in_table)] for i in range(0, len(rest) - each + 1, each)
        ]
        if not self.own:
            raise ValueError(f"{cache.blocks} blocks are too few to check it")
        self.states, self.pairs = cache.list_states(), list[StateSlots | None]([None] * len(self.own))
        if self.states:
            firsts = range(PADDING_SLOT + 1, self.states[0].slots - 1, 2)
            self.pairs = [StateSlots(first, first + 1) for first in firsts[: len(self.own)]]
            del self.own[len(self.pairs) :]
        numbers_of_states = [slot for pair in self.pairs for slot in pair or ()]
        self._state_slots = torch.tensor(numbers_of_states, dtype=torch.int64).to(device)
        self._filled = numbers
        self._watched = torch.tensor(list(dict.fromkeys((*numbers, 0, *used[:SEQUENCES])))).to(device)
        self._stored: list[tuple[torch.Tensor, ...]] = []

    def __enter__(self) -> ScratchBlocks:
        self._stored, generator = self._export(), torch.Generator().manual_seed(SEED)
        slots = torch.tensor(self._filled)[:, None] * self.block_tokens + torch.arange(self.block_tokens)
        slots = slots.flatten().to(self.device)
        for layer in self.layers:
            dtypes = [t.dtype for t in layer.read(self._watched.int(), 1)]
            shapes = zip(layer.request.entry_shapes, dtypes)
            layer.write(
                slots,
                *(torch.randn(len(slots), *s, generator=generator).to(dtype).to(self.device) for s, dtype in shapes),
            )
        self._states_stored = self._export_states()
        self._states_filling = [torch.randn(t.shape, generator=generator).to(t) for t in self._states_stored]
        self._filling = self._export()
        self.before = self.run(lambda: ()).entries
        return self

    def __exit__(self, *raised: object) -> None:
        self._load(self._stored)
        self._load_states(self._states_stored)

    def run(self, step: Callable[[], Results]) -> StepOutcome:
        """What a step makes of the blocks as they were at first."""
        self._load(self._filling)
        self._load_states(self._states_filling)
        results = [t.to(HOST, copy=True) for t in step()]
        tokens = len(self._watched) * self.block_tokens
        read = (layer.read(self._watched.int(), tokens) for layer in self.layers)
        entries = [*(t for found in read for t in found), *self._export_states()]
        return StepOutcome(results, [t.to(HOST, copy=True) for t in entries])

    def describe_row(self, index: int, row: int) -> str:
        """In words, what a row of `StepOutcome.entries[index]` is."""
        if index >= len(self.before) - len(self._states_stored):
            return f"state slot {int(self._state_slots[row])}"
        block = int(self._watched[row // self.block_tokens].to(HOST))
        return f"slot {block * self.block_tokens + row % self.block_tokens} of the cache"

    def _export(self) -> list[tuple[torch.Tensor, ...]]:
        return [layer.export(self._watched) for layer in self.layers]

    def _export_states(self) -> list[torch.Tensor]:
        return [t.index_select(0, self._state_slots) for states in self.states for t in states.tensors]

    def _load_states(self, stored: Sequence[torch.Tensor]) -> None:
        tensors = (t for states in self.states for t in states.tensors)
        for tensor, values in zip(tensors, stored):
            tensor.index_copy_(0, self._state_slots, values)

    def _load(self, stored: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for layer, values in zip(self.layers, stored):
            layer.load(self._watched, values)


@dataclass(frozen=True)
class CaptureChecker:
    """Compares captures of one cache's steps with the steps.

    Args:
        cache: what the steps write to.
        device: torch's name of the device.
        max_tokens: the maximum length of a sequence.
        vocab: number of token ids.
        num_tables: block tables of a sequence that the steps read.
    """

    cache: KVCache
    device: str
    max_tokens: int
    vocab: int
    num_tables: int = 1

    def check(
        self,
        size: Size,
        used: Sequence[int],
        fill: Callable[[Batch], None],
        eager: Callable[[], Results],
        replay: Callable[[], Results],
        more_tokens: int = 0,
        replays: int = 2,
    ) -> str:
        """In words, how a capture's replays differ from its step (`check_replays`); empty if they do not.

        Args:
            size: of the capture.
            used: blocks of the step at hand, which keep what they hold; those that it writes first.
            fill: copies a step into the capture's inputs.
            eager, replay, replays: see `check_replays`.
            more_tokens: tokens after the step whose entries are written too.
        """
        try:
            written = size.tokens + more_tokens
            with ScratchBlocks(self.cache, self.device, written, used, self.num_tables) as scratch:
                batches = trial_batches(scratch, size, self.max_tokens, self.vocab, more_tokens)
                return check_replays(eager, replay, (partial(fill, batch) for batch in batches), scratch, replays)
        except Exception as error:
            return f"comparing it with the eager step failed: {type(error).__name__}: {error}"


def trial_batches(
    scratch: ScratchBlocks, size: Size, max_tokens: int, vocab: int, more_tokens: int = 0, seed: int = SEED
) -> Iterable[Batch]:
    """Steps of random sequences: one that fills a bucket, one with fewer sequences, of which some have fewer rows. A
    sequence of the first has the maximum length, another the minimum.

    Args:
        scratch: blocks for them.
        size: of the bucket.
        max_tokens: the maximum length of a sequence.
        vocab: number of token ids.
        more_tokens: tokens after the step for which block tables have blocks too.
        seed: any integer.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        """A random number from low to high, both included."""
        return int(torch.randint(low, max(low, high) + 1, (), generator=generator))

    block, tokens, most = scratch.block_tokens, size.tokens, max_tokens - more_tokens
    if not scratch.history:
        most = min(most, len(scratch.own[0][0]) * block - more_tokens)
    most = max(tokens, most)
    for trial in range(2):
        queries = []
        for i, own in enumerate(scratch.own):
            rows = tokens if trial == 0 or scratch.states else draw(1, tokens)
            length = {(0, 0): most, (0, 1): tokens}.get((trial, i), draw(tokens, most))
            before = length - rows
            shared = [scratch.history[draw(0, len(scratch.history) - 1)] for _ in range(before // block)]
            ids = [draw(0, vocab - 1) for _ in range(rows)]
            stop = math.ceil((length + more_tokens) / block)
            blocks, *more_blocks = [[*shared, *table[trial:], *table[:trial]][:stop] for table in own]
            pair = scratch.pairs[i]
            if pair is not None and trial:
                pair = StateSlots(pair.write, pair.read)
            queries.append(Query(ids, before, blocks, None, more_blocks, pair))
        count = size.sequences if trial == 0 else (size.sequences + 1) // 2
        chosen = [queries[i % len(queries)] for i in range(count)]
        yield make_batch(chosen, block_tokens=block, device=scratch.device, few_tokens=tokens)


def check_replays(
    eager: Callable[[], Results],
    replay: Callable[[], Results],
    fills: Iterable[Callable[[], None]],
    scratch: ScratchBlocks,
    replays: int = 2,
) -> str:
    """In words, how a capture's replays differ from its step; empty if they do not.

    Floats may differ by `NOISE` times what two eager runs differ by, and by the tolerance of an op with long sums:
    kernels that add in any order never agree to the last bit. What the step does not write must not change.

    Args:
        eager: runs the step on the capture's inputs; returns what is defined of its results.
        replay: replays the capture, with the same results.
        fills: each fills the inputs with another step.
        scratch: the blocks of these steps; entered.
        replays: of each step.
    """
    for fill in fills:
        fill()
        want, again = scratch.run(eager), scratch.run(eager)
        for which in ("first", "second")[:replays]:
            if wrong := _difference(scratch.run(replay), want, again, scratch):
                return f"the {which} replay of a step {wrong}"
    return ""


def _difference(got: StepOutcome, want: StepOutcome, again: StepOutcome, scratch: ScratchBlocks) -> str:
    dtypes = {t.dtype for t in (*want.results, *want.entries)}
    floats = [pair for pair in zip(again.results, want.results) if pair[1].is_floating_point()]
    noise_of_floats = max((_error(*pair) for pair in floats), default=0.0)
    tolerance = max(NOISE * noise_of_floats, *(ACCUMULATED.get(dtype, 0.0) for dtype in dtypes))

    def error(one: torch.Tensor, other: torch.Tensor, noisy: torch.Tensor) -> str:
        """The words for what is not accepted."""
        found, noise = _error(one, other), _error(noisy, other)
        allowed = max(NOISE * noise, tolerance if other.is_floating_point() else 0.0)
        return "" if found <= allowed else f"by {found:.3g}, allowed {allowed:.3g}"

    for i, tensors in enumerate(zip(got.results, want.results, again.results)):
        if wrong := error(*tensors):
            return f"differs from the eager step in result {i} {wrong}"
    rows = zip(got.entries, want.entries, again.entries, scratch.before)
    for i, (one, other, noisy, before) in enumerate(rows):
        untouched = _same_rows(other, before)
        if (stray := untouched & ~_same_rows(one, before)).any():
            return f"changes {scratch.describe_row(i, int(stray.int().argmax()))}, which is not the step's"
        if wrong := error(*(t[~untouched] for t in (one, other, noisy))):
            return f"writes other entries into the cache than the eager step: they differ {wrong}"
    return ""


def _same_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Bool per row: equal, where NaN equals NaN."""
    return ((one == other) | (one.isnan() & other.isnan())).flatten(1).all(1)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """`relative_error`, in which what is not finite in both is equal."""
    if got.shape != want.shape:
        return math.inf
    unknown = ~want.isfinite() & ~got.isfinite()
    return relative_error(got.masked_fill(unknown, 0), want.masked_fill(unknown, 0))
