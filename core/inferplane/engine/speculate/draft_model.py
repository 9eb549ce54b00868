"""Drafts from a smaller model of the same vocabulary."""

from __future__ import annotations

import torch

from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.speculate.network import ForwardInput, NetworkProposer, Reserve
from inferplane.engine.speculate.proposer import VerifiedChunk
from inferplane.types import Batch
from inferplane.types.batch import Query


class DraftModelProposer(NetworkProposer):
    """A draft model with a plan, weights and a cache of its own.

    Its cache has as many blocks of the same size as the target's, and both use a sequence's block table. So a block
    that is found again by its content holds the draft model's entries too, and preemption frees them with the others.

    Each step it runs on the tokens that have no entries yet: the newest token, and the tokens of the last step except
    for accepted drafts, on which it ran when it made them.

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

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput | None:
        """The known tokens of the sequence that have no entries in the draft model's cache, and the newest token too if
        there are to be drafts; None if that is no token. See `NetworkProposer.first_input`.
        """
        stop = chunk.first + chunk.rows + (1 if max_drafts else 0)
        # It ran on the token before the drafts and on all drafts but the last; the accepted ones have right entries.
        start = chunk.first + (1 + min(chunk.num_accepted, chunk.num_drafts - 1) if chunk.num_drafts else 0)
        if start >= stop:
            return None
        query = Query(chunk.request.slice(start, stop), start, self.blocks(chunk.blocks, stop), 1 if max_drafts else 0)
        return ForwardInput(index, query, chunk.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NetworkProposer.forward`: a step of the draft model. The target's `hidden` states are not read."""
        return self.runner.run(batch)
