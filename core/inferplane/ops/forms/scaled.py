"""Embedding and output head of models that multiply their results by a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.basic import Embedding
from inferplane.ops.collective import AllReduce
from inferplane.ops.linear import LMHead
from inferplane.ops.op import ACCUMULATED, ROUNDED, Op, Sample, extension, placeholder, values
from inferplane.types import Batch, Weight


class ScaledEmbedding(Op, name="scaled_embedding", extension=True):
    """`y = embed(ids) * factor`, rounded once.

    Args of the call:
        ids: int64 `[T]`.

    Returns:
        `[T, D]` in the plan's dtype.

    Fields: `embed`; `factor`.

    Source: the multiplier of Granite's embedding (transformers' GraniteConfig); Gemma, arXiv 2403.08295.
    """

    tolerance = ROUNDED

    embed: Embedding
    factor: float

    @property
    def weight(self) -> Weight:
        """The embedding's weight, `[V, D]`."""
        return self.embed.weight

    @property
    def reduce(self) -> AllReduce | None:
        """The sum over ranks, or None."""
        return self.embed.reduce

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) * self.factor

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One and several tokens, factors above and below 1."""
        at = lambda factor: ScaledEmbedding(Embedding(placeholder(97, 64)), factor)  # noqa: E731
        return [
            Sample("t1", at(12.0), lambda d: (d.ints(1, below=97),)),
            Sample("t7", at(0.3), lambda d: (d.ints(7, below=97),)),
        ]


class ScaledHead(Op, name="scaled_head", extension=True):
    """Logits times a number, then softly capped: `y = head(x, batch) * factor`, and `cap * tanh(y / cap)` with a cap.
    With `bias` it is added to the logits first.

    Args of the call:
        x: `[T, D]` after the final norm.
        batch: its `logit_rows` `[R]` selects rows; None takes all.

    Returns:
        float32 `[R, V]` (this rank's columns under vocabulary sharding).

    Fields: `head`; `factor`; `cap` the bound of the logits' size, or None; `bias` `[V]` or None.

    Source: the scales of Cohere's and Granite's logits (transformers' CohereConfig, GraniteConfig); the cap of Gemma 2,
    arXiv 2408.00118; biases of heads as in Phi-3.5-MoE (transformers' PhimoeConfig).
    """

    tolerance = ACCUMULATED

    head: LMHead
    factor: float = 1.0
    cap: float | None = None
    bias: Weight | None = extension(None)

    @property
    def weight(self) -> Weight:
        """The head's weight, `[V, D]`."""
        return self.head.weight

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = self.head(x, batch)
        if self.bias is not None:
            logits = logits + values(self.bias)  # type: ignore[arg-type]
        logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """All rows and the last of each sequence, with a factor, with a cap and with a bias."""
        every, last = LMHead.samples()[:2]
        head = LMHead(placeholder(101, 64))
        return [
            Sample("factor", ScaledHead(head, 0.0625), last.inputs, "decode"),
            Sample("cap", ScaledHead(head, 1.0, 2.0), every.inputs, "decode"),
            Sample("both", ScaledHead(head, 3.0, 1.5), every.inputs, "decode"),
            Sample("bias", ScaledHead(head, bias=placeholder(101)), last.inputs, "decode"),
        ]
