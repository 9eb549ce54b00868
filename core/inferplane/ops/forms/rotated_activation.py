"""A rotation of what a gated MLP's second product reads, so that a scale per token loses less."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from inferplane.ops.forms.activation import ActivationMul
from inferplane.ops.linear import SiluMul
from inferplane.ops.op import ROUNDED, Op, Sample


def make_hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix of a power of two, with rows of length 1, float64 `[size, size]`."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


@lru_cache(maxsize=8)
def _load_hadamard(size: int, device: torch.device) -> torch.Tensor:
    return make_hadamard(size).float().to(device)


class RotatedActivation(Op, name="rotated_activation", extension=True):
    """`y = act(x)`, and each `block` of columns of it times Sylvester's Hadamard matrix over the root of its size, in
    float32, rounded twice. The weight that reads `y` was multiplied by the same matrix, so the product stays.

    Its cost is not counted: it is small beside the products around it.

    Args of the call:
        x: `[T, 2 I]`.

    Returns:
        `[T, I]` in the dtype of `x`.

    Fields: `act` the activation of the gated MLP; `block` columns, a power of two that divides I.

    Source: QuaRot, Ashkboos et al., arXiv 2404.00456, section 4; compressed-tensors' transforms of type "hadamard".
    """

    tolerance = ROUNDED

    act: SiluMul | ActivationMul
    block: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x)
        return rotate_blocks(y.float(), self.block).to(y.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One block, several, and another activation."""
        return [
            Sample("t3_i64", RotatedActivation(SiluMul(), 64), lambda d: (d.normal(3, 128),)),
            Sample("blocks", RotatedActivation(SiluMul(), 32), lambda d: (d.normal(5, 192),)),
            Sample("gelu", RotatedActivation(ActivationMul("gelu"), 16), lambda d: (d.normal(5, 96),)),
        ]


def rotate_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each `block` of the last dimension times a Hadamard matrix; x float32, whose last dimension the block divides."""
    return (x.unflatten(-1, (-1, block)) @ _load_hadamard(block, x.device)).flatten(-2)
