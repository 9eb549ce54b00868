"""Multi-token prediction on several residual streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm
from inferplane.ops.collective import AllGather
from inferplane.ops.draw import Draw
from inferplane.ops.forms.scaled import ScaledEmbedding
from inferplane.ops.hyper.connections import collapsing_head
from inferplane.ops.hyper.layer import HyperLayer, HyperNorm
from inferplane.ops.linear import Linear, LMHead
from inferplane.ops.op import BLOCK, Op, Sample, placeholder
from inferplane.types import Batch, LayerKV


class HyperMTPLayer(Op, name="hyper_mtp_layer", extension=True):
    """Multi-token prediction with hyper-connections: from the streams at i and token i+1, those that predict token i+2.

    `x[n] = h_proj(hnorm(hidden[n])) + e_proj(enorm(embed(ids))); x = layer(x); logits = head(norm(x))`. Row i has the
    id of token i+1, the main model's streams of token i behind its last layer, and position i.

    Args of the call:
        hidden: `[T, N D]`, the main model's (or the previous MTP step's) streams, side by side.
        batch: the step; `ids` are shifted by one. kv: this layer's own cache, changed.

    Returns:
        logits float32 `[R, V]` and the streams `[T, N D]`.

    Fields: `norm` has a head of its own, which makes one of the streams; `gather` joins the ranks' columns of the
    logits under vocabulary sharding; `streams` N.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; hyper-connections, arXiv 2512.24880; names and order as in
    DeepSeek-V4's published checkpoints.
    """

    tolerance = BLOCK

    embed: Embedding | ScaledEmbedding
    enorm: RMSNorm
    hnorm: RMSNorm
    e_proj: Linear
    h_proj: Linear
    layer: HyperLayer
    norm: HyperNorm
    head: LMHead
    streams: int
    gather: AllGather | None = None

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        each = hidden.unflatten(-1, (self.streams, -1))
        own = self.h_proj(self.hnorm(each).flatten(0, 1)).view_as(each)
        x, residual = self.layer(own + self.e_proj(self.enorm(self.embed(batch.ids)))[:, None], None, batch, kv)
        y, x = self.norm(x, residual)
        logits = self.head(y, batch)
        return logits if self.gather is None else self.gather(logits), x.flatten(1)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One sample around the smallest layer."""
        like = HyperLayer.samples()[0]
        rms = lambda: RMSNorm(placeholder(64), 1e-6)  # noqa: E731
        vocab = placeholder(97, 64)
        op = HyperMTPLayer(
            Embedding(vocab),
            rms(),
            rms(),
            Linear(placeholder(64, 64)),
            Linear(placeholder(64, 64)),
            like.op,  # type: ignore[arg-type]
            HyperNorm(collapsing_head(4, 64), AddRMSNorm(rms())),
            LMHead(vocab),
            4,
        )

        def inputs(d: Draw) -> tuple[Any, ...]:
            x, _, batch, kv = like.inputs(d)
            return x.flatten(1), batch, kv

        return [Sample("gqa", op, inputs, like.step_kind)]
