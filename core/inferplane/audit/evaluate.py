"""Perplexity of a model on texts, and how far its next-token probabilities are from a reference's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch

from inferplane.calibrate.texts import Window
from inferplane.errors import UsageError

ROWS = 64
"""Positions whose probabilities are held at a time: a vocabulary has up to 262,144 tokens."""
RESAMPLES = 2000
"""Draws of windows for an interval."""
LEVEL = 0.95


class LogitsSource(Protocol):
    """What is evaluated, such as `LLM`."""

    def logits(self, prompts: Sequence[Sequence[int]], /) -> Sequence[torch.Tensor]:
        """Logits after every token of each prompt, float32 `[tokens, vocab]`."""


class Interval(NamedTuple):
    """A figure, and the bounds of its 95 % interval, by bootstrap over windows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TokenScores:
    """Scores of one window's tokens from the second on, `[tokens - 1]` each.

    Args:
        name: of the text's file.
        loss: negative log-likelihood, in nats.
        reference_loss: the same of the reference; None: there is none.
        divergence: Kullback-Leibler divergence of the model from the reference, in nats.
        agreement: 1 where both have the same most likely token.
    """

    name: str
    loss: torch.Tensor
    reference_loss: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    agreement: torch.Tensor | None = None


@dataclass(frozen=True)
class Part:
    """Figures of some positions, or of one file.

    Args:
        name: of the file, or the positions as "1-15".
        tokens: their number.
        perplexity: of the model. reference_perplexity, divergence, agreement: as in `Evaluation`; None: no reference.
    """

    name: str
    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    divergence: float | None = None
    agreement: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """A model on texts, and beside a reference.

    Args:
        windows: number of windows. tokens: number of tokens that were predicted.
        perplexity: of the model.
        reference_perplexity: of the reference; None: there is none, and neither are the figures that follow.
        ratio: of the perplexities, by windows in pairs.
        divergence: mean Kullback-Leibler divergence of the model from the reference, in nats a token.
        agreement: share of positions at which both have the same most likely token.
        by_position: figures by the position in the window. by_file: by the texts' files.
            by_window: of each window, so that two evaluations of the same windows can be compared in pairs.
        scores: of all windows.
    """

    windows: int
    tokens: int
    perplexity: Interval
    reference_perplexity: Interval | None
    ratio: Interval | None
    divergence: Interval | None
    agreement: Interval | None
    by_position: Sequence[Part]
    by_file: Sequence[Part]
    by_window: Sequence[Part]
    scores: Sequence[TokenScores]

    def data(self) -> dict[str, Any]:
        """Everything but the scores, JSON-ready."""
        names = ("perplexity", "reference_perplexity", "ratio", "divergence", "agreement")
        figures = {name: None if (value := getattr(self, name)) is None else value._asdict() for name in names}
        parts = {
            name: [asdict(part) for part in getattr(self, name)] for name in ("by_position", "by_file", "by_window")
        }
        return {"windows": self.windows, "tokens": self.tokens, **figures, **parts}


def score_windows(
    model: LogitsSource,
    windows: Iterable[Window],
    reference: LogitsSource | None = None,
    progress: Callable[[], None] | None = None,
) -> list[TokenScores]:
    """Run models over windows of texts.

    A prompt's tokens attend to the entries of the cache, so a quantized cache counts.

    Args:
        model: what is evaluated.
        windows: token ids.
        reference: what it is held against, with the same vocabulary.
        progress: called after each window.

    Raises:
        UsageError: the vocabularies differ.
    """
    found = []
    for window in windows:
        (logits,) = model.logits([window.ids])
        other = None if reference is None else reference.logits([window.ids])[0]
        if other is not None and other.shape[1] != logits.shape[1]:
            raise UsageError(
                f"The model has a vocabulary of {logits.shape[1]} tokens, the reference one of {other.shape[1]}.",
                remedy="hold it against a model with the same tokenizer",
            )
        found.append(_score(window, logits, other))
        if progress is not None:
            progress()
    return found


def _score(window: Window, logits: torch.Tensor, reference: torch.Tensor | None) -> TokenScores:
    targets = torch.tensor(window.ids[1:])
    losses, reference_losses, divergences, agreements = [], [], [], []
    for first in range(0, len(targets), ROWS):
        rows = slice(first, min(first + ROWS, len(targets)))
        mine = logits[rows].float().log_softmax(-1)
        expected = targets[rows, None]
        losses.append(-mine.gather(1, expected)[:, 0])
        if reference is not None:
            theirs = reference[rows].float().log_softmax(-1)
            reference_losses.append(-theirs.gather(1, expected)[:, 0])
            divergences.append((theirs.exp() * (theirs - mine)).sum(-1).clamp_min(0))
            agreements.append((theirs.argmax(-1) == mine.argmax(-1)).float())
    if reference is None:
        return TokenScores(window.name, torch.cat(losses))
    more = (torch.cat(parts) for parts in (reference_losses, divergences, agreements))
    return TokenScores(window.name, torch.cat(losses), *more)


def evaluate(scores: Sequence[TokenScores], seed: int = 0) -> Evaluation:
    """The figures of scored windows.

    Args:
        scores: of all windows.
        seed: of the draws for intervals.

    Raises:
        UsageError: there are no scores.
    """
    if not scores:
        raise UsageError("No windows were evaluated.", remedy="give texts of at least one window")
    sizes = torch.tensor([len(each.loss) for each in scores], dtype=torch.float64)
    draws = torch.randint(len(scores), (RESAMPLES, len(scores)), generator=torch.Generator().manual_seed(seed))

    def interval(totals: torch.Tensor, *, exponential: bool = False) -> Interval:
        drawn = (totals[draws].sum(1) / sizes[draws].sum(1)).sort().values
        edge = (1 - LEVEL) / 2
        low, high = drawn[int(edge * RESAMPLES)], drawn[int((1 - edge) * RESAMPLES) - 1]
        found = [value.item() for value in (totals.sum() / sizes.sum(), low, high)]
        return Interval(*(math.exp(value) if exponential else value for value in found))

    def totals(name: str) -> torch.Tensor:
        return torch.stack([getattr(each, name).double().sum() for each in scores])

    loss = totals("loss")
    has_reference = scores[0].reference_loss is not None
    reference = totals("reference_loss") if has_reference else None
    return Evaluation(
        windows=len(scores),
        tokens=int(sizes.sum()),
        perplexity=interval(loss, exponential=True),
        reference_perplexity=None if reference is None else interval(reference, exponential=True),
        ratio=None if reference is None else interval(loss - reference, exponential=True),
        divergence=interval(totals("divergence")) if has_reference else None,
        agreement=interval(totals("agreement")) if has_reference else None,
        by_position=_by_position(scores),
        by_file=_by_file(scores),
        by_window=[_part(each.name, [each], slice(None)) for each in scores],
        scores=scores,
    )


def _by_position(scores: Sequence[TokenScores]) -> list[Part]:
    """Figures of positions from 1 on, in ranges that double."""
    longest = max(len(each.loss) for each in scores)
    found, first = [], 0
    while first < longest:
        last = max(2 * first, 16) if first else 15
        parts = [each for each in scores if len(each.loss) > first]
        found.append(_part(f"{first + 1}-{min(last, longest)}", parts, slice(first, last)))
        first = last
    return found


def _by_file(scores: Sequence[TokenScores]) -> list[Part]:
    files: dict[str, list[TokenScores]] = defaultdict(list)
    for each in scores:
        files[each.name].append(each)
    return [_part(name, parts, slice(None)) for name, parts in sorted(files.items())]


def _part(name: str, scores: Sequence[TokenScores], rows: slice) -> Part:
    def mean(field: str) -> float | None:
        parts = [getattr(each, field) for each in scores]
        return None if parts[0] is None else torch.cat([part[rows] for part in parts]).double().mean().item()

    loss, reference = mean("loss"), mean("reference_loss")
    assert loss is not None
    return Part(
        name,
        sum(len(each.loss[rows]) for each in scores),
        math.exp(loss),
        None if reference is None else math.exp(reference),
        mean("divergence"),
        mean("agreement"),
    )
