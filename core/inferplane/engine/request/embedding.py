"""Embeddings on the caller's side: what to ask for, and what to make of the vector that comes. Without torch.

An embedding is a request like any other, of one token that nobody reads: it is scheduled, cut into chunks, preempted,
cancelled and limited as they are. `pooling.py` gathers what its rows bring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inferplane.engine.request.params import SamplingParams
from inferplane.errors import GenerationError, UsageError


def embedding_params(pooling: str, timeout_s: float | None = None) -> SamplingParams:
    """What a request asks for whose embedding alone is wanted.

    Raises:
        UsageError: there is no such pooling.
    """
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling, timeout_s=timeout_s)


def finished(
    vector: Sequence[float] | None, dimensions: int | None = None, *, normalize: bool = True, error: str = ""
) -> list[float]:
    """A pooled vector as callers get it.

    Args:
        vector: as it was pooled; None when the request did not come to its end.
        dimensions: keep so many of its first entries; None: all.
        normalize: divide by its length, after that.
        error: why there is no vector.

    Raises:
        UsageError: it has fewer dimensions. GenerationError: there is none.
    """
    if vector is None:
        raise GenerationError(f"The embedding was not made: {error or 'the request was ended'}.")
    check_dimensions(dimensions, len(vector))
    kept = list(vector[:dimensions])
    length = math.sqrt(math.fsum(x * x for x in kept))
    return [x / length for x in kept] if normalize and length > 0 else kept


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Raise UsageError for a number of dimensions that a vector of `width` does not have."""
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= width):
        raise UsageError(f"dimensions = {dimensions!r}.", there_is=f"1 to {width}")
