"""The MLP without a gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.collective import AllReduce
from inferplane.ops.forms.activation import Activation
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Op, Sample, placeholder


class MLP(Op, name="mlp", extension=True):
    """`y = down(act(up(x)))`.

    Args of the call:
        x: `[T, D]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `up` linear D -> I; `down` linear I -> D; `act` the activation; `reduce` sums over ranks.

    Source: the feed-forward layer of arXiv 1706.03762.
    """

    tolerance = BLOCK

    up: Linear
    down: Linear
    act: Activation
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.up(x)))
        return y if self.reduce is None else self.reduce(y)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and several, with biases and without."""

        def op(function: str, *biases: Any) -> MLP:
            up, down = biases or (None, None)
            return MLP(Linear(placeholder(96, 64), up), Linear(placeholder(64, 96), down), Activation(function))

        return [
            Sample("m1", op("relu2"), lambda d: (d.normal(1, 64),)),
            Sample("m11_biases", op("gelu_tanh", placeholder(96), placeholder(64)), lambda d: (d.normal(11, 64),)),
        ]
