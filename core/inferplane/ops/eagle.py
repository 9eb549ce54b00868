"""The draft layer of EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm
from inferplane.ops.collective import AllGather
from inferplane.ops.forms.scaled import ScaledEmbedding
from inferplane.ops.linear import GatedMLP, Linear, LMHead
from inferplane.ops.op import BLOCK, Op, Sample, extension, placeholder
from inferplane.types import Batch, LayerKV


class EagleLayer(Op, name="eagle_layer"):
    """EAGLE-1: from the hidden state at i and token i+1, the hidden state at i+1, which predicts token i+2.

    `x = fc([embed(ids) | hidden]); x = x + attn(x); x = x + mlp(mlp_norm(x)); logits = head(x)`. Row i has the id
    of token i+1, the target's hidden state of token i after its final norm, and position i. No norm precedes the
    attention or the head: the result approximates the target's hidden state after the target's final norm.

    Args of the call:
        hidden: `[T, D]`, the target's hidden states, or this layer's results of the previous draft.
        batch: the step; `ids` are shifted by one. kv: this layer's own cache, changed.

    Returns:
        logits float32 `[R, V]` and the next hidden states `[T, D]`.

    Fields: `gather` joins the ranks' columns of the logits under vocabulary sharding.

    Source: EAGLE, arXiv 2401.15077.
    """

    tolerance = BLOCK

    embed: Embedding | ScaledEmbedding
    fc: Linear
    attn: GQABlock
    mlp_norm: AddRMSNorm
    mlp: GatedMLP
    head: LMHead
    gather: AllGather | None = extension(None)

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((self.embed(batch.ids), hidden), -1))
        h, residual = self.mlp_norm(self.attn(x, batch, kv), x)
        x = self.mlp(h) + residual
        logits = self.head(x, batch)
        return logits if self.gather is None else self.gather(logits), x

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One sample around the smallest attention block."""
        inner = GQABlock.samples()[0]
        vocab = placeholder(97, 64)
        op = EagleLayer(
            Embedding(vocab),
            Linear(placeholder(64, 128)),
            inner.op,  # type: ignore[arg-type]
            AddRMSNorm(RMSNorm(placeholder(64), 1e-6)),
            GatedMLP.samples()[0].op,  # type: ignore[arg-type]
            LMHead(vocab),
        )
        return [replace(inner, label="gqa", op=op)]
