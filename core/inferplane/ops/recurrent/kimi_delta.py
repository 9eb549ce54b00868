"""Kimi Delta Attention: a mixer whose state forgets each channel of its keys at a rate of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Sequences
from inferplane.ops.linear import Linear
from inferplane.ops.op import BLOCK, Op, Sample, placeholder
from inferplane.ops.recurrent.conv import CausalConv1d
from inferplane.ops.recurrent.delta_rule import DeltaRuleGates, GatedDeltaRule
from inferplane.ops.recurrent.mixers import (
    DECODE,
    MIXED,
    SAMPLE_EPS,
    list_convolution_inputs,
    mixer_sample,
    slow_rates,
    sum_over_ranks,
)
from inferplane.ops.recurrent.norm import GatedRMSNorm
from inferplane.types import Batch, StateTensor


class KimiDeltaAttention(Op, name="kimi_delta_attention", extension=True):
    """A linear attention: project, convolve q, k and v, apply the delta rule with a decay by channel, norm with a gate,
    project back. Decay and gate are projected through a low rank.

    `q, k, v = split(conv(qkv(x))); f, g = split(fg_a(x)); decay, beta = gates(f_b(f), b(x));
    return o(norm(rule(q, k, v, decay, beta), g_b(g)))`.

    Args of the call:
        x: `[T, D]`. batch: the step.
        conv_state: `[B, 3 H K, k - 1]` in the plan's dtype. state: float32 `[B, H, K, K]`.

    Returns:
        y, `[T, D]` in the dtype of `x` (padded rows are undefined), and both states after the step. No argument is
        changed.

    Fields: `qkv` linear D -> 3 H K; `fg_a` linear D -> 2 R, of all ranks alike; `b` linear D -> H; `f_b` and `g_b`
    linear R -> H K; `o` linear H K -> D; `heads` H of this rank; `dim` K; `reduce` sums over ranks.

    Source: Kimi Linear, arXiv 2510.26692.
    """

    tolerance = BLOCK
    is_kimi_delta_attention = True

    qkv: Linear
    fg_a: Linear
    b: Linear
    f_b: Linear
    g_b: Linear
    conv: CausalConv1d
    gates: DeltaRuleGates
    rule: GatedDeltaRule
    norm: GatedRMSNorm
    o: Linear
    heads: int
    dim: int
    reduce: AllReduce | None = None

    def __call__(
        self, x: torch.Tensor, batch: Batch, conv_state: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed, conv_state = self.conv(self.qkv(x), batch, conv_state)
        f, g = self.fg_a(x).chunk(2, 1)
        decay, beta = self.gates(self.f_b(f), self.b(x))
        q, k, v = (t.unflatten(1, (self.heads, self.dim)) for t in mixed.chunk(3, 1))
        y, state = self.rule(q, k, v, decay, beta, batch, state)
        y = self.o(self.norm(y, self.g_b(g).unflatten(1, (self.heads, self.dim))).flatten(1))
        return sum_over_ranks(y, self.reduce), conv_state, state

    def list_states(self) -> tuple[StateTensor, ...]:
        """What it keeps of a sequence: the states of its call, in order."""
        return list_convolution_inputs(self.conv), StateTensor((self.heads, self.dim, self.dim))

    def list_inputs(self) -> tuple[Linear, ...]:
        """The linear layers that read its input."""
        return (self.qkv, self.fg_a, self.b)

    @property
    def width(self) -> int:
        """Entries of a row of its inputs and results."""
        return self.qkv.weight.shape[1]

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps; an odd number of heads, and a rank that is not the heads' size."""

        def sample(label: str, sequences: Sequences, heads: int = 2, dim: int = 32, rank: int = 32) -> Sample:
            inner, width = heads * dim, 64
            op = KimiDeltaAttention(
                qkv=Linear(placeholder(3 * inner, width)),
                fg_a=Linear(placeholder(2 * rank, width)),
                b=Linear(placeholder(heads, width)),
                f_b=Linear(placeholder(inner, rank)),
                g_b=Linear(placeholder(inner, rank)),
                conv=CausalConv1d(placeholder(3 * inner, 4)),
                gates=DeltaRuleGates(slow_rates(heads), placeholder(inner, dtype=torch.float32), True),
                rule=GatedDeltaRule((heads, heads), (dim, dim), True),
                norm=GatedRMSNorm(placeholder(dim), SAMPLE_EPS, act="sigmoid"),
                o=Linear(placeholder(width, inner)),
                heads=heads,
                dim=dim,
            )
            return mixer_sample(label, op, sequences)

        return [
            sample("decode", DECODE),
            sample("mixed", MIXED),
            sample("odd_decode", DECODE, 3, 16, 24),
            sample("odd_mixed", MIXED, 3, 16, 24),
        ]
