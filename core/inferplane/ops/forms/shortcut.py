"""Halves of layers whose experts stand beside what follows them: a shortcut from the first half's attention to the end
of the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, RMSNorm
from inferplane.ops.draw import Draw
from inferplane.ops.linear import GatedMLP
from inferplane.ops.mla import MLABlock
from inferplane.ops.moe import MoE
from inferplane.ops.op import BLOCK, Op, Sample, placeholder
from inferplane.types import Batch, Weight


class ShortcutLayer(Op, name="shortcut_layer", extension=True):
    """A half of a layer: attention and an MLP. The first half has experts beside its MLP, whose result is added at the
    end of the second half, so that they may be computed at any time until then.

    First half: `h, r = attn_norm(x, residual); h, r = mlp_norm(attn(h), r); return mlp(h), [r | experts(h)]`.
    Second half, with `[r | s] = residual`: `h, r = attn_norm(x, r); h, r = mlp_norm(attn(h), r); return mlp(h), r + s`.

    Args of the call:
        x: `[T, D]`. residual: `[T, D]` or None in the first layer, of a second half `[T, 2 D]`. batch: the step.
        kv: the half's cache, changed.

    Returns:
        x, `[T, D]`, and residual, `[T, 2 D]` of a first half and `[T, D]` of a second.

    Fields: `experts` of the first half; None: it is the second.

    Source: LongCat-Flash, arXiv 2509.01322; shortcut-connected experts, arXiv 2404.05019.
    """

    tolerance = BLOCK

    attn_norm: AddRMSNorm
    attn: GQABlock | MLABlock
    mlp_norm: AddRMSNorm
    mlp: GatedMLP
    experts: MoE | None = None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shortcut = None
        if self.experts is None and residual is not None:
            residual, shortcut = residual.chunk(2, -1)
        h, residual = self.attn_norm(x, residual)
        h, residual = self.mlp_norm(self.attn(h, batch, kv), residual)
        if self.experts is not None:
            residual = torch.cat((residual, self.experts(h)), -1)
        elif shortcut is not None:
            residual = residual + shortcut
        return self.mlp(h), residual

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Both halves, decode and mixed steps; the first layer of a model; experts that return what they read."""
        mlp, moe = GatedMLP.samples()[0].op, MoE.samples()[0].op
        # The bias alone selects experts: if rounding changed an expert, no tolerance could cover the difference.
        decided = Weight((), (8,), torch.float32, make=lambda: torch.arange(8.0) * 10)
        assert isinstance(moe, MoE)
        moe = replace(moe, route=replace(moe.route, bias=decided), shared=None)

        def sample(label: str, like: str, experts: MoE | None, *, first: bool = False) -> Sample:
            block = next(s for s in MLABlock.samples() if s.label == like)
            norm = lambda: AddRMSNorm(RMSNorm(placeholder(64), 1e-6))  # noqa: E731
            op: Any = ShortcutLayer(norm(), block.op, norm(), mlp, experts)  # type: ignore[arg-type]
            width = 128 if experts is None else 64

            def inputs(d: Draw) -> tuple[Any, ...]:
                x, batch, kv = block.inputs(d)
                return x, None if first else d.normal(x.shape[0], width), batch, kv

            return Sample(label, op, inputs, block.step_kind)

        return [
            sample("first_decode", "decode", moe),
            sample("first_mixed", "mixed", moe),
            sample("second_decode", "decode", None),
            sample("second_mixed", "mixed", None),
            sample("first_of_all", "decode", moe, first=True),
        ]
