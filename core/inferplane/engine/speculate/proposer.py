"""`Proposer`: the interface of everything that drafts tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inferplane.engine.request.state import Request
from inferplane.engine.schedule.scheduler import ScheduledChunk

if TYPE_CHECKING:
    from inferplane.engine.speculate.config import SpeculativeConfig


@dataclass(frozen=True)
class ProposerContext:
    """What a proposer is made for.

    Args:
        config: the method and its limits.
        vocab: number of token ids of the model.
    """

    config: SpeculativeConfig
    vocab: int


@dataclass(frozen=True)
class VerifiedChunk:
    """What one sequence did in a step that is over.

    Args:
        request: the sequence; its new tokens are in `generated`, and `computed` counts the accepted rows, unless
            they are computed once more because the sequence has states and a draft was refused.
        first: `computed` before the step: the position of its first row.
        row: its first token row in the step.
        rows: rows that count: known tokens and accepted drafts.
        num_drafts: drafts that it had in the step.
        num_accepted: how many of them were accepted.
        blocks: its blocks of the first table in the step; the request itself has none any more if it ended.
    """

    request: Request
    first: int
    row: int
    rows: int
    num_drafts: int
    num_accepted: int
    blocks: list[int]


class Proposer:
    """Drafts the next tokens of sequences."""

    trial_tokens = sys.maxsize
    """Most generated tokens of a sequence for which drafting may begin again at little cost."""
    is_paused = False
    """Whether drafting does not pay now; sequences may lack what later drafts would need."""

    def propose(
        self, chunks: Sequence[VerifiedChunk], max_drafts: Sequence[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """Draft tokens for each sequence of a step, to be verified in the next step: a list per chunk, in their order,
        of at most `max_drafts` token ids, possibly none.

        Args:
            chunks: every sequence of the step that goes on, also those that get no drafts, whose entries a proposer
                with a cache writes here.
            max_drafts: maximum number of drafts of each; 0 for sequences that do not decode next.
            hidden: hidden states after the final norm `[rows of the step, D]`.
        """
        raise NotImplementedError

    def needs_step(self, chunks: Sequence[ScheduledChunk], max_drafts: Sequence[int]) -> bool:
        """Whether it needs a step's hidden states, so that the next one may not be launched before it has drafted. If
        not, a step may be in flight when it drafts: `Request.tokens` then counts a token that `generated` lacks.

        Args:
            chunks: of a step without drafts, which has not ended.
            max_drafts: maximum number of drafts of each sequence after it.
        """
        return True

    def complete(self, ended: Sequence[VerifiedChunk], hidden: torch.Tensor) -> None:
        """Write the missing cache entries of sequences that ended in the step, for later requests that find their
        blocks; called before `propose`. `hidden` as there.

        Their blocks are released, and may be found again by their content, but are not in use again yet. Proposers
        without a cache have nothing to write.
        """

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
