"""Embedding, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw
from inferplane.ops.op import EXACT, ROUNDED, Comparison, Cost, Op, Sample, Workload, extension, placeholder, values
from inferplane.renamed import old_attributes
from inferplane.types import ActivationQuant, Weight
from inferplane.types.weight import OLD_OUTPUT_QUANT


class Embedding(Op, name="embedding"):
    """`y[t] = weight[ids[t]]`; under vocabulary sharding, ids of other ranks give zero rows, which are summed over
    ranks. A quantized weight stands for its dequantized values.

    Args of the call:
        ids: int64 `[T]`.

    Returns:
        `[T, D]` in the plan's dtype.

    Fields: `weight` `[V, D]` (this rank's rows); `first` the id of its first row; `reduce` sums over ranks.

    Source: vocabulary sharding as in Megatron-LM (arXiv 1909.08053), section 3.
    """

    tolerance = EXACT
    body_reads_quantized = False  # ids do not give the body the dtype of its result

    weight: Weight
    first: int = 0
    reduce: AllReduce | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.reduce is None:
            return F.embedding(ids, self.weight)  # type: ignore[arg-type]
        rows = ids - self.first
        mine = (rows >= 0) & (rows < self.weight.shape[0])
        y = F.embedding(rows.clamp(0, self.weight.shape[0] - 1), self.weight)  # type: ignore[arg-type]
        return self.reduce(y * mine[:, None].to(y.dtype))

    def cost(self, load: Workload) -> Cost:
        """Bytes of the rows read and written."""
        return Cost(2 * load.tokens * self.weight.shape[1] * load.dtype.itemsize)

    @classmethod
    def compare(cls, got: Any, want: Any) -> Comparison:
        """As for any op, after rounding the expected values: a quantized weight's values have more digits than the
        dtype."""
        return super().compare(got, want.to(got.dtype))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One and several tokens, and quantized weights as a tied output head has them."""
        at = lambda label, t, *shape, **how: Sample(  # noqa: E731
            label, Embedding(placeholder(*shape, **how)), lambda d: (d.ints(t, below=shape[0]),)
        )
        quantized = [at(f, 5, 97, 320, format=f) for f in ("int8_group", "int4_group32", "int4_min32")]
        return [at("t1", 1, 97, 64), at("t7", 7, 97, 64), *quantized]


class RMSNorm(Op, name="rms_norm"):
    """`y = x / sqrt(mean(x^2) + eps) * (weight + offset) * factor` over the last dimension, in float32, rounded once.

    Args of the call:
        x: `[..., D]` in the plan's dtype; rows may be strided.

    Returns:
        The shape and dtype of `x`.

    Fields: `weight` `[D]`; `eps` added to the mean of squares; `offset` 0, or 1 where the weight is stored without its
    1, with which it would be rounded; `factor`.

    Source: Zhang and Sennrich, arXiv 1910.07467; offset as in Gemma, arXiv 2403.08295; factor as in LongCat-Flash,
    arXiv 2509.01322.
    """

    tolerance = ROUNDED
    tunable = True

    weight: Weight
    eps: float
    offset: float = extension(0.0)
    factor: float = extension(1.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        h = h * (values(self.weight) + self.offset)  # type: ignore[arg-type]
        return (h if self.factor == 1 else h * self.factor).to(x.dtype)

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """See `Op.tuning_inputs`."""
        return (draw.normal(rows, self.weight.shape[0]),)

    def cost(self, load: Workload) -> Cost:
        """Bytes of one read and one write."""
        n = self.weight.shape[0]
        return Cost(2 * load.tokens * n * load.dtype.itemsize, 4.0 * load.tokens * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Rows of common and odd widths, large and small values, strided rows, heads in the middle; a factor."""
        at = lambda d: RMSNorm(placeholder(d), 1e-6)  # noqa: E731
        return [
            Sample("t3_d64", at(64), lambda d: (d.normal(3, 64),)),
            Sample("t1_d2048", at(2048), lambda d: (d.normal(1, 2048, scale=30.0),)),
            Sample("t17_d576", at(576), lambda d: (d.normal(17, 576),)),
            Sample("strided", at(96), lambda d: (d.normal(5, 160)[:, 32:128],)),
            Sample("heads", at(128), lambda d: (d.normal(5, 3, 128),)),
            Sample("small", at(64), lambda d: (d.normal(4, 64, scale=1e-3),)),  # `eps` is half of the sum
            Sample("offset", RMSNorm(placeholder(64), 1e-6, 1.0), lambda d: (d.normal(3, 64),)),
            Sample("factor", RMSNorm(placeholder(96), 1e-6, factor=3.5), lambda d: (d.normal(4, 96),)),
        ]


@old_attributes(OLD_OUTPUT_QUANT)
class AddRMSNorm(Op, name="add_rms_norm"):
    """`s = x + residual; return norm(s), s`. Without a residual (the first layer) `s = x`.

    Args of the call:
        x: `[T, D]`.
        residual: `[T, D]` or None.

    Returns:
        The normed sum and the sum, each `[T, D]` in the dtype of `x`. Neither input is changed.

    Fields: `norm`; `output_quant` how a kernel may also quantize the normed sum for the linears that read it (the
    result itself stays unquantized), or None.

    Source: pre-norm transformer (arXiv 2002.04745), addition folded into the norm.
    """

    tolerance = ROUNDED
    tunable = True

    norm: RMSNorm
    output_quant: ActivationQuant | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        s = x if residual is None else x + residual
        return self.norm(s), s

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """See `Op.tuning_inputs`."""
        return (*self.norm.tuning_inputs(draw, rows), *self.norm.tuning_inputs(draw, rows))

    def cost(self, load: Workload) -> Cost:
        """Bytes of two reads and two writes."""
        n = self.norm.weight.shape[0]
        return Cost(4 * load.tokens * n * load.dtype.itemsize, 5.0 * load.tokens * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a residual; values so small that `eps` matters; results that kernels may also quantize;
        an offset."""
        at = lambda d: AddRMSNorm(RMSNorm(placeholder(d), 1e-5))  # noqa: E731
        return [
            Sample("t3_d64", at(64), lambda d: (d.normal(3, 64), d.normal(3, 64))),
            Sample("first", at(64), lambda d: (d.normal(2, 64), None)),
            Sample("t9_d1024", at(1024), lambda d: (d.normal(9, 1024), d.normal(9, 1024, scale=20.0))),
            Sample("small", at(64), lambda d: (d.normal(4, 64, scale=1e-3), d.normal(4, 64, scale=1e-3))),
            Sample(
                "codes",
                AddRMSNorm(at(320).norm, ActivationQuant("fp8", 128)),
                lambda d: (d.normal(5, 320), d.normal(5, 320)),
            ),
            Sample(
                "offset_codes",
                AddRMSNorm(replace(at(320).norm, offset=1.0), ActivationQuant("fp8", 128)),
                lambda d: (d.normal(5, 320), d.normal(5, 320)),
            ),
        ]


class Rope(Op, name="rope"):
    """Rotate pairs of entries by an angle that grows with the position: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Pairs are `(x[i], x[i + D/2])`, or `(x[2i], x[2i+1])` when interleaved; each result takes the place of its input.
    Computed in float32, rounded once. The cost is not counted: the op is fused into neighbours wherever speed matters.

    Args of the call:
        x: `[T, H, D]`, possibly strided.
        positions: int64 `[T]`.

    Returns:
        `[T, H, D]` in the dtype of `x`, contiguous.

    Fields: `table` float32 `[positions, 2, D / 2]`, cosines then sines, scalings included; `interleaved`.

    Source: RoFormer, arXiv 2104.09864; scalings as in the model's config (docs/adding-a-model.md).
    """

    tolerance = ROUNDED

    table: Weight
    interleaved: bool = False

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.table[positions][:, :, None].unbind(1)  # type: ignore[index]
        h = x.float()
        if self.interleaved:
            a, b = h[..., 0::2], h[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
        a, b = h.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both pairings, one and several heads, large positions, strided input."""
        return [
            Sample("half", Rope(rope_table(64)), lambda d: (d.normal(3, 2, 64), d.ints(3, below=512))),
            Sample("interleaved", Rope(rope_table(64), True), lambda d: (d.normal(7, 1, 64), d.ints(7, below=512))),
            Sample("strided", Rope(rope_table(128)), lambda d: (d.normal(5, 6, 160)[..., :128], d.ints(5, below=512))),
        ]


def rope_table(dim: int) -> Weight:
    """A plain rotary table of 512 positions for samples, float32 `[512, 2, dim / 2]`."""

    def make() -> torch.Tensor:
        angle = torch.arange(512.0)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        return torch.stack((angle.cos(), angle.sin()), 1)

    return Weight((), (512, 2, dim // 2), torch.float32, make=make)
