"""A step's batch: ragged, frozen, built by `make_batch`.

Dim 0 of every activation is tokens. Each sequence adds any number of query tokens: a prefill chunk, a single decode
token, drafts to verify. Sequences with few query tokens come first, so that attention can use one kernel for them and
another for the rest; sequences are not padded to equal length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from inferplane.errors import UsageError
from inferplane.types.device import HOST
from inferplane.types.scratch import Scratch
from inferplane.types.state import StateRows, StateSlots
from inferplane.types.step_parts import place_entries

if TYPE_CHECKING:
    from inferplane.types.kv import LayerKV

StepKind = Literal["decode", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed")

FEW_TOKENS = 8
"""A sequence with at most this many query tokens in a step counts as "few": one decode token, or drafts."""


@dataclass(frozen=True)
class HostLens:
    """The batch's lengths as Python integers on the host.

    Args:
        query_start: B + 1 offsets into the step's tokens.
        seq_lens: B sequence lengths in tokens, this step's tokens included.
    """

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]


class TableRows(NamedTuple):
    """A step's slots `[T]` and block tables `[B, max blocks]` in a further block table, as in `Batch`."""

    slots: torch.Tensor
    block_tables: torch.Tensor


class Row(NamedTuple):
    """One sequence of a batch: its token rows `start:stop`, its length in tokens including them, its block table
    `[blocks]`."""

    start: int
    stop: int
    tokens: int
    table: torch.Tensor


@dataclass(frozen=True)
class Batch(Scratch):
    """One ragged step over T tokens of B sequences. All tensors live on the device; integers are int64 unless said.

    Kernels keep what they compute once per step in `once(key, make)`; it is dropped with the batch.

    Args:
        ids: token ids `[T]`.
        positions: positions `[T]`, counted from 0 in each sequence.
        slots: `[T]`, the KV slot of each token: `block * block_tokens + offset`; -1 marks padding, which every kernel
            ignores.
        query_start: int32 `[B + 1]`.
        seq_lens: int32 `[B]`, this step's tokens included; 0 marks a padded sequence.
        block_tables: int32 `[B, max blocks]`; entries past a sequence's length are 0 and never read.
        logit_rows: `[R]`, the token rows that need logits; None: all.
        kind: "decode" if every sequence has few query tokens in this step, else "mixed".
        max_query_tokens: the largest number of query tokens of a sequence (under capture: an upper bound).
        max_seq_tokens: the largest sequence length in tokens (under capture: an upper bound).
        host_lens: lengths on the host; None if the host does not know them when the step is launched.
        few: in mixed steps, the leading sequences with few query tokens as a separate batch; None if there are none.
        many: in mixed steps, the other sequences as a separate batch.
        more_tables: slots and block tables for layers with block table 1, 2, ... (`for_table`); empty where all layers
            share one block table.
        states: the slots of the sequences' states; None where no layer keeps any.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor | None
    kind: StepKind
    max_query_tokens: int
    max_seq_tokens: int
    host_lens: HostLens | None = None
    few: Batch | None = None
    many: Batch | None = None
    more_tables: tuple[TableRows, ...] = ()
    states: StateRows | None = None

    def for_table(self, number: int) -> Batch:
        """The step as layers with block table `number` see it: this batch for 0, else the same object in each call.

        Raises:
            UsageError: the step has fewer block tables.
        """
        if number == 0:
            return self
        if number > len(self.more_tables):
            raise UsageError(
                f"A layer reads block table {number} of a step.",
                there_is=f"{1 + len(self.more_tables)} of each sequence, counted from 0",
                remedy="make the batch of queries with `more_blocks`",
            )
        return self.once("inferplane.for_table", self._make_views)[number - 1]

    def _make_views(self) -> list[Batch]:
        views = [
            replace(self, slots=slots, block_tables=block_tables, few=None, many=None, more_tables=())
            for slots, block_tables in self.more_tables
        ]
        if self.few is None and self.many is None:
            return views
        return [_divide(view, 0 if self.few is None else self.few.seq_lens.shape[0]) for view in views]

    def for_entries(self, kv: LayerKV) -> Batch:
        """The step as a cache in this block table sees it whose entries stand for several tokens (`KVRequest.rate`):
        the same object in each call. Lengths and tables are those of entries, also of those that the step completes; a
        token has the slot of the entry that it is the last token of, or -1. Where a token has an entry: this batch.
        """
        if kv.request.rate == 1:
            return self
        covered = kv.covered_tokens or kv.block_tokens
        return self.once(f"inferplane.for_entries {kv.request.rate} {covered}", self._count_entries, kv, covered)

    def _count_entries(self, kv: LayerKV, covered: int) -> Batch:
        rate, lens = kv.request.rate, self.host_lens
        is_last = (self.slots >= 0) & ((self.positions + 1) % rate == 0)
        slots = self.slots // covered * kv.block_tokens + self.slots % covered // rate
        return replace(
            self,
            slots=torch.where(is_last, slots, -1),
            seq_lens=self.seq_lens // rate,
            block_tables=place_entries(self.block_tables, rate, covered),
            max_seq_tokens=self.max_seq_tokens // rate,
            host_lens=lens and replace(lens, seq_lens=tuple(n // rate for n in lens.seq_lens)),
            few=self.few and self.few.for_entries(kv),
            many=self.many and self.many.for_entries(kv),
            more_tables=(),
        )

    def list_tables(self) -> list[TableRows]:
        """Slots and block tables of every table, in order."""
        return [TableRows(self.slots, self.block_tables), *self.more_tables]

    def list_states(self) -> StateRows:
        """The slots of the sequences' states.

        Raises:
            UsageError: the step has none.
        """
        if self.states is None:
            raise UsageError(
                "A layer keeps states of sequences, and the step has no slots for them.",
                remedy="make the batch of queries with `state`",
            )
        return self.states

    def with_tables(self, tables: Sequence[TableRows]) -> Batch:
        """The same step, with these further block tables."""
        return self._divide_anew(replace(self, more_tables=tuple(tables)))

    def with_states(self, slots: Sequence[StateSlots]) -> Batch:
        """The same step, whose sequences have these slots of states."""
        rows = (torch.tensor(part, dtype=torch.int64).to(self.ids.device) for part in zip(*slots))
        return self._divide_anew(replace(self, states=StateRows(*rows)))

    @staticmethod
    def _divide_anew(batch: Batch) -> Batch:
        """The batch whose parts are those of its own tensors."""
        if batch.few is None and batch.many is None:
            return batch
        return _divide(batch, 0 if batch.few is None else batch.few.seq_lens.shape[0])

    def split(self) -> tuple[Batch | None, Batch | None]:
        """The leading sequences with few query tokens, and the rest: each a separate batch, or None.

        The first `few.tokens` token rows of the step belong to the first, the others to the second.
        """
        return (self, None) if self.kind == "decode" else (self.few, self.many)

    @property
    def tokens(self) -> int:
        """T, the number of token rows of this step."""
        return self.ids.shape[0]

    def lens(self) -> HostLens:
        """Lengths as Python integers; copies them from the device if the host does not know them."""
        if self.host_lens is not None:
            return self.host_lens
        return HostLens(tuple(self.query_start.to(HOST).tolist()), tuple(self.seq_lens.to(HOST).tolist()))

    def list_spans(self) -> list[tuple[int, tuple[int, int, int]]]:
        """Number, first and last token row, and length in tokens of each sequence that is not padding."""
        lens = self.lens()
        spans = zip(lens.query_start, lens.query_start[1:], lens.seq_lens)
        return [(i, span) for i, span in enumerate(spans) if span[2]]

    def rows(self) -> Iterator[Row]:
        """One `Row` per sequence, for reference bodies and kernels that loop; padded sequences are skipped."""
        lens = self.lens()
        for i, n in enumerate(lens.seq_lens):
            if n:
                yield Row(lens.query_start[i], lens.query_start[i + 1], n, self.block_tables[i])


@dataclass(frozen=True)
class Query:
    """What one sequence adds to a step.

    Args:
        ids: ids of its new tokens.
        before: number of its tokens that are in the cache already.
        blocks: its blocks, enough for `before + len(ids)` tokens.
        logits: number of its last rows that need logits; None: all.
        more_blocks: its blocks in block tables 1, 2, ..., if layers have several; as many in each as in `blocks`.
        state: the slots of its states; None if no layer keeps any.
    """

    ids: Sequence[int]
    before: int
    blocks: Sequence[int]
    logits: int | None = None
    more_blocks: Sequence[Sequence[int]] = ()
    state: StateSlots | None = None


def make_batch(
    queries: Sequence[Query],
    *,
    block_tokens: int,
    device: torch.device | str,
    few_tokens: int = FEW_TOKENS,
    non_blocking: bool = False,
) -> Batch:
    """Build a step's batch.

    Args:
        queries: the sequences; those with at most `few_tokens` new tokens first.
        block_tokens: tokens per block.
        device: where the tensors go.
        few_tokens: largest number of new tokens that counts as few.
        non_blocking: do not wait for work that the device does meanwhile.

    Raises:
        UsageError: there is no sequence, or a sequence has no new tokens, has too few blocks, has other block tables
            than the first, has state slots unlike the first, or has few new tokens but comes after one with many.
    """
    if not queries:
        raise UsageError("A batch without sequences.", remedy="leave the step out")
    counts = [len(q.ids) for q in queries]
    lens = [q.before + n for q, n in zip(queries, counts)]
    split = next((i for i, n in enumerate(counts) if n > few_tokens), len(counts))
    for i, (q, n, total) in enumerate(zip(queries, counts, lens)):
        if n == 0:
            raise UsageError(f"Sequence {i} of the batch has no new tokens.")
        if n <= few_tokens and i > split:
            raise UsageError(
                f"Sequence {i} has {n} new tokens but comes after one with {counts[split]}.",
                remedy="put the sequences with few tokens first",
            )
        if len(q.blocks) * block_tokens < total:
            raise UsageError(f"Sequence {i} has {len(q.blocks)} blocks of {block_tokens} tokens for {total} tokens.")
    more_tables = queries[0].more_blocks
    if more_tables or any(q.more_blocks for q in queries):
        _check_more_tables(queries)
    starts = (0, *accumulate(counts))
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for q, n, start in zip(queries, counts, starts):
        ids += q.ids
        span = range(q.before, q.before + n)
        positions += span
        slots += [q.blocks[i // block_tokens] * block_tokens + i % block_tokens for i in span]
        last = n if q.logits is None else min(q.logits, n)
        logit_rows += range(start + n - last, start + n)
    width = max(len(q.blocks) for q in queries)
    tables = [(*q.blocks, *([0] * (width - len(q.blocks)))) for q in queries]
    more = [_place(queries, t, width, block_tokens) for t in range(len(more_tables))]
    all_rows = len(logit_rows) == len(ids)
    states = _list_slots(queries)
    of_tokens = ids, positions, slots, [] if all_rows else logit_rows, *(s for s, _ in more)
    sent = _send((*of_tokens, *states), np.int64, device, non_blocking)
    of_sequences = starts, lens, tables, *(t for _, t in more)
    query_start, seq_lens, *sent_tables = _send(of_sequences, np.int32, device, non_blocking)
    batch = Batch(
        ids=sent[0],
        positions=sent[1],
        slots=sent[2],
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=sent_tables[0],
        logit_rows=None if all_rows else sent[3],
        kind="decode" if split == len(queries) else "mixed",
        max_query_tokens=max(counts),
        max_seq_tokens=max(lens),
        host_lens=HostLens(starts, tuple(lens)),
        more_tables=tuple(map(TableRows, sent[4 : 4 + len(more)], sent_tables[1:])),
        states=StateRows(*sent[4 + len(more) :]) if states else None,
    )
    return batch if batch.kind == "decode" else _divide(batch, split)


def _divide(batch: Batch, split: int) -> Batch:
    """A mixed batch with its first `split` sequences as `few` and the others as `many`."""
    few = _part(batch, 0, split, "decode") if split else None
    return replace(batch, few=few, many=_part(batch, split, batch.seq_lens.shape[0], "mixed"))


def _check_more_tables(queries: Sequence[Query]) -> None:
    for i, q in enumerate(queries):
        have, want = [len(blocks) for blocks in q.more_blocks], [len(q.blocks)] * len(queries[0].more_blocks)
        if have != want:
            raise UsageError(
                f"Sequence {i} has {have} blocks in further block tables.",
                there_is=f"{want} expected: {len(q.blocks)} in its first table, and as many tables as sequence 0 has",
            )


def _list_slots(queries: Sequence[Query]) -> list[tuple[int, ...]]:
    """The state slots that are read, and those that are written, of every sequence; empty if they have none."""
    slots = [q.state for q in queries if q.state is not None]
    if slots and len(slots) != len(queries):
        raise UsageError(
            f"{len(slots)} of {len(queries)} sequences have state slots.", remedy="give them to all, or to none"
        )
    return list(zip(*slots))


def _place(
    queries: Sequence[Query], table: int, width: int, block_tokens: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Slots `[T]` of all new tokens, and block tables `[B, width]`, of a further block table."""
    tables = np.zeros((len(queries), width), np.int32)
    slots = []
    for i, q in enumerate(queries):
        row = tables[i]
        row[: len(q.blocks)] = q.more_blocks[table]
        positions = np.arange(q.before, q.before + len(q.ids))
        slots.append(row[positions // block_tokens].astype(np.int64) * block_tokens + positions % block_tokens)
    return np.concatenate(slots), tables


def _send(parts: Sequence[Any], dtype: Any, device: torch.device | str, non_blocking: bool) -> Sequence[torch.Tensor]:
    """Copy each part, numbers or rows of numbers, to the device as a tensor.

    All parts travel in one copy; each begins at a multiple of 64 bytes, which kernels rely on.
    """
    arrays = [np.asarray(part, dtype) for part in parts]
    if (device if isinstance(device, str) else device.type) == HOST:
        return [torch.from_numpy(array) for array in arrays]
    pieces: list[np.ndarray] = []
    sizes: list[int] = []
    for array in arrays:
        gap = -array.size % (64 // array.itemsize)
        pieces += (array.reshape(-1), np.zeros(gap, dtype))
        sizes += (array.size, gap)
    joined = torch.from_numpy(np.concatenate(pieces)).to(device, non_blocking=non_blocking)
    sent = joined.split_with_sizes(sizes)[::2]
    return [part.view(array.shape) for part, array in zip(sent, arrays)]


def _part(batch: Batch, first: int, last: int, kind: StepKind) -> Batch:
    """Sequences `first:last` of a batch as a separate batch; tensors are views where possible."""
    lens = batch.lens()
    a, b = lens.query_start[first], lens.query_start[last]
    starts = tuple(s - a for s in lens.query_start[first : last + 1])
    return Batch(
        ids=batch.ids[a:b],
        positions=batch.positions[a:b],
        slots=batch.slots[a:b],
        query_start=batch.query_start[first : last + 1] - a,
        seq_lens=batch.seq_lens[first:last],
        block_tables=batch.block_tables[first:last],
        logit_rows=None,
        kind=kind,
        max_query_tokens=max(j - i for i, j in pairwise(starts)),
        max_seq_tokens=max(lens.seq_lens[first:last]),
        host_lens=HostLens(starts, lens.seq_lens[first:last]),
        more_tables=tuple(TableRows(slots[a:b], tables[first:last]) for slots, tables in batch.more_tables),
        states=None if batch.states is None else StateRows(*(slots[first:last] for slots in batch.states)),
    )
