"""Prediction layers (MTP) as layers that are calibrated: what they read of a window, and what of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from inferplane.ops import MTPLayer, Op
from inferplane.types import Batch, KVRequest, LayerKV, StateRequest, Weight


class PredictionLayer:
    """A prediction layer without the embedding before it, and without the norm and the head behind it, which stay as
    they are. Bound, it is called as a layer is: with the embeddings of the next tokens in place of x, and with the
    normed hidden states in place of the residual.

    Args:
        op: the layer.
    """

    def __init__(self, op: MTPLayer) -> None:
        self.op = op
        self._parts: Sequence[tuple[str, Op]] = [
            (name, getattr(op, name)) for name in ("enorm", "hnorm", "eh_proj", "layer")
        ]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See `Op.weights`."""
        for name, op in self._parts:
            yield from op.weights(f"{name}.")

    def sites(self) -> Iterator[tuple[str, Op]]:
        """See `Op.sites`."""
        for name, op in self._parts:
            yield from op.sites(name)

    def kv_requests(self) -> tuple[KVRequest, ...]:
        """See `Op.kv_requests`."""
        return self.op.kv_requests()

    def state_requests(self) -> tuple[StateRequest, ...]:
        """See `Op.state_requests`."""
        return self.op.state_requests()

    def bind(self, bind_op: Callable[[Op], Callable[..., Any]]) -> Callable[..., Any]:
        """The layer over bound ops."""
        enorm, hnorm, project, layer = (bind_op(op) for _, op in self._parts)

        def run(embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> Any:
            return layer(project(torch.cat((enorm(embedded), hnorm(hidden)), -1)), None, batch, kv)

        return run


def list_inputs(windows: Sequence[Sequence[int]], number: int) -> list[Sequence[int]]:
    """The token ids that the prediction layer of this number, from 0, reads of each window: those behind the tokens
    whose hidden states it reads.
    """
    return [ids[number + 1 :] for ids in windows]
