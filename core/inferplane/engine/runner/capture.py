"""Decode steps captured once and replayed: batches are padded to a bucket's size and copied into its tensors.

A device that captures steps (`Backend.capture`) launches a complete step at the cost of one call. A captured step reads
lengths, slots and block tables from device tensors, not from Python, so one capture serves every batch that fits.
Missing sequences become padded rows (slot -1, length 0), which all kernels ignore; a sequence with fewer tokens than
others, as when drafts are verified, has padded rows before its own. Draft layers are captured in the same way. Steps
with prompts run eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.buckets import Buckets, Size
from inferplane.engine.runner.capture_check import CaptureChecker, Results
from inferplane.engine.runner.options import RunnerOptions
from inferplane.errors import in_words
from inferplane.types import HOST, Backend, Batch, KVCache
from inferplane.types.batch import TableRows
from inferplane.types.state import PADDING_SLOT, StateRows

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(batch, *rows) -> (logits, hidden)` of the bound model, or of a draft layer, over its cache."""
OnWrong = Callable[[Size, str], None]
"""Told of a capture that replays wrongly: its size, and how its replays differ from the step."""


@dataclass(frozen=True)
class CapturedStep:
    """The tensors that a captured step reads, and the graph that replays it.

    Args:
        batch: the tensors, as a batch of the bucket's size.
        rows: further inputs, with a row per row of the batch.
        graph: what `Backend.capture` returned.
    """

    batch: Batch
    rows: tuple[torch.Tensor, ...]
    graph: Any

    def run(
        self, batch: Batch, rows: tuple[torch.Tensor, ...], at: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy a batch into the capture's tensors, replay it, and return copies of its results: logits `[R, V]` of the
        rows that need them, hidden states `[T, D]`.

        Args:
            batch: the step to run; it fits the bucket.
            rows: the further inputs, a row per row of `batch`.
            at: int64 `[T]`, the row of the bucket for each row of `batch`; None: the first ones.
        """
        copy_into(self.batch, batch, at, list(zip(self.rows, rows)))
        logits, hidden = self.graph.replay()
        if at is not None:
            logit_rows = at if batch.logit_rows is None else at.index_select(0, batch.logit_rows)
            return logits.index_select(0, logit_rows), hidden.index_select(0, at)
        first = slice(0, batch.tokens)
        if batch.logit_rows is None:
            return logits[first].clone(), hidden[first].clone()
        return logits.index_select(0, batch.logit_rows), hidden[first].clone()


def padding_batch(
    size: Size, width: int, block_tokens: int, device: str, num_tables: int = 1, *, has_states: bool = False
) -> Batch:
    """New tensors of a bucket, as a batch that holds padding only (slots -1, lengths 0): the inputs that a capture
    reads.

    Args:
        size: of the bucket.
        width: blocks of the longest sequence, the width of the block tables.
        block_tokens: tokens per block.
        device: where the tensors live.
        num_tables: block tables of a sequence.
        has_states: whether sequences have slots of states.
    """
    rows = size.sequences * size.tokens

    def full(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    starts = torch.arange(size.sequences + 1, dtype=torch.int32, device=device) * size.tokens
    tables = [
        TableRows(full(rows, -1), torch.zeros(size.sequences, width, dtype=torch.int32, device=device))
        for _ in range(num_tables)
    ]
    return Batch(
        ids=full(rows, 0),
        positions=full(rows, 0),
        slots=tables[0].slots,
        query_start=starts,
        seq_lens=torch.zeros(size.sequences, dtype=torch.int32, device=device),
        block_tables=tables[0].block_tables,
        logit_rows=None,
        kind="decode",
        max_query_tokens=size.tokens,
        max_seq_tokens=width * block_tokens,
        more_tables=tuple(tables[1:]),
        states=StateRows(*(full(size.sequences, PADDING_SLOT) for _ in range(2))) if has_states else None,
    )


def copy_into(
    bucket: Batch,
    batch: Batch,
    at: torch.Tensor | None = None,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Copy a batch into a bucket's tensors in place, and pad the rest. Nothing waits for the device.

    Args:
        bucket: the tensors; at least as many sequences, rows and blocks as the batch has, as many block tables,
            and slots of states if it has any.
        batch: copied into them.
        at: int64 `[T]`, the row of the bucket for each row of the batch; None: the first ones.
        rows: pairs of a further tensor of the bucket and its new rows; the rest becomes 0.
    """
    sequences = batch.seq_lens.shape[0]
    of_batch = [(getattr(bucket, name), getattr(batch, name), empty) for name, empty in EMPTY.items()]
    of_batch += [
        (own.slots, new.slots, EMPTY["slots"]) for own, new in zip(bucket.more_tables, batch.more_tables, strict=True)
    ]
    for target, source, empty in (*of_batch, *((*pair, 0) for pair in rows)):
        if at is None:
            target[: batch.tokens].copy_(source, non_blocking=True)
            target[batch.tokens :].fill_(empty)
        else:
            target.fill_(empty).index_copy_(0, at, source)
    bucket.seq_lens[:sequences].copy_(batch.seq_lens, non_blocking=True)
    bucket.seq_lens[sequences:].zero_()
    for own, new in zip(bucket.list_tables(), batch.list_tables()):
        own.block_tables[:sequences, : new.block_tables.shape[1]].copy_(new.block_tables, non_blocking=True)
    for target, source in zip(bucket.states or (), batch.states or (), strict=True):
        target[:sequences].copy_(source, non_blocking=True)
        target[sequences:].fill_(PADDING_SLOT)


EMPTY = {"ids": 0, "positions": 0, "slots": -1}
"""The value of a padded row in each tensor."""


def bucket_rows(batch: Batch, tokens: int) -> torch.Tensor | None:
    """The rows of a batch in a bucket with `tokens` rows per sequence: each sequence's last ones, because kernels count
    a row's position from the end of its sequence. int64 `[T]`; None if they are consecutive.
    """
    if batch.tokens == batch.seq_lens.shape[0] * tokens:
        return None
    starts = batch.lens().query_start
    spans = [((i + 1) * tokens, starts[i + 1] - starts[i]) for i in range(len(starts) - 1)]
    rows = [row for end, count in spans for row in range(end - count, end)]
    return torch.tensor(rows, dtype=torch.int64).to(batch.ids.device, non_blocking=True)


def capture(backend: Backend, step: Callable[[Batch], Any], bucket: Batch) -> tuple[Any, str]:
    """What `Backend.capture` returns, and ""; if that is nothing, None and the reason in words."""
    try:
        graph = backend.capture(step, bucket)
    except Exception as error:
        return None, f"capturing {bucket.seq_lens.shape[0]} sequences failed: {in_words(error)}"
    return graph, "the device captures no steps" if graph is None else ""


def ignore_wrong(size: Size, reason: str) -> None:
    """An `OnWrong` that does nothing."""


class DecodeSteps:
    """Runs decode steps, by replaying a capture where there is one or one can be made.

    A new capture is compared with the step first (`capture_check`). Steps of a size whose capture is wrong run eagerly.

    Args:
        backend: captures steps, or does not.
        step: the bound model.
        cache: its cache.
        max_model_len: tokens of the longest sequence.
        sizes: the sizes to capture.
        disabled_reason: why nothing is captured, in words; empty to capture.
        vocab: number of token ids that the step knows, for comparing captures with it.
        on_wrong: called with each wrong capture.
        num_tables: block tables of a sequence that the step reads.

    Attributes: `disabled_reason`; `wrong`, the sizes whose captures are wrong, with the reason; `replayed` and `eager`,
    the numbers of steps that ran in each way.
    """

    def __init__(
        self,
        backend: Backend,
        step: Step,
        cache: KVCache,
        max_model_len: int,
        sizes: Buckets,
        disabled_reason: str = "",
        vocab: int = 2,
        on_wrong: OnWrong = ignore_wrong,
        num_tables: int = 1,
    ) -> None:
        self.backend, self.step, self.sizes, self.on_wrong = backend, step, sizes, on_wrong
        self.checker = CaptureChecker(cache, backend.torch_device_indexed, max_model_len, vocab, num_tables)
        self.block_tokens, self.num_tables = cache.block_tokens, num_tables
        self.width, self.has_states = math.ceil(max_model_len / cache.block_tokens), bool(cache.list_states())
        self.buckets: dict[Size, CapturedStep] = {}
        self.wrong: dict[Size, str] = {}
        self.checked: set[Size] = set()
        self.disabled_reason = disabled_reason
        self.replayed = self.eager = 0

    def __call__(self, batch: Batch, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step, replaying the capture of its size, capturing that size first if it is new, or eagerly where
        neither is possible: logits float32 `[R, V]` of the rows that need them, and hidden states `[T, D]`.

        Args:
            batch: the step.
            rows: further inputs of the step, with a row per row of the batch.
        """
        size = self.size_for(batch)
        at = None if size is None or self.disabled_reason else bucket_rows(batch, size.tokens)
        bucket = None if size is None or self.disabled_reason else self.bucket(size, batch, rows, at)
        if bucket is None:
            self.eager += 1
            return self.step(batch, *rows)
        self.replayed += 1
        return bucket.run(batch, rows, at)

    def bucket(
        self, size: Size, batch: Batch, rows: tuple[torch.Tensor, ...], at: torch.Tensor | None
    ) -> CapturedStep | None:
        """The captured step of a size, captured now if it is new. None when that fails or the device captures nothing:
        then `disabled_reason` is set, and all later steps run eagerly; None too for a size in `wrong`.

        Args:
            size: to capture.
            batch, rows, at: the step at hand, as for `CapturedStep.run`: a capture may run it first to warm up.
        """
        found = self.buckets.get(size)
        if found is None and size not in self.wrong:
            device = self.backend.torch_device_indexed
            static = padding_batch(
                size, self.width, self.block_tokens, device, self.num_tables, has_states=self.has_states
            )
            more = tuple(r.new_zeros(size.sequences * size.tokens, *r.shape[1:]) for r in rows)
            # Capturing may run the step first: then on the real batch, where that does no harm.
            copy_into(static, batch, at, list(zip(more, rows)))
            graph, self.disabled_reason = capture(self.backend, lambda b: self.step(b, *more), static)
            if graph is None:
                return None
            found = self.buckets[size] = CapturedStep(static, more, graph)
            self.drop_wrong(batch)
        return self.buckets.get(size)

    def drop_wrong(self, batch: Batch) -> None:
        """Compare the newest capture with the step, and the one before it once more, because captures share memory.
        Those that are wrong are dropped.

        Args:
            batch: the step at hand, whose blocks keep what they hold.
        """
        tables = batch.list_tables()
        numbers = [*(t.slots // self.block_tokens for t in tables), *(t.block_tables.flatten() for t in tables)]
        used = torch.cat(numbers).to(HOST).tolist()
        for size in list(self.buckets)[-2:]:
            captured = self.buckets[size]
            replays = 1 if size in self.checked else 2
            if wrong := self._difference(size, captured, [*dict.fromkeys(b for b in used if b >= 0)], replays):
                del self.buckets[size]
                self.wrong[size] = wrong
                self.on_wrong(size, wrong)
            self.checked.add(size)

    def _difference(self, size: Size, captured: CapturedStep, used: Sequence[int], replays: int) -> str:
        """In words, how a capture differs from the step; empty if it does not."""
        static, rows, generator = captured.batch, captured.rows, torch.Generator().manual_seed(size.sequences)

        def fill(batch: Batch) -> None:
            random = [torch.randn(batch.tokens, *r.shape[1:], generator=generator).to(r.dtype) for r in rows]
            copy_into(
                static, batch, bucket_rows(batch, size.tokens), [(r, x.to(r.device)) for r, x in zip(rows, random)]
            )

        def of_sequences(results: Results) -> Results:
            real = static.slots >= 0
            return [t[real] for t in results]

        def eager() -> Results:
            return of_sequences(self.step(replace(static), *rows))

        def replay() -> Results:
            return of_sequences(captured.graph.replay())

        return self.checker.check(size, used, fill, eager, replay, replays=replays)

    def size_for(self, batch: Batch) -> Size | None:
        """The size whose capture may run a batch. None (the batch runs eagerly) when it is no decode step, no size
        holds it, it has states unlike the cache, or rows would be padded beside states or where a sequence has fewer
        tokens than the bucket has rows per sequence.
        """
        if batch.kind != "decode" or batch.block_tables.shape[1] > self.width:
            return None
        if (batch.states is not None) != self.has_states:
            return None
        size = self.sizes.smallest_for(batch.seq_lens.shape[0], batch.max_query_tokens)
        if size is None or batch.tokens == batch.seq_lens.shape[0] * size.tokens:
            return size
        if self.has_states:  # kernels of recurrences take padded rows after a sequence's own, not before them
            return None
        lens = batch.host_lens
        return size if lens is not None and min(lens.seq_lens) >= size.tokens else None


def why_not_captured(plan: Plan, options: RunnerOptions, part: str = "") -> str:
    """In words, why decode steps of a plan are not captured; empty when they can be.

    Args:
        plan: with the chosen kernels, some of which cannot be captured.
        options: `capture=False` and several ranks rule captures out.
        part: "" for the model's own steps; otherwise the part of the model that the engine calls by itself: "mtp"
            (draft layers) or "sample".
    """
    if not options.capture:
        return "capture=False"
    if options.ranks > 1:
        return "several ranks share the model: they would have to capture each step together"
    variants = {site: choice.variant for site, _, choice in plan.sites("decode")}
    for _kind, site, op, choice in plan.distinct():
        head, (above, _, name) = site.partition(".")[0], site.rpartition(".")
        if _kind != "decode" or (head != part if part else head in plan.model.called_by_engine):
            continue
        if op.serves_many_queries and variants[above] != name:  # decode steps have no such sequences
            continue
        where = f" at {site}" if site else ""
        if choice.kernel is None and not choice.children and not op.body_capture_safe:
            return f"{op.name}{where} runs on its reference"
        if choice.kernel is not None and not choice.kernel.capture_safe:
            return f"{choice.kernel.name}{where} cannot be captured"
    return ""


def why_not_captured_together(plan: Plan, options: RunnerOptions) -> str:
    """In words, why a step, its sampling and the drafts of the draft layer cannot be one capture; empty when they can
    be.
    """
    return next(filter(None, (why_not_captured(plan, options, part) for part in ("", "mtp", "sample"))), "")
