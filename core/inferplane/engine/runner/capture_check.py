"""A new capture is compared with the step that it captured, before any of its results is used.

A graph can be wrong where no kernel is: it may replay results of its capture, leave out the cache's writes, or have
read a length on the host. Each probe changes what a replay must read anew (ids; lengths, positions, slots and block
tables), runs the step eagerly on the bucket's tensors, then replays, and compares results and cache entries. The cache
and the bucket are as before afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from inferplane.ops.op import ACCUMULATED, relative_error
from inferplane.types import HOST, Batch, KVCache

Results = Sequence[torch.Tensor]
CHANGED = ("ids", "positions", "slots", "seq_lens", "block_tables")
"""Fields of a batch that probes change."""


def check_capture(
    step: Callable[[Batch], Results],
    replay: Callable[[], Results],
    bucket: Batch,
    cache: KVCache,
    sequences: int,
    more_blocks: Sequence[int] = (),
) -> str:
    """In words, how a capture's replays differ from its step; empty if they do not.

    The error that is accepted is four times that between two eager runs, and at least the tolerance of an op with long
    sums: kernels that add in any order never agree to the last bit. Integers agree unless those of eager runs do not.

    Args:
        step: what was captured.
        replay: launches the graph and returns its results, a row per row of the bucket or per sequence.
        bucket: the tensors that the graph reads, holding a real step.
        cache: what the step writes to.
        sequences: number of the bucket's sequences that are real; the rest is padding.
        more_blocks: numbers of the blocks that the step writes to besides those of its slots.
    """
    for what, changed in (
        ("ids", replace(bucket, ids=torch.where(bucket.ids > 0, bucket.ids - 1, 1))),
        ("lengths", _one_token_earlier(bucket, sequences, cache.block_tokens)),
    ):
        written = changed.slots[changed.slots >= 0] // cache.block_tokens
        blocks = torch.cat((written, written.new_tensor(more_blocks))).unique()
        with _holding(bucket, changed), _restored(cache, blocks) as restore:
            found = []
            for run in (lambda: step(replace(bucket)), lambda: step(replace(bucket)), replay):
                restore()
                found.append([*_real_rows(run(), bucket, sequences), *_entries(cache, blocks)])
        for i, (eager, again, replayed) in enumerate(zip(*found)):
            error, allowed = _error(replayed, eager), max(4 * _error(again, eager), ACCUMULATED.get(eager.dtype, 0.0))
            if not error <= allowed:
                name = f"result {i}" if i < len(found[0]) - len(_entries(cache, blocks)) else "an entry of the cache"
                return f"after other {what}, {name} differs from the step's by {error:.3g}, allowed {allowed:.3g}"
    return ""


def _one_token_earlier(batch: Batch, sequences: int, block_tokens: int) -> Batch:
    """The real sequences in reverse order, each shorter by a token, unless that would write to another block, which it
    may share, or leave fewer tokens than the bucket has rows per sequence."""
    count, width = batch.seq_lens.shape[0], batch.max_query_tokens
    order = torch.arange(count, device=batch.ids.device)
    order[:sequences] = order[:sequences].flip(0)
    lens, tables = batch.seq_lens[order], batch.block_tables[order]
    ids, positions, slots = (t.view(count, width)[order] for t in (batch.ids, batch.positions, batch.slots))
    first = lens - (slots >= 0).sum(1)
    shorter = ((lens > width) & (first % block_tokens > 0)).to(torch.int32)
    real = (slots >= 0).to(torch.int32) * shorter[:, None]
    return replace(
        batch,
        ids=ids.flatten(),
        positions=(positions - real).flatten(),
        slots=(slots - real).flatten(),  # within a block, the slot before holds the token before
        seq_lens=lens - shorter,
        block_tables=tables,
    )


@contextmanager
def _holding(bucket: Batch, changed: Batch) -> Iterator[None]:
    """Inside, the bucket's tensors hold what another batch has."""
    kept = {name: getattr(bucket, name).clone() for name in CHANGED}
    try:
        for name in CHANGED:
            getattr(bucket, name).copy_(getattr(changed, name))
        yield
    finally:
        for name, value in kept.items():
            getattr(bucket, name).copy_(value)


@contextmanager
def _restored(cache: KVCache, blocks: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Gives a function that puts back what these blocks held, and calls it at the end."""
    kept = [layer.export(blocks) for layer in cache.layers]

    def restore() -> None:
        for layer, values in zip(cache.layers, kept):
            layer.load(blocks, values)

    try:
        yield restore
    finally:
        restore()


def _real_rows(results: Results, bucket: Batch, sequences: int) -> list[torch.Tensor]:
    real = bucket.slots >= 0
    return [(t[real] if len(t) == len(real) else t[:sequences]).to(HOST, copy=True) for t in results]


def _entries(cache: KVCache, blocks: torch.Tensor) -> list[torch.Tensor]:
    """What each layer holds in these blocks."""
    tokens = len(blocks) * cache.block_tokens
    return [t.to(HOST, copy=True) for layer in cache.layers for t in layer.read(blocks.int(), tokens)]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """`relative_error`, in which what is not finite in both is equal: no sequence reads it."""
    unwritten = ~want.isfinite() & ~got.isfinite()
    return relative_error(got.masked_fill(unwritten, 0), want.masked_fill(unwritten, 0))
