"""Linear layers, the output head, and the gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw
from inferplane.ops.formats import dequantize_rows
from inferplane.ops.op import ACCUMULATED, BLOCK, ROUNDED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.quantize import Quantize
from inferplane.renamed import old_names
from inferplane.types import Batch, Weight
from inferplane.types.batch import Query, make_batch

OLD_LINEAR = {"act": "activation_quant", "act_group": "activation_group"}
"""Fields of `Linear` in plugin API 1.0, which kernels of a linear read from its view too."""


@old_names(OLD_LINEAR)
class Linear(Op, name="linear", hot=True):
    """`y = x weight^T + bias`, summed in float32, rounded once.

    A quantized weight stands for its dequantized values. With `activation_quant`, the activations are quantized
    first and the product is that of the quantized numbers.

    Args of the call:
        x: `[T, K]` in the plan's dtype.

    Returns:
        `[T, N]` in the dtype of `x`, or in `out_dtype`.

    Fields: `weight` `[N, K]`; `bias` `[N]` or None; `activation_quant` how activations are quantized, or None, and
    `activation_group` its group; `out_dtype` e.g. float32 for routers (the product is then in float32 throughout).

    Source: torch.nn.functional.linear; FP8 blocks as in the DeepSeek-V3 report, section 3.3.2.
    """

    tolerance = ACCUMULATED
    tunable = True

    weight: Weight
    bias: Weight | None = None
    activation_quant: Quantize | None = None
    activation_group: int = 0
    out_dtype: torch.dtype | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float()
        if self.activation_quant is not None:
            h = dequantize_rows(*self.activation_quant(x), self.activation_group)
        bias = None if self.bias is None else values(self.bias)  # type: ignore[arg-type]
        return F.linear(h, values(self.weight), bias).to(self.out_dtype or x.dtype)  # type: ignore[arg-type]

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """See `Op.tuning_inputs`."""
        return (draw.normal(rows, self.weight.shape[-1]),)

    def cost(self, load: Workload) -> Cost:
        """Weight bytes once, activations in and out, two operations a multiply-add."""
        n, k = self.weight.shape
        moved = self.weight.nbytes(load.dtype) + load.tokens * (n + k) * load.dtype.itemsize
        return Cost(moved, 2.0 * load.tokens * n * k)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and many, odd sizes, bias, float32 result, each weight format, quantized activations."""
        of = lambda n, k, format="plain", **kw: Linear(placeholder(n, k, format=format), **kw)  # noqa: E731
        rows = lambda t, k: lambda d: (d.normal(t, k),)  # noqa: E731
        quantized = [
            Sample(f, of(160, 256, f), rows(5, 256))
            for f in (
                *("int8_row", "int8_group", "int4_group", "int4_group32", "fp8_block", "fp8_row"),
                *("int8_group32", "int8_group16", "int4_min32", "int8_min16"),
            )
        ]
        return [
            Sample("m1", of(96, 64), rows(1, 64)),
            Sample("m5_bias", of(48, 80, bias=placeholder(48)), rows(5, 80)),
            Sample("m33", of(130, 192), rows(33, 192)),
            Sample("m64_k1024", of(256, 1024), rows(64, 1024)),
            Sample("float32_out", of(16, 128, out_dtype=torch.float32), rows(6, 128)),
            *quantized,
            Sample("fp8_blocks", of(256, 384, "fp8_block"), rows(9, 384)),
            Sample("fp8_ragged", of(200, 320, "fp8_block"), rows(3, 320)),
            Sample(
                "fp8_act",
                of(128, 256, "fp8_block", activation_quant=Quantize("fp8", 128), activation_group=128),
                rows(4, 256),
            ),
            Sample("fp8_row_act", of(96, 256, "fp8_row", activation_quant=Quantize("fp8", 0)), rows(5, 256)),
            Sample("int8_act", of(96, 256, "int8_row", activation_quant=Quantize("int8", 0)), rows(5, 256)),
            *(
                Sample(f"{act}_act_{f}", of(96, 256, f, activation_quant=Quantize(act, 0)), rows(5, 256))
                for act, f in (
                    *(("int8", "int4_group"), ("int8", "int4_row")),
                    *(("int4", "int4_group32"), ("int4", "int4_row")),
                )
            ),
            Sample(
                "mxfp4_act",
                of(96, 256, "mxfp4", activation_quant=Quantize("mxfp4", 32), activation_group=32),
                rows(5, 256),
            ),
        ]


class LMHead(Op, name="lm_head", hot=True):
    """Logits of the selected rows: `float32(x[rows] weight^T)`.

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
        """As for a linear over one row per sequence, assuming that `load.tokens` rows need logits."""
        n, k = self.weight.shape
        return Cost(self.weight.nbytes(load.dtype) + load.tokens * 4 * n, 2.0 * load.tokens * n * k)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """All rows, and the last row of each sequence."""
        op = LMHead(placeholder(101, 64))

        def inputs(logits: int | None, width: int = 64):  # type: ignore[no-untyped-def]  # noqa: ANN202 - returns a lambda
            def draw_inputs(d):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                batch = make_batch(
                    [Query([1], 3, [0], logits), Query([2, 3, 4], 0, [1], logits)], block_tokens=16, device=d.device
                )
                return d.normal(4, width), batch

            return draw_inputs

        return [
            Sample("all", op, inputs(None)),
            Sample("last", op, inputs(1)),
            Sample("int8_group", LMHead(placeholder(101, 64, format="int8_group")), inputs(1)),
            Sample("int4_group32", LMHead(placeholder(101, 64, format="int4_group32")), inputs(None)),
            Sample("int8_group16", LMHead(placeholder(101, 64, format="int8_group16")), inputs(None)),
            Sample("int8_row", LMHead(placeholder(104, 64, format="int8_row")), inputs(1)),
            Sample("int4_group", LMHead(placeholder(104, 256, format="int4_group")), inputs(1, 256)),
        ]


class SiluMul(Op, name="silu_mul"):
    """`y = silu(gate) * up` with `gate, up = x[..., :I], x[..., I:]`, in float32, rounded once.

    Its cost is not counted: it is fused into neighbouring ops wherever speed matters.

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

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Common values, and large ones whose sigmoid saturates."""
        return [
            Sample("t3_i64", SiluMul(), lambda d: (d.normal(3, 128),)),
            Sample("large", SiluMul(), lambda d: (d.normal(5, 96, scale=40.0),)),
        ]


class GatedMLP(Op, name="gated_mlp"):
    """`y = down(silu(gate(x)) * up(x))`, gate and up fused into one matrix. Another activation stands in for SiLU where
    `act` is `activation_mul`.

    Args of the call:
        x: `[T, D]`.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `gate_up` linear D -> 2 I (gate rows first); `down` linear I -> D; `act` the activation function; `reduce`
    sums over ranks.

    Source: SwiGLU, Shazeer, arXiv 2002.05202.
    """

    tolerance = BLOCK
    is_gated_mlp = True
    tunable = True

    gate_up: Linear
    down: Linear
    act: Op = SiluMul()
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.act(self.gate_up(x)))
        return y if self.reduce is None else self.reduce(y)

    def tuning_inputs(self, draw: Draw, rows: int) -> tuple[Any, ...]:
        """See `Op.tuning_inputs`."""
        return self.gate_up.tuning_inputs(draw, rows)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One row and several."""
        op = GatedMLP(Linear(placeholder(192, 64)), Linear(placeholder(64, 96)))
        return [
            Sample("m1", op, lambda d: (d.normal(1, 64),)),
            Sample("m11", op, lambda d: (d.normal(11, 64),)),
        ]
