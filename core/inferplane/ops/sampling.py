"""From logits to token ids.

Probabilities are summed as integers. The sum of floats depends on the order of the additions, which depends on the
device and the number of rows. The sum of integers does not. So a row's token and its distribution depend on that row
alone, to the last bit, in any batch and on any device that computes `exp` element by element. A token whose probability
is less than 2^-40 of the largest one has weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inferplane.ops.draw import Draw
from inferplane.ops.op import Comparison, Op, Sample
from inferplane.types import HOST

WEIGHT_BITS = 40
"""The most probable token has weight 2^40: above float32's precision, and 2^22 such weights add up within 63 bits."""
UNIFORM_BITS = 24
"""Bits of a random number: a float32 in [0, 1) has as many."""
ID_BITS = 32
NAN_FIRST = 0x7FFFFF
"""Added to the reversed bits of a logit, it wraps those of a negative NaN from the end of the order to its start."""
CHUNK_TOKENS, MIN_CHUNKS = 64, 64
"""On the host, the chunks' maxima are searched first if the vocabulary has at least `MIN_CHUNKS` chunks."""


def token_weights(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """Return unnormalized probabilities as integers, int64 `[R, V]`; the most probable token has 2^40.

    Args:
        logits: float32 `[R, V]`.
        temperature: float32 `[R]`, above 0; None for 1.
    """
    below = logits.float() - logits.amax(-1, keepdim=True).float()
    if temperature is not None:
        below /= temperature[:, None]
    return below.exp_().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def stable_topk(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row in descending order; among equal logits, the lowest ids first.

    torch.topk breaks ties in no fixed order, and differently for another `count`; torch.sort needs 25 ms for 150,000
    logits on a CPU. Here a logit and its id form one integer, so no two keys are equal, and numpy sorts them in 1 ms.

    Args:
        logits: float32 `[R, V]`. NaN counts as the largest.
        count: K, at most V.

    Returns:
        Logits float32 and ids int64, `[R, K]` each.
    """
    vocab = logits.shape[-1]
    if count == vocab and logits.device.type != HOST:
        ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
        return ordered, ids
    if logits.device.type == HOST and 0 < count < vocab and vocab >= MIN_CHUNKS * CHUNK_TOKENS:
        return _stable_topk_on_host(logits, count)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: one zero
    descending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).bitwise_not_()  # a negative float decreases as its bits increase
    descending += NAN_FIRST
    keys = descending.long().bitwise_left_shift_(ID_BITS).bitwise_or_(torch.arange(vocab, device=logits.device))
    if count == vocab:
        keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1))
    else:
        keys = keys.topk(count, dim=-1, largest=False).values
    ids = keys.bitwise_and_(2**ID_BITS - 1)
    return logits.gather(1, ids), ids


def _stable_topk_on_host(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`stable_topk` on the host. The `count`-th largest maximum of a chunk is a lower bound for the result."""
    chunks = logits[:, : logits.shape[-1] // CHUNK_TOKENS * CHUNK_TOKENS].unflatten(-1, (-1, CHUNK_TOKENS)).amax(-1)
    bounds = chunks.topk(count, dim=-1).values[:, -1].tolist() if count <= chunks.shape[-1] else [-np.inf] * len(logits)
    top = np.empty((len(logits), count), np.int64)
    for row, bound, ids in zip(logits.numpy(), bounds, top):
        candidates = np.flatnonzero(row >= bound)
        ids[:] = candidates[np.argsort(-row[candidates], kind="stable")[:count]]
    found = torch.from_numpy(top)
    return logits.gather(1, found), found


def filter_weights(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Apply top-k, then top-p, then min-p: removed tokens get weight 0. The first token always stays.

    Args:
        weights: int64 `[R, V]` from `token_weights`, descending.
        top_k: int64 `[R]`, 0 for all.
        top_p: float32 `[R]`.
        min_p: float32 `[R]`.

    Returns:
        int64 `[R, V]`.
    """
    order = torch.arange(weights.shape[-1], device=weights.device)[None]
    weights = torch.where((top_k[:, None] <= 0) | (order < top_k[:, None]), weights, 0)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    nucleus = torch.where(top_p[:, None] >= 1, total, (total.float() * top_p[:, None]).to(torch.int64))
    stays = (cumulative - weights < nucleus) & (weights.float() >= min_p[:, None] * 2.0**WEIGHT_BITS)
    stays[:, 0] = True
    return torch.where(stays, weights, 0)


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the first index at which the normalized cumulative weight exceeds `uniform`, int64 `[R]`.

    Args:
        weights: int64 `[R, V]`, not negative, with a sum between 1 and 2^62 in each row.
        uniform: float32 `[R]` in [0, 1), taken as a multiple of 2^-24.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    times = (uniform * 2.0**UNIFORM_BITS).to(torch.int64).clamp(max=2**UNIFORM_BITS - 1)
    high, low = total >> UNIFORM_BITS, total & (2**UNIFORM_BITS - 1)
    share = times * high + ((times * low) >> UNIFORM_BITS)  # floor(uniform * total), without overflow
    return torch.searchsorted(cumulative, share[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def compute_filtered_weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights after top-k, top-p and min-p, and the token ids that they belong to.

    Args:
        logits: float32 `[R, V]`.
        temperature: float32 `[R]`, above 0.
        top_k: int64 `[R]`, 0 for all; None, as top_p and min_p then are, if no row has such a limit.
        top_p: float32 `[R]`.
        min_p: float32 `[R]`.

    Returns:
        int64 `[R, V]` twice: weights, 0 for removed tokens; and ids, by descending logit, then by id; ids are None if
        the weights are in the order of the ids.
    """
    if top_k is None or top_p is None or min_p is None:
        return token_weights(logits, temperature), None
    ordered, ids = stable_topk(logits.float(), logits.shape[-1])
    return filter_weights(token_weights(ordered, temperature), top_k, top_p, min_p), ids


class SampleTokens(Op, name="sample"):
    """Draw one token per row: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution.

    With temperature 0 the result is the largest logit (among equals, the lowest id). Otherwise tokens are ordered by
    descending probability. Top-k keeps the first `top_k` tokens, top-p the shortest prefix of them whose probability
    reaches `top_p`, min-p those with at least `min_p` of the largest probability. The result is the first token whose
    normalized cumulative weight exceeds `uniform`. It depends on the row and its `uniform`, not on other rows. A row
    that contains NaN, or whose largest logit is infinite, gets the token of that logit.

    An argument that no row needs may be None, and then costs nothing. Without top-k, top-p and min-p nothing is sorted:
    tokens are in the order of their ids, so a `uniform` selects another token, with the same distribution.
    The cost is not counted: it is small beside the output head.

    Args of the call:
        logits: float32 `[R, V]`. temperature: float32 `[R]`. top_k: int64 `[R]`, 0 for all. top_p: float32 `[R]`.
        min_p: float32 `[R]`. uniform: float32 `[R]` in [0, 1). top_k, top_p and min_p are None together, if no row
        has a limit; uniform is None if all rows have temperature 0.

    Returns:
        ids int64 `[R]`.

    Source: top-k, arXiv 1805.04833; nucleus, arXiv 1904.09751; min-p, arXiv 2407.01082.
    """

    compares_entries = False
    tolerance = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
        uniform: torch.Tensor | None,
    ) -> torch.Tensor:
        best = logits.argmax(-1)
        if uniform is None:
            return best
        greedy = (temperature <= 0) | ~logits.gather(1, best[:, None])[:, 0].isfinite()
        weights, ids = compute_filtered_weights(logits, temperature.masked_fill(greedy, 1.0), top_k, top_p, min_p)
        chosen = invert(weights, uniform)
        return torch.where(greedy, best, chosen if ids is None else ids.gather(1, chosen[:, None])[:, 0])

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """The share of rows that get another token."""
        if tuple(got.shape) != tuple(want.shape):
            return Comparison(float("inf"), f"shape {tuple(got.shape)}")
        return Comparison((got.long() != want.long()).float().mean().item(), "share of rows that differ")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Greedy rows; top-k, top-p and min-p together; rows with NaN and infinity."""

        def inputs(rows: int, greedy: bool) -> Any:
            def draw_inputs(d: Draw) -> tuple[Any, ...]:
                logits = d.normal(rows, 200, scale=3.0, dtype=torch.float32)
                if greedy:
                    zero = d.uniform(rows) * 0
                    return logits, zero, zero.long(), zero + 1, zero, d.uniform(rows)
                temperature, top_k = d.uniform(rows, low=0.3, high=1.5), d.ints(rows, below=20)
                return logits, temperature, top_k, d.uniform(rows, low=0.2), d.uniform(rows, high=0.1), d.uniform(rows)

            return draw_inputs

        def broken_inputs(d: Draw) -> tuple[Any, ...]:
            logits, *settings = inputs(4, False)(d)
            logits[0, 7], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
            return logits, *settings

        op = SampleTokens()
        return [
            Sample("greedy", op, inputs(3, True), "decode"),
            Sample("cuts", op, inputs(32, False), "decode"),
            Sample("broken", op, broken_inputs, "decode"),
        ]
