"""Drafts from a smaller model of the same vocabulary."""

from __future__ import annotations

import torch

from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.speculate.network import First, ForwardProposer, Reserve
from inferplane.engine.speculate.proposer import Ran
from inferplane.types import Batch
from inferplane.types.batch import Query


class DraftModelProposer(ForwardProposer):
    """A draft model with a plan, weights and a cache of its own.

    Its cache has as many blocks of the same size as the target's, and a sequence's block table serves both. So a block
    that is found again by its content holds the draft model's entries too, and preemption frees them with the others.

    Each step it runs on the tokens whose entries are not there yet: those that stand, except accepted drafts that it
    ran on when it made them, and the newest token.

    Args:
        runner: the draft model, bound and loaded.
        reserve: see `Reserve`.
    """

    uses_hidden = False
    own_tokens = 1  # the newest token, which the target reads in the next step

    def __init__(self, runner: Runner, reserve: Reserve) -> None:
        assert runner.cache is not None, "the runner was not opened"
        super().__init__(runner.cache.block_tokens, runner.backend.torch_device_indexed, reserve)
        self.runner = runner

    def first(self, index: int, ran: Ran, want: int) -> First | None:
        """Known tokens without entries, and with `want` the newest one."""
        stop = ran.first + ran.rows + (1 if want else 0)
        # It ran on the token before the drafts and on all drafts but the last; those that stood are right.
        start = ran.first + (1 + min(ran.accepted, ran.drafted - 1) if ran.drafted else 0)
        if start >= stop:
            return None
        query = Query(ran.request.slice(start, stop), start, self.blocks(ran.blocks, stop), 1 if want else 0)
        return First(index, query, ran.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardProposer.forward`; the target's hidden states are of no use to it."""
        return self.runner.run(batch)
