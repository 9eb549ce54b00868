"""Scales of channels that make both activations and weights easy to quantize: SmoothQuant's, and piecewise ones.

A scale s divides the inputs and multiplies the weight's columns: `y = Q(x / s) Q(W s)^T`. Products that read the same
channels are given as one weight, one below the other, so that the scale suits all of them.

Source: SmoothQuant, Xiao et al., arXiv 2211.10438. Piecewise smooth search as PaddleSlim documents it
(docs/zh_cn/tutorials/quant/advanced_quantization.md), here with scales that begin anew for each number of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

import torch

from inferplane.calibrate.methods.rounding import fake_quantize, round_to_nearest
from inferplane.types import ActivationQuant

LEAST = 1e-5
EXPONENTS = tuple(i / 100 for i in range(20, 81))
"""Shares of the inputs' range in a scale that piecewise search tries."""
CONSTANTS = tuple(1 + i / 2 for i in range(9))
"""Scales of all channels of a piece that it tries: 1 to 5."""
Spread = Callable[[torch.Tensor], torch.Tensor]
ROWS = 512
"""Most rows of inputs that a candidate is tried on."""
OUTPUTS, BLOCK = 768, 128
"""Most rows of a weight that a candidate is tried on, taken in blocks of so many, which may share scales."""


def smoothquant(act_max: torch.Tensor, weight_max: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """SmoothQuant's scale `act_max^alpha / weight_max^(1 - alpha)`, `[K]`.

    Args:
        act_max, weight_max: largest magnitudes of each channel, `[K]`. Channels without inputs or weights get 1.
        alpha: share of the inputs' range that goes to the weights.
    """
    scale = act_max.clamp_min(LEAST) ** alpha / weight_max.clamp_min(LEAST) ** (1 - alpha)
    known = (act_max > 0) & (weight_max > 0)
    return torch.where(known, scale, torch.ones_like(scale)).clamp(LEAST, 1 / LEAST)


class Trial:
    """Measures what quantization with a scale costs.

    Args:
        x: some inputs, `[T, K]`.
        weight: `[N, K]`. format: that it is rounded to.
        quant: of the inputs; None: they are not quantized.
        spread: from a number a channel to one a column, where several columns are one channel; None: each is one.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        format: str,
        quant: ActivationQuant | None,
        spread: Spread | None = None,
    ) -> None:
        every = max(1, len(x) // ROWS)
        self.spread = spread
        if len(weight) > OUTPUTS:
            blocks, count = weight.split(BLOCK), OUTPUTS // BLOCK
            weight = torch.cat([blocks[i * len(blocks) // count] for i in range(count)])
        self.x, self.weight, self.format, self.quant = x[::every][:ROWS], weight, format, quant
        self.expected = self.x @ self.weight.T

    def loss(self, scale: torch.Tensor) -> float:
        """Mean squared error of the products with a scale of channels."""
        scale = scale if self.spread is None else self.spread(scale)
        rounded = round_to_nearest(self.weight * scale, self.format).dequantize()
        got = fake_quantize(self.x / scale, self.quant) @ rounded.T
        return (got - self.expected).square().mean().item()


def search_smooth(trial: Trial, act_max: torch.Tensor, weight_max: torch.Tensor) -> torch.Tensor:
    """SmoothQuant's scale with the exponent that has the smallest error, or 1 if none is better than that.

    Args:
        trial: measures a scale.
        act_max, weight_max: largest magnitudes of each channel, `[C]`.
    """
    best = torch.ones_like(act_max)
    least = trial.loss(best)
    for i in range(21):
        scale = smoothquant(act_max, weight_max, i / 20)
        if (loss := trial.loss(scale)) < least:
            best, least = scale, loss
    return best


def pss(
    trial: Trial, act_max: torch.Tensor, weight_max: torch.Tensor, *, pieces: int = 3, seed: int = 0
) -> torch.Tensor:
    """Piecewise smooth search: channels are grouped by their inputs' range, and each group gets the scale that is best
    beside those of the others.

    Numbers of groups from 1 to `pieces` are tried, and the best is taken. Several groups begin with the scale that is
    best for all channels as one; each group's scale replaces it.

    Args:
        trial: measures a scale.
        act_max, weight_max: largest magnitudes of each channel, `[C]`.
        pieces: most groups.
        seed: of the grouping.

    Returns:
        The scale `[C]`; 1 where nothing was better.
    """
    candidates = [torch.ones_like(act_max), *_list_candidates(act_max, weight_max)]
    whole = _search_pieces(trial, candidates, [torch.ones_like(act_max, dtype=torch.bool)], candidates[0])
    found = [whole]
    for count in range(2, pieces + 1):
        found.append(_search_pieces(trial, candidates, group_channels(act_max, count, seed), whole[0]))
    best: torch.Tensor = min(found, key=itemgetter(1))[0]
    return best


def _search_pieces(
    trial: Trial, candidates: Sequence[torch.Tensor], groups: Sequence[torch.Tensor], begin: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """The scale that gives each group in turn the candidate that is best beside the scales of the others, and its loss.
    A later candidate counts only if it is better."""
    scale = begin
    least = trial.loss(scale)
    for group in groups:
        best = scale
        for candidate in candidates:
            tried = torch.where(group, candidate, scale)
            if (loss := trial.loss(tried)) < least:
                best, least = tried, loss
        scale = best
    return scale, least


def _list_candidates(act_max: torch.Tensor, weight_max: torch.Tensor) -> Iterator[torch.Tensor]:
    for alpha in EXPONENTS:
        yield smoothquant(act_max, weight_max, alpha)
    for constant in CONSTANTS:
        yield torch.full_like(act_max, constant)


def group_channels(values: torch.Tensor, count: int, seed: int = 0, iterations: int = 100) -> list[torch.Tensor]:
    """Groups of channels with similar values, in ascending order: k-means in one dimension, begun by k-means++.

    Args:
        values: `[K]`.
        count: most groups; there are fewer if values are equal.
        seed: of the beginning.
        iterations: at most.

    Returns:
        Masks `[K]`, none of them empty, each channel in one.
    """
    draw = torch.Generator().manual_seed(seed)
    points = values.double()
    centres = points[torch.randint(len(points), (1,), generator=draw)]
    while len(centres) < min(count, len(points)):
        distance = (points[:, None] - centres).square().amin(1)
        if not distance.sum() > 0:
            break
        centres = torch.cat((centres, points[torch.multinomial(distance, 1, generator=draw)]))
    for _ in range(iterations):
        nearest = (points[:, None] - centres).abs().argmin(1)
        found = [points[nearest == i] for i in range(len(centres))]
        moved = torch.stack([group.mean() if len(group) else centre for group, centre in zip(found, centres)])
        if torch.equal(moved, centres):
            break
        centres = moved
    nearest = (points[:, None] - centres).abs().argmin(1)
    masks = [nearest == int(i) for i in centres.argsort()]
    return [mask for mask in masks if mask.any()]
