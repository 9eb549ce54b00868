"""Embedding, norms, linear layers, activations, rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.collective import AllReduce
from inferplane.ops.op import (
    ACCUMULATED,
    BLOCK,
    EXACT,
    ROUNDED,
    Comparison,
    Cost,
    Op,
    Sample,
    Workload,
    placeholder,
    values,
)
from inferplane.ops.quantize import Quantize, dequantize_rows
from inferplane.types import Batch, Weight


class Embedding(Op, name="embedding"):
    """`y[t] = weight[ids[t]]`; with a vocabulary range, ids outside it give zero rows (summed over ranks). A quantized
    weight stands for its dequantized values.

    Args of the call:
        ids: int64 `[T]`.

    Returns:
        `[T, D]` in the plan's dtype.

    Fields: `weight` `[V, D]` (this rank's rows); `first` the id of its first row; `reduce` sums over ranks.

    Source: vocabulary sharding as in Megatron-LM (arXiv 1909.08053), section 3.
    """

    tolerance = EXACT
    body_reads_quantized = False  # ids tell it no dtype

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
        """As of any op, with what is wanted rounded once: a quantized weight's values have more digits."""
        return super().compare(got, want.to(got.dtype))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One and several tokens, and weights that a head may share."""
        at = lambda label, t, *shape, **how: Sample(  # noqa: E731
            label, Embedding(placeholder(*shape, **how)), lambda d: (d.ints(t, below=shape[0]),)
        )
        quantized = [at(f, 5, 97, 320, format=f) for f in ("int8_group", "int4_group32")]
        return [at("t1", 1, 97, 64), at("t7", 7, 97, 64), *quantized]


class RMSNorm(Op, name="rms_norm"):
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32, rounded once.

    Args of the call:
        x: `[..., D]` in the plan's dtype; rows may be strided.

    Returns:
        The shape and dtype of `x`.

    Fields: `weight` `[D]`; `eps` added to the mean of squares.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    tolerance = ROUNDED

    weight: Weight
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * values(self.weight)).to(x.dtype)  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Bytes of one read and one write."""
        n = self.weight.shape[0]
        return Cost(2 * load.tokens * n * load.dtype.itemsize, 4.0 * load.tokens * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Rows of usual and odd widths, large and small values, strided rows, heads as a middle dimension."""
        at = lambda d: RMSNorm(placeholder(d), 1e-6)  # noqa: E731
        return [
            Sample("t3_d64", at(64), lambda d: (d.normal(3, 64),)),
            Sample("t1_d2048", at(2048), lambda d: (d.normal(1, 2048, scale=30.0),)),
            Sample("t17_d576", at(576), lambda d: (d.normal(17, 576),)),
            Sample("strided", at(96), lambda d: (d.normal(5, 160)[:, 32:128],)),
            Sample("heads", at(128), lambda d: (d.normal(5, 3, 128),)),
            Sample("small", at(64), lambda d: (d.normal(4, 64, scale=1e-3),)),  # `eps` is half of what is summed
        ]


class AddRMSNorm(Op, name="add_rms_norm"):
    """`s = x + residual; return norm(s), s`. Without a residual (the first layer) `s = x`.

    Args of the call:
        x: `[T, D]`.
        residual: `[T, D]` or None.

    Returns:
        The normed sum and the sum, each `[T, D]` in the dtype of `x`. Neither input is changed.

    Fields: `codes` and `codes_group`, as of `Quantize`: what a kernel may hand on with the norm, which stays the same.

    Source: pre-norm transformer (arXiv 2002.04745), addition folded into the norm.
    """

    tolerance = ROUNDED

    norm: RMSNorm
    codes: str = ""
    codes_group: int = 0

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        s = x if residual is None else x + residual
        return self.norm(s), s

    def cost(self, load: Workload) -> Cost:
        """Bytes of two reads and two writes."""
        n = self.norm.weight.shape[0]
        return Cost(4 * load.tokens * n * load.dtype.itemsize, 5.0 * load.tokens * n)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a residual; values so small that `eps` shows; codes that kernels may hand on."""
        at = lambda d: AddRMSNorm(RMSNorm(placeholder(d), 1e-5))  # noqa: E731
        return [
            Sample("t3_d64", at(64), lambda d: (d.normal(3, 64), d.normal(3, 64))),
            Sample("first", at(64), lambda d: (d.normal(2, 64), None)),
            Sample("t9_d1024", at(1024), lambda d: (d.normal(9, 1024), d.normal(9, 1024, scale=20.0))),
            Sample("small", at(64), lambda d: (d.normal(4, 64, scale=1e-3), d.normal(4, 64, scale=1e-3))),
            Sample("codes", AddRMSNorm(at(320).norm, "fp8", 128), lambda d: (d.normal(5, 320), d.normal(5, 320))),
        ]


class Linear(Op, name="linear", hot=True):
    """`y = x weight^T + bias`, summed in float32, rounded once.

    A quantized weight stands for its dequantized values. With `act`, the activations are quantized first and the
    product is that of the quantized numbers.

    Args of the call:
        x: `[T, K]` in the plan's dtype.

    Returns:
        `[T, N]` in the dtype of `x`, or in `out_dtype`.

    Fields: `weight` `[N, K]`; `bias` `[N]` or None; `act` how activations are quantized, or None, and `act_group` its
    group; `out_dtype` e.g. float32 for routers (the product is then taken in float32 throughout).

    Source: torch.nn.functional.linear; FP8 blocks as in the DeepSeek-V3 report, section 3.3.2.
    """

    tolerance = ACCUMULATED

    weight: Weight
    bias: Weight | None = None
    act: Quantize | None = None
    act_group: int = 0
    out_dtype: torch.dtype | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        if self.act is not None:
            h = dequantize_rows(*self.act(x), self.act_group)
        bias = None if self.bias is None else values(self.bias)  # type: ignore[arg-type]
        return F.linear(h, values(self.weight), bias).to(self.out_dtype or x.dtype)  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """Weight bytes once, activations in and out, two operations a multiply-add."""
        n, k = self.weight.shape
        moved = self.weight.nbytes(load.dtype) + load.tokens * (n + k) * load.dtype.itemsize
        return Cost(moved, 2.0 * load.tokens * n * k)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and many, odd sizes, bias, float32 result, each weight format, quantized activations."""
        plain = lambda n, k, **kw: Linear(placeholder(n, k), **kw)  # noqa: E731
        rows = lambda t, k: lambda d: (d.normal(t, k),)  # noqa: E731
        quantized = [
            Sample(f, Linear(placeholder(160, 256, format=f)), rows(5, 256))
            for f in ("int8_row", "int8_group", "int4_group", "int4_group32", "fp8_block", "fp8_row")
        ]
        return [
            Sample("m1", plain(96, 64), rows(1, 64)),
            Sample("m5_bias", plain(48, 80, bias=placeholder(48)), rows(5, 80)),
            Sample("m33", plain(130, 192), rows(33, 192)),
            Sample("m64_k1024", plain(256, 1024), rows(64, 1024)),
            Sample("float32_out", plain(16, 128, out_dtype=torch.float32), rows(6, 128)),
            *quantized,
            Sample("fp8_blocks", Linear(placeholder(256, 384, format="fp8_block")), rows(9, 384)),
            Sample("fp8_ragged", Linear(placeholder(200, 320, format="fp8_block")), rows(3, 320)),
            Sample(
                "fp8_act",
                Linear(placeholder(128, 256, format="fp8_block"), act=Quantize("fp8", 128), act_group=128),
                rows(4, 256),
            ),
            Sample("fp8_row_act", Linear(placeholder(96, 256, format="fp8_row"), act=Quantize("fp8", 0)), rows(5, 256)),
            Sample("int8_act", Linear(placeholder(96, 256, format="int8_row"), act=Quantize("int8", 0)), rows(5, 256)),
        ]


class LMHead(Op, name="lm_head", hot=True):
    """Logits of the rows that want them: `float32(x[rows] weight^T)`.

    Args of the call:
        x: `[T, D]` after the final norm.
        batch: its `logit_rows` `[R]` selects rows; None takes all.

    Returns:
        float32 `[R, V]` (this rank's columns under vocabulary sharding).

    Fields: `weight` `[V, D]`, often the embedding's own.

    Source: output layer of a language model; vocabulary sharding as in Megatron-LM (arXiv 1909.08053).
    """

    tolerance = ACCUMULATED

    weight: Weight

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = x if batch.logit_rows is None else x.index_select(0, batch.logit_rows)
        return F.linear(rows.float(), values(self.weight))  # type: ignore[arg-type]

    def cost(self, load: Workload) -> Cost:
        """As for a linear over one row a sequence; `load.tokens` rows are assumed to want logits."""
        n, k = self.weight.shape
        return Cost(self.weight.nbytes(load.dtype) + load.tokens * 4 * n, 2.0 * load.tokens * n * k)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """All rows, and the last row of each sequence."""
        from inferplane.types.batch import Query, make_batch

        op = LMHead(placeholder(101, 64))

        def inputs(logits: int | None):  # type: ignore[no-untyped-def]  # noqa: ANN202 - returns a lambda
            def draw_inputs(d):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                batch = make_batch(
                    [Query([1], 3, [0], logits), Query([2, 3, 4], 0, [1], logits)], block_tokens=16, device=d.device
                )
                return d.normal(4, 64), batch

            return draw_inputs

        return [
            Sample("all", op, inputs(None)),
            Sample("last", op, inputs(1)),
            Sample("int8_group", LMHead(placeholder(101, 64, format="int8_group")), inputs(1)),
            Sample("int4_group32", LMHead(placeholder(101, 64, format="int4_group32")), inputs(None)),
        ]


class SiluMul(Op, name="silu_mul"):
    """`y = silu(gate) * up` with `gate, up = x[..., :I], x[..., I:]`, in float32, rounded once.

    Args of the call:
        x: `[T, 2 I]`.

    Returns:
        `[T, I]` in the dtype of `x`.

    Source: SwiGLU, Shazeer, arXiv 2002.05202.
    """

    tolerance = ROUNDED

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    def cost(self, load: Workload) -> Cost:
        """Not counted: fused into its neighbours wherever speed matters."""
        return Cost()

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Usual values, and large ones whose sigmoid saturates."""
        return [
            Sample("t3_i64", SiluMul(), lambda d: (d.normal(3, 128),)),
            Sample("large", SiluMul(), lambda d: (d.normal(5, 96, scale=40.0),)),
        ]


class GatedMLP(Op, name="gated_mlp"):
    """`y = down(silu(gate(x)) * up(x))`, gate and up fused into one matrix.

    Args of the call:
        x: `[T, D]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `gate_up` linear D -> 2 I (gate rows first); `down` linear I -> D; `act`; `reduce` sums over ranks.

    Source: SwiGLU, Shazeer, arXiv 2002.05202.
    """

    tolerance = BLOCK

    gate_up: Linear
    down: Linear
    act: SiluMul = SiluMul()
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.gate_up(x)))
        return y if self.reduce is None else self.reduce(y)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and several."""
        op = GatedMLP(Linear(placeholder(192, 64)), Linear(placeholder(64, 96)))
        return [
            Sample("m1", op, lambda d: (d.normal(1, 64),)),
            Sample("m11", op, lambda d: (d.normal(11, 64),)),
        ]


class Rope(Op, name="rope"):
    """Rotate pairs of entries by an angle that grows with the position: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Pairs are `(x[i], x[i + D/2])`, or `(x[2i], x[2i+1])` when interleaved; each result stands where its input stood.
    In float32, rounded once.

    Args of the call:
        x: `[T, H, D]`, possibly strided.
        positions: int64 `[T]`.

    Returns:
        `[T, H, D]` in the dtype of `x`, contiguous.

    Fields: `table` float32 `[positions, 2, D / 2]`, cosines then sines (scalings are already in it); `interleaved`.

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

    def cost(self, load: Workload) -> Cost:
        """Not counted: fused into its neighbours wherever speed matters."""
        return Cost()

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both pairings, one and several heads, far positions, strided input."""

        def table(dim: int) -> Weight:
            def make() -> torch.Tensor:
                angle = torch.arange(512.0)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
                return torch.stack((angle.cos(), angle.sin()), 1)

            return Weight((), (512, 2, dim // 2), torch.float32, make=make)

        return [
            Sample("half", Rope(table(64)), lambda d: (d.normal(3, 2, 64), d.ints(3, below=512))),
            Sample("interleaved", Rope(table(64), True), lambda d: (d.normal(7, 1, 64), d.ints(7, below=512))),
            Sample("strided", Rope(table(128)), lambda d: (d.normal(5, 6, 160)[..., :128], d.ints(5, below=512))),
        ]
