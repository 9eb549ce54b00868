"""The draft layer of EAGLE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm
from inferplane.ops.collective import AllGather
from inferplane.ops.forms.scaled import ScaledEmbedding
from inferplane.ops.linear import GatedMLP, Linear, LMHead
from inferplane.ops.op import BLOCK, Op, Sample, extension, placeholder
from inferplane.types import Batch, KVCache, LayerKV, Weight


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


class Eagle3Layer(Op, name="eagle3_layer"):
    """EAGLE-3: from a state at i and token i+1, the state at i+1 and the logits of token i+2.

    `e = embed_norm(embed(ids)); g = hidden_norm(hidden); x = hidden + attn([e | g]); x = x + mlp(mlp_norm(x));
    logits = head(norm(x))`. Row i has the id of token i+1, the state of token i, and position i. The first state
    of a draft is `fc` of three layers' hidden states, which the model computes (`CausalLM.fuse`); later ones are this
    layer's own results. With `adds_normed`, g takes the place of `hidden` in the sum.

    Args of the call:
        hidden: `[T, D]`. batch: the step; `ids` are shifted by one. kv: this layer's own cache, changed.

    Returns:
        logits float32 `[R, V]` in the model's vocabulary, a row's least one for tokens that the head lacks; the
        states `[T, D]`.

    Fields: `fc` linear 3 D -> D, which the model calls; `taps` the layers before which it reads hidden states;
    `offsets` int64 `[V']`: what the head's token i is, less i, None if its vocabulary is the model's; `vocab` is V.

    Source: EAGLE-3, arXiv 2503.01840.
    """

    tolerance = BLOCK

    embed: Embedding | ScaledEmbedding
    fc: Linear
    embed_norm: RMSNorm
    hidden_norm: RMSNorm
    attn: GQABlock
    mlp_norm: AddRMSNorm
    mlp: GatedMLP
    norm: AddRMSNorm
    head: LMHead
    offsets: Weight | None
    vocab: int
    taps: tuple[int, ...]
    adds_normed: bool = False

    def __call__(self, hidden: torch.Tensor, batch: Batch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.hidden_norm(hidden)
        x = self.attn(torch.cat((self.embed_norm(self.embed(batch.ids)), normed), -1), batch, kv)
        h, residual = self.mlp_norm(x, normed if self.adds_normed else hidden)
        y, state = self.norm(self.mlp(h), residual)
        logits = self.head(y, batch)
        if self.offsets is None:
            return logits, state
        offsets: Any = self.offsets
        ids = (torch.arange(logits.shape[1], device=logits.device) + offsets).long().clamp(0, self.vocab - 1)
        least = logits.amin(-1, keepdim=True).expand(-1, self.vocab)
        return least.index_copy(1, ids, logits), state

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One sample around the smallest attention block, whose queries, keys and values read 2 D columns; the head has
        every third token of 97."""
        inner = GQABlock.samples()[0]
        attn: GQABlock = inner.op  # type: ignore[assignment]
        rows, width = attn.qkv.weight.shape
        rms = lambda: RMSNorm(placeholder(width), 1e-6)  # noqa: E731
        op = Eagle3Layer(
            Embedding(placeholder(97, width)),
            Linear(placeholder(width, 3 * width)),
            rms(),
            rms(),
            replace(attn, qkv=Linear(placeholder(rows, 2 * width))),
            AddRMSNorm(rms()),
            GatedMLP.samples()[0].op,  # type: ignore[arg-type]
            AddRMSNorm(rms()),
            LMHead(placeholder(32, width)),
            Weight((), (32,), torch.int64, make=lambda: 2 * torch.arange(32)),
            97,
            (0, 1, 2),
        )
        return [replace(inner, label="gqa", op=op)]


def run_with_taps(
    layers: Sequence[Any],
    taps: Sequence[int],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    batch: Batch,
    cache: KVCache,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Run the layers of a stack as `DecoderStack` does; returns x, residual, and the hidden states before the layers
    `taps` side by side, `[T, len(taps) D]`.
    """
    places: Sequence[Any] = cache.by_layer or tuple(zip(cache.layers, cache.tables or (0,) * len(layers)))
    tapped = []
    for number, (layer, (held, table)) in enumerate(zip(layers, places)):
        if number in taps:
            tapped.append(x if residual is None else x + residual)
        x, residual = layer(x, residual, batch.for_table(table), held)
    return x, residual, torch.cat(tapped, -1)
