"""Who drafts: the seam between the engine and the ways of guessing ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.engine.request.state import Request


@dataclass(frozen=True)
class Ran:
    """What one sequence did in a step that is over.

    Args:
        request: the sequence; its new tokens are in `generated` and `computed` counts the rows that stand.
        first: `computed` before the step: the position of its first row.
        row: its first token row in the step.
        rows: rows that stand: known tokens and accepted drafts.
        drafted: drafts it brought.
        accepted: how many of them stood.
        blocks: its blocks in the step; the request itself has none any more if it ended.
    """

    request: Request
    first: int
    row: int
    rows: int
    drafted: int
    accepted: int
    blocks: list[int]


class Proposer:
    """Guesses the next tokens of sequences."""

    def propose(self, ran: Sequence[Ran], wants: Sequence[int], hidden: torch.Tensor) -> list[list[int]]:
        """Drafts for each sequence of a step.

        Args:
            ran: every sequence of the step that lives on, also those that want no drafts.
            wants: most drafts of each; 0 for sequences that still prefill.
            hidden: hidden states after the final norm `[rows of the step, D]`.
        """
        raise NotImplementedError

    def complete(self, ended: Sequence[Ran], hidden: torch.Tensor) -> None:
        """Write the cache entries of sequences that ended in the step; called before `propose`.

        Their blocks are given back, and may be found again by their content. Nobody has taken them yet. Proposers
        without a cache have nothing to write.
        """
