"""Manifold-constrained hyper-connections: how a block reads one stream made of several, and how they go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from inferplane.ops.draw import Draw
from inferplane.ops.op import ROUNDED, Cost, Op, Sample, Workload, placeholder, values
from inferplane.types import Weight


class Sinkhorn(Op, name="sinkhorn", extension=True):
    """Make matrices doubly stochastic: `m = softmax(logits) + eps` over the last dimension, then `m = m / (columns +
    eps)`, and `iterations - 1` times `m = m / (rows + eps)`, `m = m / (columns + eps)`, where rows are the sums over
    the last dimension and columns those over the one before. In float32.

    The cost is not counted: the matrices are small beside the streams.

    Args of the call:
        logits: float32 `[T, N, N]`.

    Returns:
        float32 `[T, N, N]`.

    Fields: `iterations`, at least 1; `eps`.

    Source: Sinkhorn and Knopp, 1967; as in manifold-constrained hyper-connections, arXiv 2512.24880.
    """

    body_capture_safe = True

    iterations: int
    eps: float

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        m = logits.float().softmax(-1) + self.eps
        m = m / (m.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            m = m / (m.sum(-1, keepdim=True) + self.eps)
            m = m / (m.sum(-2, keepdim=True) + self.eps)
        return m

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One matrix and many, few iterations, other numbers of streams, logits far apart, a large eps."""

        def at(label: str, tokens: int, streams: int, op: Sinkhorn, scale: float = 1.0) -> Sample:
            shape = tokens, streams, streams
            return Sample(label, op, lambda d: (d.normal(*shape, scale=scale, dtype=torch.float32),))

        return [
            at("t1", 1, 4, Sinkhorn(20, 1e-6)),
            at("t33", 33, 4, Sinkhorn(20, 1e-6)),
            at("once", 5, 4, Sinkhorn(1, 1e-6)),
            at("two_streams", 7, 2, Sinkhorn(3, 1e-6)),
            at("three_streams", 6, 3, Sinkhorn(5, 1e-6)),
            at("far_apart", 9, 4, Sinkhorn(20, 1e-6), 8.0),
            at("large_eps", 4, 4, Sinkhorn(6, 0.05)),
        ]


class HyperCollapse(Op, name="hyper_collapse", extension=True):
    """What a block reads of the streams, how its result is added to them, and the logits of how they are mixed.

    `w = fn (x / sqrt(mean(x^2) + norm_eps))` over a token's N D entries, of which the first N belong to `pre`, the next
    N to `post`, and N^2 to `logits`: `pre = sigmoid(w scale[0] + base) + eps`, `post = 2 sigmoid(w scale[1] + base)`,
    `logits = w scale[2] + base`, each with its entries of `base`; `y = sum_n pre[n] x[n]`. In float32, y rounded once.

    Args of the call:
        x: `[T, N, D]`, the streams.

    Returns:
        y `[T, D]` in the dtype of `x`, post float32 `[T, N]`, logits float32 `[T, N, N]`.

    Fields: `fn` float32 `[2 N + N^2, N D]`; `base` float32 `[2 N + N^2]`; `scale` float32 `[3]`; `streams` N;
    `norm_eps`; `eps`.

    Source: manifold-constrained hyper-connections, arXiv 2512.24880; hyper-connections, arXiv 2409.19606.
    """

    body_capture_safe = True

    fn: Weight
    base: Weight
    scale: Weight
    streams: int
    norm_eps: float
    eps: float

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.streams
        sizes = n, n, n * n
        parts = _project(x, self.fn, self.norm_eps).split(sizes, -1)
        bases, scales = values(self.base).split(sizes), values(self.scale)  # type: ignore[arg-type]
        pre, post, mix = (w * scales[i] + b for i, (w, b) in enumerate(zip(parts, bases)))
        return _collapse(x, pre.sigmoid() + self.eps), 2 * post.sigmoid(), mix.unflatten(-1, (n, n))

    def cost(self, load: Workload) -> Cost:
        """Reading the streams once and `fn`, writing one; the product and the sum."""
        return _cost(self.fn, self.streams, load)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token and several, other numbers of streams, an odd width, small values."""
        return [
            Sample("t1", _collapsing(4, 64), _streams(1, 4, 64), "decode"),
            Sample("t13", _collapsing(4, 64), _streams(13, 4, 64)),
            Sample("two_streams", _collapsing(2, 96), _streams(5, 2, 96)),
            Sample("odd_width", _collapsing(3, 45), _streams(6, 3, 45)),
            Sample("small", _collapsing(4, 64), _streams(3, 4, 64, 1e-3)),
            Sample("wide", _collapsing(4, 512), _streams(9, 4, 512, 5.0)),
        ]


class HyperPre(Op, name="hyper_pre", extension=True):
    """What stands before a block: `y, post, logits = collapse(x)`, `mix = sinkhorn(logits)`.

    Args of the call:
        x: `[T, N, D]`, the streams.

    Returns:
        y `[T, D]` in the dtype of `x`, post float32 `[T, N]`, mix float32 `[T, N, N]`.

    Source: manifold-constrained hyper-connections, arXiv 2512.24880.
    """

    collapse: HyperCollapse
    sinkhorn: Sinkhorn

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, post, logits = self.collapse(x)
        return y, post, self.sinkhorn(logits)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token and several, few iterations and many."""
        return [
            Sample("t1", HyperPre(_collapsing(4, 64), Sinkhorn(20, 1e-6)), _streams(1, 4, 64), "decode"),
            Sample("t13", HyperPre(_collapsing(4, 64), Sinkhorn(20, 1e-6)), _streams(13, 4, 64)),
            Sample("two_streams", HyperPre(_collapsing(2, 96), Sinkhorn(3, 1e-6)), _streams(5, 2, 96)),
        ]


class HyperPost(Op, name="hyper_post", extension=True):
    """What stands behind a block: `x'[k] = post[k] y + sum_j mix[j, k] x[j]`, in float32, rounded once.

    Args of the call:
        y: `[T, D]`, the block's result. x: `[T, N, D]`, the streams that it was collapsed from.
        post: float32 `[T, N]`. mix: float32 `[T, N, N]`.

    Returns:
        `[T, N, D]` in the dtype of `x`.

    Fields: `streams` N; `width` D.

    Source: manifold-constrained hyper-connections, arXiv 2512.24880.
    """

    tolerance = ROUNDED
    body_capture_safe = True

    streams: int
    width: int

    def __call__(self, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        mixed = torch.matmul(mix.float().transpose(-1, -2), x.float())
        return (post.float()[..., None] * y.float()[..., None, :] + mixed).to(x.dtype)

    def cost(self, load: Workload) -> Cost:
        """Reading the streams and the block's result, writing the streams."""
        entries = load.tokens * self.width * (2 * self.streams + 1)
        flops = 2.0 * load.tokens * self.width * self.streams * (self.streams + 1)
        return Cost(entries * load.dtype.itemsize, flops)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token and several, other numbers of streams, an odd width; mixes that are not symmetric."""

        def at(label: str, tokens: int, streams: int, width: int) -> Sample:
            def inputs(d: Draw) -> tuple[Any, ...]:
                x, mix = d.normal(tokens, streams, width), d.uniform(tokens, streams, streams)
                return d.normal(tokens, width), x, 2 * d.uniform(tokens, streams), mix

            return Sample(label, HyperPost(streams, width), inputs, "decode" if tokens == 1 else "mixed")

        return [at("t1", 1, 4, 64), at("t13", 13, 4, 64), at("two_streams", 5, 2, 96), at("odd_width", 6, 3, 45)]


class HyperHead(Op, name="hyper_head", extension=True):
    """The streams behind the last layer as one: `w = fn (x / sqrt(mean(x^2) + norm_eps))` over a token's N D entries,
    `y = sum_n (sigmoid(w[n] scale + base[n]) + eps) x[n]`. In float32, rounded once.

    Args of the call:
        x: `[T, N, D]`, the streams.

    Returns:
        `[T, D]` in the dtype of `x`.

    Fields: `fn` float32 `[N, N D]`; `base` float32 `[N]`; `scale` float32 `[1]`; `streams` N; `norm_eps`; `eps`.

    Source: DeepSeek-V4 (transformers' DeepseekV4HyperHead).
    """

    body_capture_safe = True

    fn: Weight
    base: Weight
    scale: Weight
    streams: int
    norm_eps: float
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        w = _project(x, self.fn, self.norm_eps) * values(self.scale) + values(self.base)  # type: ignore[arg-type]
        return _collapse(x, w.sigmoid() + self.eps)

    def cost(self, load: Workload) -> Cost:
        """Reading the streams once and `fn`, writing one; the product and the sum."""
        return _cost(self.fn, self.streams, load)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """One token and several, other numbers of streams, small values."""
        return [
            Sample("t1", collapsing_head(4, 64), _streams(1, 4, 64), "decode"),
            Sample("t13", collapsing_head(4, 64), _streams(13, 4, 64)),
            Sample("two_streams", collapsing_head(2, 96), _streams(5, 2, 96)),
            Sample("small", collapsing_head(3, 45), _streams(6, 3, 45, 1e-3)),
        ]


def _project(x: torch.Tensor, fn: Any, norm_eps: float) -> torch.Tensor:
    """`fn` times a token's normed streams, float32 `[T, rows of fn]`."""
    h = x.flatten(-2).float()
    return F.linear(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + norm_eps), values(fn))


def _collapse(x: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The sum of the streams `[T, N, D]` by factors float32 `[T, N]`."""
    return (pre[..., None] * x.float()).sum(-2).to(x.dtype)


def _cost(fn: Weight, streams: int, load: Workload) -> Cost:
    rows, entries = fn.shape
    moved = load.tokens * (entries + entries // streams) * load.dtype.itemsize + fn.nbytes(load.dtype)
    return Cost(moved, 2.0 * load.tokens * entries * (rows + 1))


def _float32(*shape: int) -> Weight:
    return placeholder(*shape, dtype=torch.float32)


def _collapsing(streams: int, width: int) -> HyperCollapse:
    """A sample's collapse of streams of `width` entries."""
    rows = 2 * streams + streams**2
    return HyperCollapse(_float32(rows, streams * width), _float32(rows), _float32(3), streams, 1e-6, 1e-6)


def collapsing(streams: int, width: int) -> HyperPre:
    """A sample's op before a block, of streams of `width` entries."""
    return HyperPre(_collapsing(streams, width), Sinkhorn(20, 1e-6))


def collapsing_head(streams: int, width: int) -> HyperHead:
    """A sample's head of streams of `width` entries."""
    return HyperHead(_float32(streams, streams * width), _float32(streams), _float32(1), streams, 1e-6, 1e-6)


def _streams(tokens: int, streams: int, width: int, scale: float = 1.0) -> Any:
    return lambda d: (d.normal(tokens, streams, width, scale=scale),)
