"""Decode steps recorded once and replayed: batches are padded to a bucket's size and copied into its tensors.

A device that records steps (`Backend.capture`) launches a whole step at the cost of one call. What is recorded reads
lengths, slots and block tables from device tensors, not from Python: one record serves every batch that fits.
Sequences that are missing bring padded rows (slot -1, length 0), which all kernels ignore; sequences that bring fewer
tokens than others, as drafts do that are verified, have padded rows before their own. Layers that draft are recorded in
the same way. Steps with prompts run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.binding import Plan
from inferplane.engine.runner.buckets import Buckets, Size
from inferplane.engine.runner.options import RunnerOptions
from inferplane.types import Backend, Batch, KVCache

Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(batch, *rows) -> (logits, hidden)` of the bound model, or of a layer that drafts, over its cache."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that a recorded step reads, and what replays it.

    Args:
        batch: the tensors, as a batch of the bucket's size.
        rows: what else it reads, a row for each of the batch's.
        recorded: what `Backend.capture` returned.
    """

    batch: Batch
    rows: tuple[torch.Tensor, ...]
    recorded: Any

    def run(
        self, batch: Batch, rows: tuple[torch.Tensor, ...], at: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Results for the rows of `batch`, which the next replay does not overwrite; `at` are their places."""
        fill(self.batch, batch, at, list(zip(self.rows, rows)))
        logits, hidden = self.recorded.replay()
        if at is not None:
            wanted = at if batch.logit_rows is None else at.index_select(0, batch.logit_rows)
            return logits.index_select(0, wanted), hidden.index_select(0, at)
        first = slice(0, batch.tokens)
        if batch.logit_rows is None:
            return logits[first].clone(), hidden[first].clone()
        return logits.index_select(0, batch.logit_rows), hidden[first].clone()


def blank(size: Size, width: int, block_tokens: int, device: str) -> Batch:
    """A batch of nothing but padding.

    Args:
        size: of the bucket.
        width: blocks of the longest sequence.
        block_tokens: tokens a block.
        device: where the tensors live.
    """
    rows = size.sequences * size.tokens

    def full(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=device)

    starts = torch.arange(size.sequences + 1, dtype=torch.int32, device=device) * size.tokens
    return Batch(
        ids=full(rows, 0),
        positions=full(rows, 0),
        slots=full(rows, -1),
        query_start=starts,
        seq_lens=torch.zeros(size.sequences, dtype=torch.int32, device=device),
        block_tables=torch.zeros(size.sequences, width, dtype=torch.int32, device=device),
        logit_rows=None,
        kind="decode",
        max_query_tokens=size.tokens,
        max_seq_tokens=width * block_tokens,
    )


def fill(
    bucket: Batch,
    batch: Batch,
    at: torch.Tensor | None = None,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
) -> None:
    """Copy a batch into a bucket's tensors; what it does not fill becomes padding. Nothing waits for the device.

    Args:
        bucket: the tensors.
        batch: what they are to hold.
        at: int64 `[T]`, places of the batch's rows among the bucket's; None: the first ones.
        rows: further tensors, each with what it is to hold of the batch's rows.
    """
    sequences = batch.seq_lens.shape[0]
    of_batch = [(getattr(bucket, name), getattr(batch, name), empty) for name, empty in EMPTY.items()]
    for target, source, empty in (*of_batch, *((*pair, 0) for pair in rows)):
        if at is None:
            target[: batch.tokens].copy_(source, non_blocking=True)
            target[batch.tokens :].fill_(empty)
        else:
            target.fill_(empty).index_copy_(0, at, source)
    bucket.seq_lens[:sequences].copy_(batch.seq_lens, non_blocking=True)
    bucket.seq_lens[sequences:].zero_()
    bucket.block_tables[:sequences, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)


EMPTY = {"ids": 0, "positions": 0, "slots": -1}
"""What a padded row holds of each tensor."""


def places(batch: Batch, tokens: int) -> torch.Tensor | None:
    """Where a batch's rows stand in a bucket whose sequences bring `tokens` each: the last of their sequence, since a
    row's place in its sequence is counted from the end. int64 `[T]`; None where that is one after another.
    """
    if batch.tokens == batch.seq_lens.shape[0] * tokens:
        return None
    starts = batch.lens().query_start
    ends = [((i + 1) * tokens, starts[i + 1] - starts[i]) for i in range(len(starts) - 1)]
    rows = [row for end, count in ends for row in range(end - count, end)]
    return torch.tensor(rows, dtype=torch.int64).to(batch.ids.device, non_blocking=True)


class DecodeSteps:
    """Runs decode steps, by replaying a record where there is one or one can be made.

    Args:
        backend: records steps, or does not.
        step: the bound model.
        cache: its cache.
        max_model_len: tokens of the longest sequence.
        sizes: what is recorded.
        off: why nothing is to be recorded, in words; empty to record.

    Attributes: `off`; `replayed` and `eager`, how many steps ran in which way.
    """

    def __init__(
        self, backend: Backend, step: Step, cache: KVCache, max_model_len: int, sizes: Buckets, off: str = ""
    ) -> None:
        self.backend, self.step, self.sizes = backend, step, sizes
        self.block_tokens = cache.block_tokens
        self.width = math.ceil(max_model_len / cache.block_tokens)
        self.buckets: dict[Size, Bucket] = {}
        self.off = off
        self.replayed = self.eager = 0

    def __call__(self, batch: Batch, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows that want them, and hidden states `[T, D]`.

        Args:
            batch: the step.
            rows: what else the step takes, a row for each of the batch's.
        """
        size = self.size_for(batch)
        at = None if size is None or self.off else places(batch, size.tokens)
        bucket = None if size is None or self.off else self.bucket(size, batch, rows, at)
        if bucket is None:
            self.eager += 1
            return self.step(batch, *rows)
        self.replayed += 1
        return bucket.run(batch, rows, at)

    def bucket(
        self, size: Size, batch: Batch, rows: tuple[torch.Tensor, ...], at: torch.Tensor | None
    ) -> Bucket | None:
        """The bucket of a size, recorded if it is new; None when that cannot be done."""
        found = self.buckets.get(size)
        if found is None:
            static = blank(size, self.width, self.block_tokens, self.backend.torch_device_indexed)
            more = tuple(r.new_zeros(size.sequences * size.tokens, *r.shape[1:]) for r in rows)
            # The recorder may run the step first: on what it is for, where that does no harm.
            fill(static, batch, at, list(zip(more, rows)))
            try:
                recorded = self.backend.capture(lambda b: self.step(b, *more), static)
            except Exception as error:
                recorded = None
                self.off = f"recording a step of {size.sequences} sequences failed: {type(error).__name__}: {error}"
            if recorded is None:
                self.off = self.off or "the device records no steps"
                return None
            found = self.buckets[size] = Bucket(static, more, recorded)
        return found

    def size_for(self, batch: Batch) -> Size | None:
        """The bucket's size for a batch; None when there is none, or not all of its sequences are as long as a bucket's
        query tokens, where these are padded.
        """
        if batch.kind != "decode" or batch.block_tables.shape[1] > self.width:
            return None
        size = self.sizes.holding(batch.seq_lens.shape[0], batch.max_query_tokens)
        if size is None or batch.tokens == batch.seq_lens.shape[0] * size.tokens:
            return size
        lens = batch.host_lens
        return size if lens is not None and min(lens.seq_lens) >= size.tokens else None


def why_not(plan: Plan, options: RunnerOptions, part: str = "") -> str:
    """In words, why a plan's decode steps, or those of a part ("mtp"), are not recorded; empty when they can be."""
    if not options.capture:
        return "capture=False"
    if options.ranks > 1:
        return "several ranks share the model: they would have to record each step together"
    variants = {site: choice.variant for site, _, choice in plan.sites("decode")}
    for _kind, site, op, choice in plan.distinct():
        head, (above, _, name) = site.partition(".")[0], site.rpartition(".")
        if _kind != "decode" or (head != part if part else head in plan.model.called_by_engine):
            continue
        if op.serves_many_queries and variants[above] != name:  # decode steps have no such sequences
            continue
        if choice.kernel is None and not choice.children and not op.body_capture_safe:
            return f"{op.name} at {site} runs on its reference"
        if choice.kernel is not None and not choice.kernel.capture_safe:
            return f"{choice.kernel.name} at {site} cannot be recorded"
    return ""


def why_not_together(plan: Plan, options: RunnerOptions) -> str:
    """In words, why a step and the drafts of the layer behind the model are not one record; empty when they can be."""
    return next(filter(None, (why_not(plan, options, part) for part in ("", "mtp", "sample"))), "")
