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
from inferplane_cpu.native import library
from inferplane_cpu.structs import Sampling

KERNELS = Kernels()
MIN_TOKENS = 8192
"""Vocabularies below this are worked on many rows at once, by the op's body."""
BLOCK_TOKENS = 256
MAX_LISTED = 1024
"""Rows with a top_k up to this are reduced to their tokens with the largest logits before weights are computed."""
WEIGHT_BITS, UNIFORM_BITS = 40, 24
INTERVAL_BITS = 16
"""Upper bits of a float32 that name its interval: 128 of them between a power of two and the next."""
SLACK, ROUNDING = 0.01, 2.0**-20
"""What a bound on logits and the share that top-p leaves out are lowered by, far more than rounding can take."""


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
    if logits.dtype is torch.float16:
        logits = logits.float()
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    given = (temperature, top_p, min_p, uniform, top_k)
    tensors = [None if x is None else x.contiguous() for x in given]  # until the call is over
    rows, vocab = logits.shape
    pointers = [None if x is None else x.data_ptr() for x in tensors]
    request = Sampling(logits.data_ptr(), logits.dtype is torch.bfloat16, logits.stride(0), rows, vocab, *pointers)
    tokens = torch.empty(rows, dtype=torch.int64)
    library().ip_sample(request, tokens.data_ptr())
    return tokens


class RowMemory:
    """Memory for one row, used again step after step: new megabytes for each row cost a page fault per 4 KiB."""

    def __init__(self) -> None:
        self.resize(0)

    def resize(self, tokens: int) -> None:
        """Make it fit rows of `tokens` logits."""
        self.tokens = tokens
        self.below, self.shares = torch.empty(tokens), torch.empty(tokens)
        self.weights, self.interval = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
        self.sums, self.upto = (torch.empty(2**INTERVAL_BITS, dtype=torch.int64) for _ in range(2))

    def fill_weights(self, row: torch.Tensor, temperature: torch.Tensor) -> None:
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
    prepare=lambda op, ctx: RowMemory(),
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
    truncation: list[Truncation] | None = None
    if top_k is not None and top_p is not None and min_p is not None:
        truncation = [Truncation(*each) for each in zip(top_k.tolist(), top_p.numpy(), min_p.numpy())]
    tokens = []
    memory: RowMemory = view.prepared
    if memory.tokens != logits.shape[-1]:
        memory.resize(logits.shape[-1])
    for i, (row, degrees, u) in enumerate(zip(logits.float(), temperature.tolist(), uniform.tolist())):
        best = int(row.numpy().argmax())
        if degrees <= 0 or not math.isfinite(row[best]):
            tokens.append(best)
            continue
        if truncation is not None and 0 < truncation[i].top_k <= MAX_LISTED:
            tokens.append(
                _draw_from_top_k(view, row, i, truncation[i].top_k, (temperature, top_k, top_p, min_p, uniform))
            )
            continue
        memory.fill_weights(row, temperature[i])
        if truncation is None:
            tokens.append(_draw_by_id(memory.weights, u))
        else:
            tokens.append(_draw_by_rank(row.numpy(), memory, truncation[i], u))
    return torch.tensor(tokens)


def _draw_from_top_k(view: Any, row: torch.Tensor, at: int, count: int, request: tuple[Any, ...]) -> int:
    """The token of a row that keeps `count` tokens, by the op's body."""
    logits, ids = basic.stable_topk(row[None], count)
    return int(ids[0, basic.sample(view, logits, *(x[at : at + 1] for x in request))])


def _share(total: int, uniform: float) -> int:
    """floor(uniform * total)."""
    return (min(int(uniform * 2**UNIFORM_BITS), 2**UNIFORM_BITS - 1) * total) >> UNIFORM_BITS


def _draw_by_id(weights: np.ndarray, uniform: float) -> int:
    """The token at a share of all weights, in the order of ids."""
    upto = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK_TOKENS)).cumsum()
    share = _share(int(upto[-1]), uniform)
    block = int(upto.searchsorted(share, side="right"))
    first = block * BLOCK_TOKENS
    before = int(upto[block - 1]) if block else 0
    return first + int(weights[first : first + BLOCK_TOKENS].cumsum().searchsorted(share - before, side="right"))


@dataclass(frozen=True)
class Truncation:
    """How a row's tokens are truncated, as the op defines it; `top_p` and `min_p` are float32, as the op compares."""

    top_k: int
    top_p: np.float32
    min_p: np.float32

    def lowest(self, total: int, tokens: int) -> float:
        """A bound that the `below` of every token that stays exceeds; -inf where there is none.

        Tokens of at most a weight w have together at most `tokens * w`: those that top-p needs are heavier than the
        w with which this is all that it may leave out.
        """
        if self.top_k > 0:
            return -math.inf
        left_out = 1 - float(self.top_p) - ROUNDING
        heaviest_left = max(left_out * total / tokens / 2**WEIGHT_BITS, float(self.min_p))
        return math.log(heaviest_left) - SLACK if 0 < heaviest_left < 1 else -math.inf


def _draw_by_rank(logits: np.ndarray, memory: RowMemory, truncation: Truncation, uniform: float) -> int:
    """The token at a share of what the truncation leaves, by falling logit and then by id.

    Args:
        logits: float32 `[V]`.
        memory: holds their weights (`fill_weights`).
        truncation: of this row.
        uniform: in [0, 1).
    """
    below, weights = memory.below.numpy(), memory.weights
    total = int(weights.sum())
    likely = below >= truncation.lowest(total, len(below))
    if 4 * np.count_nonzero(likely) > len(below):
        return _Descending(logits, below, weights, memory).draw(truncation, total, uniform)
    ids = np.flatnonzero(likely)
    return int(ids[_Descending(logits[ids], below[ids], weights[ids], memory).draw(truncation, total, uniform)])


class _Descending:
    """Tokens by falling logit and then by id, known by intervals of `below`.

    Rounding keeps the order, so tokens of one logit share an interval, and no larger one is in a later interval.

    Args:
        logits: float32 `[N]`.
        below: float32 `[N]`, their distance to the largest of all, divided by the temperature.
        weights: int64 `[N]`.
        memory: for intervals and their sums.
    """

    def __init__(self, logits: np.ndarray, below: np.ndarray, weights: np.ndarray, memory: RowMemory) -> None:
        self._logits, self._weights, self._interval = logits, weights, memory.interval[: len(logits)]
        # `below` is +0 or negative, and the bits of negative floats rise as the floats fall.
        np.right_shift(below.view(np.uint32), np.uint32(32 - INTERVAL_BITS), out=self._interval)
        sums = memory.sums.zero_().scatter_add_(0, torch.from_numpy(self._interval), torch.from_numpy(weights))
        self._upto = torch.cumsum(sums, 0, out=memory.upto).numpy()

    def draw(self, truncation: Truncation, total: int, uniform: float) -> int:
        """The place of the token at a share of what the truncation leaves of `total`.

        It leaves a head of the tokens, so its weight is all that matters.
        """
        if truncation.top_k > 0:
            total = self._weight_of(truncation.top_k)
        remaining = total
        if truncation.top_p < 1:
            reach = min(int(np.float32(total) * truncation.top_p), int(self._upto[-1]))
            remaining = self._at(reach - 1)[1] if reach > 0 else 0
        if truncation.min_p > 0:
            enough = self._weights.astype(np.float32) >= truncation.min_p * np.float32(2**WEIGHT_BITS)
            remaining = min(remaining, int(self._weights[enough].sum()))
        return self._at(_share(max(remaining, 2**WEIGHT_BITS), uniform))[0]

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
