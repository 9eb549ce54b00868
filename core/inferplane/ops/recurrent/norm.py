"""RMS norms with a gate, and the gate alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from inferplane.ops.collective import AllReduce
from inferplane.ops.op import ROUNDED, Cost, Op, Sample, Workload, extension, placeholder, values
from inferplane.types import Weight


class SiluGate(Op, name="silu_gate", extension=True):
    """`y = x * silu(gate)`, in float32, rounded once. Its cost is not counted, as that of `activation_mul`.

    Args of the call:
        x: `[..., D]` in the plan's dtype. gate: the same shape. Either may be strided.

    Returns:
        The shape and dtype of `x`.

    Source: Falcon-H1, arXiv 2507.22448.
    """

    tolerance = ROUNDED

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * F.silu(gate.float())).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Rows; strided rows and large gates."""
        return [
            Sample("t3_d64", SiluGate(), lambda d: (d.normal(3, 64), d.normal(3, 64))),
            Sample("strided", SiluGate(), lambda d: (d.normal(3, 80)[:, 16:], d.normal(3, 96, scale=9.0)[:, :64])),
        ]


class GatedRMSNorm(Op, name="gated_rms_norm"):
    """`y = rms_norm(x) * weight * f(gate)`, or with `gate_first` `y = rms_norm(x * f(gate)) * weight`.

    f is `act`, silu or sigmoid. The mean of squares is over each of `groups` equal parts of the last dimension. All in
    float32, rounded once. If one group is divided equally over ranks, its mean is that over all ranks.

    Args of the call:
        x: `[..., D]` in the plan's dtype. gate: the same shape. Either may be strided.

    Returns:
        The shape and dtype of `x`.

    Fields: `weight` `[D]`; `eps` added to the mean of squares; `groups` parts of D; `gate_first`; `reduce` sums over
    the `ranks` that divide one group, or None; `act` of the gate.

    Source: Mamba-2, arXiv 2405.21060, section 7; the gate after the norm as in Gated DeltaNet, arXiv 2412.06464;
    sigmoid: Kimi Linear, arXiv 2510.26692.
    """

    tolerance = ROUNDED

    weight: Weight
    eps: float
    groups: int = 1
    gate_first: bool = False
    reduce: AllReduce | None = extension(None)
    ranks: int = extension(1)
    act: Literal["silu", "sigmoid"] = extension("silu")

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        factor = gate.float().sigmoid() if self.act == "sigmoid" else F.silu(gate.float())
        h = x.float() * factor if self.gate_first else x.float()
        parts = h.unflatten(-1, (self.groups, -1))
        mean = parts.pow(2).mean(-1, keepdim=True)
        if self.reduce is not None:
            mean = self.reduce(mean) / self.ranks
        h = (parts * torch.rsqrt(mean + self.eps)).flatten(-2)
        h = h * values(self.weight)  # type: ignore[arg-type]
        return (h if self.gate_first else h * factor).to(x.dtype)

    def cost(self, load: Workload) -> Cost:
        """Bytes of two reads and one write of a row of D for each token; a layer may have several such rows."""
        n = load.tokens * self.weight.shape[0]
        return Cost(3 * n * load.dtype.itemsize, 8.0 * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """The gate before and after the norm, groups, heads, strided rows, values near `eps`."""
        at = lambda width, **how: GatedRMSNorm(placeholder(width), 1e-6, **how)  # noqa: E731
        return [
            Sample("t3_d64", at(64), lambda d: (d.normal(3, 64), d.normal(3, 64))),
            Sample("heads", at(32), lambda d: (d.normal(5, 4, 32), d.normal(5, 4, 32))),
            Sample("gate_first", at(96, gate_first=True), lambda d: (d.normal(4, 96), d.normal(4, 96, scale=4.0))),
            Sample("groups", at(96, groups=3, gate_first=True), lambda d: (d.normal(7, 96), d.normal(7, 96))),
            Sample("groups_norm_first", at(80, groups=2), lambda d: (d.normal(2, 80), d.normal(2, 80))),
            Sample("strided", at(64), lambda d: (d.normal(3, 80)[:, 16:], d.normal(3, 96)[:, :64])),
            Sample("small", at(64), lambda d: (d.normal(4, 64, scale=1e-3), d.normal(4, 64))),
            Sample("sigmoid", at(32, act="sigmoid"), lambda d: (d.normal(5, 4, 32), d.normal(5, 4, 32, scale=3.0))),
        ]
