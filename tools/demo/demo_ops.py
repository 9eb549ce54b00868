"""Differentiable pieces of the demo model, written for training on a CPU.

Shapes: B sequences, T positions, N = B * T rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def quarter_turn(width: int) -> Tensor:
    """The matrix that maps every neighbouring pair (a, b) of a row to (-b, a), [width, width] float32."""
    turn = torch.zeros(width, width)
    even = torch.arange(0, width, 2)
    turn[even, even + 1] = 1.0
    turn[even + 1, even] = -1.0
    return turn


def rotate(x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, rope_dim]; pairs are neighbours (2i, 2i + 1), as in DeepSeek's code.

    The turn of each pair is a product with a constant matrix: that is exact, and much faster on a CPU than
    strided slices.
    """
    turned = (x.reshape(-1, x.shape[-1]) @ turn.to(x.dtype)).view_as(x)  # two-dimensional: a batched one is slow
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


class _CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(width), causal) v for q, k [G, T, width] and v [G, T, v_width].

    At training's short contexts plain products are several times faster on a CPU than torch's fused attention,
    above all backwards; the backward is written out to keep every gradient in the layout of its tensor.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[1]
        mask = torch.full((t, t), -math.inf, dtype=q.dtype).triu(1)
        p = torch.baddbmm(mask, q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, p = ctx.saved_tensors
        d_p = torch.bmm(grad, v.mT)
        d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype) * q.shape[-1] ** -0.5
        return torch.bmm(d_s, k), torch.bmm(d_s.mT, q), torch.bmm(p.mT, grad)


@torch.compiler.disable
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k [G, T, width], v [G, T, v_width] -> [G, T, v_width]; the scale is 1 / sqrt(width), as there is no YaRN."""
    return _CausalAttention.apply(q, k, v)


class _Gather(torch.autograd.Function):
    """See `gather_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = place.numel() // x.shape[0]
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(-1, ctx.k, grad.shape[-1]).sum(1), None, None


class _Pick(torch.autograd.Function):
    """See `pick_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = x.shape[0]
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[-1]).index_copy_(0, place, grad), None


class _HeadLoss(torch.autograd.Function):
    """See `head_loss`; the gradients are made on the way forward."""

    CHUNK = 512

    @staticmethod
    def forward(ctx: Any, states: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
        head = embed.to(states.dtype)
        d_states, d_embed = torch.empty_like(states), torch.zeros_like(embed)
        total = torch.zeros(())
        for first in range(0, states.shape[0], _HeadLoss.CHUNK):
            rows = states[first : first + _HeadLoss.CHUNK]
            p = (rows @ head.t()).softmax(-1)
            flat = torch.arange(rows.shape[0]) * p.shape[1] + targets[first : first + _HeadLoss.CHUNK]
            hit = p.view(-1)[flat]
            total -= hit.float().clamp_min(1e-30).log().sum()
            p.view(-1)[flat] = hit - 1
            d_states[first : first + _HeadLoss.CHUNK] = p @ head
            d_embed += p.t() @ rows
        ctx.save_for_backward(d_states, d_embed)
        return total / states.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        d_states, d_embed = ctx.saved_tensors
        grad = grad / d_states.shape[0]
        return d_states * grad.to(d_states.dtype), d_embed * grad, None


def gather_rows(x: Tensor, source: Tensor, place: Tensor) -> Tensor:
    """Rows of x [N, D] -> [P, D], each row k times, in expert order; the backward is a gather too, not a scatter.

    `source` [P] is the row of x at each place (padding places repeat row 0), `place` [N * k] where row n's j-th
    copy went.
    """
    return _Gather.apply(x, source, place)


def pick_rows(x: Tensor, place: Tensor) -> Tensor:
    """Rows `place` [M] of x [P, D], each at most once; the backward leaves zeros at the padding places."""
    return _Pick.apply(x, place)


@torch.compiler.disable
def head_loss(states: Tensor, embed: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of states [N, D] under the tied head [V, D] for targets [N].

    Never holds more than one chunk of logits, and these in the dtype of the states: on a CPU that is what a large
    part of training is bound by.
    """
    return _HeadLoss.apply(states, embed, targets)
