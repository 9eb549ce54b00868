"""Decode steps recorded once and replayed: batches are padded to a bucket's size and copied into its tensors.

A device that records steps (`Backend.capture`) launches a whole step at the cost of one call. What is recorded reads
lengths, slots and block tables from device tensors, not from Python: one record serves every batch that fits.
Sequences that are missing bring padded rows (slot -1, length 0), which all kernels ignore. Steps whose sequences bring
different numbers of tokens, and steps with prompts, run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from inferplane.binding import Plan
from inferplane.engine.options import RunnerOptions
from inferplane.types import Backend, Batch, KVCache
from inferplane.types.batch import FEW_TOKENS

Step = Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
"""`(batch) -> (logits, hidden)` of the bound model over its cache."""


class Size(NamedTuple):
    """Of a bucket: sequences, and query tokens that each of them brings."""

    sequences: int
    tokens: int


def bucket_size(sequences: int, max_batch: int) -> int:
    """The smallest recorded number of sequences that holds `sequences`: powers of two to 8, then multiples of 8."""
    size = -(-sequences // 8) * 8 if sequences > 4 else 1 << (sequences - 1).bit_length()
    return min(size, max_batch)


@dataclass(frozen=True)
class Bucket:
    """Tensors that a recorded step reads, and what replays it.

    Args:
        batch: the tensors, as a batch of the bucket's size.
        recorded: what `Backend.capture` returned.
    """

    batch: Batch
    recorded: Any

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Results for the rows of `batch`, which the next replay does not overwrite."""
        fill(self.batch, batch)
        logits, hidden = self.recorded.replay()
        rows = slice(0, batch.tokens)
        wanted = logits[rows] if batch.logit_rows is None else logits.index_select(0, batch.logit_rows)
        return wanted.clone() if batch.logit_rows is None else wanted, hidden[rows].clone()


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


def fill(bucket: Batch, batch: Batch) -> None:
    """Copy a batch into a bucket's tensors; what it does not fill becomes padding. Nothing waits for the device."""
    rows, sequences = batch.tokens, batch.seq_lens.shape[0]
    for name, value in (("ids", 0), ("positions", 0), ("slots", -1)):
        target = getattr(bucket, name)
        target[:rows].copy_(getattr(batch, name), non_blocking=True)
        target[rows:].fill_(value)
    bucket.seq_lens[:sequences].copy_(batch.seq_lens, non_blocking=True)
    bucket.seq_lens[sequences:].zero_()
    bucket.block_tables[:sequences, : batch.block_tables.shape[1]].copy_(batch.block_tables, non_blocking=True)


class DecodeSteps:
    """Runs decode steps, by replaying a record where there is one or one can be made.

    Args:
        backend: records steps, or does not.
        step: the bound model.
        cache: its cache.
        max_model_len: tokens of the longest sequence.
        max_batch: most sequences of a recorded step.
        off: why nothing is to be recorded, in words; empty to record.

    Attributes: `off`; `replayed` and `eager`, how many steps ran in which way.
    """

    def __init__(
        self, backend: Backend, step: Step, cache: KVCache, max_model_len: int, max_batch: int, off: str = ""
    ) -> None:
        self.backend, self.step, self.max_batch = backend, step, max_batch
        self.block_tokens = cache.block_tokens
        self.width = math.ceil(max_model_len / cache.block_tokens)
        self.buckets: dict[Size, Bucket] = {}
        self.off = off
        self.replayed = self.eager = 0

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the rows that want them, and hidden states `[T, D]`."""
        bucket = self.bucket(batch)
        if bucket is None:
            self.eager += 1
            return self.step(batch)
        self.replayed += 1
        return bucket.run(batch)

    def bucket(self, batch: Batch) -> Bucket | None:
        """The bucket that serves a batch, recorded if it is new; None when it runs as it is."""
        size = self.size_for(batch)
        if size is None or self.off:
            return None
        found = self.buckets.get(size)
        if found is None:
            static = blank(size, self.width, self.block_tokens, self.backend.torch_device_indexed)
            fill(static, batch)  # the recorder may run the step first: on what it is for, where that does no harm
            try:
                recorded = self.backend.capture(self.step, static)
            except Exception as error:
                recorded = None
                self.off = f"recording a step of {size.sequences} sequences failed: {type(error).__name__}: {error}"
            if recorded is None:
                self.off = self.off or "the device records no steps"
                return None
            found = self.buckets[size] = Bucket(static, recorded)
        return found

    def size_for(self, batch: Batch) -> Size | None:
        """The bucket's size for a batch; None when its sequences bring different numbers of tokens, or too many."""
        sequences, tokens = batch.seq_lens.shape[0], batch.max_query_tokens
        even = batch.tokens == sequences * tokens
        fits = sequences <= self.max_batch and tokens <= FEW_TOKENS and batch.block_tables.shape[1] <= self.width
        return (
            Size(bucket_size(sequences, self.max_batch), tokens) if even and fits and batch.kind == "decode" else None
        )


def why_not(plan: Plan, options: RunnerOptions) -> str:
    """In words, why a plan's decode steps are not recorded; empty when they can be."""
    if not options.capture:
        return "capture=False"
    if options.ranks > 1:
        return "several ranks share the model: they would have to record each step together"
    for _kind, site, op, choice in plan.distinct():
        if _kind != "decode" or site.partition(".")[0] in ("mtp", "sample"):
            continue
        if choice.kernel is None and not choice.children and choice.op != "all_reduce":
            return f"{op.name} at {site} runs on its reference"
        if choice.kernel is not None and not choice.kernel.capture_safe:
            return f"{choice.kernel.name} at {site} cannot be recorded"
    return ""
