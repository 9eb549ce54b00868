"""Cycles recorded once and replayed: a step's sequences are packed into a bucket's tensors, one table comes back.

What needs the host between verification and drafting, or is not among a bucket's tensors, runs apart: the step by
itself, then the drafting layer (`Cycles.apart` counts the reasons).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from inferplane.engine.request.state import Request
from inferplane.engine.runner.buckets import Buckets, Size
from inferplane.engine.runner.capture import blank
from inferplane.engine.sampling.batch_rows import GREEDY, draws
from inferplane.engine.sampling.sampler import NOT_FINITE
from inferplane.engine.schedule.scheduler import Scheduled, Scheduler
from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.verify_and_draft import Cycle, Form, Turn
from inferplane.types import HOST, Backend

NUMBERS = ("rows", "after_all", "after_some", "room", "kind", "seed", "generated", "top_k")
SHARES = ("temperature", "top_p", "min_p")
"""Fields of `Turn` in int64 and in float32, one number a sequence."""


class Cycled(NamedTuple):
    """What a cycle gave: for each sequence its new tokens, and drafts, the wanted ones first."""

    tokens: list[list[int]]
    drafts: list[list[int]]


@dataclass(frozen=True)
class Bucket:
    """Tensors of a size, which all records of that size read.

    Args:
        turn: the tensors; those in int64 and in float32 lie in `numbers` and `shares`.
        records: what `Backend.capture` returned, by form.
    """

    turn: Turn
    numbers: torch.Tensor
    shares: torch.Tensor
    records: dict[Form, Any]

    @classmethod
    def of(cls, size: Size, width: int, block_tokens: int, device: str) -> Bucket:
        """One of nothing but padding; `width` blocks of `block_tokens` tokens hold the longest sequence."""
        n, rows = size.sequences, size.sequences * size.tokens
        numbers = torch.zeros(3 * rows + len(NUMBERS) * n, dtype=torch.int64, device=device)
        shares = torch.ones(len(SHARES) * n, dtype=torch.float32, device=device)
        ids, positions, slots, *more = numbers.split([rows] * 3 + [n] * len(NUMBERS))
        batch = replace(blank(size, width, block_tokens, device), ids=ids, positions=positions, slots=slots.fill_(-1))
        return cls(Turn(batch, **dict(zip((*NUMBERS, *SHARES), (*more, *shares.split(n))))), numbers, shares, {})


class Cycles:
    """Runs decode steps together with the drafting behind them, by replaying a record where one can be made.

    Args:
        backend: records, or does not.
        cycle: what is recorded.
        scheduler: gives blocks for what may be drafted.
        lengths: how many drafts sequences get.
        sizes: what is recorded.
        max_model_len: tokens of the longest sequence.
        off: why nothing is to be recorded, in words; empty to record.

    Attributes: `off`; `replayed`, how many steps ran so; `apart`, how many did not, by the reason.
    """

    def __init__(
        self,
        backend: Backend,
        cycle: Cycle,
        scheduler: Scheduler,
        lengths: AdaptiveLength,
        sizes: Buckets,
        max_model_len: int,
        off: str = "",
    ) -> None:
        self.backend, self.cycle, self.scheduler, self.lengths, self.sizes = backend, cycle, scheduler, lengths, sizes
        self.width = math.ceil(max_model_len / cycle.block_tokens)
        self.off = off
        self.buckets: dict[Size, Bucket] = {}
        self.replayed = 0
        self.apart: Counter[str] = Counter()

    def run(self, chosen: Sequence[Scheduled]) -> Cycled | None:
        """One step and its drafts; None, and nothing is done, where it has to run apart.

        Sequences hold blocks for the most drafts that they may get; `Scheduler.shorten` takes back what is too much.

        Raises:
            FloatingPointError: the logits of a row that decides hold NaN or infinity.
        """
        size = self.sizes.holding(len(chosen), max(s.rows for s in chosen))
        why = self.off or next(filter(None, (_why(s, size) for s in chosen)), "")
        if not why and not self.scheduler.extend_all([(s.request, self._most_tokens(s)) for s in chosen]):
            why = "too few blocks are free for all drafts"
        with torch.inference_mode():
            table = None if why or size is None else self._replay(size, chosen)
        if table is None:
            for s in chosen:
                self.scheduler.shorten(s.request, s.request.tokens + len(s.drafts))
            self.apart[why or self.off] += 1
            return None
        self.replayed += 1
        if not all(finite for _, finite, *_ in table):
            raise FloatingPointError(NOT_FINITE)
        behind = 2 + self.buckets[size].turn.batch.max_query_tokens  # type: ignore[index]
        return Cycled([row[2 : 2 + row[0]] for row in table], [row[behind:] for row in table])

    def _replay(self, size: Size, chosen: Sequence[Scheduled]) -> list[list[int]] | None:
        """The table's rows of the step's sequences, as `Cycle` tells; None where it cannot be recorded."""
        bucket = self.buckets.get(size)
        if bucket is None:
            device = self.backend.torch_device_indexed
            bucket = self.buckets[size] = Bucket.of(size, self.width, self.cycle.block_tokens, device)
        kinds = self._fill(bucket, size, chosen)
        form = Form(max(1, *(self._most_drafts(s) for s in chosen)), kinds)
        recorded = bucket.records.get(form)
        if recorded is None:
            turn = bucket.turn
            try:
                recorded = self.backend.capture(lambda b: (self.cycle(replace(turn, batch=b), form),), turn.batch)
            except Exception as error:
                self.off = f"recording a cycle of {size.sequences} sequences failed: {type(error).__name__}: {error}"
                self.buckets.clear()
                return None
            if recorded is None:
                self.off = "the device records no steps"
                self.buckets.clear()
                return None
            bucket.records[form] = recorded
        (table,) = recorded.replay()
        rows: list[list[int]] = table[: len(chosen)].to(HOST).tolist()
        return rows

    def _fill(self, bucket: Bucket, size: Size, chosen: Sequence[Scheduled]) -> tuple[int, ...]:
        """Copy a step into a bucket's tensors, what it leaves over as padding; in which ways its rows are drawn."""
        n, width, block_tokens = size.sequences, size.tokens, self.cycle.block_tokens
        rows = np.zeros((3, n * width), np.int64)
        rows[2] = -1
        numbers = np.zeros((len(NUMBERS), n), np.int64)
        shares = np.ones((len(SHARES), n), np.float32)
        lens = np.zeros(n, np.int32)
        tables = np.zeros((n, max(len(s.request.blocks) for s in chosen)), np.int32)
        for i, s in enumerate(chosen):
            r, p = s.request, s.request.params
            at = slice((i + 1) * width - s.rows, (i + 1) * width)
            places = np.arange(r.computed, r.computed + s.rows)
            tables[i, : len(r.blocks)] = r.blocks
            rows[:, at] = (
                [r.generated[-1], *s.drafts],
                places,
                tables[i, places // block_tokens].astype(np.int64) * block_tokens + places % block_tokens,
            )
            lens[i] = r.computed + s.rows
            kind = draws(p, self.cycle.sampler.vocab)
            all_stand, some_stand = self._lengths(s)
            room = r.most_tokens - r.tokens
            assert r.seed is not None
            numbers[:, i] = (s.rows, all_stand, some_stand, room, kind, r.seed, len(r.generated), p.top_k)
            if kind != GREEDY:
                shares[:, i] = (p.temperature, p.top_p, p.min_p)
        kinds = tuple(sorted({int(kind) for kind in numbers[NUMBERS.index("kind"), : len(chosen)]}))
        batch = bucket.turn.batch
        bucket.numbers.copy_(
            torch.from_numpy(np.concatenate((rows.reshape(-1), numbers.reshape(-1)))), non_blocking=True
        )
        if kinds != (GREEDY,):
            bucket.shares.copy_(torch.from_numpy(shares.reshape(-1)), non_blocking=True)
        batch.seq_lens.copy_(torch.from_numpy(lens), non_blocking=True)
        batch.block_tables[:, : tables.shape[1]].copy_(torch.from_numpy(tables), non_blocking=True)
        return kinds

    def _lengths(self, s: Scheduled) -> tuple[int, int]:
        """Drafts that a sequence gets if all of this step's stand, and if one is refused."""
        drafted = len(s.drafts)
        return self.lengths.after(s.request, drafted, drafted), self.lengths.after(s.request, drafted, drafted - 1)

    def _most_drafts(self, s: Scheduled) -> int:
        """The most drafts that a sequence may get behind the step."""
        all_stand, some_stand = self._lengths(s)
        room = s.request.most_tokens - s.request.tokens
        return max(min(all_stand, room - s.rows), min(some_stand, room - 1), 0)

    def _most_tokens(self, s: Scheduled) -> int:
        """Tokens that have entries behind a cycle in which all drafts stand and the most follow."""
        return s.request.computed + s.rows + max(0, self._most_drafts(s) - 1)


def _why(s: Scheduled, size: Size | None) -> str:
    """In words, why a sequence's step and its drafts run apart; empty where they need not."""
    r: Request = s.request
    p = r.params
    if s.count != 1 or not s.last or not r.generated:
        return "a prompt is read"
    if size is None:
        return "no size holds the step"
    if r.computed + 1 < size.tokens:
        return "a sequence is shorter than what is padded"
    if r.constraint is not None:
        return "a constraint"
    if p.logprobs is not None:
        return "log-probabilities"
    if p.penalizes:
        return "penalties"
    if p.logit_bias:
        return "a logit bias"
    if r.end_ids and len(r.generated) < p.min_tokens:
        return "min_tokens"
    return ""
