"""Sampling from large vocabularies, one row at a time in a core's cache, and without sorting a row.

The native kernel draws the op's tokens save where the last bit of an exponential decides; the other one, the very same,
where there is no native library. Weights are integers, so that sums do not depend on their order, and a token is found
by sums of blocks: which block holds the share that `uniform` points to, then which token in that block. Where tokens
count by falling probability, blocks are intervals of logits, and only the members of the blocks that matter are sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from inferplane.kernels.composed import basic
from inferplane.plugin import RANK_PORTABLE, RANK_TUNED, Kernels, When
from inferplane_cpu.native import Sampling, library

KERNELS = Kernels()
MIN_TOKENS = 8192
"""Vocabularies below this are worked on many rows at once, by the op's body."""
BLOCK_TOKENS = 256
MAX_LISTED = 1024
"""Rows with a top_k up to this are reduced to their likeliest tokens before anything is weighed."""
WEIGHT_BITS, UNIFORM_BITS = 40, 24
INTERVAL_BITS = 16
"""Upper bits of a float32 that name its interval: 128 of them between a power of two and the next."""
SLACK, ROUNDING = 0.01, 2.0**-20
"""What a bound on logits and the share that top-p leaves out are lowered by, far more than rounding can take."""


def set_likeliest(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Keep the likeliest token of each row, int64 `[R]`, on the logits `[R, V]`: it was found while they were made.

    It goes with this very tensor, which nobody may change in place, nor the tokens. A part, a clone, and what is made
    of them have none.
    """
    logits.__dict__["likeliest"] = tokens


def likeliest_of(logits: torch.Tensor) -> torch.Tensor | None:
    """What `set_likeliest` kept; None where nothing was."""
    return logits.__dict__.get("likeliest")


@KERNELS(
    "sample",
    "native",
    when=When((torch.float32, torch.bfloat16, torch.float16), features=("native",)),
    rank=RANK_TUNED,
    batch_invariant=True,
)
def sample_native(
    view: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """Rows shared among threads, logits read in the dtype they come in."""
    if uniform is None and (found := likeliest_of(logits)) is not None:
        return found
    if logits.dtype is torch.float16:
        logits = logits.float()
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    given = (temperature, top_p, min_p, uniform, top_k)
    kept = [None if x is None else x.contiguous() for x in given]  # until the call is over
    rows, vocab = logits.shape
    pointers = [None if x is None else x.data_ptr() for x in kept]
    asked = Sampling(logits.data_ptr(), logits.dtype is torch.bfloat16, logits.stride(0), rows, vocab, *pointers)
    tokens = torch.empty(rows, dtype=torch.int64)
    library().ip_sample(asked, tokens.data_ptr())
    return tokens


class Scratch:
    """Memory for one row, kept from step to step: new megabytes for each row cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self.resize(0)

    def resize(self, tokens: int) -> None:
        """Make it fit rows of `tokens` logits."""
        self.tokens = tokens
        self.below, self.shares = torch.empty(tokens), torch.empty(tokens)
        self.weights, self.interval = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        self.sums, self.upto = (torch.empty(2**INTERVAL_BITS, dtype=torch.int64) for _ in range(2))

    def weigh(self, row: torch.Tensor, temperature: torch.Tensor) -> None:
        """Fill `below` with distances to the largest logit over the temperature, and `weights` as the op's body does.

        Args:
            row: float32 `[V]`.
            temperature: float32 `[]`.
        """
        torch.add(row, 0.0 - row.amax(), out=self.below)  # and 0 has one sign
        self.below.div_(temperature)
        torch.exp(self.below, out=self.shares).mul_(2.0**WEIGHT_BITS)
        np.copyto(self.weights, self.shares.numpy(), casting="unsafe")


@KERNELS(
    "sample",
    "cpu",
    when=When((torch.float32, torch.bfloat16, torch.float16)),
    rank=RANK_PORTABLE,
    batch_invariant=True,
    prepare=lambda op, ctx: Scratch(),
)
def sample(
    view: Any,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    uniform: torch.Tensor | None,
) -> torch.Tensor:
    """The op's very tokens, by sums of blocks."""
    if uniform is None:
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    if logits.shape[-1] < MIN_TOKENS:
        return basic.sample(view, logits, temperature, top_k, top_p, min_p, uniform)
    cuts: list[Cuts] | None = None
    if top_k is not None and top_p is not None and min_p is not None:
        cuts = [Cuts(*each) for each in zip(top_k.tolist(), top_p.numpy(), min_p.numpy())]
    tokens = []
    scratch: Scratch = view.prepared
    if scratch.tokens != logits.shape[-1]:
        scratch.resize(logits.shape[-1])
    for i, (row, degrees, u) in enumerate(zip(logits.float(), temperature.tolist(), uniform.tolist())):
        best = int(row.numpy().argmax())
        if degrees <= 0 or not math.isfinite(row[best]):
            tokens.append(best)
            continue
        if cuts is not None and 0 < cuts[i].top_k <= MAX_LISTED:
            tokens.append(_of_few(view, row, i, cuts[i].top_k, (temperature, top_k, top_p, min_p, uniform)))
            continue
        scratch.weigh(row, temperature[i])
        if cuts is None:
            tokens.append(_by_id(scratch.weights, u))
        else:
            tokens.append(_by_rank(row.numpy(), scratch, cuts[i], u))
    return torch.tensor(tokens)


def _of_few(view: Any, row: torch.Tensor, at: int, count: int, asked: tuple[Any, ...]) -> int:
    """The token of a row that keeps `count` tokens, by the op's body."""
    logits, ids = basic.likeliest(row[None], count)
    return int(ids[0, basic.sample(view, logits, *(x[at : at + 1] for x in asked))])


def _share(total: int, uniform: float) -> int:
    """floor(uniform * total)."""
    return (min(int(uniform * 2**UNIFORM_BITS), 2**UNIFORM_BITS - 1) * total) >> UNIFORM_BITS


def _by_id(weights: np.ndarray, uniform: float) -> int:
    """The token at a share of all weights, in the order of ids."""
    upto = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK_TOKENS)).cumsum()
    share = _share(int(upto[-1]), uniform)
    block = int(upto.searchsorted(share, side="right"))
    first = block * BLOCK_TOKENS
    before = int(upto[block - 1]) if block else 0
    return first + int(weights[first : first + BLOCK_TOKENS].cumsum().searchsorted(share - before, side="right"))


@dataclass(frozen=True)
class Cuts:
    """What a row keeps, as the op says it; `top_p` and `min_p` are float32, in which the op compares."""

    top_k: int
    top_p: np.float32
    min_p: np.float32

    def lowest(self, total: int, tokens: int) -> float:
        """A bound that every kept token's `below` exceeds; -inf where there is none.

        Tokens of at most a weight w have together at most `tokens * w`: those that top-p needs are heavier than the
        w with which this is all that it may leave out.
        """
        if self.top_k > 0:
            return -math.inf
        left_out = 1 - float(self.top_p) - ROUNDING
        heaviest_left = max(left_out * total / tokens / 2**WEIGHT_BITS, float(self.min_p))
        return math.log(heaviest_left) - SLACK if 0 < heaviest_left < 1 else -math.inf


def _by_rank(logits: np.ndarray, scratch: Scratch, cuts: Cuts, uniform: float) -> int:
    """The token at a share of what the cuts leave, by falling logit and then by id.

    Args:
        logits: float32 `[V]`.
        scratch: weighed them.
        cuts: what is left.
        uniform: in [0, 1).
    """
    below, weights = scratch.below.numpy(), scratch.weights
    total = int(weights.sum())
    likely = below >= cuts.lowest(total, len(below))
    if 4 * np.count_nonzero(likely) > len(below):
        return _Falling(logits, below, weights, scratch).draw(cuts, total, uniform)
    ids = np.flatnonzero(likely)
    return int(ids[_Falling(logits[ids], below[ids], weights[ids], scratch).draw(cuts, total, uniform)])


class _Falling:
    """Tokens by falling logit and then by id, known by intervals of `below`.

    Rounding keeps the order, so tokens of one logit share an interval, and no larger one is in a later interval.

    Args:
        logits: float32 `[N]`.
        below: float32 `[N]`, their distance to the largest of all, divided by the temperature.
        weights: int64 `[N]`.
        scratch: memory for intervals and their sums.
    """

    def __init__(self, logits: np.ndarray, below: np.ndarray, weights: np.ndarray, scratch: Scratch) -> None:
        self._logits, self._weights, self._interval = logits, weights, scratch.interval[: len(logits)]
        # `below` is +0 or negative, and the bits of negative floats rise as the floats fall.
        np.right_shift(below.view(np.uint32), np.uint32(32 - INTERVAL_BITS), out=self._interval)
        sums = scratch.sums.zero_().scatter_add_(0, torch.from_numpy(self._interval), torch.from_numpy(weights))
        self._upto = torch.cumsum(sums, 0, out=scratch.upto).numpy()

    def draw(self, cuts: Cuts, total: int, uniform: float) -> int:
        """The place of the token at a share of what the cuts leave of `total`.

        They leave a head of the tokens, so its weight is all that matters.
        """
        if cuts.top_k > 0:
            total = self._weight_of(cuts.top_k)
        kept = total
        if cuts.top_p < 1:
            reach = min(int(np.float32(total) * cuts.top_p), int(self._upto[-1]))  # min-p may have left out some of it
            kept = self._at(reach - 1)[1] if reach > 0 else 0
        if cuts.min_p > 0:
            enough = self._weights.astype(np.float32) >= cuts.min_p * np.float32(2**WEIGHT_BITS)
            kept = min(kept, int(self._weights[enough].sum()))
        return self._at(_share(max(kept, 2**WEIGHT_BITS), uniform))[0]

    def _members(self, interval: int) -> tuple[np.ndarray, np.ndarray, int]:
        """An interval's tokens in their order, their cumulated weights, and the weight before it."""
        places = np.flatnonzero(self._interval == interval)
        places = places[np.argsort(-self._logits[places], kind="stable")]
        return places, self._weights[places].cumsum(), int(self._upto[interval - 1]) if interval else 0

    def _at(self, share: int) -> tuple[int, int]:
        """The first token up to which there is more weight than `share`, and how much there is."""
        places, upto, before = self._members(int(self._upto.searchsorted(share, side="right")))
        at = int(upto.searchsorted(share - before, side="right"))
        return int(places[at]), before + int(upto[at])

    def _weight_of(self, count: int) -> int:
        """The weight of the first `count` tokens."""
        counts = np.bincount(self._interval, minlength=2**INTERVAL_BITS).cumsum()
        if count >= counts[-1]:
            return int(self._upto[-1])
        interval = int(counts.searchsorted(count))
        _, upto, before = self._members(interval)
        return before + int(upto[count - (int(counts[interval - 1]) if interval else 0) - 1])
