"""A layer on several residual streams, and what stands before and behind all layers: embedding and final norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.ops.attention import GQABlock
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm
from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw
from inferplane.ops.hash_moe import HashMoE
from inferplane.ops.hyper.connections import HyperHead, HyperPost, HyperPre, collapsing, collapsing_head
from inferplane.ops.linear import GatedMLP
from inferplane.ops.mla import MLABlock
from inferplane.ops.moe import MoE
from inferplane.ops.op import BLOCK, EXACT, Cost, Op, Sample, Workload, placeholder
from inferplane.types import Batch, Weight


class StreamEmbedding(Op, name="stream_embedding", extension=True):
    """A token's embedding, once for each residual stream: `y[t, n] = embed(ids)[t]`.

    Args of the call:
        ids: int64 `[T]`.

    Returns:
        `[T, N, D]` in the plan's dtype.

    Fields: `embed`; `streams` N.

    Source: hyper-connections, arXiv 2409.19606.
    """

    tolerance = EXACT
    body_capture_safe = True

    embed: Embedding
    streams: int

    @property
    def weight(self) -> Weight:
        """The embedding's weight, `[V, D]`."""
        return self.embed.weight

    @property
    def reduce(self) -> AllReduce | None:
        """The sum over ranks, or None."""
        return self.embed.reduce

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)[:, None].repeat(1, self.streams, 1)

    def cost(self, load: Workload) -> Cost:
        """That of the embedding, and writing the streams."""
        written = load.tokens * self.streams * self.weight.shape[1] * load.dtype.itemsize
        return self.embed.cost(load) + Cost(written)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One and several tokens."""
        at = lambda streams: StreamEmbedding(Embedding(placeholder(97, 64)), streams)  # noqa: E731
        return [
            Sample("t1", at(4), lambda d: (d.ints(1, below=97),)),
            Sample("t7", at(3), lambda d: (d.ints(7, below=97),)),
        ]


class HyperNorm(Op, name="hyper_norm", extension=True):
    """The norm behind the layers: `return norm(head(x)), x`.

    Args of the call:
        x: `[T, N, D]`, the streams. residual: None; streams have no residual beside them.

    Returns:
        The normed hidden states `[T, D]`, and the streams as they are, `[T, N, D]`.

    Fields: `head` makes one of the streams; `norm` adds nothing: its residual is None.

    Source: DeepSeek-V4 (transformers' DeepseekV4Model).
    """

    head: HyperHead
    norm: AddRMSNorm

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        y, _ = self.norm(self.head(x), None)
        return y, x

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token and several."""
        at = lambda n, d: HyperNorm(collapsing_head(n, d), AddRMSNorm(RMSNorm(placeholder(d), 1e-6)))  # noqa: E731
        return [
            Sample("t1", at(4, 64), lambda d: (d.normal(1, 4, 64), None), "decode"),
            Sample("t9", at(3, 96), lambda d: (d.normal(9, 3, 96), None)),
        ]


class HyperLayer(Op, name="hyper_layer", extension=True):
    """A transformer layer with hyper-connections, whose hidden state is N residual streams a token.

    `h, post, mix = attn_pre(x); x = attn_post(attn(attn_norm(h)), x, post, mix);
    h, post, mix = mlp_pre(x); return mlp_post(mlp(mlp_norm(h)), x, post, mix), None`.

    Args of the call:
        x: `[T, N, D]`, the streams. residual: None: nothing is left to add. batch: the step. kv: the layer's cache,
            changed.

    Returns:
        The streams `[T, N, D]`, and None.

    Fields: `attn_norm` and `mlp_norm` add nothing: their residual is None; `reads_ids` whether the MLP reads the
    step's token ids too, as `hash_moe` does.

    Source: manifold-constrained hyper-connections, arXiv 2512.24880; DeepSeek-V4 (transformers'
    DeepseekV4DecoderLayer).
    """

    tolerance = BLOCK

    attn_pre: HyperPre
    attn_norm: AddRMSNorm
    attn: Any
    attn_post: HyperPost
    mlp_pre: HyperPre
    mlp_norm: AddRMSNorm
    mlp: GatedMLP | MoE | HashMoE
    mlp_post: HyperPost
    reads_ids: bool = False

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: Any
    ) -> tuple[torch.Tensor, None]:
        h, post, mix = self.attn_pre(x)
        h, _ = self.attn_norm(h, None)
        x = self.attn_post(self.attn(h, batch, kv), x, post, mix)
        h, post, mix = self.mlp_pre(x)
        h, _ = self.mlp_norm(h, None)
        h = self.mlp(h, batch.ids) if self.reads_ids else self.mlp(h)  # type: ignore[call-arg]
        return self.mlp_post(h, x, post, mix), None

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Grouped and latent attention in decode and mixed steps, an MLP and experts that token ids choose."""
        out = []
        for label, block, mlp in (
            ("gqa_decode", GQABlock, GatedMLP.samples()[0].op),
            ("gqa_mixed", GQABlock, HashMoE.samples()[0].op),
            ("mla_decode", MLABlock, HashMoE.samples()[0].op),
        ):
            like = next(s for s in block.samples() if s.label == label[4:])

            def inputs(d: Draw, like: Sample = like) -> tuple[Any, ...]:
                h, batch, kv = like.inputs(d)
                return d.normal(h.shape[0], 4, 64), None, batch, kv

            norm = lambda: AddRMSNorm(RMSNorm(placeholder(64), 1e-6))  # noqa: E731
            pre, post = lambda: collapsing(4, 64), HyperPost(4, 64)
            op = HyperLayer(pre(), norm(), like.op, post, pre(), norm(), mlp, post, isinstance(mlp, HashMoE))  # type: ignore[arg-type]
            out.append(Sample(label, op, inputs, like.step_kind))
        return out
