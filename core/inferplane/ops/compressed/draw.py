"""Random steps over several caches of a layer, each in a block table of its own."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.ops.draw import Draw, Sequences
from inferplane.types import Batch, CachePart, KVRequest
from inferplane.types.batch import TableRows


def draw_caches(
    draw: Draw, requests: Sequence[tuple[KVRequest, bool]], sequences: Sequences
) -> tuple[Batch, list[CachePart]]:
    """A ragged step over several caches with history; each has a block table of its own, with other block numbers.

    Args:
        draw: source of numbers and caches.
        requests: of the caches, each with whether the query tokens' own entries are written too.
        sequences: of the step.
    """
    steps = [draw.step(request, sequences, written=written) for request, written in requests]
    first, *others = (batch for batch, _ in steps)
    parts = [CachePart(kv, number) for number, (_, kv) in enumerate(steps)]
    return first.with_tables([TableRows(batch.slots, batch.block_tables) for batch in others]), parts
