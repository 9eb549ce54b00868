"""Drafts from the model's own hidden states: multi-token prediction and EAGLE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from inferplane.engine.speculate.network import First, Forward, ForwardProposer, Reserve
from inferplane.engine.speculate.proposer import Ran
from inferplane.types import Batch, KVCache
from inferplane.types.batch import Query


class HeadProposer(ForwardProposer):
    """A drafting layer behind the model: its multi-token-prediction layer, or an EAGLE head.

    Entry i of the layer's cache belongs to token i's hidden state and token i + 1, and lies in the sequence's own
    blocks. The layer runs on the rows that stand, then once more for each further draft, on its own hidden states.

    What a block holds therefore depends on its tokens and on the one that follows them. The engine keys blocks by both
    while such a layer drafts (`Scheduler`'s `lookahead`), so a prefix hit finds entries that are exactly those that the
    sequence would have written itself, up to the boundary: no hidden state of before it is needed.

    Args:
        layers: the bound layer for each step kind: `(hidden, batch, kv) -> (logits, hidden)`.
        cache: the model's cache.
        index: place of the layer's own cache in it.
        device: torch device of batches.
        reserve: see `Reserve`.
        recording: makes of a step `(batch, hidden) -> (logits, hidden)` what runs it, recorded or not.
    """

    def __init__(
        self,
        layers: Mapping[str, Callable[..., Any]],
        cache: KVCache,
        index: int,
        device: str,
        reserve: Reserve,
        recording: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda step: step,
    ) -> None:
        super().__init__(cache.block_tokens, device, reserve)
        self.kv = kv = cache.layers[index]
        self.layer: Forward = lambda batch, hidden: layers[batch.kind](hidden, batch, kv)
        self.steps = recording(self.layer)

    def first(self, index: int, ran: Ran, want: int) -> First:
        """All rows that stand: their entries were made from guessed hidden states, or not at all."""
        ids = ran.request.slice(ran.first + 1, ran.first + ran.rows + 1)
        blocks = self.blocks(ran.blocks, ran.first + ran.rows)
        return First(index, Query(ids, ran.first, blocks, 1 if want else 0), ran.row)

    def forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ForwardProposer.forward`."""
        logits, states = self.steps(batch, hidden)
        return logits, states
