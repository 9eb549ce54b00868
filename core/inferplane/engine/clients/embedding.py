"""Embeddings on the caller's side: the parameters of the request, and the vector that it returns. Without torch.

An embedding is a request like any other, of one token that is not used: it is scheduled, split into chunks, preempted,
cancelled and limited as they are. `loop/choose_tokens.py` pools the hidden states of its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inferplane.engine.request.params import SamplingParams
from inferplane.errors import GenerationError, UsageError


def embedding_params(pooling: str, timeout_s: float | None = None) -> SamplingParams:
    """The parameters of a request of which only the embedding is used: one greedy token, which is thrown away, and
    `pooling`.

    Raises:
        UsageError: there is no such pooling.
    """
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling, timeout_s=timeout_s)


def finish_embedding(
    vector: Sequence[float] | None, dimensions: int | None = None, *, normalize: bool = True, error: str = ""
) -> list[float]:
    """Shorten and normalize a pooled vector for the caller; returns it as a new list.

    Args:
        vector: the pooled vector; None when the request did not finish.
        dimensions: how many of its first entries to return; None: all.
        normalize: then divide it by its length, so that dot products are cosines; a zero vector stays.
        error: why there is no vector, for the message.

    Raises:
        UsageError: it has fewer dimensions. GenerationError: there is none.
    """
    if vector is None:
        raise GenerationError(f"The embedding was not made: {error or 'the request was ended'}.")
    check_dimensions(dimensions, len(vector))
    shortened = list(vector[:dimensions])
    length = math.sqrt(math.fsum(x * x for x in shortened))
    return [x / length for x in shortened] if normalize and length > 0 else shortened


def check_dimensions(dimensions: int | None, width: int) -> None:
    """Raise UsageError for a number of dimensions that a vector of `width` does not have."""
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= width):
        raise UsageError(f"dimensions = {dimensions!r}.", there_is=f"1 to {width}")
