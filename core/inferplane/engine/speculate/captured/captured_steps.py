"""`VerifyAndDraft` captured once and replayed: sequences are copied into a bucket's tensors, one table comes back.

A step that needs the host between verification and drafting, or that needs other tensors than a bucket has, falls back:
the step runs by itself, then the draft layer (`CapturedSteps.fallbacks` counts the reasons).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from inferplane.engine.request.state import Request
from inferplane.engine.runner.buckets import Size
from inferplane.engine.runner.capture import DecodeSteps, bucket_rows, capture, copy_into, padding_batch
from inferplane.engine.sampling.batch_rows import GREEDY, sampling_kind
from inferplane.engine.sampling.sampler import NOT_FINITE
from inferplane.engine.schedule.scheduler import ScheduledChunk, Scheduler
from inferplane.engine.speculate.adaptive import AdaptiveLength
from inferplane.engine.speculate.captured.drafts_in_flight import DraftsInFlight, NextRows
from inferplane.engine.speculate.captured.verify_and_draft import CaptureForm, StepTensors, VerifyAndDraft
from inferplane.engine.speculate.verify import needs_probabilities
from inferplane.types import HOST, Batch
from inferplane.types.batch import TableRows

NUMBERS = ("rows", "drafts_if_accepted", "drafts_if_rejected", "max_new_rows", "kind", "seed", "generated", "top_k")
SHARES = ("temperature", "top_p", "min_p")
"""Fields of `StepTensors` in int64 and in float32, one number per sequence."""
WRONG = "its capture replays wrongly"


class DraftedStep(NamedTuple):
    """The result of a captured step: each sequence's new tokens, and its drafts, the requested ones first."""

    tokens: list[list[int]]
    drafts: list[list[int]]


@dataclass(frozen=True)
class InputBucket:
    """The tensors of one size, which all captures of that size read.

    Args:
        inputs: the tensors; those in int64 and in float32 are parts of `numbers` and `shares`.
        graphs: what `Backend.capture` returned, by form.
    """

    inputs: StepTensors
    numbers: torch.Tensor
    shares: torch.Tensor
    graphs: dict[CaptureForm, Any]

    @classmethod
    def of(cls, size: Size, width: int, block_tokens: int, device: str, num_tables: int) -> InputBucket:
        """New tensors for a size, holding padding only, and no capture yet; the `num_tables` block tables of a sequence
        have `width` blocks of `block_tokens` tokens, which hold the longest sequence.
        """
        n, rows = size.sequences, size.sequences * size.tokens
        numbers = torch.zeros((2 + num_tables) * rows + len(NUMBERS) * n, dtype=torch.int64, device=device)
        shares = torch.ones(len(SHARES) * n, dtype=torch.float32, device=device)
        ids, positions, *parts = numbers.split([rows] * (2 + num_tables) + [n] * len(NUMBERS))
        slots, more = [part.fill_(-1) for part in parts[:num_tables]], parts[num_tables:]
        empty = padding_batch(size, width, block_tokens, device, num_tables)
        tables = (TableRows(s, t.block_tables) for s, t in zip(slots[1:], empty.more_tables))
        batch = replace(empty, ids=ids, positions=positions, slots=slots[0], more_tables=tuple(tables))
        return cls(StepTensors(batch, **dict(zip((*NUMBERS, *SHARES), (*more, *shares.split(n))))), numbers, shares, {})


class CapturedSteps:
    """Runs decode steps together with the drafting for the next step, by replaying a capture where one can be made.

    Args:
        decode: of the model's own steps; here the same sizes are captured on the same device.
        function: what is captured.
        scheduler: gives blocks for the drafts.
        lengths: how many drafts sequences get.
        disabled_reason: why nothing is captured, in words; empty to capture.

    Attributes: `disabled_reason`; `wrong`, how captures that are not used differ from their step; `replayed`, the
    number of replayed steps; `fallbacks`, the number of others, by the reason.
    """

    def __init__(
        self,
        decode: DecodeSteps,
        function: VerifyAndDraft,
        scheduler: Scheduler,
        lengths: AdaptiveLength,
        disabled_reason: str = "",
    ) -> None:
        self.function, self.scheduler, self.lengths = function, scheduler, lengths
        self.backend, self.sizes, self.width = decode.backend, decode.sizes, decode.width
        self.num_tables = decode.num_tables
        self.checker, self.on_wrong = decode.checker, decode.on_wrong
        self.wrong: dict[tuple[Size, CaptureForm], str] = {}
        self.disabled_reason = disabled_reason
        self.buckets: dict[Size, InputBucket] = {}
        self.replayed = 0
        self.fallbacks: Counter[str] = Counter()

    def run(self, chosen: Sequence[ScheduledChunk]) -> DraftedStep | None:
        """Run one step and its drafting, and wait for the result; None if the step has to fall back: then nothing is
        done, and the caller runs the step and the drafting one by one.

        Sequences get blocks for the maximum number of drafts; `Scheduler.release_beyond` releases the surplus.

        Raises:
            FloatingPointError: the logits of a row that decides hold NaN or infinity.
        """
        size = self.sizes.smallest_for(len(chosen), max(s.rows for s in chosen))
        why = self.disabled_reason or next(filter(None, (_fallback_reason(s, size) for s in chosen)), "")
        if not why and not self.scheduler.extend_all([(s.request, self._max_tokens(s)) for s in chosen]):
            why = "too few blocks are free for all drafts"
        with torch.inference_mode():
            table = None if why or size is None else self._replay(size, chosen)
        if table is None:
            for s in chosen:
                self.scheduler.release_beyond(s.request, s.request.tokens + len(s.drafts))
            self.fallbacks[why or self.disabled_reason or WRONG] += 1
            return None
        self.replayed += 1
        if not all(finite for _, finite, *_ in table):
            raise FloatingPointError(NOT_FINITE)
        first_draft = 2 + self.buckets[size].inputs.batch.max_query_tokens  # type: ignore[index]
        return DraftedStep([row[2 : 2 + row[0]] for row in table], [row[first_draft:] for row in table])

    def launch(self, chosen: Sequence[ScheduledChunk], before: DraftsInFlight | None = None) -> DraftsInFlight | None:
        """Launch one step and its drafting, without waiting for it; None, and nothing is done, if it has to fall back.

        Args:
            chosen: its sequences; behind a step that is in flight, each of them is in that one, too.
            before: the step in flight; None: there is none.
        """
        most = max(s.rows for s in chosen) if before is None else before.next_rows.ids.shape[1]
        size = self.sizes.smallest_for(len(chosen), most)
        if (
            size is None
            or self.disabled_reason
            or self.scheduler.states is not None
            or any(_fallback_reason(s, size) for s in chosen)
        ):
            return None
        bounds = [(s.request, self._max_tokens(s)) for s in chosen]
        places: list[int] = []
        if before is not None:
            if len(chosen) * most > self.scheduler.limits.max_num_batched_tokens:
                return None
            # All drafts of both steps may be accepted.
            more = before.most_rows - 1 + most
            bounds = [(r, min(tokens + more, r.max_cached_tokens)) for r, tokens in bounds]
            at = {id(r): place for place, r in enumerate(before.requests)}
            places = [at[id(s.request)] for s in chosen]
        if not self.scheduler.extend_all(bounds):
            return None
        with torch.inference_mode():
            table = self._launch(size, chosen, None if before is None else before.next_rows.select(places))
            if table is None:
                return None
            self.replayed += 1
            return DraftsInFlight.of([s.request for s in chosen], self.buckets[size].inputs, table)

    def _replay(self, size: Size, chosen: Sequence[ScheduledChunk]) -> list[list[int]] | None:
        """The table's rows of the step's sequences (`VerifyAndDraft`); None if the step cannot be captured."""
        table = self._launch(size, chosen)
        return None if table is None else table[: len(chosen)].to(HOST).tolist()

    def _launch(
        self, size: Size, chosen: Sequence[ScheduledChunk], next_rows: NextRows | None = None
    ) -> torch.Tensor | None:
        """The step's table on the device, which the next step of this size overwrites; None if the step cannot be
        captured. `next_rows`: where its sequences stand, if the host does not know.
        """
        bucket = self.buckets.get(size)
        if bucket is None:
            device, block_tokens = self.backend.torch_device_indexed, self.function.block_tokens
            bucket = self.buckets[size] = InputBucket.of(size, self.width, block_tokens, device, self.num_tables)
        kinds = self._fill(bucket, size, chosen, next_rows)
        form = CaptureForm(max(1, *(self._max_drafts(s) for s in chosen)), kinds)
        graph = bucket.graphs.get(form)
        if graph is None and (size, form) not in self.wrong:
            graph = self._capture(size, form, bucket, chosen)
            self._fill(bucket, size, chosen, next_rows)
        if graph is None:
            return None
        (table,) = graph.replay()
        found: torch.Tensor = table
        return found

    def _capture(self, size: Size, form: CaptureForm, bucket: InputBucket, chosen: Sequence[ScheduledChunk]) -> Any:
        """A new capture, which is in `bucket.graphs` too; None if the device makes none, or a wrong one."""
        inputs, block_tokens = bucket.inputs, self.function.block_tokens
        graph, self.disabled_reason = capture(
            self.backend, lambda b: (self.function(replace(inputs, batch=b), form),), inputs.batch
        )
        if graph is None:
            self.buckets.clear()
            return None
        tables = [(s.request.computed // block_tokens, t.blocks) for s in chosen for t in s.request.tables]
        written = [block for first, blocks in tables for block in blocks[first:]]
        used = dict.fromkeys((*written, *(block for _, blocks in tables for block in blocks)))
        if wrong := self._difference(size, inputs, form, graph, [*used]):
            self.wrong[size, form] = wrong
            self.on_wrong(size, wrong)
            return None
        bucket.graphs[form] = graph
        return graph

    def _fill(
        self, bucket: InputBucket, size: Size, chosen: Sequence[ScheduledChunk], next_rows: NextRows | None
    ) -> tuple[int, ...]:
        """Copy a step into a bucket's tensors and pad the rest; returns the distinct sampling kinds of its rows,
        rising. `next_rows`: see `_launch`.
        """
        n, width, block_tokens = size.sequences, size.tokens, self.function.block_tokens
        rows = np.zeros((2 + self.num_tables, n * width), np.int64)
        rows[2:] = -1
        numbers = np.zeros((len(NUMBERS), n), np.int64)
        shares = np.ones((len(SHARES), n), np.float32)
        lens = np.zeros(n, np.int32)
        longest = max(len(t.blocks) for s in chosen for t in s.request.tables)
        tables = np.zeros((self.num_tables, n, longest), np.int32)
        for i, s in enumerate(chosen):
            r, p = s.request, s.request.params
            at = slice((i + 1) * width - s.rows, (i + 1) * width)
            positions = np.arange(r.computed, r.computed + s.rows)
            rows[:2, at] = [r.generated[-1], *s.drafts], positions
            for number, table in enumerate(r.tables):
                own = tables[number, i]
                own[: len(table.blocks)] = table.blocks
                blocks = own[positions // block_tokens].astype(np.int64)
                rows[2 + number, at] = blocks * block_tokens + positions % block_tokens
            lens[i] = r.computed + s.rows
            kind = sampling_kind(p, self.function.sampler.vocab)
            if_accepted, if_rejected = self._lengths(s)
            max_new_rows = r.max_cached_tokens - r.tokens
            assert r.seed is not None
            numbers[:, i] = (s.rows, if_accepted, if_rejected, max_new_rows, kind, r.seed, len(r.generated), p.top_k)
            if kind != GREEDY:
                shares[:, i] = (p.temperature, p.top_p, p.min_p)
        kinds = tuple(sorted({int(kind) for kind in numbers[NUMBERS.index("kind"), : len(chosen)]}))
        batch = bucket.inputs.batch
        bucket.numbers.copy_(
            torch.from_numpy(np.concatenate((rows.reshape(-1), numbers.reshape(-1)))), non_blocking=True
        )
        if kinds != (GREEDY,):
            bucket.shares.copy_(torch.from_numpy(shares.reshape(-1)), non_blocking=True)
        batch.seq_lens.copy_(torch.from_numpy(lens), non_blocking=True)
        for target, numbers_of_blocks in zip(batch.list_tables(), tables):
            target.block_tables[:, :longest].copy_(torch.from_numpy(numbers_of_blocks), non_blocking=True)
        if next_rows is not None:
            next_rows.fill(bucket.inputs, block_tokens, [self._is_adapted(s) for s in chosen])
        return kinds

    def _difference(self, size: Size, inputs: StepTensors, form: CaptureForm, graph: Any, used: Sequence[int]) -> str:
        """In words, how a capture differs from its function (`CaptureChecker.check`); empty if it does not. Random
        sequences are sampled in the ways of the form; `inputs` are the capture's, and hold one of them afterwards.
        """
        generator = torch.Generator().manual_seed(form.drafts)

        def fill(batch: Batch) -> None:
            copy_into(inputs.batch, batch, bucket_rows(batch, size.tokens))
            starts = batch.lens().query_start
            # Sequences that share slots are equal in everything.
            draws = {slot: torch.rand(6, generator=generator) for slot in batch.slots.to(HOST).tolist()}
            slots = batch.slots.to(HOST).tolist()
            values = (
                np.zeros((len(NUMBERS), size.sequences), np.int64),
                np.ones((len(SHARES), size.sequences), np.float32),
            )
            for i, (start, stop) in enumerate(pairwise(starts)):
                a, b, c, d, e, f = draws[slots[start]].tolist()
                rows, kind = stop - start, form.kinds[int(a * len(form.kinds))]
                drafts = round(b * form.drafts), round(c * form.drafts)
                values[0][:, i] = rows, *drafts, rows + form.drafts, kind, int(d * 1e9), int(e * 99), 1 + int(f * 9)
                values[1][:, i] = 0.5 + a, 0.5 + b / 2, c / 9
            for name, value in zip((*NUMBERS, *SHARES), (*values[0], *values[1])):
                getattr(inputs, name).copy_(torch.from_numpy(value))

        def defined(table: torch.Tensor) -> tuple[torch.Tensor]:
            """Entries of the table that are defined, the others 0."""
            counts = table[:, :1]
            drafts = torch.where(counts[:, 0] == inputs.rows, inputs.drafts_if_accepted, inputs.drafts_if_rejected)
            index, first = torch.arange(table.shape[1], device=table.device), 2 + size.tokens
            known = (index < 2 + counts) | ((index >= first) & (index < first + drafts[:, None]))
            return (torch.where(known, table, 0)[inputs.rows > 0],)

        def eager() -> tuple[torch.Tensor]:
            return defined(self.function(replace(inputs, batch=replace(inputs.batch)), form))

        def replay() -> tuple[torch.Tensor]:
            return defined(*graph.replay())

        return self.checker.check(size, used, fill, eager, replay, form.drafts - 1)

    def _lengths(self, s: ScheduledChunk) -> tuple[int, int]:
        """The number of drafts of a sequence if all of this step's are accepted, and if one is rejected. Behind a step
        in flight they follow from what is known of the steps before, unless the device computes them (`_is_adapted`).
        """
        if s.request.pending and self._is_adapted(s):
            return self.lengths.maximum, self.lengths.maximum
        n, after = 1 if s.request.pending else len(s.drafts), self.lengths.length_after
        return after(s.request, n, n), after(s.request, n, n - 1)

    def _is_adapted(self, s: ScheduledChunk) -> bool:
        """Whether a sequence's numbers of drafts have to be exact, since they decide which tokens its seed draws."""
        p = s.request.params
        is_seeded = p.seed is not None and p.temperature > 0 and needs_probabilities(self.function.config)
        return self.lengths.adaptive and is_seeded

    def _max_drafts(self, s: ScheduledChunk) -> int:
        """The maximum number of drafts of a sequence after the step."""
        if_accepted, if_rejected = self._lengths(s)
        max_new_rows = s.request.max_cached_tokens - s.request.tokens
        return max(min(if_accepted, max_new_rows - s.rows), min(if_rejected, max_new_rows - 1), 0)

    def _max_tokens(self, s: ScheduledChunk) -> int:
        """Tokens for which a sequence needs blocks: after a step in which all its drafts are accepted, and with the
        maximum number of new drafts, of which the last has no entry.
        """
        return s.request.computed + s.rows + max(0, self._max_drafts(s) - 1)


def _fallback_reason(s: ScheduledChunk, size: Size | None) -> str:
    """In words, why a sequence's step has to fall back; empty if it does not."""
    r: Request = s.request
    p = r.params
    if s.count != 1 or not s.samples_next or not r.generated:
        return "a prompt is read"
    if size is None:
        return "no size holds the step"
    if r.computed + 1 < size.tokens:
        return "a sequence is shorter than what is padded"
    may_come = 2 * size.tokens if r.pending else 1 + len(s.drafts)
    if r.constraint is not None and not r.constraint.is_free(may_come):
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
