"""From logits to token ids.

Probabilities are summed as integers. A sum of floats depends on the order in which a device adds, and that on how many
rows there are; a sum of integers does not, so that a row's token and its distribution are functions of the row alone,
to the last bit, in any batch and on any device that computes `exp` element by element. Tokens less probable than 2^-40
of the likeliest one have weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from inferplane.ops.draw import Draw
from inferplane.ops.op import Comparison, Cost, Op, Sample, Workload
from inferplane.types import HOST

WEIGHT_BITS = 40
"""The likeliest token's weight is 2^40: above float32's precision, and 2^22 of them can be added in 63 bits."""
UNIFORM_BITS = 24
"""Bits of a random number, those of a float32 in [0, 1)."""
ID_BITS = 32
NAN_FIRST = 0x7FFFFF
"""Added to falling bits, it takes those of negative NaN, which come last, past the end to the front."""
CHUNK_TOKENS, FEWEST_CHUNKS = 64, 64
"""On the host, vocabularies of at least so many chunks are looked through by the chunks' maxima first."""


def token_weights(logits: torch.Tensor, temperature: torch.Tensor | None = None) -> torch.Tensor:
    """Probabilities up to a factor, as integers: int64 `[R, V]`, the likeliest token's being 2^40.

    Args:
        logits: float32 `[R, V]`.
        temperature: float32 `[R]`, above 0; None for 1.
    """
    below = logits.float() - logits.amax(-1, keepdim=True).float()
    if temperature is not None:
        below /= temperature[:, None]
    return below.exp_().mul_(2.0**WEIGHT_BITS).to(torch.int64)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of each row in falling order, the lowest ids first and kept among equals.

    torch's own topk takes any of several equals, another one for another `count`; and its sort needs 25 ms for 150,000
    logits on a processor. Here a logit and its id are one integer, so that none are equal and numpy sorts them in 1 ms.

    Args:
        logits: float32 `[R, V]`. NaN count as the largest.
        count: K, at most V.

    Returns:
        Logits float32 and ids int64, `[R, K]` each.
    """
    vocab = logits.shape[-1]
    if count == vocab and logits.device.type != HOST:
        ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
        return ordered, ids
    if logits.device.type == HOST and 0 < count < vocab and vocab >= FEWEST_CHUNKS * CHUNK_TOKENS:
        return _likeliest_on_host(logits, count)
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: one zero
    falling = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).bitwise_not_()  # negative floats fall as their bits rise
    falling += NAN_FIRST
    keys = falling.long().bitwise_left_shift_(ID_BITS).bitwise_or_(torch.arange(vocab, device=logits.device))
    if count == vocab:
        keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1))
    else:
        keys = keys.topk(count, dim=-1, largest=False).values
    ids = keys.bitwise_and_(2**ID_BITS - 1)
    return logits.gather(1, ids), ids


def _likeliest_on_host(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `likeliest`. The `count` largest of the chunks' maxima bound what can be among the largest of all."""
    chunks = logits[:, : logits.shape[-1] // CHUNK_TOKENS * CHUNK_TOKENS].unflatten(-1, (-1, CHUNK_TOKENS)).amax(-1)
    bounds = chunks.topk(count, dim=-1).values[:, -1].tolist() if count <= chunks.shape[-1] else [-np.inf] * len(logits)
    kept = np.empty((len(logits), count), np.int64)
    for row, bound, ids in zip(logits.numpy(), bounds, kept):
        some = np.flatnonzero(row >= bound)
        ids[:] = some[np.argsort(-row[some], kind="stable")[:count]]
    found = torch.from_numpy(kept)
    return logits.gather(1, found), found


def cut(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set the weights of tokens to 0 that top-k, then top-p, then min-p remove; the first token always stays.

    Args:
        weights: int64 `[R, V]` as `token_weights` gives them, descending.
        top_k: int64 `[R]`, 0 for all.
        top_p: float32 `[R]`.
        min_p: float32 `[R]`.

    Returns:
        int64 `[R, V]`.
    """
    place = torch.arange(weights.shape[-1], device=weights.device)[None]
    kept = torch.where((top_k[:, None] <= 0) | (place < top_k[:, None]), weights, 0)
    upto = kept.cumsum(-1)
    total = upto[:, -1:]
    reach = torch.where(top_p[:, None] >= 1, total, (total.float() * top_p[:, None]).to(torch.int64))
    keep = (upto - kept < reach) & (kept.float() >= min_p[:, None] * 2.0**WEIGHT_BITS)
    keep[:, 0] = True
    return torch.where(keep, kept, 0)


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first place at which the share of the cumulated weights exceeds `uniform`: int64 `[R]`.

    Args:
        weights: int64 `[R, V]`, not negative, with a sum between 1 and 2^62 in each row.
        uniform: float32 `[R]` in [0, 1), taken as a multiple of 2^-24.
    """
    upto = weights.cumsum(-1)
    total = upto[:, -1]
    times = (uniform * 2.0**UNIFORM_BITS).to(torch.int64).clamp(max=2**UNIFORM_BITS - 1)
    high, low = total >> UNIFORM_BITS, total & (2**UNIFORM_BITS - 1)
    share = times * high + ((times * low) >> UNIFORM_BITS)  # floor(uniform * total), without overflow
    return torch.searchsorted(upto, share[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def kept_weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights that are left after the cuts, and the token ids they belong to.

    Args:
        logits: float32 `[R, V]`.
        temperature: float32 `[R]`, above 0.
        top_k: int64 `[R]`, 0 for all; None with the next two when no row is cut.
        top_p: float32 `[R]`.
        min_p: float32 `[R]`.

    Returns:
        int64 `[R, V]` twice: weights, 0 for tokens that are cut, and ids, by falling logit and then by id; None for ids
        in their own order.
    """
    if top_k is None or top_p is None or min_p is None:
        return token_weights(logits, temperature), None
    ordered, ids = likeliest(logits.float(), logits.shape[-1])
    return cut(token_weights(ordered, temperature), top_k, top_p, min_p), ids


class SampleTokens(Op, name="sample"):
    """Draw one token a row: temperature, then top-k, then top-p, then min-p, by inverting the cumulative distribution.

    With temperature 0 the row's largest logit wins (the lowest id among equals). Otherwise tokens are ordered by
    probability; the first `top_k` stay; of these the shortest head whose probability reaches `top_p`; of these the
    tokens with at least `min_p` of the largest probability; and the first whose share of the cumulated sum exceeds
    `uniform` is taken. Given `uniform`, the result is a function of the row alone, whatever the batch. A row that holds
    NaN, or whose largest logit is infinite, gets the token that shows it.

    What no row needs may be None, and costs nothing then. Without cuts there is no need to sort: tokens stand in the
    order of their ids, and the token that a `uniform` selects is another one, with the same probability.

    Args of the call:
        logits: float32 `[R, V]`. temperature: float32 `[R]`. top_k: int64 `[R]`, 0 for all. top_p: float32 `[R]`.
        min_p: float32 `[R]`. uniform: float32 `[R]` in [0, 1). top_k, top_p and min_p are None together, when no row is
        cut; uniform is None when all rows have temperature 0.

    Returns:
        ids int64 `[R]`.

    Source: top-k, arXiv 1805.04833; nucleus, arXiv 1904.09751; min-p, arXiv 2407.01082.
    """

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
        weights, ids = kept_weights(logits, temperature.masked_fill(greedy, 1.0), top_k, top_p, min_p)
        chosen = invert(weights, uniform)
        return torch.where(greedy, best, chosen if ids is None else ids.gather(1, chosen[:, None])[:, 0])

    def cost(self, load: Workload) -> Cost:
        """Not counted: small beside the head."""
        return Cost()

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """The share of rows with another token."""
        if tuple(got.shape) != tuple(want.shape):
            return Comparison(float("inf"), f"shape {tuple(got.shape)}")
        return Comparison((got.long() != want.long()).float().mean().item(), "share of rows that differ")

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Greedy rows; all cuts together; rows with NaN and infinity."""

        def inputs(rows: int, greedy: bool) -> Any:
            def draw_inputs(d: Draw) -> tuple[Any, ...]:
                logits = d.normal(rows, 200, scale=3.0, dtype=torch.float32)
                if greedy:
                    zero = d.uniform(rows) * 0
                    return logits, zero, zero.long(), zero + 1, zero, d.uniform(rows)
                heat, cut = d.uniform(rows, low=0.3, high=1.5), d.ints(rows, below=20)
                return logits, heat, cut, d.uniform(rows, low=0.2), d.uniform(rows, high=0.1), d.uniform(rows)

            return draw_inputs

        def broken_inputs(d: Draw) -> tuple[Any, ...]:
            logits, *asked = inputs(4, False)(d)
            logits[0, 7], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
            return logits, *asked

        op = SampleTokens()
        return [
            Sample("greedy", op, inputs(3, True), "decode"),
            Sample("cuts", op, inputs(32, False), "decode"),
            Sample("broken", op, broken_inputs, "decode"),
        ]
