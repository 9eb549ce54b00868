"""Activation functions besides SiLU in a gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from inferplane.ops.op import ROUNDED, Op, Sample, extension

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
"""Activation functions by name."""


def multiply_gate(
    function: str, gate: torch.Tensor, up: torch.Tensor, limit: float | None, limits_input: bool = False
) -> torch.Tensor:
    """The gated result of an MLP, `f(gate) * up`.

    Args:
        function: f, a name of `ACTIVATIONS`.
        gate: `[T, I]`, not yet activated. up: `[T, I]`.
        limit: bound of the gate from above and of `up` from both sides, or None.
        limits_input: the bound of the gate is on what f reads, not on its result.
    """
    if limit is None:
        return ACTIVATIONS[function](gate) * up
    if limits_input:
        return ACTIVATIONS[function](gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return ACTIVATIONS[function](gate).clamp(max=limit) * up.clamp(-limit, limit)


class ActivationMul(Op, name="activation_mul", extension=True):
    """`y = f(gate * factors[0]) * up * factors[1]` with `gate, up = x[..., :I], x[..., I:]`, in float32, rounded once.

    With `limit` f's result is at most that, and up at most that in magnitude, before they are multiplied; with
    `limits_input` what f reads is at most that instead of its result. Its cost is not counted: it is fused into
    neighbouring ops wherever speed matters.

    Args of the call:
        x: `[T, 2 I]`.

    Returns:
        `[T, I]` in the dtype of `x`.

    Fields: `function` f: "gelu" (by the error function), "gelu_tanh" (its approximation), "relu2" (`max(x, 0)^2`),
    "silu"; `factors`; `limit` or None; `limits_input`.

    Source: GEGLU, Shazeer, arXiv 2002.05202; GELU, arXiv 1606.08415; squared ReLU, arXiv 2109.08668; factors as in
    Falcon-H1, arXiv 2507.22448; limits behind the activation as in Step 3.7 (transformers' Step3p7TextConfig), before
    it as in DeepSeek-V4 (transformers' DeepseekV4MLP).
    """

    tolerance = ROUNDED

    function: str
    factors: tuple[float, float] = extension((1.0, 1.0))
    limit: float | None = extension(None)
    limits_input: bool = extension(False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        before, after = self.factors
        gated = multiply_gate(self.function, gate * before, up, self.limit, self.limits_input)
        return (gated * after).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Each function; large values; factors; a limit."""
        samples = [Sample(name, ActivationMul(name), lambda d: (d.normal(3, 128),)) for name in ACTIVATIONS]
        return [
            *samples,
            Sample("large", ActivationMul("gelu_tanh"), lambda d: (d.normal(5, 96, scale=40.0),)),
            Sample("factors", ActivationMul("silu", (0.3, 1.7)), lambda d: (d.normal(4, 96),)),
            Sample("limit", ActivationMul("silu", limit=0.4), lambda d: (d.normal(4, 96, scale=3.0),)),
            Sample(
                "limits_input",
                ActivationMul("silu", limit=0.4, limits_input=True),
                lambda d: (d.normal(4, 96, scale=3.0),),
            ),
        ]


class Activation(Op, name="activation", extension=True):
    """`y = f(x)` by entries, in float32, rounded once.

    Its cost is not counted: it is fused into neighbouring ops wherever speed matters.

    Args of the call:
        x: `[T, I]`.

    Returns:
        `[T, I]` in the dtype of `x`.

    Fields: `function` f, as in `activation_mul`.

    Source: GELU, arXiv 1606.08415; squared ReLU, arXiv 2109.08668.
    """

    tolerance = ROUNDED

    function: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.function](x.float()).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Each function."""
        return [Sample(name, Activation(name), lambda d: (d.normal(3, 65),)) for name in ACTIVATIONS]
