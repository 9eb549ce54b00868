"""Drafts from the model's own hidden states, by a layer behind it: multi-token prediction (MTP) and EAGLE."""

from __future__ import annotations

import torch

from inferplane.engine.runner.capture import DecodeSteps, why_not_captured
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.speculate.network import Forward, ForwardInput, NetworkProposer, Reserve
from inferplane.engine.speculate.proposer import VerifiedChunk
from inferplane.types import Batch
from inferplane.types.batch import Query


class DraftLayerProposer(NetworkProposer):
    """A draft layer behind the model: its multi-token-prediction layer, or an EAGLE head.

    Entry i of the layer's cache belongs to token i's hidden state and token i + 1, and lies in the sequence's own
    blocks. The layer runs on the accepted rows, then once more for each further draft, on its own hidden states.

    So the entries of a block depend on its tokens and on the token after them. While such a layer drafts, the hash of a
    block covers both (`Scheduler`'s `lookahead`), so a prefix hit finds exactly the entries that the sequence would
    have written itself, up to the block's end: no hidden state from before is needed.

    Args:
        runner: the model, bound and loaded. Steps of the layer are captured in the sizes of the model's own steps.
        index: of the draft layer (`Runner.draft_layer`).
        reserve: see `Reserve`.
    """

    def __init__(self, runner: Runner, index: int, reserve: Reserve) -> None:
        cache, decode = runner.cache, runner.decode
        assert cache is not None and decode is not None, "the runner was not opened"
        super().__init__(cache.block_tokens, runner.backend.torch_device_indexed, reserve)
        layers, kv = runner.draft_layer(index), cache.layers[len(runner.model.layers) + index]
        self.layer: Forward = lambda batch, hidden: layers[batch.kind](hidden, batch, kv)
        reason = why_not_captured(runner.plan, runner.options, "mtp")
        self.steps = DecodeSteps(runner.backend, self.layer, cache, runner.max_model_len, decode.sizes, reason)

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput:
        """All accepted rows of the sequence, with the token after each: the layer's entries for them were computed from
        drafted hidden states, or not at all. `index` and `max_drafts`: see `NetworkProposer.first_input`.
        """
        ids = chunk.request.slice(chunk.first + 1, chunk.first + chunk.rows + 1)
        blocks = self.blocks(chunk.blocks, chunk.first + chunk.rows)
        return ForwardInput(index, Query(ids, chunk.first, blocks, 1 if max_drafts else 0), chunk.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NetworkProposer.forward`: the draft layer, captured where possible."""
        return self.steps(batch, hidden)
