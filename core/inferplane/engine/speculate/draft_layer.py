"""Drafts from the model's own hidden states, by a layer behind it: multi-token prediction (MTP) and EAGLE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from inferplane.engine.speculate.network import Forward, ForwardInput, NetworkProposer, Reserve
from inferplane.engine.speculate.proposer import VerifiedChunk
from inferplane.types import Batch, KVCache
from inferplane.types.batch import Query


class DraftLayerProposer(NetworkProposer):
    """A draft layer behind the model: its multi-token-prediction layer, or an EAGLE head.

    Entry i of the layer's cache belongs to token i's hidden state and token i + 1, and lies in the sequence's own
    blocks. The layer runs on the accepted rows, then once more for each further draft, on its own hidden states.

    So the entries of a block depend on its tokens and on the token after them. While such a layer drafts, the hash of a
    block covers both (`Scheduler`'s `lookahead`), so a prefix hit finds exactly the entries that the sequence would
    have written itself, up to the block's end: no hidden state from before is needed.

    Args:
        layers: the bound layer for each step kind: `(hidden, batch, kv) -> (logits, hidden)`.
        cache: the model's cache.
        index: index of the layer's own cache in it.
        device: torch device of batches.
        reserve: see `Reserve`.
        captured: turns a step `(batch, hidden) -> (logits, hidden)` into one that is captured where possible.
    """

    def __init__(
        self,
        layers: Mapping[str, Callable[..., Any]],
        cache: KVCache,
        index: int,
        device: str,
        reserve: Reserve,
        captured: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step,
    ) -> None:
        super().__init__(cache.block_tokens, device, reserve)
        self.kv = kv = cache.layers[index]
        self.layer: Forward = lambda batch, hidden: layers[batch.kind](hidden, batch, kv)
        self.steps = captured(self.layer)

    def first_input(self, index: int, chunk: VerifiedChunk, max_drafts: int) -> ForwardInput:
        """All accepted rows of the sequence, with the token after each: the layer's entries for them were computed from
        drafted hidden states, or not at all. `index` and `max_drafts`: see `NetworkProposer.first_input`.
        """
        ids = chunk.request.slice(chunk.first + 1, chunk.first + chunk.rows + 1)
        blocks = self.blocks(chunk.blocks, chunk.first + chunk.rows)
        return ForwardInput(index, Query(ids, chunk.first, blocks, 1 if max_drafts else 0), chunk.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `NetworkProposer.forward`: the draft layer, captured where possible."""
        logits, states = self.steps(batch, hidden)
        return logits, states
