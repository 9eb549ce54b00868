"""The grouped product of attention's output: each group of heads has a weight of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.linear import Linear
from inferplane.ops.op import ACCUMULATED, Op, Sample, placeholder


class GroupedLinear(Op, name="grouped_linear"):
    """A block-diagonal linear layer: group g of the inputs times the weight of group g.

    `y = [part_0(x_0) | part_1(x_1) | ...]`, where x is cut into as many equal parts as there are groups.

    Args of the call:
        x: `[T, G K]`, contiguous rows.

    Returns:
        `[T, G N]` in the dtype of `x`.

    Fields: `parts`, G linears K -> N without biases. A kernel may read the weights of all of them.

    Source: DeepSeek-V4 (2026), section 2.3.1, "grouped output projection".
    """

    tolerance = ACCUMULATED

    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(own.contiguous()) for part, own in zip(self.parts, x.chunk(len(self.parts), -1))], -1)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and several, one group and several; weights of 8 bits."""

        def make(groups: int, rows: int, columns: int, **format: Any) -> GroupedLinear:
            return GroupedLinear(tuple(Linear(placeholder(rows, columns, **format)) for _ in range(groups)))

        return [
            Sample("decode", make(2, 32, 64), lambda d: (d.normal(1, 128),), "decode"),
            Sample("one", make(1, 32, 64), lambda d: (d.normal(3, 64),), "decode"),
            Sample("prefill", make(3, 48, 96), lambda d: (d.normal(33, 288),)),
            Sample("fp8", make(2, 128, 128, format="fp8_block"), lambda d: (d.normal(5, 256),)),
        ]
